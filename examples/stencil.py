# SPDX-License-Identifier: Apache-2.0
"""Patterns of a chemical reaction: a fused CUDA stencil in a jitted loop, and its derivative.

Two substances diffuse and react (Gray and Scott's model). One step is ten operations on two fields, each of
which reads and writes all of the memory; the kernel reads each field once and writes it once. On the CPU
the same step runs in JAX, and that is what the kernel is compared with on a GPU.

    python examples/stencil.py [--size 256] [--steps 4000]
"""

import argparse
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import jaxbridge

SOURCE = r"""
extern "C" __global__ void gray_scott(const float* u, const float* v, float feed, float kill,
                                      float* u_next, float* v_next, int n, int m) {
  int j = blockIdx.x * blockDim.x + threadIdx.x, i = blockIdx.y * blockDim.y + threadIdx.y;
  if (i >= n || j >= m) return;
  int up = (i + n - 1) % n * m + j, down = (i + 1) % n * m + j;
  int left = i * m + (j + m - 1) % m, right = i * m + (j + 1) % m, at = i * m + j;
  float a = u[at], b = v[at], reacting = a * b * b;
  float du = u[up] + u[down] + u[left] + u[right] - 4 * a;
  float dv = v[up] + v[down] + v[left] + v[right] - 4 * b;
  u_next[at] = a + 0.16f * du - reacting + feed * (1 - a);
  v_next[at] = b + 0.08f * dv + reacting - (feed + kill) * b;
}
"""
kernel = jaxbridge.cuda_kernel(
    SOURCE,
    "gray_scott",
    signature="u: float[n, m], v: float[n, m], feed: float, kill: float, "
    "out u_next: float[n, m], out v_next: float[n, m], n: int, m: int",
    grid=("(m + 31) // 32", "(n + 7) // 8"),
    block=(32, 8),
)


def in_jax(u, v, feed, kill):
    """The same step of JAX's own operations."""

    def laplacian(x):
        return sum(jnp.roll(x, s, axis) for s in (1, -1) for axis in (0, 1)) - 4 * x

    reacting = u * v * v
    return (
        u + 0.16 * laplacian(u) - reacting + feed * (1 - u),
        v + 0.08 * laplacian(v) + reacting - (feed + kill) * v,
    )


@partial(jax.custom_jvp, nondiff_argnums=(2, 3))
def step(u, v, feed, kill):
    """One step: the kernel on CUDA, JAX's operations elsewhere."""
    return jax.lax.platform_dependent(
        u,
        v,
        cuda=partial(kernel, feed=feed, kill=kill),
        default=partial(in_jax, feed=feed, kill=kill),
    )


@step.defjvp
def _(feed, kill, primals, tangents):
    _, out = jax.jvp(partial(in_jax, feed=feed, kill=kill), primals, tangents)
    return step(*primals, feed, kill), out


@partial(jax.jit, static_argnames=("steps", "one_step"))
def simulate(u, v, steps, one_step=step, feed=0.037, kill=0.06):
    def body(_, fields):
        return one_step(*fields, feed, kill)

    return jax.lax.fori_loop(0, steps, body, (u, v))


def seconds(*args, **kwargs):
    jax.block_until_ready(simulate(*args, **kwargs))
    start = time.perf_counter()
    out = jax.block_until_ready(simulate(*args, **kwargs))
    return out, time.perf_counter() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--steps", type=int, default=4000)
    options = parser.parse_args()

    v = np.zeros((options.size,) * 2, np.float32)
    middle = slice(options.size * 3 // 8, options.size * 5 // 8)
    v[middle, middle] = 0.5
    v += 0.02 * np.random.default_rng(0).random(v.shape, np.float32)
    u, v = jnp.asarray(1 - v), jnp.asarray(v)

    (_, pattern), fused = seconds(u, v, options.steps)
    _, plain = seconds(u, v, options.steps, in_jax)
    where = jax.devices()[0].device_kind
    print(
        f"{where}: {fused:.3f} s, of JAX's operations {plain:.3f} s ({kernel.stats()['calls']} launches)"
    )
    few = min(options.steps, 100)  # a pattern depends on the last digit of its beginning
    error = jnp.abs(simulate(u, v, few)[1] - simulate(u, v, few, in_jax)[1]).max()
    print(f"largest difference after {few} steps: {error:.1e}")

    gradient = jax.grad(lambda u: step(*step(u, v, 0.037, 0.06), 0.037, 0.06)[1].sum())(u)
    print(f"derivative of two steps: {jnp.linalg.norm(gradient):.4f}")
    for row in np.asarray(pattern)[:: max(options.size // 24, 1), :: max(options.size // 64, 1)]:
        print("".join(" .:-=+*#%@"[min(int(30 * x), 9)] for x in row))


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Images from a part of their frequencies: an FFT that is not JAX's, differentiated and batched.

NumPy's FFT on the CPU, CuPy's on a GPU, in one linear operator with its transpose. Three images with
few bright points are measured at 40 % of their frequencies, at random. Gradient steps on the misfit, each
followed by a shrinkage towards zero, bring the points back; `vmap` of the whole solver does all at once.

    python examples/fourier.py [--size 64] [--steps 200] [--platform cpu|cuda]
"""

import argparse
import functools

import jax
import jax.numpy as jnp
import numpy as np

import jaxbridge


def on_cpu(x, out):
    out[...] = np.fft.fft2(x, norm="ortho")


def on_cuda(x, out):
    import cupy

    out[...] = cupy.fft.fft2(x, norm="ortho")


# Both transform the last two axes, and so take a batch as it comes.
fft2 = jaxbridge.call(
    {"cpu": on_cpu, "cuda": on_cuda}, lambda x: x, out=-1, vmap_method="broadcast_all", name="fft2"
)
fft2.deflinear(fft2)  # its matrix is symmetric


def misfit(image, measured, where):
    error = jnp.where(where, fft2(image.astype(measured.dtype)) - measured, 0)
    return 0.5 * jnp.sum(jnp.abs(error) ** 2)


@functools.partial(jax.jit, static_argnames="steps")
def restore(measured, where, steps):
    def step(_, image):
        image = image - jax.grad(misfit)(image, measured, where)
        return jnp.sign(image) * jnp.maximum(jnp.abs(image) - 0.02, 0)

    return jax.lax.fori_loop(0, steps, step, jnp.zeros(measured.shape, jnp.float32))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--platform", choices=["cpu", "cuda"])
    options = parser.parse_args()
    device = jax.devices(options.platform)[0]

    rng = np.random.default_rng(0)
    n = options.size
    images = np.zeros((3, n, n), np.float32)
    for image in images:
        image.flat[rng.choice(n * n, n * n // 50, replace=False)] = 1
    where = rng.random((n, n)) < 0.4
    measured = np.where(where, np.fft.fft2(images, norm="ortho"), 0).astype(np.complex64)

    measured, where = jax.device_put((measured, where), device)
    restored = jax.vmap(restore, (0, None, None))(measured, where, options.steps)
    alone = restore(measured[0], where, options.steps)
    if not np.allclose(restored[0], alone, atol=1e-4):
        raise SystemExit("one of the batch is not what it is alone")
    start = jnp.fft.ifft2(measured, norm="ortho").real
    before, after = (
        float(np.linalg.norm(np.asarray(x) - images) / np.linalg.norm(images))
        for x in (start, restored)
    )
    print(
        f"{len(images)} images of {n} x {n} on {device.platform}:{device.id}, {fft2.stats()['calls']} FFTs"
    )
    print(f"relative error: {before:.3f} before, {after:.3f} after {options.steps} steps")
    if after > before / 2:
        raise SystemExit("the images were not restored")


if __name__ == "__main__":
    main()

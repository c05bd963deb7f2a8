# SPDX-License-Identifier: Apache-2.0
"""Letter K of the acceptance cases on a GPU: vmap, derivatives, transposes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbridge
from gpu_cases import like

pytestmark = pytest.mark.gpu


WAVES = r"""
#include <cupy/complex.cuh>
extern "C" __global__
void waves(const complex<float>* source, const float* points, complex<float>* out, int n, int m, int k,
           float sign) {
  int at = blockIdx.x * blockDim.x + threadIdx.x, batch = blockIdx.y;
  if (at >= k) return;
  source += (long)batch * n * m;
  float x = sign * points[(long)batch * k + at];
  complex<float> sum = 0;
  for (int i = 0; i < n; i++)
    for (int j = 0; j < m; j++)
      sum += source[i * m + j] * exp(complex<float>(0, x * (i + 2 * j)));
  out[(long)batch * k + at] = sum;
}
"""


def at_points(xp, source, points, sign):
    """Sums of waves at points."""
    waves = xp.arange(source.shape[-2])[:, None] + 2 * xp.arange(source.shape[-1])
    phases = xp.exp(1j * sign * points[..., None, None] * waves)
    return (source[..., None, :, :] * phases).sum((-1, -2)).astype("complex64")


def on_gpu(cp, method):
    kernel = cp.RawKernel(WAVES, "waves")

    def run(source, points, sign):
        *batch, n, m = source.shape
        k = points.shape[-1]
        count = int(np.prod(batch))
        out = cp.empty((count, k), cp.complex64)
        args = (source, points, out, n, m, k, np.float32(sign))
        kernel(((k + 31) // 32, count), (32,), args)
        return out.reshape(*batch, k)

    spec = lambda source, points, sign: jax.ShapeDtypeStruct(points.shape, source.dtype)
    return jaxbridge.call(run, spec, framework="cupy", vmap_method=method)


@pytest.mark.parametrize("method", ["sequential", "broadcast_all"])
def test_K06_batched_over_points_and_over_sources_together(cp, gpu, method):
    rng = np.random.default_rng(0)
    sources = (rng.random((3, 10, 11)) + 1j * rng.random((3, 10, 11))).astype(np.complex64)
    points = rng.random((5, 4), np.float32)
    transform = on_gpu(cp, method)
    f = lambda s, p: transform(s, p, 1)
    on = [jax.device_put(a, gpu) for a in (sources, points)]
    got = jax.jit(jax.vmap(jax.vmap(f, (None, 0)), (0, None)))(*on)
    want = [[at_points(np, s, p, 1) for p in points] for s in sources]
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("sign", [1, -1])
def test_K07_static_options_are_those_of_the_cpu(cp, gpu, sign):
    rng = np.random.default_rng(0)
    source = (rng.random((10, 11)) + 1j * rng.random((10, 11))).astype(np.complex64)
    points = rng.random(4, np.float32)
    got = on_gpu(cp, None)(*(jax.device_put(a, gpu) for a in (source, points)), sign)
    np.testing.assert_allclose(got, at_points(np, source, points, sign), rtol=1e-4, atol=1e-3)


def test_K11_the_backward_pass_has_the_forward_shapes(cp, gpu):
    forward = lambda x, w: (x * w).sum(-1)
    backward = lambda x, w, ct: (ct[..., None] * w, (ct[..., None] * x).sum((0, 1, 2)))
    f = jaxbridge.call(forward, lambda x, w: jax.ShapeDtypeStruct(x.shape[:-1], x.dtype))
    b = jaxbridge.call(backward, lambda x, w, ct: (x, w))
    f.defvjp(lambda x, w: (f(x, w), (x, w)), lambda r, ct: b(*r, ct))
    rng = np.random.default_rng(0)
    x = jax.device_put(rng.random((16, 128, 2, 4), np.float32), gpu)
    w = jax.device_put(rng.random(4, np.float32), gpu)
    loss = lambda g: lambda x, w: jnp.sum(jnp.sin(g(x, w)))
    got = jax.jit(jax.grad(loss(f), (0, 1)))(x, w)
    for a, b in zip(got, jax.grad(loss(forward), (0, 1))(x, w), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3)


@pytest.mark.filterwarnings("ignore:.*pmap:DeprecationWarning")
def test_K12_a_loop_is_always_possible(cp, gpu):
    f = jaxbridge.call(lambda x: cp.sort(x)[::-1], like, vmap_method="sequential")
    x = jax.device_put(np.random.default_rng(0).random((1, 3, 5), np.float32), gpu)
    want = np.sort(x, -1)[..., ::-1]
    np.testing.assert_array_equal(jax.vmap(jax.vmap(f))(x), want)
    np.testing.assert_array_equal(jax.pmap(jax.vmap(f), devices=[gpu])(x), want)

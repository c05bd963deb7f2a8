# SPDX-License-Identifier: Apache-2.0
"""state= on a real device: plans, handles and modules."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbridge

N = 1 << 12


def like(x, *rest, **kw):
    return x


@pytest.mark.parametrize("graph", ["off", "replay", "xla"])
def test_a_plan_of_cufft(needs, graph):
    needs("cupy")
    import cupyx.scipy.fft as cufft

    made = []

    def plan(context, v):
        assert (context.platform, context.device) == ("cuda", 0) and not context.capturing
        import cupy

        made.append(v)
        return cufft.get_fft_plan(cupy.empty(v.shape, v.dtype))

    def fn(v, *, state):
        assert state is not None
        return cufft.fft(v, plan=state)

    f = jaxbridge.call(fn, like, graph=graph, state=plan, name=f"test.cufft.{graph}")
    program = jax.jit(lambda v: f(f(f(v))))
    for k in range(6):
        v = (np.arange(N) % 7 + k).astype(np.complex64)
        want = np.fft.fft(np.fft.fft(np.fft.fft(v)))
        np.testing.assert_allclose(
            program(jnp.asarray(v)), want, rtol=1e-3, atol=1e-3 * np.abs(want).max()
        )
    assert made == [jax.ShapeDtypeStruct((N,), jnp.complex64)]
    program(jnp.zeros(N, jnp.complex64))
    jax.jit(f)(jnp.zeros(64, jnp.complex64)).block_until_ready()
    assert len(made) == 2  # another shape


@pytest.mark.parametrize("graph", ["off", "replay"])
def test_a_module_of_torch(needs, graph):
    needs("torch")
    import torch

    refs = []

    def make(context, v):
        with torch.random.fork_rng(devices=[context.device]):
            torch.manual_seed(0)
            module = torch.nn.Linear(64, 64).to(f"cuda:{context.device}").eval()
        refs.append(weakref.ref(module))
        return module

    def fn(v, *, state):
        with torch.no_grad():
            return state(v)

    f = jaxbridge.call(
        fn, like, framework="torch", graph=graph, state=make, name=f"test.linear.{graph}"
    )
    program = jax.jit(f)
    for k in range(6):
        v = jnp.full((8, 64), float(k), jnp.float32)
        got = np.asarray(program(v))
        module = refs[0]()
        with torch.no_grad():
            want = module(torch.full((8, 64), float(k), device="cuda")).cpu().numpy()
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)
        del module
    assert len(refs) == 1
    f.clear()
    gc.collect()
    assert refs[0]() is None
    program(jnp.ones((8, 64), jnp.float32)).block_until_ready()
    assert len(refs) == 2

# SPDX-License-Identifier: Apache-2.0
"""Public failures with mutation, aliasing and donation: letter D of the acceptance cases, on the CPU.

On a GPU: tests/gpu/test_cases_d_gpu.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbridge
from interchange import Only, memory
from jaxbridge import _compat, _core

needs_updates = pytest.mark.skipif(
    _compat.jax_version < (0, 8, 3), reason="JAX before 0.8.3 updates a copy of memory of the host"
)


@pytest.mark.parametrize("versioned", [True, False])
def test_D03_what_comes_in_by_a_capsule_can_be_written_to(versioned):
    block = memory(16, np.dtype("f4"))

    class Old(Only):
        """DLPack from before 1.0: no read-only flag."""

        def __dlpack__(self, stream=None):
            return block.__dlpack__()

        def __dlpack_device__(self):
            return 1, 0

    source = block if versioned else Old(block)
    if _compat.jax_version >= (0, 8, 3):
        r = jaxbridge.ref(source)
        jax.jit(lambda r: r.__setitem__(0, 50.0))(r)
        with jaxbridge.borrow(r, "view") as v:
            out = np.from_dlpack(v)
            assert out.flags.writeable
            out[1] = 60
    # Into memory of JAX's own it is read-only, and says so.
    shared = np.from_dlpack(jaxbridge.view(jaxbridge.from_external(source)))
    assert not shared.flags.writeable
    if _compat.jax_version >= (0, 8, 3):
        assert block[:2].tolist() == [50, 60]


@pytest.mark.parametrize("size", [100, 4])
@pytest.mark.parametrize("aligned", [True, False])
def test_D06_shared_or_copied_as_it_says(size, aligned):
    x = jaxbridge.empty(size + 1, np.float32)[0 if aligned else 1 :][:size]
    x[...] = np.arange(size)
    if aligned:
        y = jaxbridge.from_external(x, copy=False)
        x[0] = 77
        assert y[0] == 77
    else:
        with pytest.raises(BufferError, match="no multiple of 64"):
            jaxbridge.from_external(x, copy=False)
        y = jaxbridge.from_external(x)
        x[0] = 77
        assert y[0] == 0
    z = jaxbridge.from_external(x, copy=True)
    x[0] = 99
    assert z[0] == 77


def test_D07_a_copy_shares_nothing_with_its_source():
    block = memory(16, np.dtype("f4"))
    x = jaxbridge.from_external(block, copy=False)
    y = jaxbridge.from_external(x, copy=True)
    z = jaxbridge.to_external(x, "numpy", copy=True)
    want = block.copy()
    if _compat.jax_version >= (0, 8, 3):
        jaxbridge.inplace(lambda v: v + 1)(block)
        np.testing.assert_array_equal(block, want + 1)
    else:
        block += 1
    np.testing.assert_array_equal(y, want)
    np.testing.assert_array_equal(z, want)


def test_D08_one_memory_as_two_operands():
    def add(a, b):
        a += b

    f = jaxbridge.call(add, lambda a, b: a, inout={0: 0})
    x = jnp.arange(10.0)
    # JAX's own array: XLA makes one of the two a copy.
    np.testing.assert_array_equal(jax.jit(f)(x, x), 2 * np.arange(10))
    np.testing.assert_array_equal(jax.jit(f, donate_argnums=0)(x + 0, x), 2 * np.arange(10))
    if _compat.jax_version < (0, 8, 3):
        return
    block = memory(16, np.dtype("f4"))
    want = block.copy()
    ref, array = jaxbridge.ref(block), jaxbridge.from_external(block, copy=False)
    g = jaxbridge.call(add, None)
    with pytest.raises(jax.errors.JaxRuntimeError, match="are in the same memory"):
        g(ref, array)
    part = jaxbridge.from_external(block[:8], copy=False)
    h = jaxbridge.call(lambda a, b: None, None)
    with pytest.raises(jax.errors.JaxRuntimeError, match="are in the same memory"):
        h(jaxbridge.ref(block), part)
    np.testing.assert_array_equal(block, want)


@needs_updates
def test_D09_both_sides_agree_over_many_steps():
    block = memory(16, np.dtype("f4"))
    block[...] = 0
    r = jaxbridge.ref(block)
    step = jax.jit(lambda r: r.__setitem__(..., r[...] + 1))
    for i in range(200):
        step(r)
        assert jaxbridge.pointer(r) == block.ctypes.data
        if i % 50 == 0:
            with jaxbridge.borrow(r, "numpy") as t1:
                t1[0] += 100
    with jaxbridge.borrow(r, "numpy"):
        assert block[0] == 600 and block[1] == 200
    assert r[0] == 600


@needs_updates
def test_D12_a_solver_whose_direction_is_operand_and_result():
    """Conjugate gradients: d = z + beta d, with d both read and updated."""
    rng = np.random.default_rng(0)
    m = rng.standard_normal((16, 16)).astype(np.float32)
    a = m @ m.T + 16 * np.eye(16, dtype=np.float32)
    b = rng.standard_normal(16).astype(np.float32)

    def direction(d, z, beta, d_again):
        d[...] = z + beta * d_again

    update = jaxbridge.call(direction, lambda d, z, beta, d_again: d, inout={0: 0})

    def solve(d0):
        def body(_, c):
            x, r, d = c
            ad = a @ d
            alpha = (r @ r) / (d @ ad)
            x, new = x + alpha * d, r - alpha * ad
            beta = (new @ new) / (r @ r)
            return x, new, update(d, new, beta, d)

        return jax.lax.fori_loop(0, 16, body, (jnp.zeros(16), d0, d0))

    block = memory(16, np.dtype("f4"))
    block[...] = b
    step = jaxbridge.inplace(lambda d: (solve(d)[2], solve(d)[0]), has_aux=True)
    x = step(block)
    np.testing.assert_allclose(a @ x, b, atol=1e-3)
    assert np.abs(block).max() < 1e-2


@pytest.mark.skipif(
    _compat.jax_version < (0, 11, 2), reason="XLA takes a second array before JAX 0.11.2"
)
def test_D13_updates_in_place_need_no_memory():
    size = 1 << 22
    block = jaxbridge.empty(size, np.float32)
    block[...] = 1
    seen = []

    def add(x, y):
        seen.append(x.ctypes.data)
        x += y

    f = jaxbridge.call(add, None)
    r = jaxbridge.ref(block)

    @jax.jit
    def program(r):
        r[...] = r[...] * 2
        total = jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] + r[0]), (0, 0.0))
        # XLA itself would take a second array for an update by what the loop has computed.
        f(r, total[1])

    used = program.lower(r).compile().memory_analysis()
    assert used.temp_size_in_bytes < 1 << 16
    for _ in range(2):
        program(r)
    with jaxbridge.borrow(r, "numpy") as x:
        assert x[0] == x[-1] == 8 * 8
        assert seen == [x.ctypes.data] * 2 == [block.ctypes.data] * 2
    assert _core.live_imports(block.ctypes.data) == 1

# SPDX-License-Identifier: Apache-2.0
"""`release`: what it waits for, whom it lets go, and what it says where it cannot."""

import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbridge
from interchange import is_dead, memory
from jaxbridge import _core, _imports


def test_release_lets_the_owner_go():
    block = memory(16, np.dtype("f4"))
    owner = weakref.ref(block.base)
    array = jaxbridge.from_external(block, copy=False)
    total = jax.jit(jnp.sum)(array)
    address = block.ctypes.data
    del block
    assert _core.live_imports(address) == 1
    assert owner() is not None
    jaxbridge.release(array)
    assert _core.live_imports(address) == 0
    assert is_dead(owner)
    with pytest.raises(RuntimeError, match="deleted"):
        array + 1
    assert float(total) == float(np.arange(1, 17).__mod__(8).sum())


def long_program(of, steps=300, device=None):
    """A program that takes long on the CPU, and goes on when its call has returned."""
    at = jax.sharding.SingleDeviceSharding(device or jax.devices("cpu")[0])

    def run(v):
        return jax.lax.fori_loop(0, steps, lambda i, a: jnp.sin(a + 1e-3 * i), v) + of(v)

    return jax.jit(run).lower(jax.ShapeDtypeStruct((100_000,), "f4", sharding=at)).compile()


def test_release_waits_for_a_program_that_reads_the_array():
    block = memory(100_000, np.dtype("f4"))
    owner = weakref.ref(block.base)
    array = jaxbridge.from_external(block, copy=False)
    del block
    program = long_program(lambda v: v)
    want = np.asarray(program(array))
    out = program(array)
    jaxbridge.release(array)
    assert is_dead(owner) and out.is_ready()
    np.testing.assert_array_equal(out, want)


def test_release_waits_for_no_other_program():
    block = memory(16, np.dtype("f4"))
    owner = weakref.ref(block.base)
    array = jaxbridge.from_external(block, copy=False)
    del block
    released = threading.Event()

    def wait(v):
        assert released.wait(30)
        return np.asarray(v)

    waiting = jax.jit(lambda v: jax.pure_callback(wait, jax.ShapeDtypeStruct((4,), "f4"), v[:4]))
    waiting.lower(jax.ShapeDtypeStruct((100_000,), "f4")).compile()
    out = waiting(long_program(lambda v: v)(jnp.ones(100_000)))
    jaxbridge.release(array)
    assert is_dead(owner) and not out.is_ready()
    released.set()
    jax.block_until_ready(out)


def test_release_inside_of_a_program_while_another_one_reads_the_array():
    block = memory(100_000, np.dtype("f4"))
    owner = weakref.ref(block.base)
    second = jax.devices("cpu")[1]
    array = jaxbridge.from_external(block, copy=False)
    del block
    reader, before = long_program(lambda v: v, 2000), long_program(lambda v: v, device=second)
    held, found = [array], []

    def release(v):
        jaxbridge.release(held.pop())
        found.append(is_dead(owner))
        return np.asarray(v)

    shape = jax.ShapeDtypeStruct((4,), "f4")
    inside = jax.jit(lambda v: jax.pure_callback(release, shape, v[:4]))
    given = jax.device_put(jnp.ones(100_000), second)
    inside.lower(given).compile()
    read = reader(array)
    # It begins when that is computed, in a thread of XLA's, and long before the other one ends.
    jax.block_until_ready(inside(before(given)))
    assert found == [True] and array.is_deleted() and read.is_ready()


def test_release_says_who_still_has_it(monkeypatch):
    monkeypatch.setattr(_imports, "_patience", 0.05)
    block = memory(16, np.dtype("f4"))
    array = jaxbridge.from_external(block, copy=False)
    out = jaxbridge.to_external(array, "numpy")
    with pytest.raises(RuntimeError, match="a consumer that it was handed to"):
        jaxbridge.release(array)
    del out
    assert _core.live_imports(block.ctypes.data) == 0


def test_release_of_what_is_jaxs_own():
    for x in (jnp.ones(3), jaxbridge.from_external(memory(4, np.dtype("f4")), copy=True)[::1]):
        if _core.live_imports(x.unsafe_buffer_pointer()) == 0:
            with pytest.raises(ValueError, match="JAX's own"):
                jaxbridge.release(x)
            assert not x.is_deleted()
    with pytest.raises(TypeError, match="that from_external made"):
        jaxbridge.release(np.ones(3))


def test_release_takes_the_very_import(monkeypatch):
    """Others of the same memory, and what JAX made itself, are not mistaken for it."""
    monkeypatch.setattr(_imports, "_patience", 0.05)
    own = jnp.arange(16.0)
    shared = jaxbridge.from_external(jaxbridge.view(own))
    for x in (own, shared[:4], jax.jit(lambda v: v + 1)(shared)):
        with pytest.raises(ValueError, match="the very array with which from_external shares"):
            jaxbridge.release(x)
        assert not x.is_deleted()
    jaxbridge.release(shared)
    with pytest.raises(ValueError, match="was released, or deleted"):
        jaxbridge.release(shared)
    block = memory(16, np.dtype("f4"))
    first, second = (jaxbridge.from_external(block, copy=False) for _ in range(2))
    consumer = jaxbridge.to_external(first, "numpy")
    del second  # another import of the memory ends meanwhile
    with pytest.raises(RuntimeError, match="still in use"):
        jaxbridge.release(first)
    np.testing.assert_array_equal(consumer, block)


def test_two_imports_of_one_memory_are_two():
    block = memory(16, np.dtype("f4"))
    a, b = (jaxbridge.from_external(block, copy=False) for _ in range(2))
    assert _core.live_imports(block.ctypes.data) == 2
    jaxbridge.release(a)
    np.testing.assert_array_equal(b, block)
    assert _core.live_imports(block.ctypes.data) == 1

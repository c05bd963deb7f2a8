# SPDX-License-Identifier: Apache-2.0
"""Native functions that get memory of others: a `jax.Ref` of `jaxbridge.ref`."""

import ctypes

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbridge
from jaxbridge import _compat
from native_libraries import built
from test_memory import needs_updates, owned

XlaError = jax.errors.JaxRuntimeError
_kinds = ("load", "ffi", "bind")


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def ops():
    return jaxbridge.load(built("ops.cpp", "libops"))


@pytest.fixture(scope="module")
def bumps(ops):
    """A function that adds 1 to its argument, of each kind."""
    handler = ctypes.CDLL(ops.path).jaxbridge_ffi_axpy_cpu
    jax.ffi.register_ffi_target("test_native_memory.axpy", jax.ffi.pycapsule(handler), "cpu")
    axpy = jaxbridge.ffi("test_native_memory.axpy", None)
    plain = ctypes.CDLL(str(built("plain.c", "plain")))
    return {
        "load": ops.bump,
        "ffi": lambda ref: axpy(jnp.ones(ref.shape, jnp.float32), ref, a=np.float32(1)),
        "bind": jaxbridge.bind(plain.bump, "inout x: float32[n], n: int32"),
    }


@needs_updates
def test_a_library_gets_the_memory_itself(ops):
    block = owned()
    r = jaxbridge.ref(block)
    assert ops.bump(r) == block.ctypes.data
    assert jax.jit(ops.bump)(r) == block.ctypes.data
    assert jax.jit(ops.place)(r) == block.ctypes.data  # only read

    @jax.jit
    def loop(r):
        r[...] = 2 * r[...]
        return jax.lax.scan(lambda c, _: (c, ops.bump(r)), 0, None, length=3)[1]

    assert set(loop(r).tolist()) == {block.ctypes.data}
    np.testing.assert_array_equal(block, 2 * (np.arange(8) + 2) + 3)


@needs_updates
@pytest.mark.parametrize("kind", _kinds)
def test_in_order_with_other_uses(bumps, kind):
    block = owned()
    bump = bumps[kind]

    @jax.jit
    def program(r):
        bump(r)
        r[...] = 2 * r[...]
        bump(r)
        return r[...]

    r = jaxbridge.ref(block)
    np.testing.assert_array_equal(program(r), 2 * np.arange(8) + 3)
    bump(r)
    np.testing.assert_array_equal(block, 2 * np.arange(8) + 4)


@needs_updates
@pytest.mark.parametrize("kind", _kinds)
def test_a_copy_that_xla_made_is_an_error(bumps, kind):
    block = owned()
    r = jaxbridge.ref(block)
    held = jaxbridge.view(_compat.ref_array(r))  # on the CPU JAX takes other memory then
    with pytest.raises(XlaError, match=r"argument ('x'|1) is a Ref of another library's memory"):
        bumps[kind](r)
    np.testing.assert_array_equal(block, np.arange(8))
    assert held.pointer == block.ctypes.data


@needs_updates
def test_one_memory_twice_is_an_error(ops):
    block = owned()
    for other in (jaxbridge.ref(block), jaxbridge.from_external(block, copy=False)):
        with pytest.raises(XlaError, match=r"axpy: argument 'y' and .*'x' are in the same memory"):
            ops.axpy(other, jaxbridge.ref(block), 1)
    np.testing.assert_array_equal(block, np.arange(8))


def test_refs_of_jax_are_not_checked(ops):
    text = jax.jit(ops.bump).lower(jax.new_ref(jnp.ones(4, jnp.float32))).as_text()
    assert "check_external" not in text and text.count("custom_call @jaxbridge.native") == 1


def test_eager_calls_with_a_ref_are_compiled_once(ops):
    r = jax.new_ref(jnp.ones(5, jnp.float32))
    ops.bump(r)
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **kw: compiled.append(event) if "backend_compile" in event else None
    )
    ops.bump(r)
    assert not compiled
    np.testing.assert_array_equal(r[...], 3)

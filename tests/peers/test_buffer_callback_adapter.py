# SPDX-License-Identifier: Apache-2.0
"""The adapter beyond what JAX's own tests of buffer_callback look at."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import buffer_callback_adapter as adapter

F32 = jax.ShapeDtypeStruct((4,), jnp.float32)


@pytest.fixture
def x():
    return jnp.arange(4, dtype=jnp.float32)


def test_trees_keywords_and_numbers(x):
    def callback(ctx, out, tree, n, *, extra):
        assert n.shape == () and n.ndim == 0
        np.asarray(out["sum"])[...] = np.asarray(tree["a"]) + np.asarray(extra[0])
        np.asarray(out["n"])[...] = np.asarray(n) * 2

    f = adapter.buffer_callback(callback, {"sum": F32, "n": jax.ShapeDtypeStruct((), jnp.int32)})
    y = jax.jit(lambda v: f({"a": v}, 3, extra=(v,)))(x)
    np.testing.assert_array_equal(y["sum"], 2 * np.arange(4))
    assert y["n"] == 6


def test_alias_is_writable_as_result_alone(x):
    def callback(ctx, out, a, b):
        first, second = out
        assert (a.writeable, b.writeable) == (False, False)
        assert first.writeable and second.writeable
        assert not np.asarray(b).flags.writeable
        assert np.asarray(second).ctypes.data == np.asarray(b).ctypes.data
        np.asarray(first)[...] = np.asarray(a) + np.asarray(b)
        np.asarray(second)[...] += 1

    f = adapter.buffer_callback(callback, (F32, F32), input_output_aliases={1: 1})
    total, updated = f(x, x)
    np.testing.assert_array_equal(total, 2 * np.arange(4))
    np.testing.assert_array_equal(updated, np.arange(4) + 1)
    np.testing.assert_array_equal(x, np.arange(4))


@pytest.mark.parametrize("alias, text", [({1: 0}, "input index 1"), ({0: 2}, "output index 2")])
def test_alias_out_of_range(x, alias, text):
    f = adapter.buffer_callback(lambda *_: None, F32, input_output_aliases=alias)
    with pytest.raises(ValueError, match=text):
        f(x)


def test_returned_value_is_refused(x):
    f = adapter.buffer_callback(lambda ctx, out, a: 1, F32)
    with pytest.raises(ValueError, match="must not return any values"):
        f(x)


def test_calls_of_one_callback_are_one_program(x):
    f = adapter.buffer_callback(lambda ctx, out, a: None, F32)
    first, second = (jax.jit(lambda v: f(v)).lower(x).as_text() for _ in range(2))
    assert "jaxbridge.call" in first and first == second


def test_a_side_effect_is_kept_and_nothing_else(x):
    def program(keep):
        f = adapter.buffer_callback(lambda ctx, out, a: None, F32, has_side_effect=keep)
        before = adapter.runs
        jax.jit(lambda v: (f(v), v)[1])(x).block_until_ready()
        jax.effects_barrier()
        return adapter.runs - before

    assert program(True) == 1
    assert program(False) == 0


def test_dtypes_without_a_text_of_numpys(x):
    def callback(ctx, out, a):
        assert np.asarray(a).dtype == jnp.bfloat16
        np.asarray(out)[...] = np.asarray(a)

    v = x.astype(jnp.bfloat16)
    y = adapter.buffer_callback(callback, jax.ShapeDtypeStruct(v.shape, v.dtype))(v)
    np.testing.assert_array_equal(y, v)

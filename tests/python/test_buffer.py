# SPDX-License-Identifier: Apache-2.0
"""framework="buffer": what NumPy and the buffer protocol make of a buffer on the CPU."""

import warnings

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxbridge
from jaxbridge import _core, _plan, _views

WITH_A_TEXT = [
    "bool",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
]
WITHOUT = ["bfloat16", "float8_e4m3fn", "float8_e5m2"]
SHAPES = [(), (3,), (2, 3), (0, 2), (2, 1, 3)]


def run(look, value):
    """Calls `look(argument, result)` with two buffers; returns the result."""
    f = jaxbridge.call(lambda a, *, out: look(a, out), lambda a: a, framework="buffer", out="out")
    return f(value)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", WITH_A_TEXT + WITHOUT)
def test_asarray_is_the_memory(dtype, shape, x64):
    value = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(jnp.dtype(dtype))

    def look(a, out):
        x, y = np.asarray(a), np.asarray(out)
        for array in (x, y):
            assert (array.shape, array.dtype.type) == (shape, value.dtype.type)
        assert (x.flags.writeable, y.flags.writeable) == (False, True)
        if value.size:
            assert x.ctypes.data == a.pointer
            assert y.ctypes.data == out.pointer
        y[...] = x

    np.testing.assert_array_equal(run(look, value), value)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_asarray_converts_and_copies(dtype):
    def look(a, out):
        assert np.asarray(a, np.float64).dtype == np.float64
        assert np.array(a, copy=True).flags.owndata
        assert not np.array(a, copy=False).flags.owndata
        np.asarray(out)[...] = 0

    run(look, jnp.ones(3, dtype))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", WITH_A_TEXT)
def test_memoryview_has_shape_and_format(dtype, shape, x64):
    value = np.ones(shape, dtype)

    def look(a, out):
        view, want = memoryview(a), memoryview(value)
        for name in ("shape", "itemsize", "nbytes", "ndim", "c_contiguous"):
            assert getattr(view, name) == getattr(want, name)
        assert (view.readonly, memoryview(out).readonly) == (True, False)
        assert view.tobytes() == bytes(a) == value.tobytes()
        np.asarray(out)[...] = 0

    run(look, value)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int4"])
def test_who_asks_for_bytes_gets_bytes(dtype):
    def look(a, out):
        assert np.frombuffer(a, np.uint8).shape == (a.nbytes,)
        np.frombuffer(out, np.uint8)[...] = np.frombuffer(a, np.uint8)

    y = run(look, jnp.ones(4, dtype))
    np.testing.assert_array_equal(y, np.ones(4))


def test_what_has_no_text_or_no_array_says_so():
    def bfloat16(a, out):
        with pytest.raises(BufferError, match=r"no text for this dtype; use numpy\.asarray"):
            memoryview(a)

    def int4(a, out):
        with pytest.raises(TypeError, match="less than a byte are packed"):
            np.asarray(a)

    run(bfloat16, jnp.ones(2, jnp.bfloat16))
    run(int4, jnp.ones(2, jnp.int4))


def test_a_buffer_that_is_kept_is_found():
    kept = []
    with pytest.raises(jaxbridge.errors.ViewKeptError, match="argument 0"):
        run(lambda a, out: kept.append(np.asarray(a)), jnp.ones(3))
    kept.clear()
    jax.clear_caches()


def test_a_buffer_that_has_ended_is_no_array():
    kept = []
    with pytest.raises(jaxbridge.errors.ViewKeptError):
        run(lambda a, out: kept.append(a), jnp.ones(3))
    for use in (np.asarray, memoryview, lambda b: b.pointer):
        with pytest.raises((ValueError, TypeError, BufferError), match="a call that has ended"):
            use(kept[0])


# ---- the classes of the core, used directly ------------------------------------------------------


@pytest.mark.parametrize("bound", [_core.Buffer, _core.Target])
def test_the_cores_classes_have_no_subclasses(bound):
    with pytest.raises(TypeError):
        type("Sub", (bound,), {})


def test_a_buffer_that_no_call_made():
    empty = _core.Buffer.__new__(_core.Buffer)
    with pytest.raises(BufferError, match="not made by a call"):
        memoryview(empty)
    for use in (repr, np.asarray, lambda b: b.pointer, lambda b: b.__dlpack__(), lambda b: b.shape):
        with pytest.raises(Exception, match=r".+"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            use(empty)


def test_a_target_that_was_not_made():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for target in (None, _core.Target.__new__(_core.Target)):
            with pytest.raises(TypeError):
                _core.register(1, target)
    assert not _core.registered(1)


def test_the_end_of_a_plan_may_clear_the_plans():
    f = jaxbridge.call(lambda v: v + 1, lambda v: v)
    targets = []
    ended = []

    class End:
        def __del__(self):
            ended.append(self)
            for target in targets:
                target.clear_plans()

    def target(*, make=_core.Target, **how):
        targets.append(make(**how))
        return targets[-1]

    def finisher(*args, make=_plan.finisher):
        end, finish = End(), make(*args)
        return lambda *a: (end, finish(*a))[1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_core, "Target", target)
        patch.setattr(_plan, "finisher", finisher)
        program = jax.jit(f)
        for n in range(1, 70):  # more than are kept
            assert program(jnp.zeros(n)).shape == (n,)
        targets[0].clear_plans()
    assert len(ended) == 69
    assert program(jnp.zeros(3)).shape == (3,)


def test_dtypes_by_name():
    table = _views.dtype_table(_core.dtype_names())
    assert all(dtype.name == name for name, dtype in table.items())
    # ml_dtypes has these in its newer releases alone.
    assert set(_core.dtype_names()) - set(table) <= {"int1", "uint1"}
    for name in ("bool", "bfloat16", "float8_e4m3fn", "int4", "complex64"):
        assert table[name] == jnp.zeros((), name).dtype
    assert table["bfloat16"].type is ml_dtypes.bfloat16

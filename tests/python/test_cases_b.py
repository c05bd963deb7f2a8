# SPDX-License-Identifier: Apache-2.0
"""Public failures with dtypes of results: B10 to B12 of the acceptance cases."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbridge
from jaxbridge import errors


@pytest.mark.parametrize("dtype", ["float64", "int64", "uint64", "complex128"])
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_B10_wide_results_with_x64_off(dtype, jit):
    """One rule for all entry points: the declared dtype arrives, or tracing fails."""
    spec = jax.ShapeDtypeStruct((5,), np.dtype(dtype))
    ran = []

    def fn():
        ran.append(1)
        return np.ones(5, dtype)

    def by_out(out):
        ran.append(1)
        out[...] = 1

    narrow = {"float64": "float32", "int64": "int32", "uint64": "uint32", "complex128": "complex64"}
    text = rf"declared as {dtype}.*jax_enable_x64.*declare {narrow[dtype]}"
    for f in (
        jaxbridge.call(fn, spec),
        jaxbridge.call(fn, {"a": [spec]}),
        jaxbridge.call(by_out, spec, out=0),
        jaxbridge.call(fn, spec, framework="buffer"),
        jaxbridge.function(result=spec)(fn),
    ):
        with pytest.raises(TypeError, match=text):
            (jax.jit(f) if jit else f)()
        with pytest.raises(TypeError, match=text):
            jax.eval_shape(f)
    assert not ran


@pytest.mark.parametrize("dtype", ["float64", "int64", "uint64", "complex128"])
def test_B10_wide_results_with_x64_on(dtype, x64):
    spec = jax.ShapeDtypeStruct((5,), np.dtype(dtype))
    value = np.array([2**53 - 1, 2**40 + 1, 3, 4, 5]).astype(dtype)
    for f in (
        jaxbridge.call(lambda: value, spec),
        jaxbridge.call(lambda out: np.copyto(out, value), spec, out=0),
    ):
        for y in (f(), jax.jit(f)()):
            assert y.dtype == dtype
            np.testing.assert_array_equal(y, value)


def test_B10_wide_operands_with_x64_off():
    """NumPy's become JAX's dtypes as everywhere in JAX; integers that do not fit are refused."""
    seen = []

    def fn(v):
        seen.append(v.dtype.name)
        return v.copy()

    f = jaxbridge.call(fn, lambda v: v)
    for dtype, narrow in [("float64", "float32"), ("int64", "int32"), ("complex128", "complex64")]:
        for program in (f, jax.jit(lambda v: f(v))):
            y = program(np.array([1, -2], dtype))
            assert seen[-1] == y.dtype == narrow
            np.testing.assert_array_equal(y, [1, -2])
    too_big = np.array([1, 2**40])
    count = len(seen)
    for program in (
        lambda: f(too_big),
        lambda: jax.jit(lambda: f(too_big))(),
        lambda: f(too_big[1]),
    ):
        with pytest.raises(TypeError, match=r"argument 0 has values that do not fit int32.*x64"):
            program()
    with pytest.raises(TypeError, match="argument 0 has values that do not fit uint32"):
        f(np.uint64(2**40))
    assert len(seen) == count


@pytest.mark.parametrize(
    "value, expected, got",
    [
        (np.zeros(2), "float32[2]", "float64[2]"),
        (np.zeros(3, "f4"), "float32[2]", "float32[3]"),
        (np.zeros((2, 1), "f4"), "float32[2]", "float32[2,1]"),
        (np.zeros((), "f4"), "float32[2]", "float32[]"),
        (np.zeros(2, "c8"), "float32[2]", "complex64[2]"),
    ],
)
def test_B11_wrong_dtype_or_shape(value, expected, got):
    spec = jax.ShapeDtypeStruct((2,), jnp.float32)
    f = jaxbridge.call(lambda: value, spec, name=f"B11 {got}")
    text = re.escape(f"B11 {got}: result: expected {expected}, got {got}")
    with pytest.raises(errors.ResultError, match=text):
        f()
    with pytest.raises(jax.errors.JaxRuntimeError, match=text):
        jax.jit(f)()


@pytest.mark.parametrize("count", [0, 1, 3])
def test_B11_wrong_number(count):
    spec = jax.ShapeDtypeStruct((2,), jnp.float32)
    f = jaxbridge.call(lambda: (np.zeros(2, "f4"),) * count, (spec, spec))
    text = r"expected the results \(\*, \*\), got \("
    with pytest.raises(errors.ResultError, match=text):
        f()
    with pytest.raises(errors.ResultError, match=text), jaxbridge.reraise():
        jax.jit(f)()


def test_B12_eigendecomposition():
    """A vector and a matrix as results; complex128 delivered for complex64 is named by its leaf."""
    n = 100  # of the case's 1000: LAPACK's time, not ours
    a = np.random.default_rng(0).standard_normal((n, n)).astype(np.float32)
    spec = (jax.ShapeDtypeStruct((n,), jnp.complex64), jax.ShapeDtypeStruct((n, n), jnp.complex64))

    def eig(v):
        values, vectors = np.linalg.eig(v)
        return values.astype(np.complex64), vectors.astype(np.complex64)

    values, vectors = jax.jit(jaxbridge.call(eig, spec))(a)
    np.testing.assert_allclose(a @ vectors, vectors * values, atol=2e-3)
    # NumPy's own result is a named tuple.
    values, _ = jaxbridge.call(np.linalg.eig, spec)(a)
    assert values.shape == (n,)

    def wide(v):
        values, vectors = np.linalg.eig(v.astype(np.float64))
        return values.astype(np.complex64), vectors

    text = r"result\[1\]: expected complex64\[100,100\], got complex128\[100,100\]"
    with pytest.raises(errors.ResultError, match=text):
        jaxbridge.call(wide, spec)(a)
    named = {"values": spec[0], "vectors": spec[1]}
    f = jaxbridge.call(lambda v: dict(zip(named, wide(v), strict=True)), named)
    with pytest.raises(errors.ResultError, match=r"result\['vectors'\]: expected complex64"):
        f(a)

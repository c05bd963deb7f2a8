# SPDX-License-Identifier: Apache-2.0
"""Public failures with dtypes: letter B of the acceptance cases, on the CPU."""

import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxbridge
from interchange import FLOAT8, STANDARD, Only, dtype_of, memory, same_bits
from jaxbridge import errors


def test_B02_bfloat16_keeps_its_bits():
    """CuPy's: tests/gpu/test_cases_b_gpu.py. Any exporter of raw 16 bits, with the type given anew."""
    bits = memory(6, np.dtype("u2"))
    bits[...] = [0x3F80, 0x7FC1, 0xFF80, 0x0001, 0x8000, 0x4049]
    for source in (
        bits.view(ml_dtypes.bfloat16),
        jaxbridge.buffer(bits.ctypes.data, (6,), "bfloat16", "cpu", owner=bits),
    ):
        array = jaxbridge.from_external(source, copy=False)
        assert array.dtype == jnp.bfloat16
        assert array.unsafe_buffer_pointer() == bits.ctypes.data
        assert np.asarray(array).view("u2").tolist() == bits.tolist()


def test_B03_bool_both_ways():
    source = memory(4, np.dtype(bool))
    for given in (source, Only(source, "__dlpack__", "__dlpack_device__"), source.__dlpack__()):
        array = jaxbridge.from_external(given, copy=False)
        assert array.dtype == bool
        assert array.unsafe_buffer_pointer() == source.ctypes.data
    v = jaxbridge.view(jnp.array([True, False]))
    assert np.from_dlpack(v).dtype == bool
    assert v.__array_interface__["typestr"] == "|b1"
    # Other bytes than 0 and 1 come in as they are; a comparison makes them true or false.
    odd = memory(3, np.dtype("u1"))
    odd[...] = [0, 1, 2]
    array = jaxbridge.from_external(odd) != 0
    np.testing.assert_array_equal(array, [False, True, True])


def test_B05_bool_of_warp(needs):
    needs("warp")
    import warp as wp

    source = wp.array([True, False, True], dtype=wp.bool, device="cpu")
    array = jaxbridge.from_external(source)
    assert array.dtype == bool
    np.testing.assert_array_equal(array, [True, False, True])
    back = jaxbridge.to_external(array, "warp")
    assert back.dtype is wp.bool
    assert back.numpy().tolist() == [True, False, True]
    assert wp.from_dlpack(jaxbridge.view(array)).dtype is wp.bool
    explicit = wp.from_dlpack(jaxbridge.view(array), dtype=wp.bool)
    assert explicit.numpy().tolist() == [True, False, True]


def test_B06_a_gradient_is_not_dropped_in_silence(needs):
    needs("torch")
    import torch

    x = torch.from_numpy(memory(8, np.dtype("f4"))).requires_grad_()
    with pytest.raises(BufferError, match=r"requires grad.*x\.detach\(\)"):
        jaxbridge.from_external(x)
    array = jaxbridge.from_external(x.detach(), copy=False)
    assert array.unsafe_buffer_pointer() == x.data_ptr()
    flags = torch.from_numpy(memory(8, np.dtype(bool)).reshape(4, 2))
    np.testing.assert_array_equal(jaxbridge.from_external(flags, copy=False), flags.numpy())


@pytest.mark.parametrize("dtype, text", [("complex64", "<c8"), ("complex128", "<c16")])
def test_B07_complex_both_ways(dtype, text, x64, needs):
    source = memory(10, np.dtype(dtype))
    source[...] = np.arange(10) * (1 + 2j)
    array = jaxbridge.from_external(source, copy=False)
    v = jaxbridge.view(array)
    assert v.__array_interface__["typestr"] == text
    for out in (np.asarray(v), np.from_dlpack(v), jaxbridge.to_external(array, "numpy")):
        assert out.dtype == dtype
        np.testing.assert_array_equal(out, source)
    needs("torch")
    import torch

    tensor = jaxbridge.to_external(array, "torch")
    assert tensor.dtype is getattr(torch, dtype)
    lazy = torch.from_numpy(source).conj()
    with pytest.raises(BufferError, match="resolve_conj"):
        jaxbridge.from_external(lazy)
    resolved = jaxbridge.from_external(lazy.resolve_conj())
    np.testing.assert_array_equal(resolved, source.conj())
    with pytest.raises(BufferError, match="resolve_neg"):
        jaxbridge.from_external(lazy.imag)


@pytest.mark.parametrize("dtype", FLOAT8)
def test_B08_every_float8(dtype):
    source = memory(8, np.dtype("u1"))
    source[...] = np.arange(8) * 37
    typed = source.view(dtype_of(dtype))
    v = jaxbridge.buffer(source.ctypes.data, (8,), dtype, "cpu", owner=source)
    for given in (typed, v, Only(v, "__dlpack__", "__dlpack_device__")):
        array = jaxbridge.from_external(given, copy=False)
        assert array.dtype == dtype_of(dtype)
        assert array.unsafe_buffer_pointer() == source.ctypes.data
    out = jaxbridge.to_external(array, "numpy")
    assert same_bits(out, typed)
    # As bytes for who has no such type.
    assert np.asarray(out).view("u1").tolist() == source.tolist()
    with pytest.raises(AttributeError, match="use DLPack"):
        _ = jaxbridge.view(array).__array_interface__


def test_B08_packed_types_are_refused():
    for use in (jaxbridge.view, lambda a: jaxbridge.to_external(a, "numpy"), jaxbridge.pointer):
        with pytest.raises(BufferError, match=r"int4 are packed.*astype"):
            use(jnp.zeros(4, jnp.int4))
    with pytest.raises(BufferError, match="smaller than a byte"):
        jaxbridge.buffer(0, (4,), "int4", "cpu")


@pytest.mark.parametrize("dtype", ["float64", "int64", "uint64", "complex128"])
@pytest.mark.parametrize("copy", [None, False, True])
def test_B09_wide_arrays_with_x64_off(dtype, copy):
    source = memory(5, np.dtype(dtype))
    for given in (source, Only(source, "__dlpack__", "__dlpack_device__"), {"a": source}):
        with pytest.raises(TypeError, match=rf"{dtype}\[5\].*jax_enable_x64"):
            jaxbridge.from_external(given, copy=copy)


@pytest.mark.parametrize("dtype", ["float64", "int64", "uint64", "complex128"])
def test_B09_wide_arrays_with_x64_on(dtype, x64):
    source = memory(5, np.dtype(dtype))
    array = jaxbridge.from_external(source, copy=False)
    assert array.dtype == dtype
    assert array.unsafe_buffer_pointer() == source.ctypes.data
    assert array[0] == source[0]


@pytest.mark.parametrize("dtype", [">f4", "M8[s]", "S3", "O", "f4,i4", "f16"])
def test_what_jax_has_no_arrays_of(dtype):
    source = np.zeros(4, dtype)
    with pytest.raises(
        TypeError, match="JAX has no arrays of dtype|in another order than this machine"
    ):
        jaxbridge.from_external(source)


def test_standard_dtypes_of_the_array_interface(x64):
    for dtype in STANDARD:
        source = memory(4, np.dtype(dtype))
        assert (
            jaxbridge.view(jaxbridge.from_external(source)).__array_interface__["typestr"]
            == source.__array_interface__["typestr"]
        )


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

# SPDX-License-Identifier: Apache-2.0
"""`bind`: plain C functions, called from C++."""

import ctypes
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbridge
from jaxbridge import Parameter, Signature
from jaxbridge.errors import SignatureError
from native_libraries import built
from processes import run


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def lib():
    return ctypes.CDLL(str(built("plain.c", "plain")))


AXPY = "x: double[n], n: long, a: double = 2.0, inout y: double[n]"


def test_sizes_attributes_in_place(lib):
    f = jaxbridge.bind(lib.axpy, AXPY)
    assert str(inspect.signature(f)) == "(x, y, a=2.0)"
    np.testing.assert_array_equal(f(np.arange(4.0), np.ones(4)), [1, 3, 5, 7])
    jitted = jax.jit(lambda x, y: f(x, y, a=3.0))
    np.testing.assert_array_equal(jitted(np.arange(4.0), np.ones(4)), [1, 4, 7, 10])
    np.testing.assert_array_equal(jitted(np.arange(2.0), np.ones(2)), [1, 4])  # another length
    assert f.stats()["calls"] == 3
    ref = jax.new_ref(jnp.ones(4))
    f(np.arange(4.0), ref)
    np.testing.assert_array_equal(ref[...], [1, 3, 5, 7])


MANY = (
    "x: float[k], a1: int, a2: int, a3: int, a4: int, a5: int, a6: int, a7: int, a8: long, f1: float, "
    "f2: double, f3: float, f4: float, f5: float, f6: float, f7: float, f8: float, f9: float, "
    "f10: double, s: string, c: i8, u: u8, b: bool, k: i32, out v: f64[24] -> int"
)


def test_every_kind_of_parameter_in_registers_and_on_the_stack(lib):
    f = jaxbridge.bind(lib.many, MANY)
    integers = [0, 2, 3, -4, 5, 6, -7, -(2**40)]
    floats = [1.5, 2.5, 3.5, 4.5, -5.5, 6.5, 7.5, 8.5, 9.5, 10.5]
    got = f(np.full(3, 0.5, np.float32), *integers, *floats, "héllo", -3, 200, True)
    np.testing.assert_array_equal(got, [*integers, *floats, 6, -3, 200, 1, 3, 0.5])
    integers[0] = 5
    with pytest.raises(jax.errors.JaxRuntimeError, match="many returned the error code 5"):
        f(np.full(3, 0.5, np.float32), *integers, *floats, "", -3, 200, True)
    with pytest.raises(OverflowError, match="'c' is 128, which int8 does not hold"):
        f(np.full(3, 0.5, np.float32), *integers, *floats, "", 128, 200, True)


def test_lengths_of_results(lib):
    f = jaxbridge.bind(lib.pairs, "x: int[n], n: int, out y: int[n, 2]")
    np.testing.assert_array_equal(f(np.arange(3, dtype=np.int32)), [[0, 0], [1, -1], [2, -2]])
    # An integer that no array has is the caller's.
    g = jaxbridge.bind(lib.iota, "seed: int[], n: int, out y: int[n]")
    assert str(inspect.signature(g)) == "(seed, n)"
    np.testing.assert_array_equal(g(np.int32(5), 3), [5, 6, 7])
    with pytest.raises(TypeError, match=r"'x' is float64\[3\], expected int32\[n\]"):
        f(np.arange(3.0))


def test_vmap(lib):
    f = jaxbridge.bind(lib.pairs, "x: int[n], n: int, out y: int[n, 2]", vmap_method="sequential")
    x = np.arange(6, dtype=np.int32).reshape(2, 3)
    np.testing.assert_array_equal(jax.vmap(f)(x), np.stack([x, -x], -1))
    g = jaxbridge.bind(lib.pairs, "x: int[n], n: int, out y: int[n, 2]", vmap_method="expand_dims")
    with pytest.raises(
        TypeError, match='of rank 2, expected .*others need vmap_method="sequential"'
    ):
        jax.vmap(g)(x)
    unsaid = jaxbridge.bind(lib.pairs, "x: int[n], n: int, out y: int[n, 2]")
    with pytest.raises(
        jaxbridge.errors.BatchingError, match="how: give it vmap_method='sequential'.*defvmap"
    ) as caught:
        jax.vmap(unsaid)(x)
    assert "elementwise" not in str(caught.value) and "broadcast_all" not in str(caught.value)


def test_a_signature_object(lib):
    signature = Signature(
        (
            Parameter("x", "operand", "int32", ("n",)),
            Parameter("n", "size", "int32"),
            Parameter("y", "result", "int32", ("n", "2")),
        )
    )
    f = jaxbridge.bind(lib.pairs, signature)
    assert f(np.arange(1, dtype=np.int32)).shape == (1, 2)
    assert Signature.parse(str(signature)) == signature


def test_an_address_and_what_is_none(lib):
    address = ctypes.cast(lib.pairs, ctypes.c_void_p).value
    f = jaxbridge.bind(address, "x: int[n], n: int, out y: int[n, 2]")
    assert f(np.arange(1, dtype=np.int32)).shape == (1, 2)
    with pytest.raises(TypeError, match="no C function; expected one of ctypes, of cffi"):
        jaxbridge.bind(lambda x: x, "x: int[n], out y: int[n]")
    with pytest.raises(ValueError, match="address is 0, where nothing can be"):
        jaxbridge.bind(0, "x: int[n], out y: int[n]")


def test_numba_cfunc():
    numba = pytest.importorskip("numba")
    from numba import types

    @numba.cfunc(types.void(types.CPointer(types.double), types.intp, types.CPointer(types.double)))
    def double(x, n, y):
        for i in range(n):
            y[i] = 2 * x[i]

    f = jaxbridge.bind(double, "x: double[n], n: long, out y: double[n]")
    np.testing.assert_array_equal(f(np.arange(3.0)), [0, 2, 4])


def test_cffi(lib):
    cffi = pytest.importorskip("cffi")
    ffi = cffi.FFI()
    ffi.cdef("void pairs(const int*, int, int*);")
    of_cffi = ffi.dlopen(lib._name)
    f = jaxbridge.bind(ffi.addressof(of_cffi, "pairs"), "x: int[n], n: int, out y: int[n, 2]")
    assert f(np.arange(1, dtype=np.int32)).shape == (1, 2)


@pytest.mark.parametrize(
    "signature, text",
    [
        ("x: float32[n], y", "'y' is no dtype"),
        ("x: float32[n], int32, out y: float32[n]", "'int32' has no name"),
        ("x: float33[n]", "'float33' is no dtype"),
        ("x: float32[n], x: float32[n]", "two parameters are called 'x'"),
        ("x: any[n], out y: float32[n]", "the dtype of an array has to be said"),
        ("x: float32[...], out y: float32[...]", "the shape of a result has to be said"),
        ("x: float32[n], out y: float32[*]", "the shape of a result has to be said"),
        ("x: float32[n], z: complex64, out y: float32[n]", "is not passed by value"),
        ("x: float32[n], z: float16, out y: float32[n]", "is not passed by value|C passes no such"),
        ("x: float32[n], l: list int32, out y: float32[n]", "C has no such parameter"),
        ("x: float32[n], out y: float32[n] -> float64", "expected void, or int32"),
        ("x: float32[n], workspace w: float32[n], out y: float32[n]", "there are no workspaces"),
        ("n: int", "has no array"),
        ("x: float32[n], out y: float32[n**2]", "no expression of lengths"),
        ("x: float32[n], out y: float32[f(n)]", "no expression of lengths"),
        ("x: float32[n, out y: float32[n]", "without its other half"),
        ("x: float32[n],, out y: float32[n]", "has an empty entry"),
    ],
)
def test_signatures_that_are_none(lib, signature, text):
    with pytest.raises(SignatureError, match=text):
        jaxbridge.bind(lib.axpy, signature)


def test_results_whose_length_is_unknown(lib):
    reason = "is neither a length of an argument nor an integer attribute"
    for signature, name in (
        ("x: int[n], n: int, out y: int[m, 2]", "m"),
        ("x: int[q + 1]", "q"),
        ("x: int[n], a: float, out y: int[min(a, n)]", "a"),
    ):
        with pytest.raises(SignatureError, match=f"bind: .*: {name} {reason}"):
            jaxbridge.bind(lib.pairs, signature)


def test_one_name_and_two_functions(lib):
    pytest.importorskip("flatbuffers")
    signature = "x: int[n], n: int, out y: int[n, 2]"
    f = jaxbridge.bind(lib.pairs, signature, name="test_bind.pairs")
    jaxbridge.bind(lib.pairs, signature, name="test_bind.pairs")
    with pytest.raises(
        ValueError, match="belongs to another.*function pairs as .*function iota as "
    ):
        jaxbridge.bind(lib.iota, signature, name="test_bind.pairs")
    exported = jax.export.export(jax.jit(f), disabled_checks=jaxbridge.export_checks())(
        np.arange(3, dtype=np.int32)
    )
    again = jax.export.deserialize(exported.serialize())
    np.testing.assert_array_equal(again.call(np.arange(3, dtype=np.int32))[:, 1], [0, -1, -2])
    with pytest.raises(
        NotImplementedError, match=r"anonymous function cannot.* bind\(\.\.\., name="
    ):
        jax.export.export(jax.jit(jaxbridge.bind(lib.pairs, signature)))(
            np.arange(3, dtype=np.int32)
        )


NATIVE = "x: int32[n], n: int, out y: int32[n, 2]"


@pytest.mark.parametrize(
    "x, text",
    [
        (np.array([object()]), "an array of dtype object, which JAX does not have"),
        (np.array(["a"]), "an array of dtype <U1, which JAX does not have"),
        (np.zeros(3, ">i4"), r"an array of another byte order \(>i4\).*pass x.astype\('int32'\)"),
        (jax.random.key(0), "an array of PRNG keys.*key_data"),
        ([1, 2], "a list, expected an array: x: int32"),
        (None, "a NoneType, expected an array"),
    ],
)
def test_arrays_that_jax_does_not_have(lib, x, text):
    with pytest.raises(TypeError, match=f"pairs: argument 'x' is {text}"):
        jaxbridge.bind(lib.pairs, NATIVE)(x)


def test_values_that_do_not_fit_are_not_cut(lib):
    f = jaxbridge.bind(lib.iota, "seed: int32[], n: int, out y: int32[3]")
    with pytest.raises(TypeError, match="'n'"):
        f(1)
    f = jaxbridge.bind(lib.pairs, NATIVE)
    with (
        jax.enable_x64(False),
        pytest.raises(TypeError, match="'x' has values that do not fit int32"),
    ):
        f(np.array([2**40]))
    first = jaxbridge.bind(lib.iota, "seed: int32[], n: int = 3, out y: int32[n]")
    assert first(2).tolist() == [2, 3, 4]
    for x, error in ((1.5, TypeError), (2**40, OverflowError), (1j, TypeError)):
        with pytest.raises(error, match="iota: argument 'seed' is"):
            first(x)


def test_lengths_below_zero(lib):
    f = jaxbridge.bind(lib.pairs, "x: int32[n], n: int, out y: int32[n - 5, 2]")
    with pytest.raises(TypeError, match=r"result 0: it is out y: .* which is \[-2, 2\] here"):
        f(np.arange(3, dtype=np.int32))


@pytest.mark.parametrize(
    "make, error, text",
    [
        (lambda f: jaxbridge.bind(f, NATIVE, name=""), ValueError, "name is ''"),
        (lambda f: jaxbridge.bind(f, NATIVE, name=3), TypeError, "name is 3"),
        (lambda f: jaxbridge.bind(-1, NATIVE), ValueError, "address is -1, where nothing can be"),
        (lambda f: jaxbridge.bind(2**64, NATIVE), ValueError, "where nothing can be"),
        (
            lambda f: jaxbridge.bind(f, ", ".join(f"x{i}: int32[n]" for i in range(65))),
            SignatureError,
            "has 65 parameters; expected at most 64",
        ),
        (
            lambda f: jaxbridge.bind(f, "x: int32[n], n: float32, out y: int32[n]"),
            SignatureError,
            "n: float32: an argument has a length of that name, which is an integer",
        ),
        (
            lambda f: jaxbridge.bind(f, "x: int32[n] -> double"),
            SignatureError,
            "write a C function around one that returns it",
        ),
    ],
)
def test_what_is_wrong_is_said_at_once(lib, make, error, text):
    with pytest.raises(error, match=text):
        make(lib.pairs)


def test_a_name_says_how_two_functions_differ(lib):
    jaxbridge.bind(lib.pairs, NATIVE, name="test_bind.how")
    with pytest.raises(ValueError, match=r"y: int32\[n, 2\]', vmap_method='sequential'\)"):
        jaxbridge.bind(lib.pairs, NATIVE, name="test_bind.how", vmap_method="sequential")


def test_an_exported_program_says_what_is_missing(lib, tmp_path):
    pytest.importorskip("flatbuffers")
    f = jaxbridge.bind(lib.pairs, "x: int[n], n: int, out y: int[n, 2]", name="test_bind.missing")
    exported = jax.export.export(jax.jit(f), disabled_checks=jaxbridge.export_checks())
    program = tmp_path / "program"
    program.write_bytes(exported(np.arange(3, dtype=np.int32)).serialize())
    done = run(
        """
        import sys, jax, jax.export, numpy as np, jaxbridge
        f = jax.export.deserialize(open(sys.argv[1], "rb").read()).call
        try:
            with jaxbridge.reraise():
                jax.block_until_ready(f(np.arange(3, dtype=np.int32)))
        except jaxbridge.errors.NotRegisteredError as error:
            print(error)
        """,
        program,
    )
    assert "'test_bind.missing', which is not registered in this process: make it" in done.stdout
    assert "bind(..., name=)" in done.stdout and "import" not in done.stdout


def test_a_stream_makes_it_a_function_of_cuda(lib):
    f = jaxbridge.bind(lib.pairs, "x: int[n], stream, out y: int[n, 2]")
    with pytest.raises(
        jaxbridge.errors.PlatformError, match="for cuda, none for cpu; choose one for each"
    ):
        f(np.arange(3, dtype=np.int32))


def test_nothing_is_left_of_a_dropped_function(lib):
    import gc

    from jaxbridge import _core

    jax.clear_caches()
    gc.collect()
    before = _core.registry_size()
    f = jaxbridge.bind(lib.pairs, "x: int[n], n: int, out y: int[n, 2]")
    f(np.arange(3, dtype=np.int32))
    assert _core.registry_size() == before + 1
    del f
    jax.clear_caches()
    gc.collect()
    assert _core.registry_size() == before


@pytest.mark.parametrize(
    "shape, text",
    [
        ("2 * n, n", r"float32\[5,3\], expected float32\[2 \* n, n\], where 2 \* n is 6"),
        ("0x10, n", r"float32\[5,3\], expected float32\[0x10, n\], where 0x10 is 16"),
        ("2 * k, n", r"float32\[5,3\], expected float32\[2 \* k, n\], where 2 \* k is 8"),
        ("7 // (n - 3), n", "cannot be computed"),
    ],
)
def test_lengths_of_arguments_that_are_expressions(lib, shape, text):
    f = jaxbridge.bind(lib.axpy, f"x: float32[{shape}], k: int32, out y: float32[n]")
    with pytest.raises(TypeError, match=text):
        jax.eval_shape(lambda x: f(x, k=4), np.zeros((5, 3), np.float32))


def test_lengths_of_arguments_that_fit_an_expression(lib):
    f = jaxbridge.bind(lib.axpy, "x: float32[2 * k + n, n], k: int32, out y: float32[k]")
    assert jax.eval_shape(lambda x: f(x, k=1), np.zeros((5, 3), np.float32)).shape == (1,)


@pytest.mark.parametrize("default", ["int8 = 300", "int32 = 2.5", "float32 = 'q'", "string = 3"])
def test_defaults_that_are_none(lib, default):
    with pytest.raises(SignatureError, match="argument 'a' is .*: it is the default"):
        jaxbridge.bind(lib.axpy, f"x: float32[n], a: {default}, out y: float32[n]")


def test_texts_that_c_does_not_take(lib):
    f = jaxbridge.bind(lib.axpy, "x: float32[n], s: string, out y: float32[n]")
    x = np.zeros(3, np.float32)
    with pytest.raises(ValueError, match="C ends a text at its first zero"):
        jax.eval_shape(lambda x: f(x, s="a\0b"), x)
    with pytest.raises(ValueError, match="'s' is .*, which UTF-8 does not hold"):
        jax.eval_shape(lambda x: f(x, s="\ud800"), x)


def test_numbers_that_do_not_fit(lib):
    f = jaxbridge.bind(lib.axpy, "x: float32[n], a: float32, out y: float32[n]")
    x = np.zeros(3, np.float32)
    for number in (1e300, -1e300, 10**400, np.float64(1e39)):
        with pytest.raises(OverflowError, match="argument .a. is .* float32 does not hold"):
            jax.eval_shape(lambda x, number=number: f(x, a=number), x)
    for number in (float("inf"), float("nan"), 3.4e38):
        assert jax.eval_shape(lambda x, number=number: f(x, a=number), x).shape == (3,)


def test_results_that_nothing_can_count(lib):
    f = jaxbridge.bind(lib.axpy, "x: float32[n], out y: float32[n * 4611686018427387904]")
    with pytest.raises(ValueError, match="more elements than an int64 can count"):
        jax.eval_shape(f, np.zeros(3, np.float32))

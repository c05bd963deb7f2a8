# SPDX-License-Identifier: Apache-2.0
"""`from_ufunc`: ufuncs of NumPy and SciPy as JAX functions, with NumPy's types."""

import itertools
import os
import subprocess
import sys
import textwrap
import types

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import scipy.special as special
from jax import export

import jaxbridge
from jaxbridge import _ufunc, from_ufunc

ALL = {
    f"{module.__name__}.{name}": ufunc
    for module in (np, special)
    for name, ufunc in vars(module).items()
    if isinstance(ufunc, np.ufunc) and ufunc.signature is None and name == ufunc.__name__
}
# All of NumPy's are quick. SciPy has some 250: a few of each kind of loop, all where that is asked for.
SOME = [
    "gamma",
    "gammaln",
    "erf",
    "expit",
    "logit",
    "jv",
    "yv",
    "kv",
    "beta",
    "xlogy",
    "ellipj",
    "sici",
    "airy",
    "bdtr",
    "pdtr",
    "eval_legendre",
]
UFUNCS = {
    name: ufunc
    for name, ufunc in ALL.items()
    if name.startswith("numpy.")
    or name.removeprefix("scipy.special.") in SOME
    or os.environ.get("JAXBRIDGE_TEST_ALL_UFUNCS") == "1"
}
DTYPES = ["bool", "int8", "uint8", "int32", "uint64", "float16", "float32", "float64", "complex64"]
bf16 = np.dtype(ml_dtypes.bfloat16)


_events = []
jax.monitoring.register_event_duration_secs_listener(lambda name, _, **kw: _events.append(name))


@pytest.fixture
def traced():
    """Counts what was traced or compiled since it was last asked."""

    def count():
        found = sum("jaxpr_trace" in name or "backend_compile" in name for name in _events)
        _events.clear()
        return found

    count()
    return count


@pytest.fixture
def x():
    return jnp.linspace(0.5, 3, 6, dtype=jnp.float32).reshape(2, 3)


def tuple_of(y):
    return y if isinstance(y, tuple) else (y,)


# ---- every ufunc -----------------------------------------------------------------------------------


def as_numpy_says(ufunc, dtypes):
    """The dtypes of the results, from NumPy itself on no elements; None where there is no loop."""
    try:
        results = tuple_of(ufunc(*(np.ones(0, d) for d in dtypes)))
    except TypeError:
        return None
    found = tuple(r.dtype for r in results)
    return found if all(d.kind in "biufc" for d in found) else None


@pytest.mark.parametrize("name", UFUNCS)
def test_types_are_numpys(x64, name):
    ufunc = UFUNCS[name]
    f = from_ufunc(ufunc)
    choices = DTYPES if ufunc.nin <= 2 else ["int32", "float32", "float64"]
    for dtypes in itertools.product(choices, repeat=ufunc.nin):
        specs = [jax.ShapeDtypeStruct((2,), d) for d in dtypes]
        expected = as_numpy_says(ufunc, dtypes)
        if expected is None:
            with pytest.raises(TypeError, match="has no loop for"):
                jax.eval_shape(f, *specs)
            continue
        found = tuple_of(jax.eval_shape(f, *specs))
        if "float16" in dtypes and name.startswith("scipy"):
            # SciPy computes in float32 and leaves it there.
            half = np.result_type(*dtypes) == np.float16
            expected = tuple(np.float16 if half and d == np.float32 else d for d in expected)
        assert [r.dtype for r in found] == [np.dtype(d) for d in expected], dtypes


@pytest.mark.parametrize("name", UFUNCS)
def test_types_without_x64_are_the_32_bit_ones(name):
    ufunc = UFUNCS[name]
    f = from_ufunc(ufunc)
    choices = ["int8", "int32", "uint32", "float16", "float32"] if ufunc.nin <= 2 else ["float32"]
    for dtypes in itertools.product(choices, repeat=ufunc.nin):
        expected = as_numpy_says(ufunc, dtypes)
        specs = [jax.ShapeDtypeStruct((2,), d) for d in dtypes]
        if expected is None:
            with pytest.raises(TypeError, match="has no loop for"):
                jax.eval_shape(f, *specs)
            continue
        found = [r.dtype for r in tuple_of(jax.eval_shape(f, *specs))]
        narrow = [jax.dtypes.canonicalize_dtype(d) for d in expected]
        if "float16" not in dtypes:
            assert found == narrow, dtypes


@pytest.mark.filterwarnings("ignore")  # some want integers as floats
@pytest.mark.parametrize("name", UFUNCS)
def test_values_are_numpys(rng, name):
    ufunc = UFUNCS[name]
    for dtype in ("float32", "int32"):
        values = [(rng.random((2, 3)) * 3 + 1).astype(dtype) for _ in range(ufunc.nin)]
        if name == "numpy.ldexp":
            values[1] = values[1].astype(np.int32)
        says = as_numpy_says(ufunc, [v.dtype for v in values])
        if says is None or any(d in (np.float64, np.complex128) for d in says):
            continue  # NumPy computes in 64 bits, of which JAX has none here
        found = tuple_of(jax.jit(from_ufunc(ufunc))(*values))
        with np.errstate(all="ignore"):
            expected = tuple_of(ufunc(*values))
        for f, e in zip(found, expected, strict=True):
            np.testing.assert_array_equal(f, e)


# ---- operands and results --------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_broadcasting(x, wrap):
    y = wrap(from_ufunc(np.hypot))(x[:, :1], x[0])
    np.testing.assert_array_equal(y, np.hypot(np.asarray(x[:, :1]), np.asarray(x[0])))


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (1,) * 20])
def test_any_shape(shape):
    v = jnp.ones(shape, jnp.float32)
    y = from_ufunc(special.erf)(v)
    assert y.shape == shape
    np.testing.assert_array_equal(y, special.erf(np.asarray(v)))


def test_several_results(x):
    fraction, whole = from_ufunc(np.modf)(x)
    np.testing.assert_array_equal(fraction, np.modf(np.asarray(x))[0])
    np.testing.assert_array_equal(whole, np.modf(np.asarray(x))[1])
    quotient, rest = jax.jit(from_ufunc(np.divmod))(x, 0.75)
    np.testing.assert_array_equal(quotient, np.divmod(np.asarray(x), np.float32(0.75))[0])
    np.testing.assert_array_equal(rest, np.divmod(np.asarray(x), np.float32(0.75))[1])
    found = from_ufunc(special.ellipj)(x, 0.25)
    assert len(found) == 4
    for f, e in zip(found, special.ellipj(np.asarray(x), np.float32(0.25)), strict=True):
        np.testing.assert_array_equal(f, e)
    mantissa, exponent = from_ufunc(np.frexp)(x)
    assert (mantissa.dtype, exponent.dtype) == (jnp.float32, jnp.int32)


def test_vmap(x):
    add = from_ufunc(np.add)
    np.testing.assert_array_equal(jax.vmap(add, (0, None))(x, x), x[:, None, :] + x[None])
    np.testing.assert_array_equal(
        jax.jit(jax.vmap(jax.vmap(add, (0, None)), (None, 1), 2))(x, x.T),
        jax.vmap(jax.vmap(jnp.add, (0, None)), (None, 1), 2)(x, x.T),
    )
    assert [y.shape for y in jax.vmap(from_ufunc(np.modf))(x)] == [x.shape] * 2


def test_inside_a_program(x):
    gamma = from_ufunc(special.gamma)
    y = jax.jit(lambda v: jax.lax.fori_loop(0, 2, lambda _, c: gamma(c), v))(x)
    np.testing.assert_array_equal(y, special.gamma(special.gamma(np.asarray(x))))


def test_nothing_is_copied(x, monkeypatch):
    seen = []

    def look(*operands, out):
        seen.append([a.__array_interface__["data"][0] for a in (*operands, out)])
        return np.add(*operands, out=out)

    monkeypatch.setattr(_ufunc.on_cpu.numpy.add, "_of_numpy", look)
    y = from_ufunc(np.add)(x, x)
    assert seen == [[x.unsafe_buffer_pointer()] * 2 + [y.unsafe_buffer_pointer()]]


def test_numpy_arrays_and_scalars_are_not_weak(x):
    add = from_ufunc(np.add)
    assert add(np.arange(3, dtype=np.int8), np.int16(1)).dtype == jnp.int16
    assert add(np.float32(1), jnp.float16(1)).dtype == jnp.float32
    assert from_ufunc(np.logical_not)(True) == np.False_


@pytest.mark.parametrize("name", ["maximum", "minimum", "fmax"])
def test_extrema(x, name):
    # NumPy 2.5 warns, which is an error here, where it gets the result as a third argument.
    found = from_ufunc(getattr(np, name))(x, 1.0)
    np.testing.assert_array_equal(found, getattr(np, name)(np.asarray(x), np.float32(1)))


def test_warnings_of_a_result_that_is_discarded(x):
    y = jnp.where(x > 1, from_ufunc(np.log)(x - 1), 0)  # NumPy would warn, which is an error here
    assert jnp.isfinite(y).all()


# ---- types -----------------------------------------------------------------------------------------


def test_python_numbers_are_weak():
    add = from_ufunc(np.add)
    for dtype in ("int8", "uint16", "float16", "float32", "bfloat16"):
        assert add(jnp.ones(2, dtype), 1).dtype == dtype
    assert add(jnp.ones(2, "float16"), 1.5).dtype == "float16"
    assert add(jnp.ones(2, "float32"), 1j).dtype == "complex64"
    assert add(jnp.ones(2, "int8"), 1.5).dtype == "float32"
    assert add(jnp.ones(2, "int8"), True).dtype == "int8"
    assert add(1, 2).dtype == "int32"
    assert from_ufunc(special.gamma)(4) == 6


def test_weak_types_of_jax_are_weak():
    add = from_ufunc(np.add)
    halves = jnp.ones(2, "float16")
    assert add(halves, jnp.asarray(1.5)).dtype == "float16"
    assert add(halves, jnp.float32(1.5)).dtype == "float32"
    assert jax.jit(add)(halves, 1.5).dtype == "float16"
    assert jax.jit(add)(jnp.ones(2, "uint8"), 1).dtype == "uint8"


def test_python_numbers_keep_their_precision(x64):
    y = from_ufunc(np.multiply)(jnp.ones(1, "float64"), 0.1)
    assert y.dtype == "float64" and y[0] == 0.1


def test_python_integers_out_of_range():
    add = from_ufunc(np.add)
    for value in (256, -1):
        with pytest.raises(
            OverflowError, match=f"numpy.add: Python integer {value} is out of bounds for uint8"
        ):
            add(jnp.ones(2, "uint8"), value)
    assert add(jnp.ones(2, "float32"), 1 << 70)[0] == np.float32(1 << 70)


def test_numpy_values_that_do_not_fit_without_x64():
    with pytest.raises(TypeError, match=r"values that do not fit int32.*jax_enable_x64"):
        from_ufunc(np.add)(np.array([1 << 40]), 1)
    assert from_ufunc(np.add)(np.array([1 << 20]), 1).tolist() == [(1 << 20) + 1]
    # A loop of floats takes them.
    assert from_ufunc(np.sqrt)(np.array([1 << 40])) == 1 << 20


def test_a_number_is_not_static(x, traced):
    power = from_ufunc(np.power)
    power(x, 2.0)
    assert traced() > 0
    np.testing.assert_array_equal(power(x, 3.0), np.power(np.asarray(x), np.float32(3)))
    assert traced() == 0


def test_from_ufunc_again_is_the_same(x, traced):
    from_ufunc(special.erfc)(x)
    assert traced() > 0
    from_ufunc(special.erfc)(x)
    assert traced() == 0
    assert from_ufunc(special.erfc) is from_ufunc(special.erfc)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3fn"])
def test_small_floats_are_computed_in_float32(dtype):
    v = jnp.asarray([0.5, 1.5, 2.5, 3.25], dtype)
    for ufunc in (special.gamma, special.erf, np.sin, np.sqrt):
        y = from_ufunc(ufunc)(v)
        assert y.dtype == dtype
        expected = ufunc(np.asarray(v).astype(np.float32)).astype(v.dtype)
        np.testing.assert_array_equal(y.astype("float32"), expected.astype(np.float32))
    assert from_ufunc(np.isnan)(v).dtype == bool
    mantissa, exponent = from_ufunc(np.frexp)(v)
    assert (mantissa.dtype, exponent.dtype) == (dtype, jnp.int32)
    assert from_ufunc(np.ldexp)(v, jnp.arange(4)).dtype == dtype


def test_float16_uses_its_loop_where_there_is_one():
    assert from_ufunc(np.add)._find_loop([np.dtype("float16")] * 2).operands[0] == np.float16
    assert from_ufunc(special.gamma)._find_loop([np.dtype("float16")]).operands[0] == np.float32
    # Of bfloat16 NumPy has loops through ml_dtypes, but CuPy has not.
    assert from_ufunc(np.add)._find_loop([bf16] * 2).operands[0] == np.float32


def test_small_floats_with_others():
    add = from_ufunc(np.add)
    b = jnp.ones(2, "bfloat16")
    assert add(b, jnp.ones(2, "float16")).dtype == "float32"
    assert add(b, jnp.ones(2, "float32")).dtype == "float32"
    assert add(b, jnp.ones(2, "int8")).dtype == "bfloat16"
    assert add(b, 1.5).dtype == "bfloat16"
    assert add(b, 1j).dtype == "complex64"
    # As float16: with these integers NumPy takes the wider float.
    assert add(b, jnp.ones(2, "int16")).dtype == "float32"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_steps_of_a_small_float(dtype):
    one = jnp.ones(1, dtype)
    y = from_ufunc(np.nextafter)(one, 2 * one)
    assert y.dtype == dtype and y[0] == 1 + jnp.finfo(dtype).eps
    assert from_ufunc(np.spacing)(one)[0] == jnp.finfo(dtype).eps


def test_without_a_32_bit_loop_the_ufunc_converts():
    y = jax.jit(from_ufunc(special.bdtr))(
        jnp.float32(2.5), jnp.int32(5), jnp.asarray([0.25, 0.5], jnp.float32)
    )
    assert y.dtype == "float32"
    np.testing.assert_allclose(y, special.bdtr(2.5, 5, [0.25, 0.5]), rtol=1e-6)


def test_x64_is_part_of_the_choice():
    f = from_ufunc(np.sin)
    assert f(np.arange(2)).dtype == "float32"
    with jax.experimental.enable_x64() if not hasattr(jax, "enable_x64") else jax.enable_x64(True):
        assert f(np.arange(2)).dtype == "float64"
    assert f(np.arange(2)).dtype == "float32"


# ---- refused ---------------------------------------------------------------------------------------


def test_no_loop(x):
    with pytest.raises(TypeError) as raised:
        from_ufunc(np.bitwise_and)(x, 1)
    text = str(raised.value)
    assert text.startswith("numpy.bitwise_and has no loop for (float32, weak int); its loops are ")
    assert "int8, int8 -> int8; uint8, uint8 -> uint8" in text and "object" not in text
    with pytest.raises(TypeError, match=r"no loop for.*float32, complex64 -> complex64"):
        from_ufunc(special.jv)(x.astype("complex64"), x)


@pytest.mark.parametrize(
    "value", [np.array(["a"]), np.array([None]), np.array(1, "M8[s]"), jax.random.key(0)]
)
def test_dtypes_that_jax_does_not_have(value):
    with pytest.raises(TypeError, match=r"argument 1 is an array of .*its loops are"):
        from_ufunc(np.add)(1, value)


def test_what_is_no_operand(x):
    add = from_ufunc(np.add)
    for value in ([1.0], None, "text"):
        with pytest.raises(TypeError, match=r"numpy\.add: argument 1 is of \w+; expected an array"):
            add(x, value)
    with pytest.raises(TypeError, match=r"its value, ref\[\.\.\.\]"):
        add(x, jax.new_ref(x))
    with pytest.raises(TypeError, match="numpy.add: expected 2 operands by position, got 3"):
        add(x, x, x)
    with pytest.raises(TypeError, match="out"):
        add(x, x, out=x)


def test_what_is_no_such_ufunc():
    with pytest.raises(TypeError, match=r"generalized ufunc, of signature .*numpy\.matmul"):
        from_ufunc(np.matmul)
    for value in (np.sum, special.logsumexp, abs, 3, None):
        with pytest.raises(
            TypeError,
            match=r"is no ufunc of numpy, .*\. Use jaxbridge\.call, which takes any function with a d",
        ):
            from_ufunc(value)
    with pytest.raises(TypeError, match=r"is no ufunc of numpy.*call\(\.\.\., elementwise=True\)"):
        from_ufunc(np.frompyfunc(abs, 1, 1))
    for value in (jax.numpy.sin, jax.numpy.add):
        with pytest.raises(TypeError, match="is no ufunc of numpy.*one of JAX's needs no bridge"):
            from_ufunc(value)
    with pytest.raises(TypeError, match="is a JAX function already"):
        from_ufunc(from_ufunc(np.add))


# ---- names, the other platform, other processes ----------------------------------------------------


def test_names():
    gamma = from_ufunc(special.gamma)
    assert repr(gamma) == "<jaxbridge ufunc scipy.special.gamma>"
    assert (gamma.__name__, gamma.__doc__) == ("gamma", special.gamma.__doc__)
    assert "gamma" in jax.jit(gamma).lower(jnp.ones(2)).as_text(debug_info=True)
    assert from_ufunc(np.abs).name == "numpy.absolute"
    assert from_ufunc(np.acos).name == "numpy.arccos"
    assert from_ufunc(special.digamma).name == "scipy.special.psi"
    assert from_ufunc(special.digamma) is from_ufunc(special.psi)


class ufunc:
    """CuPy's class has this name."""

    def __init__(self, name):
        self.__name__ = name


@pytest.fixture
def cupy(monkeypatch):
    """Modules in place of CuPy's, with its names."""
    cupy, cupyx_special = types.ModuleType("cupy"), types.ModuleType("cupyx.scipy.special")
    cupy.add, cupy.only_here = ufunc("cupy_add"), ufunc("cupy_only_here")
    cupyx_special.gamma = ufunc("cupyx_scipy_special_gamma")
    for module in (cupy, cupyx_special):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return types.SimpleNamespace(numpy=cupy, special=cupyx_special)


def test_a_ufunc_of_cupy_is_that_of_numpy(cupy, x):
    assert from_ufunc(cupy.numpy.add) is from_ufunc(np.add)
    assert from_ufunc(cupy.special.gamma) is from_ufunc(special.gamma)
    np.testing.assert_array_equal(from_ufunc(cupy.numpy.add)(x, x), x + x)
    with pytest.raises(TypeError, match="numpy has no ufunc 'only_here'"):
        from_ufunc(cupy.numpy.only_here)
    with pytest.raises(TypeError, match="is no ufunc of numpy, "):
        from_ufunc(ufunc("cupy_other"))


def test_on_cuda_cupy_runs_by_the_same_name(cupy, monkeypatch):
    calls = []
    cupy.special.erf = lambda *a: calls.append(a)
    found = from_ufunc(special.erf).function.callee.on("cuda")
    assert found is _ufunc.on_cuda.special.erf
    found(1, out=2)
    from_ufunc(special.sici).function  # noqa: B018 (nothing of CuPy is looked up for that)
    assert calls == [(1, 2)]


class OnDevice:
    """As much of an array of CuPy's as a copy needs."""

    def __init__(self, host):
        self.host, self.shape, self.dtype = host, host.shape, host.dtype

    def get(self):
        return self.host.copy()

    def set(self, host):
        assert host.dtype == self.dtype and host.shape == self.shape
        self.host = host


def refuse(*args):
    raise TypeError("Wrong type (complex64) of arguments for cupyx_scipy_special_gamma")


@pytest.mark.parametrize(("name", "x"), [("sici", 0.5), ("gamma", 0.5 + 1j), ("jv", 0.5)])
def test_what_cupy_lacks_runs_on_the_host(cupy, monkeypatch, name, x):
    """`gamma` has no complex loop there, the others are not there at all."""
    monkeypatch.setattr(cupy.special, "gamma", refuse)
    of_scipy = getattr(special, name)
    x = np.full(3, x, np.complex64 if isinstance(x, complex) else np.float32)
    operands = (x,) * of_scipy.nin
    want = of_scipy(*operands)
    want = want if isinstance(want, tuple) else (want,)
    outs = tuple(OnDevice(np.empty_like(w)) for w in want)
    on_cuda = from_ufunc(of_scipy).function.callee.on("cuda")
    monkeypatch.setitem(vars(on_cuda), "_of_cupy", getattr(cupy.special, name, None))
    on_cuda(*map(OnDevice, operands), out=outs if len(outs) > 1 else outs[0])
    for out, w in zip(outs, want, strict=True):
        np.testing.assert_array_equal(out.host, w)


def test_a_program_for_cuda_is_lowered_without_cupy():
    exported = export.export(
        jax.jit(from_ufunc(special.gamma)),
        platforms=["cpu", "cuda"],
        disabled_checks=jaxbridge.export_checks(),
    )(jnp.ones(3))
    assert "jaxbridge._ufunc:on_cuda.special.gamma" in exported.mlir_module()
    assert "cupy" not in sys.modules


def test_a_program_is_exported_to_another_process(tmp_path, needs):
    needs("flatbuffers")
    exported = export.export(
        jax.jit(lambda v: from_ufunc(special.gamma)(v)), disabled_checks=jaxbridge.export_checks()
    )(jnp.ones(3))
    (tmp_path / "program").write_bytes(exported.serialize())
    code = f"""
        import jax.numpy as jnp
        from jax import export
        import jaxbridge
        program = export.deserialize(bytearray(open({str(tmp_path / "program")!r}, "rb").read()))
        print(program.call(jnp.arange(3.0) + 3).tolist())
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "[2.0, 6.0, 24.0]\n", done.stderr


def test_scipys_dispatch_is_looked_through():
    """With SCIPY_ARRAY_API=1 scipy.special holds functions around the ufuncs."""
    code = """
        import jax.numpy as jnp, numpy as np, scipy.special, jaxbridge
        assert not isinstance(scipy.special.gamma, np.ufunc)
        f = jaxbridge.from_ufunc(scipy.special.gamma)
        print(f, f(jnp.arange(3.0) + 3).tolist())
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "SCIPY_ARRAY_API": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    expected = "<jaxbridge ufunc scipy.special.gamma> [2.0, 6.0, 24.0]\n"
    assert done.stdout == expected, done.stderr


def test_scipy_is_not_imported_for_numpy():
    code = """
        import sys, jax.numpy as jnp, numpy as np, jaxbridge
        before = set(sys.modules)
        jaxbridge.from_ufunc(np.add)(jnp.ones(2), 1)
        print([m for m in set(sys.modules) - before if m.split(".")[0] in ("scipy", "cupy", "cupyx")])
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "[]\n", done.stderr


def test_keywords_are_refused_by_the_ufuncs_name(x):
    with pytest.raises(
        TypeError, match=r"numpy\.add: the keyword 'where' is not taken; use jaxbridge\.call"
    ):
        from_ufunc(np.add)(x, x, where=True)

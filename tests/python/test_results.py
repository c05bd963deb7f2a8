# SPDX-License-Identifier: Apache-2.0
"""What a function may return or write, and what is said of anything else."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbridge
from failing import jax_error
from jaxbridge import _adapters, errors

F32 = jax.ShapeDtypeStruct((4,), jnp.float32)
SCALAR = jax.ShapeDtypeStruct((), jnp.float32)


def like(x, *rest, **kw):
    return x


@pytest.fixture
def x():
    return jnp.arange(4, dtype=jnp.float32)


def result_error(fn, spec, *args, **options):
    with pytest.raises(errors.ResultError) as caught:
        jaxbridge.call(fn, spec, name=None, **options)(*args)
    return str(caught.value)


@pytest.mark.parametrize(
    "value, spec, leaf, expected, got",
    [
        (np.zeros(4), F32, "result:", "float32[4]", "float64[4]"),
        (np.zeros(3, "f4"), F32, "result:", "float32[4]", "float32[3]"),
        (np.zeros((), "f4"), F32, "result:", "float32[4]", "float32[]"),
        (np.zeros(1, "f4"), SCALAR, "result:", "float32[]", "float32[1]"),
        (None, F32, "result:", "float32[4]", "NoneType"),
        ("text", F32, "result:", "float32[4]", "str"),
        ([1.0] * 4, F32, "result:", "float32[4]", "list"),
        (7, F32, "result:", "float32[4]", "int"),
        ((np.zeros(4, "f4"),), F32, "result:", "float32[4]", "tuple"),
        (1.5, jax.ShapeDtypeStruct((), jnp.int32), "result:", "int32[]", "float"),
        (True, jax.ShapeDtypeStruct((), jnp.int32), "result:", "int32[]", "bool"),
        (1j, SCALAR, "result:", "float32[]", "complex"),
        (2**40, jax.ShapeDtypeStruct((), jnp.int32), "result:", "int32[]", "1099511627776"),
        (-1, jax.ShapeDtypeStruct((), jnp.uint8), "result:", "uint8[]", "-1"),
        ({"a": np.zeros(4, "f4"), "b": [np.zeros(4, "f4"), np.zeros(9, "f4")]},
         {"a": F32, "b": [F32, F32]}, "result['b'][1]:", "float32[4]", "float32[9]"),
        (np.zeros(4, "f4"), (F32, F32), "results", "(*, *)", "got *"),
        ((np.zeros(4, "f4"),), (F32, F32), "results", "(*, *)", "(*,)"),
        ([np.zeros(4, "f4")] * 2, (F32, F32), "results", "(*, *)", "[*, *]"),
        ({"a": np.zeros(4, "f4")}, {"b": F32}, "results", "{'b': *}", "{'a': *}"),
        ((), (F32,), "results", "(*,)", "()"),
    ],
)  # fmt: skip
def test_wrong_results_are_named(value, spec, leaf, expected, got):
    text = result_error(lambda: value, spec)
    assert "test_wrong_results_are_named.<locals>.<lambda>" in text
    assert leaf in text and expected in text and got in text
    assert text.index(expected) < text.rindex(got) or got == "1099511627776" or got == "-1"
    assert f"errors.{errors.ResultError.__name__}: " in jax_error(
        jax.jit(jaxbridge.call(lambda: value, spec))
    )


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_nothing_is_written_when_a_result_is_wrong(x, bad, monkeypatch):
    written = []
    adapter = _adapters.get("numpy")
    store = type(adapter).store

    def noted(self, value, out):
        written.append(value)
        store(self, value, out)

    monkeypatch.setattr(type(adapter), "store", noted)
    values = [np.ones(4, "f4") for _ in range(3)]
    values[bad] = np.ones(5, "f4")
    text = result_error(lambda: tuple(values), (F32,) * 3)
    assert f"result[{bad}]" in text and not written
    values[bad] = np.ones(4, "f4")
    jaxbridge.call(lambda: tuple(values), (F32,) * 3)()
    assert len(written) == 3, "the test sees what is written"


def test_wrong_results_leave_an_argument_in_place_alone(x):
    """What the function itself did to it stays; its neighbours are not touched by us."""
    seen = {}

    def fn(state, v):
        seen["before"] = state.copy()
        return np.zeros(9, "f4")

    state = jnp.full(4, 5.0)
    spec = (F32, F32)
    assert "float32[9]" in result_error(fn, spec, state, x, inout={0: 0})
    np.testing.assert_array_equal(seen["before"], [5, 5, 5, 5])
    np.testing.assert_array_equal(state, [5, 5, 5, 5])


@pytest.mark.parametrize(
    "value, dtype, want",
    [
        (3, "int32", 3), (3, "float32", 3), (2.5, "float32", 2.5), (2.5, "bfloat16", 2.5),
        (1, "complex64", 1), (1.5, "complex64", 1.5), (2j, "complex64", 2j), (True, "bool", True),
        (200, "uint8", 200), (np.float32(2), "float32", 2), (np.bool_(True), "bool", True),
    ],
)  # fmt: skip
def test_python_numbers_are_rank_0_results(value, dtype, want):
    spec = jax.ShapeDtypeStruct((), dtype)
    y = jaxbridge.call(lambda: value, spec)()
    assert y.dtype == jnp.dtype(dtype) and y.shape == () and y == want
    a, b = jaxbridge.call(lambda: {"a": value, "b": value}, {"a": spec, "b": spec})().values()
    assert a == want and b == want


@pytest.mark.parametrize(
    "value, dtype",
    [
        (1e300, "float32"), (-1e300, "float32"), (70000, "float16"), (1e39, "bfloat16"),
        (1e300j, "complex64"), (1e4, "float8_e4m3fn"), (10**400, "float32"), (10**30, "float16"),
    ],
)  # fmt: skip
def test_python_numbers_that_do_not_fit(value, dtype):
    text = result_error(lambda: value, jax.ShapeDtypeStruct((), dtype))
    assert f"result: {value!r} does not fit {dtype}[]" in text


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), 1e-300, 3e38])
def test_python_numbers_that_are_infinite_stay_so(value):
    y = jaxbridge.call(lambda: value, SCALAR)()
    np.testing.assert_array_equal(y, np.float32(value))


def test_named_tuples_are_tuples():
    def eigh():
        return np.linalg.eigh(np.diag(np.arange(1, 4, dtype="f4")))

    spec = (jax.ShapeDtypeStruct((3,), "float32"), jax.ShapeDtypeStruct((3, 3), "float32"))
    values, _ = jax.jit(jaxbridge.call(eigh, spec))()
    np.testing.assert_array_equal(values, [1, 2, 3])
    nested = {"a": [spec]}
    values, _ = jaxbridge.call(lambda: {"a": [eigh()]}, nested)()["a"][0]
    np.testing.assert_array_equal(values, [1, 2, 3])


def test_results_that_alias_arguments(x):
    y = jaxbridge.call(lambda v: v, F32)(x)
    assert y.unsafe_buffer_pointer() != x.unsafe_buffer_pointer()
    a, b = jax.jit(jaxbridge.call(lambda v: (v[::-1], v), (F32, F32)))(x)
    np.testing.assert_array_equal(a, [3, 2, 1, 0])
    np.testing.assert_array_equal(b, [0, 1, 2, 3])

    def swap(s, t):
        return s, t  # views of the memory that is updated

    def update(s, v):
        s += v
        return s[::-1]

    state, other = jaxbridge.call(update, (F32, F32), inout={0: 0})(x, x)
    np.testing.assert_array_equal(state, [0, 2, 4, 6])
    np.testing.assert_array_equal(other, [6, 4, 2, 0])


@pytest.mark.parametrize("spec", [(), None, lambda v: None], ids=["empty", "None", "callable"])
def test_an_array_is_no_result_where_none_is_declared(x, spec):
    """A callable that forgets to return what it makes must not pass for one that declares nothing."""
    seen = []
    odd = types.SimpleNamespace(shape=None, dtype="none")
    for returned in (None, 3, "done", [], {"status": 0}, {1: 2, "a": 3}, odd):
        f = jaxbridge.call(lambda v, returned=returned: (seen.append(v.sum()), returned)[1], spec)
        assert not f(x)
    assert seen == [6.0] * 7
    for wrong in (lambda v: v + 1, lambda v: v, lambda v: [v * 2], lambda v: {"a": v.sum()}):
        text = result_error(wrong, spec, x)
        assert "returned an array, float32[" in text and "no result is declared" in text


def test_a_mask_is_not_lost(x):
    def masked(v):
        return np.ma.masked_array(v * 2, v > 1)

    text = result_error(masked, F32, x)
    assert "MaskedArray" in text and "filled" in text
    y = jaxbridge.call(lambda v: masked(v).filled(0), F32)(x)
    np.testing.assert_array_equal(y, [0, 2, 0, 0])


def test_an_array_of_jax_is_no_result(x):
    kept = x * 2  # made outside
    assert "must not call JAX" in result_error(lambda v: kept, F32, x)


def test_a_status_is_no_result(x):
    y = jaxbridge.call(lambda v, *, out: (out.fill(7), "ignored")[1], F32, out="out")(x)
    np.testing.assert_array_equal(y, [7, 7, 7, 7])


@pytest.mark.parametrize("spec", [F32, (F32, F32), {"a": F32}], ids=["one", "two", "dict"])
@pytest.mark.parametrize("out", ["out", 0, -1])
def test_an_array_that_is_returned_and_not_written(x, out, spec):
    def fn(*args, **kwargs):
        return x_of(args, kwargs) * 2

    def x_of(args, kwargs):
        return next(a for a in args if isinstance(a, np.ndarray) and not a.flags.writeable)

    for wrong in (fn, lambda *a, **k: (x_of(a, k),), lambda *a, **k: [np.float32(3)]):
        text = result_error(wrong, spec, x, out=out)
        assert "returned an array, float32[" in text and f"although out={out!r}" in text


@pytest.mark.parametrize(
    "finish",
    [
        lambda a, b: None, lambda a, b: (a, b), lambda a, b: [b, a], lambda a, b: a,
        lambda a, b: a[1:], lambda a, b: b[::-1], lambda a, b: a.reshape(2, 2), lambda a, b: 0,
        lambda a, b: {"status": 0, "of": a}, lambda a, b: np.empty(0), lambda a, b: (),
    ],
)  # fmt: skip
def test_written_results_may_be_returned_too(x, finish):
    def fn(v, out):
        out[0][...], out[1][...] = v + 1, v + 2
        return finish(*out)

    for y, n in zip(jaxbridge.call(fn, (F32, F32), out=-1)(x), (1, 2), strict=True):
        np.testing.assert_array_equal(y, np.arange(4) + n)

    def update(state, v, out):
        state += v
        out[...] = v + 2
        return finish(state, out)

    spec = (F32, F32)
    state, y = jaxbridge.call(update, spec, out=-1, inout={0: 0})(x, x)
    np.testing.assert_array_equal(state, 2 * np.arange(4))
    np.testing.assert_array_equal(y, np.arange(4) + 2)


@pytest.mark.parametrize("framework", ["torch", "numba", "warp"])
def test_returned_arrays_of_a_framework(x, framework, needs):
    needs(framework)

    def copy(v, out):
        if framework == "warp":
            import warp

            warp.copy(out, v)
        else:
            out[:] = v

    def written(v, out):
        copy(v, out)
        return out, out[1:]

    def written_through_another(v, out):
        copy(v, out)
        return np.asarray(out)[1:]

    def not_written(v, out):
        copy(v, out)
        return v

    options = {"framework": framework, "out": "out"}
    for fn in (written, written_through_another):
        np.testing.assert_array_equal(jaxbridge.call(fn, F32, **options)(x), x)
    assert "returned an array" in result_error(not_written, F32, x, **options)
    assert "returned an array" in result_error(
        lambda v: v.numpy().copy() if hasattr(v, "numpy") else v.copy(),
        F32,
        x,
        framework=framework,
        inout={0: 0},
    )


_moves = {
    "data": lambda v, out: setattr(out, "data", v * 2),
    "set_": lambda v, out: out.set_(v * 2),
    "swapped": lambda v, out: swap_tensors(out, v * 2),
    "smaller": lambda v, out: out.resize_(2),
}


def swap_tensors(a, b):
    import torch

    torch.utils.swap_tensors(a, b)


@pytest.mark.parametrize("move", _moves)
@pytest.mark.parametrize("way", ["out", "inout", "ref"])
def test_a_tensor_that_was_put_on_other_memory(x, move, way, needs):
    needs("torch")
    fn = _moves[move]
    if way == "out":
        text = result_error(lambda v, out: fn(v, out), F32, x, framework="torch", out="out")
        assert "gave result other memory" in text
        spec = {"a": F32, "b": [F32]}
        text = result_error(
            lambda v, out: [out["a"].copy_(v), fn(v, out["b"][0]), None][2],
            spec,
            x,
            framework="torch",
            out=-1,
        )
        assert "gave result['b'][0] other memory" in text
    else:
        options = {"inout": {0: 0}} if way == "inout" else {}
        state = x + 0 if way == "inout" else jax.new_ref(x + 0)
        spec = F32 if way == "inout" else ()
        text = result_error(
            lambda s, v: [fn(v, s), None][1], spec, state, x, framework="torch", **options
        )
        assert "gave argument 0 other memory" in text
    assert "out.copy_(x)" in text


def test_what_leaves_a_tensor_on_its_memory(x, needs):
    needs("torch")

    def fn(v, state, out):
        import torch

        out.data.copy_(v)
        out.detach().add_(1)
        torch.add(out, 1, out=out)
        out.unsqueeze_(0).squeeze_(0)
        state.data.add_(v)

    y, state = jaxbridge.call(fn, lambda v, s: (v, s), framework="torch", out="out", inout={1: 1})(
        x, x
    )
    np.testing.assert_array_equal(y, np.arange(4) + 2)
    np.testing.assert_array_equal(state, np.arange(4) * 2)
    empty = jaxbridge.call(lambda v, out: out.copy_(v), like, framework="torch", out="out")
    assert empty(x[:0]).shape == (0,)


def test_an_argument_in_place_that_was_not_written(x):
    text = result_error(lambda v: v + 1, F32, x, inout={0: 0})
    assert "returned an array, float32[4]" in text and "inout=" in text
    for fn in (
        lambda v: np.add(v, 1, out=v),
        lambda v: np.add(v, 1, out=v)[::-1],
        lambda v: np.add(v, 1, out=v).fill(7),
    ):
        assert jaxbridge.call(fn, F32, inout={0: 0})(x)[0] in (1, 7)


@pytest.mark.parametrize("spec", [F32, (F32, F32)], ids=["one", "two"])
def test_none_in_place_of_results_hints_at_out(x, spec):
    text = result_error(lambda v: None, spec, x)
    assert "out=" in text and "inout=" in text
    assert "out=" not in result_error(lambda v: 7, spec, x)


def test_wrong_arguments_are_the_functions_own_error(x):
    with pytest.raises(TypeError, match="takes 0 positional arguments but 1 was given"):
        jaxbridge.call(lambda: None, ())(x)

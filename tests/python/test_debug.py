# SPDX-License-Identifier: Apache-2.0
"""JAXBRIDGE_DEBUG=1: every call is checked, and right calls stay right."""

import ctypes

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbridge
import processes
from jaxbridge import _config, errors

F32 = jax.ShapeDtypeStruct((4,), jnp.float32)


def like(x, *rest, **kw):
    return x


def overwrite(view):
    """Writes to memory that is read-only to NumPy."""
    address = view.__array_interface__["data"][0]
    ctypes.c_uint8.from_address(address).value ^= 0xFF


@pytest.fixture
def x():
    return jnp.arange(4, dtype=jnp.float32) + 0


@pytest.fixture
def debug(monkeypatch):
    """Plans that are made from now on are those of the debug mode."""
    monkeypatch.setattr(_config, "debug", True)


@pytest.fixture
def captured():
    """Makes the functions of a test its own: no plan of another test's is used."""
    return []


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_a_changed_input_is_found(x, debug, captured, jit):
    def fn(a, b, *, scale, tree):
        captured.append(1)
        overwrite(tree["k"][1])
        return a + b

    f = jaxbridge.call(fn, F32)
    program = jax.jit(f) if jit else f
    text = r"fn: the function changed its argument tree\['k'\]\[1\] in place; .*inout=.*Ref.*copy"
    with pytest.raises(errors.InputChangedError, match=text), jaxbridge.reraise():
        program(x, x + 1, scale=x + 2, tree={"k": [x + 3, x + 4]})


@pytest.mark.parametrize("position", [0, 1])
def test_the_argument_is_named(x, debug, captured, position):
    def fn(*views):
        captured.append(1)
        overwrite(views[position])
        return views[0] + 1

    with pytest.raises(errors.InputChangedError, match=f"argument {position} in place"):
        jaxbridge.call(fn, F32)(x, x + 1)


def test_without_debug_mode_it_is_not_looked_for(x, captured):
    def fn(v):
        captured.append(1)
        overwrite(v)
        return v.copy()

    jaxbridge.call(fn, F32)(x)


def test_nan_and_no_elements_are_no_changes(debug, captured):
    f = jaxbridge.call(lambda v: (captured.append(1), v + 1)[1], like)
    assert np.isnan(f(jnp.full(3, jnp.nan))).all()
    assert f(jnp.zeros((0, 2))).shape == (0, 2)
    assert float(f(jnp.float32(1))) == 2


def test_what_is_in_place_may_change(x, debug, captured):
    def fn(state, v):
        captured.append(1)
        state += v

    np.testing.assert_array_equal(jaxbridge.call(fn, F32, inout={0: 0})(x, x), [0, 2, 4, 6])
    ref = jax.new_ref(x + 0)
    jaxbridge.call(fn, ())(ref, x)
    np.testing.assert_array_equal(ref[...], [0, 2, 4, 6])

    def both(state, v):
        state += v
        overwrite(v)

    with pytest.raises(errors.InputChangedError, match="argument 1"):
        jaxbridge.call(both, F32, inout={0: 0})(x, x + 1)


def test_results_start_as_a_pattern(x, debug, captured):
    def fn(v, *, out):
        captured.append([o.view(np.uint8).copy() for o in out])
        out[0][...] = v  # and leaves the other as it is

    spec = (F32, jax.ShapeDtypeStruct((3,), jnp.uint8))
    a, b = jaxbridge.call(fn, spec, out="out")(x)
    assert all((o == 0xA5).all() for o in captured[0])
    np.testing.assert_array_equal(a, x)
    np.testing.assert_array_equal(b, [0xA5] * 3)


def test_the_pattern_spares_what_is_in_place(x, debug, captured):
    def fn(state, v, *, out):
        captured.append((state.copy(), out.copy()))
        out[...] = 7

    state, other = jaxbridge.call(fn, (F32, F32), inout={0: 0}, out="out")(x, x)
    np.testing.assert_array_equal(captured[0][0], x)
    assert (captured[0][1].view(np.uint8) == 0xA5).all()
    np.testing.assert_array_equal(state, x)
    np.testing.assert_array_equal(other, [7, 7, 7, 7])


@pytest.mark.parametrize(
    "options, fn",
    [
        ({}, lambda v: v * 2),
        ({"out": 0}, lambda out, v: np.multiply(v, 2, out=out)),
        ({"out": "out"}, lambda v, out: np.multiply(v, 2, out=out)),
        ({"inout": {0: 0}}, lambda v: np.multiply(v, 2, out=v)),
        ({"framework": "buffer", "out": -1}, lambda b, out: np.multiply(b, 2, out=np.asarray(out))),
    ],
    ids=["returned", "out first", "out by name", "in place", "buffer"],
)
def test_right_results_stay_right(x, debug, captured, options, fn):
    def called(*args, **kwargs):
        captured.append(1)
        return fn(*args, **kwargs)

    f = jaxbridge.call(called, like, vmap_method="sequential", **options)
    want = np.arange(4) * 2
    np.testing.assert_array_equal(f(x), want)
    np.testing.assert_array_equal(jax.jit(lambda v: f(f(v)))(x), want * 2)
    np.testing.assert_array_equal(jax.vmap(f)(jnp.stack([x, x]))[1], want)
    np.testing.assert_array_equal(
        jax.jit(lambda v: jax.lax.fori_loop(0, 3, lambda i, c: f(c), v))(x), want * 4
    )


def test_leases_and_errors_as_ever(x, debug, captured):
    def keep(v):
        captured.append(v[1:])
        return v + 1

    with pytest.raises(errors.ViewKeptError, match="argument 0"):
        jaxbridge.call(keep, F32)(x)
    captured.clear()

    def fail(v):
        part = v[1:]
        captured.append(1)
        raise ValueError(part.shape)

    with pytest.raises(ValueError) as caught:
        jaxbridge.call(fail, F32)(x)
    assert not getattr(caught.value, "__notes__", [])
    with pytest.raises(errors.ResultError, match=r"float64\[4\]"):
        jaxbridge.call(lambda v: (captured, np.zeros(4))[1], F32)(x)


def test_the_environment_variable():
    done = processes.run(
        """
        import ctypes, jax, jax.numpy as jnp, jaxbridge
        spec = jax.ShapeDtypeStruct((4,), jnp.float32)

        def fn(v, out):
            print(hex(out.view("u1")[0]))
            ctypes.c_uint8.from_address(v.__array_interface__["data"][0]).value ^= 0xFF

        try:
            jaxbridge.call(fn, spec, out="out")(jnp.ones(4) + 0)
        except jaxbridge.errors.InputChangedError:
            print("found")
        """,
        env={"JAXBRIDGE_DEBUG": "1"},
    )
    assert done.stdout.split() == ["0xa5", "found"] and done.stderr == ""


@pytest.mark.parametrize("value", ["yes", "", "2", "True"])
def test_other_values_are_refused(value, monkeypatch):
    monkeypatch.setenv("JAXBRIDGE_DEBUG", value)
    text = f"JAXBRIDGE_DEBUG is {value!r}; allowed values are 0 and 1"
    with pytest.raises(ValueError, match=text):
        _config._flag("JAXBRIDGE_DEBUG")


def test_unset_and_0(monkeypatch):
    monkeypatch.delenv("JAXBRIDGE_DEBUG", raising=False)
    assert _config._flag("JAXBRIDGE_DEBUG") is False
    monkeypatch.setenv("JAXBRIDGE_DEBUG", "0")
    assert _config._flag("JAXBRIDGE_DEBUG") is False


def test_a_wrong_value_stops_the_import():
    done = processes.run("import jaxbridge", env={"JAXBRIDGE_DEBUG": "on"}, status=1)
    last = done.stderr.strip().splitlines()[-1]
    assert last == (
        "ValueError: environment variable JAXBRIDGE_DEBUG is 'on'; allowed values are 0 and 1"
    )

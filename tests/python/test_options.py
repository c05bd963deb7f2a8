# SPDX-License-Identifier: Apache-2.0
"""What `call` and `function` are given, what a Function is as an object, and what it says of itself."""

import copy
import functools
import pickle
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbridge
from jaxbridge import errors

F32 = jax.ShapeDtypeStruct((4,), jnp.float32)


def add_one(x):
    return x + 1


@pytest.fixture
def x():
    return jnp.arange(4, dtype=jnp.float32)


@pytest.mark.parametrize(
    "options, text",
    [
        (dict(framework="jax"), "framework is 'jax'"),
        (dict(framework={"gpu": "cupy"}), "'cpu' and 'cuda'"),
        (dict(out=1), "out is 1"),
        (dict(out=True), "out is True"),
        (dict(out="not a name"), "out is 'not a name'"),
        (dict(vmap_method="fast"), "vmap_method is 'fast'"),
        (dict(vmap_method="sequential", elementwise=True), "drop vmap_method"),
        (dict(inout={0: -1}), "inout is"),
        (dict(inout=0), "inout is 0"),
        (dict(inout=[0]), "expected a mapping"),
        (dict(has_side_effect="no"), "has_side_effect is 'no'"),
        (dict(inout={0: 0, 1: 0}), "one result cannot be two"),
        (dict(name=""), "name is ''"),
        (dict(name="\ud800"), r"name is '\\ud800'; expected text that UTF-8 has"),
        (dict(out="class"), "out is 'class'.*a keyword of Python"),
    ],
)
def test_bad_options(options, text):
    with pytest.raises(ValueError, match=text):
        jaxbridge.call(add_one, F32, **options)


@pytest.mark.parametrize(
    "options, kind, text",
    [
        (dict(framework=3), ValueError, "framework is 3; expected one of numpy"),
        (dict(framework=["numpy"]), ValueError, r"framework is \['numpy'\]; expected one of numpy"),
        (
            dict(framework={"cpu": ["x"]}),
            ValueError,
            r"framework is \['x'\]; expected one of numpy",
        ),
        (dict(framework={3: "numpy", "cpu": "numpy"}), ValueError, r"'cuda', got \[3, 'cpu'\]"),
        (dict(name=3), TypeError, "name is 3; expected None or a string"),
        (dict(name=["a"]), TypeError, r"name is \['a'\]; expected None or a string"),
        (dict(out=0.0), ValueError, "out is 0.0; expected None"),
        (dict(out=np.zeros(2)), ValueError, "out is array.*; expected None"),
        (dict(inout={0: True}), ValueError, "inout is {0: True}; expected a mapping"),
        (dict(inout={True: 0}), ValueError, "inout is {True: 0}; expected a mapping"),
        (
            dict(elementwise=np.zeros(2)),
            ValueError,
            "elementwise is array.*; expected True or False",
        ),
        (dict(has_side_effect=1), ValueError, "has_side_effect is 1; expected None, True or False"),
    ],
)
def test_options_of_another_type(options, kind, text):
    with pytest.raises(kind, match=text):
        jaxbridge.call(add_one, F32, **options)


@pytest.mark.parametrize("fn", [None, 3, {"cpu": None}, {"cpu": add_one, "cuda": 3}])
def test_functions_that_are_none(fn):
    with pytest.raises(TypeError, match=r"function for c\w+ is (None|3), not a callable; expected"):
        jaxbridge.call(fn, F32)


def test_unknown_option():
    with pytest.raises(TypeError, match="unexpected keyword"):
        jaxbridge.call(add_one, F32, outt=0)


def test_platform_without_function(x):
    f = jaxbridge.call({"cuda": add_one}, F32)
    with pytest.raises(errors.PlatformError, match="none for cpu"):
        f(x)
    with pytest.raises(errors.PlatformError, match="cupy has no arrays on cpu"):
        jaxbridge.call(add_one, F32, framework="cupy")(x)


def test_declared_results_that_are_none(x):
    with pytest.raises(TypeError, match="ShapeDtypeStruct"):
        jaxbridge.call(add_one, "float32")(x)


@pytest.mark.parametrize("length", [-1, np.int64(-1)])
def test_a_declared_length_that_is_negative(x, length):
    declared = types.SimpleNamespace(shape=(2, length), dtype=np.dtype("float32"))
    with pytest.raises(ValueError, match="add_one: .*a negative length, -1"):
        jaxbridge.call(add_one, declared)(x)


def test_a_result_of_another_byte_order(x):
    f = jaxbridge.call(lambda v: np.zeros(v.shape, ">f4"), lambda v: v)
    with pytest.raises(errors.ResultError, match=r"float32\[.*got float32 \(>f4\)\["):
        f(x)


def test_copies_and_pickles_of_a_function(x):
    f = jaxbridge.call(add_one, lambda v: v)
    assert copy.copy(f) is f
    assert copy.deepcopy({"f": [f]})["f"][0] is f
    with pytest.raises(
        TypeError, match=r"pickle the function that it calls, and call jaxbridge\.call again"
    ):
        pickle.dumps(f)


def test_decorator_keeps_the_function():
    @jaxbridge.function(result=lambda v: v)
    def double(v):
        """Twice v."""
        return v * 2

    assert double.__name__ == "double" and double.__doc__ == "Twice v."
    assert float(double(jnp.float32(2))) == 4


def test_current(x):
    seen = []

    def fn(v):
        seen.append(jaxbridge.current())
        return v.copy()

    jaxbridge.call(fn, F32)(x)
    assert seen == [jaxbridge.Context("cpu", 0, 0, False)]
    with pytest.raises(RuntimeError, match="inside a function"):
        jaxbridge.current()


def test_second_device(x):
    seen = []

    def fn(v):
        seen.append(jaxbridge.current().device)
        return v.copy()

    y = jax.jit(jaxbridge.call(fn, F32))(jax.device_put(x, jax.devices()[1])).block_until_ready()
    assert seen == [1] and y.devices() == {jax.devices()[1]}


def test_stats_and_clear(x):
    f = jaxbridge.call(functools.partial(np.add, 1), F32)
    g = jax.jit(lambda v: f(f(v)))
    g(x)
    f.clear()
    g(x)
    assert f.stats()["calls"] == 4


def test_python_numbers_under_transformations():
    log = jaxbridge.call(lambda v: None, None)
    assert float(jax.grad(lambda v: (log(v), v * v)[1])(2.0)) == 4
    jax.effects_barrier()

    @jax.custom_jvp
    def sine(v):
        return jaxbridge.call(np.sin, lambda u: jax.ShapeDtypeStruct(u.shape, u.dtype))(v)

    sine.defjvp(lambda p, t: (sine(*p), jnp.cos(p[0]) * t[0]))
    np.testing.assert_allclose(jax.grad(sine)(2.0), np.cos(2.0), rtol=1e-6)


def test_python_numbers_in_a_ufunc_under_custom_jvp():
    sine = jaxbridge.from_ufunc(np.sin)
    f = jax.custom_jvp(lambda v: sine(v))
    f.defjvp(lambda p, t: (f(p[0]), t[0] * jnp.cos(p[0])))
    np.testing.assert_allclose(f(1.0), np.sin(1.0), rtol=1e-6)
    np.testing.assert_allclose(jax.grad(f)(1.0), np.cos(1.0), rtol=1e-6)

# SPDX-License-Identifier: Apache-2.0
"""What has the name of a function's content and is another object."""

import enum
import functools
import gc
import inspect
import itertools
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbridge
from jaxbridge import _core

F32 = jax.ShapeDtypeStruct((4,), jnp.float32)


def module_level(v, k=2, *, n=3):
    return v * k + n


@pytest.fixture
def x():
    return jnp.arange(4, dtype=jnp.float32)


def wrapped(k):
    @functools.wraps(module_level)
    def f(v):
        return v * 0 + f.k

    f.k = k
    return f


class Compiled:
    """What a compiler's decorator makes of a function: Numba's dispatchers are like this."""

    def __init__(self, fn, k):
        functools.update_wrapper(self, fn)
        self._fn = fn
        self._k = k

    def __call__(self, *args):
        return self._fn(*args) + self._k


# Each defines `thing` in a module that is run twice, with other values of K.
DEFINITIONS = {
    "wrapped": "def thing(v): return v * 0\nthing = Compiled(thing, K)",
    "class": "class thing:\n    k = K",
    "enum": "class E(enum.Enum):\n    A = K\nthing = E.A",
    "flag": "class E(enum.Flag):\n    A = 1\n    B = 2 * K\nthing = E.A | E.B",
    "namedtuple": "class N(collections.namedtuple('N', 'a')):\n    k = K\nthing = N(1)",
    "function": "def thing(): return K",
    "module": "thing = types.ModuleType('the_same_name'); thing.k = K",
}


def value_of(thing, v):
    if isinstance(thing, Compiled):
        return float(thing(np.zeros(4, np.float32))[0])
    if isinstance(thing, enum.Enum):
        return thing.value
    return thing() if inspect.isfunction(thing) else thing.k


def use_static(v, thing):
    return v * 0 + value_of(thing, v)


def use_exported(v, thing):
    return v * 0 + value_of(thing, v)


@pytest.fixture
def run_again():
    module = types.ModuleType("a_module_of_things")
    module.__dict__.update(
        Compiled=Compiled, enum=enum, collections=__import__("collections"), types=types
    )
    sys.modules[module.__name__] = module

    def run(source, k):
        module.K = np.float32(k) if "Compiled" in source else k
        exec(source, module.__dict__)
        return module.thing

    yield run
    del sys.modules[module.__name__]


@pytest.mark.parametrize(
    "how, kind",
    [
        ("callee", "wrapped"),
        *itertools.product(["in a closure", "fixed by partial", "static"], DEFINITIONS),
    ],
)
def test_what_was_defined_again_is_another_thing(x, run_again, kind, how):
    def function_of(thing):
        if how == "in a closure":
            return jaxbridge.call(lambda v: use_static(v, thing), F32)
        if how == "fixed by partial":
            return jaxbridge.call(functools.partial(use_static, thing=thing), F32)
        if how == "static":
            f = jaxbridge.call(use_static, lambda v, thing: v)
            return lambda v: f(v, thing)
        return jaxbridge.call(thing, F32)

    source = DEFINITIONS[kind]
    kept = []
    for k in (1, 2, 3):
        thing = run_again(source, k)
        f = function_of(thing)
        kept.append((f, jax.jit(f), value_of(thing, x)))
        for f, program, value in kept:
            # A function that reads a global reads what that is now, as ever.
            value = k if kind == "function" else value
            assert float(f(x)[0]) == float(program(x)[0]) == float(jax.jit(f)(x)[0]) == value


def test_what_was_defined_again_can_be_exported_under_a_name(x, run_again):
    def program(**options):
        f = jaxbridge.call(use_exported, lambda v, thing: v, **options)
        thing = run_again(DEFINITIONS["class"], 1 + len(options))
        return jax.export.export(
            jax.jit(lambda v: f(v, thing)), disabled_checks=jaxbridge.export_checks()
        )(x)

    first = program()
    with pytest.raises(NotImplementedError, match="defined again.*give this one a name of its own"):
        program()
    second = program(name="with another class")
    assert float(first.call(x)[0]) == 1 and float(second.call(x)[0]) == 2


def test_globals_of_another_namespace_are_not_merged(x):
    results = []
    kept = []
    for value in (1, 2, 1):
        namespace = {"__name__": "a_notebook", "SCALE": np.float32(value)}
        exec("def f(v):\n    return v * 0 + SCALE", namespace)
        f = jaxbridge.call(namespace["f"], F32)
        kept.append(f)
        results += [float(f(x)[0]), float(jax.jit(f)(x)[0])]
    assert results == [1, 1, 2, 2, 1, 1]
    assert [float(f(x)[0]) for f in kept] == [1, 2, 1]


def test_equal_content_shares_a_target(x):
    def make():
        return jaxbridge.call(lambda v: v + 1, F32)

    keep = [jax.jit(make()).lower(x).compile()]
    size = _core.registry_size()
    keep += [jax.jit(make()).lower(x).compile() for _ in range(3)]
    assert _core.registry_size() == size
    del keep
    gc.collect()

# SPDX-License-Identifier: Apache-2.0
"""What a function is, told by content: what is merged, what never is, and the same in every process."""

import enum
import functools
import gc
import importlib
import inspect
import itertools
import math
import operator
import re
import sys
import types

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxbridge
import processes
from jaxbridge import _core, _identity

F32 = jax.ShapeDtypeStruct((4,), jnp.float32)


def like(x, *rest, **kw):
    return x


def told(fn):
    return _identity.is_told(_identity.fingerprint(fn)[0])


def identity_of(fn):
    return _identity.fingerprint(fn)[0]


def same(a, b):
    return identity_of(a) == identity_of(b)


def closure(value):
    def f(v):
        return v, value

    return f


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Level(enum.IntEnum):
    LOW = 1


class Letter(enum.StrEnum):
    A = "a"


class Bits(enum.Flag):
    A = 1
    B = 2


class TaggedText(str):
    pass


class Callable:
    def __call__(self, v):
        return v

    def method(self, v):
        return v

    @classmethod
    def of_class(cls, v):
        return v

    @staticmethod
    def static(v):
        return v


class Special(Callable):
    pass


def module_level(v, k=2, *, n=3):
    return v * k + n


@pytest.fixture
def x():
    return jnp.arange(4, dtype=jnp.float32)


# ---- told by content -----------------------------------------------------------------------------

TOLD = {
    "None": None, "True": True, "1": 1, "1.0": 1.0, "big": 10**5000, "-0.0": -0.0, "0.0": 0.0,
    "nan": math.nan, "inf": math.inf, "0j": 0j, "-0j": complex(0, -0.0), "text": "1",
    "surrogate": "\ud800", "bytes": b"1", "empty": (), "tuple": (1,), "nested": ((1,),),
    "tuple of float": (1.0,), "frozenset": frozenset({1}), "frozenset of text": frozenset({"a", "b"}),
    "slice": slice(1), "slice 2": slice(1, None), "range": range(3), "Ellipsis": ..., "int": int,
    "module": np, "other module": math, "float32": np.float32(1), "float64": np.float64(1),
    "bfloat16": ml_dtypes.bfloat16(1), "dtype": np.dtype("f4"), "dtype >": np.dtype(">f4"),
    "dtype bf16": np.dtype(ml_dtypes.bfloat16), "enum": Color.RED, "enum 2": Color.BLUE,
    "int enum": Level.LOW, "text enum": Letter.A, "flag": Bits.A, "flags": Bits.A | Bits.B,
    "no flags": Bits(0), "class": Callable, "type": type, "ufunc": np.add, "ufunc 2": np.sin,
    "builtin": len, "builtin 2": math.sin, "function": module_level, "lambda": lambda v: v + 1,
    "lambda 2": lambda v: v + 2, "partial": functools.partial(module_level, 1),
    "partial 2": functools.partial(module_level, 2),
    "partial by name": functools.partial(module_level, k=1), "class method": Callable.of_class,
    "class method of subclass": Special.of_class, "static method": Callable.static,
    "closure": closure(1), "closure 2": closure(1.0), "flag of re": re.IGNORECASE,
}  # fmt: skip


def test_what_is_told_is_told_apart():
    by_identity = {}
    for name, value in TOLD.items():
        identity = identity_of(closure(value))
        assert _identity.is_told(identity), name
        assert identity == identity_of(closure(value)), name
        by_identity.setdefault(identity, []).append(name)
    # slice(1) is slice(None, 1): another than slice(1, None).
    assert all(len(names) == 1 for names in by_identity.values()), by_identity


MUTABLE = {
    "list": [], "dict": {}, "set": set(), "bytearray": bytearray(), "array": np.arange(3),
    "jax.Array": jnp.arange(3), "object": Callable(), "bound method": Callable().method,
    "bound builtin": [].append, "tuple of list": ([],), "partial of list": functools.partial(max, []),
    "text with attributes": TaggedText("a"), "generator": np.random.default_rng(0).normal,
    "lru_cache": functools.lru_cache(module_level), "vectorize": np.vectorize(module_level),
    "namespace": types.SimpleNamespace(), "memoryview": memoryview(b""), "counter": itertools.count(),
    "itemgetter": operator.itemgetter(0), "void": np.zeros(1, "i4,f4")[0],
    "ufunc of nobody": np.frompyfunc(lambda v: v, 1, 1), "closure over list": closure([]),
    "mapping": types.MappingProxyType({}),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTABLE)
def test_what_can_change_is_never_merged(name):
    value = MUTABLE[name]
    assert not told(closure(value)) and not same(closure(value), closure(value))
    if callable(value):
        assert not told(value)


def test_parts_of_a_function():
    def variants():
        yield lambda v: v + 1
        yield lambda v: v + 2
        yield lambda w: w + 1
        yield lambda v, *w: v + 1
        yield lambda v, w=1: v + 1
        yield lambda v, w=1.0: v + 1
        yield lambda v, w=True: v + 1
        yield lambda v, w=2: v + 1
        yield lambda v, *, w=1: v + 1
        yield lambda v, *, w=2: v + 1
        yield lambda v, *, u=1: v + 1
        yield lambda v: [v + 1 for _ in "a"]
        yield lambda v: [v + 2 for _ in "a"]
        yield lambda v: (lambda u: u + 1)(v)
        yield lambda v: (lambda u: u + 2)(v)
        yield lambda v: v.real
        yield lambda v: v.imag
        yield lambda v: abs(v)
        yield lambda v: abs
        yield lambda v: 0.0
        yield lambda v: -0.0
        yield lambda v: v in {1, 2, "a"}
        yield lambda v: v in {1, 2, "b"}

    made = list(variants())
    assert len({identity_of(f) for f in made}) == len(made)
    assert [identity_of(f) for f in variants()] == [identity_of(f) for f in made]


def test_exception_tables_count():
    # Equal instructions, but another part of them is guarded.
    sources = [
        """
        def f(x):
            try: y = g(x); z = h(y)
            except ValueError: z = 0
            return z
        """,
        """
        def f(x):
            try: y = g(x)
            except ValueError: z = 0
            else: z = h(y)
            return z
        """,
    ]
    made = []
    for source in sources:
        namespace = {"__name__": "somewhere"}
        exec(inspect.cleandoc(source), namespace)
        made.append(namespace["f"])
    a, b = made
    if a.__code__.co_code == b.__code__.co_code:  # in Python 3.12
        assert a.__code__.co_exceptiontable != b.__code__.co_exceptiontable
    assert not same(a, b)


def test_name_and_module_count():
    namespaces = []
    for module, name in [("a", "f"), ("a", "g"), ("b", "f")]:
        namespace = {"__name__": module}
        exec(f"def {name}(v): return v", namespace)
        namespaces.append(namespace[name])
    assert len({identity_of(f) for f in namespaces}) == 3


def test_file_and_lines_do_not_count():
    made = []
    for source, file in [("def f(v): return v", "one.py"), ("\n\n\ndef f(v): return v", "two.py")]:
        namespace = {"__name__": "somewhere"}
        exec(compile(source, file, "exec"), namespace)
        made.append(namespace["f"])
    assert same(*made)


def test_a_tracer_or_a_profiler_does_not_count():
    def f(v):
        return v + 1

    before = identity_of(f)
    for _ in range(100):  # specialised
        f(1)
    sys.setprofile(lambda *_: None)
    try:
        f(1)
        assert identity_of(f) == before
    finally:
        sys.setprofile(None)
    assert identity_of(f) == before


def test_which_function_is_met_again():
    def use(a, b, c):
        return lambda v: (a(v), b(v), c(v))

    one, two = closure(1), closure(2)
    assert not same(use(one, two, one), use(one, two, two))
    assert same(use(one, two, one), use(closure(1), closure(2), one)) is False
    assert same(use(one, two, one), use(one, two, one))


def test_recursive_functions():
    def make(k):
        def down(n):
            return k if n == 0 else down(n - 1)

        return down

    assert told(make(1)) and same(make(1), make(1)) and not same(make(1), make(2))

    def mutual():
        def even(n):
            return n == 0 or odd(n - 1)

        def odd(n):
            return n != 0 and even(n - 1)

        return even

    assert told(mutual()) and same(mutual(), mutual())


def test_decorated_functions():
    def decorate(k):
        def wrap(fn):
            @functools.wraps(fn)
            def inner(v):
                return fn(v) + k

            return inner

        return wrap

    def other(v):
        return v

    assert same(decorate(1)(module_level), decorate(1)(module_level))
    assert not same(decorate(1)(module_level), decorate(2)(module_level))
    assert not same(decorate(1)(module_level), decorate(1)(other))
    assert not same(decorate(1)(module_level), module_level)


def test_an_empty_cell_cannot_be_told():
    def f(v):
        return later

    assert not told(f)
    later = 1
    assert told(f)


def test_state_of_closures_is_never_merged():
    def counter():
        n = 0

        def f(v):
            nonlocal n
            n += 1
            return v + n

        return f

    def inner_counter():
        n = 0

        def f(v):
            def add():
                nonlocal n
                n += 1

            add()
            return v + n

        return f

    def deleting():
        n = 0

        def f(v):
            nonlocal n
            del n

        return f

    def with_attribute():
        def f(v):
            f.n += 1
            return v + f.n

        f.n = 0
        return f

    def shared():
        n = 0

        def add():
            nonlocal n
            n += 1

        return lambda v: (add(), v + n)

    for make in (counter, inner_counter, deleting, with_attribute, shared):
        assert not told(make()), make.__name__
        f = make()
        assert not same(f, f), make.__name__


def test_variables_that_can_still_change_are_not_told():
    def in_a_loop(k):
        for i in range(k):
            yield lambda v: v * i  # noqa: B023

    def assigned_twice(k):
        k = k + 1
        f = lambda v: v * k
        return told(f), f

    def deleted():
        k = 1
        f = lambda v: v * k  # noqa: F821
        was_told = told(f)
        del k
        return was_told, f

    def waiting():
        k = 1
        yield lambda v: v * k
        k = 2

    def with_a_setter():
        k = 1

        def set_it(value):
            nonlocal k
            k = value

        return (lambda v: v * k), set_it

    def with_a_reader():
        k = 1
        return (lambda v: v * k), (lambda: k)

    def in_its_scope(k):
        j = 2
        return told(lambda v: v * k * j)

    loop = in_a_loop(3)
    assert not told(next(loop)) and not told(next(loop))
    was_told, f = assigned_twice(1)
    assert not was_told and told(f)  # its scope has ended
    assert not deleted()[0]
    scope = waiting()
    f = next(scope)
    assert not told(f)
    assert next(scope, None) is None and told(f)
    f, set_it = with_a_setter()
    assert not told(f)
    del set_it
    assert told(f)
    f, _reader = with_a_reader()
    assert told(f)
    assert in_its_scope(1)


def test_a_variable_of_the_same_name_around_the_scope():
    """The closure's own variable counts, not one of that name in a function that runs."""
    n = 0

    def show():
        return n

    def make():
        n = 1

        def bump():
            nonlocal n
            n += 1

        return (lambda v: v * n), bump

    f, bump = make()
    assert show() == 0 and not told(f)
    del bump
    assert told(f)


def test_methods_with_super_are_told():
    class Base:
        @classmethod
        def f(cls, v):
            return v

    class Derived(Base):
        @classmethod
        def f(cls, v):
            return super().f(v)

    # The class itself can't be found by its name here; of the function's cells that is the only one.
    assert _identity._is_settled(Derived.f.__func__, 0)


def renamed(k):
    def f(v):
        return v * 0 + f.k

    f.__qualname__ = "renamed"
    f.k = k
    return f


def wrapped(k):
    @functools.wraps(module_level)
    def f(v):
        return v * 0 + f.k

    f.k = k
    return f


def called_by_its_wrapped(k):
    @functools.wraps(lambda v: v * 0 + k)
    def f(v):
        return f.__wrapped__(v)

    return f


def by_its_name(k):
    def f(v):
        return v * 0 + float(f.__name__)

    f.__name__ = str(k)
    return f


def by_its_documentation(k):
    def f(v):
        return v * 0 + float(f.__doc__)

    f.__doc__ = str(k)
    return f


@pytest.mark.parametrize(
    "make", [renamed, wrapped, called_by_its_wrapped, by_its_name, by_its_documentation]
)
def test_attributes_are_told_apart(x, make):
    functions = [jaxbridge.call(make(k), F32) for k in (2, 3, 2)]
    programs = [jax.jit(f) for f in functions]
    assert [float(f(x)[0]) for f in (*functions, *programs)] == [2, 3, 2, 2, 3, 2]


@pytest.mark.parametrize("change", ["attribute", "keyword"])
def test_what_changes_after_the_function_was_made(x, change):
    def make():
        def f(v, *, k=1):
            return v * 0 + getattr(f, "k", k)

        return f

    first, second = make(), make()
    a, b = jaxbridge.call(first, F32), jaxbridge.call(second, F32)
    assert float(a(x)[0]) == float(b(x)[0]) == 1
    if change == "attribute":
        second.k = 7
    else:
        second.__kwdefaults__["k"] = 7
    assert (float(a(x)[0]), float(b(x)[0])) == (1, 7)


def test_deep_and_shared_partials(x):
    deep = shared = lambda *given: given[-1] * 0 + (len(given) - 1)
    for _ in range(400):
        deep = functools.partial(deep, 1)
    nested = functools.partial(shared, 1)
    for _ in range(40):
        nested = functools.partial(shared, nested, nested)
    assert float(jaxbridge.call(deep, F32)(x)[0]) == 400
    assert told(nested)


def test_counters_count_on_their_own(x):
    def counter():
        n = 0

        def f(v):
            nonlocal n
            n += 1
            return v * 0 + n

        return jaxbridge.call(f, F32)

    a, b = counter(), counter()
    assert [float(f(x)[0]) for f in (a, a, b, a, b)] == [1, 2, 1, 3, 2]


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_a_variable_that_changes_later_is_not_merged(x, jit):
    """The enclosing function gives its variable another value after the Function was made."""

    def run(scale, then):
        def f(v):
            return v * 0 + scale

        g = jaxbridge.call(f, F32)
        g = jax.jit(g) if jit else g
        first = float(g(x)[0])
        scale = then
        return first, float(g(x)[0]), g

    kept = []
    for scale, then in [(1, 10), (1, 20), (10, 1), (1, 1), (20, 30)]:
        first, second, g = run(scale, then)
        kept.append(g)
        assert (first, second) == (scale, then)
    assert [float(g(x)[0]) for g in kept] == [10, 20, 1, 1, 30]


def test_a_variable_that_changes_after_it_was_merged(x):
    """Two Functions with equal closures: the one's variable changes when both have been called."""

    def make(k):
        g = jax.jit(jaxbridge.call(lambda v: v * 0 + k, F32))
        g(x)

        def change(value):
            nonlocal k
            k = value

        return g, change

    (a, _), (b, change_b) = make(1), make(1)
    change_b(5)
    assert (float(a(x)[0]), float(b(x)[0])) == (1, 5)


def test_a_function_that_is_patched(x):
    """As IPython's autoreload does it: the same function object gets other code."""

    def make():
        return lambda v: v + 1

    first, second = make(), make()
    f = jaxbridge.call(first, F32)
    program = jax.jit(f)
    assert float(f(x)[0]) == float(program(x)[0]) == 1
    first.__code__ = (lambda v: v + 10).__code__
    g = jaxbridge.call(second, F32)
    assert float(g(x)[0]) == float(jax.jit(g)(x)[0]) == 1
    assert float(f(x)[0]) == float(program(x)[0]) == float(jax.jit(f)(x)[0]) == 10
    assert f.stats()["calls"] >= 5 and g.stats()["calls"] >= 2  # what was counted before counts


# ---- what has the same name and is another object ------------------------------------------------


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


# ---- references ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value, want",
    [
        (module_level, "test_identity:module_level"),
        (Callable.static, "test_identity:Callable.static"),
        (Callable, "test_identity:Callable"),
        (np.add, "numpy:add"),
        (np.float32, "numpy:float32"),
        (len, "builtins:len"),
        (int, "builtins:int"),
        (math.sin, "math:sin"),
        (lambda v: v, None),
        (closure(1), None),
        (Callable(), None),
        (Callable().method, None),
        (functools.partial(module_level), None),
        (np.frompyfunc(len, 1, 1), None),
        (3, None),
        (None, None),
    ],
)
def test_references(value, want):
    assert _identity.reference(value) == want
    if want is not None:
        assert _identity.resolve(want) is value


def test_scipys_ufuncs_have_references():
    special = pytest.importorskip("scipy.special")
    assert _identity.reference(special.erf) == "scipy.special:erf"
    assert _identity.resolve("scipy.special:erf") is special.erf


@pytest.mark.parametrize(
    "reference, text",
    [
        (
            "not_there.at_all:f",
            "'not_there.at_all' is not imported in this process; import it first",
        ),
        ("math:no_such", "'math' has no 'no_such'"),
        ("test_identity:Callable.no_such", "has no 'Callable.no_such'"),
    ],
)
def test_references_that_lead_nowhere(reference, text):
    with pytest.raises(LookupError, match=re.escape(text)):
        _identity.resolve(reference)


# ---- keys ----------------------------------------------------------------------------------------


def site_of(f, *args, **kwargs):
    """The call site of a call, from its jaxpr."""
    jaxpr = jax.make_jaxpr(f)(*args, **kwargs)
    sites = [e.params["call"].site for e in jaxpr.eqns if "call" in e.params]
    assert len(sites) == 1, jaxpr
    return sites[0]


def other(v, k=2, *, n=3):
    return v * k + n


def with_state(v, state=None):
    return v


def test_every_option_changes_the_key_or_the_comparison(x):
    """The property on which caching rests: nothing that changes a call is left out."""
    base = {"fn": with_state, "result_shape_dtypes": F32}
    changes = {
        "fn": [other, {"cpu": module_level, "cuda": other}, {"cpu": module_level}, lambda v: v],
        "result_shape_dtypes": [
            jax.ShapeDtypeStruct((3,), jnp.float32), jax.ShapeDtypeStruct((4,), jnp.int32),
            (F32,), [F32], {"a": F32}, {"b": F32}, (F32, F32), (),
        ],
        "framework": ["numpy", "buffer", {"cpu": "numpy", "cuda": "numpy"}],
        "out": ["out", "output", 0, -1],
        "inout": [{0: 0}],
        "graph": ["replay", "verify", "xla"],
        "scratch": ["xla"],
        "state": [other, lambda context, v: None],
        "elementwise": [True],
        "vmap_method": ["sequential", "sequential_unrolled", "expand_dims", "broadcast_all"],
        "has_side_effect": [True],
        "name": ["a name", "another name"],
    }  # fmt: skip
    options = set(inspect.signature(jaxbridge.call).parameters)
    assert options == set(changes), "a new option needs a line here"

    seen = {("base", 0): (site_of(jaxbridge.call(**base), x), F32)}
    for option, values in changes.items():
        for i, value in enumerate(values):
            with_it = {**base, option: value}
            f = jaxbridge.call(**with_it)
            seen[option, i] = (site_of(f, x), with_it["result_shape_dtypes"])
    for (a, (site_a, spec_a)), (b, (site_b, spec_b)) in itertools.combinations(seen.items(), 2):
        differ = site_a != site_b or site_a.options != site_b.options
        # Shapes and dtypes of results stand beside the site, in the primitive's own parameters.
        only_shapes = jax.tree.structure(spec_a) == jax.tree.structure(spec_b) and spec_a != spec_b
        # framework=None is NumPy on the CPU, CuPy on CUDA; by platform it can be said otherwise.
        same_frameworks = {a, b} == {("framework", 0), ("framework", 2)}
        assert differ or only_shapes or same_frameworks, (a, b)
        if site_a.key != site_b.key:
            assert site_a != site_b
    keys = {option: site.key for option, (site, _) in seen.items()}
    by_vmap = {keys["vmap_method", i] for i in range(4)}
    assert by_vmap == {keys["base", 0]}, "how to batch does not change what is called"
    of_the_target = {
        k: v for k, v in keys.items() if k[0] not in ("vmap_method", "result_shape_dtypes")
    }
    del of_the_target["framework", 2]
    assert len(set(of_the_target.values())) == len(of_the_target)


def test_which_argument_is_which_result_changes_the_key(x):
    def fn(a, b):
        return a

    pairs = [{0: 0}, {0: 1}, {1: 0}, {1: 1}]
    sites = [site_of(jaxbridge.call(fn, (F32, F32), inout=inout), x, x) for inout in pairs]
    assert len({site.key for site in sites}) == 4


def test_equal_calls_are_equal(x):
    for options in [
        {},
        {"out": "out"},
        {"inout": {0: 0}},
        {"elementwise": True},
        {"name": "equal"},
    ]:
        a = site_of(jaxbridge.call(module_level, F32, **options), x)
        b = site_of(jaxbridge.call(module_level, F32, **options), x)
        assert a == b and hash(a) == hash(b) and a.text == b.text


STATICS = [
    None, True, 1, 1.0, 1 + 0j, "1", b"1", 0.0, -0.0, math.nan, 0j, complex(0, -0.0), (), [], {},
    (1,), [1], {"a": 1}, {"a": True}, {"a": 1.0}, {"b": 1}, {"a": {"b": 1}}, {"a": {"b": True}},
    {1: "a"}, {True: "a"}, {1.0: "a"}, {(1,): "a"}, frozenset({1}), frozenset({True}),
    frozenset({1.5, 2}), ..., slice(1), slice(1.0), slice(0, 1), range(1), range(2), Color.RED,
    Color.BLUE, Level.LOW, Letter.A, "a", TaggedText("a"), Bits.A, Bits.A | Bits.B, Bits(0), int,
    float, np.dtype("f4"), np.dtype(">f4"), np.dtype("f8"), np.dtype("S3"), np.dtype("S4"),
    np.dtype([("a", "f4")]), np.dtype([("b", "f4")]), jnp.float32, np.float32, len, np.add, np.sin,
    module_level, other, lambda v: v, Callable, Callable(), functools.partial(other, 1),
]  # fmt: skip


def test_every_static_changes_the_key(x):
    f = jaxbridge.call(lambda v, s: v, F32)
    keys = {}
    for static in STATICS:
        site = site_of(lambda v, s=static: f(v, s), x)
        keys.setdefault(site.key, []).append(static)
        again = site_of(lambda v, s=static: f(v, s), x)
        assert again == site and again.key == site.key, static
    assert all(len(v) == 1 for v in keys.values()), [v for v in keys.values() if len(v) > 1]


def test_statics_arrive_as_they_are(x):
    seen = []
    f = jaxbridge.call(lambda v, s: (seen.append(s), v + 0)[1], F32)
    for static in STATICS:
        f(x, static)
    assert len(seen) == len(STATICS)
    for got, given in zip(seen, STATICS, strict=True):
        assert type(got) is type(given) and repr(got) == repr(given)


def test_where_an_argument_stands_changes_the_key(x):
    def fn(*args, **kwargs):
        return x

    f = jaxbridge.call(fn, F32)
    calls = [
        lambda v: f(v), lambda v: f(v, v), lambda v: f(v, 1), lambda v: f(1, v), lambda v: f(a=v),
        lambda v: f(b=v), lambda v: f([v]), lambda v: f((v,)), lambda v: f({"a": v}), lambda v: f(v, a=1),
        lambda v: f(v, b=1), lambda v: f([v, v]), lambda v: f([v], v), lambda v: f(v, None),
        lambda v: f(v, ()), lambda v: f(v, []),
    ]  # fmt: skip
    keys = [site_of(call, x).key for call in calls]
    assert len(set(keys)) == len(calls)


def test_the_order_of_keywords_does_not_change_the_key(x):
    f = jaxbridge.call(lambda v, **kw: v, F32)
    a = site_of(lambda v: f(v, a=1, b={"x": 1, "y": 2}), x)
    b = site_of(lambda v: f(v, b={"y": 2, "x": 1}, a=1), x)
    assert a.key == b.key


def test_equal_content_gives_equal_keys_and_hlo_in_two_processes(tmp_path):
    (tmp_path / "a_library.py").write_text(
        inspect.cleandoc("""
        import enum, functools, jax, jaxbridge, numpy as np

        class Color(enum.Enum):
            RED = 1

        def like(x, *rest, **kw):
            return x

        def scaled(v, k=2, *, n=frozenset({"a", "b"})):
            return v * k if "a" in {"a", "b", "c"} else n

        def closure(k):
            return lambda v: v * k

        closed = jaxbridge.call(closure((1.5, "a", np.float32(2))), like, name="closed")
        partial = jaxbridge.call(functools.partial(scaled, k=3), like, name="partial")
        captures = jaxbridge.call(closure([1]), like, name="captures a list")
        named = jaxbridge.call(scaled, like)

        @jaxbridge.function(result=like, out="out")
        def decorated(v, *, out):
            out[...] = v
        """)
    )
    program = """
        import hashlib, jax, jax.numpy as jnp, numpy as np
        import a_library as m

        def all_of_them(v):
            v = m.named(v, 3, n=("x", m.Color.RED, {"k": [1, None, 2.5, np.dtype("f4")]}))
            return m.closed(m.partial(m.captures(m.decorated(v))))

        lowered = jax.jit(all_of_them).lower(jnp.arange(4.0))
        text = lowered.as_text()
        assert text.count("custom_call @jaxbridge.call") == 5, text
        assert "0x" not in text.replace("0x1.", ""), "an address"
        print(text)
        """
    texts = {
        processes.run(program, path=tmp_path, env={"PYTHONHASHSEED": str(seed)}).stdout
        for seed in (1, 2)
    }
    assert len(texts) == 1 and "custom_call" in texts.pop()


# ---- names ---------------------------------------------------------------------------------------


def test_two_functions_under_one_name(x):
    def make(k):
        return lambda v: v + k

    jaxbridge.call(make(1), F32, name="taken once")
    jaxbridge.call(make(1), F32, name="taken once")  # the same by content
    text = r"'taken once' belongs to another function already.*choose another name"
    for fn in (make(2), module_level, np.add, closure([1])):
        with pytest.raises(ValueError, match=text):
            jaxbridge.call(fn, F32, name="taken once")
    with pytest.raises(ValueError, match=text):
        jaxbridge.call(make(1), F32, name="taken once", out="out")
    with pytest.raises(ValueError, match=text):
        jaxbridge.call(make(1), F32, name="taken once", framework="buffer")


def test_two_closures_of_one_place_under_one_name(x):
    def make(k):
        def inner(v):
            return v + k

        return inner

    jaxbridge.call(make(1), F32, name="made twice")
    with pytest.raises(ValueError, match="belongs to another"):
        jaxbridge.call(make(2), F32, name="made twice")


def cell(source, file, line=1):
    """`fn` of a notebook cell, which has a file of its own."""
    names = {"__name__": "a_notebook"}
    exec(compile("\n" * (line - 1) + source, file, "exec"), names)
    return names["fn"]


@pytest.mark.parametrize(
    "source",
    [
        "fn = lambda v: v + {k}",
        "def make():\n    def inner(v):\n        return v + {k}\n    return inner\nfn = make()",
        "def make(k):\n    return lambda v: v + k\nfn = make({k})",
    ],
    ids=["lambda", "inner function", "closure"],
)
@pytest.mark.parametrize("again", [("cell 2", 1), ("cell 2", 7), ("cell 1", 1)])
def test_a_cell_that_is_edited_keeps_its_name(x, source, again, request):
    name = request.node.name
    f = jaxbridge.call(cell(source.format(k=1), "cell 1"), F32, name=name)
    g = jaxbridge.call(cell(source.format(k=2), *again), F32, name=name)
    assert float(f(x)[0]) == 1 and float(g(x)[0]) == 2
    with pytest.raises(ValueError, match="belongs to another"):
        jaxbridge.call(cell(source.format(k=3), again[0], 9), F32, name=name)


def test_named_function_that_captures_what_can_change(x):
    captured = [1]
    fn = closure(captured)
    f = jaxbridge.call(lambda v: v + captured[0], F32, name="captures")
    assert float(f(x)[0]) == 1
    captured[0] = 5
    assert float(f(x)[0]) == 5
    jaxbridge.call(fn, (F32, F32), name="captures too")
    jaxbridge.call(fn, (F32, F32), name="captures too")  # the very same object
    with pytest.raises(ValueError, match="belongs to another"):
        jaxbridge.call(closure(captured), (F32, F32), name="captures too")


def test_a_notebook_cell_that_is_run_again(x):
    """New traces get the new function, old executables keep theirs."""
    notebook = types.ModuleType("a_notebook_of_cells")
    sys.modules[notebook.__name__] = notebook
    try:

        def cell(body, **options):
            exec(f"def step(v):\n    return {body}", notebook.__dict__)
            f = jaxbridge.call(notebook.step, F32, **options)
            return f, jax.jit(lambda v: f(v))

        for options in ({}, {"name": "a notebook's step"}):
            _, first_program = cell("v + 1", **options)
            compiled = first_program.lower(x).compile()
            assert float(first_program(x)[0]) == 1
            second, second_program = cell("v + 2", **options)
            assert float(second(x)[0]) == 2 and float(second_program(x)[0]) == 2
            assert float(first_program(x)[0]) == 1 and float(compiled(x)[0]) == 1
            third, third_program = cell("v + 1", **options)
            assert float(third(x)[0]) == 1 and float(third_program(x)[0]) == 1
    finally:
        del sys.modules[notebook.__name__]


def test_a_module_that_is_loaded_again(x, tmp_path, monkeypatch):
    source = tmp_path / "loaded_again.py"
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    text = "import jaxbridge\nK = {}\ndef f(v): return v + {}\ng = jaxbridge.call(f, lambda v: v)\n"
    source.write_text(text.format(1, 1))
    module = importlib.import_module("loaded_again")
    first = module.g
    assert float(first(x)[0]) == 1
    source.write_text(text.format(1, 22))
    importlib.invalidate_caches()
    module = importlib.reload(module)
    assert float(module.g(x)[0]) == 22 and float(first(x)[0]) == 1
    monkeypatch.delitem(sys.modules, "loaded_again")

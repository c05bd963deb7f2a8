# SPDX-License-Identifier: Apache-2.0
"""Keys of calls: references, what makes two calls one, names."""

import functools
import importlib
import inspect
import itertools
import math
import re
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbridge
import processes
from identity_values import Bits, Callable, Color, Letter, Level, TaggedText, closure
from jaxbridge import _identity

F32 = jax.ShapeDtypeStruct((4,), jnp.float32)


def module_level(v, k=2, *, n=3):
    return v * k + n


@pytest.fixture
def x():
    return jnp.arange(4, dtype=jnp.float32)


# ---- references ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value, want",
    [
        (module_level, "test_keys:module_level"),
        (Callable.static, "identity_values:Callable.static"),
        (Callable, "identity_values:Callable"),
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
        ("identity_values:Callable.no_such", "has no 'Callable.no_such'"),
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

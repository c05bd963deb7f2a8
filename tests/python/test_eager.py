# SPDX-License-Identifier: Apache-2.0
"""Eager calls that come again: what is kept of one is for those that mean the same, and for no other."""

import collections
import enum
import gc
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxbridge
from jaxbridge import _eager, _spec
from owned_memory import needs_updates, owned

F32 = jax.ShapeDtypeStruct((4,), jnp.float32)


def like(x, *rest, **kw):
    return x


def more(v):
    return v + 1


@pytest.fixture
def x():
    return jnp.arange(4, dtype=jnp.float32)


@pytest.fixture
def written(monkeypatch):
    """The texts of calls that were written: none for a call of which something is kept."""
    texts = []

    def to_text(spec, before=_spec.to_text):
        texts.append(before(spec))
        return texts[-1]

    monkeypatch.setattr(_spec, "to_text", to_text)
    return texts


class Given:
    """A function that keeps what it was given as static values."""

    def __init__(self, results=like, **options):
        self.calls = []
        self.f = jaxbridge.call(self.take, results, **options)

    def take(self, x, *args, **kwargs):
        self.calls.append((args, kwargs))
        return x + 1


# ---- static values -------------------------------------------------------------------------------


class Kind(enum.Enum):
    SMALL = 1
    LARGE = 2


class Plain:
    """Equal to itself alone."""


class Text(str):
    __slots__ = ()


Pair = collections.namedtuple("Pair", "a b")

KEPT = {
    "nothing": (),
    "int": (3,),
    "bool": (True,),
    "float": (0.5,),
    "nan": (float("nan"),),
    "str": ("mode",),
    "bytes": (b"mode",),
    "None": (None,),
    "enum": (Kind.SMALL,),
    "class": (np.float32,),
    "ufunc": (np.add,),
    "object": (Plain(),),
    "tuple": ((1, (2.0, "a")),),
    "list": ([1, [2.0]],),
    "dict": ({"a": 1, "b": [2]},),
    "namedtuple": (Pair(1, 2),),
}


def test_a_deleted_argument():
    f = jaxbridge.call(lambda v: v + 1, lambda v: v)
    x = jnp.arange(3.0)
    for _ in range(3):  # made, and kept
        np.testing.assert_array_equal(f(x), [1, 2, 3])
    y = x + 1
    y.delete()
    for call in (f, jax.jit(f), jaxbridge.pointer, lambda a: jaxbridge.shares_memory(a, x)):
        with pytest.raises(RuntimeError, match="deleted"):
            call(y)
        with pytest.raises(RuntimeError) as caught:
            call(y)
        assert "INVALID_ARGUMENT" not in str(caught.value)


@pytest.mark.parametrize("values", KEPT.values(), ids=KEPT)
def test_calls_that_come_again_are_not_written_again(values, x, written):
    given = Given()
    for _ in range(4):
        np.testing.assert_array_equal(given.f(x, *values), np.arange(4) + 1)
    assert len(written) == 1
    for args, _ in given.calls:
        assert repr(args) == repr(values)


DIFFERENT = {
    "1, 1.0, True": (1, 1.0, True),
    "signs of zero": (0.0, -0.0, 0),
    "signs of nan": (float("nan"), -float("nan")),
    "complex": (1j, complex(-0.0, 1), complex(0, -1)),
    "strings": ("a", b"a", Text("a"), "b"),
    "sequences": ((1, 2), [1, 2], Pair(1, 2), (1, 2.0), (1, (2,))),
    "keys": ({"a": 1}, {1: 1}, {True: 1}, {1.0: 1}, {Text("a"): 1}),
    "inner keys": ([{"a": 1}], [{1: 1}], [{True: 1}], [{Text("a"): 1}]),
    "keys of a namedtuple": (Pair(1, {1: 2}), Pair(1, {True: 2})),
    "frozensets": (frozenset({1}), frozenset({True}), frozenset({1.0})),
    "ranges": (range(0), range(2, 1)),
    "slices": (slice(1), slice(True), slice(1.0)),
    "enums": (Kind.SMALL, Kind.LARGE, 1),
    "dtypes": (np.dtype("f4"), np.dtype("f8"), np.float32, "float32"),
    "objects": (Plain(), Plain()),
    "functions": (lambda v: v, lambda v: v + 1, np.sin, np.cos),
    "None": (None, (), 0, False),
}


@pytest.mark.parametrize("values", DIFFERENT.values(), ids=DIFFERENT)
def test_other_values_are_other_calls(values, x):
    """The function gets each value, with its type, however often the others came before."""
    given = Given()
    for _ in range(3):
        for value in values:
            given.f(x, value)
            given.f(x, option=value)
            (positional, _), (_, named) = given.calls[-2:]
            for got in (positional[0], named["option"]):
                assert type(got) is type(value) and repr(got) == repr(value)
                assert [type(k) for k in keys(got)] == [type(k) for k in keys(value)]


def keys(value):
    if isinstance(value, dict):
        return [*value, *keys(tuple(value.values()))]
    return [k for v in value for k in keys(v)] if isinstance(value, (list, tuple)) else []


def test_a_list_that_was_changed_is_another_call(x):
    given = Given()
    option = [1, {"a": 2}]
    seen = []
    for change in (lambda: None, lambda: option.append(3), lambda: option[1].update(b=4)):
        change()
        given.f(x, option)
        given.f(x, option)
        seen += [repr(args[0]) for args, _ in given.calls[-2:]]
    assert (
        seen == ["[1, {'a': 2}]"] * 2 + ["[1, {'a': 2}, 3]"] * 2 + ["[1, {'a': 2, 'b': 4}, 3]"] * 2
    )


def test_an_object_that_was_changed_is_seen_as_it_is(x):
    class Settings:
        gain = 2

    def scaled(v, settings, options):
        return v * settings.gain * len(options)

    f = jaxbridge.call(scaled, like)
    settings, options = Settings(), {1}
    assert f(x, settings, options)[1] == 2
    settings.gain = 5
    options.add(2)
    assert f(x, settings, options)[1] == 10


def test_a_node_of_a_registered_class(x, written):
    @jax.tree_util.register_pytree_node_class
    class Node:
        def __init__(self, leaf, aux):
            self.leaf, self.aux = leaf, aux

        def tree_flatten(self):
            return (self.leaf,), self.aux

        @classmethod
        def tree_unflatten(cls, aux, children):
            return cls(*children, aux)

    f = jaxbridge.call(lambda n: n.leaf * len(n.aux), lambda n: n.leaf)
    for aux, want in (((1,), 1), ((1, 2), 2), ([1, 2, 3], 3), ([1, 2, 3], 3), ((1,), 1)):
        assert f(Node(x, aux))[1] == want
    assert len(written) == 3


# ---- arrays --------------------------------------------------------------------------------------


def test_arrays_by_position_and_by_keyword(x, written):
    f = jaxbridge.call(lambda a, b: a - 2 * b, lambda a, b: a)
    y = x + 5
    for _ in range(3):
        np.testing.assert_array_equal(f(x, y), x - 2 * y)
        np.testing.assert_array_equal(f(y, x), y - 2 * x)
        np.testing.assert_array_equal(f(a=x, b=y), x - 2 * y)
        np.testing.assert_array_equal(f(b=x, a=y), y - 2 * x)
        np.testing.assert_array_equal(f(x, b=y), x - 2 * y)
    assert len(written) == 3


def test_types_that_alternate(written):
    f = jaxbridge.call(lambda v: v + v.dtype.type(1), like)
    arrays = [
        jnp.zeros(3, jnp.float32),
        jnp.zeros(3, jnp.int32),
        jnp.zeros((3, 1), jnp.float32),
        jnp.zeros((), jnp.bfloat16),
        jnp.zeros(0, jnp.float32),
        jnp.asarray(0.0),  # of a weak type
        np.zeros(3, np.float32),
        np.float32(0),
    ]
    for _ in range(3):
        for a in arrays:
            y = f(a)
            assert (y.shape, y.dtype) == (a.shape, a.dtype)
            np.testing.assert_array_equal(y, np.ones(a.shape))
    assert len(written) == 6  # NumPy's are as JAX's, and () of float32 comes twice


def test_without_arguments(written):
    f = jaxbridge.call(lambda: np.ones(4, np.float32), F32)
    for device in jax.devices()[:2]:
        with jax.default_device(device):
            assert f().devices() == {device} and f()[0] == 1
    assert len(written) == 1


def test_arrays_on_other_devices(x):
    f = jaxbridge.call(lambda v: v + 1, like)
    f(x), f(x)
    for device in jax.devices()[:3]:
        y = f(jax.device_put(x, device))
        assert y.devices() == {device}
        np.testing.assert_array_equal(y, np.arange(4) + 1)
        with jax.default_device(device):
            assert f(np.arange(4, dtype=np.float32)).devices() == {device}
    assert f(x).devices() == x.devices()
    apart = [jax.device_put(x, d) for d in jax.devices()[:2]]
    g = jaxbridge.call(lambda a, b: a + b, lambda a, b: a)
    g(x, x), g(x, x)
    with pytest.raises(ValueError, match="incompatible devices"):
        g(*apart)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_under_a_mesh(x, kind):
    kind = getattr(jax.sharding.AxisType, kind)
    mesh = jax.make_mesh((2,), ("i",), axis_types=(kind,), devices=jax.devices()[:2])
    shapes = []

    def work(v):
        shapes.append(v.shape)
        return v + 1

    f = jaxbridge.call(work, like, elementwise=True)
    spread = NamedSharding(mesh, PartitionSpec("i"))
    for _ in range(2):
        np.testing.assert_array_equal(f(x), np.arange(4) + 1)
        with jax.set_mesh(mesh):
            y = f(jax.device_put(x, spread))
        assert y.sharding.is_equivalent_to(spread, 1)
        np.testing.assert_array_equal(y, np.arange(4) + 1)
    assert shapes == [(4,), (2,), (2,)] * 2


def test_x64_that_is_switched(x):
    f64 = jax.ShapeDtypeStruct((4,), np.float64)
    f = jaxbridge.call(lambda v: v.astype(np.float64), f64)
    kept = jaxbridge.call(lambda v: v + 1, like)
    for _ in range(2):
        with pytest.raises(TypeError, match="only with 64-bit types enabled"):
            f(x)
        kept(x)
        with (
            jax.experimental.enable_x64()
            if not hasattr(jax, "enable_x64")
            else jax.enable_x64(True)
        ):
            assert f(x).dtype == f(x).dtype == np.float64
            assert kept(x).dtype == np.float32
            assert kept(x.astype(np.float64)).dtype == np.float64


def test_a_deleted_array(x):
    f = jaxbridge.call(lambda v: v + 1, like)
    f(x), f(x)
    gone = x + 0
    gone.delete()
    with pytest.raises(RuntimeError, match="deleted"):
        f(gone)


# ---- Refs ----------------------------------------------------------------------------------------


def test_refs(x, written):
    def add(r, s, by):
        r += by
        s -= by

    f = jaxbridge.call(add, None)
    a, b = jax.new_ref(x), jax.new_ref(x)
    for _ in range(3):
        f(a, b, 2.0)
        f(b, s=a, by=1.0)
    np.testing.assert_array_equal(a[...], np.arange(4) + 3)
    np.testing.assert_array_equal(b[...], np.arange(4) - 3)
    assert len(written) == 2
    for one in (a, b):
        with pytest.raises(TypeError, match=r"one jax\.Ref is passed as two arguments"):
            f(one, one, 2.0)


def test_arrays_and_refs_are_two_calls(x):
    seen = []

    def look(v):
        seen.append(v.flags.writeable)

    f = jaxbridge.call(look, None)
    ref = jax.new_ref(x)
    for _ in range(2):
        f(x), f(ref)
    assert seen == [False, True] * 2


@needs_updates
def test_refs_of_memory_of_others(x, written):
    def add(r):
        r += 1

    f = jaxbridge.call(add, None)
    block = owned(4)
    theirs, ours = jaxbridge.ref(block), jax.new_ref(x)
    for _ in range(3):
        f(ours), f(theirs)
    assert len(written) == 2
    np.testing.assert_array_equal(ours[...], np.arange(4) + 3)
    with jaxbridge.borrow(theirs, "numpy"):
        np.testing.assert_array_equal(block, np.arange(4) + 3)
        with pytest.raises(RuntimeError):
            f(theirs)


# ---- results -------------------------------------------------------------------------------------


def test_what_declares_results_is_asked_at_each_call(x, written):
    lengths = iter([4, 4, 4, 2, 2, 4])
    asked = []

    def results(v, k):
        asked.append((v, k))
        return jax.ShapeDtypeStruct((next(lengths),), v.dtype)

    def first(v, k, out):
        out[...] = v[: len(out)]

    f = jaxbridge.call(first, results, out="out")
    assert [f(x, 7).shape for _ in range(6)] == [(4,)] * 3 + [(2,)] * 2 + [(4,)]
    assert len(asked) == 6 and all((v.shape, v.dtype, k) == ((4,), x.dtype, 7) for v, k in asked)
    assert len(written) == 3


def test_what_declares_results_may_fail_later(x):
    calls = []

    def results(v):
        calls.append(1)
        if len(calls) == 3:
            raise LookupError("no results")
        return v

    f = jaxbridge.call(lambda v: v + 1, results)
    f(x), f(x)
    with pytest.raises(LookupError, match="no results"):
        f(x)
    assert f(x)[0] == 1


def test_results_of_another_tree(x):
    trees = [
        lambda s: (s,),
        lambda s: [s],
        lambda s: {"a": s},
        lambda s: {1: s},
        lambda s: {True: s},
    ]
    order = iter([tree for tree in trees for _ in range(2)] + trees)
    got = []

    def fill(v, out):
        got.append(jax.tree.map(lambda _: 0, out))
        (leaf,) = jax.tree.leaves(out)
        leaf[...] = v

    f = jaxbridge.call(fill, lambda v: next(order)(v), out=-1)
    for tree in [tree for tree in trees for _ in range(2)] + trees:
        want, result = tree(0), f(x)
        assert repr(jax.tree.map(lambda _: 0, result)) == repr(got[-1]) == repr(want)


def test_declared_results_that_were_changed(x):
    declared = [F32]
    f = jaxbridge.call(lambda v: [v] * len(declared), declared)
    assert len(f(x)) == len(f(x)) == 1
    declared.append(F32)
    assert len(f(x)) == 2


def test_an_array_that_declares_results_is_not_kept(x, written):
    """Its type may change, and its memory may not stay."""
    refs = []

    def results(v):
        array = jnp.zeros(4, jnp.float32)
        refs.append(weakref.ref(array))
        return array

    f = jaxbridge.call(lambda v: v + 1, results)
    for _ in range(3):
        assert f(x)[1] == 2
    gc.collect()
    assert len(written) == 3 and all(r() is None for r in refs)


# ---- transforms, and what changes a Function -----------------------------------------------------


def test_transforms_of_what_was_called_before(x):
    f = jaxbridge.call(np.sin, like, out="out", elementwise=True)
    f(x), f(x)
    np.testing.assert_allclose(jax.jit(f)(x), np.sin(x), rtol=1e-6)
    np.testing.assert_allclose(jax.vmap(f)(x[None])[0], np.sin(x), rtol=1e-6)
    np.testing.assert_allclose(jax.jit(lambda: f(x))(), np.sin(x), rtol=1e-6)
    assert jax.eval_shape(f, x).shape == (4,)
    # Of an array that the transformed function closes over, too.
    called = jax.make_jaxpr(lambda v: f(x) + v)(x).eqns
    assert [e.primitive.name for e in called] == ["jaxbridge_call", "add"]
    with pytest.raises(jaxbridge.errors.DerivativeError):
        jax.grad(lambda v: f(v).sum())(x)


def test_rules_that_come_after_the_first_call(x):
    f = jaxbridge.call(np.sin, like, out="out")
    f(x), f(x)

    @f.defjvp
    def _(primals, tangents):
        return f(*primals), jnp.cos(primals[0]) * tangents[0]

    @f.defvmap
    def _(axis_size, in_batched, v):
        return 10 * v, in_batched[0]

    np.testing.assert_allclose(f(x), np.sin(x), rtol=1e-6)
    np.testing.assert_allclose(jax.grad(lambda v: f(v).sum())(x), np.cos(x), rtol=1e-6)
    np.testing.assert_array_equal(jax.vmap(f)(x[None])[0], 10 * x)
    scaled = jaxbridge.call(lambda v: 3 * v, like)
    scaled(x), scaled(x)
    scaled.deflinear(lambda ct, *rest: 3 * ct)
    np.testing.assert_array_equal(jax.grad(lambda v: scaled(v).sum())(x), np.full(4, 3.0))


def test_a_sharding_rule_that_comes_after_the_first_call(x):
    types = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("i",), axis_types=types, devices=jax.devices()[:2])
    spread = jax.device_put(x, NamedSharding(mesh, PartitionSpec("i")))
    shapes = []

    def work(v):
        shapes.append(v.shape)
        return v + 1

    f = jaxbridge.call(work, like)
    jax.block_until_ready([f(spread), f(spread)])
    assert set(shapes) == {(4,)}
    f.defsharding("i -> i")
    shapes.clear()
    np.testing.assert_array_equal(f(spread), np.arange(4) + 1)
    np.testing.assert_array_equal(f(spread), np.arange(4) + 1)
    assert shapes == [(2,)] * 4


def test_a_function_that_was_changed(x):
    def outer(k):
        def fn(v):
            return v * k

        return fn

    fn = outer(2.0)
    f, same = jaxbridge.call(fn, like), jaxbridge.call(outer(2.0), like)
    assert [float(g(x)[1]) for g in (f, f, same, same)] == [2, 2, 2, 2]
    fn.__closure__[0].cell_contents = 3.0
    assert [float(g(x)[1]) for g in (f, f, same, same)] == [3, 3, 2, 2]
    fn.__code__ = (lambda k: lambda v: v + k)(0).__code__
    assert [float(g(x)[1]) for g in (f, f, same, same)] == [4, 4, 2, 2]
    fn.__closure__[0].cell_contents = [1.0]  # what can't be told
    fn.__code__ = (lambda k: lambda v: v + k[0])(0).__code__
    assert [float(g(x)[1]) for g in (f, f, same, same)] == [2, 2, 2, 2]


@pytest.mark.parametrize("other", ["told", "anything"])
def test_a_state_is_made_for_the_function_as_it_is(x, other):
    """Also where programs are with the Function, since another of its functions can't be told."""
    made = []

    def make(k):
        def fn(v, state):
            return v * k + state

        return fn

    fn = make(2.0)
    anything = [1]
    on_cuda = {"told": fn, "anything": lambda v, state: v + anything[0]}[other]
    f = jaxbridge.call(
        {"cpu": fn, "cuda": on_cuda},
        like,
        framework="numpy",
        state=lambda context, v: made.append(1) or np.float32(10 * len(made)),
    )
    assert [float(f(x)[1]) for _ in range(2)] == [12, 12]
    fn.__closure__[0].cell_contents = 3.0
    assert [float(f(x)[1]) for _ in range(2)] == [23, 23]


def test_clear_makes_everything_anew(x, written):
    made = []
    f = jaxbridge.call(
        lambda v, state: v + state,
        like,
        state=lambda context, v: made.append(1) or np.float32(len(made)),
    )
    assert [float(f(x)[0]) for _ in range(3)] == [1, 1, 1] and len(written) == 1
    f.clear()
    assert [float(f(x)[0]) for _ in range(3)] == [2, 2, 2] and len(written) == 2
    assert f.stats()["calls"] == 6


# ---- how it runs ---------------------------------------------------------------------------------


def test_the_exception_of_the_function(x):
    fails = []

    def fn(v):
        if fails:
            raise fails.pop()
        return v + 1

    f = jaxbridge.call(fn, like)
    f(x), f(x)
    for error in (ZeroDivisionError("first"), KeyError("second"), ValueError("third")):
        fails.append(error)
        with pytest.raises(type(error)) as caught:
            f(x)
        assert caught.value is error
        assert f(x)[0] == 1


def test_an_operand_that_failed(x):
    """What an earlier program failed with is raised by the call that takes its result."""

    def fail(v):
        raise ZeroDivisionError("in a program")

    f = jaxbridge.call(lambda v: v + 1, like)
    f(x), f(x)
    with pytest.raises((ZeroDivisionError, jax.errors.JaxRuntimeError), match="in a program"):
        f(jax.jit(jaxbridge.call(fail, like))(x))


def test_side_effects_come_at_each_call(x, written):
    lines = []
    f = jaxbridge.call(lambda v, name: lines.append((name, float(v.sum()))), None)
    g = jaxbridge.call(lambda v: (lines.append("g"), v)[1], like, has_side_effect=True)
    for k in range(3):
        f(x + k, "sum")
        g(x)
    jax.effects_barrier()
    assert lines == [("sum", 6.0), "g", ("sum", 10.0), "g", ("sum", 14.0), "g"]
    assert len(written) == 2


def test_under_debug_nans_and_disable_jit(x):
    calls = []

    def ratio(v):
        calls.append(1)
        with np.errstate(invalid="ignore"):
            return v / v

    f = jaxbridge.call(ratio, like)
    for _ in range(2):
        assert np.isnan(f(x)[0])
        calls.clear()
        with jax.debug_nans(True), pytest.raises(FloatingPointError, match=r"\(nan\).*ratio"):
            f(x)
        assert len(calls) == 1  # JAX alone would run it again, to look for the operation
        with jax.disable_jit(True):
            assert f(x)[1] == 1


def test_threads(x):
    f = jaxbridge.call(lambda v, k: v * k, like)
    wrong = []

    def work(first):
        for k in range(60):
            k = float((first + k) % 20)
            if not (f(x, k) == x * k).all():
                wrong.append(k)

    threads = [threading.Thread(target=work, args=(5 * i,)) for i in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not wrong


# ---- what is kept --------------------------------------------------------------------------------


def kept(f):
    return sum(map(len, f._eager._kept.values()))


def test_what_is_kept_is_bounded(x, monkeypatch):
    monkeypatch.setattr(_eager, "_most", 5)
    f = jaxbridge.call(lambda v, k: v + k, like)
    for k in range(23):
        assert f(x, float(k))[0] == k
        assert kept(f) <= 5
    for k in (0, 22, 0):
        assert f(x, float(k))[0] == k


def test_static_values_end_with_the_programs(x, collected):
    things = [Plain() for _ in range(3)]
    alive = weakref.WeakSet(things)
    told = jaxbridge.call(lambda v, thing: v + 1, like)
    anything = [1]
    only = jaxbridge.call(lambda v, thing: v + anything[0], like)
    named = jaxbridge.call(lambda v, thing: v + 2, like, name="static values end")
    for f, thing in zip((told, only, named), things, strict=True):
        f(x, thing), f(x, thing)
    del f, thing
    things.clear()
    collected()
    assert len(alive) == 1 and kept(told) == kept(named) == 0 and kept(only) == 1
    only.clear()
    collected()
    assert len(alive) == 0


def test_one_Function_that_is_cleared_gives_up_the_programs_of_its_like(x):
    def make():
        return jaxbridge.call(lambda v, k: v + k, like)

    f, g = make(), make()
    f(x, 1.0), g(x, 1.0)
    assert kept(f) == kept(g) == 1
    f.clear()
    gc.collect()
    assert kept(f) == kept(g) == 0
    assert g(x, 1.0)[0] == 1


def test_a_Function_that_is_gone_leaves_nothing(x):
    anything = [1]
    f = jaxbridge.call(lambda v, k: v + anything[0], like)
    f(x, 1), f(x, 1)
    refs = [weakref.ref(f), weakref.ref(f._eager), weakref.ref(f.callee)]
    operand = x + 0
    refs += [weakref.ref(operand), weakref.ref(f(operand, 1))]
    del f, operand
    gc.collect()
    assert [r() for r in refs] == [None] * 5


def test_functions_of_equal_content_share_programs_and_nothing_else(x, written):
    """Their results may be declared in other ways, and their calls split in others."""

    def fill(v, out):
        for o in jax.tree.leaves(out):
            o[...] = v

    f = jaxbridge.call(fill, like, out=-1)
    g = jaxbridge.call(fill, lambda v: (v, v), out=-1)
    for _ in range(2):
        assert f(x).shape == (4,)
        assert len(g(x)) == 2
    assert len(written) == 2


def test_a_static_function_that_was_changed_is_told_anew(x, monkeypatch):
    """As its code is now: a state that was made for the old one is not its."""
    monkeypatch.setattr(more, "__code__", more.__code__)
    made = []
    f = jaxbridge.call(
        lambda v, by, state: by(v) + state,
        like,
        state=lambda context, v, by: made.append(1) or np.float32(10 * len(made)),
    )
    assert f(x, more)[0] == f(x, more)[0] == 11
    more.__code__ = (lambda v: v + 2).__code__
    assert f(x, more)[0] == f(x, more)[0] == 22

# SPDX-License-Identifier: Apache-2.0
"""Calls on arrays that are spread over devices: who sees which part, and what XLA has to move for it."""

import contextlib
import ctypes
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

import jaxbridge
from jaxbridge import _compat, _compat_partitioner, _partitioning, errors
from split_calls import (
    P,
    Watched,
    X,
    broadcast,
    check,
    collectives,
    like,
    mesh,
    mesh_of,
    put,
    row_sums,
)

__all__ = ["mesh"]  # fixture

# ---- elementwise ---------------------------------------------------------------------------------

ELEMENTWISE = {
    "rows": ([(X, ("a",)), (X, ("a",))], ((2, 8), (2, 8))),
    "both axes": ([(X, ("a", "b")), (X, ("a", "b"))], ((2, 4), (2, 4))),
    "two mesh axes on one": ([(X, (("a", "b"),)), (X, (("a", "b"),))], ((1, 8), (1, 8))),
    "in the other order": ([(X, (("b", "a"),)), (X, (("b", "a"),))], ((1, 8), (1, 8))),
    "the mesh turned": ([(X, ("b", "a")), (X, ("b", "a"))], ((4, 2), (4, 2))),
    "one is whole": ([(X, ("a",)), (X, ())], ((2, 8), (2, 8))),
    "the other is whole": ([(X, ()), (X, (None, "b"))], ((8, 4), (8, 4))),
    "a row": ([(X, ("a", "b")), (X[0], ("b",))], ((2, 4), (4,))),
    "a row that is whole": ([(X, ("a", "b")), (X[0], ())], ((2, 4), (4,))),
    "a number": ([(X, ("a", "b")), (np.float32(3), ())], ((2, 4), ())),
    "a column and a row": ([(X[:, :1], ("b",)), (X[:1], (None, "a"))], ((4, 1), (1, 2))),
}


@pytest.mark.parametrize("case", ELEMENTWISE)
def test_elementwise_calls_are_made_on_parts(case):
    operands, part = ELEMENTWISE[case]
    watched = Watched(lambda x, y: x * y - y)
    f = jaxbridge.call(watched, broadcast, elementwise=True)
    args = [put(x, *spec) for x, spec in operands]
    x, y = (x for x, _ in operands)
    check(f, watched, args, x * y - y, part)


def test_elementwise_results_lie_as_the_operands(mesh):
    f = jaxbridge.call(np.sin, like, elementwise=True)
    for spec in (P("a"), P("b", "a"), P(None, ("b", "a"))):
        x = put(X, *spec)
        for y in (f(x), jax.jit(f)(x)):
            assert y.sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)


def test_operands_that_lie_across_each_other_are_moved():
    watched = Watched(lambda x, y: x * y)
    f = jaxbridge.call(watched, broadcast, elementwise=True)
    args = put(X, "a", "b"), put(X, "b", "a")
    for program in (f, jax.jit(f)):
        np.testing.assert_array_equal(program(*args), X * X)


def test_a_chain_of_calls_moves_nothing():
    f = jaxbridge.call(lambda x: x + 1, like, elementwise=True)
    g = jaxbridge.call(lambda x, y: x * y, like, elementwise=True)

    def program(x, y):
        def body(_, c):
            return g(f(c), y) - 1

        return jax.lax.fori_loop(0, 3, body, x), g(x * 2, f(y))

    x, y = put(X, "a", "b"), put(X / 64, "a", "b")
    assert collectives(program, x, y) == set()
    got = jax.jit(program)(x, y)
    want = X
    for _ in range(3):
        want = (want + 1) * (X / 64) - 1
    np.testing.assert_allclose(got[0], want, rtol=1e-6)
    np.testing.assert_allclose(got[1], X * 2 * (X / 64 + 1), rtol=1e-6)


def test_a_ufunc_is_called_on_parts():
    f = jaxbridge.from_ufunc(np.hypot)
    x = put(X, "a", "b")
    assert collectives(f, x, x) == set()
    np.testing.assert_allclose(f(x, x), np.hypot(X, X), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint16", "float16", "bfloat16", "complex64"])
def test_parts_of_every_kind_of_dtype(dtype):
    watched = Watched(lambda x: x)
    f = jaxbridge.call(watched, like, elementwise=True)
    x = np.asarray(jnp.asarray(X % 3).astype(dtype))
    check(f, watched, [put(x, "a")], x, ((2, 8),))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("dtype", ["int64", "float64", "complex128"])
def test_parts_of_64_bits(dtype):
    watched = Watched(lambda x: x)
    f = jaxbridge.call(watched, like, elementwise=True)
    check(f, watched, [put(X.astype(dtype), "a")], X.astype(dtype), ((2, 8),))


def test_a_result_that_is_wanted_whole_is_made_of_parts(mesh):
    watched = Watched(lambda x: x + 1)
    f = jaxbridge.call(watched, like, elementwise=True)
    program = jax.jit(f, out_shardings=NamedSharding(mesh, P()))
    y, shapes = watched.during(program, put(X, "a"))
    np.testing.assert_array_equal(y, X + 1)
    assert y.sharding.is_fully_replicated
    assert shapes in ([((2, 8),)] * 8, [((8, 8),)] * 8)


def test_an_exception_on_every_part():
    def fail(x):
        raise ZeroDivisionError("part")

    f = jaxbridge.call(fail, like, elementwise=True)
    with pytest.raises(jax.errors.JaxRuntimeError, match="ZeroDivisionError: part"):
        jax.block_until_ready(f(put(X, "a")))


# ---- rules ---------------------------------------------------------------------------------------

RULES = {
    # rule, spec of the operand, the part, what is moved for it
    "rows": ("i j -> i, i j", ("a",), (2, 8), ()),
    "columns are whole": ("i j -> i, i j", ("a", "b"), (2, 8), {"all-gather"}),
    "all is whole": ("i j -> k, k j", ("a",), (8, 8), {"all-gather"}),
    "leading axes": ("... j -> ..., ... j", ("a",), (2, 8), ()),
}


@pytest.mark.parametrize("case", RULES)
def test_a_rule(case):
    rule, spec, part, moves = RULES[case]
    watched = Watched(lambda x: (x.sum(-1), x + 1))
    f = jaxbridge.call(watched, lambda x: (row_sums(x), like(x)))
    f.defsharding(rule)
    check(f, watched, [put(X, *spec)], (X.sum(-1), X + 1), (part,), moves)


def test_without_a_rule_arrays_are_whole():
    watched = Watched(lambda x: x + 1)
    f = jaxbridge.call(watched, like)
    check(f, watched, [put(X, "a")], X + 1, ((8, 8),), {"all-gather"})


def test_results_of_other_ranks_and_arguments_by_keyword():
    watched = Watched(lambda m, *, v, w: (m @ v + w, np.outer(m @ v, v)))
    f = jaxbridge.call(
        watched,
        lambda m, *, v, w: (row_sums(m), jax.ShapeDtypeStruct((m.shape[0], v.shape[0]), m.dtype)),
    )
    f.defsharding("i k, k, i -> i, i j")
    g = lambda m, v, w: f(m, w=w, v=v)
    v, w = X[0] / 8, X[:, 0]
    args = put(X, "a"), put(v), put(w, "a")
    for program in (g, jax.jit(g)):
        (y, z), shapes = watched.during(program, *args)
        np.testing.assert_allclose(y, X @ v + w, rtol=1e-6)
        np.testing.assert_allclose(z, np.outer(X @ v, v), rtol=1e-6)
        assert shapes == [((2, 8), (8,), (2,))] * 8
    assert collectives(g, *args) == set()


def test_a_tree_and_a_static_argument():
    watched = Watched(lambda tree, n: {"y": tree["a"] * n + tree["b"]})
    f = jaxbridge.call(watched, lambda tree, n: {"y": like(tree["a"])})
    f.defsharding("i j, j -> i j")
    g = lambda a, b: f({"b": b, "a": a}, 3)
    y = jax.jit(g)(put(X, "a", "b"), put(X[0], "b"))
    np.testing.assert_array_equal(y["y"], X * 3 + X[0])
    assert collectives(g, put(X, "a", "b"), put(X[0], "b")) == set()


def test_a_rule_that_is_given_later_counts_for_later_programs():
    watched = Watched(lambda x: x + 1)
    f = jaxbridge.call(watched, like)
    x = put(X, "a")
    assert watched.during(f, x)[1] == [((8, 8),)] * 8
    f.defsharding("i j -> i j")
    assert watched.during(f, x)[1] == [((2, 8),)] * 8


def test_equal_functions_with_other_rules_are_other_calls():
    def add(x):
        return x + 1

    shapes = []
    made = []
    for rule in ("i j -> i k", "k j -> i j", "i j -> i j"):
        f = jaxbridge.call(add, like)
        f.defsharding(rule)
        made.append(f)
    x = put(X, "a", "b")
    for f in made:
        text = jax.jit(f).lower(x).compile().as_text()
        shapes.append(re.search(r"f32(\[.*?\])\S* custom-call", text)[1])
    assert shapes == ["[2,8]", "[8,4]", "[2,4]"]


MISFITS = {
    "no arrow": ("i j", ["expected one '->'"]),
    "two arrows": ("i -> i -> i", ["expected one '->'"]),
    "a product": ("(i j) k, k -> i", ["'(i'", "products"]),
    "a number": ("1 j, j -> j", ["'1'", "where a name"]),
    "dots inside": ("i ..., i -> i", ["'...'", "before all"]),
    "twice": ("i i, i -> i", ["'i' stands twice"]),
    "too few operands": ("i j -> i", ["1 operands", "has 2", "argument 0, argument y"]),
    "too many results": ("i j, j -> i, j", ["2 results", "has 1 (result)"]),
    "an axis too few": ("i, j -> i", ["1 axes for argument 0", "(8, 8)"]),
    "an axis too many": ("i j, i j -> i", ["2 axes for argument y", "(8,)"]),
    "too many with dots": ("... i j k, j -> i", ["3 axes for argument 0"]),
    "other dots": ("... i, ... j -> i", ["'...' has 1 axes in argument 0, and 0 in argument y"]),
    "another length": ("i j, j -> k", []),
    "another length in a result": ("i j, j -> j", []),
}


@pytest.mark.parametrize("case", MISFITS)
def test_a_rule_that_does_not_fit(case):
    rule, parts = MISFITS[case]

    def named_so(x, *, y):
        return x.sum(-1)

    def trace():
        f = jaxbridge.call(named_so, lambda x, *, y: row_sums(x))
        f.defsharding(rule)
        jax.eval_shape(lambda x, y: f(x, y=y), jnp.zeros((8, 8)), jnp.zeros(8))

    if not parts:
        trace()
        return
    with pytest.raises(errors.ShardingError) as raised:
        trace()
    message = str(raised.value)
    assert "named_so: " in message and repr(rule) in message
    for part in parts:
        assert part in message


def test_one_name_for_two_lengths():
    f = jaxbridge.call(lambda x, y: x, like)
    f.defsharding("i j, j -> i j")
    with pytest.raises(
        errors.ShardingError, match="'j' has 8 elements in argument 0, and 4 in argument 1"
    ):
        jax.jit(f)(X, X[0, :4])
    f(X, X[0, :1])  # broadcast


def test_a_rule_is_a_string_and_not_for_elementwise():
    with pytest.raises(TypeError, match=r"sharding rule is \('i',\); expected a string"):
        jaxbridge.call(lambda x: x, like).defsharding(("i",))
    with pytest.raises(ValueError, match="elementwise=True already says"):
        jaxbridge.call(lambda x: x, like, elementwise=True).defsharding("i -> i")


# ---- functions that get lengths as numbers -------------------------------------------------------


def scaled_rows(seen, **options):
    """A C function that multiplies rows by numbers, and keeps the lengths it sees."""
    floats = ctypes.POINTER(ctypes.c_float)

    def on_floats(x, by, y, n, m):
        seen.append((n, m))
        x, by, y = (np.ctypeslib.as_array(a, s) for a, s in ((x, (n, m)), (by, (n,)), (y, (n, m))))
        y[:] = x * by[:, None]

    pointer = ctypes.CFUNCTYPE(None, floats, floats, floats, ctypes.c_int64, ctypes.c_int64)(
        on_floats
    )
    signature = "x: float[n, m], by: float[n], out y: float[n, m], n: int64, m: int64"
    return jaxbridge.bind(pointer, signature, **options)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("jit", [False, True], ids=["", "jit"])
def test_lengths_are_those_of_the_part(kind, jit):
    mesh, seen = mesh_of(kind), []
    f = scaled_rows(seen)
    f.defsharding("n m, n -> n m")
    with jax.set_mesh(mesh) if kind == "Explicit" else contextlib.nullcontext():
        args = put(X, "a", "b", mesh=mesh), put(X[0], "a", mesh=mesh)
        y = (jax.jit(f) if jit else f)(*args)
        np.testing.assert_array_equal(y, X * X[0][:, None])
        assert seen == [(2, 4)] * 8
        assert y.sharding.is_equivalent_to(args[0].sharding, 2)
        assert collectives(f, *args) == set()
        # Others have parts of another length: of what is there, the part that divides.
        seen.clear()
        other = put(X[:4], "a", mesh=mesh), put(X[0, :4], "a", mesh=mesh)
        np.testing.assert_array_equal(f(*other), X[:4] * X[0, :4, None])
        assert seen == [(1, 8)] * 8
    assert f.stats()["calls"] == 16


def test_a_batch_of_what_gets_lengths():
    seen = []
    f = scaled_rows(seen, vmap_method="sequential")
    f.defsharding("n m, n -> n m")
    y = jax.jit(jax.vmap(f))(put(np.stack([X, X]), None, "a"), put(np.stack([X[0]] * 2), None, "a"))
    np.testing.assert_array_equal(y, np.stack([X * X[0][:, None]] * 2))
    assert seen == [(2, 8)] * 16


def test_without_a_rule_lengths_are_whole():
    seen = []
    f = scaled_rows(seen)
    y = jax.jit(f)(put(X, "a"), put(X[0]))
    np.testing.assert_array_equal(y, X * X[0][:, None])
    assert seen == [(8, 8)] * 8


# ---- vmap ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["broadcast_all", "expand_dims", "batched"])
def test_batch_axes_are_split_without_a_rule(method):
    watched = Watched(lambda x, y: (x * y[:, None]).sum(-1))
    f = jax.vmap(jaxbridge.call(watched, row_sums, vmap_method=method), (0, None))
    batch = np.stack([X, X + 1, X + 2, X + 3])
    check(f, watched, [put(batch, "a"), put(X[0])], (batch * X[0]).sum(-1), ((1, 8, 8), (1, 8)))


@pytest.mark.parametrize("method", ["broadcast_all", "expand_dims"])
def test_batch_axes_and_a_rule(method):
    watched = Watched(lambda x: x.sum(-1))
    g = jaxbridge.call(watched, row_sums, vmap_method=method)
    g.defsharding("i j -> i")
    f = jax.vmap(jax.vmap(g, 1), 2, 1)
    batch = np.arange(4 * 8 * 4 * 2, dtype=np.float32).reshape(4, 8, 4, 2)
    x = put(batch, "a", None, "b")
    # The outer batch axis, and one of the rule.
    check(f, watched, [x], batch.transpose(1, 2, 0, 3).sum(-1), ((2, 8, 1, 2),))


@pytest.mark.parametrize("rule", ["batch0 column -> batch0 kept", "row batch0 -> row kept"])
def test_a_name_in_a_rule_is_never_that_of_a_batch_axis(mesh, rule):
    def normalized(x):
        return x / x.sum(-1, keepdims=True)

    watched = Watched(normalized)
    f = jaxbridge.call(watched, lambda x: x, vmap_method="broadcast_all")
    f.defsharding(rule)
    x = np.random.default_rng(0).uniform(1, 2, (8, 8, 8)).astype(np.float32)
    y = jax.jit(jax.vmap(f))(put(x, "a", "b", mesh=mesh))
    np.testing.assert_allclose(y, normalized(x), rtol=1e-5)
    assert set(watched.shapes) == {((2, 4, 8),)}


def test_a_batched_function_without_vmap_keeps_its_rule():
    watched = Watched(lambda x: x.sum(-1))
    f = jaxbridge.call(watched, row_sums, vmap_method="batched")
    f.defsharding("i j -> i")
    check(f, watched, [put(X, "a")], X.sum(-1), ((1, 2, 8),))


def test_an_elementwise_function_of_a_batch():
    watched = Watched(lambda x, y: x * y)
    f = jax.vmap(jaxbridge.call(watched, broadcast, elementwise=True), (0, 1))
    check(f, watched, [put(X, "a"), put(X, None, "a")], X * X.T, ((2, 8), (2, 8)))


# ---- in place ------------------------------------------------------------------------------------


def test_an_argument_in_place():
    def add(x, y):
        x += y

    watched = Watched(add)
    f = jaxbridge.call(watched, like, inout={0: 0})
    f.defsharding("i j, j -> i j")
    check(f, watched, [put(X, "a", "b"), put(X[0], "b")], X + X[0], ((2, 4), (4,)))


def test_an_argument_in_place_has_the_axes_of_its_result():
    f = jaxbridge.call(lambda x: None, like, inout={0: 0})
    f.defsharding("i j -> j i")
    with pytest.raises(errors.ShardingError, match="argument 0 is updated in place"):
        jax.jit(f)(X)


def test_a_donated_argument_keeps_its_memory():
    seen = []

    def add(x):
        seen.append(x.ctypes.data)
        x += 1

    f = jaxbridge.call(add, like, inout={0: 0}, elementwise=True)
    x = put(X, "a", "b")
    before = sorted(s.data.unsafe_buffer_pointer() for s in x.addressable_shards)
    y = jax.block_until_ready(jax.jit(f, donate_argnums=0)(x))
    after = sorted(s.data.unsafe_buffer_pointer() for s in y.addressable_shards)
    np.testing.assert_array_equal(y, X + 1)
    assert before == after == sorted(seen)


@pytest.mark.parametrize("rule", [None, "i j, j -> "])
def test_a_ref_is_updated_in_parts(rule):
    def add(r, y):
        r += y

    watched = Watched(add)
    f = jaxbridge.call(watched, (), elementwise=rule is None)
    if rule is not None:
        f.defsharding(rule)
    ref = jax.new_ref(put(X, "a", "b"))
    y = put(X[0], "b")

    def program(ref, y):
        f(ref, y)
        jax.lax.fori_loop(0, 2, lambda i, c: (f(ref, y), c)[1], 0)

    for run in (f, jax.jit(program)):
        _, shapes = watched.during(run, ref, y)
        assert set(shapes) == {((2, 4), (4,))}
    np.testing.assert_array_equal(ref[...], X + 4 * X[0])
    assert collectives(program, ref, y) == set()


@pytest.fixture
def owned(mesh):
    """Makes a Ref of X in memory of others on eight devices, and the parts of it."""
    sharding = NamedSharding(mesh, P("a", "b"))

    def make():
        parts = []
        for index in sharding.addressable_devices_indices_map(X.shape).values():
            part = jaxbridge.empty(X[index].shape, X.dtype)
            part[...] = X[index]
            parts.append(part)
        return jaxbridge.ref(jaxbridge.sharded(parts, X.shape, sharding)), parts

    try:
        make()
    except RuntimeError as error:
        pytest.skip(f"needs a JAX that updates memory of others ({error})")
    return make


REFS = {
    "elementwise": ({"elementwise": True}, None, False),
    "a rule": ({}, "i j, j -> ", False),
    "shard_map": ({}, None, True),
}


@pytest.mark.parametrize("case", REFS)
def test_memory_of_others_is_updated_in_parts(mesh, owned, case):
    options, rule, is_mapped = REFS[case]
    seen = []

    def add(r, y):
        seen.append((r.ctypes.data, r.shape, y.shape))
        r += y

    f = jaxbridge.call(add, (), **options)
    if rule is not None:
        f.defsharding(rule)
    one = lambda ref, y: (f(ref, y), y)[1]
    if is_mapped:
        one = jax.shard_map(one, mesh=mesh, in_specs=(P("a", "b"), P("b")), out_specs=P("b"))

    def program(ref, y):
        one(ref, y)
        jax.lax.fori_loop(0, 2, lambda i, c: (one(ref, y), c)[1], 0)

    ref, parts = owned()
    y = put(X[0], "b")
    for run, times in ((f, 1), (jax.jit(program), 4))[is_mapped:]:
        times -= is_mapped
        seen.clear()
        run(ref, y)
        np.testing.assert_array_equal(ref[...], X + times * X[0])
        with jaxbridge.borrow(ref, "numpy") as borrowed:
            assert sum(float(p.sum()) for p in borrowed) == (X + times * X[0]).sum()
        assert set(seen) == {(p.ctypes.data, (2, 4), (4,)) for p in parts}
    assert collectives(program, ref, y) == set()


def test_memory_of_others_is_not_gathered(owned):
    f = jaxbridge.call(lambda r: None, ())
    for run in (f, jax.jit(f)):
        ref, _ = owned()
        with pytest.raises(NotImplementedError, match="is a Ref.*say how the call is split"):
            run(ref)
    # It may be split, but for an axis over which the memory is.
    f = jaxbridge.call(lambda r, y: None, lambda r, y: like(y))
    f.defsharding("i j, i -> i")
    ref, _ = owned()
    with pytest.raises(
        jax.errors.JaxRuntimeError, match="argument 0 is a Ref.*say how the call is split"
    ):
        jax.block_until_ready((f(ref, put(X[0], "a")), ref[...]))
    _compat.forget_failed_effects()


# ---- what XLA is told ----------------------------------------------------------------------------


def tiles(*shape):
    return np.arange(np.prod(shape)).reshape(shape)


def test_what_does_not_divide_stays_whole():
    mesh = _partitioning._Mesh.of(["i", "j"], (10, 8), tiles(4, 2, 1))
    assert mesh.parts == {"j": 2}
    np.testing.assert_array_equal(mesh.devices, [[0, 2, 4, 6], [1, 3, 5, 7]])
    assert _partitioning._Mesh.of(["i", None], (10, 8), tiles(4, 2, 1)).parts == {}


def test_other_arrays_lie_on_the_same_devices():
    mesh = _partitioning._Mesh.of(["i", "j"], (8, 8), tiles(4, 2, 1))
    np.testing.assert_array_equal(mesh.tiles_of(["j", "i"])[..., 0], tiles(4, 2).T)
    np.testing.assert_array_equal(mesh.tiles_of(["j"]), tiles(4, 2).T)
    np.testing.assert_array_equal(mesh.tiles_of([]), tiles(8))
    assert mesh.tiles_of([None, "i", "k"]).shape == (1, 4, 1, 2)


def test_a_sharding_there_and_back():
    for of in (tiles(4, 2, 1), tiles(4, 1, 2), tiles(2, 4).T.reshape(4, 2, 1)):
        again = _compat_partitioner._tiles(_compat_partitioner._hlo_sharding(of), of.ndim - 1)
        np.testing.assert_array_equal(again, of)
    assert _compat_partitioner._tiles(_compat_partitioner._hlo_sharding(None), 2) is None

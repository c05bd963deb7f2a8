# SPDX-License-Identifier: Apache-2.0
"""Calls on meshes with explicit axes, and under shard_map."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import jaxbridge
from jaxbridge import errors
from split_calls import (
    P,
    Watched,
    X,
    check,
    collectives,
    explicit,
    like,
    mesh,
    mesh_of,
    put,
    row_sums,
)

__all__ = ["explicit", "mesh"]  # fixtures

# ---- explicit axes -------------------------------------------------------------------------------


def test_explicit_operands_that_do_not_go_together_are_refused(explicit):
    f = jaxbridge.call(lambda x, y: x + y, like, name="adder")
    f.defsharding("i j, i j -> i j")
    with pytest.raises(
        errors.ShardingError,
        match="adder: axis 0 of argument 0 is sharded over 'a', and axis 0 of argument 1, which goes "
        "with it, over 'b'",
    ):
        jax.jit(f)(put(X, "a", mesh=explicit), put(X, "b", mesh=explicit))
    with pytest.raises(
        errors.ShardingError,
        match="axis 0 of argument 0 and axis 1 of argument 1 are both sharded over 'a'",
    ):
        jax.jit(f)(put(X, "a", mesh=explicit), put(X, None, "a", mesh=explicit))


def test_explicit_axes_where_no_mesh_is_set():
    """The operands bring their mesh, as for JAX's own functions."""
    watched = Watched(lambda x: x + 1)
    f = jaxbridge.call(watched, like, elementwise=True)
    x = put(X, "a", "b", mesh=mesh_of("Explicit"))
    for y in (f(x), jax.jit(f)(x)):
        assert jax.typeof(y).sharding.spec == P("a", "b")
        np.testing.assert_array_equal(y, X + 1)
    assert set(watched.shapes) == {((2, 4),)}


def test_an_explicit_operand_and_one_that_is_whole(explicit):
    watched = Watched(lambda x, y: x + y)
    f = jaxbridge.call(watched, like, elementwise=True)
    args = put(X, ("a", "b"), mesh=explicit), put(X, mesh=explicit)
    out = check(f, watched, args, X + X, ((1, 8), (1, 8)))
    assert jax.typeof(out).sharding.spec == P(("a", "b"), None)


def test_a_loop_over_an_explicit_carry(explicit):
    f = jaxbridge.call(lambda x: x + 1, like, elementwise=True)

    def program(x):
        return jax.lax.scan(lambda c, _: (f(c), None), x, length=3)[0]

    x = put(X, "a", mesh=explicit)
    np.testing.assert_array_equal(jax.jit(program)(x), X + 3)
    assert collectives(program, x) == set()


def test_vmap_over_an_explicit_axis(explicit):
    watched = Watched(lambda x: x.sum(-1))
    f = jax.vmap(jaxbridge.call(watched, row_sums, vmap_method="broadcast_all"))
    out = check(f, watched, [put(X, "a", mesh=explicit)], X.sum(-1), ((2, 8),))
    assert jax.typeof(out).sharding.spec == P("a")


def test_derivatives_on_explicit_axes(explicit):
    sine = jaxbridge.call(np.sin, like, elementwise=True)
    cosine = jaxbridge.call(np.cos, like, elementwise=True)

    @jax.custom_jvp
    def sin(x):
        return sine(x)

    @sin.defjvp
    def _(primals, tangents):
        return sin(*primals), cosine(*primals) * tangents[0]

    x = put(X, "a", "b", mesh=explicit)
    g = jax.jit(jax.grad(lambda x: (sin(x) ** 2).sum()))(x)
    np.testing.assert_allclose(g, 2 * np.sin(X) * np.cos(X), rtol=1e-5, atol=1e-6)
    assert jax.typeof(g).sharding.spec == P("a", "b")


@pytest.mark.parametrize("kind", ["jvp", "linear"])
def test_a_zero_of_a_rule_lies_on_explicit_axes(explicit, kind):
    f = jaxbridge.call(lambda x, y: 2 * x, like, elementwise=True)
    if kind == "jvp":
        f.defjvp(lambda primals, tangents: (f(*primals), None))
    else:
        f.deflinear(lambda ct: (2 * ct, None), (0, 1))
    x = put(X, "a", "b", mesh=explicit)

    @jax.jit
    def program(x, y):
        tangent = jax.jvp(lambda y: f(jax.lax.stop_gradient(x), y), (y,), (y,))[1]
        return tangent, jax.grad(lambda x, y: f(x, y).sum(), (0, 1))(x, y)

    tangent, (of_x, of_y) = program(x, x)
    for zero in (tangent, of_y):
        np.testing.assert_array_equal(zero, np.zeros_like(X))
        assert zero.sharding.is_equivalent_to(x.sharding, 2)
    np.testing.assert_array_equal(of_x, np.full_like(X, 0 if kind == "jvp" else 2))


def test_a_mesh_with_axes_of_both_kinds():
    mesh = jax.make_mesh(
        (4, 2), ("a", "b"), axis_types=(AxisType.Explicit, AxisType.Auto), devices=jax.devices()[:8]
    )
    watched = Watched(lambda x: x + 1)
    f = jaxbridge.call(watched, like, elementwise=True)
    with jax.set_mesh(mesh):
        x = put(X, "a", "b", mesh=mesh)
        out = check(f, watched, [x], X + 1, ((2, 4),))
        assert jax.typeof(out).sharding.spec == P("a", None)


# ---- shard_map -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_shard_map_over_some_of_the_axes(kind):
    watched = Watched(lambda x: x + 1)
    f = jaxbridge.call(watched, like, elementwise=True)
    mesh = mesh_of(kind)
    with jax.set_mesh(mesh):
        g = jax.jit(jax.shard_map(f, in_specs=P("b"), out_specs=P("b"), axis_names={"b"}))
        x = put(X, ("b", "a"), mesh=mesh) if kind == "Auto" else put(X, "b", "a", mesh=mesh)
        y, shapes = watched.during(g, x)
        np.testing.assert_array_equal(y, X + 1)
        assert shapes == [((1, 8),) if kind == "Auto" else ((4, 2),)] * 8
        # JAX itself gathers there on some versions (0.10, 0.11).
        native = jax.shard_map(jnp.sin, in_specs=P("b"), out_specs=P("b"), axis_names={"b"})
        assert collectives(g, x) == collectives(native, x)


def test_shard_map_over_all_axes_needs_no_rule(mesh):
    watched = Watched(lambda x, y: (x.sum(0), x * y))
    f = jaxbridge.call(watched, lambda x, y: (y, x))
    g = jax.shard_map(
        f, mesh=mesh, in_specs=(P("a", "b"), P("b")), out_specs=(P(("a", "b")), P("a", "b"))
    )
    (sums, y), shapes = watched.during(jax.jit(g), put(X, "a", "b"), put(X[0], "b"))
    np.testing.assert_array_equal(y, X * X[0])
    assert sums.shape == (32,)
    assert shapes == [((2, 4), (4,))] * 8
    assert collectives(g, put(X, "a", "b"), put(X[0], "b")) == set()

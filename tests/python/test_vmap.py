# SPDX-License-Identifier: Apache-2.0
"""vmap of external functions: vmap_method, elementwise and defvmap, beside JAX's own functions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbridge
from jaxbridge import errors

METHODS = ["sequential", "sequential_unrolled", "expand_dims", "broadcast_all", "batched"]
HOW = [*METHODS, "elementwise", "defvmap"]


def like(x, *rest, **keywords):
    return x


def broadcast(*xs):
    return jax.ShapeDtypeStruct(np.broadcast_shapes(*(x.shape for x in xs)), xs[0].dtype)


def fused(x, y, z):
    return x * y + z


def make(fn, how, result=like):
    """An external function under `how`; for defvmap a rule that has whole batches."""
    if how == "elementwise":
        return jaxbridge.call(fn, result, elementwise=True)
    if how != "defvmap":
        return jaxbridge.call(fn, result, vmap_method=how)
    f = jaxbridge.call(fn, result)

    @f.defvmap
    def rule(size, in_batched, *args):
        full = [
            a if is_batched else jnp.broadcast_to(a, (size, *a.shape))
            for a, is_batched in zip(args, in_batched, strict=True)
        ]
        return f(*full), True

    return f


def all_close(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, want)


# By name: what is done with a function of three arrays of one shape. x, y and z are cubes.
BATCHES = {
    "first": lambda f: lambda x, y, z: jax.vmap(f, (0, None, None))(x, y[0], z[0]),
    "last": lambda f: lambda x, y, z: jax.vmap(f, (None, None, -1), -1)(x[0], y[0], z),
    "two of three": lambda f: lambda x, y, z: jax.vmap(f, (1, None, 0), 1)(x, y[0], z),
    "all": lambda f: jax.vmap(f, (0, 1, 2), 2),
    "nested": lambda f: (
        lambda x, y, z: jax.vmap(jax.vmap(f, (None, 0, 1), 1), (1, None, 0))(x[0], y[0], z)
    ),
    "each its own": lambda f: (
        lambda x, y, z: jax.vmap(jax.vmap(f, (0, None, None)), (None, 1, None), out_axes=1)(
            x[0], y[0], z[0, 0]
        )
    ),
    "three deep": lambda f: (
        lambda x, y, z: jax.vmap(
            jax.vmap(jax.vmap(f, (0, None, None)), (None, 1, None)), (2, None, 0)
        )(x, y[0], z[0])
    ),
    "in scan": lambda f: (
        lambda x, y, z: jax.lax.scan(
            lambda c, v: (jax.vmap(f, (0, 1, None), 1)(c, v, v[0]), c.sum()), x[0], y
        )
    ),
    "of scan": lambda f: jax.vmap(
        lambda x, y, z: jax.lax.scan(lambda c, v: (f(c, v, z[0]), f(v, v, c)), x[0, 0], y),
        (None, 1, 0),
    ),
    "of cond": lambda f: jax.vmap(
        lambda x, y, z: jax.lax.cond(x[0, 0] > 0.5, lambda: f(x, y, z), lambda: f(z, y, x))
    ),
    "of map": lambda f: lambda x, y, z: jax.lax.map(lambda v: f(v, y[0], z[0]), x, batch_size=2),
}


def arrays():
    return [jnp.asarray(a) for a in np.random.RandomState(0).rand(3, 3, 3, 3).astype(np.float32)]


@pytest.mark.parametrize("how", HOW)
def test_any_arguments_and_axes(how):
    f, operands = make(fused, how), arrays()

    def every(g):
        return lambda *xs: {name: batch(g)(*xs) for name, batch in BATCHES.items()}

    want = every(fused)(*operands)
    all_close(jax.jit(every(f))(*operands), want)
    for name in ("two of three", "nested"):
        all_close(BATCHES[name](f)(*operands), want[name])
    with jax.disable_jit():
        all_close(BATCHES["nested"](f)(*operands), want["nested"])


DERIVATIVES = {
    "vmap of grad": lambda f: (
        lambda x, y, z: jax.vmap(jax.grad(lambda *a: f(*a).sum(), (0, 1)), (0, 1, None))(x, y, z[0])
    ),
    "grad of vmap": lambda f: jax.grad(
        lambda *a: jnp.sin(BATCHES["two of three"](f)(*a)).sum(), (0, 1, 2)
    ),
    "grad of nested": lambda f: jax.grad(
        lambda *a: jnp.sin(BATCHES["nested"](f)(*a)).sum(), (0, 1, 2)
    ),
    "vmap of jvp": lambda f: (
        lambda x, y, z: jax.vmap(lambda x, y, z: jax.jvp(f, (x, y, z), (y, z, x)), (0, None, 1))(
            x, y[0], z
        )
    ),
    "vmap of jacfwd": lambda f: (
        lambda x, y, z: jax.vmap(jax.jacfwd(lambda *a: f(*a)[0]), (None, 0, None))(x[0], y, z[0])
    ),
    "vmap of vjp": lambda f: (
        lambda x, y, z: jax.vmap(lambda x, y, z: jax.vjp(f, x, y, z)[1](z), (1, 0, None))(
            x, y, z[0]
        )
    ),
    "in scan": lambda f: jax.grad(lambda x, y, z: BATCHES["in scan"](f)(x, y, z)[0].sum(), (0, 1)),
}


# How a rule is batched has nothing to do with how the other is.
RULES = {how: "jvp" if i % 2 else "both" for i, how in enumerate(HOW)}


@pytest.mark.parametrize("how, rules", list(RULES.items()))
def test_derivatives(how, rules):
    """What the rules call is batched as the function is, where it does not say itself."""
    f = make(fused, how)
    other = make(fused, how) if how == "defvmap" else f
    f.defjvp(lambda p, t: (f(*p), t[0] * p[1] + p[0] * t[1] + t[2]))
    if rules == "both":
        f.defvjp(
            lambda x, y, z: (f(x, y, z), (x, y)),
            lambda r, ct: (other(ct, r[1], 0 * ct), r[0] * ct, ct),
        )
    operands = arrays()

    def every(g):
        return lambda *xs: {name: derivative(g)(*xs) for name, derivative in DERIVATIVES.items()}

    want = every(fused)(*operands)
    all_close(jax.jit(every(f))(*operands), want)
    all_close(DERIVATIVES["grad of vmap"](f)(*operands), want["grad of vmap"])


SHAPES = {
    "sequential": {((3,), (3,))},
    "sequential_unrolled": {((3,), (3,))},
    "expand_dims": {((2, 3), (1, 3))},
    "broadcast_all": {((2, 3), (2, 3))},
    "batched": {((2, 3), (2, 3))},
    "elementwise": {((2, 3), (3,))},
    "defvmap": {((2, 3), (2, 3))},
}


def test_what_a_rule_calls_in_jit_is_batched_by_the_rule_alone():
    """JAX's cache of what was traced elsewhere does not tell how a call is batched."""
    cosine = jax.jit(lambda x: external(x))
    external = jaxbridge.call(np.cos, lambda x: x)
    f = jaxbridge.call(np.sin, lambda x: x, vmap_method="sequential")
    f.defjvp(lambda p, t: (f(*p), cosine(*p) * t[0]))
    x = jnp.arange(3.0)
    for _ in range(2):
        cosine(x[0])  # traced where nothing says how
        np.testing.assert_allclose(jax.vmap(jax.grad(f))(x), np.cos(x), rtol=1e-5)
        with pytest.raises(errors.BatchingError, match="vmap needs to know how"):
            jax.vmap(cosine)(x)


@pytest.mark.parametrize("how", HOW)
def test_what_the_function_gets(how):
    shapes = []

    def fn(a, b):
        shapes.append((a.shape, b.shape))
        return a + b

    f = make(fn, how, broadcast)
    a, b = jnp.arange(6.0).reshape(3, 2), jnp.arange(3.0)
    np.testing.assert_array_equal(jax.vmap(f, (1, None), -1)(a, b), a + b[:, None])
    assert set(shapes) == SHAPES[how]
    assert len(shapes) == (2 if "sequential" in how else 1)


def test_one_call_where_nothing_is_batched():
    calls = []
    f = jaxbridge.call(lambda x: (calls.append(0), x + 1)[1], like)  # needs no method then
    x = jnp.arange(3.0)
    out = jax.jit(jax.vmap(lambda v: f(x) + v))(jnp.zeros((4, 3)))
    np.testing.assert_array_equal(out, np.broadcast_to(x + 1, (4, 3)))
    assert len(calls) == 1


def test_batched_has_one_axis_always():
    shapes = []

    def fn(a, b):
        shapes.append(a.shape)
        assert a.shape == b.shape
        return a + b

    f = jaxbridge.call(fn, like, vmap_method="batched")
    a = jnp.arange(24.0).reshape(2, 4, 3)
    b = jnp.arange(3.0)
    np.testing.assert_array_equal(f(b, b), 2 * np.arange(3))
    y = jax.vmap(jax.vmap(f, in_axes=(0, None)), in_axes=(0, None))(a, b)
    np.testing.assert_array_equal(y, a + b)
    assert shapes == [(1, 3), (8, 3)]


def test_elementwise_aligns_ranks():
    f = jaxbridge.call(np.add, broadcast, elementwise=True)
    a, b = jnp.arange(3.0), jnp.arange(2.0)
    np.testing.assert_array_equal(
        jax.vmap(f, (None, 0))(a, b), np.arange(2)[:, None] + np.arange(3)
    )
    np.testing.assert_array_equal(
        jax.vmap(jax.vmap(f, (None, 0)), (0, None))(a, b), np.arange(3)[:, None] + np.arange(2)
    )


@pytest.mark.parametrize("how", HOW)
def test_a_batch_of_none(how):
    f = make(fused, how)
    f.defvjp(lambda *a: (f(*a), a), lambda r, ct: (ct * r[1], r[0] * ct, ct))
    x, y = jnp.zeros((3, 0)), jnp.arange(3.0)

    def every(x, y):
        def loss(x, y):
            return jax.vmap(f, (1, None, None), 1)(x, y, y).sum()

        nested = jax.vmap(jax.vmap(f, (0, None, None)), (None, None, 0))(x.T, y, jnp.ones((2, 3)))
        return jax.vmap(f, (1, None, None), 1)(x, y, y), nested, *jax.grad(loss, (0, 1))(x, y)

    for g in (jax.jit(every), every):
        out, nested, dx, dy = g(x, y)
        assert (out.shape, nested.shape, dx.shape) == ((3, 0), (2, 0, 3), (3, 0))
        np.testing.assert_array_equal(dy, [0, 0, 0])


@pytest.mark.parametrize("how", METHODS)
def test_memory_in_place(how):
    """What is not batched and updated is one piece for each element."""

    def add_to(x, y):
        x += y
        return x

    f = jaxbridge.call(add_to, like, inout={0: 0}, vmap_method=how)
    x, y = jnp.arange(3.0), jnp.arange(6.0).reshape(2, 3)
    np.testing.assert_array_equal(jax.jit(jax.vmap(f, (None, 0)))(x, y), x + y)
    np.testing.assert_array_equal(jax.vmap(f, (0, None))(y, x), x + y)
    np.testing.assert_array_equal(x, [0, 1, 2])
    np.testing.assert_array_equal(y, [[0, 1, 2], [3, 4, 5]])


@pytest.mark.parametrize("how", ["sequential", "sequential_unrolled"])
def test_one_effect_for_each_element(how):
    seen = []
    f = jaxbridge.call(lambda x: seen.append(float(x)), None, vmap_method=how)
    jax.jit(jax.vmap(f))(jnp.arange(4.0))
    jax.effects_barrier()
    assert seen == [0, 1, 2, 3]


def test_without_a_method():
    f = jaxbridge.call(np.sin, like)
    message = r"sin: vmap needs to know how: .* vmap_method=.*elementwise=True.*\.defvmap\(rule\)"
    with pytest.raises(errors.BatchingError, match=message):
        jax.make_jaxpr(jax.vmap(f))(jnp.zeros((2, 3)))


# ---- defvmap -------------------------------------------------------------------------------------


def test_what_a_rule_gets_and_returns():
    seen = []

    def external(x, mode, n, *, scale):
        return {"a": x["u"] * n + x["v"], "b": x["v"] * scale}

    f = jaxbridge.call(
        external, lambda x, mode, n, *, scale: {"a": x["u"], "b": x["v"]}, vmap_method="sequential"
    )

    @f.defvmap
    def rule(size, in_batched, x, mode, n, *, scale):
        seen.append((size, in_batched, x["u"].shape, x["v"].shape, mode, n))
        u, v = x["u"], x["v"]
        return {"a": u * n + v, "b": v * scale}, {"a": True, "b": in_batched[0]["v"]}

    u, v = jnp.arange(6.0).reshape(3, 2), jnp.arange(3.0)
    batched = jax.vmap(lambda u: f({"u": u, "v": v}, "mode", 2.0, scale=3.0), 1)
    for g in (batched, jax.jit(batched)):
        out = g(u)
        np.testing.assert_array_equal(out["a"], 2 * u.T + v)
        np.testing.assert_array_equal(out["b"], [3 * v, 3 * v])
    inside = ({"u": True, "v": False}, False, False)
    assert set(map(str, seen)) == {str((2, inside, (2, 3), (3,), "mode", 2.0))}
    # The outer vmap is of the rule, which is JAX code.
    nested = jax.jit(
        jax.vmap(
            jax.vmap(lambda u, v: f({"u": u, "v": v}, "mode", 2.0, scale=3.0), (1, None)), (None, 0)
        )
    )
    vs = jnp.stack([v, v + 1])
    np.testing.assert_array_equal(nested(u, vs)["a"], 2 * u.T + vs[:, None])
    np.testing.assert_array_equal(nested(u, vs)["b"], np.broadcast_to(3 * vs[:, None], (2, 2, 3)))
    assert {s[0] for s in seen} == {2}
    # Not asked for without vmap.
    before = len(seen)
    f({"u": v, "v": v}, "mode", 2.0, scale=3.0)
    assert len(seen) == before


def test_a_rule_goes_before_the_method():
    f = jaxbridge.call(lambda x: x + 1, like, vmap_method="broadcast_all")
    x = jnp.arange(6.0).reshape(2, 3)
    np.testing.assert_array_equal(jax.vmap(f)(x), x + 1)
    assert f.defvmap(rule := lambda size, batched, v: (v + 2, True)) is rule
    np.testing.assert_array_equal(jax.vmap(f)(x), x + 2)
    np.testing.assert_array_equal(jax.jit(jax.vmap(f))(x), x + 2)


def returning(out, batched=True):
    return lambda size, in_batched, x, y: (out, batched)


TWO = jnp.zeros((2, 3))


@pytest.mark.parametrize(
    "rule, match",
    [
        (lambda *a: TWO, r"returned an array, float32\[2,3\]; expected a pair"),
        (lambda *a: ({"a": TWO}, True, 0), "a tuple of 3; expected a pair"),
        (returning({"b": TWO}), r"as results \{'b': \*\}; expected .* \{'a': '\*'\}"),
        (
            returning({"a": jnp.zeros((3, 3))}),
            r"result\['a'\] float32\[3,3\]; expected float32\[2,3\]",
        ),
        (returning({"a": TWO[0]}), r"result\['a'\] float32\[3\]; expected float32\[2,3\]"),
        (returning({"a": TWO}, False), r"result\['a'\] float32\[2,3\]; expected float32\[3\]"),
        (returning({"a": TWO.astype(int)}), r"result\['a'\] int32\[2,3\]; expected float32\[2,3\]"),
        (returning({"a": "x"}), r"result\['a'\] a str; expected float32\[2,3\]"),
        (returning({"a": TWO}, {"a": 1}), r"returned 1 as out_batched of result\['a'\]"),
        (returning({"a": TWO}, {"b": True}), "as out_batched"),
        (returning({"a": TWO}, None), "as out_batched"),
    ],
)
@pytest.mark.parametrize("traced", [True, False])
def test_what_a_rule_returns_is_checked(rule, match, traced):
    f = jaxbridge.call(lambda x, y: {"a": x}, lambda x, y: {"a": x})
    f.defvmap(rule)
    batched = jax.vmap(f, (0, None))
    with pytest.raises(errors.BatchingError, match=f"the rule of defvmap .*{match}"):
        (jax.make_jaxpr(batched) if traced else batched)(TWO, TWO[0])


def test_what_a_rule_is_not_told_of():
    f = jaxbridge.call(lambda x, *, w: x * w, like)
    f.defvmap(lambda size, in_batched, x, *, w: (x * w, True))
    x = jnp.ones((2, 3))
    np.testing.assert_array_equal(jax.vmap(lambda v: f(v, w=x[0]))(x), x)
    with pytest.raises(errors.BatchingError, match="argument w is mapped and passed by keyword"):
        jax.make_jaxpr(jax.vmap(lambda v: f(v, w=v)))(x)
    with pytest.raises(TypeError, match="defvmap: rule is 3; expected a function"):
        f.defvmap(3)


@pytest.mark.parametrize("how", ["batched", "broadcast_all"])
def test_a_function_that_returns_another_batch(how):
    """It shows when the function has run; the error says which result, and its shape."""
    f = jaxbridge.call(lambda x: x[:1], like, vmap_method=how)
    with pytest.raises(errors.ResultError, match=r"\(2, 3\).*\(1, 3\)|\[2,3\].*\[1,3\]"):
        jax.vmap(f)(jnp.zeros((2, 3)))

# SPDX-License-Identifier: Apache-2.0
"""Acceptance cases of letter K: vmap, derivatives, transposes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbridge
from jaxbridge import _config, errors

RNG = np.random.RandomState(0)


def like(x, *rest, **keywords):
    return x


def close(got, want, rtol=1e-5):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-5), got, want)


def random(*shape, dtype=np.float32):
    values = RNG.randn(*shape)
    if np.dtype(dtype).kind == "c":
        values = values + 1j * RNG.randn(*shape)
    return jnp.asarray(values.astype(dtype))


def test_K02_ranks_are_aligned():
    """(9,) as (2, 3) and (3,): `elementwise` aligns ranks, and "sequential" needs not."""

    def f(x, **options):
        add = jaxbridge.call(
            lambda a, b: a + b,
            lambda a, b: jax.ShapeDtypeStruct(np.broadcast_shapes(a.shape, b.shape), a.dtype),
            **options,
        )
        return add(x[:6].reshape(2, 3), x[6:])

    x = random(5, 9)
    want = np.stack([v[:6].reshape(2, 3) + v[6:] for v in np.asarray(x)])
    for options in ({"elementwise": True}, {"vmap_method": "sequential"}):
        g = functools.partial(f, **options)
        close(jax.jit(jax.vmap(g))(x), want)
        close(jax.vmap(jax.vmap(g, 1), 1)(jnp.stack([x, 2 * x]).T)[:, 1], 2 * want)


@pytest.mark.parametrize("method", ["sequential", "expand_dims", "broadcast_all", "batched"])
def test_K03_every_in_and_out_axis(method):
    f = jaxbridge.call(lambda v: v * 2 + 1, like, vmap_method=method)
    x = random(2, 3, 4)
    values = np.asarray(x)
    for i in (0, 1, 2, -1, -2, -3):
        for o in (0, 1, 2, -1):
            got = jax.vmap(f, in_axes=i, out_axes=o)(x)
            close(got, np.stack([np.take(values, k, i) * 2 + 1 for k in range(x.shape[i])], o))


@pytest.mark.parametrize("batches", [True, False])
def test_K04_statics_survive_every_transform(batches):
    identity = np.eye(5, dtype=np.float32)

    def apply(x, *, factor, matrix="identity"):
        assert matrix == "identity" and isinstance(factor, float)
        return (x @ identity.T) * np.float32(factor)

    method = "broadcast_all" if batches else "sequential"
    linear = jaxbridge.call(apply, like, vmap_method=method)
    linear.deflinear(lambda ct, *, factor: linear(ct, factor=factor))
    f = functools.partial(linear, factor=3.0)
    x, y = random(5, 5), random(5)
    close(jax.jit(f)(y), 3 * y)
    for g in (jax.vmap(f), jax.jit(jax.vmap(f)), jax.vmap(jax.jit(f))):
        close(g(x), 3 * x)
    close(jax.vmap(jax.vmap(f, 1, 1))(jnp.stack([x, 2 * x])), jnp.stack([3 * x, 6 * x]))
    for g in (jax.grad(lambda v: f(v).sum()), jax.jit(jax.vmap(jax.grad(lambda v: f(v).sum())))):
        close(g(x), np.full((5, 5), 3))
    close(jax.jvp(f, (y,), (2 * y,)), (3 * y, 6 * y))
    close(jax.linear_transpose(f, y)(y)[0], 3 * y)
    close(jax.vmap(lambda v: jax.linear_transpose(f, y)(v)[0])(x), 3 * x)


def at_points(source, points, sign=1):
    """A sum of waves at some points: complex sources (10, 11), points (4,) in two directions."""
    n, m = source.shape[-2:]
    p = np.exp(1j * sign * points[..., None] * np.arange(n))
    q = np.exp(1j * sign * 2 * points[..., None] * np.arange(m))
    return np.einsum("...nm,...kn,...km->...k", source, p, q).astype(np.complex64)


SPEC = lambda source, points, *rest: jax.ShapeDtypeStruct(points.shape, source.dtype)


@pytest.mark.parametrize("method", ["sequential", "broadcast_all", "expand_dims", "batched"])
@pytest.mark.parametrize("mapped", [(0, None), (None, 0), (0, 0), (2, 1)])
def test_K05_every_subset_of_mapped_operands(method, mapped):
    f = jaxbridge.call(at_points, SPEC, vmap_method=method)
    source, points = random(10, 11, dtype=np.complex64), random(4)
    many, sets = random(3, 10, 11, dtype=np.complex64), random(3, 4)
    args = [many if mapped[0] is not None else source, sets if mapped[1] is not None else points]
    pick = lambda a, i, k: a if i is None else a[k]
    want = [
        at_points(*map(functools.partial(pick, k=k), map(np.asarray, args), mapped))
        for k in range(3)
    ]
    args = [
        jnp.moveaxis(a, 0, i) if i is not None else a for a, i in zip(args, mapped, strict=True)
    ]
    close(jax.jit(jax.vmap(f, mapped))(*args), np.stack(want), rtol=1e-4)


@pytest.mark.parametrize("method", ["sequential", "broadcast_all", "batched"])
def test_K06_batched_over_points_and_over_sources_together(method):
    """The CPU form: equals loops."""
    f = jaxbridge.call(at_points, SPEC, vmap_method=method)
    sources, points = random(3, 10, 11, dtype=np.complex64), random(5, 4)
    got = jax.jit(jax.vmap(jax.vmap(f, (None, 0)), (0, None)))(sources, points)
    want = [[at_points(s, p) for p in points] for s in sources]
    close(got, np.asarray(want), rtol=1e-4)
    got = jax.vmap(jax.vmap(f, (0, None)), (None, 0))(sources, points)
    close(got, np.swapaxes(want, 0, 1), rtol=1e-4)


@pytest.mark.parametrize("sign", [1, -1])
def test_K07_static_options_reach_the_function(sign):
    """The CPU form: each option is its own program, and right with each transform."""
    f = jaxbridge.call(at_points, SPEC, vmap_method="sequential")
    f.deflinear(lambda ct, points, sign: jax.linear_transpose(lambda s: native(s, points, sign),
                                                              source)(ct)[0])  # fmt: skip

    def native(source, points, sign):
        p = jnp.exp(1j * sign * points[:, None] * np.arange(10))
        q = jnp.exp(1j * sign * 2 * points[:, None] * np.arange(11))
        return jnp.einsum("nm,kn,km->k", source, p, q)

    source, points = random(10, 11, dtype=np.complex64), random(4)
    close(
        jax.jit(f, static_argnums=2)(source, points, sign), native(source, points, sign), rtol=1e-4
    )
    loss = lambda g: lambda s: (jnp.abs(g(s, points, sign)) ** 2).sum()
    close(jax.jit(jax.grad(loss(f)))(source), jax.grad(loss(native))(source), rtol=1e-3)


@pytest.mark.parametrize("rules", ["jvp", "jvp and vjp"])
@pytest.mark.parametrize("method", ["sequential", "broadcast_all"])
def test_K08_batching_reaches_derivatives(rules, method):
    seen = []

    def derivative(x, t):
        seen.append(x.ndim)
        return 3 * x**2 * t

    f = jaxbridge.call(lambda x: x**3, like, vmap_method=method)
    d = jaxbridge.call(derivative, like)  # it says nothing of batches
    d2 = jaxbridge.call(derivative, like, vmap_method=method)
    d = d if method == "sequential" else d2
    d.defjvp(lambda p, t: (d(*p), 6 * p[0] * p[1] * t[0] + d(p[0], t[1])))
    f.defjvp(lambda p, t: (f(*p), d(p[0], t[0])))
    d.deflinear(lambda ct, x: d(x, ct), 1)
    if "vjp" in rules:
        f.defvjp(lambda x: (f(x), x), lambda x, ct: (d(x, ct),))
    x = random(3)
    g = lambda x: x**3
    close(jax.vmap(jax.jacfwd(f))(x), 3 * x**2)
    close(jax.jit(jax.vmap(jax.jacrev(f)))(x), 3 * x**2)
    close(jax.vmap(jax.hessian(f))(x), 6 * x)
    close(jax.jacfwd(f)(x), jax.jacfwd(g)(x))
    close(
        jax.vmap(jax.jacfwd(f))(jnp.stack([x, 2 * x])),
        jax.vmap(jax.jacfwd(g))(jnp.stack([x, 2 * x])),
    )
    close(jax.hessian(lambda x: f(x).sum())(x), jnp.diag(6 * x))
    assert max(seen) == (1 if method == "sequential" else 3)


@pytest.mark.parametrize("dtype", [np.float32, np.complex64])
def test_K09_a_linear_map_with_its_transpose(dtype):
    matrix = np.asarray(random(4, 3, dtype=dtype))
    f = jaxbridge.call(lambda x: matrix @ x, jax.ShapeDtypeStruct((4,), dtype))
    f.deflinear(jaxbridge.call(lambda ct: matrix.T @ ct, jax.ShapeDtypeStruct((3,), dtype)))
    x, t, y = random(3, dtype=dtype), random(3, dtype=dtype), random(4, dtype=dtype)
    close(jax.jvp(f, (x,), (t,)), (matrix @ x, matrix @ t))
    transposed = jax.linear_transpose(f, x)(y)[0]
    close(jnp.sum(f(x) * y), jnp.sum(x * transposed))  # the dot-product test
    close(jax.vjp(f, x)[1](y)[0], transposed)
    loss = lambda g: lambda x: (jnp.abs(g(x)) ** 2).sum()
    for d in (jax.grad, lambda g: jax.jit(jax.grad(g))):
        close(d(loss(f))(x), d(loss(lambda x: matrix @ x))(x))


def test_K10_external_derivatives_are_differentiated_again():
    value = jaxbridge.call(np.sin, like)
    slope = jaxbridge.call(np.cos, like)
    value.defjvp(lambda p, t: (value(*p), slope(*p) * t[0]))
    x = random(1)
    first = lambda x: value(x).sum()
    close(jax.grad(first)(x), jnp.cos(x))
    with pytest.raises(errors.DerivativeError, match=r"cos: .*has no derivative rule; .*\.defjvp"):
        jax.make_jaxpr(jax.grad(lambda x: jax.grad(first)(x).sum()))(x)
    slope.defjvp(lambda p, t: (slope(*p), -value(*p) * t[0]))
    close(jax.grad(lambda x: jax.grad(first)(x).sum())(x), -jnp.sin(x))
    close(jax.jvp(jax.grad(first), (x,), (2 * x,))[1], -jnp.sin(x) * 2 * x)
    close(jax.jit(jax.hessian(first))(x), jnp.diag(-jnp.sin(x)))
    close(jax.grad(lambda x: jax.grad(lambda x: jax.grad(first)(x).sum())(x).sum())(x), -jnp.cos(x))


def test_K11_the_backward_pass_has_the_forward_shapes():
    """The CPU form: a sum over the last axis, whose backward function needs its length."""
    shapes = []

    def forward(x, w):
        return (x * w).sum(-1)

    def backward(x, w, ct):
        shapes.append((x.shape, ct.shape))
        return ct[..., None] * w, (ct[..., None] * x).sum((0, 1, 2))

    f = jaxbridge.call(forward, lambda x, w: jax.ShapeDtypeStruct(x.shape[:-1], x.dtype))
    b = jaxbridge.call(backward, lambda x, w, ct: (x, w))
    f.defvjp(lambda x, w: (f(x, w), (x, w)), lambda r, ct: b(*r, ct))
    x, w = random(16, 128, 2, 4), random(4)
    loss = lambda g: lambda x, w: jnp.sum(jnp.sin(g(x, w)))
    got = jax.jit(jax.grad(loss(f), (0, 1)))(x, w)
    close(got, jax.grad(loss(lambda x, w: (x * w).sum(-1)), (0, 1))(x, w), rtol=1e-4)
    assert shapes == [((16, 128, 2, 4), (16, 128, 2))]
    step = 0.01 * jnp.ones_like(w)
    difference = (loss(f)(x, w + step) - loss(f)(x, w - step)) / 0.02
    np.testing.assert_allclose(difference, got[1].sum(), rtol=1e-2)


@pytest.mark.filterwarnings("ignore:.*pmap:DeprecationWarning")
def test_K12_a_loop_is_always_possible():
    """ "sequential" is right for every function; without a word on batches vmap is an error."""
    f = jaxbridge.call(lambda x: np.sort(x)[::-1].copy(), like)
    g = jaxbridge.call(lambda x: np.sort(x)[::-1].copy(), like, vmap_method="sequential")
    x = random(2, 3, 5)
    want = np.sort(x, -1)[..., ::-1]
    with pytest.raises(errors.BatchingError, match="'sequential' calls it once for each element"):
        jax.vmap(f)(x)
    close(jax.vmap(jax.vmap(g))(x), want)
    mapped = jax.pmap(jax.vmap(g), devices=jax.devices()[:2])
    close(mapped(x), want)
    close(jax.pmap(lambda v: jnp.stack([f(row) for row in v]), devices=jax.devices()[:2])(x), want)


@pytest.mark.parametrize("method", ["sequential", "broadcast_all", "batched"])
def test_K13_a_vmapped_step_in_debug_mode(method, monkeypatch):
    """Checks of bounds see the shapes of the call; docs/functions.md says where the batch axis is."""
    monkeypatch.setattr(_config, "debug", True)
    seen = []

    def step(state, force, out):
        seen.append((state.shape, force.shape, out.shape))
        assert state.shape == force.shape == out.shape
        with pytest.raises(IndexError):
            state[..., 3]
        for i in np.ndindex(state.shape):
            out[i] = state[i] + force[i]

    f = jaxbridge.call(step, like, out="out", vmap_method=method)
    state, force = random(2, 3), random(2, 3)
    close(jax.jit(jax.vmap(f))(state, force), state + force)
    assert set(seen) == {((3,),) * 3 if method == "sequential" else ((2, 3),) * 3}

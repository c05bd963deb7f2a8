# SPDX-License-Identifier: Apache-2.0
"""deflinear, defjvp, defvjp: derivatives against JAX's own and finite differences."""

import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import jaxbridge
from jaxbridge import errors

F32 = jax.ShapeDtypeStruct((3,), jnp.float32)
MATRIX = np.random.RandomState(0).randn(3, 3).astype(np.float32)


def like(x, *rest, **kw):
    return x


def linear(**options):
    """a @ x, linear in x, with another external function as transpose."""
    options = {"vmap_method": "sequential", **options}
    f = jaxbridge.call(lambda x, a: a @ x, like, **options)
    f.deflinear(jaxbridge.call(lambda ct, a: a.T @ ct, like, **options))
    return lambda x: f(x, MATRIX)


def sines(rules):
    """The sine, with external derivatives of every order."""
    s = jaxbridge.call(np.sin, like, vmap_method="broadcast_all")
    c = jaxbridge.call(np.cos, like, vmap_method="broadcast_all")
    if "jvp" in rules:
        s.defjvp(lambda p, t: (s(*p), c(*p) * t[0]))
        c.defjvp(lambda p, t: (c(*p), -s(*p) * t[0]))
    if "vjp" in rules:
        s.defvjp(lambda x: (s(x), c(x)), lambda r, ct: (r * ct,))
        c.defvjp(lambda x: (c(x), -s(x)), lambda r, ct: (r * ct,))
    return s


FUNCTIONS = {
    "linear": (linear, lambda x: MATRIX @ x),
    "jvp": (lambda: sines({"jvp"}), jnp.sin),
    "vjp": (lambda: sines({"vjp"}), jnp.sin),
    "jvp and vjp": (lambda: sines({"jvp", "vjp"}), jnp.sin),
}

DERIVATIVES = {
    "grad": jax.grad,
    "grad of grad": lambda f: jax.grad(lambda x: jax.grad(f)(x).sum()),
    "reverse over reverse": lambda f: jax.jacrev(jax.jacrev(f)),
    "forward": jax.jacfwd,
    "forward over forward": lambda f: jax.jacfwd(jax.jacfwd(f)),
    "forward over reverse": jax.hessian,
    "reverse over forward": lambda f: jax.jacrev(jax.jacfwd(f)),
    "third order": lambda f: jax.jacfwd(jax.jacrev(jax.jacrev(f))),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(f)),
    "hessian of checkpoint": lambda f: jax.hessian(jax.checkpoint(f)),
    "checkpoint of grad": lambda f: jax.jacrev(jax.checkpoint(jax.grad(f))),
    "linearize": lambda f: lambda x: jax.linearize(f, x)[1](jnp.ones_like(x)),
    "linearize of grad": lambda f: lambda x: jax.linearize(jax.grad(f), x)[1](jnp.ones_like(x)),
    "hvp": lambda f: lambda x: jax.jvp(jax.grad(f), (x,), (x,))[1],
    "vjp": lambda f: lambda x: jax.vjp(f, x)[1](jnp.float32(2))[0],
    "through scan": lambda f: jax.grad(
        lambda x: jax.lax.scan(lambda c, _: (jnp.sin(c) + f(c), f(c)), x, None, length=3)[1].sum()
    ),
    "hessian through scan": lambda f: jax.hessian(
        lambda x: jax.lax.scan(lambda c, _: (jnp.sin(c) + f(c), f(c)), x, None, length=3)[1].sum()
    ),
    "through cond": lambda f: jax.grad(lambda x: jax.lax.cond(x[0] < 9, f, lambda y: y.sum(), x)),
    "forward through while": lambda f: jax.jacfwd(
        lambda x: jax.lax.fori_loop(0, 3, lambda _, c: c * f(c), x)
    ),
    "vmap of grad": lambda f: lambda x: jax.vmap(jax.grad(f))(jnp.stack([x, 2 * x])),
    "vmap of hessian": lambda f: lambda x: jax.vmap(jax.hessian(f), 1)(jnp.stack([x, 2 * x], 1)),
    "grad of vmap": lambda f: jax.grad(lambda x: jax.vmap(f)(jnp.stack([x, 2 * x])).sum()),
    "hessian of vmap": lambda f: jax.hessian(lambda x: jax.vmap(f)(jnp.stack([x, 2 * x])).sum()),
    "grad of vmap of vmap": lambda f: jax.grad(
        lambda x: jax.vmap(jax.vmap(lambda a, b: f(a * b), (0, None)), (None, 1))(
            jnp.stack([x, 2 * x]), jnp.stack([x, x, 3 * x], 1)
        ).sum()
    ),
    "grad of vmap of grad": lambda f: jax.grad(
        lambda x: (jax.vmap(jax.grad(f))(jnp.stack([x, 2 * x])) ** 2).sum()
    ),
}
# A forward rule that computes its result by the Function itself is differentiated with it.
NEEDS_JVP = {
    n
    for n in DERIVATIVES
    if any(m in n for m in ("forward", "linearize", "hessian", "hvp", "third"))
}


# Those that are also run eagerly, of a jitted function, and without jit.
EAGERLY = ("forward over reverse", "grad of vmap of vmap")
OF_JITTED = ("forward over reverse", "through scan")
WITHOUT_JIT = ("grad of grad",)
POINT = jnp.array([0.3, -1.2, 2.0])


def every(loss, without=()):
    """All derivatives of a loss, as one function."""
    return lambda x: {n: d(loss)(x) for n, d in DERIVATIVES.items() if n not in without}


def check_all(of, ours, theirs, without=()):
    """Derivatives of the loss `of(f)`: of an external function and of one of JAX's."""
    want = jax.jit(every(of(theirs), without))(POINT)

    def same(got, name):
        assert got.shape == want[name].shape and got.dtype == want[name].dtype, name
        np.testing.assert_allclose(got, want[name], rtol=3e-4, atol=1e-4, err_msg=name)

    for name, got in jax.jit(every(of(ours), without))(POINT).items():
        same(got, name)
    for name in set(EAGERLY).difference(without):
        same(DERIVATIVES[name](of(ours))(POINT), name)
    for name in set(OF_JITTED).difference(without):
        same(DERIVATIVES[name](jax.jit(of(ours)))(POINT), name)
    for name in WITHOUT_JIT:
        with jax.disable_jit():
            same(DERIVATIVES[name](of(ours))(POINT), name)


@pytest.mark.parametrize("kind", list(FUNCTIONS))
def test_derivatives_are_jaxs_own(kind):
    make, native = FUNCTIONS[kind]
    check_all(
        lambda f: lambda x: jnp.sum(jnp.cos(f(x)) * x),
        make(),
        native,
        NEEDS_JVP if kind == "vjp" else (),
    )


@pytest.mark.parametrize("which", sorted(NEEDS_JVP))
def test_forward_mode_needs_a_rule_for_it(which):
    f = sines({"vjp"})
    with pytest.raises(errors.DerivativeError, match=r"(sin|cos): forward mode .* needs .*defjvp"):
        jax.jit(DERIVATIVES[which](lambda x: f(x).sum())).lower(POINT)


@pytest.mark.parametrize("kind", list(FUNCTIONS))
def test_against_finite_differences(kind):
    f = FUNCTIONS[kind][0]()
    modes = ("rev",) if kind == "vjp" else ("fwd", "rev")
    x = jnp.array([0.3, -1.2, 2.0])
    check_grads(f, (x,), order=2, modes=modes, eps=1e-2, rtol=2e-2, atol=2e-2)


def test_what_runs():
    """Forward mode alone asks for no cotangents, and reverse mode for no tangents."""
    x = jnp.arange(3.0)
    asked = []
    f = jaxbridge.call(np.square, like)
    f.defjvp(lambda p, t: (asked.append("jvp"), (f(*p), 2 * p[0] * t[0]))[1])
    f.defvjp(
        lambda x: (asked.append("fwd"), (f(x), x))[1],
        lambda r, ct: (asked.append("bwd"), (2 * r * ct,))[1],
    )
    jax.grad(lambda v: f(v).sum())(x)
    assert asked == ["fwd", "bwd"]
    asked.clear()
    jax.jvp(f, (x,), (x,))
    assert asked == ["fwd", "jvp"]
    asked.clear()
    f(x), jax.jit(f)(x), jax.vmap(jaxbridge.call(np.square, like, elementwise=True))(x)
    assert not asked


# ---- deflinear -----------------------------------------------------------------------------------


def dot_test(f, transpose, *likes):
    """<f(x), y> == <x, f^T(y)>, by pairs of random arrays: nothing is conjugated.

    Real parts: where one side is real, the function is linear over real numbers alone.
    """
    rng = np.random.RandomState(1)

    def random(a):
        values = rng.randn(*a.shape)
        if jnp.issubdtype(a.dtype, jnp.complexfloating):
            values = values + 1j * rng.randn(*a.shape)
        return jnp.asarray(values, a.dtype)

    x, y = jax.tree.map(random, likes)
    left = sum(jnp.sum(a * b) for a, b in zip(*map(jax.tree.leaves, (f(x), y)), strict=True))
    ys = jax.tree.leaves(transpose(y))
    right = sum(jnp.sum(a * b) for a, b in zip(jax.tree.leaves(x), ys, strict=True))
    np.testing.assert_allclose(left.real, right.real, rtol=1e-4)
    if left.dtype == right.dtype:
        np.testing.assert_allclose(left.imag, right.imag, rtol=1e-4)


def test_linear_transpose():
    f = linear()
    transpose = jax.linear_transpose(f, F32)
    y = jnp.array([1.0, 2, -1])
    np.testing.assert_allclose(transpose(y)[0], MATRIX.T @ y, rtol=1e-5)
    # The transpose of the transpose is the function again.
    again = jax.linear_transpose(lambda ct: transpose(ct)[0], F32)
    np.testing.assert_allclose(again(y)[0], MATRIX @ y, rtol=1e-5)
    np.testing.assert_allclose(jax.jit(again)(y)[0], MATRIX @ y, rtol=1e-5)
    np.testing.assert_allclose(
        jax.vmap(transpose)(jnp.stack([y, 2 * y]))[0], jnp.stack([y, 2 * y]) @ MATRIX, rtol=1e-5
    )
    dot_test(f, transpose, F32, F32)


@pytest.mark.parametrize("kind", ["complex to complex", "real to complex", "complex to real"])
def test_linear_complex(kind):
    """The convention is JAX's: the transpose, not the adjoint."""
    n = 8
    real = jax.ShapeDtypeStruct((n,), jnp.float32)
    full = jax.ShapeDtypeStruct((n,), jnp.complex64)
    half = jax.ShapeDtypeStruct((n // 2 + 1,), jnp.complex64)
    if kind == "complex to complex":
        a, b, fn, native = full, full, lambda v: np.fft.fft(v).astype(v.dtype), jnp.fft.fft
    elif kind == "real to complex":
        a, b, native = real, half, jnp.fft.rfft
        fn = lambda v: np.fft.rfft(v).astype(np.complex64)
    else:
        a, b, native = half, real, jnp.fft.irfft
        fn = lambda v: np.fft.irfft(v).astype(np.float32)
    f = jaxbridge.call(fn, b, vmap_method="sequential")
    f.deflinear(lambda ct: jax.linear_transpose(native, a)(ct)[0])
    dot_test(f, lambda y: jax.linear_transpose(f, a)(y)[0], a, b)

    def loss(g, x):
        y = g(x)
        return jnp.sum((y * jnp.conj(y)).real * jnp.arange(b.shape[0]))

    x = jnp.arange(1.0, a.shape[0] + 1).astype(a.dtype) * (1 - 2j if a.dtype != real.dtype else 1)
    for g in (jax.grad(lambda v: loss(f, v)), jax.jit(jax.grad(lambda v: loss(f, v)))):
        np.testing.assert_allclose(
            g(x), jax.grad(lambda v: loss(native, v))(x), rtol=1e-4, atol=1e-3
        )
    got, want = (jax.jvp(g, (x,), (x,))[1] for g in (f, native))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    square = [jax.grad(lambda v, g=g: loss(g, v) ** 2) for g in (f, native)]
    hvp = [jax.jit(lambda x, g=g: jax.jvp(g, (x,), (x,))[1])(x) for g in square]
    np.testing.assert_allclose(hvp[0], hvp[1], rtol=1e-3)


def test_linear_in_two_arguments_together():
    f = jaxbridge.call(
        lambda x, n, y: {"a": 2 * x + n * y, "b": y}, lambda x, n, y: {"a": x, "b": y}
    )
    asked = []

    @functools.partial(f.deflinear, argnums=(0, 2))
    def transpose(ct, n):
        asked.append(n)
        return 2 * ct["a"], n * ct["a"] + ct["b"]

    x, y = jnp.arange(3.0), jnp.arange(3.0) + 5
    out, tangent = jax.jvp(lambda a, b: f(a, 3, b), (x, y), (y, x))
    np.testing.assert_array_equal(out["a"], 2 * x + 3 * y)
    np.testing.assert_array_equal(tangent["a"], 2 * y + 3 * x)
    np.testing.assert_array_equal(tangent["b"], x)
    assert not asked
    for argnums in (0, 1, (0, 1)):
        grad = jax.grad(lambda a, b: (f(a, 3, b)["a"] * x).sum(), argnums)
        want = jax.grad(lambda a, b: ((2 * a + 3 * b) * x).sum(), argnums)
        jax.tree.map(np.testing.assert_allclose, grad(x, y), want(x, y))
        jax.tree.map(np.testing.assert_allclose, jax.jit(grad)(x, y), want(x, y))
    assert set(asked) == {3}
    ct = {"a": x, "b": y}
    got = jax.linear_transpose(lambda a, b: f(a, 3, b), F32, F32)(ct)
    np.testing.assert_array_equal(got[0], 2 * x)
    np.testing.assert_array_equal(got[1], 3 * x + y)


def bilinear(**rules):
    f = jaxbridge.call(np.multiply, like, vmap_method="broadcast_all")
    f.deflinear({0: lambda ct, y: f(ct, y), 1: lambda ct, x: f(x, ct)}, **rules)
    return f


def test_multilinear():
    weights = jnp.array([1.0, 2, 3])
    check_all(
        lambda f: lambda x: jnp.sum(jnp.sin(f(f(x, weights), f(x, x))) * x),
        bilinear(),
        jnp.multiply,
    )


def test_multilinear_without_differentiating_its_transposes():
    """Each transpose is a transpose of the others: they are asked for, never differentiated."""

    def opaque(fn):
        return jaxbridge.call(fn, like, vmap_method="sequential")  # no rules: no derivative

    f = opaque(lambda x, y: x * y)
    f.deflinear({0: opaque(lambda ct, y: ct * y), 1: opaque(lambda ct, x: ct * x)})
    x, y = jnp.arange(3.0), jnp.array([1.0, -2, 4])

    def of(g):
        return lambda v: jnp.sum(jnp.sin(g(v[0], v[1])) * g(v[1], v[0]))

    v = jnp.stack([x, y])
    for derivative in (jax.grad, jax.hessian, lambda g: jax.jacrev(jax.jacrev(g))):
        want = jax.jit(derivative(of(jnp.multiply)))(v)
        np.testing.assert_allclose(jax.jit(derivative(of(f)))(v), want, rtol=1e-4, atol=1e-4)
    # Transposed in one argument, then in the other.
    t = jax.linear_transpose(lambda b: jax.linear_transpose(lambda a: f(a, b), F32)(x)[0], F32)
    np.testing.assert_array_equal(t(y)[0], x * y)


def test_avals_for_the_transpose():
    f = jaxbridge.call(
        lambda v, n: v[:n],
        lambda v, n: jax.ShapeDtypeStruct((n,), v.dtype),
        vmap_method="sequential",
    )
    seen = []

    def transpose(ct, n, *, avals):
        seen.append(avals)
        return jnp.zeros(avals.shape, avals.dtype).at[:n].set(ct)

    assert f.deflinear(transpose, pass_avals=True) is transpose
    x = jnp.arange(5.0)
    np.testing.assert_array_equal(jax.grad(lambda v: (f(v, 2) ** 2).sum())(x), [0, 2, 0, 0, 0])
    batch = jnp.stack([x, 2 * x], 1)
    got = jax.grad(lambda v: (jax.vmap(lambda u: f(u, 2), 1)(v) ** 2).sum())(batch)
    np.testing.assert_array_equal(got[:2], [[0, 0], [2, 4]])
    assert set(seen) == {jax.ShapeDtypeStruct((5,), jnp.float32)}


def test_fixed_arguments_have_no_derivative():
    f = jaxbridge.call(lambda x, s: x * s, like)
    f.deflinear(lambda ct, s: ct * s)
    x = jnp.arange(3.0)
    np.testing.assert_array_equal(jax.grad(lambda v: f(v, x).sum())(x), x)
    with pytest.raises(errors.DerivativeError, match=r"argument 1 .*deflinear does not name it"):
        jax.grad(lambda s: f(x, s).sum())(x)
    with pytest.raises(errors.DerivativeError, match="deflinear"):
        jax.linear_transpose(lambda s: f(x, s), F32)(x)
    # A general rule beside it is for these.
    f.defjvp(lambda p, t: (f(*p), p[1] * t[0] + p[0] * t[1]))
    np.testing.assert_array_equal(jax.grad(lambda s: f(x, s).sum())(x), x)


@pytest.mark.parametrize(
    "what, match",
    [
        (lambda f: f.deflinear(3), "the transpose is 3; expected a function"),
        (lambda f: f.deflinear(like, "x"), "named by 'x'; expected its position"),
        (lambda f: f.deflinear(like, -1), "named by -1"),
        (lambda f: f.deflinear(like, ()), r"named by \(\)"),
        (lambda f: f.deflinear({0: like, (0, 1): like}), r"each argument once, got \[0, 0, 1\]"),
        (lambda f: f.deflinear({}), "each argument once"),
        (lambda f: f.deflinear({0: like, 1: like}, argnums=1), "argnums=1 beside a mapping"),
        (lambda f: f.defjvp(None), "defjvp: rule is None"),
        (lambda f: f.defvjp(like, 1), "defvjp: bwd is 1"),
    ],
)
def test_what_is_no_rule(what, match):
    f = jaxbridge.call(np.sin, like)
    with pytest.raises(TypeError, match=match):
        what(f)
    with pytest.raises(errors.DerivativeError, match="no derivative rule"):
        jax.grad(lambda v: f(v).sum())(jnp.ones(3))


# ---- arguments -----------------------------------------------------------------------------------


def trees(x, n, mode, w, *, scale):
    """A function with a tree, an integer array, a static string, and an array by keyword."""
    value = np.sin(x["u"]) * w + x["v"] * n if mode == "sin" else x["u"]
    return {"out": (value * scale).astype(np.float32), "count": n + 1}


def native_trees(x, n, mode, w, *, scale):
    value = jnp.sin(x["u"]) * w + x["v"] * n if mode == "sin" else x["u"]
    return {"out": value * scale, "count": n + 1}


@pytest.mark.parametrize("rules", ["jvp", "vjp", "both"])
@pytest.mark.parametrize("transform", ["plain", "jit", "vmap", "grad of vmap"])
def test_trees_statics_integers_and_keywords(rules, transform):
    f = jaxbridge.call(
        trees,
        lambda x, n, mode, w, *, scale: {"out": x["u"], "count": n},
        vmap_method="sequential",
    )
    seen = []
    if rules in ("jvp", "both"):

        @f.defjvp
        def rule(primals, tangents, *, scale):
            (x, n, mode, w), (dx, dn, dmode, dw) = primals, tangents
            seen.append((mode, dmode, dn.dtype))
            out = f(x, n, mode, w, scale=scale)
            d = jnp.cos(x["u"]) * w * dx["u"] + dx["v"] * n + jnp.sin(x["u"]) * dw
            return out, {"out": d * scale, "count": None}

    if rules in ("vjp", "both"):

        def fwd(x, n, mode, w, *, scale):
            return f(x, n, mode, w, scale=scale), {"x": x, "rest": (n, w)}

        def bwd(residuals, ct, *, scale):
            x, (n, w) = residuals["x"], residuals["rest"]
            seen.append(("sin", None, ct["count"].dtype))
            c = ct["out"] * scale
            return {"u": c * jnp.cos(x["u"]) * w, "v": c * n}, None, None, c * jnp.sin(x["u"])

        f.defvjp(fwd, bwd)

    x = {"u": jnp.array([0.3, 1.0]), "v": jnp.array([2.0, -1.0])}
    n, w, scale = jnp.array([2, 3]), jnp.array([1.5, 0.5]), jnp.array([2.0, 4.0])

    def total(g):
        def loss(x, w):
            return (g(x, n, "sin", w, scale=scale)["out"] ** 2).sum()

        if transform == "vmap":
            return lambda x, w: jax.vmap(jax.grad(loss, (0, 1)))(
                jax.tree.map(lambda a: jnp.stack([a, 2 * a]), x), jnp.stack([w, w])
            )
        if transform == "grad of vmap":
            return jax.grad(
                lambda x, w: jax.vmap(loss, ({"u": 0, "v": None}, None))(
                    {"u": jnp.stack([x["u"], 2 * x["u"]]), "v": x["v"]}, w
                ).sum(),
                (0, 1),
            )
        gradient = jax.grad(loss, (0, 1))
        return jax.jit(gradient) if transform == "jit" else gradient

    got, want = total(f)(x, w), total(native_trees)(x, w)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, want)
    assert set(seen) == {("sin", None, jax.dtypes.float0)}
    if rules != "vjp":
        tangents = [
            jax.jvp(
                lambda v, g=g: g({"u": v, "v": x["v"]}, n, "sin", w, scale=scale)["out"],
                (x["u"],),
                (w,),
            )[1]
            for g in (f, native_trees)
        ]
        np.testing.assert_allclose(*tangents, rtol=1e-5)


def test_only_results_without_derivative():
    f = jaxbridge.call(lambda v: v.argmax().astype(np.int32), jax.ShapeDtypeStruct((), jnp.int32))
    v = jnp.array([1.0, 3, 2])
    np.testing.assert_array_equal(jax.grad(lambda v: v[f(v)] ** 2)(v), [0, 6, 0])


def test_a_keyword_is_not_differentiated():
    f = jaxbridge.call(lambda x, w: x * w, like)
    f.defjvp(lambda p, t, w: (f(*p, w=w), t[0] * w))
    x = jnp.arange(3.0)
    np.testing.assert_array_equal(jax.grad(lambda v: f(v, w=x).sum())(x), x)
    with pytest.raises(errors.DerivativeError, match="argument w .* passed by keyword"):
        jax.grad(lambda w: f(x, w=w).sum())(x)


def test_statics_reach_a_transpose():
    f = jaxbridge.call(lambda x, *, factor: x * factor, like, vmap_method="sequential")
    f.deflinear(lambda ct, *, factor: f(ct, factor=factor))
    x = jnp.arange(3.0)
    partial = functools.partial(f, factor=3.0)
    for g in (
        jax.grad(lambda v: partial(v).sum()),
        jax.jit(jax.grad(lambda v: partial(v).sum())),
        lambda v: jax.linear_transpose(partial, v)(jnp.ones_like(v))[0],
        lambda v: jax.vmap(jax.grad(partial))(v),
        lambda v: jax.jvp(partial, (v,), (jnp.ones_like(v),))[1],
    ):
        np.testing.assert_array_equal(g(x), [3, 3, 3])


@pytest.mark.parametrize("symbolic", [False, True])
def test_symbolic_zeros(symbolic):
    seen = []
    f = jaxbridge.call(lambda x, y: x * y, like)

    def rule(primals, tangents):
        seen.append([isinstance(t, jax.custom_derivatives.SymbolicZero) for t in tangents])
        (x, y), (dx, dy) = primals, tangents
        out = [] if isinstance(dx, jax.custom_derivatives.SymbolicZero) else [dx * y]
        out += [] if isinstance(dy, jax.custom_derivatives.SymbolicZero) else [x * dy]
        return f(x, y), sum(out)

    f.defjvp(rule, symbolic_zeros=symbolic)
    x = jnp.arange(3.0)
    np.testing.assert_array_equal(jax.grad(lambda v: f(v, x).sum())(x), x)
    assert seen == [[False, symbolic]]
    assert jax.grad(lambda v: f(jax.lax.stop_gradient(v), x).sum())(x).sum() == 0
    assert len(seen) == 1, "no derivative is asked for where all tangents are zero"


def test_a_method():
    class Model:
        @jaxbridge.function(result=lambda self, x: x, vmap_method="sequential")
        def scaled(self, x):
            return x * 2

    Model.scaled.deflinear(lambda ct, self: 2 * ct, argnums=1)
    np.testing.assert_array_equal(jax.grad(lambda v: Model().scaled(v).sum())(jnp.ones(3)), [2] * 3)


def test_refs_have_no_derivative():
    f = jaxbridge.call(lambda r, x: r.__iadd__(x), ())
    f.defjvp(lambda p, t: ((), ()))

    def loss(x):
        ref = jax.new_ref(jnp.zeros(3))
        f(ref, x)
        return ref[...].sum()

    with pytest.raises(errors.DerivativeError, match="updates a jax.Ref"):
        jax.grad(loss)(jnp.ones(3))


def test_in_place_and_several_results():
    f = jaxbridge.call(
        lambda x, y: (x.__imul__(y), x + y)[1], lambda x, y: (x, y), inout={0: 0}, name="times_plus"
    )
    f.defvjp(
        lambda x, y: (f(x, y), (x, y)),
        lambda r, ct: (ct[0] * r[1] + ct[1] * r[1], ct[0] * r[0] + ct[1] * (r[0] + 1)),
    )
    x, y = jnp.array([1.0, 2]), jnp.array([3.0, 5])

    def loss(g):
        return lambda x, y: sum(jnp.sum(jnp.sin(o)) for o in g(x, y))

    got = jax.grad(loss(f), (0, 1))(x, y)
    want = jax.grad(loss(lambda x, y: (x * y, x * y + y)), (0, 1))(x, y)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, want)
    np.testing.assert_array_equal(x, [1, 2])


def test_rules_get_arrays_where_jvp_was_given_python_numbers():
    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    sine, cosine = (jaxbridge.call(f, lambda x: scalar, out="out") for f in (np.sin, np.cos))
    sine.defjvp(lambda primals, tangents: (sine(*primals), cosine(*primals) * tangents[0]))
    out, slope = jax.jvp(sine, (1.0,), (2.0,))
    np.testing.assert_allclose([out, slope], [np.sin(1), 2 * np.cos(1)], rtol=1e-6)
    assert jax.linearize(sine, 1.0)[1](2.0) == slope


# ---- rules that are wrong ------------------------------------------------------------------------

WRONG = {
    "jvp: no pair": (
        lambda f: f.defjvp(lambda p, t: f(*p)),
        r"wrong: the rule of defjvp returned an array, float32\[3\]; expected a pair",
    ),
    "jvp: structure": (
        lambda f: f.defjvp(lambda p, t: ((f(*p),), t[0])),
        r"wrong: the rule of defjvp returned for result a tuple of 1; expected float32\[3\]",
    ),
    "jvp: tangent's structure": (
        lambda f: f.defjvp(lambda p, t: (f(*p), {"t": t[0]})),
        r"wrong: the rule of defjvp returned for the tangent of result a dict; expected float32",
    ),
    "jvp: tangent's shape": (
        lambda f: f.defjvp(lambda p, t: (f(*p), t[0][:2])),
        r"wrong: the rule of defjvp returned for the tangent of result float32\[2\]; "
        r"expected float32\[3\]",
    ),
    "jvp: tangent's dtype": (
        lambda f: f.defjvp(lambda p, t: (f(*p), t[0].astype(jnp.float16))),
        r"tangent of result float16\[3\]; expected float32\[3\]",
    ),
    "jvp: no array": (
        lambda f: f.defjvp(lambda p, t: (f(*p), "t")),
        r"tangent of result a str; expected float32\[3\]",
    ),
    "fwd: no pair": (
        lambda f: f.defvjp(lambda x, y: f(x, y), lambda r, ct: (ct, ct)),
        r"wrong: fwd of defvjp returned an array, float32\[3\]; expected a pair",
    ),
    "fwd: shape": (
        lambda f: f.defvjp(lambda x, y: (f(x, y)[0], x), lambda r, ct: (ct, ct)),
        r"wrong: fwd of defvjp returned for result float32\[\]; expected float32\[3\]",
    ),
    "fwd: residuals": (
        lambda f: f.defvjp(lambda x, y: (f(x, y), {"how": "s"}), lambda r, ct: (ct, ct)),
        r"wrong: fwd of defvjp returned the residual\['how'\] of type str; expected arrays",
    ),
    "bwd: no tuple": (
        lambda f: f.defvjp(lambda x, y: (f(x, y), x), lambda r, ct: ct),
        r"wrong: bwd of defvjp returned an array, float32\[3\]; expected a tuple of 2, one cotangent",
    ),
    "bwd: count": (
        lambda f: f.defvjp(lambda x, y: (f(x, y), x), lambda r, ct: (ct,)),
        r"wrong: bwd of defvjp returned a tuple of 1; expected a tuple of 2",
    ),
    "bwd: shape": (
        lambda f: f.defvjp(lambda x, y: (f(x, y), x), lambda r, ct: (ct, {"w": ct.sum()})),
        r"wrong: bwd of defvjp returned for argument 1\['w'\] float32\[\]; expected float32\[3\]",
    ),
    "bwd: structure": (
        lambda f: f.defvjp(lambda x, y: (f(x, y), x), lambda r, ct: (ct, {"w": {"z": ct}})),
        r"bwd of defvjp returned for argument 1\['w'\] a dict; expected float32\[3\]",
    ),
    "bwd: other structure": (
        lambda f: f.defvjp(lambda x, y: (f(x, y), x), lambda r, ct: (ct, [ct])),
        r"bwd of defvjp returned for argument 1 \[\*\]; expected .* \{'w': '\*'\}",
    ),
    "bwd: no structure": (
        lambda f: f.defvjp(lambda x, y: (f(x, y), x), lambda r, ct: (ct, ct)),
        r"returned for argument 1 an array, float32\[3\]; expected .* \{'w': '\*'\}",
    ),
    "transpose: shape": (
        lambda f: f.deflinear(lambda ct, y: ct[:1]),
        r"wrong: the transpose of deflinear returned for argument 0 float32\[1\]; "
        r"expected float32\[3\]",
    ),
    "transpose: dtype": (
        lambda f: f.deflinear(lambda ct, y: ct * 1j),
        r"the transpose of deflinear returned for argument 0 complex64\[3\]; expected float32",
    ),
    "transpose: count": (
        lambda f: f.deflinear(lambda ct: (ct,), (0, 1)),
        r"the transpose of deflinear returned a tuple of 1; expected a tuple of 2, the cot.* \(0, 1\)",
    ),
    "transpose: no such argument": (
        lambda f: f.deflinear(lambda ct: ct, 2),
        r"wrong: deflinear names argument 2, and this call has 2 by position",
    ),
}


def broken(shape_ok=True):
    def wrong(x, y):
        return x + y["w"]

    f = jaxbridge.call(wrong, like)
    f.callee.name = "wrong"
    return f


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("which", list(WRONG))
def test_a_wrong_rule_is_an_error_at_trace_time(which, jitted):
    define, match = WRONG[which]
    f = broken()
    define(f)
    x = jnp.ones(3)

    second = x if which.startswith("transpose") and "count" not in which else None

    def grad(v):
        return jax.grad(lambda v: f(v, {"w": v if second is None else second}).sum())(v)

    with pytest.raises(errors.DerivativeError, match=match):
        jax.make_jaxpr(jax.jit(grad) if jitted else grad)(x)


def test_an_integer_argument_has_no_cotangent():
    f = jaxbridge.call(lambda x, n: x * np.float32(n), like)
    f.defvjp(lambda x, n: (f(x, n), n), lambda n, ct: (ct * n, ct))
    with pytest.raises(errors.DerivativeError, match=r"argument 1, which is int32\[3\] and has no"):
        jax.grad(lambda v: f(v, jnp.arange(3)).sum())(jnp.ones(3))


def test_a_missing_rule_names_the_call_to_make():
    f = jaxbridge.call(np.sin, like)
    x = jnp.ones(3)
    for derivative in (
        lambda: jax.grad(lambda v: f(v).sum())(x),
        lambda: jax.jvp(f, (x,), (x,)),
        lambda: jax.make_jaxpr(jax.hessian(f))(x),
        lambda: jax.jit(jax.grad(lambda v: jax.vmap(f)(v).sum())).lower(x),
    ):
        with pytest.raises((errors.DerivativeError, errors.BatchingError), match=r"sin.*def"):
            derivative()
    with pytest.raises(errors.DerivativeError, match=r"linear there: \.deflinear\(transpose"):
        jax.linear_transpose(f, x)(x)
    # A rule of forward mode that is not transposable says which function is in the way.
    g = jaxbridge.call(np.negative, like)
    f.defjvp(lambda p, t: (f(*p), g(t[0])))
    np.testing.assert_array_equal(jax.jvp(f, (x,), (x,))[1], -x)
    with pytest.raises(errors.DerivativeError, match="numpy.negative"):
        jax.grad(lambda v: f(v).sum())(x)


# ---- rules and programs --------------------------------------------------------------------------


def test_a_rule_that_is_added_reaches_programs_that_were_traced():
    f = jaxbridge.call(np.square, like)
    x = jnp.arange(3.0)
    program, other = jax.jit(lambda v: f(v).sum()), jax.jit(lambda v: f(v).sum())
    assert program(x) == other(x) == 5
    with pytest.raises(errors.DerivativeError):
        jax.grad(program)(x)
    f.defvjp(lambda v: (f(v), v), lambda r, ct: (2 * r * ct,))
    np.testing.assert_array_equal(jax.grad(program)(x), 2 * x)
    with pytest.raises(errors.DerivativeError, match="forward mode"):
        jax.jvp(program, (x,), (x,))
    f.defjvp(lambda p, t: (f(*p), 2 * p[0] * t[0]))
    np.testing.assert_array_equal(jax.jvp(other, (x,), (x,))[1], (2 * x * x).sum())
    # The derivative of this one is there already, without what a rule of forward mode needs.
    with pytest.raises(errors.DerivativeError, match="only that of defvjp when this was traced"):
        jax.jvp(program, (x,), (x,))


def test_a_rule_that_replaces_another_is_for_new_programs():
    f = jaxbridge.call(np.square, like)
    x = jnp.arange(3.0)
    f.defjvp(lambda p, t: (f(*p), t[0]))
    before = jax.jit(lambda v: f(v).sum())
    before(x)
    f.defjvp(lambda p, t: (f(*p), 2 * p[0] * t[0]))
    np.testing.assert_array_equal(jax.grad(before)(x), [1, 1, 1])
    np.testing.assert_array_equal(jax.grad(lambda v: f(v).sum())(x), 2 * x)
    np.testing.assert_array_equal(jax.grad(jax.jit(lambda v: f(v).sum()))(x), 2 * x)


def test_functions_of_one_content_have_their_own_rules():
    def make(factor):
        f = jaxbridge.call(np.square, like)
        if factor is not None:
            f.defjvp(lambda p, t: (f(*p), factor * t[0]))
        return f

    x = jnp.arange(3.0)
    one, two, none = make(1.0), make(2.0), make(None)
    for f, want in ((one, 1), (two, 2), (one, 1)):
        f(x)
        for g in (f, jax.jit(f)):
            np.testing.assert_array_equal(jax.grad(lambda v, g=g: g(v).sum())(x), [want] * 3)
    with pytest.raises(errors.DerivativeError):
        jax.grad(lambda v: none(v).sum())(x)
    jaxpr = jax.make_jaxpr(lambda v: (one(v), two(v), none(v)))(x)
    a, b, c = (e.params["rules"] for e in jaxpr.eqns)
    assert a != b and a != c and c == make(None)._rules and hash(a) == hash(c)


def test_rules_do_not_change_the_program():
    def text(f):
        return jax.jit(f).lower(jnp.arange(3.0)).as_text()

    f = jaxbridge.call(np.square, like)
    before = text(f)
    f.defjvp(lambda p, t: (f(*p), 2 * p[0] * t[0]))
    assert text(f) == before


class Big:
    """Something that a rule holds."""


USES = {
    "eager": lambda f, x: f(x),
    "grad": lambda f, x: jax.grad(lambda v: f(v).sum())(x),
    "jit of grad": lambda f, x: jax.jit(jax.grad(lambda v: f(v).sum()))(x),
    "grad of jit": lambda f, x: jax.grad(jax.jit(lambda v: f(v).sum()))(x),
    "hessian": lambda f, x: jax.hessian(lambda v: f(v).sum())(x),
    "jvp": lambda f, x: jax.jvp(f, (x,), (x,)),
    "jit of jvp": lambda f, x: jax.jit(lambda v: jax.jvp(f, (v,), (v,)))(x),
    "vmap of grad": lambda f, x: jax.vmap(jax.grad(lambda v: f(v).sum()))(x[None]),
    "grad of vmap": lambda f, x: jax.grad(lambda v: jax.vmap(f)(v).sum())(x[None]),
    "vmap": lambda f, x: jax.vmap(f)(x[None]),
    "scan": lambda f, x: jax.grad(
        lambda v: jax.lax.scan(lambda c, _: (f(c), None), v, None, length=2)[0].sum()
    )(x),
}


# JAX keeps the programs of eager loops, and 0.8.0 those of gradients, until its caches are cleared.
KEPT_BY_JAX = ("scan", "grad of jit")


def _uses():
    for rules in ("jvp", "vjp", "both", "linear", "vmap"):
        for use in USES:
            no_derivative = rules == "vmap" and not use.startswith("vmap")
            no_forward_mode = rules == "vjp" and use in ("jvp", "jit of jvp", "hessian")
            if not (no_derivative or no_forward_mode):
                yield use, rules


@pytest.mark.parametrize("kept_by_jax", [False, True])
def test_rules_end_with_their_function(kept_by_jax, collected):
    refs = {
        (use, rules): _use(USES[use], rules)
        for use, rules in _uses()
        if (use in KEPT_BY_JAX) == kept_by_jax
    }
    if kept_by_jax:
        collected()
    for _ in range(3):
        gc.collect()
    alive = {key: [r() for r in found if r() is not None] for key, found in refs.items()}
    assert {key: found for key, found in alive.items() if found} == {}


def _use(use, rules):
    """References to what should be gone: the Function, what its rules and it hold, the rules."""
    held, big = Big(), Big()

    def fn(v):
        return (v * v, held)[0]

    f = jaxbridge.call(fn, like, vmap_method="sequential")
    if rules in ("jvp", "both", "vmap"):
        f.defjvp(lambda p, t: (f(*p), (2 * p[0] * t[0], big)[0]))
    if rules in ("vjp", "both"):
        f.defvjp(lambda v: (f(v), v), lambda r, ct: (2 * r * ct, big)[:1])
    if rules == "linear":
        f.deflinear(lambda ct: (f(ct), big)[0])
    if rules == "vmap":
        f.defvmap(lambda size, batched, v: ((v * v, big)[0], True))
    jax.block_until_ready(use(f, jnp.arange(3.0)))
    return [weakref.ref(o) for o in (f, big, held, f._rules)]


# ---- several devices -----------------------------------------------------------------------------

P = jax.sharding.PartitionSpec


def _product(kind):
    def method():
        f = jaxbridge.call(lambda a, b: a * b, like)
        if kind in ("jvp", "both"):
            f.defjvp(lambda p, t: (f(*p), f(t[0], p[1]) + f(p[0], t[1])))
            f.deflinear({0: lambda ct, b: f(ct, b), 1: lambda ct, a: f(a, ct)})
        if kind in ("vjp", "both"):
            f.defvjp(lambda a, b: (f(a, b), (a, b)), lambda r, ct: (f(ct, r[1]), f(r[0], ct)))
        if kind == "linear":
            f.deflinear({0: lambda ct, b: f(ct, b), 1: lambda ct, a: f(a, ct)})
        if kind == "zeros":
            f.defvjp(
                lambda a, b: (f(a, b), (a, b)),
                lambda r, ct: (ct * r[1], jnp.array([7.0, 8.0])),
            )
        return f

    return method()


# w is the same on both devices: its cotangent is a sum over them.
@pytest.mark.parametrize("kind", ["JAX's own", "jvp", "vjp", "both", "linear"])
@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("where", ["outside", "inside"])
def test_gradient_through_shard_map(kind, where, check):
    if where == "inside" and not check:
        pytest.skip("JAX's own gradient needs the check there")
    v, w = jnp.arange(1.0, 5), jnp.float32([2, 3])
    product = (lambda a, b: a * b) if kind == "JAX's own" else _product(kind)

    def total(v, w):
        return jax.lax.psum(jnp.sum(product(v, w) ** 2), "i")

    mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = (P("i"), P())
    if where == "outside":
        f = jax.grad(
            jax.shard_map(total, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check), (0, 1)
        )
    else:
        f = jax.shard_map(jax.grad(total, (0, 1)), mesh=mesh, in_specs=specs, out_specs=specs)
    for g in (jax.jit(f), f):
        dv, dw = g(v, w)
        np.testing.assert_allclose(dv, [2 * 4 * 1, 2 * 9 * 2, 2 * 4 * 3, 2 * 9 * 4], rtol=1e-6)
        np.testing.assert_allclose(dw, [2 * 2 * (1 + 9), 2 * 3 * (4 + 16)], rtol=1e-6)


@pytest.mark.parametrize("kind", ["jvp", "both", "linear"])
@pytest.mark.parametrize("batched", [False, True])
def test_forward_mode_and_hessian_in_shard_map(kind, batched):
    f = jaxbridge.call(lambda a, b: a * b, like, vmap_method="broadcast_all")
    if kind != "linear":
        f.defjvp(lambda p, t: (f(*p), t[0] * p[1] + p[0] * t[1]))
    if kind == "both":
        f.defvjp(lambda a, b: (f(a, b), (a, b)), lambda r, ct: (ct * r[1], r[0] * ct))
    if kind == "linear":
        f.deflinear({0: lambda ct, b: ct * b, 1: lambda ct, a: a * ct})
    v, w = jnp.arange(1.0, 5), jnp.float32([2, 3])

    def body(g):
        if batched:
            g = jax.vmap(lambda a, b, g=g: g(a[None], b[None])[0])

        def loss(v, w):
            return jnp.sum(jnp.sin(g(v, w)) * v)

        def run(v, w):
            jvp = jax.jvp(loss, (v, w), (w, w))[1]
            return jvp[None], jax.hessian(loss)(v, w), jax.grad(loss, 1)(v, w)

        return run

    mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    outs = [
        jax.jit(
            jax.shard_map(
                body(g), mesh=mesh, in_specs=(P("i"), P()), out_specs=(P("i"), P("i"), P())
            )
        )(v, w)
        for g in (f, jnp.multiply)
    ]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), *outs)

# SPDX-License-Identifier: Apache-2.0
"""The derivatives of `from_ufunc`, against differences of the ufuncs themselves."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special as special

from jaxbridge import _ufunc, _ufunc_derivatives, errors, from_ufunc

# Operands where a function is not for numbers near 0.7, each a few values.
POINTS = {
    "bei": (2.3,), "beip": (2.3,), "ber": (2.3,), "berp": (2.3,),
    "binom": (5.3, 2.2),
    "boxcox1p": (0.7, 0.4), "inv_boxcox": (0.7, 0.4), "inv_boxcox1p": (0.7, 0.4),
    "erfcinv": (0.6,), "ndtri_exp": (-0.8,), "erfinv": (-0.4,),
    "eval_chebyc": (3, 0.7), "eval_chebys": (3, 0.7), "eval_chebyt": (3, 0.7), "eval_chebyu": (3, 0.7),
    "eval_hermite": (3, 0.7), "eval_hermitenorm": (3, 0.7), "eval_laguerre": (3, 0.7),
    "eval_legendre": (3, 0.7), "eval_sh_chebyt": (3, 0.7), "eval_sh_chebyu": (3, 0.7),
    "eval_sh_legendre": (3, 0.7), "eval_genlaguerre": (3, 0.5, 0.7), "eval_gegenbauer": (3, 0.5, 0.7),
    "eval_jacobi": (3, 0.5, 0.4, 0.7),
    "expn": (2, 0.7), "kn": (2, 0.7), "yn": (2, 0.7),
    "fdtr": (3.0, 4.0, 0.7), "fdtrc": (3.0, 4.0, 0.7), "fdtri": (3.0, 4.0, 0.3), "huber": (0.5, 0.7),
    "pdtr": (2.0, 0.7), "pdtrc": (2.0, 0.7), "stdtr": (3.0, 0.7), "stdtrit": (3.0, 0.3),
    "chdtri": (3.0, 0.3), "chdtr": (3.0, 0.7), "chdtrc": (3.0, 0.7), "round": (0.3,),
    "gdtr": (2.0, 3.0, 0.7), "gdtrc": (2.0, 3.0, 0.7),
    "rel_entr": (0.7, 0.4), "kl_div": (0.7, 0.4),
    # numpy
    "arccosh": (1.7,), "fmod": (2.3, 0.7), "remainder": (2.3, 0.7), "divmod": (2.3, 0.7),
    "floor_divide": (2.3, 0.7), "ldexp": (0.7, 3), "maximum": (0.7, 0.4), "minimum": (0.7, 0.4),
    "fmax": (0.7, 0.4), "fmin": (0.7, 0.4), "heaviside": (0.7, 0.4), "copysign": (0.7, -0.4),
    "modf": (1.7,), "rint": (0.7,), "floor": (0.7,), "ceil": (0.7,), "trunc": (0.7,),
}  # fmt: skip
DEFAULT = (0.7, 0.45, 0.3, 0.4)
TABLE = _ufunc._derivatives_of_special()
COMPLEX = [
    "gamma", "loggamma", "rgamma", "erf", "erfc", "erfcx", "erfi", "dawsn", "wofz", "jv", "yv", "iv", "kv",
    "kve", "hankel1", "hankel2", "hankel1e", "hankel2e", "airy", "expm1", "log1p", "expi", "exp1",
    "hyp0f1", "hyp1f1", "hyp2f1", "spence", "sici", "shichi", "xlogy", "wrightomega", "eval_legendre",
]  # fmt: skip


def arguments(ufunc):
    return POINTS.get(ufunc.__name__, DEFAULT[: ufunc.nin])


def difference(ufunc, args, i):
    """The derivative in argument i by central differences of sixth order, in float64."""
    h, total = 1e-2, 0
    for k, w in ((1, 3 / 4), (2, -3 / 20), (3, 1 / 60)):
        at = [np.asarray(ufunc(*args[:i], args[i] + d * h, *args[i + 1 :])) for d in (k, -k)]
        total = total + w * (at[0] - at[1]) / h
    return total


def known(ufunc):
    """The arguments in which a derivative is known and there is one."""
    partials = TABLE.get(ufunc.__name__, (True,) * ufunc.nin)
    floats = [not isinstance(a, int) for a in arguments(ufunc)]
    return [i for i, (p, f) in enumerate(zip(partials, floats, strict=True)) if p and f]


def check(ufunc, args):
    f = from_ufunc(ufunc)
    for i in known(ufunc):
        g = lambda x, i=i: f(*args[:i], x, *args[i + 1 :])
        got = np.asarray(jax.jvp(g, (jnp.asarray(args[i]),), (jnp.ones_like(args[i]),))[1])
        np.testing.assert_allclose(got, difference(ufunc, args, i), rtol=2e-7, atol=2e-7)


@pytest.mark.parametrize("name", sorted(TABLE))
def test_special(name, x64):
    ufunc = getattr(special, name, None)
    if ufunc is None:
        pytest.skip(f"this SciPy has no {name}")
    assert len(TABLE[name]) == _ufunc._unwrapped(ufunc).nin
    check(_ufunc._unwrapped(ufunc), arguments(ufunc))


@pytest.mark.parametrize("name", COMPLEX)
def test_special_of_complex_numbers(name, x64):
    ufunc = _ufunc._unwrapped(getattr(special, name))
    args = list(arguments(ufunc))
    i = known(ufunc)[-1]
    args[i] = args[i] + 0.3j
    f = from_ufunc(ufunc)
    g = lambda z: f(*args[:i], z, *args[i + 1 :])
    z = jnp.asarray(args[i])
    got = jax.jvp(g, (z,), (jnp.ones_like(z),))[1]
    np.testing.assert_allclose(np.asarray(got), difference(ufunc, args, i), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", sorted(_ufunc_derivatives.of_jax))
def test_numpy(name, x64):
    check(getattr(np, name), arguments(getattr(np, name)))


NEAR_ZERO = {"j1": 0, "i1": 0, "i1e": 0, "sici": 0, "shichi": 0, "spence": 1, "ellipk": 0, "ellipkm1": 1,
             "ellipe": 0, "exprel": 0}  # fmt: skip


@pytest.mark.parametrize("name", list(NEAR_ZERO))
def test_where_a_formula_cancels(name, x64):
    """Where the series goes over into the formula both are right, and at the point itself."""
    f = from_ufunc(getattr(special, name))
    first = (lambda x: f(x)[0]) if name in ("sici", "shichi") else f
    at = NEAR_ZERO[name]
    limits = {0.1, 0.05, 0.3, 0.5} if name != "i1e" else {0.1}
    points = np.array([at + s * (v + d) for v in limits for d in (-1e-9, 1e-9) for s in (-1, 1)])
    points = points[points != 1]
    derivative = jax.vmap(jax.grad(first))
    jumps = np.abs(np.diff(np.asarray(derivative(points)).reshape(-1, 2, 2), axis=1))
    assert jumps.max() < 1e-7
    second = jax.vmap(jax.grad(jax.grad(first)))
    jumps = np.abs(np.diff(np.asarray(second(points)).reshape(-1, 2, 2), axis=1))
    assert jumps.max() < 1e-6
    if name != "i1e":  # which has a kink there
        ufunc = _ufunc._unwrapped(getattr(special, name))
        value = lambda x: np.asarray(ufunc(x))[0] if ufunc.nout > 1 else ufunc(x)
        np.testing.assert_allclose(
            jax.grad(first)(jnp.float64(at)),
            (value(at + 1e-4) - value(at - 1e-4)) / 2e-4,
            rtol=1e-6,
        )


def test_bessel_in_its_argument():
    jv = from_ufunc(special.jv)
    v, x = 1.5, jnp.linspace(0.5, 9, 7)
    for g in (jax.vmap(jax.grad(lambda x: jv(v, x))), jax.jit(jax.grad(lambda x: jv(v, x).sum()))):
        np.testing.assert_allclose(g(x), special.jvp(v, np.asarray(x)), rtol=2e-4, atol=1e-6)
    hessian = jax.hessian(lambda x: jv(v, x).sum())(x)
    np.testing.assert_allclose(
        jnp.diag(hessian), special.jvp(v, np.asarray(x), 2), rtol=1e-3, atol=1e-5
    )
    with pytest.raises(
        errors.DerivativeError, match=r"special\.jv: its derivative in argument 0 is not"
    ):
        jax.make_jaxpr(jax.grad(lambda v: jv(v, 1.0)))(v)


@pytest.mark.parametrize("ufunc", [special.mathieu_a, np.nextafter, special.kolmogorov])
def test_what_has_none(ufunc):
    f = from_ufunc(ufunc)
    x = [jnp.float32(1.0)] * f.ufunc.nin
    with pytest.raises(errors.DerivativeError, match=r"derivative in .* is not known.*custom_jvp"):
        jax.make_jaxpr(jax.grad(f))(*x)


def test_the_documentation_says_which_have_none():
    page = (Path(__file__).parents[2] / "docs" / "arrays_api.md").read_text()
    listed = set(re.findall(r"\w+", "".join(re.findall(r"^> (.*\n)", page, re.MULTILINE))))
    ufuncs = {u.__name__ for u in map(_ufunc._unwrapped, vars(special).values()) if u is not None}
    assert ufuncs - set(TABLE) - listed == set()
    assert listed & set(TABLE) == set()


def test_types_and_shapes():
    x = jnp.linspace(0.5, 2, 3).astype(jnp.bfloat16)
    grad = jax.grad(lambda x: from_ufunc(special.gamma)(x).sum())(x)
    assert grad.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        grad.astype(float),
        (special.gamma(np.asarray(x, float)) * special.psi(np.asarray(x, float))),
        rtol=2e-2,
    )
    # Operands of other shapes get sums; an integer operand has no derivative.
    hypot = from_ufunc(np.hypot)
    a, b = jnp.arange(1.0, 4), jnp.arange(1.0, 3)[:, None]
    for got, want in zip(
        jax.grad(lambda a, b: hypot(a, b).sum(), (0, 1))(a, b),
        jax.grad(lambda a, b: jnp.hypot(a, b).sum(), (0, 1))(a, b),
        strict=True,
    ):
        np.testing.assert_allclose(got, want, rtol=1e-6)
    np.testing.assert_allclose(
        jax.grad(lambda x: from_ufunc(special.yn)(2, x))(1.3), special.yvp(2, 1.3), rtol=1e-5
    )
    np.testing.assert_allclose(
        jax.grad(lambda x: from_ufunc(special.eval_legendre)(jnp.arange(4), x).sum())(1.0),
        10,
        rtol=1e-6,
    )
    # A result without derivative beside one with.
    mantissa = lambda x: from_ufunc(np.divmod)(x, 2.0)[1]
    assert jax.grad(mantissa)(3.5) == 1
    z = jnp.complex64(3 + 4j)
    assert jax.grad(from_ufunc(np.absolute))(z) == jax.grad(jnp.abs)(z)


# Functions whose derivatives are by others of the table.
SECOND = [
    "gamma", "beta", "erf", "jv", "kv", "j1", "i1", "betainc", "gammainc", "airy",
    "voigt_profile", "ellipk", "eval_jacobi", "hyp2f1",
]  # fmt: skip


@pytest.mark.parametrize("name", SECOND)
def test_second_order(name, x64):
    ufunc = _ufunc._unwrapped(getattr(special, name))
    args, i = list(arguments(ufunc)), known(ufunc)[-1]
    f = from_ufunc(ufunc)

    def g(x):
        out = f(*args[:i], x, *args[i + 1 :])
        return out[0] if ufunc.nout > 1 else out

    derivative = jax.jit(jax.vmap(jax.grad(g)))
    second = jax.jit(jax.grad(jax.grad(g)))(args[i])
    h = np.array([3, 2, 1, -1, -2, -3]) * 1e-2
    values = np.asarray(derivative(jnp.asarray(args[i] + h)))
    weights = np.array([1 / 60, -3 / 20, 3 / 4, -3 / 4, 3 / 20, -1 / 60]) / 1e-2
    np.testing.assert_allclose(second, values @ weights, rtol=1e-6, atol=1e-6)

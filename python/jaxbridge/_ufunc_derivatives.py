# SPDX-License-Identifier: Apache-2.0
"""The derivatives of ufuncs that have one in closed form.

Those of NumPy's are what JAX has for its own functions of these names. Those of scipy.special are here, by
other functions of it, so that they have derivatives in turn. Source: NIST's Digital Library of Mathematical
Functions (dlmf.nist.gov), by the section beside a group.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from ._errors import DerivativeError

# For each operand: the derivative in it, of the operands and the result. None where that is not known.
Partials = tuple[Callable[..., Any] | None, ...]

of_jax = frozenset([
    "absolute", "add", "arccos", "arccosh", "arcsin", "arcsinh", "arctan", "arctan2",
    "arctanh", "cbrt", "ceil", "conjugate", "copysign", "cos", "cosh", "deg2rad", "degrees",
    "divide", "divmod", "exp", "exp2", "expm1", "fabs", "float_power", "floor",
    "floor_divide", "fmax", "fmin", "fmod", "heaviside", "hypot", "ldexp", "log", "log10",
    "log1p", "log2", "logaddexp", "logaddexp2", "maximum", "minimum", "modf", "multiply",
    "negative", "positive", "power", "rad2deg", "radians", "reciprocal", "remainder", "rint",
    "sign", "sin", "sinh", "sqrt", "square", "subtract", "tan", "tanh", "trunc",
])  # fmt: skip

_two_by_root_pi = 2 / math.sqrt(math.pi)
_root_two_pi = math.sqrt(2 * math.pi)
_degree = math.pi / 180


def jvp_of_jax(name: str, primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
    """The tangent of the results of a ufunc of NumPy; a tangent may be a symbolic zero."""
    moving = [i for i, t in enumerate(tangents) if not isinstance(t, SymbolicZero)]

    def fun(*values: Any) -> Any:
        full = list(primals)
        for i, x in zip(moving, values, strict=True):
            full[i] = x
        return getattr(jnp, name)(*full)

    return jax.jvp(fun, [primals[i] for i in moving], [tangents[i] for i in moving])[1]


def jvp(
    name: str, partials: Partials, primals: Sequence[Any], out: Any, tangents: Sequence[Any]
) -> Any:
    """The tangent of the results of a ufunc of scipy.special; a tangent may be a symbolic zero.

    Raises:
        DerivativeError: the derivative in an argument is not known.
    """
    terms = []
    for i, (partial, tangent) in enumerate(zip(partials, tangents, strict=True)):
        if isinstance(tangent, SymbolicZero):
            continue
        if partial is None:
            raise unknown(name, f"argument {i}")
        slope = partial(*primals, out)
        terms.append(jax.tree.map(lambda s, t=tangent: s * t, slope))
    return jax.tree.map(lambda *parts: sum(parts[1:], parts[0]), *terms)


def unknown(name: str, what: str) -> DerivativeError:
    return DerivativeError(
        f"{name}: its derivative in {what} is not known here; give it one with jax.custom_jvp around "
        f"it, or stop the gradient before it with jax.lax.stop_gradient"
    )


def _series(
    x: Any, limit: float, coefficients: Sequence[float], formula: Callable[[Any], Any]
) -> Any:
    """A function near zero by its power series, elsewhere by a formula that fails there.

    Derivatives are those of the one that is taken.
    """
    near = jnp.abs(x) < limit
    power: Any = 0.0
    for c in reversed(coefficients):
        power = power * x + c
    return jnp.where(near, power, formula(jnp.where(near, limit, x)))


_factorial = [math.factorial(k) for k in range(24)]
_sinc = [0 if k % 2 else (-1) ** (k // 2) / _factorial[k + 1] for k in range(12)]
_sinhc = [abs(c) for c in _sinc]
_exprel = [(k + 1) / _factorial[k + 2] for k in range(14)]
_dilogarithm = [-((-1) ** k) / (k + 1) for k in range(14)]


def _bessel_slope(sign: int) -> list[float]:
    """Of J1' (sign -1) and I1' (sign 1) (10.2, 10.25)."""
    even = [
        sign**j * (2 * j + 1) / (2 ** (2 * j + 1) * _factorial[j] * _factorial[j + 1])
        for j in range(5)
    ]
    return [c for pair in even for c in (pair, 0.0)]


def _elliptic(weight: Callable[[int], float]) -> list[float]:
    """Of the derivative of a complete elliptic integral, whose series is that of K, weighted (19.5)."""
    return [math.pi / 2 * n * weight(n) * (math.comb(2 * n, n) / 4**n) ** 2 for n in range(1, 13)]


def _on_reals(name: str, x: Any) -> Any:
    if jnp.iscomplexobj(x):
        raise unknown(f"scipy.special.{name}", "a complex argument")
    return x


def special(s: Any) -> dict[str, Partials]:
    """The derivatives of ufuncs of scipy.special, by name.

    Args:
        s: has the ufuncs of scipy.special as JAX functions.
    """

    def gamma_density(a: Any, x: Any) -> Any:
        return jnp.exp(s.xlogy(a - 1, x) - x - s.gammaln(a))

    def beta_density(a: Any, b: Any, x: Any) -> Any:
        return jnp.exp(s.xlogy(a - 1, x) + s.xlog1py(b - 1, -x) - s.betaln(a, b))

    def chi_square_density(v: Any, x: Any) -> Any:
        return gamma_density(v / 2, x / 2) / 2

    def f_density(m: Any, n: Any, x: Any) -> Any:
        return beta_density(m / 2, n / 2, m * x / (m * x + n)) * m * n / (m * x + n) ** 2

    def t_density(v: Any, t: Any) -> Any:
        scale = jnp.exp(s.gammaln((v + 1) / 2) - s.gammaln(v / 2)) / jnp.sqrt(v * math.pi)
        return scale * (1 + t * t / v) ** (-(v + 1) / 2)

    def normal_density(x: Any) -> Any:
        return jnp.exp(-x * x / 2) / _root_two_pi

    def voigt(x: Any, sigma: Any, gamma: Any) -> tuple[Any, Any, Any]:
        z = (x + 1j * gamma) / (sigma * math.sqrt(2))
        w = s.wofz(z)
        return z, w, (1j * _two_by_root_pi - 2 * z * w) / (sigma * _root_two_pi)

    def below(n: Any, value: Callable[[Any], Any]) -> Any:
        """`value(n - 1)` for polynomials, 0 where `n` is 0."""
        return jnp.where(n == 0, 0, value(jnp.where(n == 0, 1, n) - 1))

    def jacobi(n: Any, x: Any) -> Any:
        """The derivative of Legendre's polynomial."""
        return below(n, lambda m: (n + 1) / 2 * s.eval_jacobi(m, 1.0, 1.0, x))

    def chebyshev_t(n: Any, x: Any) -> Any:
        return below(n, lambda m: n * s.eval_chebyu(m, x))

    def chebyshev_u(n: Any, x: Any) -> Any:
        return below(n, lambda m: 2 * s.eval_gegenbauer(m, 2.0, x))

    def difference(f: Callable[[Any, Any], Any]) -> Callable[..., Any]:
        return lambda v, x, y: (f(v - 1, x) - f(v + 1, x)) / 2

    def mean(f: Callable[[Any, Any], Any]) -> Callable[..., Any]:
        return lambda v, x, y: (f(v - 1, x) + f(v + 1, x)) / 2

    def scale_near_zero(x: Any) -> Any:
        return jnp.exp(-jnp.minimum(jnp.abs(x), 0.2))

    def zero(x: Any, y: Any) -> Any:
        return jnp.zeros_like(x)

    no = None
    return {
        # Gamma and beta functions (5.2, 5.12, 5.15, 8.8, 8.17).
        "gamma": (lambda x, y: y * s.psi(x),),
        "gammaln": (lambda x, y: s.psi(x),),
        "loggamma": (lambda x, y: s.psi(x),),
        "rgamma": (lambda x, y: -y * s.psi(x),),
        "gammasgn": (zero,),
        "psi": (lambda x, y: jax.scipy.special.polygamma(1, _on_reals("psi", x)),),
        "beta": (
            lambda a, b, y: y * (s.psi(a) - s.psi(a + b)),
            lambda a, b, y: y * (s.psi(b) - s.psi(a + b)),
        ),
        "betaln": (
            lambda a, b, y: s.psi(a) - s.psi(a + b),
            lambda a, b, y: s.psi(b) - s.psi(a + b),
        ),
        "poch": (
            lambda z, m, y: y * (s.psi(z + m) - s.psi(z)),
            lambda z, m, y: y * s.psi(z + m),
        ),
        "binom": (
            lambda n, k, y: y * (s.psi(n + 1) - s.psi(n - k + 1)),
            lambda n, k, y: y * (s.psi(n - k + 1) - s.psi(k + 1)),
        ),
        "gammainc": (
            lambda a, x, y: jax.lax.igamma_grad_a(*jnp.broadcast_arrays(a, x)),
            lambda a, x, y: gamma_density(a, x),
        ),
        "gammaincc": (
            lambda a, x, y: -jax.lax.igamma_grad_a(*jnp.broadcast_arrays(a, x)),
            lambda a, x, y: -gamma_density(a, x),
        ),
        "gammaincinv": (no, lambda a, p, y: 1 / gamma_density(a, y)),
        "gammainccinv": (no, lambda a, p, y: -1 / gamma_density(a, y)),
        "betainc": (no, no, lambda a, b, x, y: beta_density(a, b, x)),
        "betaincc": (no, no, lambda a, b, x, y: -beta_density(a, b, x)),
        "betaincinv": (no, no, lambda a, b, p, y: 1 / beta_density(a, b, y)),
        "betainccinv": (no, no, lambda a, b, p, y: -1 / beta_density(a, b, y)),
        # Error functions and the normal distribution (7.2, 7.10).
        "erf": (lambda x, y: _two_by_root_pi * jnp.exp(-x * x),),
        "erfc": (lambda x, y: -_two_by_root_pi * jnp.exp(-x * x),),
        "erfcx": (lambda x, y: 2 * x * y - _two_by_root_pi,),
        "erfi": (lambda x, y: _two_by_root_pi * jnp.exp(x * x),),
        "erfinv": (lambda x, y: jnp.exp(y * y) / _two_by_root_pi,),
        "erfcinv": (lambda x, y: -jnp.exp(y * y) / _two_by_root_pi,),
        "dawsn": (lambda x, y: 1 - 2 * x * y,),
        "wofz": (lambda z, y: 1j * _two_by_root_pi - 2 * z * y,),
        "fresnel": (lambda x, y: (jnp.sin(math.pi / 2 * x * x), jnp.cos(math.pi / 2 * x * x)),),
        "ndtr": (lambda x, y: normal_density(x),),
        "log_ndtr": (lambda x, y: jnp.exp(-x * x / 2 - y) / _root_two_pi,),
        "ndtri": (lambda p, y: 1 / normal_density(y),),
        "ndtri_exp": (lambda p, y: _root_two_pi * jnp.exp(p + y * y / 2),),
        "owens_t": (
            lambda h, a, y: -normal_density(h) * s.erf(a * h / math.sqrt(2)) / 2,
            lambda h, a, y: jnp.exp(-h * h * (1 + a * a) / 2) / (2 * math.pi * (1 + a * a)),
        ),
        "voigt_profile": (
            lambda x, sigma, gamma, y: (voigt(x, sigma, gamma)[2] / (sigma * math.sqrt(2))).real,
            lambda x, sigma, gamma, y: (
                -(y + (voigt(x, sigma, gamma)[2] * voigt(x, sigma, gamma)[0]).real) / sigma
            ),
            lambda x, sigma, gamma, y: -(voigt(x, sigma, gamma)[2] / (sigma * math.sqrt(2))).imag,
        ),
        # Bessel functions (10.6, 10.29), in their argument.
        "j0": (lambda x, y: -s.j1(x),),
        "j1": (lambda x, y: _series(x, 0.1, _bessel_slope(-1), lambda x: s.j0(x) - s.j1(x) / x),),
        "y0": (lambda x, y: -s.y1(x),),
        "y1": (lambda x, y: s.y0(x) - y / x,),
        "i0": (lambda x, y: s.i1(x),),
        "i1": (lambda x, y: _series(x, 0.1, _bessel_slope(1), lambda x: s.i0(x) - s.i1(x) / x),),
        "i0e": (lambda x, y: s.i1e(x) - jnp.sign(x) * y,),
        "i1e": (
            lambda x, y: (
                _series(
                    x,
                    0.1,
                    _bessel_slope(1),
                    lambda x: (s.i0e(x) - s.i1e(x) / x) / scale_near_zero(x),
                )
                * scale_near_zero(x)
                - jnp.sign(x) * y
            ),
        ),
        "k0": (lambda x, y: -s.k1(x),),
        "k1": (lambda x, y: -s.k0(x) - y / x,),
        "k0e": (lambda x, y: y - s.k1e(x),),
        "k1e": (lambda x, y: y - s.k0e(x) - y / x,),
        "jv": (no, difference(s.jv)),
        "yn": (no, difference(s.yn)),
        "yv": (no, difference(s.yv)),
        "hankel1": (no, difference(s.hankel1)),
        "hankel2": (no, difference(s.hankel2)),
        "iv": (no, mean(s.iv)),
        "kn": (no, lambda n, x, y: -mean(s.kn)(n, x, y)),
        "kv": (no, lambda v, x, y: -mean(s.kv)(v, x, y)),
        # Scaled by exp(-|Im z|), exp(-|Re z|), exp(z), exp(-iz), exp(iz).
        "jve": (no, lambda v, x, y: difference(s.jve)(v, _on_reals("jve", x), y)),
        "yve": (no, lambda v, x, y: difference(s.yve)(v, _on_reals("yve", x), y)),
        "ive": (no, lambda v, x, y: mean(s.ive)(v, _on_reals("ive", x), y) - jnp.sign(x) * y),
        "kve": (no, lambda v, x, y: y - mean(s.kve)(v, x, y)),
        "hankel1e": (no, lambda v, x, y: difference(s.hankel1e)(v, x, y) - 1j * y),
        "hankel2e": (no, lambda v, x, y: difference(s.hankel2e)(v, x, y) + 1j * y),
        "struve": (no, lambda v, x, y: s.struve(v - 1, x) - v / x * y),
        "modstruve": (no, lambda v, x, y: s.modstruve(v - 1, x) - v / x * y),
        "itj0y0": (lambda x, y: (s.j0(x), s.y0(x)),),
        "iti0k0": (lambda x, y: (s.i0(x), s.k0(x)),),
        "it2j0y0": (lambda x, y: ((1 - s.j0(x)) / x, -s.y0(x) / x),),
        "it2i0k0": (lambda x, y: ((s.i0(x) - 1) / x, -s.k0(x) / x),),
        "itstruve0": (lambda x, y: s.struve(0.0, x),),
        "itmodstruve0": (lambda x, y: s.modstruve(0.0, x),),
        "wright_bessel": (no, no, lambda a, b, x, y: s.wright_bessel(a, a + b, x)),
        "log_wright_bessel": (
            no,
            no,
            lambda a, b, x, y: jnp.exp(s.log_wright_bessel(a, a + b, x) - y),
        ),
        # Kelvin functions (10.61).
        "ber": (lambda x, y: s.berp(x),),
        "bei": (lambda x, y: s.beip(x),),
        "ker": (lambda x, y: s.kerp(x),),
        "kei": (lambda x, y: s.keip(x),),
        "berp": (lambda x, y: -s.bei(x) - y / x,),
        "beip": (lambda x, y: s.ber(x) - y / x,),
        "kerp": (lambda x, y: -s.kei(x) - y / x,),
        "keip": (lambda x, y: s.ker(x) - y / x,),
        # Airy and parabolic cylinder functions, by their equations (9.2, 12.2).
        "airy": (lambda z, y: (y[1], z * y[0], y[3], z * y[2]),),
        "itairy": (lambda x, y: (s.airy(x)[0], s.airy(x)[2], s.airy(-x)[0], s.airy(-x)[2]),),
        "pbdv": (no, lambda v, x, y: (y[1], (x * x / 4 - v - 0.5) * y[0])),
        "pbvv": (no, lambda v, x, y: (y[1], (x * x / 4 - v - 0.5) * y[0])),
        "pbwa": (no, lambda a, x, y: (y[1], (a - x * x / 4) * y[0])),
        # Exponential, logarithmic and sine integrals (6.2, 8.19, 25.12).
        "expi": (lambda x, y: jnp.exp(x) / x,),
        "exp1": (lambda x, y: -jnp.exp(-x) / x,),
        "expn": (
            no,
            lambda n, x, y: (
                -jnp.where(
                    n > 0,
                    s.expn(jnp.where(n > 0, n, 1) - 1, x),
                    jnp.exp(-x) * (1 / x + 1 / (x * x)),
                )
            ),
        ),
        "sici": (lambda x, y: (_series(x, 0.3, _sinc, lambda x: jnp.sin(x) / x), jnp.cos(x) / x),),
        "shichi": (
            lambda x, y: (_series(x, 0.3, _sinhc, lambda x: jnp.sinh(x) / x), jnp.cosh(x) / x),
        ),
        "spence": (lambda x, y: _series(x - 1, 0.05, _dilogarithm, lambda d: -jnp.log1p(d) / d),),
        # Elliptic integrals and functions (19.4, 22.13).
        "ellipk": (
            lambda m, y: _series(
                m,
                0.05,
                _elliptic(lambda n: 1),
                lambda m: (s.ellipe(m) / (1 - m) - s.ellipk(m)) / (2 * m),
            ),
        ),
        "ellipkm1": (
            lambda p, y: (
                -_series(
                    1 - p,
                    0.05,
                    _elliptic(lambda n: 1),
                    lambda m: (s.ellipe(m) / (1 - m) - s.ellipk(m)) / (2 * m),
                )
            ),
        ),
        "ellipe": (
            lambda m, y: _series(
                m,
                0.05,
                _elliptic(lambda n: 1 / (1 - 2 * n)),
                lambda m: (s.ellipe(m) - s.ellipk(m)) / (2 * m),
            ),
        ),
        "ellipkinc": (lambda phi, m, y: 1 / jnp.sqrt(1 - m * jnp.sin(phi) ** 2), no),
        "ellipeinc": (lambda phi, m, y: jnp.sqrt(1 - m * jnp.sin(phi) ** 2), no),
        "ellipj": (
            lambda u, m, y: (y[1] * y[2], -y[0] * y[2], -m * y[0] * y[1], y[2]),
            no,
        ),
        # Hypergeometric functions (13.3, 15.5, 16.3), in their argument.
        "hyp0f1": (no, lambda b, z, y: s.hyp0f1(b + 1, z) / b),
        "hyp1f1": (no, no, lambda a, b, z, y: a / b * s.hyp1f1(a + 1, b + 1, z)),
        "hyp2f1": (no, no, no, lambda a, b, c, z, y: a * b / c * s.hyp2f1(a + 1, b + 1, c + 1, z)),
        "hyperu": (no, no, lambda a, b, x, y: -a * s.hyperu(a + 1, b + 1, x)),
        # Orthogonal polynomials (18.9), in their argument.
        "eval_legendre": (no, lambda n, x, y: jacobi(n, x)),
        "eval_sh_legendre": (no, lambda n, x, y: 2 * jacobi(n, 2 * x - 1)),
        "eval_chebyt": (no, lambda n, x, y: chebyshev_t(n, x)),
        "eval_sh_chebyt": (no, lambda n, x, y: 2 * chebyshev_t(n, 2 * x - 1)),
        "eval_chebyc": (no, lambda n, x, y: chebyshev_t(n, x / 2)),
        "eval_chebyu": (no, lambda n, x, y: chebyshev_u(n, x)),
        "eval_sh_chebyu": (no, lambda n, x, y: 2 * chebyshev_u(n, 2 * x - 1)),
        "eval_chebys": (no, lambda n, x, y: chebyshev_u(n, x / 2) / 2),
        "eval_hermite": (no, lambda n, x, y: below(n, lambda m: 2 * n * s.eval_hermite(m, x))),
        "eval_hermitenorm": (no, lambda n, x, y: below(n, lambda m: n * s.eval_hermitenorm(m, x))),
        "eval_laguerre": (no, lambda n, x, y: below(n, lambda m: -s.eval_genlaguerre(m, 1.0, x))),
        "eval_genlaguerre": (
            no,
            no,
            lambda n, a, x, y: below(n, lambda m: -s.eval_genlaguerre(m, a + 1, x)),
        ),
        "eval_gegenbauer": (
            no,
            no,
            lambda n, a, x, y: below(n, lambda m: 2 * a * s.eval_gegenbauer(m, a + 1, x)),
        ),
        "eval_jacobi": (
            no,
            no,
            no,
            lambda n, a, b, x, y: below(
                n, lambda m: (n + a + b + 1) / 2 * s.eval_jacobi(m, a + 1, b + 1, x)
            ),
        ),
        # Elementary functions.
        "cbrt": (lambda x, y: 1 / (3 * y * y),),
        "cosm1": (lambda x, y: -jnp.sin(x),),
        "cosdg": (lambda x, y: -_degree * s.sindg(x),),
        "sindg": (lambda x, y: _degree * s.cosdg(x),),
        "tandg": (lambda x, y: _degree * (1 + y * y),),
        "cotdg": (lambda x, y: -_degree * (1 + y * y),),
        "radian": (
            lambda d, m, sec, y: jnp.full_like(d, _degree),
            lambda d, m, sec, y: jnp.full_like(m, _degree / 60),
            lambda d, m, sec, y: jnp.full_like(sec, _degree / 3600),
        ),
        "round": (zero,),
        "exp2": (lambda x, y: math.log(2) * y,),
        "exp10": (lambda x, y: math.log(10) * y,),
        "expm1": (lambda x, y: jnp.exp(x),),
        "log1p": (lambda x, y: 1 / (1 + x),),
        "exprel": (
            lambda x, y: _series(x, 0.5, _exprel, lambda x: (jnp.exp(x) - s.exprel(x)) / x),
        ),
        "expit": (lambda x, y: y * s.expit(-x),),
        "log_expit": (lambda x, y: s.expit(-x),),
        "logit": (lambda x, y: 1 / (x * (1 - x)),),
        "wrightomega": (lambda x, y: y / (1 + y),),
        "entr": (lambda x, y: -jnp.log(x) - 1,),
        "rel_entr": (lambda x, z, y: jnp.log(x / z) + 1, lambda x, z, y: -x / z),
        "kl_div": (lambda x, z, y: jnp.log(x / z), lambda x, z, y: 1 - x / z),
        "xlogy": (lambda x, z, y: jnp.log(z), lambda x, z, y: x / z),
        "xlog1py": (lambda x, z, y: jnp.log1p(z), lambda x, z, y: x / (1 + z)),
        "powm1": (
            lambda x, z, y: z * x ** (z - 1),
            lambda x, z, y: s.xlogy(x**z, x),
        ),
        "boxcox": (lambda x, c, y: x ** (c - 1), no),
        "boxcox1p": (lambda x, c, y: (1 + x) ** (c - 1), no),
        "inv_boxcox": (lambda x, c, y: y ** (1 - c), no),
        "inv_boxcox1p": (lambda x, c, y: (1 + y) ** (1 - c), no),
        "huber": (
            lambda d, r, y: jnp.maximum(jnp.abs(r) - d, 0),
            lambda d, r, y: jnp.clip(r, -d, d),
        ),
        "pseudo_huber": (
            lambda d, r, y: 2 * y / d - r * r / (d * jnp.sqrt(1 + (r / d) ** 2)),
            lambda d, r, y: r / jnp.sqrt(1 + (r / d) ** 2),
        ),
        # Distributions, in their variable or, for the inverse, in the probability.
        "chdtr": (no, lambda v, x, y: chi_square_density(v, x)),
        "chdtrc": (no, lambda v, x, y: -chi_square_density(v, x)),
        "chdtri": (no, lambda v, p, y: -1 / chi_square_density(v, y)),
        "fdtr": (no, no, lambda m, n, x, y: f_density(m, n, x)),
        "fdtrc": (no, no, lambda m, n, x, y: -f_density(m, n, x)),
        "fdtri": (no, no, lambda m, n, p, y: 1 / f_density(m, n, y)),
        "gdtr": (
            lambda a, b, x, y: x * gamma_density(b, a * x),
            no,
            lambda a, b, x, y: a * gamma_density(b, a * x),
        ),
        "gdtrc": (
            lambda a, b, x, y: -x * gamma_density(b, a * x),
            no,
            lambda a, b, x, y: -a * gamma_density(b, a * x),
        ),
        "pdtr": (no, lambda k, m, y: -gamma_density(jnp.floor(k) + 1, m)),
        "pdtrc": (no, lambda k, m, y: gamma_density(jnp.floor(k) + 1, m)),
        "stdtr": (no, lambda v, t, y: t_density(v, t)),
        "stdtrit": (no, lambda v, p, y: 1 / t_density(v, y)),
    }

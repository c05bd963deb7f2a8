# SPDX-License-Identifier: Apache-2.0
"""`lazy_apply` and `from_ufunc` on a real device: CuPy, from the definition that serves the CPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.cluster.hierarchy as hierarchy
import scipy.ndimage
import scipy.special as special

import jaxbridge
from jaxbridge import from_ufunc, lazy_apply

pytestmark = pytest.mark.gpu

both = pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])


@pytest.fixture
def x():
    return jnp.linspace(0.5, 3, 6, dtype=jnp.float32).reshape(2, 3)


def on_cpu(x):
    return jax.device_put(x, jax.devices("cpu")[0])


def enable_x64():
    return jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64()


# ---- lazy_apply ------------------------------------------------------------------------------------


def blurred(a, sigma):
    """Written for both, as array-API code is."""
    if isinstance(a, np.ndarray):
        return scipy.ndimage.gaussian_filter(a, sigma)
    import cupyx.scipy.ndimage

    return cupyx.scipy.ndimage.gaussian_filter(a, sigma)


@both
def test_N01_cupy_does_it_on_the_device_without_a_transfer(cp, x, wrap):
    f = wrap(lambda v: lazy_apply(blurred, v, 1.0))
    f(x)  # CuPy compiles its kernels
    with jax.transfer_guard("disallow"):
        y = f(x)
    assert y.devices() == x.devices()
    expected = scipy.ndimage.gaussian_filter(np.asarray(x), 1.0)
    np.testing.assert_allclose(y, expected, rtol=1e-5)


def test_one_definition_on_both_platforms(cp, x):
    f = jax.jit(lambda v: lazy_apply(blurred, v, 1.0))
    there, here = f(x), f(on_cpu(x))
    assert {d.platform for a in (there, here) for d in a.devices()} == {"gpu", "cpu"}
    np.testing.assert_allclose(there, here, rtol=1e-5)


@both
def test_the_argument_is_not_copied(cp, x, wrap):
    seen = []

    def look(a):
        seen.append((type(a), a.data.ptr))
        return a + 1

    np.testing.assert_array_equal(wrap(lambda v: lazy_apply(look, v))(x), x + 1)
    assert seen == [(cp.ndarray, x.unsafe_buffer_pointer())]


@both
def test_as_numpy(x, wrap):
    def doubled(a):
        assert type(a) is np.ndarray
        return a * 2

    y = wrap(lambda v: lazy_apply(doubled, v, as_numpy=True))(x)
    assert y.devices() == x.devices()
    np.testing.assert_array_equal(y, x * 2)


def test_framework_torch(x, needs):
    needs("torch")
    import torch

    def flipped(a):
        assert isinstance(a, torch.Tensor) and a.is_cuda
        return torch.flip(a, (0,))

    y = jax.jit(lambda v: lazy_apply(flipped, v, framework="torch"))(x)
    np.testing.assert_array_equal(y, x[::-1])


@both
def test_64_bit_results_are_narrowed_without_x64(cp, x, wrap):
    y = wrap(
        lambda v: lazy_apply(
            lambda a: (a.astype("float64"), a.sum(dtype="float64"), 7),
            v,
            shape=[v.shape, (), ()],
            dtype=[jnp.float32, jnp.float32, jnp.int32],
        )
    )(x)
    np.testing.assert_array_equal(y[0], x)
    assert (y[1], y[2]) == (np.asarray(x).sum(), 7)


def test_unknown_lengths(cp, x):
    values, counts = lazy_apply(
        lambda a: cp.unique(a, return_counts=True),
        jnp.repeat(x.ravel(), 2),
        shape=[(None,), (None,)],
        dtype=[x.dtype, jnp.int32],
    )
    assert values.devices() == counts.devices() == x.devices()
    np.testing.assert_array_equal(values, x.ravel())
    assert counts.tolist() == [2] * 6
    np.testing.assert_array_equal(lazy_apply(lambda a: a[1:], x, shape=(None, 3)), x[1:])
    found = lazy_apply(np.unique, x, shape=(None,), as_numpy=True)
    assert found.devices() == x.devices()


@both
def test_N02_an_error_of_a_check_reaches_the_user(cp, x, wrap):
    def checked(a):
        if (a < 1).any():
            raise ValueError("less than one")
        return a

    with pytest.raises(ValueError, match="less than one"), jaxbridge.reraise():
        wrap(lambda v: lazy_apply(checked, v))(x).block_until_ready()
    np.testing.assert_array_equal(wrap(lambda v: lazy_apply(checked, v))(x + 1), x + 1)


def test_N03_linkage_of_a_device_array():
    points = np.random.default_rng(0).random((300, 2))
    with enable_x64():
        f = jax.jit(
            lambda v: lazy_apply(
                hierarchy.linkage,
                v,
                method="average",
                shape=(v.shape[0] - 1, 4),
                dtype=np.float64,
                as_numpy=True,
            )
        )
        assert jax.eval_shape(f, points).shape == (299, 4)
        np.testing.assert_array_equal(f(jnp.asarray(points)), hierarchy.linkage(points, "average"))


# ---- from_ufunc ------------------------------------------------------------------------------------

ELEMENTARY = ["add", "multiply", "divide", "power", "hypot", "arctan2", "maximum", "less", "equal"]
SINGLE = ["sin", "exp", "log1p", "sqrt", "floor", "isnan", "signbit", "logical_not", "negative"]
SPECIAL = ["gamma", "gammaln", "psi", "erf", "erfinv", "ndtr", "expit", "i1", "j0", "y1", "entr"]
SPECIAL_OF_TWO = ["beta", "betaln", "xlogy", "xlog1py", "rel_entr", "binom", "gammainc", "huber"]
SEVERAL = ["modf", "frexp", "sici"]


def of(name):
    return getattr(np, name, None) or getattr(special, name)


def close(found, expected):
    assert [f.dtype for f in found] == [e.dtype for e in expected]
    for f, e in zip(found, expected, strict=True):
        if e.dtype.kind in "fc":
            eps = float(jnp.finfo(e.dtype).eps)
            wide = np.complex128 if e.dtype.kind == "c" else np.float64
            np.testing.assert_allclose(
                np.asarray(f, wide), np.asarray(e, wide), rtol=100 * eps, atol=eps
            )
        else:
            np.testing.assert_array_equal(f, e)


@pytest.mark.parametrize("name", [*SINGLE, *SPECIAL, *ELEMENTARY, *SPECIAL_OF_TWO, *SEVERAL])
def test_values_on_both_platforms(cp, x, name):
    f = jax.jit(from_ufunc(of(name)))
    operands = (x / 4,) if of(name).nin == 1 else (x[:, :1] / 4, x[0] / 4)
    there = jax.tree.leaves(f(*operands))
    here = jax.tree.leaves(f(*map(on_cpu, operands)))
    assert all(d.platform == "gpu" for a in there for d in a.devices())
    close(there, here)


@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "uint16", "int32", "float16", "bfloat16", "float64", "complex64"]
)
def test_dtypes(cp, dtype):
    with enable_x64():
        v = jnp.asarray([0, 1, 1, 0] if dtype == "bool" else [1, 2, 3, 4], dtype)
        for name in ("add", "sin", "equal", "gamma"):
            if (dtype, name) == ("complex64", "gamma"):
                continue  # CuPy has no complex gamma
            f = from_ufunc(of(name))
            operands = [v] * f.ufunc.nin
            close(jax.tree.leaves(f(*operands)), jax.tree.leaves(f(*map(on_cpu, operands))))


def test_numbers_broadcasting_and_vmap(cp, x):
    np.testing.assert_array_equal(from_ufunc(np.add)(x, 1.5), x + 1.5)
    quotient, rest = from_ufunc(np.divmod)(x, 2)
    np.testing.assert_array_equal(quotient, x // 2)
    np.testing.assert_array_equal(rest, x % 2)
    y = jax.jit(jax.vmap(from_ufunc(np.add), (0, None)))(x, x)
    np.testing.assert_array_equal(y, x[:, None] + x[None])
    assert from_ufunc(special.gamma)(4) == 6


def test_empty_and_rank_0(cp):
    assert from_ufunc(special.erf)(jnp.ones((2, 0))).shape == (2, 0)
    assert from_ufunc(np.add)(jnp.float32(1), jnp.float32(2)) == 3


def test_no_transfer(cp, x):
    f = jax.jit(from_ufunc(special.gamma))
    f(x)
    with jax.transfer_guard("disallow"):
        f(x).block_until_ready()


def test_cupys_own(cp, x):
    import cupyx.scipy.special

    assert from_ufunc(cp.add) is from_ufunc(np.add)
    assert from_ufunc(cp.arctan2) is from_ufunc(np.arctan2)
    assert from_ufunc(cupyx.scipy.special.gamma) is from_ufunc(special.gamma)
    np.testing.assert_array_equal(from_ufunc(cp.add)(x, x), x + x)
    with pytest.raises(TypeError, match="is no ufunc"):
        from_ufunc(cp.sum)


def test_what_cupy_does_not_have(cp, x):
    import cupyx.scipy.special

    assert not hasattr(cupyx.scipy.special, "tklmbda")
    tklmbda = from_ufunc(special.tklmbda)
    y = jax.jit(lambda x: tklmbda(2 * x, x) + 1)(x)
    assert y.devices() == x.devices()
    np.testing.assert_allclose(y, special.tklmbda(2 * np.asarray(x), np.asarray(x)) + 1, rtol=1e-6)
    z = x + 1j * x
    np.testing.assert_allclose(
        from_ufunc(special.gamma)(z), special.gamma(np.asarray(z)), rtol=1e-6
    )


def test_the_stream_is_xlas(cp):
    """A slow program before and one after: values show that all are ordered."""
    big = jnp.ones((2048, 2048), jnp.float32)

    @jax.jit
    def program(a):
        for _ in range(8):
            a = (a @ a) / 2048
        a = from_ufunc(np.add)(a, 1)
        return (a @ a) / 2048

    np.testing.assert_allclose(program(big)[0, 0], 4.0, rtol=1e-3)

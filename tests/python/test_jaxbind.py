# SPDX-License-Identifier: Apache-2.0
"""`jaxbridge.compat.jaxbind`: functions in JAXbind's convention. Its own tests: see tests/peers."""

import functools
import importlib.util
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.fft
from jax.test_util import check_grads

from jaxbridge import errors
from jaxbridge.compat import jaxbind

pytestmark = pytest.mark.usefixtures("x64")
needs_ducc0 = pytest.mark.skipif(
    importlib.util.find_spec("ducc0") is None, reason="needs ducc0, which is not installed"
)


def same(*args, **kwargs):
    return tuple((x.shape, x.dtype) for x in args)


def last(*args, **kwargs):
    return ((args[-1].shape, args[-1].dtype),)


def scale(out, args, kwargs_dump):
    out[0][()] = args[0] * jaxbind.load_kwargs(kwargs_dump)["by"]


scaled = jaxbind.get_linear_call(scale, scale, same, same)
X = np.arange(6.0).reshape(2, 3)


# ---- the convention ------------------------------------------------------------------------------


def test_a_call_returns_a_list_and_takes_anything_like_an_array():
    for x in (X, jnp.asarray(X), X.tolist()):
        for f in (scaled, jax.jit(scaled, static_argnames="by")):
            if isinstance(x, list) and f is not scaled:
                continue
            out = f(x, by=3)
            assert isinstance(out, list)
            np.testing.assert_array_equal(out[0], 3 * X)
    np.testing.assert_array_equal(scaled(2.0, by=3)[0], 6)


def test_what_a_function_gets():
    seen = []

    def f(out, args, kwargs_dump):
        seen.append((out, args, jaxbind.load_kwargs(kwargs_dump)))
        out[0][()], out[1][()] = args[0], args[1]
        seen[-1] = (type(out), [type(x) for x in args], seen[-1][2], args[0].flags.writeable)

    given = {
        "axes": (0, 1),
        "name": "x",
        "tree": {"a": [1, None]},
        "big": np.arange(3),
        "eps": np.float32(2),
    }
    jaxbind.get_linear_call(f, None, same, None)(X, X, **given)
    ((out, args, kwargs, writeable),) = seen
    assert out is tuple and args == [np.ndarray] * 2
    assert not writeable
    np.testing.assert_array_equal(kwargs.pop("big"), given.pop("big"))
    assert kwargs == given
    assert type(kwargs["eps"]) is np.float32 and type(kwargs["axes"]) is tuple


def test_keyword_arguments_are_a_copy():
    def f(out, args, kwargs_dump):
        kwargs = jaxbind.load_kwargs(kwargs_dump)
        out[0][()] = args[0] * kwargs.pop("by") + kwargs.pop("plus")[0]
        assert not kwargs

    call = jax.jit(
        functools.partial(jaxbind.get_linear_call(f, None, same, None), by=2, plus=np.ones(1))
    )
    for _ in range(2):
        np.testing.assert_array_equal(call(X)[0], 2 * X + 1)


def test_abstract_gets_types_and_keywords():
    seen = []

    def abstract(x, **kwargs):
        seen.append((x, kwargs))
        return (((2, x.shape[0]), np.float32),)

    def f(out, args, kwargs_dump):
        out[0][()] = args[0]

    out = jax.eval_shape(
        lambda x: jaxbind.get_linear_call(f, None, abstract, None)(x, n=3, w=np.ones(2)),
        jnp.ones(4),
    )
    assert (out[0].shape, out[0].dtype) == ((2, 4), np.float32)
    aval, kwargs = seen[0]
    assert isinstance(aval, jax.ShapeDtypeStruct) and aval.shape == (4,)
    assert kwargs["n"] == 3 and type(kwargs["w"]) is np.ndarray


@pytest.mark.parametrize("got", [None, 3, (X.shape, X.dtype), ((X.shape,),), (3.0, 4.0)])
def test_what_abstract_has_to_return(got):
    f = jaxbind.get_linear_call(scale, scale, lambda x, by: got, same)
    with pytest.raises(
        TypeError, match=r"scale: abstract returned .*; expected a tuple with \(shape"
    ):
        f(X, by=3)


def test_an_array_that_is_returned_and_not_written_is_an_error():
    f = jaxbind.get_linear_call(lambda out, args, _: 2 * args[0], scale, same, same)
    with pytest.raises(
        errors.ResultError, match=r"returned an array, float64\[2,3\], although out=0"
    ):
        f(X)
    f = jaxbind.get_linear_call(lambda out, args, _: np.sin(args[0], out=out[0]), None, same, None)
    np.testing.assert_array_equal(f(X)[0], np.sin(X))


def test_an_array_of_jax_by_keyword_is_an_error():
    with pytest.raises(TypeError, match="keyword argument 'by' has an array of JAX's"):
        scaled(X, by=jnp.ones(2))


def test_too_few_arguments():
    f = jaxbind.get_linear_call(scale, scale, same, same, first_n_args_fixed=2)
    with pytest.raises(
        TypeError, match="scale: 2 arguments by position, of which the first 2 are fixed"
    ):
        f(X, X, by=1)


def test_signatures_are_jaxbinds():
    linear = inspect.signature(jaxbind.get_linear_call)
    assert list(linear.parameters) == [
        "f",
        "f_T",
        "abstract",
        "abstract_T",
        "first_n_args_fixed",
        "func_can_batch",
    ]
    names = list(inspect.signature(jaxbind.get_nonlinear_call).parameters)
    assert names[:4] == ["f", "f_derivative", "abstract", "abstract_reverse"]
    with pytest.raises(TypeError):
        jaxbind.get_linear_call(f=scale, f_T=scale, abstract=same, abstract_T=same)


def test_a_function_for_each_platform():
    f = {"cpu": scale, "cuda": lambda out, args, kwargs_dump: None}
    call = jaxbind.get_linear_call(f, f, same, same)
    np.testing.assert_array_equal(call(X, by=2)[0], 2 * X)
    np.testing.assert_array_equal(jax.grad(lambda x: call(x, by=2)[0].sum())(X), np.full((2, 3), 2))


def test_an_exception_is_the_functions_own():
    def fail(out, args, kwargs_dump):
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        jaxbind.get_linear_call(fail, None, same, None)(X)


# ---- linear functions ----------------------------------------------------------------------------


def matrix(out, args, kwargs_dump):
    m, x = args
    out[0][()] = m @ x


def matrix_transposed(out, args, kwargs_dump):
    m, y = args
    assert type(y) is np.ndarray  # as every array, also in an eager transformation
    out[0][()] = m.T @ y


def rows(m, x, **kwargs):
    return (((m.shape[0],), x.dtype),)


def columns(m, y, **kwargs):
    return (((m.shape[1],), y.dtype),)


product = jaxbind.get_linear_call(matrix, matrix_transposed, rows, columns, first_n_args_fixed=1)


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_derivatives_of_a_linear_function(dtype):
    rng = np.random.default_rng(0)
    m = rng.normal(size=(3, 4)).astype(dtype) * (1 + 2j if dtype == "complex128" else 1)
    x = rng.normal(size=4).astype(dtype)
    check_grads(lambda x: product(m, x)[0], (x,), order=2, modes=("fwd", "rev"))
    y = np.arange(3).astype(dtype)
    (back,) = jax.linear_transpose(lambda x: product(m, x)[0], x)(y)
    np.testing.assert_allclose(back, m.T @ y)
    again = jax.linear_transpose(
        lambda y: jax.linear_transpose(lambda x: product(m, x)[0], x)(y)[0], y
    )(x)[0]
    np.testing.assert_allclose(again, m @ x)


def test_a_fixed_argument_has_no_derivative():
    m, x = np.ones((3, 4)), np.ones(4)
    with pytest.raises(
        errors.DerivativeError, match="matrix: a derivative in argument 0 was asked for"
    ):
        jax.grad(lambda m: product(m, x)[0].sum())(m)


def test_a_transpose_that_is_missing_is_named():
    f = jaxbind.get_linear_call(scale, None, same, None)
    np.testing.assert_array_equal(jax.jvp(lambda x: f(x, by=2)[0], (X,), (X,))[1], 2 * X)
    with pytest.raises(NotImplementedError, match="scale: its transpose was not given"):
        jax.grad(lambda x: f(x, by=2)[0].sum())(X)


def times(out, args, kwargs_dump):
    x, y = args
    out[0][()] = x * y


def test_multilinear_functions():
    f = jaxbind.get_linear_call(times, (times, times), last, (last, last))
    x, y = X, X + 1
    check_grads(lambda x, y: f(x, y)[0], (x, y), order=2, modes=("fwd", "rev"))
    np.testing.assert_array_equal(jax.grad(lambda x: f(x, x)[0].sum())(x), 2 * x)
    one = jaxbind.get_linear_call(times, (None, times), last, (None, last), first_n_args_fixed=1)
    np.testing.assert_array_equal(jax.grad(lambda y: one(x, y)[0].sum())(y), x)
    half = jaxbind.get_linear_call(times, (times, None), last, (last, None))
    with pytest.raises(
        NotImplementedError, match="times: its transpose in argument 1 was not given"
    ):
        jax.grad(lambda y: half(x, y)[0].sum())(y)


# ---- other functions -----------------------------------------------------------------------------


def power(out, args, kwargs_dump):
    x, y = args
    out[0][()] = x * y**2


def power_jvp(out, args, kwargs_dump):
    x, y, *tangents = args
    dx, dy = tangents if len(tangents) == 2 else (0, *tangents)
    out[0][()] = y**2 * dx + 2 * x * y * dy


def power_vjp(out, args, kwargs_dump):
    x, y, ct = args
    out[-1][()] = 2 * x * y * ct
    if len(out) == 2:
        out[0][()] = y**2 * ct


def of_two(x, y, *rest, **kwargs):
    return ((x.shape, x.dtype),)


def cotangents(count):
    return lambda x, y, ct, **kwargs: ((x.shape, x.dtype),) * count


square = jaxbind.get_nonlinear_call(power, (power_jvp, power_vjp), of_two, cotangents(2))


@pytest.mark.parametrize("jit", [False, True])
def test_derivatives_of_another_function(jit):
    f = jax.jit(square) if jit else square
    check_grads(lambda x, y: f(x, y)[0], (X, X + 1), order=1, modes=("fwd", "rev"))
    gradients = jax.grad(lambda x, y: f(x, y)[0].sum(), (0, 1))(X, X + 1)
    np.testing.assert_allclose(gradients, ((X + 1) ** 2, 2 * X * (X + 1)))


def test_fixed_arguments_of_another_function():
    f = jaxbind.get_nonlinear_call(
        power, (power_jvp, power_vjp), of_two, cotangents(1), first_n_args_fixed=1
    )
    check_grads(lambda y: f(X, y)[0], (X + 1,), order=1, modes=("fwd", "rev"))
    with pytest.raises(errors.DerivativeError, match=r"argument 0 .* \(first_n_args_fixed=1\)"):
        jax.grad(lambda x: f(x, X)[0].sum())(X)


def test_without_the_first_derivative_there_is_reverse_mode():
    f = jaxbind.get_nonlinear_call(power, (None, power_vjp), of_two, cotangents(2))
    g = jax.jit(jax.grad(lambda y: f(X, y)[0].sum()))(X + 1)
    np.testing.assert_allclose(g, 2 * X * (X + 1))
    with pytest.raises(NotImplementedError, match="forward mode needs the first of f_derivative"):
        jax.jvp(lambda y: f(X, y)[0], (X,), (X,))


# ---- batches -------------------------------------------------------------------------------------


def cumulate(out, args, kwargs_dump):
    """Sums along the first axis that is not one of the batch, the second array backwards."""
    kwargs = jaxbind.load_kwargs(kwargs_dump)
    seen.append((kwargs["batch_axes"], [x.shape for x in args]))
    for o, x, batch in zip(out, args, kwargs["batch_axes"] or ((), ()), strict=True):
        axis = next(i for i in range(x.ndim) if i not in batch)
        o[()] = np.cumsum(x, axis)


def cumulate_transposed(out, args, kwargs_dump):
    kwargs = jaxbind.load_kwargs(kwargs_dump)
    for o, x, batch in zip(out, args, kwargs["batch_axes"] or ((), ()), strict=True):
        axis = next(i for i in range(x.ndim) if i not in batch)
        o[()] = np.flip(np.cumsum(np.flip(x, axis), axis), axis)


def batched(*args, batch_axes=None, **kwargs):
    axes = batch_axes or ((),) * len(args)
    return tuple((x.shape, x.dtype, a[-1] if a else ()) for x, a in zip(args, axes, strict=True))


seen = []
sums = jaxbind.get_linear_call(cumulate, cumulate_transposed, batched, batched, func_can_batch=True)


def test_a_function_that_can_batch_is_called_once():
    x, y = np.arange(24.0).reshape(2, 3, 4), np.arange(12.0).reshape(3, 4)
    native = lambda x, y: [jnp.cumsum(x, 0), jnp.cumsum(y, 0)]
    f = lambda g: jax.vmap(jax.vmap(g, (0, None)), (2, 1))
    seen.clear()
    got = jax.jit(f(sums))(x, y)
    assert len(seen) == 1
    batch_axes, shapes = seen[0]
    assert [len(a) for a in batch_axes] == [2, 1]
    for axes, shape, sizes in zip(batch_axes, shapes, ((2, 4), (4,)), strict=True):
        assert tuple(shape[a] for a in axes) == sizes
    for a, b in zip(got, f(native)(x, y), strict=True):
        np.testing.assert_allclose(a, b)
    check_grads(f(sums), (x, y), order=2, modes=("fwd", "rev"))
    seen.clear()
    sums(x[0], y)
    assert seen[0][0] is None


def test_a_result_that_has_no_batch_axis():
    x, y = np.ones((2, 3)), np.arange(3.0)
    a, b = jax.vmap(sums, (0, None))(x, y)
    np.testing.assert_array_equal(a, np.cumsum(x, 1))
    np.testing.assert_array_equal(b, [np.cumsum(y)] * 2)


@pytest.mark.parametrize("in_axes", [(0, 0), (1, None), (None, 0)])
def test_any_function_in_batches(in_axes):
    f = jax.vmap(square, in_axes)
    native = jax.vmap(lambda x, y: [x * y**2], in_axes)
    x = X if in_axes[0] is not None else X[0]
    y = X.T + 1 if in_axes == (1, 1) else (X[0] + 1 if in_axes[1] is None else X + 1)
    if in_axes == (1, None):
        y = np.arange(2.0)
    np.testing.assert_allclose(jax.jit(f)(x, y)[0], native(x, y)[0])
    check_grads(lambda x, y: f(x, y)[0], (x, y), order=1, modes=("fwd", "rev"))


def test_a_batch_of_a_gradient():
    loss = lambda x, y: (square(x, y)[0] ** 2).sum()
    native = lambda x, y: ((x * y**2) ** 2).sum()
    got = jax.vmap(jax.grad(loss, 1))(X, X + 1)
    np.testing.assert_allclose(got, jax.vmap(jax.grad(native, 1))(X, X + 1))


# ---- ducc0 ---------------------------------------------------------------------------------------


@pytest.fixture
def ducc():
    from jaxbridge.compat.jaxbind.contrib import jaxducc0

    return jaxducc0


def complex_(*shape):
    rng = np.random.default_rng(1)
    return rng.normal(size=shape) + 1j * rng.normal(size=shape)


def check_operator(f, x, want):
    """Values, derivatives, and a batch along another axis."""
    np.testing.assert_allclose(f(x), want(x), atol=1e-10)
    check_grads(f, (x,), order=1, modes=("fwd", "rev"), eps=1.0)
    batch = np.stack([x, 2 * x, x - 1], 1)
    got = jax.jit(jax.vmap(f, 1))(batch)
    np.testing.assert_allclose(got, np.stack([want(batch[:, i]) for i in range(3)]), atol=1e-10)
    # The transpose of the batch is the batch of the transpose.
    ct = np.random.default_rng(2).normal(size=np.shape(got)).astype(got.dtype)
    (back,) = jax.linear_transpose(jax.vmap(f, 1), batch)(ct)
    ones = [jax.linear_transpose(f, x)(c)[0] for c in ct]
    np.testing.assert_allclose(back, np.stack(ones, 1), atol=1e-10)


@needs_ducc0
@pytest.mark.parametrize("forward", [True, False])
@pytest.mark.parametrize("axes", [None, (1,), (1, 0)])
def test_fourier_transforms(ducc, axes, forward):
    name = "backward" if forward else "forward"
    x = complex_(4, 5)
    fft = scipy.fft.fftn if forward else scipy.fft.ifftn
    check_operator(
        lambda x: ducc.c2c(x, axes=axes, forward=forward)[0],
        x,
        lambda x: fft(x, axes=axes, norm=name),
    )


@needs_ducc0
@pytest.mark.parametrize("length", [5, 6])
@pytest.mark.parametrize("axes", [None, 0, (1, 0)])
def test_real_fourier_transforms(ducc, axes, length):
    x = complex_(length, length).real
    along = (axes,) if isinstance(axes, int) else axes
    check_operator(lambda x: ducc.r2c(x, axes=axes)[0], x, lambda x: scipy.fft.rfftn(x, axes=along))
    y = scipy.fft.rfftn(x, axes=along)
    sizes = [length] * len(along or (0, 1))
    inverse = lambda y: ducc.c2r(y, axes=axes, forward=False, inorm=2, lastsize=length)[0]
    check_operator(inverse, y, lambda y: scipy.fft.irfftn(y, sizes, axes=along))
    # JAX's own conventions of transposes between real and complex numbers.
    for ours, native, a, b in (
        (lambda x: ducc.r2c(x, axes=axes)[0], lambda x: jnp.fft.rfftn(x, axes=along), x, y * 1j),
        (inverse, lambda y: jnp.fft.irfftn(y, sizes, axes=along), y, x),
    ):
        got, want = (jax.linear_transpose(f, a)(b)[0] for f in (ours, native))
        np.testing.assert_allclose(got, want, atol=1e-10)


@needs_ducc0
@pytest.mark.parametrize("inorm", [0, 1])
@pytest.mark.parametrize("kind", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ["dct", "dst"])
def test_cosine_and_sine_transforms(ducc, name, kind, inorm):
    f = lambda x: getattr(ducc, name)(x, type=kind, inorm=inorm)[0]
    norm = "ortho" if inorm else "backward"
    want = lambda x: getattr(scipy.fft, name + "n")(x, kind, norm=norm)
    check_operator(f, complex_(4, 5).real, want)


@needs_ducc0
def test_hartley_transform(ducc):
    def want(x):
        y = scipy.fft.fftn(x)
        return y.real - y.imag

    check_operator(lambda x: ducc.genuine_fht(x)[0], complex_(4, 5).real, want)


@needs_ducc0
def test_transforms_to_points_anywhere(ducc):
    rng = np.random.default_rng(0)
    points = rng.uniform(0, 2 * np.pi, (7, 2))
    to_points, to_grid = ducc.get_nufft((4, 6), epsilon=1e-12)
    grid = complex_(4, 6)
    k = np.stack(np.meshgrid(np.arange(-2, 2), np.arange(-3, 3), indexing="ij"), -1)
    matrix = np.exp(-1j * np.tensordot(points, k, (1, 2)))
    np.testing.assert_allclose(to_points(points, grid)[0], np.tensordot(matrix, grid), atol=1e-9)
    values = complex_(7)
    want = np.tensordot(values, matrix, (0, 0))
    np.testing.assert_allclose(to_grid(points, values)[0], want, atol=1e-9)
    (back,) = jax.linear_transpose(lambda g: to_points(points, g)[0], grid)(values)
    np.testing.assert_allclose(back, want, atol=1e-9)
    check_grads(lambda g: to_points(points, g)[0], (grid,), order=1, modes=("fwd", "rev"), eps=1.0)


@needs_ducc0
@pytest.mark.parametrize("spin", [0, 2])
def test_spherical_harmonics(ducc, spin):
    lmax, mmax, nside = 6, 4, 4
    synthesis = ducc.get_healpix_sht(nside, lmax, mmax, spin)
    components = 1 if spin == 0 else 2
    n = 2 * ducc.nalm(lmax, mmax) - lmax - 1
    x = np.random.default_rng(0).normal(size=(components, n))
    (sky,) = synthesis(x)
    assert sky.shape == (components, 12 * nside**2)
    if spin == 0:  # a_00 alone is a constant
        (flat,) = synthesis(np.eye(1, n))
        np.testing.assert_allclose(flat, 1 / np.sqrt(4 * np.pi))
    # The transform is orthogonal up to the pixels: the transpose is the adjoint.
    y = np.random.default_rng(1).normal(size=sky.shape)
    (back,) = jax.linear_transpose(lambda x: synthesis(x)[0], x)(y)
    np.testing.assert_allclose(np.vdot(back, x), np.vdot(y, sky))
    check_grads(lambda x: synthesis(x)[0], (x,), order=1, modes=("fwd", "rev"), eps=1.0)


@needs_ducc0
def test_visibilities(ducc):
    rng = np.random.default_rng(0)
    uvw, frequencies = rng.normal(size=(9, 3)) * 20, np.array([1e9, 1.2e9])
    image = rng.normal(size=(16, 16))
    f = ducc.get_wgridder(
        pixsize_x=1e-3, pixsize_y=1e-3, npix_x=16, npix_y=16, epsilon=1e-10, do_wgridding=True
    )
    g = lambda image: f(uvw, frequencies, image)[0]
    assert g(image).shape == (9, 2)
    ct = complex_(9, 2)
    (back,) = jax.linear_transpose(g, image)(ct)
    np.testing.assert_allclose(np.vdot(back, image), (ct * g(image)).sum().real)
    check_grads(g, (image,), order=1, modes=("fwd", "rev"), eps=1.0)

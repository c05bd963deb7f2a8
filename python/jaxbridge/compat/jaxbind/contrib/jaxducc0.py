# SPDX-License-Identifier: Apache-2.0
"""Operations of ducc0 (https://pypi.org/project/ducc0) as JAX functions, under JAXbind's names.

Each returns a list of one array, as all calls in JAXbind's convention do. JAXbind has no `r2c`, `c2r`,
`dct`, `dst` and `get_nufft`.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import ducc0
import numpy as np

from jaxbridge.compat.jaxbind import get_linear_call, load_kwargs

__all__ = [
    "c2c",
    "c2r",
    "dct",
    "dst",
    "genuine_fht",
    "get_healpix_sht",
    "get_nufft",
    "get_wgridder",
    "nalm",
    "r2c",
]


def _complextype(dtype: Any) -> np.dtype[Any]:
    return np.result_type(dtype, np.complex64)


def _realtype(dtype: Any) -> np.dtype[Any]:
    return np.empty(0, dtype).real.dtype


# ---- Fourier, Hartley, cosine and sine transforms ------------------------------------------------

# All can batch, and transform along `axes`: of the array as it is without batches, all by default.


def _own_axes(ndim: int, batch_axes: Any, axes: Any) -> list[int]:
    """The axes to transform in an array that has batch axes."""
    (batch,) = batch_axes or ((),)
    own = [i for i in range(ndim) if i not in batch]
    return own if axes is None else [own[i] for i in ((axes,) if isinstance(axes, int) else axes)]


def _transform(function: Callable[..., Any]) -> Callable[..., None]:
    """A transform in JAXbind's convention: `function(x, out=, axes=, **kwargs)`."""

    def transform(out: Any, args: Any, kwargs_dump: Any) -> None:
        kwargs = load_kwargs(kwargs_dump)
        axes = _own_axes(args[0].ndim, kwargs.pop("batch_axes", None), kwargs.pop("axes", None))
        function(args[0], out=out[0], axes=axes, **kwargs)

    transform.__name__ = function.__name__
    return transform


def _result(x: Any, batch_axes: Any, length: int | None = None, axes: Any = None) -> Any:
    """The shape of a transform, of that length along the last of the axes, and its newest batch axis."""
    (batch,) = batch_axes or ((),)
    shape = list(x.shape)
    if length is not None:
        shape[_own_axes(len(shape), batch_axes, axes)[-1]] = length
    return tuple(shape), batch[-1] if batch else ()


def _same(x: Any, *, batch_axes: Any = None, **kwargs: Any) -> Any:
    shape, batch = _result(x, batch_axes)
    return ((shape, x.dtype, batch),)


def _linear(
    function: Any, transposed: Any = None, of: Any = _same, of_transposed: Any = _same
) -> Any:
    """An operator, of a transform that is its own transpose unless another is given."""
    f = _transform(function)
    f_t = f if transposed is None else _transform(transposed)
    made = get_linear_call(f, f_t, of, of_transposed, func_can_batch=True)
    made.__doc__ = function.__doc__
    return made


c2c = _linear(ducc0.fft.c2c)
genuine_fht = _linear(ducc0.fft.genuine_fht)


# The matrix of a real transform has half of the frequencies as rows. Its transpose is what ducc0 calculates
# in the other direction but for the frequencies that stand for two.


def _weights(frequencies: Any, length: int, axis: int, factor: float) -> Any:
    """`factor` times what stands for two frequencies."""
    weighted = np.array(frequencies)
    np.moveaxis(weighted, axis, 0)[1 : (length + 1) // 2] *= factor
    return weighted


def _r2c_transposed(x: Any, *, out: Any, axes: Any, length: int, **kwargs: Any) -> None:
    halved = _weights(x, length, axes[-1], 0.5)
    ducc0.fft.c2r(halved, out=out, axes=axes, lastsize=length, **kwargs)


def _c2r_transposed(x: Any, *, out: Any, axes: Any, lastsize: int, **kwargs: Any) -> None:
    ducc0.fft.r2c(x, out=out, axes=axes, **kwargs)
    np.moveaxis(out, axes[-1], 0)[1 : (lastsize + 1) // 2] *= 2


def _r2c(x: Any, *, out: Any, axes: Any, length: int, **kwargs: Any) -> None:
    ducc0.fft.r2c(x, out=out, axes=axes, **kwargs)


def _c2r(x: Any, *, out: Any, axes: Any, **kwargs: Any) -> None:
    ducc0.fft.c2r(x, out=out, axes=axes, **kwargs)


def _frequencies(
    x: Any,
    *,
    batch_axes: Any = None,
    axes: Any = None,
    length: int | None = None,
    lastsize: int | None = None,
    **kwargs: Any,
) -> Any:
    n = length if lastsize is None else lastsize
    assert n is not None
    shape, batch = _result(x, batch_axes, n // 2 + 1, axes)
    return ((shape, _complextype(x.dtype), batch),)


def _samples(
    x: Any,
    *,
    batch_axes: Any = None,
    axes: Any = None,
    length: int | None = None,
    lastsize: int | None = None,
    **kwargs: Any,
) -> Any:
    n = length if lastsize is None else lastsize
    shape, batch = _result(x, batch_axes, n, axes)
    return ((shape, _realtype(x.dtype), batch),)


_r2c_of_length = _linear(_r2c, _r2c_transposed, _frequencies, _samples)
_c2r_to_length = _linear(_c2r, _c2r_transposed, _samples, _frequencies)


def r2c(x: Any, *, axes: Any = None, **kwargs: Any) -> list[Any]:
    """`ducc0.fft.r2c`: the transform of real numbers, to n // 2 + 1 frequencies along the last of `axes`.

    Args:
        x: real.
        axes: as there; all by default.
        kwargs: forward, inorm, nthreads.
    """
    length = x.shape[_own_axes(x.ndim, None, axes)[-1]]
    return list(_r2c_of_length(x, axes=axes, length=length, **kwargs))


def c2r(x: Any, *, lastsize: int, axes: Any = None, **kwargs: Any) -> list[Any]:
    """`ducc0.fft.c2r`: the transform to real numbers, of half of the frequencies along the last of `axes`.

    Args:
        x: complex.
        lastsize: the length of the result along the last of `axes`.
        axes: as there; all by default.
        kwargs: forward, inorm, nthreads.
    """
    return list(_c2r_to_length(x, axes=axes, lastsize=lastsize, **kwargs))


# A cosine or sine transform that is orthogonal has that of the inverse type as its transpose. Others are
# that one between weights: ducc0 counts inner elements twice.

_inverse_types = {1: 1, 2: 3, 3: 2, 4: 4}
# What is weighted on either side, by function and type: positions along an axis.
_edges = {
    ("dct", 1): ([0, -1], [0, -1]),
    ("dct", 2): ([], [0]),
    ("dct", 3): ([0], []),
    ("dst", 2): ([], [-1]),
    ("dst", 3): ([-1], []),
}


def _trigonometric(name: str) -> Any:
    function = getattr(ducc0.fft, name)

    def weight(x: Any, axes: Any, edges: list[int], factor: float) -> None:
        for axis in axes:
            np.moveaxis(x, axis, 0)[edges] *= factor

    def transposed(
        x: Any, *, out: Any, axes: Any, type: int, inorm: int = 0, **kwargs: Any
    ) -> None:
        inverse = _inverse_types[type]
        if inorm == 1:  # orthogonal
            function(x, out=out, axes=axes, type=inverse, inorm=inorm, **kwargs)
            return
        before, after = _edges.get((name, type), ([], []))
        weighted = np.array(x)
        weight(weighted, axes, after, 2.0)
        function(weighted, out=out, axes=axes, type=inverse, inorm=inorm, **kwargs)
        weight(out, axes, before, 0.5)

    return _linear(function, transposed)


dct = _trigonometric("dct")
dst = _trigonometric("dst")


# ---- spherical harmonics on a HEALPix sphere -----------------------------------------------------

# Real numbers stand for coefficients a_lm with m >= 0 of a real map: those with m = 0, which are real, as
# they are; of the others real and imaginary part times the square root of 2. Then the transform's
# transpose is its adjoint.


def nalm(lmax: int, mmax: int) -> int:
    """How many coefficients a_lm there are with l <= lmax and 0 <= m <= mmax."""
    return (mmax + 1) * (lmax + 1) - mmax * (mmax + 1) // 2


def _alm2realalm(alm: Any, lmax: int, dtype: Any, out: Any = None) -> Any:
    m0 = lmax + 1
    if out is None:
        out = np.empty((alm.shape[0], 2 * alm.shape[1] - m0), dtype)
    out[:, :m0] = alm[:, :m0].real
    np.multiply(alm[:, m0:].view(dtype), math.sqrt(2), out=out[:, m0:])
    return out


def _realalm2alm(real: Any, lmax: int, dtype: Any) -> Any:
    m0 = lmax + 1
    alm = np.empty((real.shape[0], (real.shape[1] + m0) // 2), dtype)
    alm[:, :m0] = real[:, :m0]
    np.multiply(real[:, m0:], math.sqrt(0.5), out=alm[:, m0:].view(real.dtype))
    return alm


def _sphere(args: Any) -> dict[str, Any]:
    return dict(zip(("theta", "phi0", "nphi", "ringstart"), args, strict=True))


def _synthesis(out: Any, args: Any, kwargs_dump: Any) -> None:
    *rings, real = args
    kwargs = load_kwargs(kwargs_dump)
    del kwargs["nside"]
    alm = _realalm2alm(real, kwargs["lmax"], _complextype(real.dtype))
    ducc0.sht.synthesis(alm=alm, map=out[0], **_sphere(rings), **kwargs)


def _synthesis_transposed(out: Any, args: Any, kwargs_dump: Any) -> None:
    *rings, sky = args
    kwargs = load_kwargs(kwargs_dump)
    del kwargs["nside"]
    alm = ducc0.sht.adjoint_synthesis(map=sky, **_sphere(rings), **kwargs)
    _alm2realalm(alm, kwargs["lmax"], sky.dtype, out[0])


def _components(spin: int) -> int:
    return 1 if spin == 0 else 2


def _sky_of(*args: Any, spin: int, nside: int, **kwargs: Any) -> Any:
    return (((_components(spin), 12 * nside**2), args[-1].dtype),)


def _real_alm_of(*args: Any, spin: int, lmax: int, mmax: int, **kwargs: Any) -> Any:
    return (((_components(spin), 2 * nalm(lmax, mmax) - lmax - 1), args[-1].dtype),)


_healpix = get_linear_call(
    _synthesis, _synthesis_transposed, _sky_of, _real_alm_of, first_n_args_fixed=4
)


def get_healpix_sht(
    nside: int, lmax: int, mmax: int, spin: int, nthreads: int = 1
) -> "functools.partial[list[Any]]":
    """The spherical harmonic synthesis on a HEALPix sphere: real coefficients to a map.

    Args:
        nside: the sphere's parameter; it has 12 nside**2 pixels, in rings.
        lmax: the largest l.
        mmax: the largest m.
        spin: of the field; one component for 0, two for others.
        nthreads: 0 for as many as the machine has.

    Returns:
        A function of an array (components, 2 * nalm(lmax, mmax) - lmax - 1): a_l0, then for m > 0 real
        and imaginary part times the square root of 2. It returns [map], of shape (components, pixels).
    """
    rings = ducc0.healpix.Healpix_Base(nside, "RING").sht_info()
    return functools.partial(
        _healpix,
        *(rings[name] for name in ("theta", "phi0", "nphi", "ringstart")),
        lmax=lmax,
        mmax=mmax,
        spin=spin,
        nthreads=nthreads,
        nside=nside,
    )


# ---- radio interferometry ------------------------------------------------------------------------


def _dirty2vis(out: Any, args: Any, kwargs_dump: Any) -> None:
    uvw, freq, dirty = args
    kwargs = load_kwargs(kwargs_dump)
    del kwargs["npix_x"], kwargs["npix_y"]
    ducc0.wgridder.experimental.dirty2vis(uvw=uvw, freq=freq, dirty=dirty, vis=out[0], **kwargs)


def _vis2dirty(out: Any, args: Any, kwargs_dump: Any) -> None:
    uvw, freq, vis = args
    # ducc0 has the adjoint; this is the transpose.
    ducc0.wgridder.experimental.vis2dirty(
        uvw=uvw, freq=freq, vis=vis.conj(), dirty=out[0], **load_kwargs(kwargs_dump)
    )


def _vis_of(uvw: Any, freq: Any, dirty: Any, **kwargs: Any) -> Any:
    return (((uvw.shape[0], freq.shape[0]), _complextype(dirty.dtype)),)


def _dirty_of(uvw: Any, freq: Any, vis: Any, *, npix_x: int, npix_y: int, **kwargs: Any) -> Any:
    return (((npix_x, npix_y), _realtype(vis.dtype)),)


_wgridder = get_linear_call(_dirty2vis, _vis2dirty, _vis_of, _dirty_of, first_n_args_fixed=2)


def get_wgridder(
    *,
    pixsize_x: float,
    pixsize_y: float,
    npix_x: int,
    npix_y: int,
    epsilon: float,
    do_wgridding: bool,
    nthreads: int = 1,
    flip_v: bool = False,
    verbosity: int = 0,
    **kwargs: Any,
) -> "functools.partial[list[Any]]":
    """The prediction of visibilities from an image (wgridder).

    Args:
        pixsize_x: size of a pixel, in radians.
        pixsize_y: the same.
        npix_x: number of pixels.
        npix_y: the same.
        epsilon: the accuracy.
        do_wgridding: whether w is taken into account.
        nthreads: 0 for as many as the machine has.
        flip_v: whether v changes its sign.
        verbosity: above 0 it prints what it does.
        kwargs: what else `ducc0.wgridder.experimental.dirty2vis` and `vis2dirty` take.

    Returns:
        A function of uvw (rows, 3) in meters, frequencies (channels,) in Hz, and the image
        (npix_x, npix_y) in Jy/sr, in which it is linear. It returns [visibilities], (rows, channels).
    """
    return functools.partial(
        _wgridder,
        pixsize_x=pixsize_x,
        pixsize_y=pixsize_y,
        npix_x=npix_x,
        npix_y=npix_y,
        epsilon=epsilon,
        do_wgridding=do_wgridding,
        nthreads=nthreads,
        flip_v=flip_v,
        verbosity=verbosity,
        **kwargs,
    )


# ---- transforms between a grid and other points --------------------------------------------------


def _u2nu(out: Any, args: Any, kwargs_dump: Any) -> None:
    coord, grid = args
    kwargs = load_kwargs(kwargs_dump)
    del kwargs["shape"]
    ducc0.nufft.u2nu(grid=grid, coord=coord, out=out[0], **kwargs)


def _nu2u(out: Any, args: Any, kwargs_dump: Any) -> None:
    coord, points = args
    kwargs = load_kwargs(kwargs_dump)
    del kwargs["shape"]
    ducc0.nufft.nu2u(points=points, coord=coord, out=out[0], **kwargs)


def _points_of(coord: Any, grid: Any, **kwargs: Any) -> Any:
    return (((coord.shape[0],), grid.dtype),)


def _grid_of(coord: Any, points: Any, *, shape: tuple[int, ...], **kwargs: Any) -> Any:
    return ((shape, points.dtype),)


# Each is the other's transpose, with the same sign in the exponent.
_to_points = get_linear_call(_u2nu, _nu2u, _points_of, _grid_of, first_n_args_fixed=1)
_to_grid = get_linear_call(_nu2u, _u2nu, _grid_of, _points_of, first_n_args_fixed=1)


def get_nufft(
    shape: tuple[int, ...],
    *,
    epsilon: float,
    forward: bool = True,
    nthreads: int = 1,
    **kwargs: Any,
) -> "tuple[functools.partial[list[Any]], functools.partial[list[Any]]]":
    """Fourier transforms between a uniform grid and points anywhere (NUFFT). JAXbind has none.

    Args:
        shape: of the grid.
        epsilon: the accuracy.
        forward: the exponent's sign is negative.
        nthreads: 0 for as many as the machine has.
        kwargs: what else `ducc0.nufft.u2nu` and `nu2u` take.

    Returns:
        Two functions: of (coord, grid), which returns [points], and of (coord, points), which returns
        [grid]; `coord` is (points, axes of the grid). They are linear in the second argument, each the
        transpose of the other.
    """
    given = {
        "shape": tuple(shape),
        "epsilon": epsilon,
        "forward": forward,
        "nthreads": nthreads,
        **kwargs,
    }
    return functools.partial(_to_points, **given), functools.partial(_to_grid, **given)

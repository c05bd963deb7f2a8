# SPDX-License-Identifier: Apache-2.0
"""The names and conventions of JAXbind (1.3): `import jaxbridge.compat.jaxbind as jaxbind`.

A function is called as `f(out, args, kwargs_dump)`: it reads the NumPy arrays of `args`, writes into those
of `out`, and gets the call's keyword arguments from `load_kwargs(kwargs_dump)`. It keeps none of them.
Where JAXbind takes a function, `{"cpu": f, "cuda": g}` does as well; then `g` gets CuPy's arrays.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from ._keywords import load_kwargs as load_kwargs
from ._operator import Operator, call

__all__ = ["get_linear_call", "get_nonlinear_call", "load_kwargs"]


def get_linear_call(
    f: Callable[..., None],
    f_T: Callable[..., None] | Sequence[Callable[..., None] | None] | None,  # noqa: N803
    /,
    abstract: Callable[..., Any],
    abstract_T: Callable[..., Any] | Sequence[Callable[..., Any] | None] | None,  # noqa: N803
    *,
    first_n_args_fixed: int = 0,
    func_can_batch: bool = False,
) -> "functools.partial[list[Any]]":
    """Makes a JAX function of a linear one. It returns a list of arrays, and has derivatives of any order.

    Args:
        f: the function.
        f_T: its transpose (not the adjoint), called as `f` is with the fixed arguments and the cotangents
            of the results; it writes the cotangents of the other arguments. A tuple where `f` is linear in
            each of its arguments by itself: for each argument the transpose in it, which gets the other
            arguments and the cotangents, or None.
        abstract: `abstract(*args, **kwargs)` with `jax.ShapeDtypeStruct` in place of arrays returns
            (shape, dtype) for each result, in a tuple: `((x.shape, x.dtype),)`.
        abstract_T: the same for `f_T`; a tuple where that is one.
        first_n_args_fixed: how many of the first arguments it is not linear in, and has no derivative in.
        func_can_batch: under vmap `f`, `f_T` and their `abstract`s get whole batches, and the keyword
            `batch_axes`: for each argument a tuple of the axes that vmap added, or None without vmap. The
            `abstract`s return (shape, dtype, the axis that the last vmap added). False: `f` is called once
            for each element.
    """
    is_multilinear = isinstance(f_T, (tuple, list))
    return functools.partial(
        call,
        _func=Operator(
            f,
            abstract,
            tuple(f_T) if is_multilinear else f_T,  # type: ignore[arg-type]
            tuple(abstract_T) if is_multilinear else abstract_T,  # type: ignore[arg-type]
            kind="multilinear" if is_multilinear else "linear",
            first_n_args_fixed=first_n_args_fixed,
            can_batch=func_can_batch,
        ),
    )


def get_nonlinear_call(
    f: Callable[..., None],
    f_derivative: tuple[Callable[..., None] | None, Callable[..., None] | None],
    /,
    abstract: Callable[..., Any],
    abstract_reverse: Callable[..., Any],
    *,
    first_n_args_fixed: int = 0,
    func_can_batch: bool = False,
) -> "functools.partial[list[Any]]":
    """Makes a JAX function of any one. It returns a list of arrays, and has first derivatives.

    Args:
        f: the function.
        f_derivative: its Jacobian times tangents, and its transposed Jacobian times cotangents: called as
            `f` is with all arguments and the tangents of those that are not fixed, or the cotangents of
            the results.
        abstract: as in `get_linear_call`, of `f` and of the first, each with its arguments.
        abstract_reverse: the same, of the second.
        first_n_args_fixed: how many of the first arguments have no derivative.
        func_can_batch: as in `get_linear_call`.
    """
    jvp, vjp = f_derivative
    return functools.partial(
        call,
        _func=Operator(
            f,
            abstract,
            vjp,
            abstract_reverse,
            jvp,
            kind="nonlinear",
            first_n_args_fixed=first_n_args_fixed,
            can_batch=func_can_batch,
        ),
    )

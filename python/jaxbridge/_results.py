# SPDX-License-Identifier: Apache-2.0
"""The declared results of a call: `result_shape_dtypes`, called and checked."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ._errors import add_note


def declared(name: str, results: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The tree of results of a call.

    Args:
        name: of the function, for messages.
        results: that tree, or a callable that returns it.
        args: the call's, with `jax.ShapeDtypeStruct` in place of arrays.
        kwargs: the same.
    """
    if not callable(results) or isinstance(results, jax.ShapeDtypeStruct):
        return results
    try:
        return results(*args, **kwargs)
    except Exception as error:
        add_note(
            error,
            f"raised by the result_shape_dtypes of {name}, which gets the arguments of the call with "
            f"jax.ShapeDtypeStruct in place of arrays",
        )
        raise


_most = 2**63 - 1


def shape_and_dtype(name: str, leaf: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Of one declared result.

    Raises:
        TypeError: it has none, or a dtype that JAX does not have.
        ValueError: a length is negative, or too large.
    """
    if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
        hint = (
            f". A shape is written as jax.ShapeDtypeStruct(shape, dtype). Where a callable returned an "
            f"argument that is a Python number: that is static, and has no dtype; pass "
            f"jnp.asarray({leaf!r}) or a NumPy scalar"
            if type(leaf) in (bool, int, float, complex)
            else ""
        )
        raise TypeError(f"{_hold(name, leaf)}; expected a pytree of jax.ShapeDtypeStruct{hint}")
    try:
        shape, dtype = tuple(leaf.shape), np.dtype(leaf.dtype)
    except TypeError as error:
        raise TypeError(
            f"{_hold(name, leaf)}; expected a tuple of lengths and a dtype of NumPy or ml_dtypes"
        ) from error
    for length in shape:
        # A symbolic length is none of these, and has its own checks.
        if isinstance(length, (int, np.integer)) and length < 0:
            raise ValueError(f"{_hold(name, leaf)}, which has a negative length, {length}")
    # What XLA counts with.
    known = [int(n) for n in shape if isinstance(n, (int, np.integer))]
    if max(known, default=0) > _most or (0 not in known and math.prod(known) > _most):
        raise ValueError(f"{_hold(name, leaf)}, which has more elements than an int64 can count")
    if not dtype.isnative:
        raise TypeError(
            f"{name}: a result is declared with another byte order ({dtype.str}), and JAX has the "
            f"machine's own only; declare {dtype.name}"
        )
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise TypeError(
            f"{name}: a result is declared as {dtype.name}, which JAX has only with 64-bit types "
            f"enabled: set jax_enable_x64, or declare {jax.dtypes.canonicalize_dtype(dtype).name} and "
            f"convert in the function"
        )
    return shape, dtype


def _hold(name: str, leaf: Any) -> str:
    return f"{name}: the declared results (result_shape_dtypes) hold {leaf!r}"

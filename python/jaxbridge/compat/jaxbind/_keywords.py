# SPDX-License-Identifier: Apache-2.0
"""Keyword arguments on the way to a function, where all of them are static."""

import pickle
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np


class _Pickled:
    """A value with NumPy's arrays or numbers in it, which would be operands else. Equal where they are."""

    def __init__(self, value: Any) -> None:
        self._bytes = pickle.dumps(value)

    def value(self) -> Any:
        return pickle.loads(self._bytes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Pickled) and self._bytes == other._bytes

    def __hash__(self) -> int:
        return hash(self._bytes)


def static(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments without arrays.

    Raises:
        TypeError: one has an array of JAX's.
    """
    return {name: _static(name, value) for name, value in kwargs.items()}


def _static(name: str, value: Any) -> Any:
    leaves = jax.tree.leaves(value)
    if any(isinstance(leaf, jax.Array) for leaf in leaves):
        raise TypeError(
            f"the keyword argument {name!r} has an array of JAX's, and keyword arguments are static: "
            f"pass it by position, or numpy.asarray of it"
        )
    if any(isinstance(leaf, (np.ndarray, np.generic)) for leaf in leaves):
        return _Pickled(value)
    return value


def load_kwargs(kwargs_dump: Mapping[str, Any], /) -> dict[str, Any]:
    """The keyword arguments of a call: a dictionary that is the function's own."""
    return {
        name: value.value() if type(value) is _Pickled else value
        for name, value in kwargs_dump.items()
    }

# SPDX-License-Identifier: Apache-2.0
"""Static arguments of native functions: checked, and as XLA's FFI has them."""

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._signature import Parameter

# Where an array is given for a static value.
_order = "; arrays come first, then static values, as inspect.signature shows"


def normalize(function: str, p: Parameter, value: Any) -> Any:
    """A static argument as a plain Python value, of which two that are equal are one.

    Raises:
        TypeError: it is of another kind.
        OverflowError: the number does not fit.
        ValueError: a text that cannot be passed.
    """
    where = f"{function}: argument {p.name!r}"
    if value is None and p.optional:
        return None
    if p.form == "string":
        if not isinstance(value, str):
            _refuse_traced(where, value)
            hint = _order if hasattr(value, "dtype") else ""
            raise TypeError(f"{where} is {value!r}, expected a string{hint}")
        return text(where, value)
    if p.form == "dict":
        if not isinstance(value, Mapping):
            _refuse_traced(where, value)
            raise TypeError(f"{where} is {value!r}, expected a dictionary")
        return _plain(where, value)
    if p.form == "list":
        items = _items(where, value)
        if items is None:
            raise TypeError(f"{where} is {value!r}, expected a list of {p.dtype}")
        return tuple(number(where, str(p.dtype), v) for v in items)
    return number(where, str(p.dtype), value)


def normalize_for(function: str, overloads: Sequence[Parameter], value: Any) -> Any:
    """The same for a parameter of several overloads, which can differ in the number's type: the first
    that holds the value decides.
    """
    error: Exception | None = None
    for p in overloads:
        try:
            return normalize(function, p, value)
        except (TypeError, OverflowError) as failed:
            error = error or failed
    assert error is not None
    raise error


def _refuse_traced(where: str, value: Any) -> None:
    if isinstance(value, jax.core.Tracer):
        raise TypeError(
            f"{where} is static, and is computed inside the program here; mark it with "
            f"static_argnames=, or make it a Python value"
        )


def check_key(where: str, key: Any) -> None:
    if not isinstance(key, str) or not key:
        raise TypeError(f"{where} has the key {key!r}, expected strings with characters")
    text(f"{where}: the key", key)


def text(where: str, value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where} is {value!r}, which UTF-8 does not hold") from error
    return value


def _items(where: str, value: Any) -> list[Any] | None:
    """The items of a list, each as it is: NumPy would give all of them one type."""
    _refuse_traced(where, value)
    if isinstance(value, (list, tuple, range)):
        return None if any(map(_is_array, value)) else list(value)
    if not hasattr(value, "__array__"):
        return None
    array = np.asarray(value)
    return array.tolist() if array.ndim == 1 else None


def _is_array(value: Any) -> bool:
    return isinstance(value, (list, tuple)) or getattr(value, "ndim", 0) != 0


def number(where: str, dtype: str, value: Any) -> Any:
    wanted: type
    _refuse_traced(where, value)
    if _is_array(value):
        raise TypeError(f"{where} is an array, expected one {dtype}{_order}")
    value = value.item() if hasattr(value, "item") else value
    if dtype == "bool":
        if not isinstance(value, bool):
            raise TypeError(f"{where} is {value!r}, expected True or False")
        return value
    if dtype.lstrip("u").startswith("int"):
        wanted = int
        try:
            out = operator.index(value)
        except TypeError:
            raise TypeError(f"{where} is {value!r}, expected an integer ({dtype})") from None
        limits = jnp.iinfo(dtype)
        if not limits.min <= out <= limits.max:
            raise OverflowError(f"{where} is {value!r}, which {dtype} does not hold")
        return out
    wanted = complex if dtype.startswith("complex") else float
    if isinstance(value, (str, bytes)):
        raise TypeError(f"{where} is {value!r}, expected a number ({dtype})")
    try:
        found = wanted(value)
    except (TypeError, ValueError):
        raise TypeError(f"{where} is {value!r}, expected a number ({dtype})") from None
    except OverflowError:
        raise OverflowError(f"{where} is an integer that {dtype} does not hold") from None
    with np.errstate(over="ignore"):
        fits = np.isfinite(np.asarray(found, dtype)) or not np.isfinite(found)
    if not fits:
        raise OverflowError(f"{where} is {value!r}, which {dtype} does not hold")
    return found


def _plain(where: str, value: Any) -> Any:
    """The plain values of a dictionary."""
    if isinstance(value, Mapping):
        for key in value:
            check_key(where, key)
        return {k: _plain(f"{where}[{k!r}]", v) for k, v in value.items()}
    if isinstance(value, bool):
        return value
    if isinstance(value, str):
        return text(where, value)
    if isinstance(value, np.generic):
        return _plain(where, value.item())
    if isinstance(value, int):
        return number(where, "int64", value)
    if isinstance(value, float):
        return value
    items = _items(where, value)
    if items is not None:
        items = [_plain(where, v) for v in items]
        if all(isinstance(v, (int, float)) for v in items):
            return tuple(items)
    raise TypeError(
        f"{where} is {value!r}; a dictionary holds numbers, truth values, strings, lists of numbers "
        f"and dictionaries"
    )


def ffi_value(p: Parameter, value: Any) -> Any:
    """A normalized value as XLA's FFI has it: NumPy scalar or array, string, dictionary."""
    if p.form in ("string", "dict"):
        return _ffi_plain(value)
    dtype = np.dtype(str(p.dtype))
    if p.form == "list" and dtype.kind == "b":
        return np.asarray(value, np.uint8)  # XLA has no arrays of truth values here
    if p.form == "list" or dtype.kind == "c":
        # JAX has no complex attributes: an array of the parts.
        array = np.atleast_1d(np.asarray(value, dtype))
        return array.view(array.real.dtype) if dtype.kind == "c" else array
    return dtype.type(value)


def _ffi_plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _ffi_plain(v) for k, v in value.items()}
    if isinstance(value, tuple):
        floats = any(isinstance(v, float) for v in value)
        return np.asarray(value, np.float64 if floats else np.int64)
    if isinstance(value, (bool, str)):
        return value
    return np.int64(value) if isinstance(value, int) else np.float64(value)

# SPDX-License-Identifier: Apache-2.0
"""`ffi`: a Function of a target that somebody else registered."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import _compat, _lowering, _options, _static_values
from ._call_site import CallSite
from ._errors import PlatformError
from ._function import Function
from ._native_function import NativeCallee


class _FfiCallee(NativeCallee):
    def __init__(self, target: str, platforms: Sequence[str], options: Mapping[str, Any]) -> None:
        super().__init__(target, dict.fromkeys(platforms, target), f"content:ffi:{target}", options)
        self.target = target

    @property
    def is_durable(self) -> bool:
        return True

    def ffi_target(self, site: CallSite, operands: Sequence[Any], results: Sequence[Any]) -> Any:
        attributes = {k: _ffi_attribute(v) for k, v in site.arguments.tree[1].items()}
        return _lowering.FfiTarget(self.target, attributes)

    def check_arrays(self, platform: str, operands: Sequence[Any], results: Sequence[Any]) -> None:
        """Only the target knows what it takes."""


def _ffi_attribute(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _ffi_attribute(v) for k, v in value.items()}
    if isinstance(value, str) and value.startswith(_typed_mark):
        dtype, shape, data = value.removeprefix(_typed_mark).split("|")
        lengths = tuple(int(n) for n in shape.split(",") if n)
        array = np.frombuffer(bytes.fromhex(data), np.dtype(dtype)).reshape(lengths)
        return array if lengths else array[()]
    return value


# What stands in a call's text for a NumPy value.
_typed_mark = "\0numpy|"


def _ffi_static(name: str, key: str, value: Any) -> Any:
    if isinstance(value, jax.core.Tracer):
        raise TypeError(
            f"{name}: {key!r} is passed by keyword, so it is an attribute and has to be a value; "
            f"arrays are passed by position"
        )
    where = f"{name}: the attribute {key!r}"
    if isinstance(value, Mapping):
        for k in value:
            _static_values.check_key(where, k)
        return {k: _ffi_static(name, k, v) for k, v in value.items()}
    if type(value) is str:
        return _static_values.text(where, value)
    if type(value) is int:
        return _static_values.number(where, "int64", value)
    if isinstance(value, (bool, int, float)) and not isinstance(value, np.generic):
        return value
    if isinstance(value, (np.generic, np.ndarray, jax.Array, list, tuple)):
        array = np.asarray(value)
        if array.dtype.kind in "biufc" or array.dtype.kind == "V":
            shape = ",".join(map(str, array.shape))
            return f"{_typed_mark}{array.dtype.name}|{shape}|{array.tobytes().hex()}"
    raise TypeError(
        f"{name}: the attribute {key!r} is {value!r}; expected a number, a string, an array or a "
        f"dictionary of these"
    )


class _FfiFunction(Function[..., Any]):
    """A Function of a target that somebody else registered. Made by `ffi`."""

    def __init__(self, callee: _FfiCallee, result_shape_dtypes: Any) -> None:
        self._begin(callee, result_shape_dtypes)
        self.__name__ = self.__qualname__ = callee.target
        self.__module__ = "jaxbridge.ffi"
        self.__doc__ = f"The FFI target {callee.target!r}."

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Calls the target: arrays by position, attributes by keyword."""
        name = self.callee.name
        attributes = {k: _ffi_static(name, k, v) for k, v in kwargs.items()}
        arrays = [x if _compat.is_ref(x) or hasattr(x, "dtype") else jnp.asarray(x) for x in args]
        return super().__call__(*arrays, **attributes)


def ffi(
    target_name: str,
    result_shape_dtypes: Any,
    *,
    inout: Mapping[int, int] | None = None,
    elementwise: bool = False,
    vmap_method: str | None = None,
    has_side_effect: bool | None = None,
    platforms: Sequence[str] = _options.platforms,
) -> Function[..., Any]:
    """A Function of an FFI target that is registered with JAX: `jax.ffi.register_ffi_target`.

    Unlike `jax.ffi.ffi_call` it takes `jax.Ref`s, and rules for derivatives and batching. A Ref is one
    more result of the target, after those that are declared, in the memory of its operand.

    Args:
        target_name: under which it is registered.
        result_shape_dtypes: as `call` takes it; a callable gets operands and attributes. () where Refs
            are the only results.
        inout: operands that are updated in place: from their positions to those of results.
        elementwise: as `call` takes it.
        vmap_method: as `call` takes it.
        has_side_effect: as `call` takes it.
        platforms: where the target is registered.

    Returns:
        `f(*arrays, **attributes)`, with attributes as `jax.ffi.ffi_call` takes them: NumPy scalars have
        their own types, Python's integers are int64, floats float64.
    """
    if not isinstance(target_name, str) or not target_name:
        raise TypeError(
            f"ffi: the target is {target_name!r}; expected the name of one, as "
            f"jax.ffi.register_ffi_target(name, ...) has it"
        )
    if unknown := set(platforms) - set(_options.platforms):
        raise PlatformError(f"ffi: platforms= has {sorted(unknown)}; expected cpu, cuda")
    options = {
        "inout": inout,
        "elementwise": elementwise,
        "vmap_method": vmap_method,
        "has_side_effect": has_side_effect,
    }
    return _FfiFunction(_FfiCallee(target_name, tuple(platforms), options), result_shape_dtypes)

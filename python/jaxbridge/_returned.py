# SPDX-License-Identifier: Apache-2.0
"""What a function returned: checked against what is declared, and stored in XLA's memory."""

import cmath
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from ._errors import ResultError
from ._spec import Slot

if TYPE_CHECKING:
    from ._call_site import CallSite

# (dtype, shape) of each array.
Described = Sequence[tuple[Any, tuple[int, ...]]]
# Of what the function returned, views of its own results, and all result buffers.
Finish = Callable[[Any, list[Any], list[Any]], None]

_no_rule_for_scalar = object()


def finisher(site: "CallSite", adapter: Any, expected: Described) -> Finish:
    """Checks what the function returned, and copies results that it did not write itself."""
    if site.out is None and expected:
        return _result_writer(site, adapter, expected)
    check = _returned_check(site, adapter)
    return lambda value, own, buffers: None if value is None else check(value, buffers)


def _result_writer(site: "CallSite", adapter: Any, expected: Described) -> Finish:
    """Checks what the function returned against `expected`, then copies it into the results."""
    store, signature = adapter.store, adapter.signature
    tree = site.own_results
    paths = tree.paths()
    treedef: Any = jax.tree.structure(tree.fill([0] * len(expected)))

    def checked(value: Any, position: int) -> Any:
        dtype, shape = expected[position]
        got = signature(value)
        if got is None:
            try:
                scalar = _as_scalar(value, dtype, shape)
            except OverflowError:
                raise ResultError(
                    f"{site.name}: result{paths[position]}: {value!r} does not fit "
                    f"{_text(dtype, shape)}"
                ) from None
            if scalar is not _no_rule_for_scalar:
                return scalar
            raise ResultError(
                f"{site.name}: result{paths[position]}: expected an array of {adapter.name}, "
                f"{_text(dtype, shape)}, got {type(value).__module__}.{type(value).__qualname__}"
                f"{_hint(value)}"
            )
        if (got[0] != shape and (shape or got[0] != adapter.scalar_shape)) or got[1] != dtype:
            raise ResultError(
                f"{site.name}: result{paths[position]}: expected {_text(dtype, shape)}, "
                f"got {_text(got[1], got[0])}; change the declared result or convert in the function"
            )
        return value

    if isinstance(tree.tree, Slot):
        return lambda value, own, buffers: store(checked(value, 0), own[0])

    def write(value: Any, own: list[Any], buffers: list[Any]) -> None:
        leaves, got = jax.tree.flatten(value)
        if treedef != got:
            leaves, plain = jax.tree.flatten(_plain_tuples(value))
            if treedef != plain:
                raise ResultError(
                    f"{site.name}: expected the results {_structure(treedef)}, got {_structure(got)}"
                    f"{_hint(value)}"
                )
        # Everything is checked before anything is written.
        values = [checked(leaf, position) for position, leaf in enumerate(leaves)]
        for leaf, view in zip(values, own, strict=True):
            store(leaf, view)

    return write


def _returned_check(site: "CallSite", adapter: Any) -> Callable[[Any, list[Any]], None]:
    """What looks at the value that a function returned which writes its results, or has none.

    Many return the arrays that they have written. Another array was to be a result, and nobody would
    see that the result is what was in that memory before, or that there is none.
    """
    if site.out is not None:
        why = (
            f"although out={site.out!r} says that it writes its results; write to the array that it gets "
            f"there, or drop out="
        )
    elif site.options.inout:
        why = (
            "although all results are arguments in place (inout=); write to the argument, or declare one "
            "more result"
        )
    else:
        why = (
            "although no result is declared; declare it (where a callable does that, it has to return "
            "it), or return None"
        )

    def is_written(array: Any, buffers: list[Any]) -> bool:
        if not buffers or 0 in array.shape:
            return 0 in array.shape
        address = _address(array, adapter)
        return any(b.pointer <= address < b.pointer + b.nbytes for b in buffers)

    def check(value: Any, buffers: list[Any]) -> None:
        try:
            leaves = jax.tree.leaves(value)
        except (TypeError, ValueError):  # keys without an order, which JAX cannot take apart
            return
        for leaf in leaves:
            if not (isinstance(getattr(leaf, "shape", None), tuple) and hasattr(leaf, "dtype")):
                continue
            if not is_written(leaf, buffers):
                raise ResultError(
                    f"{site.name}: the function returned an array, "
                    f"{leaf.dtype}[{','.join(map(str, leaf.shape))}], {why}"
                )

    return check


def _address(array: Any, adapter: Any) -> int:
    """Where an array has its memory, also one of another framework; -1 where nobody can tell."""
    try:
        return adapter.memory(array)[0]
    except Exception:
        try:
            interface = getattr(array, "__cuda_array_interface__", None)
            return (interface or np.asarray(array).__array_interface__)["data"][0]
        except Exception:
            return -1


def _plain_tuples(value: Any) -> Any:
    """`value` with plain tuples for named ones, which NumPy's linalg and SciPy return."""
    if isinstance(value, tuple):
        return tuple(map(_plain_tuples, value))
    if type(value) is list:
        return list(map(_plain_tuples, value))
    if type(value) is dict:
        return {key: _plain_tuples(v) for key, v in value.items()}
    return value


def _hint(value: Any) -> str:
    if value is None:
        return "; say out= where the function writes its results, or inout= where it updates an argument"
    if isinstance(value, jax.Array):
        return "; a function outside of JAX computes with its own library, and must not call JAX"
    if isinstance(value, np.ma.MaskedArray):
        return "; JAX has no masks: return x.filled(value), or the mask as one more result"
    return ""


def _structure(treedef: Any) -> str:
    return str(treedef).removeprefix("PyTreeDef(").removesuffix(")")


def _text(dtype: Any, shape: tuple[int, ...]) -> str:
    dtype = np.dtype(dtype)
    # The name does not tell the byte order.
    name = dtype.name if dtype.isnative else f"{dtype.name} ({dtype.str})"
    return f"{name}[{','.join(map(str, shape))}]"


def _as_scalar(value: Any, dtype: Any, shape: tuple[int, ...]) -> Any:
    """A Python number as a rank-0 result of a kind that can hold it, as weak types have it."""
    kinds = {bool: "b", int: "iufc", float: "fc", complex: "c"}
    if shape != () or type(value) not in kinds:
        return _no_rule_for_scalar
    kind = (
        "b"
        if dtype == np.bool_
        else "c"
        if jax.numpy.issubdtype(dtype, np.complexfloating)
        else ("f" if jax.numpy.issubdtype(dtype, np.floating) else "i")
    )
    if kind not in kinds[type(value)]:
        return _no_rule_for_scalar
    with np.errstate(over="ignore"):
        scalar = np.asarray(value, dtype)
    if kind in "fc" and cmath.isfinite(value) and not np.isfinite(scalar):
        raise OverflowError
    return scalar

# SPDX-License-Identifier: Apache-2.0
"""Which leaves of a call's arguments are arrays, and these as JAX takes them."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import _compat, _plan
from ._spec import Slot, Template

# Most static values are these, and to find out about others takes long.
_never = (bool, int, float, str)


def take(name: str, leaves: list[Any], treedef: Any) -> list[int]:
    """The positions of the leaves that are arrays, which become JAX's; the others are static.

    Args:
        name: of the function, for messages.
        leaves: of the arguments; arrays of others are replaced.
        treedef: of the arguments.

    Raises:
        TypeError: an array that JAX does not have, or of another library; the message names the
            argument.
    """
    positions = []
    for position, leaf in enumerate(leaves):
        if type(leaf) is not _compat.array_type:
            if type(leaf) in _never:
                continue
            if not is_operand(leaf):
                if _is_of_others(type(leaf)):
                    raise TypeError(
                        f"{_where(name, position, treedef)} is of {type(leaf).__module__}."
                        f"{type(leaf).__qualname__}, an array of another library, which is no argument of "
                        f"JAX's; pass jaxbridge.from_external(x)"
                    )
                continue
            leaves[position] = as_operand(leaf, functools.partial(_where, name, position, treedef))
        positions.append(position)
    return positions


# Of the operands, each with its position among the leaves.
Types = Sequence[tuple[int, jax.ShapeDtypeStruct]]


def types_of(leaves: Sequence[Any], positions: Sequence[int]) -> Types:
    """The types of operands; of a Ref that of its value."""

    def of(x: Any) -> jax.ShapeDtypeStruct:
        aval = _compat.ref_value_aval(x) if _compat.is_ref(x) else x
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype)

    return [(position, of(leaves[position])) for position in positions]


def put(leaves: Sequence[Any], values: Sequence[tuple[int, Any]]) -> list[Any]:
    """The leaves with others at some positions."""
    out = list(leaves)
    for position, value in values:
        out[position] = value
    return out


def is_operand(leaf: Any) -> bool:
    """Whether an argument is an array."""
    return (
        isinstance(leaf, (jax.Array, np.ndarray, np.generic))
        or _compat.is_ref(leaf)
        or hasattr(type(leaf), "__jax_array__")
        or _compat.is_typed_literal(leaf)
    )


def _is_of_others(kind: type) -> bool:
    """Whether these are arrays of another library: what is static is part of the program."""
    return (
        hasattr(kind, "__dlpack__")
        or hasattr(kind, "__cuda_array_interface__")
        or hasattr(kind, "__array_interface__")
    )


def _where(name: str, position: int, treedef: Any) -> str:
    tree = jax.tree.unflatten(treedef, [Slot(i) for i in range(treedef.num_leaves)])
    return f"{name}: argument {_plan.argument_name(Template(tree).paths()[position])}"


def as_operand(leaf: Any, where: Callable[[], str]) -> Any:
    """An array as JAX's; a Ref as it is.

    Args:
        leaf: the array.
        where: what messages begin with.

    Raises:
        TypeError: JAX does not have it, or not all of its values.
    """
    if _compat.is_ref(leaf):
        return leaf
    if _compat.is_key_array(leaf):
        raise TypeError(
            f"{where()} is an array of PRNG keys, which have no memory of a plain dtype; pass "
            f"jax.random.key_data(key)"
        )
    if isinstance(leaf, jax.Array):
        return leaf
    if isinstance(leaf, (np.ndarray, np.generic)) and not leaf.dtype.isnative:
        raise TypeError(
            f"{where()} is an array of another byte order ({leaf.dtype.str}), and JAX has the machine's "
            f"own only; pass x.astype({leaf.dtype.name!r})"
        )
    try:
        array = jnp.asarray(leaf)
    except TypeError as error:
        raise TypeError(
            f"{where()} is an array of dtype {getattr(leaf, 'dtype', type(leaf))}, which JAX does not have"
        ) from error
    if (
        isinstance(leaf, (np.ndarray, np.generic))
        and leaf.dtype.kind in "iu"
        and array.dtype.itemsize < leaf.dtype.itemsize
        and not np.array_equal(leaf.astype(array.dtype), leaf)
    ):
        raise TypeError(
            f"{where()} has values that do not fit {array.dtype.name}, and JAX has {leaf.dtype.name} only "
            f"with 64-bit types enabled: set jax_enable_x64"
        )
    return array

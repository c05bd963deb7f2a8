# SPDX-License-Identifier: Apache-2.0
"""Which operand is which result: `inout`, and Refs."""

from collections.abc import Sequence
from typing import Any

import jax

from . import _compat
from ._spec import Slot


def pair(
    name: str, inout: Sequence[tuple[int | str, int]], arguments: Any, results: Any
) -> tuple[list[tuple[int, int]], Any]:
    """(operand, result) pairs of `inout`, and the tree of the results that remain.

    Args:
        name: of the function, for messages.
        inout: (argument, result) at the top level, as the option has it.
        arguments: (args, kwargs) with slots for operands.
        results: the declared results, slots.

    Raises:
        TypeError, ValueError: what `inout` names is not there, or is of other arrays.
    """
    if not inout:
        return [], results
    args, kwargs = arguments
    is_sequence = isinstance(results, (tuple, list))
    entries = list(results) if is_sequence else [results]
    pairs: list[tuple[int, int]] = []
    for argument, position in inout:
        try:
            given = kwargs[argument] if isinstance(argument, str) else args[argument]
        except (KeyError, IndexError):
            raise TypeError(
                f"{name}: inout names the argument {argument!r}, which this call does not have: it has "
                f"{len(args)} by position and {sorted(kwargs) or 'none'} by keyword; name one as it is "
                f"passed, by position or by keyword"
            ) from None
        if position >= len(entries):
            raise ValueError(
                f"{name}: inout names result {position}, of {len(entries)} in all, counted from 0"
            )
        a, a_tree = jax.tree.flatten(given, is_leaf=lambda x: isinstance(x, Slot))
        r, r_tree = jax.tree.flatten(entries[position], is_leaf=lambda x: isinstance(x, Slot))
        trees: Any = (a_tree, r_tree)
        if trees[0] != trees[1] or not all(isinstance(x, Slot) for x in a):
            raise TypeError(
                f"{name}: inout: argument {argument!r} is {_shown(a, a_tree)}, and result {position} "
                f"{_shown(r, r_tree)}; expected one tree of arrays. A tuple or list of results is several "
                f"results: where such an argument is to be one of them, declare (result,)"
            )
        pairs += [(x.index, y.index) for x, y in zip(a, r, strict=True)]
    taken = {position for _, position in inout}
    remaining = [e for i, e in enumerate(entries) if i not in taken]
    own = remaining[0] if len(remaining) == 1 else tuple(remaining) or None
    return pairs, own


def _shown(leaves: Sequence[Any], tree: Any) -> str:
    """A tree as messages show it: `*` for an array."""
    if not leaves:
        return "no array"
    marks = ["*" if isinstance(x, Slot) else repr(x) for x in leaves]
    try:
        return str(jax.tree.unflatten(tree, [_Mark(m) for m in marks]))
    except Exception:  # a node of the user's that takes nothing but arrays
        return str(tree)


class _Mark(str):
    __slots__ = ()

    __repr__ = str.__str__


def check(
    name: str,
    pairs: Sequence[tuple[int, int]],
    operands: Sequence[Any],
    results: Sequence[tuple[tuple[int, ...], Any]],
) -> None:
    """Raises TypeError where an operand and its result cannot be one memory."""
    if len({operand for operand, _ in pairs}) != len(pairs):
        if any(_compat.is_ref(operands[operand]) for operand, _ in pairs):
            raise TypeError(
                f"{name}: an argument is declared in place (inout=) and is a jax.Ref, which is in place "
                f"anyway; pass its value, ref[...], or drop it from inout="
            )
        raise TypeError(
            f"{name}: inout names one argument twice; an argument can be one result only"
        )
    seen: dict[int, int] = {}
    for operand, result in pairs:
        x = operands[operand]
        aval = _compat.ref_value_aval(x) if _compat.is_ref(x) else x
        shape, dtype = results[result]
        if tuple(aval.shape) != shape or aval.dtype != dtype:
            raise TypeError(
                f"{name}: inout: an argument of {aval.dtype}{list(aval.shape)} cannot be a "
                f"result of {dtype}{list(shape)}: they are one memory"
            )
    for i, x in enumerate(operands):
        if _compat.is_ref(x) and seen.setdefault(id(x), i) != i:
            raise TypeError(f"{name}: one jax.Ref is passed as two arguments; JAX allows that once")

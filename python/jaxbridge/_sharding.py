# SPDX-License-Identifier: Apache-2.0
"""Which axes of a call's arrays may be split over devices: sharding rules, and what follows from them.

Axes that have one name are split alike. One is split where its name stands in some operand and in every
result: each device can then make its part of all results from its parts of the operands.
"""

import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ._errors import ShardingError
from ._plan import argument_name
from ._spec import Template

if TYPE_CHECKING:
    from ._call_site import CallSite

Shape = tuple[int, ...]
Type = tuple[Shape, Any]  # shape and dtype
Named = Sequence[tuple[str, Shape]]  # arrays: what errors call them, and their shapes
# The names of the axes of each array; None: the axis is not split.
Names = tuple[tuple[str | None, ...], ...]

_name = re.compile(r"[A-Za-z][A-Za-z0-9_]*")


@dataclasses.dataclass(frozen=True)
class Axes:
    """The names of the axes of a call's operands, and of its results."""

    operands: Names
    results: Names


@dataclasses.dataclass(frozen=True)
class _Array:
    """What a rule says of one array."""

    has_more: bool  # any axes before the named ones
    names: tuple[str, ...]


class Rule:
    """A sharding rule as Shardy writes it: the names of axes, array by array.

    Args:
        function: what errors call the function.
        text: "i j, j -> i"; `...` before the names stands for more axes, as many in each array.

    Raises:
        TypeError, ShardingError: it is none.
    """

    def __init__(self, function: str, text: str) -> None:
        if not isinstance(text, str):
            raise TypeError(
                f"{function}: the sharding rule is {text!r}; expected a string such as 'i j, j -> i'"
            )
        self._function = function
        self._text = text
        sides = text.split("->")
        if len(sides) != 2:
            raise self._error("expected one '->', between the operands and the results")
        self._operands, self._results = (
            [self._array(part.split()) for part in side.split(",")] if side.strip() else []
            for side in sides
        )

    def _array(self, words: list[str]) -> _Array:
        has_more = words[:1] == ["..."]
        names = words[1:] if has_more else words
        for position, name in enumerate(names):
            if not _name.fullmatch(name):
                raise self._error(
                    f"{name!r} stands where a name is expected: a letter, then letters and digits, or "
                    f"'...' before all names (products of axes, as '(i j)', are not supported)"
                )
            if name in names[:position]:
                raise self._error(f"{name!r} stands twice in one array")
        return _Array(has_more, tuple(names))

    def _error(self, what: str) -> ShardingError:
        return ShardingError(f"{self._function}: the sharding rule {self._text!r}: {what}")

    def of_call(
        self,
        arguments: Any,
        operands: Sequence[Type],
        result_tree: Any,
        results: Sequence[Type],
        in_place: Iterable[tuple[int, int]],
        refs: Iterable[int],
    ) -> Axes:
        """As `fit`, of trees with slots and types in their order, hidden results of Refs last."""
        paths, result_paths = Template(arguments).paths(), Template(result_tree).paths()
        return self.fit(
            [(f"argument {argument_name(paths[i])}", s) for i, (s, _) in enumerate(operands)],
            [(f"result{path}", results[i][0]) for i, path in sorted(result_paths.items())],
            in_place,
            refs,
        )

    def fit(
        self,
        operands: Named,
        results: Named,
        in_place: Iterable[tuple[int, int]],
        refs: Iterable[int],
    ) -> Axes:
        """The names of the axes of the arrays of one call.

        Args:
            operands: its operands.
            results: its declared results.
            in_place: pairs of an operand and the result that it is.
            refs: operands that each have one more result, after the declared ones.

        Raises:
            ShardingError: the rule has other ranks, or one name for axes of two lengths.
        """
        for kind, patterns, given in (
            ("operands", self._operands, operands),
            ("results", self._results, results),
        ):
            if len(patterns) != len(given):
                names = ", ".join(where for where, _ in given)
                raise self._error(
                    f"it is for {len(patterns)} {kind}, and the call has {len(given)}"
                    + (f" ({names})" if names else "")
                )
        arrays = list(zip([*self._operands, *self._results], [*operands, *results], strict=True))
        more: dict[str, tuple[int, str]] = {}
        lengths: dict[str, tuple[int, str]] = {}
        named: list[tuple[str, ...]] = []
        for said, (where, shape) in arrays:
            count = len(shape) - len(said.names)
            if count < 0 or (count > 0 and not said.has_more):
                raise self._error(
                    f"it has {len(said.names)} axes for {where}, whose shape is {shape}"
                )
            if said.has_more:
                self._agree(more, "...", count, where, "axes")
            axes = (*(f"...{i}" for i in range(count)), *said.names)
            for name, n in zip(axes, shape, strict=True):
                if _can_be_split(n):  # one of length 1 is broadcast
                    self._agree(lengths, name, n, where, "elements")
            named.append(axes)
        ours, theirs = named[: len(operands)], named[len(operands) :]
        for operand, result in in_place:
            if result < len(theirs) and ours[operand] != theirs[result]:
                raise self._error(
                    f"{operands[operand][0]} is updated in place, and has other axes than "
                    f"{results[result][0]}, which it becomes"
                )
        return Axes(tuple(ours), (*theirs, *(ours[i] for i in refs)))

    def _agree(
        self, seen: dict[str, tuple[int, str]], name: str, n: int, where: str, what: str
    ) -> None:
        before, first = seen.setdefault(name, (n, where))
        if before != n:
            raise self._error(f"{name!r} has {before} {what} in {first}, and {n} in {where}")


def _can_be_split(n: Any) -> bool:
    return isinstance(n, int) and n > 1  # a symbolic length is no int


# ---- what of a call is split ---------------------------------------------------------------------


def unnamed(operands: Iterable[Type], results: Iterable[Type]) -> Axes:
    """For a call of whose arrays nothing is said."""

    def of(types: Iterable[Type]) -> Names:
        return tuple((None,) * len(shape) for shape, _ in types)

    return Axes(of(operands), of(results))


def splittable(
    site: "CallSite", operands: Sequence[Shape], results: Sequence[Shape]
) -> Axes | None:
    """The axes that may be split in a call with arrays of these shapes, or None where none may.

    The shapes are those that the primitive has: under vmap with the batch axes, which come first.
    """
    if site.has_side_effect or not results:
        return None
    if not all(isinstance(n, int) for shape in (*operands, *results) for n in shape):
        return None  # a symbolic length, which has no parts
    if site.options.elementwise:
        ours, theirs = _from_the_end(operands), _from_the_end(results)
    elif site.axes is not None:
        ours = _with_batch_axes(site.axes.operands, operands)
        theirs = _with_batch_axes(site.axes.results, results)
    else:
        return None
    lengths = [dict(zip(n, s, strict=True)) for n, s in zip(theirs, results, strict=True)]
    split = {
        name
        for name, n in lengths[0].items()
        if name is not None
        and _can_be_split(n)
        and all(one.get(name) == n for one in lengths)
        and any((name, n) in zip(a, s, strict=True) for a, s in zip(ours, operands, strict=True))
    }
    if not split:
        return None

    def only_split(names: Names, shapes: Sequence[Shape]) -> Names:
        return tuple(
            tuple(name if name in split and n != 1 else None for name, n in zip(a, s, strict=True))
            for a, s in zip(names, shapes, strict=True)
        )

    return Axes(only_split(ours, operands), only_split(theirs, results))


def _from_the_end(shapes: Sequence[Shape]) -> Names:
    # As NumPy aligns them.
    return tuple(tuple(f"axis{len(s) - i}" for i in range(len(s))) for s in shapes)


def _with_batch_axes(names: Names, shapes: Sequence[Shape]) -> Names:
    # Names that no rule can have.
    return tuple(
        (*(f"batch {i}" for i in range(len(s) - len(a))), *a)
        for a, s in zip(names, shapes, strict=True)
    )


def specs_of_results(
    site: "CallSite",
    operands: Sequence[Shape],
    specs: Sequence[Sequence[Any]],
    results: Sequence[Shape],
) -> list[tuple[Any, ...]]:
    """How results lie on the explicit axes of a mesh, from how the operands do.

    Args:
        site: the call.
        operands: their shapes.
        specs: for each operand the mesh axes, or tuples of them, over which its axes are split.
        results: their shapes.

    Raises:
        ShardingError: an operand is split where the call can't be, or two of them differently.
    """
    axes = splittable(site, operands, results)
    over: dict[str, tuple[Any, str]] = {}
    for i, spec in enumerate(specs):
        for position, mesh_axes in enumerate(spec):
            if not mesh_axes:
                continue
            name = axes.operands[i][position] if axes is not None else None
            where = f"axis {position} of argument {site.operand_name(i)}"
            if name is None:
                raise ShardingError(
                    f"{site.name}: {where} is sharded over {_shown(mesh_axes)}, an explicit axis of the "
                    f"mesh, and the call can't be split there: say how with defsharding or "
                    f"elementwise=True, call it inside jax.shard_map, or gather the argument first with "
                    f"jax.sharding.reshard"
                )
            before, first = over.setdefault(name, (mesh_axes, where))
            if before != mesh_axes:
                raise ShardingError(
                    f"{site.name}: {first} is sharded over {_shown(before)}, and {where}, which goes with "
                    f"it, over {_shown(mesh_axes)}; bring one to the other with jax.sharding.reshard"
                )
    taken: dict[Any, str] = {}
    for mesh_axes, where in over.values():
        for axis in _tuple(mesh_axes):
            if axis in taken:
                raise ShardingError(
                    f"{site.name}: {taken[axis]} and {where} are both sharded over {axis!r}, and a result "
                    f"can be only once; change one with jax.sharding.reshard"
                )
            taken[axis] = where
    if axes is None:
        return [()] * len(results)
    return [tuple(over[n][0] if n in over else None for n in names) for names in axes.results]


def _tuple(mesh_axes: Any) -> tuple[Any, ...]:
    return mesh_axes if isinstance(mesh_axes, tuple) else (mesh_axes,)


def _shown(mesh_axes: Any) -> str:
    return " and ".join(repr(axis) for axis in _tuple(mesh_axes))

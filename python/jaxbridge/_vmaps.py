# SPDX-License-Identifier: Apache-2.0
"""The vmaps that a call is under.

A call under vmap stays one call, which remembers its batch axes. So its derivative is that of the
call without them, under the same vmaps: the user's rules see what the user's function was called with.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Flat = Callable[..., list[Any]]


class Vmap(NamedTuple):
    """One vmap: its size, and for each operand the batch axis, or None."""

    size: int
    axes: tuple[int | None, ...]

    @classmethod
    def of(cls, operands: Sequence[Any], axes: Sequence[int | None]) -> "Vmap":
        """That of which a batching rule is asked."""
        sizes = [x.shape[a] for x, a in zip(operands, axes, strict=True) if a is not None]
        return cls(sizes[0], tuple(axes))


def mapped(fun: Flat, vmaps: Sequence[Vmap], operands: Sequence[int | None]) -> Flat:
    """`fun` under `vmaps`, innermost first; the batch axes of its results are in front.

    Args:
        fun: takes arrays, and returns a list of them, or None for some.
        vmaps: of a call.
        operands: for each argument of `fun` which operand of that call has its batch axes; None for one
            with the axes in front, as results have them.
    """
    for vmap in vmaps:
        axes = tuple(0 if i is None else vmap.axes[i] for i in operands)
        fun = jax.vmap(fun, in_axes=axes, out_axes=0, axis_size=vmap.size)
    return fun


def one_by_one(fun: Flat, vmaps: Sequence[Vmap], unroll: bool) -> Flat:
    """As `mapped`, for the operands of the call itself: `fun` runs once for each element, in a loop."""
    for vmap in vmaps:
        fun = _loop(fun, vmap, unroll)
    return fun


def _loop(fun: Flat, vmap: Vmap, unroll: bool) -> Flat:
    def loop(*operands: Any) -> list[Any]:
        def step(_: None, moving: list[Any]) -> tuple[None, list[Any]]:
            rest = iter(moving)
            values = [
                x if axis is None else next(rest)
                for x, axis in zip(operands, vmap.axes, strict=True)
            ]
            return None, fun(*values)

        moving = [
            jnp.moveaxis(x, axis, 0)
            for x, axis in zip(operands, vmap.axes, strict=True)
            if axis is not None
        ]
        return list(jax.lax.scan(step, None, moving, length=vmap.size, unroll=unroll)[1])

    return loop


def mapped_transpose(
    fun: Flat, vmaps: Sequence[Vmap], operands: Sequence[int | None], results: Sequence[int]
) -> Flat:
    """As `mapped`; each result is the cotangent of an operand of the call, and gets its shape.

    That of an operand which was not mapped is summed over the batch.
    """
    for vmap in vmaps:
        fun = _one_transpose(mapped(fun, [vmap], operands), [vmap.axes[i] for i in results])
    return fun


def _one_transpose(fun: Flat, axes: Sequence[int | None]) -> Flat:
    def put_back(x: Any, axis: int | None) -> Any:
        if x is None:
            return None
        return jnp.sum(x, 0) if axis is None else jnp.moveaxis(x, 0, axis)

    return lambda *args: [put_back(x, axis) for x, axis in zip(fun(*args), axes, strict=True)]


def lengths(vmaps: Sequence[Vmap]) -> tuple[int, ...]:
    """The batch axes of a result, outermost first."""
    return tuple(vmap.size for vmap in reversed(vmaps))

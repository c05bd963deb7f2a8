# SPDX-License-Identifier: Apache-2.0
"""The custom call that XLA sees, and what `vmap_method` makes of it.

Programs are traced with the primitive of `_primitive`, which becomes this one when it is lowered.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.interpreters import batching, mlir

from . import _compat, _lowering, _sharding
from ._call_site import CallSite

# Shape and dtype.
Result = tuple[tuple[int, ...], Any]

custom_call_p = _compat.Primitive("jaxbridge_custom_call")
custom_call_p.multiple_results = True


def bind(site: CallSite, results: Sequence[Result], operands: Sequence[Any]) -> list[Any]:
    """The custom call, without vmap."""
    if site.options.vmap_method != "batched":
        return _bind(site, results, operands)
    outs = _bind(
        site,
        tuple(((1, *shape), dtype) for shape, dtype in results),
        [jnp.expand_dims(x, 0) for x in operands],
    )
    return [jnp.squeeze(o, 0) for o in outs]


def _bind(site: CallSite, results: Sequence[Result], operands: Sequence[Any]) -> list[Any]:
    operands = _compat.union_manual_axes(operands)
    return list(custom_call_p.bind(*operands, site=site, results=tuple(results)))


def abstract_eval(
    *operands: Any,
    site: CallSite,
    results: tuple[Result, ...],
    specs: Sequence[Sequence[Any]] | None = None,
) -> tuple[list[Any], set[Any]]:
    """The abstract results of a call, and its effects.

    Args:
        operands: abstract values.
        site: the call.
        results: their types.
        specs: how they lie on the explicit axes of a mesh; None: as the sharding rule says.
    """
    effects = {_compat.call_effect} if site.has_side_effect else set()
    if specs is None:
        specs = _specs_of_results(operands, site, results)
    return [
        _compat.result_aval(shape, dtype, operands, spec)
        for (shape, dtype), spec in zip(results, specs, strict=True)
    ], effects


def is_on_explicit_axes(site: CallSite, operands: Sequence[Any]) -> bool:
    """Whether operands are split over explicit axes of a mesh, and the call has to say how it is."""
    # One with a side effect is made once, on whole arrays.
    return not site.has_side_effect and any(any(_compat.explicit_spec(a)) for a in operands)


def _specs_of_results(
    operands: Sequence[Any], site: CallSite, results: tuple[Result, ...]
) -> Sequence[Sequence[Any]]:
    if not is_on_explicit_axes(site, operands):
        return [()] * len(results)
    return _sharding.specs_of_results(
        site,
        [aval.shape for aval in operands],
        [_compat.explicit_spec(aval) for aval in operands],
        [shape for shape, _ in results],
    )


custom_call_p.def_effectful_abstract_eval(abstract_eval)
mlir.register_lowering(custom_call_p, _lowering.lower_call)


# ---- vmap_method ---------------------------------------------------------------------------------
# "sequential" is not here: that is a loop of calls, which `_primitive` makes.


def _batch(
    operands: Sequence[Any],
    dims: Sequence[Any],
    *,
    site: CallSite,
    results: tuple[Result, ...],
) -> tuple[list[Any], list[int]]:
    size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
    mapped = [d is not None for d in dims]
    front = [
        jnp.moveaxis(x, d, 0) if m else x for x, d, m in zip(operands, dims, mapped, strict=True)
    ]
    method = site.options.vmap_method
    if site.options.elementwise:
        outs = _batch_elementwise(site, results, front, mapped, size)
    elif method == "broadcast_all" or method == "expand_dims":
        outs = _batch_expanded(site, results, front, mapped, size, method == "broadcast_all")
    else:
        outs = _batch_merged(site, results, front, mapped, size)
    return outs, [0] * len(outs)


def _batched(results: Sequence[Result], size: int) -> tuple[Result, ...]:
    return tuple(((size, *shape), dtype) for shape, dtype in results)


def _broadcast(x: Any, size: int) -> Any:
    return jnp.broadcast_to(x, (size, *x.shape))


def _batch_expanded(
    site: CallSite,
    results: Sequence[Result],
    operands: Sequence[Any],
    mapped: Sequence[bool],
    size: int,
    broadcast_all: bool,
) -> list[Any]:
    updated = {operand for operand, _ in site.in_place}
    full = [
        x if m else _broadcast(x, size if broadcast_all or i in updated else 1)
        for i, (x, m) in enumerate(zip(operands, mapped, strict=True))
    ]
    return _bind(site, _batched(results, size), full)


def _batch_elementwise(
    site: CallSite,
    results: Sequence[Result],
    operands: Sequence[Any],
    mapped: Sequence[bool],
    size: int,
) -> list[Any]:
    # NumPy aligns shapes at the end: a mapped operand of lower rank gets axes behind the batch axis.
    rank = max([len(shape) for shape, _ in results], default=0)
    updated = {operand for operand, _ in site.in_place}
    aligned = []
    for i, (x, m) in enumerate(zip(operands, mapped, strict=True)):
        if m:
            x = x.reshape((size, *(1,) * (rank - (x.ndim - 1)), *x.shape[1:]))
        elif i in updated:
            x = _broadcast(x, size)
        aligned.append(x)
    return _bind(site, _batched(results, size), aligned)


def _batch_merged(
    site: CallSite,
    results: Sequence[Result],
    operands: Sequence[Any],
    mapped: Sequence[bool],
    size: int,
) -> list[Any]:
    # Every operand has one batch axis already, of length n; the function sees one of size * n.
    full = [x if m else _broadcast(x, size) for x, m in zip(operands, mapped, strict=True)]
    merged = [x.reshape((x.shape[0] * x.shape[1], *x.shape[2:])) for x in full]
    outs = _bind(
        site, tuple(((size * shape[0], *shape[1:]), dtype) for shape, dtype in results), merged
    )
    return [o.reshape((size, *shape)) for o, (shape, _) in zip(outs, results, strict=True)]


batching.primitive_batchers[custom_call_p] = _batch

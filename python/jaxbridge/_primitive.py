# SPDX-License-Identifier: Apache-2.0
"""The primitive behind an external call, and all its rules."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from . import _compat, _lowering
from ._call_site import CallSite
from ._errors import BatchingError, DerivativeError

if TYPE_CHECKING:
    from ._callee import Callee

Result = tuple[tuple[int, ...], Any]


@dataclasses.dataclass(frozen=True)
class BoundCall:
    """A call with its result types: shape and dtype of each.

    `refs` are the operands that are `jax.Ref`s, each with the result that is stored in it (None: it is
    read only).
    """

    site: CallSite
    results: tuple[Result, ...]
    refs: tuple[tuple[int, int | None], ...]


call_p = Primitive("jaxbridge_call")
call_p.multiple_results = True
_compat.hold_weakly(CallSite)


def bind(bound: BoundCall, operands: Sequence[Any]) -> list[Any]:
    """Makes the call; returns the results that are not stored in Refs."""
    if any(_compat.is_concrete_ref(operands[i]) for i, _ in bound.refs):
        # Reading and writing a Ref are operations of their own when they are not traced together:
        # only one program updates it in place.
        with jax.disable_jit(False):
            if not any(isinstance(x, jax.core.Tracer) for x in operands):
                _wait_on_cpu(operands)
            return list(programs_of(bound.site.callee).of(bound)(*operands))
    return _with_refs(bound, *operands)


def _with_refs(bound: BoundCall, *operands: Any) -> list[Any]:
    values = list(operands)
    for i, _ in bound.refs:
        # Without the barrier XLA gives the function a copy where the program has updated a part of the
        # Ref before: reads for the update and for the call would be two uses of one value.
        values[i] = jax.lax.optimization_barrier(operands[i][...])
    outs = _bind_values(bound, values)
    stored = {result: i for i, result in bound.refs if result is not None}
    for result, i in stored.items():
        operands[i][...] = outs[result]
    return [out for result, out in enumerate(outs) if result not in stored]


def _bind_values(bound: BoundCall, values: Sequence[Any]) -> list[Any]:
    if bound.site.options.vmap_method == "batched":
        outs = _bind(
            bound.site,
            tuple(((1, *shape), dtype) for shape, dtype in bound.results),
            [jnp.expand_dims(v, 0) for v in values],
        )
        return [jnp.squeeze(o, 0) for o in outs]
    return _bind(bound.site, bound.results, values)


def _bind(site: CallSite, results: Sequence[Result], operands: Sequence[Any]) -> list[Any]:
    operands = _compat.union_manual_axes(operands)
    # A scope, so that profiles show the function's name.
    with jax.named_scope(site.name):
        return list(call_p.bind(*operands, site=site, results=tuple(results)))


def _abstract_eval(
    *operands: Any, site: CallSite, results: tuple[Result, ...]
) -> tuple[list[Any], set[Any]]:
    effects = {_compat.call_effect} if site.has_side_effect else set()
    return [_compat.result_aval(shape, dtype, operands) for shape, dtype in results], effects


call_p.def_effectful_abstract_eval(_abstract_eval)


def _make_program(bound: BoundCall) -> Callable[..., Any]:
    def run(*operands: Any) -> list[Any]:
        if bound.refs:
            return _with_refs(bound, *operands)
        return _bind(bound.site, bound.results, operands)

    return jax.jit(run)


class Programs:
    """The programs of the eager calls of one callee."""

    def __init__(self) -> None:
        self.of = functools.lru_cache(128)(_make_program)

    def clear(self) -> None:
        self.of.cache_clear()


class _Told:
    """A callee as a key: equal where one may be called in place of the other."""

    def __init__(self, callee: "Callee") -> None:
        self._callee = callee
        self._hash = hash(tuple(callee.identities.items()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Told) and self._callee.is_same_as(other._callee)

    def __hash__(self) -> int:
        return self._hash


# The same function made again finds its programs, where content tells that it is the same.
_programs_by_content = _compat.bounded_cache(512)(lambda told: Programs())


def programs_of(callee: "Callee") -> Programs:
    """Where the programs of eager calls are kept: with the Function, if content can't tell the callee."""
    found: Programs | None
    if callee.is_told:
        found = _programs_by_content(_Told(callee))
    else:
        found = callee.programs() if callee.programs is not None else None
    return found or Programs()


def _wait_on_cpu(operands: Sequence[Any]) -> None:
    # On the CPU a program whose operands are there runs on this thread, and its errors are raised by
    # this call. One that has to wait for them runs later, elsewhere.
    arrays = [x for x in operands if isinstance(x, jax.Array) or _compat.is_concrete_ref(x)]
    if any(d.platform == "cpu" for x in arrays[:1] for d in x.sharding.device_set):
        for x in arrays:
            _compat.wait_until_ready(x)


def _impl(*operands: Any, site: CallSite, results: tuple[Result, ...]) -> list[Any]:
    # An eager call is a program of one call. disable_jit must not reach it: the call has no other form.
    with jax.disable_jit(False):
        _wait_on_cpu(operands)
        program = programs_of(site.callee).of(BoundCall(site, tuple(results), ()))
        if not (jax.config.jax_debug_nans or jax.config.jax_debug_infs):
            return list(program(*operands))
        # Where JAX finds one in the results of a program, it runs the program's operations one by one
        # to tell which it was: it would come here again, for ever.
        with jax.debug_nans(False), jax.debug_infs(False):
            outs = list(program(*operands))
        _check_numbers(outs, site.name)
        return outs


def _check_numbers(outs: Sequence[Any], name: str) -> None:
    for out in outs:
        if not jnp.issubdtype(out.dtype, jnp.inexact):
            continue
        for kind, enabled, find in (
            ("nan", jax.config.jax_debug_nans, np.isnan),
            ("inf", jax.config.jax_debug_infs, np.isinf),
        ):
            if enabled and any(find(np.asarray(s.data)).any() for s in out.addressable_shards):
                raise FloatingPointError(f"invalid value ({kind}) encountered in {name}")


call_p.def_impl(_impl)
mlir.register_lowering(call_p, _lowering.lower_call)


# ---- derivatives ---------------------------------------------------------------------------------


def _jvp(
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    site: CallSite,
    results: tuple[Result, ...],
) -> tuple[list[Any], list[Any]]:
    inexact = any(jnp.issubdtype(dtype, jnp.inexact) for _, dtype in results)
    if inexact and any(type(t) is not ad.Zero for t in tangents):
        raise DerivativeError(
            f"{site.name}: this external function has no derivative rule; wrap it with jax.custom_jvp "
            f"or jax.custom_vjp, or stop the gradient before it with jax.lax.stop_gradient"
        )
    outs = _bind(site, results, primals)
    return outs, [ad.Zero(jax.typeof(o).to_tangent_aval()) for o in outs]


ad.primitive_jvps[call_p] = _jvp


# ---- batching ------------------------------------------------------------------------------------


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
    elif method == "batched":
        outs = _batch_merged(site, results, front, mapped, size)
    elif method in ("sequential", "sequential_unrolled"):
        outs = _batch_sequential(site, results, front, mapped, method == "sequential_unrolled")
    else:
        raise BatchingError(
            f"{site.name}: vmap needs to know how: give the Function vmap_method= ('sequential' calls "
            f"it once for each element; 'broadcast_all', 'expand_dims' and 'batched' pass whole "
            f"batches), or elementwise=True"
        )
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


def _batch_sequential(
    site: CallSite,
    results: Sequence[Result],
    operands: Sequence[Any],
    mapped: Sequence[bool],
    unroll: bool,
) -> list[Any]:
    def one(_: None, moving: list[Any]) -> tuple[None, list[Any]]:
        rest = iter(moving)
        values = [next(rest) if m else x for x, m in zip(operands, mapped, strict=True)]
        return None, _bind(site, results, values)

    moving = [x for x, m in zip(operands, mapped, strict=True) if m]
    _, outs = jax.lax.scan(one, None, moving, unroll=unroll)
    return list(outs)


batching.primitive_batchers[call_p] = _batch

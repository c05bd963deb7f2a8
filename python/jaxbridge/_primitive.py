# SPDX-License-Identifier: Apache-2.0
"""The primitive behind an external call: one call, also under vmap, until it is lowered.

Its derivatives are in `_derivatives`; the custom call that it becomes is in `_custom_call`.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import batching, mlir

from . import _compat, _custom_call, _lowering, _rule_calls
from ._call_site import CallSite
from ._custom_call import Result, custom_call_p
from ._errors import BatchingError
from ._rules import Rules, no_rules
from ._vmaps import Vmap, lengths, mapped, one_by_one

if TYPE_CHECKING:
    from ._callee import Callee


@dataclasses.dataclass(frozen=True)
class BoundCall:
    """A call with its types: of the operands (of Refs their values), and of the results.

    Types are without the batch axes of `vmaps`, innermost first. `tree` is that of the declared results;
    after them `results` has a hidden one for each Ref that a Python function gets. `refs` are the operands
    that are `jax.Ref`s, each with the result that is stored in it (None: it is read only).
    """

    site: CallSite
    operands: tuple[Result, ...]
    results: tuple[Result, ...]
    tree: Any
    refs: tuple[tuple[int, int | None], ...] = ()
    vmaps: tuple[Vmap, ...] = ()
    # Of the Function whose rule makes this call, for one that has none of its own.
    inherited_method: str | None = None

    @property
    def name(self) -> str:
        return self.site.name

    @property
    def vmap_method(self) -> str | None:
        return self.site.options.vmap_method or self.inherited_method


call_p = _compat.Primitive("jaxbridge_call")
call_p.multiple_results = True
for _kind in (CallSite, BoundCall, Rules):
    _compat.hold_weakly(_kind)


def is_eager(operands: Sequence[Any]) -> bool:
    """Whether a call with these operands is its program (`Programs.of`), and nothing else sees it."""
    return (
        not _compat.is_tracing()
        and not _compat.is_debugging()
        and _rule_calls.inherited_method() is None
        and all(type(x) is _compat.array_type or _compat.is_concrete_ref(x) for x in operands)
    )


def run(program: Callable[..., Any], operands: Sequence[Any]) -> list[Any]:
    """Makes an eager call; returns the results that are not stored in Refs."""
    _wait_on_cpu(operands)
    outs: list[Any] = program(*operands)
    return outs


def bind(call: BoundCall, rules: Rules, operands: Sequence[Any]) -> list[Any]:
    """Makes the call; returns the results that are not stored in Refs."""
    if any(_compat.is_concrete_ref(operands[i]) for i, _ in call.refs):
        # Reading and writing a Ref are operations of their own when they are not traced together:
        # only one program updates it in place.
        if not _compat.is_tracing() and not any(isinstance(x, jax.core.Tracer) for x in operands):
            return _run_alone(call, operands)
        with jax.disable_jit(False):
            return list(programs_of(call.site.callee).of(call)(*operands))
    return _with_refs(call, rules, *operands)


def _with_refs(call: BoundCall, rules: Rules, *operands: Any) -> list[Any]:
    values = list(operands)
    for i, _ in call.refs:
        # Without the barrier XLA gives the function a copy where the program has updated a part of the
        # Ref before: reads for the update and for the call would be two uses of one value.
        values[i] = jax.lax.optimization_barrier(operands[i][...])
    outs = bind_values(call, rules, values)
    stored = {result: i for i, result in call.refs if result is not None}
    for result, i in stored.items():
        operands[i][...] = outs[result]
    return [out for result, out in enumerate(outs) if result not in stored]


def bind_values(call: BoundCall, rules: Rules, values: Sequence[Any]) -> list[Any]:
    """Makes the call with the values of Refs; returns all results."""
    values = _compat.union_manual_axes(values)
    # A scope, so that profiles show the function's name.
    with jax.named_scope(call.site.name):
        return list(call_p.bind(*values, call=call, rules=rules))


def _abstract_eval(*operands: Any, call: BoundCall, rules: Rules) -> tuple[list[Any], set[Any]]:
    batch = lengths(call.vmaps)
    results = tuple(((*batch, *shape), dtype) for shape, dtype in call.results)
    specs = None
    if batch and _custom_call.is_on_explicit_axes(call.site, operands):
        # Where the batch axes lie is what the calls that it becomes say.
        types = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding) for a in operands]
        outs = jax.eval_shape(_expanded(call, rules), *types)
        specs = [_compat.explicit_spec(out) for out in outs]
    return _custom_call.abstract_eval(*operands, site=call.site, results=results, specs=specs)


call_p.def_effectful_abstract_eval(_abstract_eval)


def _make_program(call: BoundCall) -> Callable[..., Any]:
    # Without rules: it is only run, and JAX keeps programs for longer than rules should live.
    def run(*operands: Any) -> list[Any]:
        return (_with_refs if call.refs else _flat)(call, no_rules, *operands)

    return jax.jit(run)


def _flat(call: BoundCall, rules: Rules, *values: Any) -> list[Any]:
    return bind_values(call, rules, values)


class Programs:
    """The programs of the eager calls of one callee."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        # A new cache: with the old one goes what is kept with its programs (`_eager`).
        self.of = functools.lru_cache(128)(_make_program)


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
    arrays = [x for x in operands if type(x) is _compat.array_type or _compat.is_concrete_ref(x)]
    if arrays and next(iter(arrays[0].sharding.device_set)).platform == "cpu":
        for x in arrays:
            try:
                _compat.wait_until_ready(x)
            except jax.errors.JaxRuntimeError as error:
                if type(x) is _compat.array_type and x.is_deleted():
                    raise RuntimeError(
                        f"an argument was deleted or donated, {x.dtype}[{','.join(map(str, x.shape))}]"
                    ) from error
                raise


def _impl(*operands: Any, call: BoundCall, rules: Rules) -> list[Any]:
    if call.vmaps and rules.vmap is not None:
        return _expanded(call, rules)(*operands)
    if call.refs:
        call = dataclasses.replace(call, refs=())  # these are values
    return _run_alone(call, operands)


def _run_alone(call: BoundCall, operands: Sequence[Any]) -> list[Any]:
    """Makes an eager call, however JAX debugs; returns the results that are not stored in Refs."""
    # An eager call is a program of one call. disable_jit must not reach it: the call has no other form.
    with jax.disable_jit(False):
        _wait_on_cpu(operands)
        program = programs_of(call.site.callee).of(call)
        nans, infs = jax.config.jax_debug_nans, jax.config.jax_debug_infs
        if not (nans or infs):
            return list(program(*operands))
        # Where JAX finds one in the results of a program, it runs the program's operations one by one
        # to tell which it was: it would come here again, for ever, and with Refs that are gone.
        with jax.debug_nans(False), jax.debug_infs(False):
            outs = list(program(*operands))
        stored = [_compat.ref_array(operands[i]) for i, result in call.refs if result is not None]
        if (kind := invalid_number([*outs, *stored], nans, infs)) is not None:
            raise FloatingPointError(f"invalid value ({kind}) encountered in {call.name}")
        return outs


def invalid_number(outs: Sequence[Any], nans: bool, infs: bool) -> str | None:
    """Which of the numbers that are looked for is in an array: "nan", "inf", or None."""
    for out in outs:
        if not jnp.issubdtype(out.dtype, jnp.inexact):
            continue
        for kind, enabled, find in (("nan", nans, np.isnan), ("inf", infs, np.isinf)):
            if enabled and any(find(np.asarray(s.data)).any() for s in out.addressable_shards):
                return kind
    return None


call_p.def_impl(_impl)


def _lower(ctx: Any, *operands: Any, call: BoundCall, rules: Rules) -> Any:
    if not call.vmaps and call.site.options.vmap_method != "batched":
        ctx = ctx.replace(primitive=custom_call_p)
        return _lowering.lower_call(ctx, *operands, site=call.site, results=call.results)
    return mlir.lower_fun(_expanded(call, rules), multiple_results=True)(ctx, *operands)


mlir.register_lowering(call_p, _lower)


# ---- batching ------------------------------------------------------------------------------------


def _expanded(call: BoundCall, rules: Rules) -> Callable[..., list[Any]]:
    """What a call under vmap does."""
    everything = range(len(call.operands))
    if call.vmaps and rules.vmap is not None:
        innermost, *outer = call.vmaps

        def batched(*operands: Any) -> list[Any]:
            return _rule_calls.run_vmap(call, rules, innermost, operands)

        return mapped(batched, outer, everything)

    def plain(*operands: Any) -> list[Any]:
        return _custom_call.bind(call.site, call.results, operands)

    if call.vmap_method in ("sequential", "sequential_unrolled"):
        return one_by_one(plain, call.vmaps, call.vmap_method == "sequential_unrolled")
    return mapped(plain, call.vmaps, everything)


def _batch(
    operands: Sequence[Any], axes: Sequence[Any], *, call: BoundCall, rules: Rules
) -> tuple[list[Any], list[int]]:
    if rules.vmap is None and call.vmap_method is None and not call.site.options.elementwise:
        raise BatchingError(
            f"{call.name}: vmap needs to know how: {call.site.callee.how_batched}, or a rule with "
            f".defvmap(rule)"
        )
    vmap = Vmap.of(operands, axes)
    under = dataclasses.replace(call, vmaps=(*call.vmaps, vmap))
    if rules.vmap is not None and any(isinstance(x, jax.core.Tracer) for x in operands):
        # It runs when the call is lowered; what is wrong with it is an error here.
        jax.make_jaxpr(_expanded(under, rules))(*operands)
    outs = bind_values(under, rules, operands)
    return outs, [0] * len(outs)


batching.primitive_batchers[call_p] = _batch

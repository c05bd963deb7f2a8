# SPDX-License-Identifier: Apache-2.0
"""The derivatives of a call, and the linear maps that they are made of.

A call whose Function has rules becomes, under differentiation, other calls and linear maps. A linear map
is a primitive of its own, so that JAX can evaluate it (forward mode) or transpose it (reverse mode): what
is asked first decides which rule of the user's runs.
"""

import dataclasses
import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir

from . import _compat, _primitive, _rule_calls
from ._custom_call import Result
from ._errors import DerivativeError
from ._primitive import BoundCall, call_p
from ._rule_calls import is_inexact
from ._rules import LinearIn, Rules
from ._vmaps import Vmap, lengths, mapped, mapped_transpose

# Tangents by the operand that they are of.
Tangents = Mapping[int, Any]


# ---- the call ------------------------------------------------------------------------------------


def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, call: BoundCall, rules: Rules
) -> tuple[list[Any], list[Any]]:
    primals, tangents = _arrays(primals), _arrays(tangents)
    moving = [i for i, t in enumerate(tangents) if type(t) is not ad.Zero]
    inexact = [is_inexact(r) for r in call.results]
    if not moving or not any(inexact):
        outs = _primitive.bind_values(call, rules, primals)
        return outs, _among(outs, inexact, [None] * sum(inexact))
    plain = dataclasses.replace(call, vmaps=())

    def jvp(*flat: Any) -> list[Any]:
        given = dict(zip(moving, flat[len(primals) :], strict=True))
        outs, out_tangents = _derivative(plain, rules, flat[: len(primals)], given)
        return [*outs, *out_tangents]

    every = range(len(primals))
    results = mapped(jvp, call.vmaps, [*every, *moving])(*primals, *(tangents[i] for i in moving))
    outs = results[: len(call.results)]
    return outs, _among(outs, inexact, results[len(call.results) :])


def _arrays(values: Sequence[Any]) -> list[Any]:
    """`values` for a rule: to a Function that it calls a Python number would be static."""
    return [jnp.asarray(x) if type(x) in (bool, int, float, complex) else x for x in values]


def _among(outs: Sequence[Any], inexact: Sequence[bool], tangents: Sequence[Any]) -> list[Any]:
    """The tangents of all results, from those of the inexact ones."""
    rest = iter(tangents)
    found = [next(rest) if i else None for i in inexact]
    return [
        ad.Zero(jax.typeof(o).to_tangent_aval()) if t is None else t
        for o, t in zip(outs, found, strict=True)
    ]


def _derivative(
    call: BoundCall, rules: Rules, primals: Sequence[Any], tangents: Tangents
) -> tuple[list[Any], list[Any]]:
    """Results, and the tangents of the inexact ones."""
    if call.refs:
        raise DerivativeError(
            f"{call.name}: a call that updates a jax.Ref has no derivative; pass the Ref's value, "
            f"ref[...], and take the update as a result"
        )
    if rules.linear is not None:
        groups = [_operands_of(call, linear) for linear in rules.linear]
        other = set(tangents).difference(*groups)
        if not other:
            outs = _primitive.bind_values(call, rules, primals)
            parts = [
                _inexact(call, _primitive.bind_values(call, rules, _put(primals, group, tangents)))
                for group in groups
                if not tangents.keys().isdisjoint(group)
            ]
            return outs, _sum(parts)
        if rules.jvp is None and rules.vjp is None:
            raise DerivativeError(
                f"{call.name}: a derivative in {_rule_calls.argument(call, min(other))} was asked for, and "
                f"deflinear does not name it: name it there if the function is linear in it, give a rule "
                f"with .defjvp(rule) or .defvjp(fwd, bwd), or stop the gradient before it with "
                f"jax.lax.stop_gradient"
            )
    if rules.jvp is None and rules.vjp is None:
        raise DerivativeError(
            f"{call.name}: this external function has no derivative rule; give it one with "
            f".defjvp(rule), .defvjp(fwd, bwd) or, where it is linear, .deflinear(transpose), or stop the "
            f"gradient before it with jax.lax.stop_gradient"
        )
    for i in _rule_calls.by_keyword(call):
        if i in tangents:
            raise DerivativeError(
                f"{call.name}: a derivative in {_rule_calls.argument(call, i)} was asked for, which is "
                f"passed by keyword, and rules are for arguments by position: pass it by position, or "
                f"stop the gradient before it with jax.lax.stop_gradient"
            )
    if rules.vjp is None:
        return _rule_calls.run_jvp(call, rules, primals, tangents)
    outs, residuals = _rule_calls.run_fwd(call, rules, primals)
    leaves, tree = jax.tree.flatten(residuals)
    # The forward rule needs all arguments. Without it they are not kept for the backward pass.
    kept = range(len(primals)) if rules.jvp is not None else _rule_calls.by_keyword(call)
    specs = tuple(_compat.explicit_spec(jax.typeof(out)) for out in _inexact(call, outs))
    tangent = Tangent(call, rules, tree, tuple(kept), tuple(tangents), specs)
    operands = [*leaves, *(primals[i] for i in kept), *tangents.values()]
    return outs, _bind(tangent, (), operands)


def _operands_of(call: BoundCall, linear: LinearIn) -> list[int]:
    """The operands that can have tangents in the arguments of a linear rule."""
    found = _rule_calls.operands_in(call, linear.argnums)
    return [i for i in found if is_inexact(call.operands[i])]


def _put(values: Sequence[Any], group: Sequence[int], tangents: Tangents) -> list[Any]:
    """`values` with the tangents of one group of operands in their place."""
    values = list(values)
    for i in group:
        values[i] = tangents[i] if i in tangents else jnp.zeros_like(values[i])
    return values


def _inexact(call: BoundCall, outs: Sequence[Any]) -> list[Any]:
    return [o for o, result in zip(outs, call.results, strict=True) if is_inexact(result)]


def _sum(parts: Sequence[Sequence[Any]]) -> list[Any]:
    return [functools.reduce(operator.add, terms) for terms in zip(*parts, strict=True)]


def _transpose(
    cotangents: Sequence[Any], *operands: Any, call: BoundCall, rules: Rules
) -> list[Any]:
    undefined = {i for i, x in enumerate(operands) if ad.is_undefined_primal(x)}
    group = _group_of(call, rules, undefined)
    assert rules.linear is not None
    plain = dataclasses.replace(call, vmaps=())
    linear_in = _operands_of(call, rules.linear[group])
    others = [i for i in range(len(operands)) if i not in linear_in]
    map_ = Transpose(plain, rules, group, None)

    def transposed(*flat: Any) -> list[Any]:
        return _bind(map_, (), flat)

    fun = mapped_transpose(
        transposed, call.vmaps, [*others, *[None] * map_.cotangent_count], linear_in
    )
    return _transposed(
        fun, cotangents, operands, [is_inexact(r) for r in call.results], others, linear_in
    )


def _group_of(call: BoundCall, rules: Rules, operands: set[int]) -> int:
    """The linear rule that has all of `operands` in its arguments."""
    for group, linear in enumerate(rules.linear or ()):
        if operands <= set(_operands_of(call, linear)):
            return group
    names = ", ".join(_rule_calls.argument(call, i) for i in sorted(operands))
    raise DerivativeError(
        f"{call.name}: to transpose it in {names}, jaxbridge has to be told that it is linear there: "
        f".deflinear(transpose, argnums=...)"
    )


def _transposed(
    fun: Any,
    cotangents: Sequence[Any],
    operands: Sequence[Any],
    inexact: Sequence[bool],
    others: Sequence[int],
    linear_in: Sequence[int],
) -> list[Any]:
    """What a transpose rule returns: cotangents of the undefined operands, None for the others."""
    found: list[Any] = [None] * len(operands)
    undefined = [i for i in linear_in if ad.is_undefined_primal(operands[i])]
    for i in undefined:
        found[i] = ad.Zero(operands[i].aval.to_tangent_aval())
    if all(type(ct) is ad.Zero for ct in cotangents):
        return found
    cts = [ad.instantiate_zeros(ct) for ct, i in zip(cotangents, inexact, strict=True) if i]
    got = fun(*(operands[i] for i in others), *cts)
    for i, ct in zip(linear_in, got, strict=True):
        if i in undefined and ct is not None:
            found[i] = _compat.as_on_explicit_axes(ct, operands[i].aval)
    return found


ad.primitive_jvps[call_p] = _jvp
ad.primitive_transposes[call_p] = _transpose


# ---- linear maps ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Tangent:
    """The tangents of a call's results, of a Function with a vjp.

    Operands: the residuals, primals of the operands `kept`, tangents of the operands `wrt`.
    """

    call: BoundCall
    rules: Rules
    residuals: Any
    kept: tuple[int, ...]
    wrt: tuple[int, ...]
    # How the results lie on explicit axes: as the call's own.
    specs: tuple[Any, ...]

    @property
    def results(self) -> list[Result]:
        return [r for r in self.call.results if is_inexact(r)]

    @property
    def linear_in(self) -> range:
        fixed = self.residuals.num_leaves + len(self.kept)
        return range(fixed, fixed + len(self.wrt))

    def _split(self, operands: Sequence[Any]) -> tuple[Any, list[Any], Sequence[Any]]:
        """Residuals, primals (None for those not kept), and tangents."""
        n = self.residuals.num_leaves
        primals: list[Any] = [None] * len(self.call.operands)
        for i, x in zip(self.kept, operands[n:], strict=False):
            primals[i] = x
        residuals = self.residuals.unflatten(operands[:n])
        return residuals, primals, operands[n + len(self.kept) :]

    def apply(self, operands: Sequence[Any]) -> list[Any]:
        if self.rules.jvp is None or len(self.kept) != len(self.call.operands):
            raise DerivativeError(
                f"{self.call.name}: forward mode (jax.jvp, jax.jacfwd, jax.linearize, jax.hessian) needs "
                f"a rule of .defjvp(rule), and there was only that of defvjp when this was traced"
            )
        _, primals, tangents = self._split(operands)
        given = dict(zip(self.wrt, tangents, strict=True))
        return _rule_calls.run_jvp(self.call, self.rules, primals, given)[1]

    def transposed(
        self, operands: Sequence[Any], cotangents: Sequence[Any], linear_in: Sequence[int]
    ) -> list[Any]:
        residuals, primals, _ = self._split(operands)
        _, kwargs = self.call.site.arguments.fill(primals)
        found = _rule_calls.run_bwd(self.call, self.rules, residuals, kwargs, cotangents)
        return [found[i] for i in self.wrt]

    def linear_operands(self, undefined: set[int]) -> Sequence[int]:
        if undefined <= set(self.linear_in):
            return self.linear_in
        raise DerivativeError(
            f"{self.call.name}: the derivative is not linear in what it is to be transposed in"
        )

    def tangents(self, operands: Sequence[Any], tangents: Tangents) -> list[Any]:
        parts = []
        if not tangents.keys().isdisjoint(self.linear_in):
            parts.append(_bind(self, (), _put(operands, self.linear_in, tangents)))
        # The forward rule does not look at the residuals.
        fixed = {i: t for i, t in tangents.items() if i not in self.linear_in}
        if self.kept:
            fixed = {i: t for i, t in fixed.items() if i >= self.residuals.num_leaves}
        if fixed:
            parts.append(_jvp_of_apply(self, operands, fixed))
        return _sum(parts) if parts else [jnp.zeros(*r) for r in self.results]


@dataclasses.dataclass(frozen=True)
class Transpose:
    """The cotangent of one group of linear arguments: `out`, a linear rule's number.

    A multilinear function and the transposes in its groups are one form, a number that depends on the
    operands and a cotangent of the results, solved for one of them. So each is the transpose of the others.

    Operands: those of the call but for the group's, then the cotangents of its inexact results. It is
    linear in the group `wrt`; None: in the cotangents.
    """

    call: BoundCall
    rules: Rules
    out: int
    wrt: int | None

    @functools.cached_property
    def groups(self) -> list[list[int]]:
        assert self.rules.linear is not None
        return [_operands_of(self.call, linear) for linear in self.rules.linear]

    @property
    def results(self) -> list[Result]:
        return [self.call.operands[i] for i in self.groups[self.out]]

    @property
    def cotangent_count(self) -> int:
        return sum(map(is_inexact, self.call.results))

    @property
    def others(self) -> list[int]:
        """The operands of the call that are operands here, too."""
        return [i for i in range(len(self.call.operands)) if i not in self.groups[self.out]]

    def _positions(self, group: int | None) -> list[int]:
        others = self.others
        if group is None:
            return list(range(len(others), len(others) + self.cotangent_count))
        return [others.index(i) for i in self.groups[group]]

    @property
    def linear_in(self) -> list[int]:
        return self._positions(self.wrt)

    def apply(self, operands: Sequence[Any]) -> list[Any]:
        assert self.rules.linear is not None
        values: list[Any] = [None] * len(self.call.operands)
        for i, x in zip(self.others, operands, strict=False):
            values[i] = x
        linear = self.rules.linear[self.out]
        cotangents = operands[len(self.others) :]
        found = _rule_calls.run_transpose(self.call, linear, values, cotangents)
        group = self.groups[self.out]
        missing = [i for i in group if found[i] is None]
        zeros = [jnp.zeros(*self.call.operands[i]) for i in missing]
        for i, zero in zip(missing, _rule_calls.vary(zeros, cotangents), strict=True):
            found[i] = zero
        return [found[i] for i in group]

    def transposed(
        self, operands: Sequence[Any], cotangents: Sequence[Any], linear_in: Sequence[int]
    ) -> list[Any]:
        # The cotangents of this map's results stand where the group's operands do in the call.
        wrt = next(
            g
            for g in (None, *range(len(self.groups)))
            if g != self.out and (self._positions(g) == list(linear_in))
        )
        values: list[Any] = [None] * len(self.call.operands)
        for i, x in zip(self.others, operands, strict=False):
            values[i] = x
        for i, x in zip(self.groups[self.out], cotangents, strict=True):
            values[i] = x
        if wrt is None:
            return _inexact(self.call, _primitive.bind_values(self.call, self.rules, values))
        map_ = Transpose(self.call, self.rules, wrt, self.out)
        return _bind(map_, (), [*(values[i] for i in map_.others), *operands[len(self.others) :]])

    def linear_operands(self, undefined: set[int]) -> Sequence[int]:
        for group in (self.wrt, None, *range(len(self.groups))):
            if group != self.out and undefined <= set(positions := self._positions(group)):
                return positions
        raise DerivativeError(
            f"{self.call.name}: the transpose is not linear in what it is to be transposed in"
        )

    def tangents(self, operands: Sequence[Any], tangents: Tangents) -> list[Any]:
        parts = []
        rest = dict(tangents)
        for group in (None, *range(len(self.groups))):
            if group == self.out:
                continue
            positions = self._positions(group)
            if not tangents.keys().isdisjoint(positions):
                map_ = dataclasses.replace(self, wrt=group)
                parts.append(_bind(map_, (), _put(operands, positions, tangents)))
                rest = {i: t for i, t in rest.items() if i not in positions}
        if rest:
            parts.append(_jvp_of_apply(self, operands, rest))
        return _sum(parts)


LinearMap = Tangent | Transpose


def _jvp_of_apply(map_: LinearMap, operands: Sequence[Any], tangents: Tangents) -> list[Any]:
    def fun(*moving: Any) -> list[Any]:
        values = list(operands)
        for i, x in zip(tangents, moving, strict=True):
            values[i] = x
        return map_.apply(values)

    return list(jax.jvp(fun, [operands[i] for i in tangents], list(tangents.values()))[1])


linear_p = _compat.Primitive("jaxbridge_linear")
linear_p.multiple_results = True
for _kind in (Tangent, Transpose):
    _compat.hold_weakly(_kind)


def _bind(map_: LinearMap, vmaps: tuple[Vmap, ...], operands: Sequence[Any]) -> list[Any]:
    operands = _compat.union_manual_axes(operands)
    with jax.named_scope(map_.call.name):
        return list(linear_p.bind(*operands, map=map_, vmaps=vmaps))


@linear_p.def_abstract_eval
def _linear_abstract_eval(*operands: Any, map: LinearMap, vmaps: tuple[Vmap, ...]) -> list[Any]:
    specs: list[Any] = [()] * len(map.results)
    explicit = any(any(_compat.explicit_spec(a)) for a in operands)
    if isinstance(map, Tangent):
        if explicit:
            batch_spec = _batch_spec(vmaps, [_compat.explicit_spec(a) for a in operands])
            specs = [(*batch_spec, *spec) for spec in map.specs]
    else:
        # It runs when the program is lowered; what is wrong with it is an error here.
        outs = jax.eval_shape(functools.partial(_linear_impl, map=map, vmaps=vmaps), *operands)
        specs = [_compat.explicit_spec(out) for out in outs]
    batch = lengths(vmaps)
    return [
        _compat.result_aval((*batch, *shape), dtype, operands, spec)
        for (shape, dtype), spec in zip(map.results, specs, strict=True)
    ]


def _batch_spec(vmaps: tuple[Vmap, ...], operands: Sequence[Sequence[Any]]) -> list[Any]:
    """How the batch axes of a result lie, outermost first: each as that of an operand does."""
    rest = [list(spec) for spec in operands]
    found = []
    for vmap in reversed(vmaps):
        of_axis = [
            spec.pop(axis)
            for spec, axis in zip(rest, vmap.axes, strict=True)
            if axis is not None and spec
        ]
        found.append(next((s for s in of_axis if s is not None), None))
    return found


@linear_p.def_impl
def _linear_impl(*operands: Any, map: LinearMap, vmaps: tuple[Vmap, ...]) -> list[Any]:
    every = range(len(operands))
    return mapped(lambda *values: map.apply(values), vmaps, every)(*operands)


mlir.register_lowering(linear_p, mlir.lower_fun(_linear_impl, multiple_results=True))


def _linear_jvp(
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    map: LinearMap,
    vmaps: tuple[Vmap, ...],
) -> tuple[list[Any], list[Any]]:
    outs = _bind(map, vmaps, primals)
    moving = [i for i, t in enumerate(tangents) if type(t) is not ad.Zero]

    def derivative(*flat: Any) -> list[Any]:
        given = dict(zip(moving, flat[len(primals) :], strict=True))
        return map.tangents(flat[: len(primals)], given)

    every = range(len(primals))
    fun = mapped(derivative, vmaps, [*every, *moving])
    return outs, fun(*primals, *(tangents[i] for i in moving))


def _linear_transpose(
    cotangents: Sequence[Any], *operands: Any, map: LinearMap, vmaps: tuple[Vmap, ...]
) -> list[Any]:
    undefined = {i for i, x in enumerate(operands) if ad.is_undefined_primal(x)}
    linear_in = map.linear_operands(undefined)
    others = [i for i in range(len(operands)) if i not in linear_in]

    def transposed(*flat: Any) -> list[Any]:
        values: list[Any] = [None] * len(operands)
        for i, x in zip(others, flat, strict=False):
            values[i] = x
        return map.transposed(values, flat[len(others) :], linear_in)

    fun = mapped_transpose(transposed, vmaps, [*others, *[None] * len(cotangents)], linear_in)
    inexact = [True] * len(cotangents)
    return _transposed(fun, cotangents, operands, inexact, others, linear_in)


def _linear_batch(
    operands: Sequence[Any], axes: Sequence[Any], *, map: LinearMap, vmaps: tuple[Vmap, ...]
) -> tuple[list[Any], list[int]]:
    outs = _bind(map, (*vmaps, Vmap.of(operands, axes)), operands)
    return outs, [0] * len(outs)


ad.primitive_jvps[linear_p] = _linear_jvp
ad.primitive_transposes[linear_p] = _linear_transpose
batching.primitive_batchers[linear_p] = _linear_batch

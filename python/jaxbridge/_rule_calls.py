# SPDX-License-Identifier: Apache-2.0
"""How the rules of a Function are called, and how what they return is checked.

A rule gets the arguments as the Function was called with them: those by position as a tuple or one by one,
those by keyword by keyword.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from . import _compat
from ._custom_call import Result
from ._errors import BatchingError, DerivativeError
from ._plan import argument_name
from ._rules import LinearIn, Rules
from ._spec import Slot
from ._vmaps import Vmap

if TYPE_CHECKING:
    from ._primitive import BoundCall


# The vmap method of the Function whose rule is running, for the Functions that it calls. Only a loop is
# right for every function. JAX traces again what a rule calls in jit where this differs.
_method = jax.make_user_context(None)


def inherited_method() -> str | None:
    """How to batch a call that the rule which runs now makes, where its Function does not say."""
    method: str | None = _method.value
    return method


def _ask(call: "BoundCall", rule: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    is_loop = call.vmap_method in ("sequential", "sequential_unrolled")
    with _method(call.vmap_method if is_loop else None):
        return rule(*args, **kwargs)


# ---- a call's arguments --------------------------------------------------------------------------


def is_inexact(result: Result) -> bool:
    return bool(jnp.issubdtype(result[1], jnp.inexact))


def operands_in(call: "BoundCall", argnums: Sequence[int]) -> list[int]:
    """The operands in arguments that were passed by position.

    Raises:
        DerivativeError: there is no such argument.
    """
    args, _ = call.site.arguments.tree
    if missing := [n for n in argnums if n >= len(args)]:
        raise DerivativeError(
            f"{call.name}: deflinear names argument {missing[0]}, and this call has {len(args)} by "
            f"position; pass what it is linear in by position"
        )
    return [slot.index for n in argnums for slot in _slots(args[n])]


def by_keyword(call: "BoundCall") -> list[int]:
    """The operands in arguments that were passed by keyword."""
    return [slot.index for slot in _slots(call.site.arguments.tree[1])]


def _slots(tree: Any) -> list[Slot]:
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Slot))
    return [leaf for leaf in leaves if isinstance(leaf, Slot)]


def argument(call: "BoundCall", operand: int) -> str:
    """The name of an operand, for messages."""
    return f"argument {argument_name(call.site.arguments.paths()[operand])}"


def _by_position(call: "BoundCall", values: Sequence[Any], static: Any) -> tuple[Any, ...]:
    """The arguments by position with `values` in place of operands, `static` of everything else."""

    def value(leaf: Any) -> Any:
        return values[leaf.index] if isinstance(leaf, Slot) else static

    args, _ = call.site.arguments.tree
    return tuple(jax.tree.map(value, args, is_leaf=lambda x: isinstance(x, Slot)))


# ---- derivatives ---------------------------------------------------------------------------------


def run_jvp(
    call: "BoundCall", rules: Rules, primals: Sequence[Any], tangents: Mapping[int, Any]
) -> tuple[list[Any], list[Any]]:
    """Results, and the tangents of the inexact ones.

    Args:
        call: without vmaps.
        rules: with a jvp.
        primals: of every operand.
        tangents: by operand; of the others they are zero.
    """
    assert rules.jvp is not None

    def zero(x: Any) -> Any:
        aval = jax.typeof(x).to_tangent_aval()
        if rules.jvp is not None and rules.jvp.symbolic_zeros:
            return SymbolicZero(aval)
        if aval.dtype == jax.dtypes.float0:
            return np.zeros(aval.shape, aval.dtype)
        return jnp.zeros_like(x)

    full = [tangents[i] if i in tangents else zero(x) for i, x in enumerate(primals)]
    args, kwargs = call.site.arguments.fill(primals)
    out = _ask(call, rules.jvp.rule, tuple(args), _by_position(call, full, None), **kwargs)
    if not (isinstance(out, (tuple, list)) and len(out) == 2):
        raise DerivativeError(
            f"{call.name}: the rule of defjvp returned {_kind(out)}; expected a pair: the results, and "
            f"their tangents"
        )
    results = _results(call, out[0], "the rule of defjvp")
    return vary(results, primals), vary(_tangents(call, out[1], results), primals)


def run_fwd(call: "BoundCall", rules: Rules, primals: Sequence[Any]) -> tuple[list[Any], Any]:
    """Results and residuals."""
    assert rules.vjp is not None
    args, kwargs = call.site.arguments.fill(primals)
    out = _ask(call, rules.vjp.fwd, *args, **kwargs)
    if not (isinstance(out, (tuple, list)) and len(out) == 2):
        raise DerivativeError(
            f"{call.name}: fwd of defvjp returned {_kind(out)}; expected a pair: the results, and what "
            f"bwd needs (residuals)"
        )
    for path, leaf in jax.tree_util.tree_leaves_with_path(out[1]):
        if not isinstance(leaf, (jax.Array, np.ndarray, np.generic, bool, int, float, complex)):
            raise DerivativeError(
                f"{call.name}: fwd of defvjp returned the residual{jax.tree_util.keystr(path)} of type "
                f"{type(leaf).__qualname__}; expected arrays: what is not one, bwd gets by keyword as "
                f"the Function did, or from its closure"
            )
    return vary(_results(call, out[0], "fwd of defvjp"), primals), out[1]


def run_bwd(
    call: "BoundCall", rules: Rules, residuals: Any, kwargs: Any, cotangents: Sequence[Any]
) -> list[Any]:
    """The cotangent of every operand, None for a zero.

    Args:
        call: without vmaps.
        rules: with a vjp.
        residuals: of `fwd`.
        kwargs: the call's.
        cotangents: of the inexact results.
    """
    assert rules.vjp is not None
    got = _ask(call, rules.vjp.bwd, residuals, _cotangent_tree(call, cotangents), **kwargs)
    args, _ = call.site.arguments.tree
    if not isinstance(got, (tuple, list)) or len(got) != len(args):
        raise DerivativeError(
            f"{call.name}: bwd of defvjp returned {_kind(got)}; expected a tuple of {len(args)}, one "
            f"cotangent for each argument by position (None for a zero, or what is no array)"
        )
    return _cotangents(call, tuple(range(len(args))), tuple(got), "bwd of defvjp", cotangents)


def run_transpose(
    call: "BoundCall", linear: LinearIn, values: Sequence[Any], cotangents: Sequence[Any]
) -> list[Any]:
    """The cotangent of every operand in the linear arguments, None for a zero and for the others.

    Args:
        call: without vmaps.
        linear: its arguments are asked for.
        values: of every operand; those of the linear arguments are not looked at.
        cotangents: of the inexact results.
    """
    args, kwargs = call.site.arguments.fill(values)
    others = [a for n, a in enumerate(args) if n not in linear.argnums]
    if linear.pass_avals:
        abstract = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in call.operands]
        avals, _ = call.site.arguments.fill(abstract)
        wanted = tuple(avals[n] for n in linear.argnums)
        kwargs = {**kwargs, "avals": wanted[0] if linear.is_single else wanted}
    got = _ask(call, linear.transpose, _cotangent_tree(call, cotangents), *others, **kwargs)
    if linear.is_single:
        got = (got,)
    elif not isinstance(got, (tuple, list)) or len(got) != len(linear.argnums):
        raise DerivativeError(
            f"{call.name}: the transpose of deflinear returned {_kind(got)}; expected a tuple of "
            f"{len(linear.argnums)}, the cotangents of arguments {linear.argnums}"
        )
    who = "the transpose of deflinear"
    return _cotangents(call, linear.argnums, tuple(got), who, cotangents)


def _cotangent_tree(call: "BoundCall", cotangents: Sequence[Any]) -> Any:
    """As the results are; of one that has no derivative a zero of dtype float0."""
    inexact = iter(cotangents)
    return call.tree.unflatten(
        [
            next(inexact) if is_inexact(r) else np.zeros(r[0], jax.dtypes.float0)
            for r in call.results
        ]
    )


def _cotangents(
    call: "BoundCall",
    argnums: Sequence[int],
    got: tuple[Any, ...],
    who: str,
    varying: Sequence[Any],
) -> list[Any]:
    def is_leaf(x: Any) -> bool:
        return isinstance(x, Slot)

    args, _ = call.site.arguments.tree
    found: list[Any] = [None] * len(call.operands)
    for n, value in zip(argnums, got, strict=True):
        if value is None:
            continue
        slots: list[Any]
        tree: Any
        slots, tree = jax.tree.flatten(args[n], is_leaf=is_leaf)
        try:
            leaves = tree.flatten_up_to(value)
        except ValueError:
            structure = tree.unflatten(["*"] * tree.num_leaves)
            raise DerivativeError(
                f"{call.name}: {who} returned for argument {n} {_structure(value)}; expected a cotangent "
                f"of the argument's structure, {structure}, or None"
            ) from None
        for slot, leaf in zip(slots, leaves, strict=True):
            if leaf is None:
                continue
            if not isinstance(slot, Slot):
                raise DerivativeError(
                    f"{call.name}: {who} returned a cotangent for {slot!r} in argument {n}, which is no "
                    f"array: return None there"
                )
            found[slot.index] = _cotangent(call, slot.index, leaf, who)
    present = [x for x in found if x is not None]
    varied = iter(vary(present, varying))
    return [None if x is None else next(varied) for x in found]


def _cotangent(call: "BoundCall", operand: int, leaf: Any, who: str) -> Any:
    if isinstance(leaf, SymbolicZero) or _is_float0(leaf):
        return None
    shape, dtype = call.operands[operand]
    if not is_inexact((shape, dtype)):
        raise DerivativeError(
            f"{call.name}: {who} returned a cotangent for {argument(call, operand)}, which is "
            f"{_text(shape, dtype)} and has no derivative: return None there"
        )
    what = f"{who} returned for {argument(call, operand)}"
    return _array(call, leaf, shape, dtype, what, DerivativeError)


def _tangents(call: "BoundCall", tree: Any, outs: Sequence[Any]) -> list[Any]:
    """The tangents of the inexact results."""
    if tree is None:
        leaves: list[Any] = [None] * len(call.results)
    else:
        leaves = _flattened(call, tree, "the rule of defjvp", "tangents", DerivativeError)
    tangents = []
    for position, (leaf, out, result) in enumerate(zip(leaves, outs, call.results, strict=True)):
        is_zero = leaf is None or isinstance(leaf, SymbolicZero) or _is_float0(leaf)
        what = f"the rule of defjvp returned for the tangent of {_result(call, position)}"
        if not is_inexact(result):
            if not is_zero:
                raise DerivativeError(
                    f"{call.name}: {what} an array, and the result is {_text(*result)}, which has no "
                    f"derivative: return None there"
                )
        elif is_zero:
            tangents.append(jnp.zeros_like(out))
        else:
            tangents.append(_array(call, leaf, *result, what, DerivativeError))
    return tangents


def _results(call: "BoundCall", tree: Any, who: str) -> list[Any]:
    leaves = _flattened(call, tree, who, "results", DerivativeError)
    return [
        _array(call, leaf, *result, f"{who} returned for {_result(call, i)}", DerivativeError)
        for i, (leaf, result) in enumerate(zip(leaves, call.results, strict=True))
    ]


# ---- batches -------------------------------------------------------------------------------------


def run_vmap(call: "BoundCall", rules: Rules, vmap: Vmap, operands: Sequence[Any]) -> list[Any]:
    """The results of a call under one vmap, with their batch axes in front."""
    assert rules.vmap is not None
    for i in by_keyword(call):
        if vmap.axes[i] is not None:
            raise BatchingError(
                f"{call.name}: {argument(call, i)} is mapped and passed by keyword, and the rule of "
                f"defvmap is told of arguments by position: pass it by position"
            )
    if call.refs:
        raise BatchingError(
            f"{call.name}: the rule of defvmap takes values, and an argument is a jax.Ref; pass its "
            f"value, ref[...]"
        )
    front = [
        x if axis is None else jnp.moveaxis(x, axis, 0)
        for x, axis in zip(operands, vmap.axes, strict=True)
    ]
    in_batched = _by_position(call, [axis is not None for axis in vmap.axes], False)
    args, kwargs = call.site.arguments.fill(front)
    got = _ask(call, rules.vmap, vmap.size, in_batched, *args, **kwargs)
    if not (isinstance(got, (tuple, list)) and len(got) == 2):
        raise BatchingError(
            f"{call.name}: the rule of defvmap returned {_kind(got)}; expected a pair: the results, and "
            f"for each of them whether it has a batch axis"
        )
    leaves = _flattened(call, got[0], "the rule of defvmap", "results", BatchingError)
    if isinstance(got[1], (bool, np.bool_)):
        batched = [got[1]] * len(leaves)
    else:
        batched = _flattened(call, got[1], "the rule of defvmap", "out_batched", BatchingError)
    outs = []
    for i, (leaf, is_batched, (shape, dtype)) in enumerate(
        zip(leaves, batched, call.results, strict=True)
    ):
        if not isinstance(is_batched, (bool, np.bool_)):
            raise BatchingError(
                f"{call.name}: the rule of defvmap returned {is_batched!r} as out_batched of "
                f"{_result(call, i)}; expected True or False"
            )
        full = (vmap.size, *shape) if is_batched else shape
        what = f"the rule of defvmap returned for {_result(call, i)}"
        out = _array(call, leaf, full, dtype, what, BatchingError)
        outs.append(out if is_batched else jnp.broadcast_to(out, (vmap.size, *shape)))
    return vary(outs, operands)


# ---- what rules return ---------------------------------------------------------------------------

_Error = type[DerivativeError] | type[BatchingError]


def _flattened(call: "BoundCall", tree: Any, who: str, what: str, error: _Error) -> list[Any]:
    try:
        return list(call.tree.flatten_up_to(tree))
    except ValueError:
        expected = call.tree.unflatten(["*"] * call.tree.num_leaves)
        raise error(
            f"{call.name}: {who} returned as {what} {_structure(tree)}; expected the structure of the "
            f"declared results, {expected}"
        ) from None


def _array(
    call: "BoundCall", value: Any, shape: tuple[int, ...], dtype: Any, what: str, error: _Error
) -> Any:
    """`value` as an array of exactly that type."""
    try:
        if isinstance(value, (tuple, list)):
            raise TypeError
        x = jnp.asarray(value)
    except (TypeError, ValueError):
        raise error(f"{call.name}: {what} {_kind(value)}; expected {_text(shape, dtype)}") from None
    if x.shape != shape or (
        x.dtype != dtype
        and not (jax.typeof(x).weak_type and jnp.result_type(x, np.dtype(dtype)) == dtype)
    ):
        raise error(
            f"{call.name}: {what} {_text(x.shape, x.dtype)}; expected {_text(shape, dtype)}"
        )
    return jax.lax.convert_element_type(x, dtype)


def vary(values: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """`values` as functions of `others`, inside shard_map: they vary over the same axes."""
    return list(_compat.union_manual_axes([*values, *others])[: len(values)])


def _result(call: "BoundCall", position: int) -> str:
    tree = call.tree.unflatten([Slot(i) for i in range(call.tree.num_leaves)])
    with_path, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: isinstance(x, Slot))
    return f"result{jax.tree_util.keystr(with_path[position][0])}"


def _is_float0(x: Any) -> bool:
    return getattr(x, "dtype", None) == jax.dtypes.float0


def _kind(x: Any) -> str:
    if isinstance(x, (tuple, list)):
        return f"a {type(x).__name__} of {len(x)}"
    if isinstance(x, (jax.Array, np.ndarray)):
        return f"an array, {_text(x.shape, x.dtype)}"
    return f"a {type(x).__qualname__}"


def _structure(x: Any) -> str:
    if jax.tree_util.all_leaves([x]):
        return _kind(x)
    return str(jax.tree.structure(x)).removeprefix("PyTreeDef(").removesuffix(")")


def _text(shape: tuple[int, ...], dtype: Any) -> str:
    name = getattr(dtype, "name", None) or str(dtype)
    return f"{name}[{','.join(map(str, shape))}]"

# SPDX-License-Identifier: Apache-2.0
"""`call`, `function`, `Function`: an external function as a JAX function."""

import contextlib
import functools
import inspect
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import (
    Any,
    Generic,
    Never,
    NoReturn,
    ParamSpec,
    Self,
    SupportsIndex,
    TypeVar,
    cast,
)

import jax

from . import (
    _aliases,
    _call_site,
    _compat,
    _eager,
    _errors,
    _identity,
    _operands,
    _options,
    _primitive,
    _results,
    _rule_calls,
    _rules,
    _sharding,
    _spec,
)
from ._call_site import CallSite
from ._callee import Callee
from ._sharding import Axes, Rule
from ._spec import Slot, Template

P = ParamSpec("P")
R = TypeVar("R")


class _Required:
    def __repr__(self) -> str:
        return "<required>"


_missing: Any = _Required()


class Function(_rules.WithRules, Generic[P, R]):  # noqa: UP046 (P and R are used below)
    """A JAX function whose work an external function does. Made by `call` and `function`."""

    def __init__(
        self,
        fn: Callable[..., Any] | Mapping[str, Callable[..., Any]],
        result_shape_dtypes: Any,
        *,
        framework: str | Mapping[str, str] | None,
        options: dict[str, Any],
        state: Callable[..., Any] | None,
        name: str | None,
    ) -> None:
        functions = list(fn.values()) if isinstance(fn, Mapping) else [fn]
        for f in functions:
            if isinstance(getattr(f, "__func__", f), Function):  # also bound to an instance
                raise TypeError(f"{f!r} is a jaxbridge Function already; call it directly")
        callee = Callee(fn, framework=framework, options=options, state=state, name=name)
        self._begin(callee, result_shape_dtypes)
        any_fn = functions[0]
        functools.update_wrapper(self, any_fn, updated=())
        with contextlib.suppress(TypeError, ValueError):  # a builtin can be without one
            self.__signature__ = inspect.signature(any_fn)

    def _begin(self, callee: Callee, results: Any) -> None:
        """What Functions of every kind begin with."""
        super().__init__()
        self.callee = callee
        self._results = results
        # Weak there: JAX's caches hold the programs' calls, and these the callee.
        self._programs = _primitive.Programs()
        callee.programs = weakref.ref(self._programs)
        self._eager = _eager.EagerCalls()

    @property
    def name(self) -> str:
        """What profiles and errors show."""
        return self.callee.name

    @property
    def options(self) -> _options.Options:
        return self.callee.options

    # Of sharding; from defsharding.
    _rule: Rule | None = None

    # ---- what a call needs -------------------------------------------------------------------

    def _site(
        self,
        arguments: Any,
        results: Any,
        operand_count: int,
        in_place: tuple[tuple[int, int], ...],
        external: tuple[int, ...],
        own_results: Any,
        has_side_effect: bool,
        axes: Axes | None,
    ) -> CallSite:
        callee = self.callee
        witness = _identity.Witness()
        encoded, portable = _spec.encode(arguments, callee.token, witness)
        encoded_results, portable_results = _spec.encode(own_results, callee.token, witness)
        durable = callee.is_durable and portable and portable_results
        text = _spec.to_text(
            {
                "arguments": encoded,
                "elementwise": self.options.elementwise,
                "external": external,
                "frameworks": callee.frameworks,
                "identities": callee.identities,
                "in_place": in_place,
                "modules": callee.modules,
                "name": self.name,
                "named": callee.is_explicitly_named,
                "durable": durable,
                "out": self.options.out,
                "own_results": encoded_results,
                "operands": operand_count,
                "references": callee.references,
                "side_effect": has_side_effect,
                "graph": self.options.graph,
                "scratch": self.options.scratch,
            }
        )
        return CallSite(
            callee,
            _spec.key_of(text),
            text,
            witness,
            Template(arguments),
            operand_count,
            Template(own_results),
            in_place,
            external,
            has_side_effect,
            durable,
            axes,
        )

    def _call(
        self, leaves: Sequence[Any], treedef: Any, types: _operands.Types, declared: Any
    ) -> _primitive.BoundCall:
        """The call with these arguments and declared results."""
        operands = [leaves[position] for position, _ in types]
        types_of_operands = [(aval.shape, aval.dtype) for _, aval in types]
        slots = [(position, Slot(i)) for i, (position, _) in enumerate(types)]
        arguments = jax.tree.unflatten(treedef, _operands.put(leaves, slots))
        result_leaves, result_tree = jax.tree.flatten(declared)
        results = [_results.shape_and_dtype(self.name, leaf) for leaf in result_leaves]
        slot_tree = jax.tree.unflatten(result_tree, [Slot(i) for i in range(len(results))])

        pairs, own = _aliases.pair(self.name, self.options.inout, arguments, slot_tree)
        refs: list[tuple[int, int | None]] = []
        hidden: list[int] = []
        for i in (i for i, x in enumerate(operands) if _compat.is_ref(x)):
            if self.callee.says_what_is_updated:
                refs.append((i, dict(pairs).get(i)))
                continue
            # A Ref is an operand that is updated: one more result, hidden, which is stored back.
            hidden.append(i)
            pairs.append((i, len(results)))
            refs.append((i, len(results)))
            aval = _compat.ref_value_aval(operands[i])
            results.append((aval.shape, aval.dtype))
        _aliases.check(self.name, pairs, operands, results)
        own_slots = jax.tree.leaves(own, is_leaf=lambda x: isinstance(x, Slot))
        renumbered = jax.tree.unflatten(
            jax.tree.structure(own, is_leaf=lambda x: isinstance(x, Slot)),
            [Slot(i) for i in range(len(own_slots))],
        )
        has_side_effect = self.options.has_side_effect
        if has_side_effect is None:
            has_side_effect = not results
        external = tuple(
            i for i, result in refs if result is not None and _compat.is_external_ref(operands[i])
        )
        axes = None
        if self._rule is not None:
            axes = self._rule.of_call(
                arguments, types_of_operands, slot_tree, results, pairs, hidden
            )
        elif self.options.vmap_method in _options.whole_batch_methods:
            axes = _sharding.unnamed(types_of_operands, results)
        site = self._site(
            arguments,
            declared,
            len(operands),
            tuple(pairs),
            external,
            renumbered,
            has_side_effect,
            axes,
        )
        return _primitive.BoundCall(
            site,
            tuple(types_of_operands),
            tuple(results),
            result_tree,
            tuple(refs),
            inherited_method=_rule_calls.inherited_method(),
        )

    # ---- the call ----------------------------------------------------------------------------

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """As an attribute of a class: a method where a `def` or a lambda is wrapped, as that would be."""
        is_method = any(isinstance(f, types.FunctionType) for f in self.callee.functions.values())
        return types.MethodType(self, instance) if is_method and instance is not None else self

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls the function: eagerly, or as part of the program that is being traced.

        Raises:
            TypeError: an argument or a declared result that can't be passed on; the message names it.
            BaseException: what the function itself raised, where it is called eagerly.
        """
        if isinstance(self.options.out, str) and self.options.out in kwargs:
            raise TypeError(
                f"{self.name}: the keyword {self.options.out!r} takes the results (out=); it is not "
                f"the caller's"
            )
        if self.callee.makes_state and "state" in kwargs:
            raise TypeError(
                f"{self.name}: the keyword 'state' takes what state= made; it is not the caller's"
            )
        leaves, treedef = jax.tree.flatten((args, kwargs))
        positions = _operands.take(self.name, leaves, treedef)
        operands = [leaves[position] for position in positions]
        self.callee.tell()
        kept = None
        # Taken before what a change of the Function replaces it for is read.
        eager = self._eager if _primitive.is_eager(operands) else None
        if eager is not None:
            key = _eager.key_of(self.callee, (args, kwargs), leaves, treedef)
            kept = eager.find(self.callee, key)
        abstract = _operands.types_of(leaves, positions) if kept is None else kept.types
        declared = _results.declared(
            self.name, self._results, *jax.tree.unflatten(treedef, _operands.put(leaves, abstract))
        )
        results, tree = jax.tree.flatten(declared)
        if kept is None or not kept.declares(declared, results, tree):
            call = self._call(leaves, treedef, abstract, declared)
            kept = None if eager is None else eager.add(key, call, abstract, declared)

        before = _errors.newest()
        try:
            if kept is not None:
                outs = _primitive.run(kept.program, operands)
            else:
                outs = _primitive.bind(call, self._rules, operands)
            raised = None
            if _errors.newest() != before:
                raised = _errors.raised_by((kept or call.site).key, before)
        except _errors.from_xla as error:
            raised = _errors.original(error)
            if raised is None:
                raise
        if raised is not None:
            _compat.forget_failed_effects()
            # Outside the handler, so that the exception gets no second context.
            _errors.raise_again(raised)
        if len(outs) < len(results):  # the others are in Refs
            return cast(R, outs[0] if len(outs) == 1 else tuple(outs) or None)
        return cast(R, jax.tree.unflatten(tree, outs))

    # ---- the user's view ---------------------------------------------------------------------

    def defsharding(self, rule: str) -> None:
        """Says along which axes a call may be split over devices, each of which calls with its parts.

        Args:
            rule: the names of the axes of each array argument and result, as Shardy's sharding rules have
                them: `"i j, j -> i"`. Axes of one name are split alike. One is split where some argument
                and each result has it; others are whole on each device. `...` before the names of an array
                stands for more axes. Arrays stand in the order of the arguments (keywords by name), a
                pytree's as `jax.tree.leaves` has them. The axes that vmap adds need no name.

        Raises:
            ShardingError: it is no such rule; calls raise it where it does not fit their arrays.
            TypeError: it is no string.
            ValueError: the Function has `elementwise=True`, which says it already.
        """
        if self.options.elementwise:
            raise ValueError(
                f"{self.name}: elementwise=True already says how a call is split; drop defsharding"
            )
        self._rule = Rule(self.name, rule)
        self._eager = _eager.EagerCalls()  # after it: who has this one has the rule

    def stats(self) -> dict[str, Any]:
        """Counts since the Function was made, with those of Functions that are the same.

        These have equal code, frameworks and name, and the same `out`, `elementwise`, `graph`, `scratch`
        and `state`.

        Returns:
            calls: how often XLA called it.
            cache_hits: how many of the calls ran the function with addresses that were known; what is
                captured, or replayed without a run, is none of them.
            replays: how many of the calls replayed a CUDA graph; with "verify" besides running.
            staged: how many of these replayed it on copies of their arrays, as calls on memory that
                does not come again do where that costs less than running the function.
            captures: how often a call was captured into one.
            fallbacks: why calls could not be captured, and run each time: each reason once.
            cache_size: how many lists of addresses are kept now; at most JAXBRIDGE_CACHE_LIMIT for each
                call in a program and its shapes (of a kernel: and each device).
        """
        return self.callee.stats()

    def clear(self) -> None:
        """Forgets what was kept for repeated calls; it is made anew when needed."""
        self.callee.counts.clear()
        _primitive.programs_of(self.callee).clear()
        _call_site.forget_durable(self.callee)

    def __copy__(self) -> Self:
        return self  # as functions are copied

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(
            f"{self!r} cannot be pickled, since programs of this process refer to it: pickle "
            f"the function that it calls, and call jaxbridge.call again where that is loaded"
        )

    def __repr__(self) -> str:
        return f"<jaxbridge.Function {self.name}>"


def call(
    fn: Callable[..., Any] | Mapping[str, Callable[..., Any]],
    result_shape_dtypes: Any,
    *,
    framework: str | Mapping[str, str] | None = None,
    out: str | int | None = None,
    inout: Mapping[int | str, int] | None = None,
    graph: str = "off",
    scratch: str | None = None,
    state: Callable[..., Any] | None = None,
    elementwise: bool = False,
    vmap_method: str | None = None,
    has_side_effect: bool | None = None,
    name: str | None = None,
) -> "Function[..., Any]":
    """Makes a JAX function of an external function: `call(fn, spec)(*args, **kwargs)`.

    Args:
        fn: gets arrays of `framework` in place of JAX's; or `{"cpu": f, "cuda": g}`.
        result_shape_dtypes: a pytree of `jax.ShapeDtypeStruct`, or a callable that gets the arguments
            with `jax.ShapeDtypeStruct` in place of arrays and returns one.
        framework: "numpy", "cupy", "torch", "numba", "warp" or "buffer", or one for each platform.
            None: NumPy on the CPU, CuPy on CUDA.
        out: None: `fn` returns the results, and they are copied. A keyword's name, 0 or -1: `fn` gets
            the result arrays as that keyword, first or last argument, and writes into them.
        inout: `{argument: result}`: the argument (position or keyword) is passed writable, and is that
            result (position among the results). `fn` returns, or gets through `out`, only the others:
            the one that remains, or a tuple.
        graph: "off": `fn` runs at each call. On CUDA, "replay": what it enqueues is captured once for each
            list of addresses that comes again, and replayed without Python; "verify": the same, but `fn`
            runs each time too, and other results than the replay's are an error; "xla": XLA may capture
            it into its command buffers. Then `fn` must enqueue the same work for the same addresses.
        scratch: "xla": what `fn` allocates on CUDA with CuPy or torch comes from XLA's own memory, also
            where JAX has all of the device's, and is back when it returns. Not with `graph`.
        state: `state(context, *args, **kwargs)` runs once for each device and each kind of call, outside
            any capture, with `jaxbridge.Context` and the arguments, `jax.ShapeDtypeStruct` in place of
            arrays; `fn` gets what it returns as keyword `state`: a plan, a handle, a module.
        elementwise: `fn` works element by element with NumPy's broadcasting; vmap then needs no method.
        vmap_method: "sequential", "sequential_unrolled", "expand_dims", "broadcast_all" as in
            `jax.ffi.ffi_call`, or "batched": `fn` itself takes one leading batch axis on every array,
            also without vmap, where it has length 1.
        has_side_effect: True keeps the call although no result is used. None: True where there is no
            result and no Ref.
        name: what profiles and errors show, and by which an exported program finds the function.

    Raises:
        ValueError, TypeError: an option that is not one of these.
    """
    return Function(
        fn,
        result_shape_dtypes,
        framework=framework,
        options={
            "out": out,
            "inout": inout,
            "elementwise": elementwise,
            "vmap_method": vmap_method,
            "has_side_effect": has_side_effect,
            "graph": graph,
            "scratch": scratch,
        },
        state=state,
        name=name,
    )


def function(
    *given: Never,
    result: Any = _missing,
    framework: str | Mapping[str, str] | None = None,
    out: str | int | None = None,
    inout: Mapping[int | str, int] | None = None,
    graph: str = "off",
    scratch: str | None = None,
    state: Callable[..., Any] | None = None,
    elementwise: bool = False,
    vmap_method: str | None = None,
    has_side_effect: bool | None = None,
    name: str | None = None,
) -> Callable[[Callable[P, R]], Function[P, R]]:
    """The decorator form of `call`; `result` is its `result_shape_dtypes`.

    Example:
        >>> @jaxbridge.function(result=lambda x: x)
        ... def double(x):
        ...     return x * 2
    """
    if given or result is _missing:
        raise TypeError(
            "jaxbridge.function takes keywords and makes a decorator: @jaxbridge.function(result=...), "
            "where result= is what call takes as result_shape_dtypes, for example lambda x: x"
        )

    def decorate(fn: Callable[P, R]) -> Function[P, R]:
        made = call(
            fn,
            result,
            framework=framework,
            out=out,
            inout=inout,
            graph=graph,
            scratch=scratch,
            state=state,
            elementwise=elementwise,
            vmap_method=vmap_method,
            has_side_effect=has_side_effect,
            name=name,
        )
        return cast("Function[P, R]", made)

    return decorate

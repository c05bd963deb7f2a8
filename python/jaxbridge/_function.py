# SPDX-License-Identifier: Apache-2.0
"""`call`, `function`, `Function`: an external function as a JAX function."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Generic, ParamSpec, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np

from . import _compat, _errors, _identity, _in_place, _options, _plan, _primitive, _spec
from ._call_site import CallSite, Stats
from ._errors import PlatformError
from ._options import default_frameworks, frameworks, per_platform
from ._spec import Slot, Template

P = ParamSpec("P")
R = TypeVar("R")

# Named Functions live as long as the process, so that a program from elsewhere finds them.
named: dict[str, "Function[Any, Any]"] = {}


class Function(Generic[P, R]):  # noqa: UP046 (P and R are used below)
    """A JAX function whose work an external function does. Made by `call` and `function`."""

    def __init__(
        self,
        fn: Callable[..., Any] | Mapping[str, Callable[..., Any]],
        result_shape_dtypes: Any,
        *,
        framework: str | Mapping[str, str] | None,
        options: dict[str, Any],
        name: str | None,
    ) -> None:
        any_fn = next(iter(fn.values()), None) if isinstance(fn, Mapping) else fn
        shown = name or _identity.default_name(any_fn)
        self._callees: dict[str, Callable[..., Any]] = per_platform(fn, "the function", shown)
        for platform, f in self._callees.items():
            if not callable(f):
                raise TypeError(f"{shown}: the function for {platform} is {f!r}, not a callable")
            if isinstance(f, Function):
                raise TypeError(f"{shown}: {f!r} is a jaxbridge Function already; call it directly")
        self._frameworks: dict[str, str] = (
            dict(default_frameworks)
            if framework is None
            else per_platform(framework, "framework", shown)
        )
        _options.check_frameworks(shown, self._frameworks)
        self.options = _options.check(shown, **options)
        self.name = shown
        self._results = result_shape_dtypes
        self._tokens: dict[Any, str] = {}
        self.counts = Stats()

        # Tells it from a function that was the same by content when it was made, and is not any more.
        self.own_identity = _identity.unique()

        self._references = {p: _identity.reference(f) for p, f in self._callees.items()}
        self._witness = _identity.Witness()
        fingerprints = {
            id(f): _identity.fingerprint(f, self._witness) for f in self._callees.values()
        }
        self._identities = {p: fingerprints[id(f)] for p, f in self._callees.items()}
        self._is_explicitly_named = name is not None
        told = all(map(_identity.is_told, self._identities.values()))
        self.is_named = name is not None or (
            told and all(r is not None for r in self._references.values())
        )
        if name is not None:
            self._claim_name(name)
        functools.update_wrapper(self, cast(Callable[..., Any], any_fn), updated=())
        with contextlib.suppress(TypeError, ValueError):  # a builtin can be without one
            self.__signature__ = inspect.signature(cast(Callable[..., Any], any_fn))

    def _claim_name(self, name: str) -> None:
        if not isinstance(name, str) or not name:
            raise ValueError(f"name is {name!r}; expected a string that is not empty")
        # What an explicitly named function is, is told by its name: a closure's cells may hold anything.
        self._identities = {
            p: i if _identity.is_told(i) else _identity.fingerprint_of_named(self._callees[p], name)
            for p, i in self._identities.items()
        }
        before = named.get(name)
        if (
            before is not None
            and before._definition() != self._definition()
            and not (
                all(map(_identity.is_told, self._identities.values())) and self._redefines(before)
            )
        ):
            raise ValueError(
                f"the name {name!r} belongs to another function already ({before._places()}; this is "
                f"{self._places()}); an exported program could not tell them apart: choose another name"
            )
        named[name] = self

    def _definition(self) -> Any:
        # Where content can't tell, only the very same object is the same function.
        told = {
            p: i if _identity.is_told(i) else _spec.ById(self._callees[p])
            for p, i in self._identities.items()
        }
        return told, self._frameworks, self.options

    def _places(self) -> str:
        return ", ".join(
            sorted(
                {
                    r or f"{f.__module__}:{getattr(f, '__qualname__', f)}"
                    for r, f in zip(self._references.values(), self._callees.values(), strict=True)
                }
            )
        )

    def _redefines(self, before: "Function[Any, Any]") -> bool:
        """A notebook cell that was run again: the same place, other code."""
        return all(
            _identity.place(self._callees[p]) == _identity.place(before._callees.get(p)) is not None
            for p in self._callees
        )

    def is_same_as(self, other: "Function[Any, Any]") -> bool:
        """Whether one may be called in place of the other: the same by content, then and now."""
        return self is other or (
            self._identities == other._identities
            and self._witness.reads_the_same(other._witness)
            and self._witness.holds()
            and other._witness.holds()
            and all(
                _identity.is_told(i) or self._callees[p] is other._callees[p]
                for p, i in self._identities.items()
            )
        )

    # ---- what a call needs -------------------------------------------------------------------

    def callee(self, platform: str) -> Callable[..., Any]:
        """The function for `platform`; PlatformError where there is none."""
        if platform not in self._callees:
            there = " and ".join(sorted(self._callees)) or "no platform"
            raise PlatformError(
                f"{self.name}: there is a function for {there}, none for {platform}; give one as "
                f'call({{"cpu": f, "cuda": g}}, ...), or run it on {there}'
            )
        return self._callees[platform]

    def framework(self, platform: str) -> str:
        """The framework whose arrays the function gets on `platform`."""
        if platform not in self._frameworks:
            raise PlatformError(f"{self.name}: framework= names none for {platform}")
        framework = self._frameworks[platform]
        if platform not in frameworks[framework]:
            raise PlatformError(
                f"{self.name}: {framework} has no arrays on {platform}; give framework= one for each "
                f'platform, for example {{"cpu": "numpy", "cuda": "{framework}"}}'
            )
        return framework

    def _token(self, x: Any) -> str:
        """A text for a static value that has none: equal for equal values, as long as the Function."""
        try:
            key = _spec.exactly(x)
            hash(key)
        except TypeError:
            key = _spec.ById(x)
        return self._tokens.setdefault(key, _identity.unique())

    def _site(
        self,
        arguments: Any,
        results: Any,
        operand_count: int,
        in_place: tuple[tuple[int, int], ...],
        own_results: Any,
        has_side_effect: bool,
    ) -> CallSite:
        if not self._witness.holds():
            # A variable of an enclosing function has another value now: content can't tell any more.
            self._identities = {p: _identity.unique() for p in self._identities}
            self._witness = _identity.Witness()
        encoded, portable = _spec.encode(arguments, self._token)
        encoded_results, portable_results = _spec.encode(own_results, self._token)
        told = not any(i.startswith("only:") for i in self._identities.values())
        durable = self.is_named and portable and portable_results and told
        text = _spec.to_text(
            {
                "arguments": encoded,
                "elementwise": self.options.elementwise,
                "frameworks": self._frameworks,
                "identities": self._identities,
                "in_place": in_place,
                "modules": sorted(
                    {str(getattr(f, "__module__", None)) for f in self._callees.values()}
                ),
                "name": self.name,
                "named": self._is_explicitly_named,
                "durable": durable,
                "out": self.options.out,
                "own_results": encoded_results,
                "operands": operand_count,
                "references": self._references,
                "side_effect": has_side_effect,
            }
        )
        return CallSite(
            self,
            _spec.key_of(text),
            text,
            Template(arguments),
            operand_count,
            Template(own_results),
            in_place,
            has_side_effect,
            durable,
        )

    # ---- the call ----------------------------------------------------------------------------

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
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
        leaves, treedef = jax.tree.flatten((args, kwargs))
        operands: list[Any] = []
        slots: list[Any] = []
        abstract: list[Any] = []
        for position, leaf in enumerate(leaves):
            if _is_operand(leaf):
                value, aval = self._operand(leaf, position, treedef)
                slots.append(Slot(len(operands)))
                operands.append(value)
                abstract.append(aval)
            else:
                slots.append(leaf)
                abstract.append(leaf)
        arguments = jax.tree.unflatten(treedef, slots)

        declared = self._results
        if callable(declared) and not isinstance(declared, jax.ShapeDtypeStruct):
            abstract_args, abstract_kwargs = jax.tree.unflatten(treedef, abstract)
            declared = declared(*abstract_args, **abstract_kwargs)
        result_leaves, result_tree = jax.tree.flatten(declared)
        results = [self._result(leaf) for leaf in result_leaves]
        slot_tree = jax.tree.unflatten(result_tree, [Slot(i) for i in range(len(results))])

        pairs, own = _in_place.pair(self.name, self.options.inout, arguments, slot_tree)
        refs = [i for i, x in enumerate(operands) if _compat.is_ref(x)]
        for i in refs:
            # A Ref is an operand that is updated: one more result, hidden, which is stored back.
            pairs.append((i, len(results)))
            aval = _compat.ref_value_aval(operands[i])
            results.append((aval.shape, aval.dtype))
        _in_place.check(self.name, pairs, operands, results)
        own_slots = jax.tree.leaves(own, is_leaf=lambda x: isinstance(x, Slot))
        renumbered = jax.tree.unflatten(
            jax.tree.structure(own, is_leaf=lambda x: isinstance(x, Slot)),
            [Slot(i) for i in range(len(own_slots))],
        )
        has_side_effect = self.options.has_side_effect
        if has_side_effect is None:
            has_side_effect = not results
        site = self._site(
            arguments, declared, len(operands), tuple(pairs), renumbered, has_side_effect
        )
        bound = _primitive.BoundCall(site, tuple(results), tuple(refs))

        before = _errors.newest()
        try:
            outs = _primitive.bind(bound, operands)
            raised = None
            if _errors.newest() != before:
                raised = _errors.raised_by(site.key, before)
        except _errors.from_xla as error:
            raised = _errors.original(error)
            if raised is None:
                raise
        if raised is None:
            return cast(R, jax.tree.unflatten(result_tree, outs))
        if has_side_effect:
            _compat.forget_failed_effects()
        # Outside the handler, so that the exception gets no second context.
        raise raised

    def _where(self, position: int, treedef: Any) -> str:
        tree = jax.tree.unflatten(treedef, [Slot(i) for i in range(treedef.num_leaves)])
        return _plan.argument_name(Template(tree).paths()[position])

    def _operand(self, leaf: Any, position: int, treedef: Any) -> tuple[Any, Any]:
        """An array argument as JAX takes it, and its abstract value."""
        if _compat.is_ref(leaf):
            aval = _compat.ref_value_aval(leaf)
            return leaf, jax.ShapeDtypeStruct(aval.shape, aval.dtype)
        if _compat.is_key_array(leaf):
            raise TypeError(
                f"{self.name}: argument {self._where(position, treedef)} is an array of PRNG keys, "
                f"which have no memory of a plain dtype; pass jax.random.key_data(key)"
            )
        if not isinstance(leaf, jax.Array):
            given = leaf
            try:
                leaf = jnp.asarray(given)
            except TypeError as error:
                raise TypeError(
                    f"{self.name}: argument {self._where(position, treedef)} is an array of dtype "
                    f"{getattr(given, 'dtype', type(given))}, which JAX does not have"
                ) from error
            if (
                isinstance(given, (np.ndarray, np.generic))
                and given.dtype.kind in "iu"
                and leaf.dtype.itemsize < given.dtype.itemsize
                and not np.array_equal(given.astype(leaf.dtype), given)
            ):
                raise TypeError(
                    f"{self.name}: argument {self._where(position, treedef)} has values that do not "
                    f"fit {leaf.dtype.name}, and JAX has {given.dtype.name} only with 64-bit types "
                    f"enabled: set jax_enable_x64"
                )
        return leaf, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)

    def _result(self, leaf: Any) -> tuple[tuple[int, ...], Any]:
        if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
            raise TypeError(
                f"{self.name}: the declared results hold {leaf!r}; expected a pytree of "
                f"jax.ShapeDtypeStruct"
            )
        dtype = np.dtype(leaf.dtype)
        if jax.dtypes.canonicalize_dtype(dtype) != dtype:
            raise TypeError(
                f"{self.name}: a result is declared as {dtype.name}, which JAX has only with 64-bit "
                f"types enabled: set jax_enable_x64, or declare "
                f"{jax.dtypes.canonicalize_dtype(dtype).name} and convert in the function"
            )
        shape = tuple(leaf.shape)
        return shape, dtype

    # ---- the user's view ---------------------------------------------------------------------

    def stats(self) -> dict[str, int]:
        """Counts since the Function was made.

        Returns:
            calls: how often XLA called it.
        """
        return {"calls": self.counts.calls()}

    def clear(self) -> None:
        """Forgets what was kept for repeated calls; it is made anew when needed."""
        for registration in list(self.counts.live):
            registration.target.clear_plans()

    def __repr__(self) -> str:
        return f"<jaxbridge.Function {self.name}>"


def _is_operand(leaf: Any) -> bool:
    return (
        isinstance(leaf, (jax.Array, np.ndarray, np.generic))
        or _compat.is_ref(leaf)
        or hasattr(type(leaf), "__jax_array__")
        or _compat.is_typed_number(leaf)
    )


def call(
    fn: Callable[..., Any] | Mapping[str, Callable[..., Any]],
    result_shape_dtypes: Any,
    *,
    framework: str | Mapping[str, str] | None = None,
    out: str | int | None = None,
    inout: Mapping[int | str, int] | None = None,
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
        },
        name=name,
    )


def function(
    *,
    result: Any,
    framework: str | Mapping[str, str] | None = None,
    out: str | int | None = None,
    inout: Mapping[int | str, int] | None = None,
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

    def decorate(fn: Callable[P, R]) -> Function[P, R]:
        made = call(
            fn,
            result,
            framework=framework,
            out=out,
            inout=inout,
            elementwise=elementwise,
            vmap_method=vmap_method,
            has_side_effect=has_side_effect,
            name=name,
        )
        return cast("Function[P, R]", made)

    return decorate

# SPDX-License-Identifier: Apache-2.0
"""Functions that are not Python's: what `load`, `bind`, `cuda_kernel` and `ffi` have in common."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import _compat, _identity, _lengths, _operands, _options, _signature, _static_values
from ._call_site import CallSite, Stats
from ._callee import Callee
from ._function import Function
from ._signature import Parameter, Signature
from .errors import SignatureError


class NativeCallee(Callee):
    """A function that is not Python's. Told by an identity of its own, and not by its content.

    Args:
        name: what it is called.
        platforms: where it runs, and what is called there (for messages).
        identity: what tells it; "content:..." where equal ones are the same function.
        options: as `_options.check` takes them.
        claim: whether the name tells it in every process.
    """

    how_on_both = "choose one for each platform with jax.lax.platform_dependent"

    def __init__(
        self,
        name: str,
        platforms: Mapping[str, Any],
        identity: str,
        options: Mapping[str, Any],
        claim: bool = False,
    ) -> None:
        _options.check_name(name)
        self.functions = dict(platforms)
        self.frameworks = dict.fromkeys(platforms, "native")
        defaults = dict.fromkeys(
            ("out", "inout", "vmap_method", "has_side_effect", "scratch"), None
        )
        self.options = _options.check(
            name, **{**defaults, "elementwise": False, "graph": "off", **options}
        )
        self.name = name
        self.references = dict.fromkeys(platforms, None)
        self.is_explicitly_named = claim
        self.own_identity = _identity.unique()
        self.programs = None
        self._tokens = weakref.WeakValueDictionary()
        self._witness = _identity.Witness()
        self.identities = dict.fromkeys(platforms, identity)
        self.is_told = _identity.is_told(identity)
        self.counts = Stats()
        self._counts_before = self.counts.totals()
        if claim:
            self._claim(name)

    def _definition(self) -> Any:
        return self.identities, self.options

    def _redefines(self, before: Callee) -> bool:
        return False

    @property
    def modules(self) -> list[str]:
        """None: it is found once it is made."""
        return []

    def tell(self) -> None:
        """Nothing of it can change."""

    @property
    def is_durable(self) -> bool:
        """Whether another process can find it."""
        return self.is_explicitly_named

    def is_same_as(self, other: Callee) -> bool:
        return self is other or (
            isinstance(other, NativeCallee)
            and self.identities == other.identities
            and self.options == other.options
        )

    def framework_on(self, platform: str) -> str:
        return "native"


class SignedCallee(NativeCallee):
    """A function whose operands and results a signature says."""

    signatures: tuple[Signature, ...]

    @property
    def says_what_is_updated(self) -> bool:
        return True

    def operand_names(self, site: CallSite) -> list[str]:
        return [f"{self.name}: argument {p.name!r}" for p in self.signatures[0].operands]


class NativeFunction(Function[..., Any]):
    """A Function whose arguments a signature says. Made by `load`, `bind` and `cuda_kernel`.

    Arrays and static values are passed by position or by name, as `inspect.signature` shows them. A
    `jax.Ref` for an array that is updated gets the result, which is not returned then.
    """

    def __init__(
        self,
        callee: NativeCallee,
        signatures: Sequence[Signature],
        results: Callable[..., Any],
        doc: str = "",
    ) -> None:
        self._begin(callee, results)
        self.signatures = tuple(signatures)
        self.__name__ = self.__qualname__ = callee.name.rpartition(".")[2]
        self.__module__ = "jaxbridge.native"
        self.__signature__ = self.signatures[0].python()
        forms = "\n".join(f"    {s}" for s in self.signatures)
        self.__doc__ = f"{doc}\n\nNative signature:\n{forms}\n".lstrip()

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self  # as builtin functions are

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Calls the function: eagerly, or as part of the program that is being traced.

        Raises:
            TypeError: an argument of another dtype, rank or kind, or one too many; the message names it.
        """
        operands, attributes, extra = self._arguments(args, kwargs)
        return super().__call__(*operands, **attributes, **extra)

    def _arguments(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[list[Any], dict[str, Any], dict[str, Any]]:
        """Operands, static values by name, and what is the caller's rule for results."""
        name = self.callee.name
        given = dict(kwargs)
        extra = {k: _types_in(given.pop(k)) for k in ("result_shape_dtypes",) if k in given}
        try:
            bound = self.__signature__.bind(*args, **given)
        except TypeError as error:
            raise TypeError(f"{name}: {error}; its signature is {self.signatures[0]}") from None
        bound.apply_defaults()
        first = self.signatures[0]
        attributes = {}
        for p in first.attributes:
            if bound.arguments[p.name] is None and p.optional:
                continue
            attributes[p.name] = self._static(p.name, bound.arguments[p.name])
        operands = []
        for k, p in enumerate(first.operands):
            operands.append(self._operand(k, p, bound.arguments[p.name]))
        avals = [_aval(x) for x in operands]
        signature = self.select(avals)
        reason = signature.computed_mismatch(avals, signature.lengths(avals, attributes))
        if reason is not None:
            raise TypeError(f"{name}: {reason}")
        return operands, attributes, extra

    def _operand(self, position: int, p: Parameter, x: Any) -> Any:
        where = f"{self.callee.name}: argument {p.name!r}"
        if isinstance(x, (bool, int, float, complex)) and not hasattr(x, "dtype"):
            dtypes = {s.operands[position].dtype for s in self.signatures}
            only = dtypes.pop() if len(dtypes) == 1 else None
            if only is None:
                return jnp.asarray(x)
            return jnp.asarray(_static_values.number(where, only, x), np.dtype(only))
        if not _operands.is_operand(x):
            raise TypeError(f"{where} is a {type(x).__name__}, expected an array: {p}")
        return _operands.as_operand(x, lambda: where)

    def _static(self, parameter: str, value: Any) -> Any:
        overloads = [p for s in self.signatures for p in s.attributes if p.name == parameter]
        return _static_values.normalize_for(self.callee.name, overloads, value)

    def select(self, operands: Sequence[Any]) -> Signature:
        """The overload for operands of these types; TypeError where there is none."""
        return select(self.callee.name, self.signatures, operands)


def select(name: str, signatures: Sequence[Signature], operands: Sequence[Any]) -> Signature:
    """The signature that takes operands of these types (abstract values)."""
    reasons = []
    for s in signatures:
        reason = s.mismatch(operands)
        if reason is None:
            return s
        reasons.append(reason)
    if len(reasons) == 1:
        raise TypeError(f"{name}: {reasons[0]}")
    forms = "\n".join(
        f"  {s}: {r.removesuffix(f': {s}')}" for s, r in zip(signatures, reasons, strict=True)
    )
    given = ", ".join(f"{np.dtype(x.dtype).name}[{','.join(map(str, x.shape))}]" for x in operands)
    raise TypeError(f"{name}: no overload takes ({given}); there are\n{forms}")


def _aval(x: Any) -> Any:
    aval = _compat.ref_value_aval(x) if _compat.is_ref(x) else x
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def _types_in(declared: Any) -> Any:
    """Declared results, of which arrays stand for their types; a function that returns them is left."""
    if callable(declared) and not isinstance(declared, jax.ShapeDtypeStruct):
        return declared
    arrays = (jax.Array, np.ndarray, np.generic)
    return jax.tree.map(
        lambda x: _aval(x) if isinstance(x, arrays) or _compat.is_ref(x) else x, declared
    )


def one_or_all(results: Sequence[Any]) -> Any:
    return results[0] if len(results) == 1 else tuple(results)


# ---- results ---------------------------------------------------------------------------------------


def result_types(
    name: str,
    signature: Signature,
    rules: Sequence[str],
    operands: Sequence[Any],
    attributes: Mapping[str, Any],
) -> list[tuple[tuple[Any, ...], Any]]:
    """(shape, dtype) of all results, hidden ones last.

    Args:
        name: of the function, for messages.
        signature: the overload that is called.
        rules: for each result "same_as 0" or "[n, 2 * m]"; none: the signature's own shapes, and what is
            updated is what it was.
        operands: abstract values.
        attributes: the static values.

    Raises:
        TypeError: the shape cannot be told; the message names the result.
    """
    parameters = [*signature.results, *signature.hidden]
    updated = {result: operand for operand, result in signature.in_place.items()}
    lengths = signature.lengths(operands, attributes)
    out = []
    for k, p in enumerate(parameters):
        rule = rules[k] if rules else f"same_as {updated[k]}" if k in updated else None
        dtype = p.dtype
        try:
            if rule is not None and rule.startswith("same_as "):
                of = _named_by(rule, operands)
                shape, dtype = tuple(of.shape), dtype or of.dtype
            else:
                axes = p.shape if rule is None else _signature.parse_axes(rule.strip()[1:-1])
                if axes is None or "*" in axes:
                    raise SignatureError(f"it is {p}, and no rule says its shape")
                shape = tuple(_lengths.evaluate(axis, lengths) for axis in axes)
            if any(isinstance(n, (int, np.integer)) and n < 0 for n in shape):
                raise SignatureError(
                    f"it is {p}, which is {list(shape)} here, with a negative length"
                )
            if dtype is None:
                raise SignatureError(f"it is {p}, and no rule says its dtype")
            if p.shape is not None and len(shape) != len(p.shape):
                raise SignatureError(f"it is {p}, and its rule {rule!r} gives rank {len(shape)}")
        except (SignatureError, ValueError) as error:
            raise TypeError(f"{name}: the shape of result {k}: {error}") from error
        out.append((shape, np.dtype(dtype)))
    return out


def check_rules(signature: Signature, rules: Sequence[str]) -> None:
    """Raises SignatureError where a rule can fit no call: see `result_types`."""
    for k, (p, rule) in enumerate(
        zip([*signature.results, *signature.hidden], rules, strict=bool(rules))
    ):
        try:
            if rule.startswith("same_as "):
                shape = _named_by(rule, signature.operands).shape
            else:
                shape = _signature.parse_axes(rule.strip()[1:-1])
                if shape is None or "*" in shape:
                    raise SignatureError(f"it is {p}, and no rule says its shape")
                for axis in shape:
                    _lengths.check(axis, signature.length_names)
            if shape is not None and p.shape is not None and len(shape) != len(p.shape):
                raise SignatureError(f"it is {p}, and its rule {rule!r} gives rank {len(shape)}")
        except (SignatureError, ValueError) as error:
            raise SignatureError(f"the shape of result {k}: {error}") from error


def _named_by(rule: str, operands: Sequence[Any]) -> Any:
    position = int(rule.removeprefix("same_as "))
    if position >= len(operands):
        raise SignatureError(
            f"its rule is same_as<{position}>, and there are {len(operands)} operands"
        )
    return operands[position]


def after_batching(error: TypeError) -> TypeError:
    return TypeError(
        f"{error}. Under jax.vmap whole batches have more axes: a function of a library takes them without "
        f'a rank, as buffer_view<T>; others need vmap_method="sequential", or defvmap'
    )

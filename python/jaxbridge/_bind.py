# SPDX-License-Identifier: Apache-2.0
"""`bind`: C functions, called from C++ with the arguments that a signature says."""

import ctypes
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from . import _config, _core, _identity, _lengths, _options, _static_values
from ._call_site import CallSite
from ._native_function import (
    NativeFunction,
    SignedCallee,
    after_batching,
    one_or_all,
    result_types,
    select,
)
from ._signature import MISSING, Parameter, Signature
from .errors import SignatureError

Types = Sequence[tuple[str, Sequence[int]]]
# (source, is_float, index, bits) of one parameter, as the core takes it.
Argument = tuple[str, bool, int, int]


class ShapedCallee(SignedCallee):
    """A function that gets pointers and numbers: its target is made for one list of shapes.

    What each parameter is follows from the shapes, and so from the call's text, which carries them.
    """

    how_batched = (
        "give it vmap_method='sequential', which calls it once for each element (its ranks are fixed, so "
        "that it takes no whole batches)"
    )

    @property
    def signature(self) -> Signature:
        return self.signatures[0]

    def _places(self) -> str:
        chosen = ("elementwise", "vmap_method", "has_side_effect")
        given = [f", {k}={v!r}" for k in chosen if (v := getattr(self.options, k))]
        return f"{self.made_of()} as {str(self.signature)!r}{''.join(given)}"

    def made_of(self) -> str:
        """What it is made of, for messages."""
        raise NotImplementedError

    def site_for(self, site: CallSite, operands: Sequence[Any], results: Sequence[Any]) -> CallSite:
        return site.of_types((self._types(operands), self._types(results)))

    def _types(self, avals: Sequence[Any]) -> list[Any]:
        for x in avals:
            if any(not isinstance(n, (int, np.integer)) for n in x.shape):
                raise NotImplementedError(
                    f"{self.name}: it is called with lengths as numbers, and {x} has symbolic ones"
                )
        return [[np.dtype(x.dtype).name, list(map(int, x.shape))] for x in avals]

    def check_arrays(self, platform: str, operands: Sequence[Any], results: Sequence[Any]) -> None:
        try:
            select(self.name, [self.signature], operands)
            expected = self.result_types(operands, None)
        except TypeError as error:
            raise after_batching(error) from None
        if expected is not None and [s for s, _ in expected] != [tuple(x.shape) for x in results]:
            raise after_batching(
                TypeError(
                    f"{self.name}: results of shapes {[x.shape for x in results]}, expected "
                    f"{[s for s, _ in expected]}"
                )
            )

    def result_types(self, operands: Sequence[Any], attributes: Any) -> Any:
        """(shape, dtype) of the results; None where the attributes are needed, and not given."""
        if attributes is None:
            if self.signature.attributes:
                return None
            attributes = {}
        return result_types(self.name, self.signature, (), operands, attributes)

    def _lengths(self, site: CallSite) -> tuple[Any, Any, Mapping[str, Any]]:
        """Abstract operands, static values, and lengths by name."""
        assert site.types is not None
        operands = [jax.ShapeDtypeStruct(tuple(s), d) for d, s in site.types[0]]
        attributes = dict(site.arguments.tree[1])
        return operands, attributes, self.signature.lengths(operands, attributes)

    def arguments(self, site: CallSite) -> tuple[list[Argument], list[str]]:
        """What each parameter gets, and the texts among them."""
        _, attributes, lengths = self._lengths(site)
        positions = {p.name: i for i, p in enumerate(self.signature.operands)}
        results = {id(p): i for i, p in enumerate(self.signature.results)}
        out: list[Argument] = []
        texts: list[str] = []
        for p in self.signature.parameters:
            if p.role in ("operand", "inout"):
                out.append(("operand", False, positions[p.name], 0))
            elif p.role == "result":
                out.append(("result", False, results[id(p)], 0))
            elif p.role == "stream":
                out.append(("stream", False, 0, 0))
            elif p.role == "size":
                out.append(_value(self.name, p, int(lengths[p.name])))
            elif p.form == "string":
                out.append(("text", False, len(texts), 0))
                texts.append(attributes[p.name])
            else:
                out.append(_value(self.name, p, attributes[p.name]))
        return out, texts


def _value(name: str, p: Parameter, value: Any) -> Argument:
    dtype = np.dtype(str(p.dtype))
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        if not limits.min <= value <= limits.max:
            raise OverflowError(f"{name}: {p.name} is {value}, which {dtype.name} does not hold")
        return "value", False, 0, int(value) & (2**64 - 1)
    if dtype.kind == "b":
        return "value", False, 0, int(value)
    # The bytes of the number in the lowest part of the word, as registers have it.
    raw = np.asarray(value, dtype).tobytes()
    return "value", dtype.name in ("float32", "float64"), 0, int.from_bytes(raw, "little")


def check_parameters(what: str, signature: Signature) -> None:
    lengths = {axis for p in signature.operands for axis in p.shape or ()}
    for p in signature.parameters:
        if p.role == "attribute" and p.name in lengths:
            raise SignatureError(
                f"{what}: {p}: an argument has a length of that name, which is an integer; give one of the "
                f"two another name"
            )
        if p.is_array and p.dtype is None:
            raise SignatureError(f"{what}: {p}: the dtype of an array has to be said")
        if p.role in ("attribute", "operand", "inout", "size") and not p.name:
            raise SignatureError(f"{what}: {str(p)!r} has no name; expected 'name: type'")
        if p.role == "workspace":
            raise SignatureError(f"{what}: {p}: there are no workspaces; return the array")
        if p.optional or p.form in ("list", "dict"):
            raise SignatureError(
                f"{what}: {p}: C has no such parameter; pass a number, or an array"
            )
        if (
            p.role == "attribute"
            and p.form == "scalar"
            and np.dtype(str(p.dtype)).kind not in "biuf"
        ):
            raise SignatureError(f"{what}: {p}: it is not passed by value; take an array")
        if p.default is not MISSING:
            try:
                _static_values.normalize(what, p, p.default)
            except (TypeError, ValueError, OverflowError) as error:
                raise SignatureError(f"{error}: it is the default") from error
    for p in signature.results:
        if p.shape is None or "*" in p.shape:
            raise SignatureError(f"{what}: {p}: the shape of a result has to be said")
    for p in (*signature.operands, *signature.results):
        for axis in p.shape or ():
            if axis != "*":
                _lengths.check_named(f"{what}: {p}", axis, signature.length_names)


def signature_of(what: str, signature: Any) -> Signature:
    parsed = signature if isinstance(signature, Signature) else Signature.parse(signature)
    if not any(p.is_array for p in parsed.parameters):
        raise SignatureError(
            f"{what}: {str(parsed)!r} has no array; expected one such as 'x: float32[n]'"
        )
    return parsed


def function_of(callee: ShapedCallee, doc: str) -> NativeFunction:
    def declared(*operands: Any, **attributes: Any) -> Any:
        for p in callee.signature.attributes:
            if p.form == "string" and "\0" in attributes[p.name]:
                raise ValueError(
                    f"{callee.name}: argument {p.name!r} is {attributes[p.name]!r}; C ends a text at "
                    f"its first zero"
                )
        types = callee.result_types(operands, attributes)
        return one_or_all([jax.ShapeDtypeStruct(s, d) for s, d in types])

    return NativeFunction(callee, [callee.signature], declared, doc)


# ---- C functions ---------------------------------------------------------------------------------


_c_function_pointer: Any = ctypes._CFuncPtr  # type: ignore[attr-defined]


def _address(function: Any) -> int:
    """The address of a C function, of whatever library it comes from."""
    if isinstance(function, int) and not isinstance(function, bool):
        address = function
    elif isinstance(function, _c_function_pointer):  # also a function of a ctypes.CDLL
        address = ctypes.cast(function, ctypes.c_void_p).value or 0
    elif isinstance(getattr(function, "address", None), int):  # Numba's cfunc
        address = function.address
    elif type(function).__module__ == "_cffi_backend":
        # A pointer to a function, or a function of a compiled module, whose address has to be taken.
        try:
            import cffi

            address = int(cffi.FFI().cast("uintptr_t", function))
        except TypeError as error:
            raise TypeError(
                f"bind: {function!r} is no pointer to a function; pass ffi.addressof(lib, 'name')"
            ) from error
    else:
        raise TypeError(
            f"bind: {function!r} is no C function; expected one of ctypes, of cffi, a numba.cfunc, or an "
            f"address (int)"
        )
    if not 0 < address < 2**64:
        raise ValueError(f"bind: the function's address is {address}, where nothing can be")
    return address


class _CFunctionCallee(ShapedCallee):
    how_named = 'bind(..., name="...")'

    def __init__(
        self,
        functions: Mapping[str, Any],
        signature: Signature,
        name: str,
        claim: bool,
        options: Mapping[str, Any],
    ) -> None:
        self.signatures = (signature,)
        (self.address,) = map(_address, functions.values())
        identity = f"name:{name}:{signature}" if claim else _identity.unique()
        super().__init__(name, functions, identity, options, claim)

    def _definition(self) -> Any:
        return self.identities, self.options, self.address

    def made_of(self) -> str:
        (function,) = self.functions.values()
        return f"the C function {getattr(function, '__name__', None) or hex(self.address)}"

    def make_target(self, site: CallSite, states: dict[Any, Any]) -> Any:
        arguments, texts = self.arguments(site)
        return _core.c_function(
            name=self.name,
            address=self.address,
            arguments=arguments,
            texts=texts,
            returns_error_code=self.signature.returns == "int32",
            operand_names=self.operand_names(site),
            in_place=list(site.in_place),
            external=list(site.external),
            inspects=_config.debug,
        )


def bind(
    function: Any,
    signature: str | Signature,
    *,
    name: str | None = None,
    platform: str | None = None,
    elementwise: bool = False,
    vmap_method: str | None = None,
    has_side_effect: bool | None = None,
) -> NativeFunction:
    """A Function of a plain C function, which is called from C++: no Python, no GIL.

    Args:
        function: of `ctypes` or cffi, a `numba.cfunc`, or an address. It is kept alive; for an address
            the caller does that.
        signature: the C parameters in order, as text or as a `Signature`::

            "x: float64[n, m], out y: float64[n], n: int64, m: int64, a: float64 = 1.0, stream -> int32"

            An array is a pointer to its first element, row by row; "out" is a result, "inout" an operand
            that is a result. A number by the name of a length gets that length; other numbers, and
            strings, are static arguments of the Function. "stream" is the CUDA stream. "-> int32" is an
            error code, of which 0 means success.
        name: what profiles and errors show, and what tells the function in other processes; without one
            it can't be exported.
        platform: where it runs: "cpu", or "cuda" for a function that launches work on the stream. None:
            "cuda" where the signature has a stream.
        elementwise: as `call` takes it.
        vmap_method: as `call` takes it.
        has_side_effect: as `call` takes it.

    Raises:
        SignatureError: the signature is none, or C has no such parameter.
        TypeError: `function` is no C function.
    """
    _options.check_name(name)
    shown = name or getattr(function, "__name__", None) or "bound"
    parsed = signature_of("bind", signature)
    if len(parsed.parameters) > _core.max_arguments:
        raise SignatureError(
            f"bind: the function has {len(parsed.parameters)} parameters; expected at most "
            f"{_core.max_arguments}: pass numbers as an array, or write a C function around it"
        )
    check_parameters("bind", parsed)
    for p in parsed.attributes:
        if p.dtype == "float16":
            raise SignatureError(f"bind: {p}: C passes no such number; take float32")
    where = platform or ("cuda" if parsed.of("stream") else "cpu")
    if where not in ("cpu", "cuda"):
        raise ValueError(f"bind: platform is {platform!r}; expected 'cpu' or 'cuda'")
    options = {
        "inout": parsed.in_place or None,
        "elementwise": elementwise,
        "vmap_method": vmap_method,
        "has_side_effect": has_side_effect,
    }
    callee = _CFunctionCallee({where: function}, parsed, str(shown), name is not None, options)
    return function_of(callee, inspect.getdoc(function) or "" if name is None else "")

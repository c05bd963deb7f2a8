# SPDX-License-Identifier: Apache-2.0
"""What a native function takes: the one language of signatures, of libraries, C functions and kernels.

A signature is a list of parameters in the order of the function's own::

    "x: float32[n, k], y: float32[k, m], out z: float32[n, m], n: int32, k: int32, a: float32 = 1.0"
"""

import ast
import dataclasses
import inspect
import keyword
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from . import _core, _lengths
from .errors import SignatureError

MISSING: Any = inspect.Parameter.empty

# As C names them.
_aliases = {
    "double": "float64",
    "float": "float32",
    "half": "float16",
    "int": "int32",
    "long": "int64",
    "size_t": "uint64",
    "unsigned": "uint32",
    "char": "int8",
    **{f"f{n}": f"float{n}" for n in (16, 32, 64)},
    **{f"i{n}": f"int{n}" for n in (8, 16, 32, 64)},
    **{f"u{n}": f"uint{n}" for n in (8, 16, 32, 64)},
    **{f"c{n}": f"complex{n}" for n in (64, 128)},
    "bf16": "bfloat16",
    "bool_": "bool",
}
_dtype_names = frozenset(_core.dtype_names())
_array_roles = ("operand", "result", "inout", "workspace")
_roles = (*_array_roles, "attribute", "size", "stream")
_forms = ("scalar", "list", "string", "dict")


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One parameter of a native function.

    Args:
        name: what it is called; empty for results of a library's function.
        role: "operand", "result", "inout" (an operand that is a result), "workspace" (a hidden result),
            "attribute" (a static value), "size" (the length by that name) or "stream".
        dtype: NumPy's name of that of its elements, or of the value; None: any (arrays of a library's
            function).
        shape: of an array: for each axis a name, a number, an expression of names, or "*" for any
            length; None: any rank.
        form: of an attribute: "scalar", "list", "string", "dict".
        optional: the attribute may be left out.
        default: what the attribute is where it is not given.

    Raises:
        SignatureError: there is no such parameter.
    """

    name: str
    role: str
    dtype: str | None = None
    shape: tuple[str, ...] | None = None
    form: str = "scalar"
    optional: bool = False
    default: Any = MISSING

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not (self.name == "" or self.name.isidentifier()):
            raise SignatureError(
                f"a parameter is called {self.name!r}; expected a Python identifier"
            )
        where = f"the parameter {self.name!r}"
        for what, given, known in (("role", self.role, _roles), ("form", self.form, _forms)):
            if given not in known:
                raise SignatureError(
                    f"{where} has the {what} {given!r}; expected one of {', '.join(known)}"
                )
        if self.dtype is not None:
            object.__setattr__(self, "dtype", _dtype_name(where, self.dtype))
        if self.is_array:
            object.__setattr__(self, "shape", _axes(where, self.shape))
            if self.default is not MISSING or self.optional or self.form != "scalar":
                raise SignatureError(f"{where} is an array: it has no default, and no form")
        elif self.shape is not None:
            raise SignatureError(f"{where} has a shape, and is no array but a {self.role}")
        if self.role == "size" and not _is_integer(self):
            raise SignatureError(f"{where} is a length, of {self.dtype}; expected an integer type")
        if self.role == "attribute" and self.form in ("scalar", "list") and self.dtype is None:
            raise SignatureError(f"{where} has no dtype; expected one such as float32, int64")

    def __str__(self) -> str:
        if self.role == "stream":
            return "stream"
        out = {"result": "out ", "inout": "inout ", "workspace": "workspace "}.get(self.role, "")
        out += f"{self.name}: " if self.name else ""
        out += "optional " if self.optional else ""
        if self.form in ("string", "dict"):
            out += self.form
        elif self.is_array:
            axes = "..." if self.shape is None else ", ".join(self.shape)
            out += f"{self.dtype or 'any'}[{axes}]"
        else:
            out += ("list " if self.form == "list" else "") + str(self.dtype)
        return out if self.default is MISSING else f"{out} = {self.default!r}"

    @property
    def is_array(self) -> bool:
        return self.role in _array_roles


@dataclasses.dataclass(frozen=True)
class Signature:
    """The parameters of a native function, in its own order, and what it returns.

    Args:
        parameters: each as a `Parameter`.
        returns: "void", or "int32": an error code, of which 0 means success.

    Raises:
        SignatureError: parameters that do not fit together.
    """

    parameters: tuple[Parameter, ...]
    returns: str = "void"

    def __post_init__(self) -> None:
        object.__setattr__(self, "parameters", tuple(self.parameters))
        if unknown := [p for p in self.parameters if not isinstance(p, Parameter)]:
            raise SignatureError(f"a signature is made of Parameters, and has {unknown[0]!r}")
        axes = {axis for p in self.operands for axis in p.shape or ()}
        for p in self.of("size"):
            if p.name not in axes:
                raise SignatureError(
                    f"{str(p)!r} is a length, and no argument has one of that name"
                )
        names = [p.name for p in self.parameters if p.name]
        for name in names:
            if names.count(name) > 1:
                raise SignatureError(f"two parameters are called {name!r}")
            if keyword.iskeyword(name) or name == "result_shape_dtypes":
                raise SignatureError(f"a parameter cannot be called {name!r} in Python")
        if self.returns not in ("void", "int32"):
            raise SignatureError(
                f"it returns {self.returns!r}; expected void, or int32 for an error code: what a function "
                f"computes is written to an array, so write a C function around one that returns it"
            )

    @classmethod
    def parse(cls, text: str) -> "Signature":
        """The signature that a text says; SignatureError where it says none."""
        if not isinstance(text, str):
            raise SignatureError(f"a signature is a string or a Signature, got {type(text)}")
        body, arrow, returns = text.partition("->")
        parameters = [_parse_parameter(entry) for entry in _split(body)]
        axes = {
            axis
            for p in parameters
            if p.role in ("operand", "inout")
            for axis in p.shape or ()
            if axis.isidentifier()
        }
        # A number by the name of a length is that length.
        parameters = [
            dataclasses.replace(p, role="size")
            if p.role == "attribute" and p.name in axes and p.form == "scalar" and _is_integer(p)
            else p
            for p in parameters
        ]
        kind = _aliases.get(returns.strip(), returns.strip()) if arrow else "void"
        return cls(tuple(parameters), kind)

    def named(self, names: str) -> "Signature":
        """With names, names of lengths and defaults from `names`: "x[n, k], a = 2.0".

        Raises:
            SignatureError: they are not those of the operands and attributes.
        """
        mine = [p for p in self.parameters if p.role in ("operand", "inout", "attribute")]
        given = _split(names) if names else [f"p{i}" for i in range(len(mine))]
        if len(given) != len(mine):
            raise SignatureError(f"{len(given)} names ({names!r}) for {len(mine)} parameters")
        renamed: dict[int, Parameter] = {}
        for p, entry in zip(mine, given, strict=True):
            found = re.fullmatch(r"\s*(\w+)\s*(?:\[(.*?)\])?\s*(?:=\s*(.+?))?\s*", entry)
            if not found or not found[1].isidentifier():
                raise SignatureError(f"{entry!r} is no name of a parameter")
            shape = p.shape
            if found[2] is not None:
                shape = parse_axes(found[2])
                if not p.is_array or (
                    p.shape is not None and shape is not None and len(shape) != len(p.shape)
                ):
                    raise SignatureError(f"{entry!r} does not fit {p}")
            default = MISSING if found[3] is None else _literal(found[3])
            if default is not MISSING and p.role != "attribute":
                raise SignatureError(f"{entry!r}: an array has no default")
            renamed[id(p)] = dataclasses.replace(
                p,
                name=found[1],
                shape=shape,
                default=None if p.optional and default is MISSING else default,
            )
        return Signature(tuple(renamed.get(id(p), p) for p in self.parameters), self.returns)

    def __str__(self) -> str:
        out = ", ".join(map(str, self.parameters))
        return out if self.returns == "void" else f"{out} -> {self.returns}"

    # ---- which is what -----------------------------------------------------------------------

    def of(self, *roles: str) -> list[Parameter]:
        return [p for p in self.parameters if p.role in roles]

    @property
    def operands(self) -> list[Parameter]:
        return self.of("operand", "inout")

    @property
    def attributes(self) -> list[Parameter]:
        return self.of("attribute")

    @property
    def results(self) -> list[Parameter]:
        """What the caller gets, in order."""
        return self.of("result", "inout")

    @property
    def hidden(self) -> list[Parameter]:
        return self.of("workspace")

    @property
    def in_place(self) -> dict[int, int]:
        """From positions of operands to those of the results that they are."""
        operands, results = self.operands, self.results
        return {operands.index(p): results.index(p) for p in self.of("inout")}

    @property
    def length_names(self) -> set[str]:
        """Of lengths of operands, and of integer attributes."""
        axes = {axis for p in self.operands for axis in p.shape or () if axis.isidentifier()}
        return axes | {p.name for p in self.attributes if p.form == "scalar" and _is_integer(p)}

    def python(self) -> inspect.Signature:
        """What the caller gives: first the operands, then the attributes, each in their order."""
        parameters: list[inspect.Parameter] = []
        kind: Any = inspect.Parameter.POSITIONAL_OR_KEYWORD
        for p in (*self.operands, *self.attributes):
            # C puts them in any order, and Python none without a default behind one that has one.
            if p.default is MISSING and parameters and parameters[-1].default is not MISSING:
                kind = inspect.Parameter.KEYWORD_ONLY
            parameters.append(inspect.Parameter(p.name, kind, default=p.default))
        return inspect.Signature(parameters)

    # ---- arrays ------------------------------------------------------------------------------

    def mismatch(self, operands: Sequence[Any]) -> str | None:
        """Why these operands (abstract values) are not what the function takes; None: they are."""
        lengths: dict[str, tuple[Any, str]] = {}
        expected = self.operands
        if len(operands) != len(expected):
            return f"got {len(operands)} arrays, expected {len(expected)}: {self}"
        for p, x in zip(expected, operands, strict=True):
            given = f"argument {p.name!r} is {_type_text(x)}"
            if p.dtype is not None and np.dtype(x.dtype).name != p.dtype:
                hint = ""
                if (
                    p.dtype in ("float64", "int64", "uint64", "complex128")
                    and not jax.config.jax_enable_x64
                ):
                    hint = "; JAX has 64-bit types only with jax_enable_x64"
                return f"{given}, expected {_array_text(p)}{hint}"
            if p.shape is None:
                continue
            if len(x.shape) != len(p.shape):
                return f"{given}, of rank {len(x.shape)}, expected {_array_text(p)}, of rank {len(p.shape)}"
            for axis, length in zip(p.shape, x.shape, strict=True):
                if axis.isidentifier():
                    before, of = lengths.setdefault(axis, (length, p.name))
                    if before != length:
                        return f"{given}, and {axis} is {before} in argument {of!r}: {self}"
        return self.computed_mismatch(operands, {name: n for name, (n, _) in lengths.items()})

    def computed_mismatch(self, operands: Sequence[Any], lengths: Mapping[str, Any]) -> str | None:
        """The same, of lengths that are numbers and expressions, as far as `lengths` say them.

        What an attribute is missing for is not compared.
        """
        numbers = {p.name for p in self.attributes if p.form == "scalar" and _is_integer(p)}
        missing = numbers - set(lengths)
        for p, x in zip(self.operands, operands, strict=True):
            for axis, length in zip(p.shape or (), x.shape, strict=p.shape is not None):
                if (
                    axis == "*"
                    or axis.isidentifier()
                    or not missing.isdisjoint(_lengths.names_in(axis))
                ):
                    continue
                given = f"argument {p.name!r} is {_type_text(x)}, expected {_array_text(p)}"
                try:
                    wanted = _lengths.evaluate(axis, lengths)
                except SignatureError as error:
                    return f"{given}: {error}"
                if wanted != length:
                    return given if axis.isdigit() else f"{given}, where {axis} is {wanted}"
        return None

    def lengths(self, operands: Sequence[Any], attributes: Mapping[str, Any]) -> dict[str, Any]:
        """The numbers by name: lengths of operands, integer attributes."""
        out = {
            p.name: attributes[p.name]
            for p in self.attributes
            if p.form == "scalar" and _is_integer(p) and attributes.get(p.name) is not None
        }
        for p, x in zip(self.operands, operands, strict=True):
            if p.shape is not None:
                out.update(
                    (axis, n)
                    for axis, n in zip(p.shape, x.shape, strict=True)
                    if axis.isidentifier()
                )
        return out


# ---- texts ---------------------------------------------------------------------------------------


def _split(text: str) -> list[str]:
    """The entries of a list, at commas outside of brackets and quotes."""
    entries, depth, quote, begin = [], 0, "", 0
    for i, c in enumerate(text):
        if quote:
            quote = "" if c == quote else quote
        elif c in "\"'":
            quote = c
        elif c in "[({":
            depth += 1
        elif c in "])}":
            depth -= 1
        elif c == "," and depth == 0:
            entries.append(text[begin:i])
            begin = i + 1
    if depth or quote:
        raise SignatureError(f"{text!r} has a bracket or a quote without its other half")
    entries.append(text[begin:])
    stripped = [e.strip() for e in entries]
    if stripped == [""]:
        return []
    if "" in stripped:
        raise SignatureError(f"{text!r} has an empty entry")
    return stripped


_parameter = re.compile(
    r"(?:(?P<role>out|inout|workspace)\s+)?"
    r"(?:(?P<name>[A-Za-z_]\w*)\s*:\s*)?"
    r"(?P<optional>optional\s+)?(?:const\s+)?"
    r"(?P<list>list\s+)?"
    r"(?P<type>[A-Za-z_]\w*)"
    r"\s*(?:\[(?P<axes>[^\[\]]*)\])?"
    r"\s*(?:=\s*(?P<default>.+))?",
    re.DOTALL,
)


def _parse_parameter(entry: str) -> Parameter:
    if entry == "stream":
        return Parameter("", "stream")
    found = _parameter.fullmatch(entry)
    if found is None:
        raise SignatureError(
            f"{entry!r} is no parameter; expected 'x: float32[n, m]' (an array), 'out y: float32[n]', "
            f"'inout z: float32[n]', 'a: float64 = 1.0' (a static value), 'n: int32' (a length), 'stream'"
        )
    role, name, kind, axes = found["role"], found["name"] or "", found["type"], found["axes"]
    default = MISSING if found["default"] is None else _literal(found["default"])
    optional = found["optional"] is not None
    if optional and default is MISSING:
        default = None
    if axes is not None:
        if found["list"] or optional or default is not MISSING:
            raise SignatureError(f"{entry!r}: an array has no default, and is no list")
        shape = parse_axes(axes)
        dtype = None if kind == "any" else _dtype(kind, entry)
        of = {"out": "result", "inout": "inout", "workspace": "workspace", None: "operand"}[role]
        return Parameter(name, of, dtype, shape)
    if role is not None:
        raise SignatureError(
            f"{entry!r}: {role} is for arrays; expected {role} {name}: {kind}[...]"
        )
    if kind in ("string", "dict"):
        return Parameter(name, "attribute", None, None, kind, optional, default)
    form = "list" if found["list"] else "scalar"
    return Parameter(name, "attribute", _dtype(kind, entry), None, form, optional, default)


def parse_axes(text: str) -> tuple[str, ...] | None:
    if text.strip() == "...":
        return None
    axes = tuple(_split(text))
    for axis in axes:
        if axis != "*":
            _lengths.expression(axis)
    return axes


def _dtype(text: str, entry: str) -> str:
    return _dtype_name(repr(entry), text)


def _dtype_name(where: str, dtype: Any) -> str:
    """What NumPy calls it; also of its own objects."""
    try:
        name = _aliases.get(dtype, dtype) if isinstance(dtype, str) else np.dtype(dtype).name
    except TypeError:
        name = ""
    if name not in _dtype_names:
        raise SignatureError(f"{where}: {dtype!r} is no dtype; expected one such as float32, int64")
    return name


def _axes(where: str, shape: Any) -> tuple[str, ...] | None:
    if shape is None:
        return None
    if not isinstance(shape, (tuple, list)) or not all(isinstance(n, (str, int)) for n in shape):
        raise SignatureError(
            f"{where} has the shape {shape!r}; expected one name, number or expression for each axis, as "
            f'("n", 3, "2 * n")'
        )
    axes = tuple(str(n).strip() for n in shape)
    for axis in axes:
        if axis != "*":
            _lengths.expression(axis)
    return axes


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError) as error:
        raise SignatureError(f"the default {text!r} is no Python literal") from error


def _is_integer(p: Parameter) -> bool:
    return p.dtype is not None and p.dtype.lstrip("u").startswith("int")


def _type_text(x: Any) -> str:
    return f"{np.dtype(x.dtype).name}[{','.join(map(str, x.shape))}]"


def _array_text(p: Parameter) -> str:
    return f"{p.dtype or 'any'}[{'...' if p.shape is None else ', '.join(p.shape)}]"

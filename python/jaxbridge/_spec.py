# SPDX-License-Identifier: Apache-2.0
"""The canonical text of a call, which the program carries, and the trees that it describes.

The text holds what is needed to make the call again in another process: references to functions,
frameworks, where operands and static values stand among the arguments, the results' tree. It is JSON
with sorted keys: the same call gives the same text in every process.
"""

import dataclasses
import enum
import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from . import _identity


class Slot:
    """Stands in a tree for the operand or the result of that number."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Slot) and other.index == self.index

    def __hash__(self) -> int:
        return hash(self.index)

    def __repr__(self) -> str:
        return f"Slot({self.index})"


class Template:
    """A tree in which some leaves are slots; `fill` puts values there.

    Args:
        tree: any pytree, with `Slot` leaves.
    """

    def __init__(self, tree: Any) -> None:
        leaves, self._treedef = jax.tree.flatten(tree, is_leaf=lambda x: isinstance(x, Slot))
        self._leaves: list[Any] = leaves
        self.slots: list[tuple[int, int]] = [
            (position, leaf.index) for position, leaf in enumerate(leaves) if isinstance(leaf, Slot)
        ]
        self.tree = tree

    def fill(self, values: Sequence[Any]) -> Any:
        """The tree with `values[i]` in place of slot i."""
        leaves = list(self._leaves)
        for position, index in self.slots:
            leaves[position] = values[index]
        return jax.tree.unflatten(self._treedef, leaves)

    def paths(self) -> dict[int, str]:
        """The path of each slot, as `jax.tree_util.keystr` writes it."""
        with_path, _ = jax.tree_util.tree_flatten_with_path(
            self.tree, is_leaf=lambda x: isinstance(x, Slot)
        )
        return {
            leaf.index: jax.tree_util.keystr(path)
            for path, leaf in with_path
            if isinstance(leaf, Slot)
        }


def encode(tree: Any, opaque: Callable[[Any], Any], witness: _identity.Witness) -> tuple[Any, bool]:
    """A JSON value for `tree`, and whether another process can decode it.

    Args:
        tree: a tree of tuples, lists, dicts, named tuples and leaves, `Slot` among them.
        opaque: gives a token, with its `text`, for what has no text of its own; equal tokens for equal
            things, as long as one lives.
        witness: gets what the text has by name, and keeps the tokens.
    """
    portable = True

    def token_of(x: Any) -> str:
        token = opaque(x)
        witness.saw(token)
        return str(token.text)

    def walk(x: Any) -> Any:
        nonlocal portable
        match x:
            case Slot():
                return ["slot", x.index]
            case None:
                return None
            case _ if type(x) in (bool, str):
                return x
            case enum.Enum() if (ref := _identity.reference(type(x))) is not None:
                witness.saw(type(x))
                if x.name in type(x).__members__:
                    return ["enum", ref, x.name]
                return ["flags", ref, walk(x.value)]
            case _ if type(x) is int:
                return ["int", f"{x:x}"]  # Python limits the length of decimals
            case _ if type(x) is float:
                return ["float", _identity.float_text(x)]
            case _ if type(x) is complex:
                return ["complex", _identity.float_text(x.real), _identity.float_text(x.imag)]
            case _ if type(x) is bytes:
                return ["bytes", x.hex()]
            case _ if x is Ellipsis:
                return ["ellipsis"]
            case _ if type(x) is slice:
                return ["slice", walk(x.start), walk(x.stop), walk(x.step)]
            case _ if type(x) is tuple:
                return ["tuple", [walk(y) for y in x]]
            case _ if type(x) is list:
                return ["list", [walk(y) for y in x]]
            case _ if type(x) is dict and all(type(k) is str for k in x):
                return ["dict", [[k, walk(x[k])] for k in sorted(x)]]
            case _ if type(x) is dict:
                return ["items", sorted(([walk(k), walk(v)] for k, v in x.items()), key=json.dumps)]
            case _ if type(x) is range:
                return ["range", x.start, x.stop, x.step]
            case _ if type(x) is frozenset:
                return ["frozenset", sorted((walk(y) for y in x), key=json.dumps)]
            case tuple() if hasattr(x, "_fields") and _identity.reference(type(x)):
                witness.saw(type(x))
                return ["namedtuple", _identity.reference(type(x)), [walk(y) for y in x]]
            case np.dtype() if (text := _dtype_text(x)) is not None:
                return ["dtype", text]
            case _ if callable(x) and (ref := _identity.reference(x)) is not None:
                identity, _ = _identity.fingerprint(x)
                if _identity.is_told(identity):
                    witness.saw(x)
                    return ["reference", ref, identity]
        portable = False
        leaves, treedef = jax.tree.flatten(x, is_leaf=lambda y: isinstance(y, Slot))
        if jax.tree_util.treedef_is_leaf(treedef):
            return ["opaque", token_of(x)]
        # A node of a registered class: its kind is told by its treedef, which compares by content.
        return ["node", token_of(treedef), [walk(leaf) for leaf in leaves]]

    return walk(tree), portable


def has_plain_keys(tree: Any) -> bool:
    """Whether all dictionaries have strings as keys: then trees with equal treedefs are written alike."""
    if isinstance(tree, (tuple, list)):
        return all(map(has_plain_keys, tree))
    if type(tree) is dict:
        return all(type(k) is str and has_plain_keys(x) for k, x in tree.items())
    return True


def decode(node: Any) -> Any:
    """The tree that `encode` was given.

    Raises:
        LookupError: a module that it refers to is not imported.
    """
    if node is None or isinstance(node, (bool, str)):
        return node
    kind, *rest = node
    match kind:
        case "slot":
            return Slot(rest[0])
        case "int":
            return int(rest[0], 16)
        case "float":
            return float.fromhex(rest[0])
        case "complex":
            return complex(float.fromhex(rest[0]), float.fromhex(rest[1]))
        case "bytes":
            return bytes.fromhex(rest[0])
        case "ellipsis":
            return Ellipsis
        case "slice":
            return slice(*map(decode, rest))
        case "tuple":
            return tuple(map(decode, rest[0]))
        case "list":
            return list(map(decode, rest[0]))
        case "dict":
            return {k: decode(v) for k, v in rest[0]}
        case "items":
            return {decode(k): decode(v) for k, v in rest[0]}
        case "range":
            return range(*rest)
        case "frozenset":
            return frozenset(map(decode, rest[0]))
        case "namedtuple":
            return _identity.resolve(rest[0])(*map(decode, rest[1]))
        case "dtype":
            return jax.numpy.dtype(rest[0])
        case "enum":
            return _identity.resolve(f"{rest[0]}.{rest[1]}")
        case "flags":
            return _identity.resolve(rest[0])(decode(rest[1]))
        case "reference":
            found = _identity.resolve(rest[0])
            if _identity.fingerprint(found)[0] != rest[1]:
                raise LookupError(f"{rest[0]!r}, one of its arguments, has other code here")
            return found
        case _:
            raise LookupError(f"a value of kind {kind!r} exists in one process only")


def _dtype_text(dtype: np.dtype[Any]) -> str | None:
    """A text that gives `dtype` again, None where there is none."""
    for text in (dtype.name, dtype.str):
        try:
            if jax.numpy.dtype(text) == dtype:
                return text
        except TypeError:
            pass
    return None


class ById:
    """A key for an object that has no hash."""

    def __init__(self, x: Any) -> None:
        self.x = x

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ById) and other.x is self.x

    def __hash__(self) -> int:
        return id(self.x)


def exactly(x: Any) -> Any:
    """A key under which equal values of other types (1, 1.0, True) inside a dataclass differ.

    A dataclass that can change is told by the object, as JAX's static arguments have to be.
    """
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        params: Any = x.__dataclass_params__  # type: ignore[attr-defined]
        if not params.frozen:
            return ById(x)
        if not params.eq:
            return x
        fields = [f.name for f in dataclasses.fields(x) if f.compare]
        return type(x), *(exactly(getattr(x, name)) for name in fields)
    if type(x) is tuple:
        return tuple, *map(exactly, x)
    if isinstance(x, float):
        return type(x), _identity.float_text(x)
    return type(x), repr(x) if isinstance(x, complex) else x


def to_text(spec: dict[str, Any]) -> str:
    """The canonical text."""
    return json.dumps(spec, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def with_entry(text: str, name: str, value: Any) -> str:
    """The text of a call with one entry more."""
    return to_text({**json.loads(text), name: value})


def of_part(text: str, whole: int, types: tuple[Any, Any]) -> str:
    """The text of a call on parts of another one's arrays, from that one's text and key."""
    return to_text({**json.loads(text), "types": types, "whole": whole})


def key_of(text: str) -> int:
    """The key of a call: a signed 64-bit hash of its text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)

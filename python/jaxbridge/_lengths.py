# SPDX-License-Identifier: Apache-2.0
"""Expressions of lengths: "2 * n + 1"."""

import ast
import functools
import operator
from collections.abc import Callable, Collection, Mapping
from typing import Any

from .errors import SignatureError

_operators: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


@functools.lru_cache(1024)
def expression(text: str) -> ast.expr:
    """The tree of an expression; SignatureError where the text is none."""
    if len(text) > 1000:
        raise SignatureError("an expression of a length has more than 1000 characters")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise SignatureError(f"{text!r} is no expression of lengths") from error
    for node in ast.walk(tree):
        is_number = isinstance(node, ast.Constant) and type(node.value) is int
        is_call = (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("min", "max")
            and not node.keywords
            and len(node.args) > 1
        )
        is_operation = isinstance(node, ast.BinOp) and type(node.op) in _operators
        others = (ast.Name, ast.Load, ast.operator)
        if not (is_number or is_call or is_operation or isinstance(node, others)):
            raise SignatureError(
                f"{text!r} is no expression of lengths; expected names, numbers, + - * // %, min and max"
            )
    return tree


def names_in(text: str) -> set[str]:
    """The lengths and attributes that an expression needs."""
    nodes = list(ast.walk(expression(text)))
    functions = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
    return {n.id for n in nodes if isinstance(n, ast.Name) and id(n) not in functions}


def check(text: str, known: Collection[str]) -> None:
    """Raises SignatureError where an expression is none, or needs more than what is known."""
    for name in sorted(names_in(text)):
        if name not in known:
            raise SignatureError(
                f"{text!r}: {name} is neither a length of an argument nor an integer attribute"
            )


def check_named(where: str, text: str, known: Collection[str]) -> None:
    """The same, with an error that begins with `where`."""
    try:
        check(text, known)
    except SignatureError as error:
        raise SignatureError(f"{where}: {error}") from None


def evaluate(text: str, lengths: Mapping[str, Any]) -> Any:
    """The number that an expression is.

    Raises:
        SignatureError: a name is unknown, or it cannot be computed.
    """

    def of(node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name):
                return lengths[name]
            case ast.BinOp(left=left, op=op, right=right):
                return _operators[type(op)](of(left), of(right))
            case ast.Call(func=ast.Name(id=name), args=args):
                return (min if name == "min" else max)(*map(of, args))
            case _:
                raise SignatureError(f"{text!r} is no expression of lengths")

    check(text, lengths)
    try:
        return of(expression(text))
    except (ZeroDivisionError, RecursionError) as error:
        raise SignatureError(f"{text!r} cannot be computed with {dict(lengths)}") from error

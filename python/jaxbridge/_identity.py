# SPDX-License-Identifier: Apache-2.0
"""What a function is, told by content, so that two processes tell it alike.

Told by content: module, qualified name, code, defaults, closure cells and bound arguments, as far as
these can't change. What can change (a list in a closure, an object of a class) can't be told, and gets
an identity that no other function in any process has.
"""

import dis
import functools
import hashlib
import itertools
import os
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np

_process = os.urandom(8).hex()
_counter = itertools.count()


class _CannotTellError(Exception):
    pass


def unique() -> str:
    """An identity that nothing else has, here or in another process."""
    return f"only:{_process}:{next(_counter)}"


def fingerprint(fn: Any) -> str:
    """The identity of `fn`: equal for equal content, `unique()` where content can't tell."""
    try:
        digest = hashlib.sha256()
        _feed(fn, digest.update, set())
        return f"content:{digest.hexdigest()}"
    except _CannotTellError:
        return unique()


def is_told(identity: str) -> bool:
    """Whether an identity rests on content."""
    return identity.startswith("content:")


def reference(fn: Any) -> str | None:
    """`module:qualified.name` by which any process finds `fn`, or None."""
    if isinstance(fn, np.ufunc):
        return _ufunc_reference(fn)
    module = getattr(fn, "__module__", None)
    name = getattr(fn, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or "<" in name:
        return None
    if isinstance(fn, types.MethodType) or not callable(fn):
        return None
    # A def that is being decorated is not in its module yet: its name is enough.
    if isinstance(fn, types.FunctionType):
        return f"{module}:{name}"
    try:
        found = resolve(f"{module}:{name}")
    except LookupError:
        return None
    return f"{module}:{name}" if found is fn else None


def _ufunc_reference(fn: Any) -> str | None:
    modules = [getattr(fn, "__module__", None), "numpy", "scipy.special"]
    for module in modules:
        if isinstance(module, str) and getattr(sys.modules.get(module), fn.__name__, None) is fn:
            return f"{module}:{fn.__name__}"
    return None


def resolve(ref: str) -> Any:
    """What `reference` named; LookupError names the module to import."""
    module_name, _, path = ref.partition(":")
    module = sys.modules.get(module_name)
    if module is None:
        raise LookupError(
            f"the module {module_name!r} is not imported in this process; import it first"
        )
    found: Any = module
    for part in path.split("."):
        if not hasattr(found, part):
            raise LookupError(f"the module {module_name!r} has no {path!r} in this process")
        found = getattr(found, part)
    return found


def _feed(x: Any, update: Callable[[bytes], None], seen: set[int]) -> None:
    def text(s: str) -> None:
        raw = s.encode()
        update(f"{len(raw)}:".encode())
        update(raw)

    def each(kind: str, items: Any) -> None:
        items = list(items)
        text(f"{kind}{len(items)}")
        for item in items:
            _feed(item, update, seen)

    if x is None or x is Ellipsis or isinstance(x, (bool, int, str, bytes)):
        text(f"{type(x).__qualname__}:{x!r}")
    elif type(x) is float:
        text(f"float:{x.hex()}")
    elif type(x) is complex:
        text(f"complex:{x.real.hex()}:{x.imag.hex()}")
    elif type(x) is tuple:
        each("tuple", x)
    elif type(x) is slice:
        each("slice", (x.start, x.stop, x.step))
    elif type(x) is frozenset:
        each("frozenset", sorted(x, key=repr))
    elif isinstance(x, np.dtype):
        text(f"dtype:{x!r}")
    elif isinstance(x, np.generic):
        text(f"scalar:{x.dtype!r}:")
        update(x.tobytes())
    elif isinstance(x, types.ModuleType):
        text(f"module:{x.__name__}")
    elif isinstance(x, types.CodeType):
        _feed_code(x, update, seen)
    elif isinstance(x, functools.partial):
        each("partial", (x.func, x.args, tuple(sorted(x.keywords.items()))))
    elif isinstance(x, types.FunctionType):
        if id(x) in seen:  # a function that refers to itself
            text(f"again:{x.__module__}:{x.__qualname__}")
            return
        seen.add(id(x))
        free = frozenset(x.__code__.co_freevars)
        if free and _assigns_to(free, x.__code__):
            raise _CannotTellError
        text(f"function:{x.__module__}:{x.__qualname__}")
        _feed_code(x.__code__, update, seen)
        each("defaults", x.__defaults__ or ())
        each("kwdefaults", tuple(sorted((x.__kwdefaults__ or {}).items())))
        each("cells", (_cell(c) for c in x.__closure__ or ()))
    elif isinstance(x, types.MethodType) and isinstance(x.__self__, type):
        each("method", (x.__func__, x.__self__))
    else:
        ref = reference(x)
        if ref is None:
            raise _CannotTellError
        text(f"reference:{ref}")


def _cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty: a name that is bound later
        raise _CannotTellError from None


def _feed_code(code: types.CodeType, update: Callable[[bytes], None], seen: set[int]) -> None:
    # Not the file and the lines: they move when something else in the module changes.
    update(code.co_code)
    for part in (
        (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags),
        code.co_names,
        code.co_varnames,
        code.co_freevars,
        code.co_cellvars,
        code.co_consts,
    ):
        _feed(part, update, seen)


def _assigns_to(free: frozenset[str], code: types.CodeType) -> bool:
    """Whether the code, or a function inside it, gives a new value to one of the names `free`."""
    return any(
        i.opname in ("STORE_DEREF", "DELETE_DEREF") and i.argval in free
        for i in dis.get_instructions(code)
    ) or any(_assigns_to(free, c) for c in code.co_consts if isinstance(c, types.CodeType))


def import_hint(ref: str) -> str:
    """The module of a reference."""
    return ref.partition(":")[0]

# SPDX-License-Identifier: Apache-2.0
"""What a function is, told by content, so that two processes tell it alike.

Told by content: module, qualified name, code, defaults, closure cells and bound arguments, as far as
these can't change. What can change (a list in a closure, an object of a class) can't be told, and gets
an identity that no other function in any process has.
"""

import contextlib
import dis
import enum
import functools
import gc
import hashlib
import inspect
import itertools
import math
import operator
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


class Witness:
    """What a fingerprint can't see: whether the same names still mean the same objects.

    In one process two things of one name can differ: a class that was defined again, a module that
    was loaded again. So what a fingerprint tells by a name is compared as the object, too.
    """

    def __init__(self) -> None:
        # Each function that was told, and its parts then.
        self._functions: list[tuple[types.FunctionType, tuple[Any, ...]]] = []
        self._objects: list[Any] = []

    def saw_function(self, fn: types.FunctionType) -> None:
        """`fn` was told by its content, and reads its globals where it does."""
        self._functions.append((fn, _parts(fn)))
        self._objects.append(fn.__globals__)

    def saw(self, x: Any) -> None:
        """`x` was told by its name."""
        self._objects.append(x)

    def add(self, other: "Witness") -> None:
        self._functions += other._functions
        self._objects += other._objects

    def holds(self) -> bool:
        """Whether every function is still what it was; one that is patched is not."""
        for fn, then in self._functions:
            now = _parts(fn)
            if len(now) != len(then) or not all(map(operator.is_, now, then)):
                return False
        return True

    def ids(self) -> tuple[int, ...]:
        """Equal for witnesses that agree, as long as one of them lives."""
        return tuple(map(id, self._objects))

    def agrees_with(self, other: "Witness") -> bool:
        """Whether the names meant the same objects."""
        return len(self._objects) == len(other._objects) and all(
            map(operator.is_, self._objects, other._objects)
        )


def _parts(fn: types.FunctionType) -> tuple[Any, ...]:
    cells = map(_content, fn.__closure__ or ())
    named = fn.__kwdefaults__ or {}
    return fn.__code__, fn.__defaults__, *named.values(), *fn.__dict__.values(), *cells


def fingerprint(fn: Any) -> tuple[str, Witness]:
    """The identity of `fn`, and what it rests on: equal for equal content, `unique()` where that
    can't tell.

    Args:
        fn: a function, or something else that is called.
    """
    witness = Witness()
    try:
        digest = hashlib.sha256()
        _Feed(digest.update, witness, with_holes=False).feed(fn)
        return f"content:{digest.hexdigest()}", witness
    except (_CannotTellError, RecursionError):
        return unique(), Witness()


def fingerprint_of_named(fn: Any, name: str) -> str:
    """The identity of a function that has a name: what its content can't tell, the name tells."""
    digest = hashlib.sha256()
    with contextlib.suppress(RecursionError):  # the name tells the rest
        _Feed(digest.update, Witness(), with_holes=True).feed(fn)
    return f"name:{name}:{digest.hexdigest()}"


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
    name = str(fn.__name__)
    for module in (getattr(fn, "__module__", None), "numpy", "scipy.special"):
        if isinstance(module, str) and getattr(sys.modules.get(module), name, None) is fn:
            return f"{module}:{name}"
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


def _is_at_its_reference(fn: types.FunctionType) -> bool:
    ref = reference(fn)
    try:
        return ref is not None and resolve(ref) is fn
    except LookupError:
        return False


def float_text(x: float) -> str:
    """Exact, also for the sign of a NaN."""
    return ("-nan" if math.copysign(1, x) < 0 else "nan") if math.isnan(x) else x.hex()


class _Feed:
    """Gives the content of a function to a hash.

    Raises:
        _CannotTellError: by `feed`, where there is something whose content can't be told; with holes,
            only its type counts.
    """

    def __init__(
        self, update: Callable[[bytes], None], witness: Witness, *, with_holes: bool
    ) -> None:
        self._update = update
        self._witness = witness
        self._with_holes = with_holes
        # The functions that were met, by their number: one that refers to itself ends there.
        self._met: dict[int, int] = {}

    def feed(self, x: Any) -> None:
        kind = type(x)
        if x is None or x is Ellipsis or kind in (bool, str, bytes):
            self._text(f"{kind.__qualname__}:{x!r}")
        elif kind is int:
            self._text(f"int:{x:x}")  # Python limits the length of decimals
        elif kind is float:
            self._text(f"float:{float_text(x)}")
        elif kind is complex:
            self._text(f"complex:{float_text(x.real)}:{float_text(x.imag)}")
        elif kind is tuple:
            self._each("tuple", x)
        elif kind is slice:
            self._each("slice", (x.start, x.stop, x.step))
        elif kind is range:
            self._each("range", (x.start, x.stop, x.step))
        elif kind is frozenset:
            self._each("frozenset", sorted(x, key=repr))
        elif isinstance(x, enum.Enum) and (ref := reference(kind)) is not None:
            self._text(f"enum:{ref}:{x.name}")
            self._witness.saw(kind)
            if x.name not in kind.__members__:  # a combination of flags
                self.feed(x.value)
        elif isinstance(x, np.dtype):
            self._text(f"dtype:{x!r}")
        elif (
            isinstance(x, np.generic)
            and kind.__module__ in ("numpy", "ml_dtypes")
            and (
                not isinstance(x, np.void)  # a view of memory that can change
            )
        ):
            self._text(f"scalar:{x.dtype!r}:")
            self._text(x.tobytes().hex())
        elif isinstance(x, types.ModuleType):
            self._text(f"module:{x.__name__}")
            self._witness.saw(x)
        elif isinstance(x, types.CodeType):
            self._feed_code(x)
        elif id(x) in self._met:
            self._text(f"again:{self._met[id(x)]}")
        elif kind is functools.partial:
            self._met[id(x)] = len(self._met)
            self._each("partial", (x.func, x.args, tuple(sorted(x.keywords.items()))))
        elif isinstance(x, types.FunctionType):
            self._feed_function(x)
        elif isinstance(x, types.MethodType) and isinstance(x.__self__, type):
            self._each("method", (x.__func__, x.__self__))
        elif (ref := reference(x)) is not None:
            self._feed_reference(x, ref)
        else:
            self._cannot_tell(x)

    def _text(self, s: str) -> None:
        raw = s.encode(errors="surrogatepass")
        self._update(f"{len(raw)}:".encode())
        self._update(raw)

    def _each(self, kind: str, items: Any) -> None:
        items = list(items)
        self._text(f"{kind}{len(items)}")
        for item in items:
            self.feed(item)

    def _cannot_tell(self, x: Any) -> None:
        if not self._with_holes:
            raise _CannotTellError
        self._text(f"hole:{type(x).__module__}:{type(x).__qualname__}")

    def _feed_function(self, x: types.FunctionType) -> None:
        self._met[id(x)] = len(self._met)
        self._text(f"function:{x.__module__}:{x.__qualname__}:{x.__name__}:{x.__doc__}")
        # A closure that assigns to its cells, or a function with attributes, has a state of its own.
        free = frozenset(x.__code__.co_freevars)
        if free and _assigns_to(free, x.__code__):
            self._cannot_tell(x)
        if x.__dict__.keys() - {"__wrapped__"}:
            if _is_at_its_reference(x):
                self._witness.saw(x)
            else:
                self._cannot_tell(x)
        self._witness.saw_function(x)
        self.feed(x.__dict__.get("__wrapped__"))
        self._feed_code(x.__code__)
        self._each("defaults", x.__defaults__ or ())
        self._each("kwdefaults", tuple(sorted((x.__kwdefaults__ or {}).items())))
        self._text(f"cells{len(free)}")
        for i in range(len(free)):
            settled = _is_settled(x, i)
            cell = (x.__closure__ or ())[i]
            content = _content(cell)
            if content is _empty or not settled:
                self._cannot_tell(cell)
            if content is not _empty:
                self.feed(content)

    def _feed_reference(self, x: Any, ref: str) -> None:
        self._text(f"reference:{ref}")
        self._witness.saw(x)
        # What a decorator made, of Numba's say: as much as can be told of the function in it.
        wrapped = getattr(x, "__wrapped__", None)
        if isinstance(wrapped, types.FunctionType):
            before, self._with_holes = self._with_holes, True
            self.feed(wrapped)
            self._with_holes = before

    def _feed_code(self, code: types.CodeType) -> None:
        # Not the file and the lines: they move when something else in the module changes.
        for part in (
            code.co_code,
            code.co_exceptiontable,
            (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags),
            code.co_names,
            code.co_varnames,
            code.co_freevars,
            code.co_cellvars,
            code.co_consts,
        ):
            self.feed(part)


_empty = object()


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _empty


def _is_settled(fn: types.FunctionType, i: int) -> bool:
    """Whether nothing can give another value to the variable in cell `i` of a closure.

    Else two closures with equal cells may not be merged: the one's variable may change later. Who asks
    has no reference to the cell.
    """
    name = fn.__code__.co_freevars[i]
    found = _scope_of(name, fn.__code__)
    if found is not None:
        scope, runs = found
        if not _may_assign_again(name, scope):
            return True
        if runs:
            return False
    # The scope has ended: whoever could assign is another closure over the cell.
    cells = fn.__closure__ or ()
    others = _references(cells, i) - _references((types.CellType(None),), 0)
    if others == 0:
        return True
    closures = _closures_over(cells, i)
    # What is not a closure is a scope that only waits: a generator's, another thread's.
    return len(closures) == others + 1 and not any(
        _assigns_to(frozenset([name]), f.__code__) for f in closures
    )


def _closures_over(cells: tuple[types.CellType, ...], i: int) -> list[types.FunctionType]:
    return [
        f
        for closure in gc.get_referrers(cells[i])
        if type(closure) is tuple
        for f in gc.get_referrers(closure)
        if isinstance(f, types.FunctionType) and f.__closure__ is closure
    ]


def _references(cells: tuple[types.CellType, ...], i: int) -> int:
    return sys.getrefcount(cells[i])


def _scope_of(name: str, code: types.CodeType) -> tuple[types.CodeType, bool] | None:
    """The code that has the variable `name` of the closure `code`, and whether it runs on this thread.

    None where nothing around it runs, so that nobody knows it.
    """
    frame: types.FrameType | None = sys._getframe()
    while frame is not None:
        around = _around(frame.f_code, code)
        owners = [c for c in around if name in c.co_cellvars]
        if owners:
            return owners[-1], owners[-1] is frame.f_code
        frame = frame.f_back
    return None


def _around(scope: types.CodeType, code: types.CodeType) -> list[types.CodeType]:
    """`scope`, and the codes inside it that are around `code`, outermost first; empty if it is not."""
    for inner in scope.co_consts:
        if isinstance(inner, types.CodeType):
            if inner is code:
                return [scope]
            if found := _around(inner, code):
                return [scope, *found]
    return []


def _may_assign_again(name: str, scope: types.CodeType) -> bool:
    """Whether the code `scope`, or a function inside, assigns to its variable more than once."""
    inner = [c for c in scope.co_consts if isinstance(c, types.CodeType)]
    if any(name in c.co_freevars and _assigns_to(frozenset([name]), c) for c in inner):
        return True
    instructions = list(dis.get_instructions(scope))
    stores = [
        i.offset
        for i in instructions
        if i.opname in ("STORE_DEREF", "DELETE_DEREF") and i.argval == name
    ]
    arguments = scope.co_argcount + scope.co_kwonlyargcount
    arguments += bool(scope.co_flags & inspect.CO_VARARGS)
    arguments += bool(scope.co_flags & inspect.CO_VARKEYWORDS)
    if name in scope.co_varnames[:arguments]:
        return bool(stores)
    in_loop = any(
        i.opname.startswith("JUMP_BACKWARD") and i.argval <= stores[0] <= i.offset
        for i in instructions
        if stores
    )
    return len(stores) != 1 or in_loop


def _assigns_to(free: frozenset[str], code: types.CodeType) -> bool:
    """Whether the code, or a function inside it, gives a new value to one of the names `free`."""
    return any(
        i.opname in ("STORE_DEREF", "DELETE_DEREF") and i.argval in free
        for i in dis.get_instructions(code)
    ) or any(_assigns_to(free, c) for c in code.co_consts if isinstance(c, types.CodeType))


def redefines(fn: Any, before: Any) -> bool:
    """Whether `fn` is `before` defined anew, as when a notebook cell was edited and run again."""
    module, name = getattr(fn, "__module__", None), getattr(fn, "__qualname__", None)
    if not (module and name) or (module, name) != (
        getattr(before, "__module__", None),
        getattr(before, "__qualname__", None),
    ):
        return False
    if "<" not in name:
        return True
    # In one file such a name can belong to several functions, so the line counts; an edited cell is
    # another file. Two functions of one code object come from a place that makes several.
    code, old = getattr(fn, "__code__", None), getattr(before, "__code__", None)
    if code is None or old is None or code is old:
        return False
    return code.co_filename != old.co_filename or code.co_firstlineno == old.co_firstlineno


def default_name(fn: Any) -> str:
    while isinstance(fn, functools.partial):
        fn = fn.func
    name = getattr(fn, "__qualname__", None) or getattr(fn, "__name__", None) or type(fn).__name__
    module = getattr(fn, "__module__", None)
    return f"{module}.{name}" if module else str(name)

# SPDX-License-Identifier: Apache-2.0
"""The way of an exception through XLA and back to the user.

XLA carries errors as text. The text of ours ends in an id, under which the exception object itself is
kept in a bounded table.
"""

import collections
import contextlib
import itertools
import re
import threading
import traceback
from typing import Any, Literal, NamedTuple, NoReturn

import jax

from . import _compat, _core
from .errors import BatchingError as BatchingError
from .errors import DerivativeError as DerivativeError
from .errors import InputChangedError as InputChangedError
from .errors import JaxbridgeError as JaxbridgeError
from .errors import NotRegisteredError as NotRegisteredError
from .errors import PlatformError as PlatformError
from .errors import ReplayError as ReplayError
from .errors import ResultError as ResultError
from .errors import ShardingError as ShardingError
from .errors import ViewKeptError as ViewKeptError


class _Recorded(NamedTuple):
    exception: BaseException
    # The call that raised it: its key, its thread, and how many calls that thread was in around it.
    key: int
    thread: int
    depth: int
    # Whether that is a thread of the program: the function then ran for whoever waits there.
    on_program_thread: bool
    # Whether the call has no side effect: its failure is that of a result.
    is_pure: bool


# What an error of a program arrives as: jaxlib's fast path, which a program takes from its second call
# on, raises a ValueError.
from_xla = (jax.errors.JaxRuntimeError, ValueError)

_kept_errors = 256

# Reentrant: a collection inside can run a destructor that makes a call which fails.
_lock = threading.RLock()
_originals: collections.OrderedDict[int, "_Recorded"] = collections.OrderedDict()
_ids = itertools.count(1)
_newest = 0
_is_readonly = re.compile(r"read-?only")
_is_device_full = re.compile(
    r"CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation|STATUS_ALLOC_FAILED|CUDA out of memory"
    r"|Failed to allocate \d+ bytes on device 'cuda"
)
_id_pattern = re.compile(r"\[jaxbridge error (\d+)\]")


def record(exception: BaseException, *, function_name: str, key: int, is_pure: bool) -> str:
    """Keeps `exception` and returns the text that XLA gets: type, message, traceback, id."""
    mark = keep(exception, key, is_pure=is_pure)
    try:
        advice = _advice_on(exception)
        if advice:
            add_note(exception, f"{function_name}: {advice}")
        return printable(f"{_described(exception, function_name)}\n{mark}")
    except BaseException:  # the exception's own code: none of it may come between it and the user
        return f"{type.__repr__(type(exception))}\n\nraised by an external function\n{mark}"


def _advice_on(exception: BaseException) -> str | None:
    """What to do about an exception whose own text cannot know that it was raised inside JAX."""
    text = _message_of(exception)
    # As NumPy and Cython say it. Some code wants writable memory and does not write.
    if isinstance(exception, ValueError) and _is_readonly.search(text):
        return "arguments are read-only; pass a copy on (x.copy()), or declare the argument with inout="
    # CuPy and torch have a class of that name, cuda.core and Numba a driver's code, Warp a text. A bare
    # MemoryError is about the host's memory.
    if any(kind.__name__ == "OutOfMemoryError" for kind in type(exception).__mro__) or (
        _is_device_full.search(text)
    ):
        return (
            "the device has no memory left beside JAX, which takes 75 % of it when it starts and gives "
            "none back. Set XLA_PYTHON_CLIENT_PREALLOCATE=false or a smaller "
            "XLA_PYTHON_CLIENT_MEM_FRACTION before JAX is imported, or let the function's temporaries "
            'come from XLA\'s memory: call(..., scratch="xla")'
        )
    return None


def _message_of(exception: BaseException) -> str:
    try:
        return str(exception)
    except Exception:  # the exception's own code
        return "(str() of the exception failed)"


def _described(exception: BaseException, function_name: str) -> str:
    # The frames of the core's own Python (this package) tell a user nothing.
    frames = exception.__traceback__
    while frames is not None and frames.tb_frame.f_globals.get("__package__") == __package__:
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(exception), exception, frames)).rstrip()
    kind = type(exception)
    name = (
        kind.__qualname__
        if kind.__module__ == "builtins"
        else f"{kind.__module__}.{kind.__qualname__}"
    )
    message = _message_of(exception)
    first = f"{name}: {message}" if message else name
    if text.startswith(first):  # found by jaxbridge itself: there are no frames to show
        return f"{text}\n\nfound in a call of the external function {function_name!r}"
    return f"{first}\n\nraised by the external function {function_name!r}:\n{text}"


def keep(exception: BaseException, key: int, *, is_pure: bool = False) -> str:
    """Keeps `exception`; returns the mark by which it is found again, to end an error's text."""
    global _newest
    dropped = []  # destroyed without the lock: their frames can hold anything
    thread = threading.get_ident()
    recorded = _Recorded(
        exception, key, thread, _core.call_depth(), _is_of_the_program(thread), is_pure
    )
    with _lock:
        _newest = number = next(_ids)
        _originals[number] = recorded
        while len(_originals) > _kept_errors:
            dropped.append(_originals.popitem(last=False))
    return f"[jaxbridge error {number}]"


def add_note(exception: BaseException, note: str) -> None:
    """Adds a note once to an exception object, which can be raised again and again."""
    try:
        if note not in getattr(exception, "__notes__", ()):
            exception.add_note(note)
    except Exception:  # the exception's own code, which must not replace it
        return


def printable(text: str) -> str:
    """What survives the way through C strings in UTF-8."""
    return text.encode(errors="backslashreplace").decode().replace("\0", "\\0")


def original(error: BaseException) -> BaseException | None:
    """The exception object behind an error that XLA raised, where it is still kept."""
    numbers = _id_pattern.findall(str(error))
    if not numbers:
        return None
    with _lock:
        found = _originals.pop(int(numbers[-1]), None)
    return found.exception if found else None


def unseen(error: BaseException) -> list[BaseException]:
    """Of the failures that JAX still has at exit, those that nobody was told of.

    Left out are calls whose exception was raised itself, and calls without a side effect.
    """
    if isinstance(error, BaseExceptionGroup):
        return [e for member in error.exceptions for e in unseen(member)]
    numbers = [int(number) for number in _id_pattern.findall(str(error))]
    with _lock:
        recorded = [_originals.get(number) for number in numbers]
    told = [r is None or r.is_pure for r in recorded]
    return [] if told and all(told) else [error]


def newest() -> int:
    """The id of the newest error; 0 before any."""
    return _newest


def raised_by(key: int, since: int) -> BaseException | None:
    """The exception of an eager call that this thread has just made, if it raised one.

    XLA can keep the error of a call on CUDA until a result is waited for; but the function itself ran
    on this thread. What it called in turn is not meant.
    """
    where = key, threading.get_ident(), _core.call_depth()
    with _lock:
        for number, recorded in list(_originals.items()):
            if number > since and (recorded.key, recorded.thread, recorded.depth) == where:
                del _originals[number]
                return recorded.exception
    return None


def raise_again(exception: BaseException) -> NoReturn:
    """Raises what a function raised. Its context stays what it was in the function, if it had one."""
    context = _context.__get__(exception)
    try:
        raise exception
    finally:
        if context is not None:
            _context.__set__(exception, context)


# Past what an exception's class may have put in the place.
_context: Any = BaseException.__dict__["__context__"]


class reraise(contextlib.ContextDecorator):  # noqa: N801 (used as a verb)
    """Raises the exception of an external function itself, in place of JAX's error.

    A context manager, also a decorator. Inside, a `jax.errors.JaxRuntimeError` that stands for an
    exception of an external function is replaced by that exception. On exit, one that was recorded
    since entry and has reached nobody yet is raised too: on several devices, or with asynchronous
    dispatch, it can come after the call. Wait for results inside the block.

    Example:
        >>> with jaxbridge.reraise():
        ...     jax.block_until_ready(step(x))
    """

    def __enter__(self) -> "reraise":
        self._entered.append(newest())
        return self

    def __init__(self) -> None:
        # A stack: one object may be entered again, as a decorator of a recursive function is.
        self._entered: list[int] = []

    def _recreate_cm(self) -> "reraise":
        return reraise()  # of a decorated function, each call its own: threads call it at once

    def __exit__(self, kind: Any, error: BaseException | None, tb: Any) -> Literal[False]:
        since = self._entered.pop()
        found: BaseException | None = None
        if error is None:
            with _lock:
                # What a function raised on another thread of the program reaches that thread.
                me = threading.get_ident()
                new = [
                    number
                    for number, recorded in list(_originals.items())
                    if number > since and (recorded.thread == me or not recorded.on_program_thread)
                ]
                if new:
                    found = _originals.pop(new[0]).exception
        elif isinstance(error, from_xla):
            found = original(error)
        if found is not None:
            _compat.forget_failed_effects()
            raise_again(found)
        return False


def _is_of_the_program(thread: int) -> bool:
    # XLA's threads, on which functions run for several devices, are not: to Python they are dummies,
    # where it knows them.
    return any(
        t.ident == thread and not isinstance(t, threading._DummyThread)
        for t in threading.enumerate()
    )

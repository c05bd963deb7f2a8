# SPDX-License-Identifier: Apache-2.0
"""The frames that an exception of an external function keeps, and what else it may hold."""

import contextlib
import traceback
import types
from collections.abc import Collection
from typing import Any

import numpy as np

# What an exception has, read past what its class may have put in the place.
_cause_of: Any = BaseException.__dict__["__cause__"].__get__
_context_of: Any = BaseException.__dict__["__context__"].__get__
_traceback_of: Any = BaseException.__dict__["__traceback__"].__get__
_args_of: Any = BaseException.__dict__["args"].__get__
_attributes_of: Any = BaseException.__dict__["__dict__"].__get__
_members_of: Any = BaseExceptionGroup.__dict__["exceptions"].__get__
_object_of: Any = AttributeError.__dict__["obj"].__get__


def _chain(exception: BaseException | None, left_out: Collection[int] = ()) -> list[BaseException]:
    """The exception, what caused it, and the members of groups, without those with these ids."""
    seen: dict[int, BaseException] = {}
    queue = [exception]
    while queue:
        e = queue.pop()
        if e is None or id(e) in seen or (id(e) in left_out and e is not exception):
            continue
        seen[id(e)] = e
        queue += [_cause_of(e), _context_of(e)]
        if isinstance(e, BaseExceptionGroup):
            queue += _members_of(e)
    return list(seen.values())


def end(
    exception: BaseException, around: BaseException | None, caller: types.FrameType | None
) -> bool:
    """Clears the frames of a call that raised; whether its exceptions may hold views still.

    An exception can bring frames that are not the call's: it was made before, in a generator that goes
    on, or on another thread. Those are left as they are.

    Args:
        exception: what the function raised.
        around: the exception that is being handled around the call: none of the call's.
        caller: the frame that the function was called from; None on a thread of XLA's.
    """
    first = _traceback_of(exception)
    ours: dict[types.FrameType, bool] = {}
    if first is not None and first.tb_frame.f_back is caller:
        ours[first.tb_frame] = True

    def is_ours(frame: types.FrameType) -> bool:
        passed = []
        back: types.FrameType | None = frame
        while back is not None and back not in ours:
            passed.append(back)
            back = back.f_back
        found = back is not None and ours[back]
        ours.update(dict.fromkeys(passed, found))
        return found

    may_hold = False
    for e in _chain(exception, {id(e) for e in _chain(around)}):
        # The cells of the callee itself are older than the call.
        is_callee = True
        for frame, _ in traceback.walk_tb(_traceback_of(e)):
            if not is_ours(frame):
                may_hold = True
                continue
            with contextlib.suppress(RuntimeError):  # it runs, or waits to go on
                frame.clear()
            if frame.f_globals.get("__package__") == __package__:
                continue
            # A frame that was cleared still has its function, and that the cells of its closure.
            may_hold |= not is_callee and bool(frame.f_code.co_freevars)
            is_callee = False
        may_hold |= _says_something(e)
    return may_hold


def _says_something(exception: BaseException) -> bool:
    """Whether an exception has objects: an AttributeError has that which lacks the attribute."""
    plain = (str, bytes, int, float, complex, type(None), np.number, np.bool_)
    attributes = {k: v for k, v in _attributes_of(exception).items() if k != "__notes__"}
    values = [*_args_of(exception), *attributes.values()]
    if isinstance(exception, AttributeError):
        values.append(_object_of(exception))
    return not all(isinstance(value, plain) for value in values)

# SPDX-License-Identifier: Apache-2.0
"""One way of calling a Function, and the target that stands for it in this process."""

import dataclasses
import functools
import sys
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from . import _core, _errors, _plan
from ._options import Options
from ._spec import Template

if TYPE_CHECKING:
    from ._function import Function


class Registration:
    """A target under its key, as long as this object lives: an executable holds it, or the process."""

    def __init__(self, site: "CallSite") -> None:
        self._key = site.key
        self._stats = site.function.counts
        self.target = _core.Target(
            functools.partial(_plan.make_plan, site),
            functools.partial(_errors.record, function_name=site.name, key=site.key),
            functools.partial(_plan.end_lease, site),
            list(site.in_place),
        )
        _core.register(self._key, self.target)
        self._stats.live.add(self)

    def __del__(self) -> None:
        # Half made, where the constructor raised. At exit the module's names can be gone already.
        if sys is None or sys.is_finalizing() or not hasattr(self, "target"):
            return
        self._stats.ended_calls += self.target.calls
        _core.unregister(self._key)


# A key has one registration, which its executables share; that of a durable call is never given up.
_registrations: weakref.WeakValueDictionary[int, Registration] = weakref.WeakValueDictionary()
_durable: dict[int, Registration] = {}
_registration_lock = threading.Lock()


class Stats:
    def __init__(self) -> None:
        self.live: weakref.WeakSet[Registration] = weakref.WeakSet()
        self.ended_calls = 0


@dataclasses.dataclass(frozen=True, eq=False)
class CallSite:
    """One way of calling a Function: which arguments are operands, the static ones, the options.

    Equal sites have equal keys. It is a parameter of the primitive, so that JAX's caches compare it.
    """

    function: "Function[Any, Any]"
    key: int
    text: str
    arguments: Template
    operand_count: int
    own_results: Template
    in_place: tuple[tuple[int, int], ...]
    has_side_effect: bool
    durable: bool

    @property
    def name(self) -> str:
        return self.function.name

    @property
    def out(self) -> str | int | None:
        return self.function.options.out

    @property
    def options(self) -> "Options":
        return self.function.options

    def function_on(self, platform: str) -> Callable[..., Any]:
        return self.function.callee(platform)

    def framework_on(self, platform: str) -> str:
        return self.function.framework(platform)

    def registration(self) -> Registration:
        """What keeps the call's target registered."""
        with _registration_lock:
            found = _registrations.get(self.key)
            if found is None:
                found = _registrations[self.key] = Registration(self)
            if self.durable:
                _durable[self.key] = found
            return found

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, CallSite) and self.key == other.key and self.options == other.options
        )

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return self.name

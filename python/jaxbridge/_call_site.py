# SPDX-License-Identifier: Apache-2.0
"""One way of calling a Function, and the target that stands for it in this process."""

import dataclasses
import functools
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from . import _config, _core, _errors, _plan, _spec
from ._identity import Witness
from ._options import Options
from ._spec import Template

if TYPE_CHECKING:
    from ._callee import Callee


class Registration:
    """A target under its key, as long as there is a `Hold` of it."""

    def __init__(self, site: "CallSite", key: int) -> None:
        self.site = site
        self.key = key
        self.holds = 0
        self._stats = site.callee.counts
        self.target = _core.Target(
            functools.partial(_plan.make_plan, site),
            functools.partial(
                _errors.record,
                function_name=site.name,
                key=site.key,
                is_pure=not site.has_side_effect,
            ),
            functools.partial(_plan.end_lease, site),
            list(site.in_place),
            _config.cache_limit,
        )
        _core.register(key, self.target)
        self._stats.live.add(self)

    def end(self) -> None:
        self._stats.end(self)
        _core.unregister(self.key)


class Hold:
    """Keeps a call registered: an executable has one, and the process one of each durable call.

    Holds are counted, since a weak reference could bring back what another thread is just giving up.
    """

    def __init__(self, registration: Registration) -> None:
        self.registration = registration

    @property
    def is_durable(self) -> bool:
        return self.registration.key in _durable

    def __del__(self) -> None:
        # At exit the module's names can be gone already.
        if sys is None or sys.is_finalizing():
            return
        last = self.registration
        with _registration_lock:
            last.holds -= 1
            if last.holds == 0 and _registrations.get(last.key) is last:
                del _registrations[last.key]
                last.end()


# A key has one registration, which its executables share; the process holds that of a durable call.
# Reentrant: a collection inside can end a Hold.
_registrations: dict[int, Registration] = {}
_durable: dict[int, Hold] = {}
_registration_lock = threading.RLock()


def forget_durable(callee: "Callee") -> None:
    """Gives up what the process holds of a Function; a program that calls it finds it again."""
    with _registration_lock:
        forgotten = [
            _durable.pop(key)
            for key, hold in list(_durable.items())
            if hold.registration.site.callee is callee
        ]
    del forgotten  # without the lock


class Stats:
    """The counts of a callee, over all its registrations."""

    def __init__(self) -> None:
        self.live: set[Registration] = set()
        self._ended_calls = 0
        self._ended_hits = 0

    def end(self, registration: Registration) -> None:
        self.live.discard(registration)
        self._ended_calls += registration.target.calls
        self._ended_hits += registration.target.hits

    def read(self) -> dict[str, int]:
        with _registration_lock:
            targets = [r.target for r in self.live]
            return {
                "calls": self._ended_calls + sum(t.calls for t in targets),
                "cache_hits": self._ended_hits + sum(t.hits for t in targets),
                "cache_size": sum(t.kept for t in targets),
            }


@dataclasses.dataclass(frozen=True, eq=False)
class CallSite:
    """One way of calling a Function: which arguments are operands, the static ones, the options.

    Equal sites have equal keys. It is a parameter of the primitive, so that JAX's caches compare it.
    """

    callee: "Callee"
    key: int
    text: str
    # What the text names among the static arguments.
    witness: Witness
    arguments: Template
    operand_count: int
    own_results: Template
    in_place: tuple[tuple[int, int], ...]
    has_side_effect: bool
    durable: bool

    @property
    def name(self) -> str:
        return self.callee.name

    @property
    def out(self) -> str | int | None:
        return self.callee.options.out

    @property
    def options(self) -> "Options":
        return self.callee.options

    def function_on(self, platform: str) -> Callable[..., Any]:
        return self.callee.on(platform)

    def framework_on(self, platform: str) -> str:
        return self.callee.framework_on(platform)

    def hold(self) -> Hold:
        """Registers the call's target, and keeps it registered as long as the result lives."""
        key = self.key
        others = 0
        with _registration_lock:
            while True:
                found = _registrations.get(key)
                if found is None:
                    found = _registrations[key] = Registration(self, key)
                elif not self._means_the_same_as(found.site):
                    # The same text, and other objects: another key, of this process alone.
                    others += 1
                    key = _spec.key_of(f"{self.text} {self.callee.own_identity} {others}")
                    continue
                found.holds += 1
                if _registrations.get(key) is found:
                    break
                found.holds -= 1  # a collection ended it before it was counted
            hold = Hold(found)
            if self.durable and key == self.key:
                _durable.setdefault(key, hold)
            return hold

    def _means_the_same_as(self, other: "CallSite") -> bool:
        return self.callee.is_same_as(other.callee) and self.witness.agrees_with(other.witness)

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, CallSite)
            and self.key == other.key
            and self.options == other.options
            and self._means_the_same_as(other)
        )

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return self.name

# SPDX-License-Identifier: Apache-2.0
"""One way of calling a Function, and the target that stands for it in this process."""

import collections
import contextlib
import dataclasses
import functools
import pickle
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from . import _config, _core, _errors, _plan, _replay, _spec
from ._identity import Witness
from ._options import Options
from ._sharding import Axes
from ._spec import Template
from ._state import States

if TYPE_CHECKING:
    from ._callee import Callee


class Registration:
    """A target under its key, as long as there is a `Hold` of it."""

    def __init__(self, site: "CallSite", key: int) -> None:
        self.site = site
        self.key = key
        self.holds = 0
        # Of calls on parts of this one's arrays, by their texts: they live as long as this one.
        self.parts: dict[str, Hold] = {}
        self._stats = site.callee.counts
        self._states: dict[Any, States] = {}
        self.target = site.callee.make_target(site, self._states)
        _core.register(key, self.target)
        self._stats.live.add(self)

    def clear(self) -> None:
        """Forgets plans, graphs and states; not what XLA's own graphs work with, which stay."""
        for key in list(self._states):
            if self.site.options.graph != "xla" or key[0] == "cpu":
                self._states.pop(key, None)
        self.target.clear_plans()

    def end(self) -> None:
        self._stats.end(self)
        _core.unregister(self.key)


def python_target(site: "CallSite", states: dict[Any, States]) -> Any:
    """What calls the Python function of a call."""
    return _core.Target(
        make_plan=functools.partial(_plan.make_plan, site, states),
        on_error=functools.partial(
            _errors.record,
            function_name=site.name,
            key=site.key,
            is_pure=not site.has_side_effect,
        ),
        on_held=functools.partial(_plan.end_lease, site),
        on_not_captured=functools.partial(_replay.not_captured, site),
        on_compared=functools.partial(_replay.compare, site),
        operand_names=site.callee.operand_names(site),
        in_place=list(site.in_place),
        external=list(site.external),
        limit=_config.cache_limit,
        graph=_graph_mode(site.options.graph),
    )


def _graph_mode(asked: str) -> str:
    return "verify" if _config.debug and asked == "replay" else asked


class Hold:
    """Keeps a call registered: each executable has one, and the process one of each durable call.

    Holds are counted, since a weak reference could bring back what another thread is just giving up.
    """

    def __init__(self, registration: Registration) -> None:
        self.registration = registration

    @property
    def is_durable(self) -> bool:
        site = self.registration.site
        return site.durable and site.key == self.registration.key

    def __reduce__(self) -> Any:
        # Of an executable that is serialized: where it is loaded it finds a durable call by its text.
        if self.is_durable:
            return type(None), ()
        site = self.registration.site
        if site.durable:
            raise pickle.PicklingError(
                f"{site.name}: an executable with this function cannot be serialized: another one that "
                f"is told by the same name and content is in use in this process (a module was loaded "
                f"again, or a class defined again); give this one a name of its own, or drop the "
                f"programs of the other"
            )
        raise pickle.PicklingError(
            f"{site.name}: an executable with an anonymous function cannot be serialized, since no other "
            f"process could find the function; give it a name"
        )

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
                _gone.append(last)
        del last
        _destroy_gone()


# A key has one registration, which its executables share; the process holds that of a durable call, for
# executables that were made elsewhere. Bounded: who calls one that had to go finds it again by its text.
_registrations: dict[int, Registration] = {}
_durable: collections.OrderedDict[int, Hold] = collections.OrderedDict()
_most_durable = 4096
# Reentrant: a collection inside can end a Hold.
_registration_lock = threading.RLock()
# What ended is destroyed when this thread has given up the lock: the end of a target's graphs waits for the
# device, which may wait for a thread that wants it.
_gone: collections.deque[Registration] = collections.deque()


def _destroy_gone() -> None:
    while _gone and not _registration_lock._is_owned():  # type: ignore[attr-defined]
        with contextlib.suppress(IndexError):  # another thread was first
            _gone.popleft()


def target_of_part(whole: int, text: str, types: tuple[Any, Any]) -> Any | None:
    """The target of a call on parts of the arrays of a registered one; None: that one is not here.

    Args:
        whole: the key of the registered call.
        text: that of the call on parts, as `_spec.of_part` makes it.
        types: of the parts.
    """
    with _registration_lock:
        registration = _registrations.get(whole)
        if registration is None:
            return None
        registration.holds += 1
        hold = Hold(registration)  # while the part is made
    site = dataclasses.replace(registration.site, key=_spec.key_of(text), text=text, types=types)
    part = registration.parts.setdefault(text, site.hold())
    del hold
    _destroy_gone()
    return part.registration.target


def forget_durable(callee: "Callee") -> None:
    """Gives up what the process holds of a Function; a program of elsewhere finds it again.

    Not what programs of graph="xla" hold as well: their graphs work with it.
    """

    def is_forgotten(held: Registration) -> bool:
        is_used = callee.options.graph == "xla" and held.holds > 1
        return held.site.callee is callee and not is_used

    with _registration_lock:
        forgotten = [
            _durable.pop(key)
            for key, hold in list(_durable.items())
            if is_forgotten(hold.registration)
        ]
    del forgotten  # without the lock
    _destroy_gone()


class Stats:
    """Counts over all registrations of equal callees."""

    def __init__(self) -> None:
        self.live: set[Registration] = set()
        self._ended: collections.Counter[str] = collections.Counter()
        self._fallbacks: collections.deque[str] = collections.deque(maxlen=32)

    def not_captured(self, reason: str) -> None:
        if reason not in self._fallbacks:
            self._fallbacks.append(reason)

    def clear(self) -> None:
        for registration in list(self.live):
            registration.clear()
        self._fallbacks.clear()

    def end(self, registration: Registration) -> None:
        self.live.discard(registration)
        self._ended.update(_counts_of(registration))

    def totals(self) -> dict[str, int]:
        """What only grows."""
        with _registration_lock:
            total = collections.Counter(self._ended)
            # A list: a collection, which ends what is in cycles, may come meanwhile.
            for registration in list(self.live):
                total.update(_counts_of(registration))
        _destroy_gone()
        return {name: total[name] for name in _counted}

    def read(self, since: dict[str, int]) -> dict[str, Any]:
        """The totals since then, and how many lists of addresses are kept now."""
        counts = {name: n - since[name] for name, n in self.totals().items()}
        with _registration_lock:
            kept = sum(r.target.kept for r in list(self.live))
        _destroy_gone()
        return {**counts, "cache_size": kept, "fallbacks": list(self._fallbacks)}


_counted = {
    "calls": "calls",
    "cache_hits": "hits",
    "replays": "replays",
    "staged": "staged",
    "captures": "captures",
}


def _counts_of(registration: Registration) -> dict[str, int]:
    return {name: getattr(registration.target, of) for name, of in _counted.items()}


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
    # Those of the operands in place that are Refs of memory of others.
    external: tuple[int, ...]
    has_side_effect: bool
    durable: bool
    # Before vmap; None: elementwise, or nothing says what may be split.
    axes: Axes | None = None
    # (dtype, shape) of each operand and of each result, where the target is made for these alone.
    types: tuple[Any, Any] | None = None

    @property
    def name(self) -> str:
        return self.callee.name

    @property
    def out(self) -> str | int | None:
        return self.callee.options.out

    @property
    def options(self) -> "Options":
        return self.callee.options

    def operand_name(self, index: int) -> str:
        """What errors call an operand."""
        return _plan.argument_name(self.arguments.paths()[index])

    def function_on(self, platform: str) -> Callable[..., Any]:
        return self.callee.on(platform)

    def framework_on(self, platform: str) -> str:
        return self.callee.framework_on(platform)

    def of_types(self, types: tuple[Any, Any]) -> "CallSite":
        """The same call with operands and results of these types alone: (dtype, shape) of each."""
        text = _spec.with_entry(self.text, "types", types)
        return dataclasses.replace(self, key=_spec.key_of(text), text=text, types=types)

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
            gone = None
            if self.durable and key == self.key:
                _durable.setdefault(key, hold)
                _durable.move_to_end(key)
                if len(_durable) > _most_durable:
                    _, gone = _durable.popitem(last=False)
        del gone  # without the lock
        _destroy_gone()
        return hold

    def _means_the_same_as(self, other: "CallSite") -> bool:
        return self.callee.is_same_as(other.callee) and self.witness.agrees_with(other.witness)

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, CallSite)
            and self.key == other.key
            and self.options == other.options
            and self.axes == other.axes
            and self._means_the_same_as(other)
        )

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return self.name

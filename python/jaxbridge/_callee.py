# SPDX-License-Identifier: Apache-2.0
"""An external function with its options: what programs refer to, and what decides which one is meant."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from . import _adapters, _compat, _identity, _options, _plan, _spec
from ._call_site import CallSite, Stats, python_target
from ._errors import PlatformError
from ._options import default_frameworks, frameworks, per_platform, platforms

# Named ones live as long as the process, so that a program from elsewhere finds them.
named: dict[str, "Callee"] = {}

# Callees that neither content nor options tell apart share their registrations, and so their counts.
_counts: weakref.WeakValueDictionary[Any, Stats] = weakref.WeakValueDictionary()


class Token:
    """Stands for a static value that has no text."""

    def __init__(self) -> None:
        self.text = _identity.unique()


class Callee:
    """What a Function calls. Programs hold this, and not the Function.

    Args:
        fn: a function, or one for each platform.
        framework: a framework, or one for each platform; None for the defaults.
        options: what `_options.check` takes.
        state: makes what the function gets as keyword `state`, or None.
        name: what tells it in every process; None: what it is tells it, where that can be told.

    Raises:
        ValueError, TypeError: an option that is none, a name that another function has.
    """

    # For messages: what gives it a function for each platform, a name, a way to be batched.
    how_on_both = 'give one as call({"cpu": f, "cuda": g}, ...)'
    how_named = 'call(fn, ..., name="..."), or define it at the top level of a module'
    how_batched = (
        "give the Function vmap_method= ('sequential' calls it once for each element; 'broadcast_all', "
        "'expand_dims' and 'batched' pass whole batches), elementwise=True"
    )

    def __init__(
        self,
        fn: Any,
        *,
        framework: str | Mapping[str, str] | None,
        options: Mapping[str, Any],
        state: Callable[..., Any] | None,
        name: str | None,
    ) -> None:
        any_fn = next(iter(fn.values()), None) if isinstance(fn, Mapping) else fn
        _options.check_name(name)
        shown = name or ("call" if any_fn is None else _identity.default_name(any_fn))
        self.functions: dict[str, Callable[..., Any]] = per_platform(fn, "the function", shown)
        for platform, f in self.functions.items():
            if not callable(f):
                raise TypeError(
                    f"the function for {platform} is {f!r}, not a callable; expected one, or "
                    f'{{"cpu": f, "cuda": g}}'
                )
        if state is not None:
            _options.check_state(shown, state, self.functions.values(), options.get("out"))
            # Told as the functions are: another way to make it is another call.
            self.functions["state"] = state
        self.frameworks: dict[str, str] = (
            dict(default_frameworks)
            if framework is None
            else per_platform(framework, "framework", shown)
        )
        _options.check_frameworks(shown, self.frameworks)
        self.options = _options.check(shown, **options)
        _options.check_on_cuda(shown, self.options, self.frameworks.get("cuda"))
        self.name = shown
        self.references = {p: _identity.reference(f) for p, f in self.functions.items()}
        self.is_explicitly_named = name is not None
        # Tells it from one that is the same by content but not the same objects.
        self.own_identity = _identity.unique()
        # Where a Function keeps the programs of its eager calls.
        self.programs: weakref.ref[Any] | None = None
        # By value; a token lives as long as the calls that have it.
        self._tokens: weakref.WeakValueDictionary[Any, Token] = weakref.WeakValueDictionary()
        self._witness: _identity.Witness | None = None
        self.tell()
        if name is not None:
            self._claim(name)

    # ---- which one is meant ------------------------------------------------------------------

    def tell(self) -> None:
        """Looks at the functions anew, where one was changed since that was done last."""
        if self._witness is not None and self._witness.holds():
            return
        told = _identity.Witness()
        identities: dict[int, str] = {}
        for f in self.functions.values():
            if id(f) not in identities:
                identity, witness = _identity.fingerprint(f)
                told.add(witness)
                if self.is_explicitly_named and not _identity.is_told(identity):
                    # Its name tells it: its closure may hold anything.
                    identity = _identity.fingerprint_of_named(f, self.name)
                identities[id(f)] = identity
        self.identities = {p: identities[id(f)] for p, f in self.functions.items()}
        # Whether content tells every function of it.
        self.is_told = all(map(_identity.is_told, identities.values()))
        key = (*sorted(self.identities.items()), told.ids(), *self._told_by())
        counts = _counts.setdefault(key, Stats())
        # What was counted under another identity stays counted.
        so_far = self.stats() if self._witness is not None else {}
        self._counts_before = {n: t - so_far.get(n, 0) for n, t in counts.totals().items()}
        self.counts = counts
        self._witness = told  # last: another thread asks it whether all this is done

    def _told_by(self) -> tuple[Any, ...]:
        """What else than the functions is the same in the texts of all calls."""
        o = self.options
        return (
            *sorted(self.frameworks.items()),
            o.out,
            o.elementwise,
            o.graph,
            o.scratch,
            self.name,
            self.is_explicitly_named,
        )

    @property
    def is_durable(self) -> bool:
        """Whether another process can find it."""
        return self.is_explicitly_named or (
            self.is_told and all(r is not None for r in self.references.values())
        )

    def is_same_as(self, other: "Callee") -> bool:
        """Whether one may be called in place of the other."""
        return self is other or (
            self.identities == other.identities
            and self._witness is not None
            and other._witness is not None
            and self._witness.agrees_with(other._witness)
            and self._witness.holds()
            and other._witness.holds()
            and all(
                _identity.is_told(i) or self.functions[p] is other.functions[p]
                for p, i in self.identities.items()
            )
        )

    def token(self, x: Any) -> "Token":
        """What stands for a static value that has no text: equal for equal values, while it lives."""
        try:
            key = _spec.exactly(x)
            hash(key)
        except TypeError:
            key = _spec.ById(x)
        return self._tokens.setdefault(key, Token())

    def stats(self) -> dict[str, Any]:
        """Counts of the calls since this was made, with those of equal callees."""
        return self.counts.read(since=self._counts_before)

    def _claim(self, name: str) -> None:
        before = named.get(name)
        if (
            before is not None
            and before._definition() != self._definition()
            and not (self.is_told and self._redefines(before))
        ):
            raise ValueError(
                f"the name {name!r} belongs to another function already ({before._places()}; this is "
                f"{self._places()}); an exported program could not tell them apart: choose another name"
            )
        named[name] = self

    def _definition(self) -> Any:
        # Where content can't tell, only the very same object is the same function.
        told = {
            p: i if _identity.is_told(i) else _spec.ById(self.functions[p])
            for p, i in self.identities.items()
        }
        return told, self.frameworks, self.options

    def _redefines(self, before: "Callee") -> bool:
        """A notebook cell that was run again: the same place, other code."""
        return self.functions.keys() == before.functions.keys() and all(
            _identity.redefines(f, before.functions[p]) for p, f in self.functions.items()
        )

    @property
    def modules(self) -> list[str]:
        """Where the functions are defined: what another process has to import."""
        return sorted({str(getattr(f, "__module__", None)) for f in self.functions.values()})

    def _places(self) -> str:
        return ", ".join(
            sorted(
                {
                    r or f"{f.__module__}:{getattr(f, '__qualname__', f)}"
                    for r, f in zip(self.references.values(), self.functions.values(), strict=True)
                }
            )
        )

    @property
    def says_what_is_updated(self) -> bool:
        """Whether the function has a result of its own for each operand that it updates, Refs included."""
        return False

    def operand_names(self, site: CallSite) -> list[str]:
        """What messages call the operands."""
        return _plan.operand_names(site)

    # ---- what XLA calls ----------------------------------------------------------------------

    def ffi_target(self, site: CallSite, operands: Sequence[Any], results: Sequence[Any]) -> Any:
        """The handler of the function's own that XLA calls (an `FfiTarget`); None: one of ours does."""
        return None

    def site_for(self, site: CallSite, operands: Sequence[Any], results: Sequence[Any]) -> CallSite:
        """The call whose target serves these operands and results (abstract values)."""
        return site

    def is_capturable(self, site: CallSite) -> bool:
        """Whether XLA may capture the call into a command buffer."""
        return self.options.graph == "xla"

    def make_target(self, site: CallSite, states: dict[Any, Any]) -> Any:
        """What the key of a call stands for in the core."""
        return python_target(site, states)

    def check_arrays(self, platform: str, operands: Sequence[Any], results: Sequence[Any]) -> None:
        """Raises where the function cannot have arrays of these types (abstract values)."""
        framework = self.framework_on(platform)
        if platform not in _compat.local_platforms():
            return  # another machine runs it: what is installed here does not count
        at = "cpu" if platform == "cuda" and framework == "numpy" else platform
        adapter = _adapters.get(framework)
        for aval in (*operands, *results):
            _plan.check_array(self.name, adapter, aval.dtype, len(aval.shape), at)

    # ---- what runs where ---------------------------------------------------------------------

    def on(self, platform: str) -> Callable[..., Any]:
        """The function for `platform`; PlatformError where there is none."""
        if platform not in self.functions:
            there = " and ".join(sorted(set(self.functions) & set(platforms))) or "no platform"
            raise PlatformError(
                f"{self.name}: there is a function for {there}, none for {platform}; "
                f"{self.how_on_both}, or run it on {there}"
            )
        return self.functions[platform]

    @property
    def makes_state(self) -> bool:
        return "state" in self.functions

    def framework_on(self, platform: str) -> str:
        """The framework whose arrays the function gets on `platform`."""
        if platform not in self.frameworks:
            raise PlatformError(
                f"{self.name}: framework= names none for {platform}, where the call is made; add one, for "
                f"example {{'cpu': 'numpy', 'cuda': 'cupy'}}"
            )
        framework = self.frameworks[platform]
        if platform not in frameworks[framework]:
            raise PlatformError(
                f"{self.name}: {framework} has no arrays on {platform}; give framework= one for each "
                f'platform, for example {{"cpu": "numpy", "cuda": "{framework}"}}'
            )
        return framework

# SPDX-License-Identifier: Apache-2.0
"""What `state=` made: a plan, a handle, a module, one for each device and stream of XLA's."""

import threading
from collections.abc import Callable
from typing import Any

from . import _core
from ._errors import add_note


class _Made:
    """One state, and who is making it."""

    def __init__(self) -> None:
        # Held while it is made, by one thread: others that need this one wait.
        self.lock = threading.RLock()
        self.maker: int | None = None  # the thread that makes it
        self.is_made = False
        self.value: Any = None


# Which state each thread waits for that needs it to make another one. Entries are made with the lock.
_waiting: dict[int, _Made] = {}
_waiting_lock = threading.Lock()


class States:
    """Calls `make()` once for each device and stream, in the scope of the first call there. Any thread."""

    def __init__(self, name: str, make: Callable[[], Any]) -> None:
        self._name = name
        self._make = make
        self._made: dict[tuple[int, int], _Made] = {}

    def __call__(self, ordinal: int, stream: int) -> Any:
        """The state for work on a stream of XLA's; 0 on the CPU.

        Raises:
            RuntimeError: it would have to be made in a capture, or needs itself to be made.
            Exception: what `make` raised; the next call tries again.
        """
        found = self._made.get((ordinal, stream))
        if found is not None and found.is_made:
            return found.value
        if _is_capturing():
            return self._of_the_device(ordinal)
        if found is None:
            found = self._made.setdefault((ordinal, stream), _Made())
        try:
            self._wait_for(found)
            with found.lock:
                _waiting.pop(threading.get_ident(), None)
                if not found.is_made:
                    self._fill(found)
        finally:
            _waiting.pop(threading.get_ident(), None)
        return found.value

    def _wait_for(self, made: _Made) -> None:
        """Says that this thread waits; RuntimeError where who makes it waits, if only by others, for it."""
        me = threading.get_ident()
        with _waiting_lock:
            at: _Made | None = made
            while at is not None and at.maker is not None:
                if at.maker == me:
                    raise RuntimeError(
                        f"{self._name}: making the state called the function that needs it"
                    )
                at = _waiting.get(at.maker)
            _waiting[me] = made

    def _of_the_device(self, ordinal: int) -> Any:
        """XLA captures on a stream of its own, what it has run before on another one."""
        for (device, _), made in list(self._made.items()):
            if device == ordinal and made.is_made:
                return made.value
        raise RuntimeError(
            f"{self._name}: its state would have to be made in a capture, where nothing can be; call the "
            f"function once outside of it"
        )

    def _fill(self, made: _Made) -> None:
        made.maker = threading.get_ident()
        try:
            made.value = self._make()
            made.is_made = True
        except Exception as error:
            add_note(
                error,
                f"raised by the state= of {self._name}, which gets (context, *args, **kwargs): the "
                f"function's own arguments, abstract, after the context",
            )
            raise
        finally:
            made.maker = None


def _is_capturing() -> bool:
    called = _core.current_call()
    return called is not None and called[3]

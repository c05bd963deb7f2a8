# SPDX-License-Identifier: Apache-2.0
"""What `state=` made: a plan, a handle, a module, one for each device."""

import threading
from collections.abc import Callable
from typing import Any

from . import _core


class _OnDevice:
    """The state of one device, and who is making it."""

    def __init__(self) -> None:
        # Held while it is made, by one thread: others that need it wait. Not across devices.
        self.lock = threading.RLock()
        self.is_being_made = False
        self.is_made = False
        self.value: Any = None
        self.stream = 0


class States:
    """Calls `make()` once for each device, in the scope of the first call there. Any thread.

    Lives as long as the plan that has it, and so as long as graphs that were captured with it.
    """

    def __init__(self, name: str, make: Callable[[], Any]) -> None:
        self._name = name
        self._make = make
        self._by_device: dict[int, _OnDevice] = {}

    def __call__(self, ordinal: int, stream: int) -> Any:
        """The state of a device, for work on `stream`.

        Raises:
            RuntimeError: it would have to be made in a capture, or needs itself to be made.
            Exception: what `make` raised; the next call tries again.
        """
        there = self._by_device.get(ordinal)
        if there is None:
            there = self._by_device.setdefault(ordinal, _OnDevice())
        if not there.is_made:
            with there.lock:
                if not there.is_made:
                    self._make_it(there, stream)
        if there.stream != stream and not _is_capturing():
            # What it is made of may be in use on the other stream.
            _core.stream_order(there.stream, stream, ordinal)
            there.stream = stream
        return there.value

    def _make_it(self, there: _OnDevice, stream: int) -> None:
        if there.is_being_made:
            raise RuntimeError(f"{self._name}: making the state called the function that needs it")
        if _is_capturing():
            raise RuntimeError(
                f"{self._name}: the first call on this device came in a capture of XLA's, where nothing "
                f"can be made; call the function once outside of it"
            )
        there.is_being_made = True
        try:
            there.value = self._make()
            there.stream = stream
            there.is_made = True
        finally:
            there.is_being_made = False


def _is_capturing() -> bool:
    called = _core.current_call()
    return called is not None and called[3]

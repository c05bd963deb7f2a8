# SPDX-License-Identifier: Apache-2.0
"""What the adapters share: stream objects, scopes, host scalars, errors."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxbridge import _core
from jaxbridge._errors import ViewKeptError

standard_dtypes = frozenset(
    ["bool", "float16", "float32", "float64", "complex64", "complex128"]
    + [f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)]
)


class StreamCache(dict[tuple[int, int], Any]):
    """A framework's stream objects by (ordinal, CUstream address).

    Bounded: XLA has a few streams per device, but they go with its clients.
    """

    limit = 32

    def __init__(self, make: Callable[[int, int], Any]) -> None:
        super().__init__()
        self._make = make
        self._lock = threading.Lock()

    def __missing__(self, key: tuple[int, int]) -> Any:
        # One object for each stream: the end of a second one would take Warp's record of it along.
        with self._lock:
            found = self.get(key)
            if found is None:
                while len(self) >= self.limit:
                    del self[next(iter(self))]
                found = self[key] = self._make(*key)
            return found


class Nested:
    """A context manager inside another one."""

    __slots__ = ("_inner", "_outer")

    def __init__(self, outer: Any, inner: Any) -> None:
        self._outer = outer
        self._inner = inner

    def __enter__(self) -> None:
        self._outer.__enter__()
        try:
            self._inner.__enter__()
        except BaseException:
            self._outer.__exit__(None, None, None)
            raise

    def __exit__(self, *exc: object) -> None:
        try:
            self._inner.__exit__(*exc)
        finally:
            self._outer.__exit__(*exc)


class Relaxed:
    """What captures forbid their thread is allowed inside: a pool may ask the device for memory."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before = _core.exchange_capture_mode(2)  # CU_STREAM_CAPTURE_MODE_RELAXED

    def __exit__(self, *exc: object) -> None:
        _core.exchange_capture_mode(self._before)


def kept_scratch(framework: str, arrays: list[str], nbytes: int, how_to_copy: str) -> ViewKeptError:
    """The error where a function kept an array that lies in scratch memory."""
    what = ", ".join(arrays) if arrays else f"{nbytes} bytes of {framework}'s"
    return ViewKeptError(
        f'scratch="xla": the function kept {what} after it returned. What it allocates is XLA\'s memory, '
        f"and is used again: keep a copy on the host, make what lives longer in state=, or drop scratch= "
        f"({how_to_copy} inside the function is scratch memory, too)"
    )


def is_host_scalar(value: Any) -> bool:
    """A NumPy scalar or 0-d NumPy array: a rank-0 result that was computed on the host."""
    return isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.ndim == 0)


def unsupported(framework: str, dtype: np.dtype[Any], platform: str) -> TypeError:
    """The error for a dtype that a framework does not have."""
    if dtype.kind == "c":
        cast = "float32, as real and imaginary part,"
    else:
        # 32 bits hold what is narrower: f16, bf16, all fp8, and integers down to the packed ones.
        cast = "float32" if "float" in dtype.name else "int32"
    return TypeError(
        f'framework="{framework}" has no {dtype.name} arrays on {platform}; convert to {cast} '
        f'before the call, or use framework="buffer"'
    )

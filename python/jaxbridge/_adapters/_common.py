# SPDX-License-Identifier: Apache-2.0
"""What the adapters share: stream objects, host scalars, the error for a dtype."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

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

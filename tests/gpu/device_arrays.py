# SPDX-License-Identifier: Apache-2.0
"""What the GPU tests of the exchange share: slow kernels, arrays of each library in every layout."""

import functools
import weakref
from typing import Any

import numpy as np

# Far longer than the host needs to enqueue what follows, on any GPU of today.
SPIN_CYCLES = 200_000_000

FLOAT8_OF_TORCH = [
    "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"
]  # fmt: skip


@functools.cache
def _spin_kernel() -> Any:
    import cupy as cp

    return cp.RawKernel(
        'extern "C" __global__ void spin(long long n) {'
        "  long long start = clock64(); while (clock64() - start < n) {} }",
        "spin",
    )


def spin() -> None:
    """A kernel on CuPy's current stream that takes its time."""
    _spin_kernel()((1,), (1,), (np.int64(SPIN_CYCLES),))


class Owner:
    """Keeps memory of CuPy's, and can be watched: CuPy's own objects have no weak references."""

    def __init__(self, raw: Any) -> None:
        self.raw = raw


def blocks(dtype: np.dtype[Any], size: int = 64) -> tuple[Any, Any, Any]:
    """A block on the device, its content on the host (1, 2, ...), and a weak reference to its owner."""
    import cupy as cp

    numbers = np.arange(1, size + 1) % (2 if dtype.kind == "b" else 8)
    host = numbers.astype(np.float32).astype(dtype)
    raw = cp.asarray(host.view(f"u{min(dtype.itemsize, 8)}"))
    owner = Owner(raw)
    memory = cp.cuda.UnownedMemory(raw.data.ptr, raw.nbytes, owner, raw.data.device_id)
    base = cp.ndarray(raw.shape, raw.dtype, cp.cuda.MemoryPointer(memory, 0))
    return base, host, weakref.ref(owner)


def strided(base: Any, like: Any, host: Any) -> Any:
    """The view of `base` (a block of raw numbers) that `like` is of `host`, by CuPy."""
    import cupy as cp

    offset = like.ctypes.data - host.ctypes.data
    memory = base.data + offset
    return cp.ndarray(like.shape, like.dtype, memory, like.strides)

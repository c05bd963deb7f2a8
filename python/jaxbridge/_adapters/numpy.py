# SPDX-License-Identifier: Apache-2.0
"""NumPy. On CUDA the core stages through pinned host memory, and this adapter sees CPU buffers."""

from typing import TYPE_CHECKING, Any

import numpy as np

from jaxbridge import _core

from ._common import unsupported

if TYPE_CHECKING:
    from . import Signature, Viewer

_ndarray: Any = np.ndarray
_arrays = (np.ndarray, np.generic)

# XLA packs elements smaller than a byte, ml_dtypes does not.
_packed = frozenset(["int1", "uint1", "int2", "uint2", "int4", "uint4", "float4_e2m1fn"])


class NumpyAdapter:
    """Arrays on the CPU. Numba's CPU functions take the same arrays."""

    name = "numpy"
    platforms = frozenset({"cpu"})
    max_ndim = 64
    scalar_shape: tuple[int, ...] = ()
    how_to_copy = "x.copy()"
    always_checks_inputs = False
    always_checks_memory = False

    def check_dtype(self, dtype: np.dtype[Any], platform: str) -> None:
        if dtype.name in _packed:
            raise unsupported(self.name, dtype, platform)

    def viewer(self, dtype: np.dtype[Any], shape: tuple[int, ...], platform: str) -> "Viewer":
        # The buffer becomes `base`, and its read-only flag the array's, for good.
        return _core.as_array

    def view(self, buffer: _core.Buffer) -> Any:
        return _ndarray(buffer.shape, buffer.dtype, buffer)

    def scopes(self, platform: str) -> bool:
        return False

    def scope(self, platform: str, ordinal: int, stream: int) -> None:
        return None

    def capture_scope(self, ordinal: int, stream: int) -> Any:
        raise NotImplementedError(f"{self.name} has no work on CUDA that could be captured")

    def signature(self, value: Any) -> "Signature | None":
        if isinstance(value, _arrays):
            # Of a masked one the elements behind the mask mean nothing.
            return None if isinstance(value, np.ma.MaskedArray) else (value.shape, value.dtype)
        # Objects that show their memory as NumPy does; nothing is computed or converted for that.
        if hasattr(value, "__array_interface__"):
            array = np.asarray(value)
            return array.shape, array.dtype
        return None

    def store(self, value: Any, out: Any) -> None:
        out[...] = value

    def memory(self, array: Any) -> tuple[int, int]:
        return array.__array_interface__["data"][0], array.size

    def snapshot(self, view: Any) -> Any:
        return view.tobytes()

    def unchanged(self, view: Any, token: Any) -> bool:
        return bool(view.tobytes() == token)

    def array_of(self, view: _core.View) -> Any:
        return _core.view_as_array(view)

    def current_stream(self, ordinal: int) -> tuple[int, Any]:
        raise NotImplementedError(f"{self.name} has no work on CUDA")


adapter = NumpyAdapter()

# SPDX-License-Identifier: Apache-2.0
"""The core's buffer itself, for functions that work with pointers or with DLPack."""

import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxbridge import _core

if TYPE_CHECKING:
    from . import Scope, Signature

_interfaces = ("__dlpack__", "__array_interface__", "__cuda_array_interface__")


class BufferAdapter:
    """Buffers. All dtypes: what a function makes of the memory is its own affair.

    Results are written by the function (out=). A returned buffer is copied.
    """

    name = "buffer"
    platforms = frozenset({"cpu", "cuda"})
    max_ndim = 64
    scalar_shape: tuple[int, ...] = ()
    how_to_copy = "numpy.array(x)"
    always_checks_inputs = False
    always_checks_memory = False

    def check_dtype(self, dtype: np.dtype[Any], platform: str) -> None:
        pass

    def viewer(self, dtype: np.dtype[Any], shape: tuple[int, ...], platform: str) -> None:
        return None

    def view(self, buffer: "_core.Buffer") -> Any:
        return buffer

    def scopes(self, platform: str) -> bool:
        # No framework has a current device here; `stream` is an attribute of the buffer.
        return False

    def scope(self, platform: str, ordinal: int, stream: int) -> None:
        return None

    def capture_scope(self, ordinal: int, stream: int) -> "tuple[Scope, Any]":
        # Whoever allocates from a pointer's point of view does it outside a call.
        return contextlib.nullcontext(), None

    def signature(self, value: Any) -> "Signature | None":
        if isinstance(value, _core.Buffer):
            return value.shape, value.dtype
        if any(hasattr(value, name) for name in _interfaces):
            raise TypeError(
                f'with framework="buffer" a function writes its results, given to it with out=; it '
                f"returned a {type(value).__module__}.{type(value).__qualname__}. Use out=, or the "
                f"framework= of that array"
            )
        return None

    def store(self, value: Any, out: "_core.Buffer") -> None:
        if isinstance(value, _core.Buffer):
            _core.copy(value, out)
        elif out.platform == "cpu":
            # A Python number, which the caller has made a NumPy array.
            np.ndarray(out.shape, out.dtype, out)[...] = value
        else:
            raise TypeError(
                'with framework="buffer" a function on CUDA cannot return a number: it writes its '
                "results, given to it with out="
            )

    def memory(self, array: Any) -> tuple[int, int]:
        return array.pointer, array.nbytes

    def snapshot(self, view: Any) -> Any:
        return self._bytes(view) if view.platform == "cpu" else None

    def unchanged(self, view: Any, token: Any) -> bool:
        return token is None or self._bytes(view) == token

    def array_of(self, view: "_core.View") -> Any:
        return view

    def current_stream(self, ordinal: int) -> tuple[int, Any]:
        # Nobody's: the legacy default stream stands for what a user of pointers does by default.
        return 0, None

    @staticmethod
    def _bytes(view: Any) -> bytes:
        return np.ndarray(view.nbytes, np.uint8, view).tobytes()


adapter = BufferAdapter()

# SPDX-License-Identifier: Apache-2.0
"""Numba: NumPy arrays on the CPU, device arrays of numba-cuda on CUDA."""

import ctypes
import functools
import math
import threading
import warnings
from typing import TYPE_CHECKING, Any

import numba
import numpy as np

from jaxbridge import _core

from ._common import standard_dtypes, unsupported
from .numpy import NumpyAdapter

if TYPE_CHECKING:
    from . import Scope, Signature, Viewer

# bfloat16 and float8 have no arrays on the host, and only some intrinsics on the device.
_dtypes = {"cpu": standard_dtypes - {"float16"}, "cuda": standard_dtypes}


class _Cuda:
    """The part of numba-cuda that is used."""

    def __init__(self) -> None:
        try:
            from numba import cuda
            from numba.cuda.cudadrv.devicearray import DeviceNDArray
            from numba.cuda.cudadrv.driver import MemoryPointer
        except Exception as e:
            raise ImportError(
                f'framework="numba" on CUDA needs numba-cuda, and importing it failed with '
                f"{type(e).__name__}: {e}; pip install numba-cuda"
            ) from e
        self.gpus = cuda.gpus
        self.Array = DeviceNDArray
        self.MemoryPointer = MemoryPointer
        # Numba has no current stream. What gets none goes to the default stream, which is another
        # one by an environment variable; 2 is CUDA's handle for that.
        config = getattr(cuda, "config", None) or numba.config
        self.default_stream = 2 if getattr(config, "CUDA_PER_THREAD_DEFAULT_STREAM", 0) else 0


_starting = threading.Lock()


@functools.cache
def _cuda() -> _Cuda:
    # The devices of a program make their first calls at once.
    with _starting:
        made = _Cuda()
        len(made.gpus)  # makes Numba's list of them, which two threads may not do at once
        return made


class _Scope:
    """Numba's default stream works after what XLA's stream has now, and before what it gets next.

    The device is the one whose primary context is current.
    """

    __slots__ = ("_default", "_gpu", "_ordinal", "_stream")

    def __init__(self, ordinal: int, stream: int, cuda: _Cuda) -> None:
        self._ordinal = ordinal
        self._stream = stream
        self._gpu = cuda.gpus[ordinal]
        self._default = cuda.default_stream

    def __enter__(self) -> None:
        self._gpu.__enter__()
        try:
            _core.stream_order(self._stream, self._default, self._ordinal)
        except BaseException:
            self._gpu.__exit__(None, None, None)
            raise

    def __exit__(self, *exc: object) -> None:
        try:
            # Also after an exception: what was launched before it still uses XLA's memory.
            _core.stream_order(self._default, self._stream, self._ordinal)
        finally:
            self._gpu.__exit__(*exc)


class _Captured(threading.local):
    """The stream that this thread captures what it launches without a stream on; None: it does not."""

    stream: Any = None


_captured = _Captured()


def _address(stream: Any) -> int:
    handle = getattr(stream, "handle", stream)
    return int(getattr(handle, "value", handle) or 0)


@functools.cache
def _redirect_launches() -> None:
    """From now on, what a thread launches on Numba's default stream goes to the stream it captures.

    Numba has no current stream, and its default one can't be captured: work there would run at once,
    and be missing in the graph. Threads that capture nothing see no difference.
    """
    try:
        from numba.cuda.dispatcher import _Kernel

        launch = _Kernel.launch
    except (ImportError, AttributeError) as error:
        raise NotImplementedError(
            f"this numba-cuda launches its kernels in a way that is not known ({error})"
        ) from error

    @functools.wraps(launch)
    def redirected(
        self: Any, args: Any, griddim: Any, blockdim: Any, stream: Any = 0, sharedmem: int = 0
    ) -> Any:
        captured = _captured.stream
        if captured is not None and _address(stream) <= 2:  # the handles of default streams
            # Older versions take Numba's stream objects, newer ones those of cuda.core.
            from_handle = getattr(type(stream), "from_handle", None)
            stream = from_handle(_address(captured)) if from_handle else captured
        return launch(self, args, griddim, blockdim, stream, sharedmem)

    _Kernel.launch = redirected


class _CaptureScope:
    """What is launched without a stream is captured."""

    __slots__ = ("_before", "_gpu", "_stream")

    def __init__(self, ordinal: int, stream: int, cuda: _Cuda) -> None:
        self._gpu = cuda.gpus[ordinal]
        self._stream = stream

    def __enter__(self) -> None:
        self._gpu.__enter__()
        self._before = _captured.stream
        _captured.stream = self._gpu.get_primary_context().create_external_stream(self._stream)

    def __exit__(self, *exc: object) -> None:
        _captured.stream = self._before
        self._gpu.__exit__(*exc)


class NumbaAdapter(NumpyAdapter):
    """On CUDA without read-only arrays; a rank-0 array is one of Numba's, too."""

    name = "numba"
    platforms = frozenset({"cpu", "cuda"})
    how_to_copy = "x.copy(), on CUDA x.copy_to_host()"

    def check_dtype(self, dtype: np.dtype[Any], platform: str) -> None:
        if dtype.name not in _dtypes[platform]:
            raise unsupported(self.name, dtype, platform)
        if platform == "cuda":
            _cuda()

    def viewer(self, dtype: np.dtype[Any], shape: tuple[int, ...], platform: str) -> "Viewer":
        if platform == "cpu":
            return super().viewer(dtype, shape, platform)
        cuda = _cuda()
        strides = [dtype.itemsize] * len(shape)
        for axis in range(len(shape) - 1, 0, -1):
            strides[axis - 1] = strides[axis] * shape[axis]
        nbytes = dtype.itemsize * math.prod(shape)

        def view(buffer: "_core.Buffer") -> Any:
            # Every view of a view has a memory pointer with the same owner. Without a stream of its
            # own, so that copies to the host wait, and are in order with kernels.
            pointer = buffer.pointer
            memory = cuda.MemoryPointer(
                cuda.gpus[buffer.ordinal].get_primary_context(),
                ctypes.c_void_p(pointer) if pointer else 0,  # its .value is None for a null pointer
                nbytes,
                owner=buffer,
            )
            return cuda.Array(shape, tuple(strides), dtype, gpu_data=memory)

        return view

    def view(self, buffer: "_core.Buffer") -> Any:
        if buffer.platform == "cpu":
            return super().view(buffer)
        viewer: Any = self.viewer(buffer.dtype, buffer.shape, buffer.platform)
        return viewer(buffer)

    def scopes(self, platform: str) -> bool:
        return platform == "cuda"

    def scope(self, platform: str, ordinal: int, stream: int) -> "Scope":  # type: ignore[override]
        return _Scope(ordinal, stream, _cuda())

    def capture_scope(self, ordinal: int, stream: int) -> Any:
        _redirect_launches()
        # Numba allocates with calls that a capture refuses: no pool.
        return _CaptureScope(ordinal, stream, _cuda()), None

    def signature(self, value: Any) -> "Signature | None":
        if getattr(value, "__cuda_ndarray__", False):
            return tuple(value.shape), value.dtype
        return super().signature(value)

    def store(self, value: Any, out: Any) -> None:
        if isinstance(out, np.ndarray):
            super().store(value, out)
        elif out.size == 0:
            pass
        elif not getattr(value, "__cuda_ndarray__", False):
            # From the host, also more than a scalar: Numba's kernels leave much to it.
            out.copy_to_device(np.array(value, order="C"))
        else:
            # The default stream by its name: without a stream Numba would wait for the device.
            stream = _captured.stream or out.gpu_data.context.get_default_stream()
            if value.flags["C_CONTIGUOUS"] and 0 not in value.strides:
                out.copy_to_device(value, stream=stream)
                return
            with warnings.catch_warnings():
                # That a small array is a small grid is nothing a user could change.
                warnings.simplefilter("ignore")
                out.setitem((), value, stream=stream)

    def memory(self, array: Any) -> tuple[int, int]:
        if isinstance(array, np.ndarray):
            return super().memory(array)
        return array.device_ctypes_pointer.value if array.size else 0, array.size

    def snapshot(self, view: Any) -> Any:
        if isinstance(view, np.ndarray):
            return super().snapshot(view)
        return view.copy_to_host().tobytes()

    def unchanged(self, view: Any, token: Any) -> bool:
        if isinstance(view, np.ndarray):
            return super().unchanged(view, token)
        return bool(view.copy_to_host().tobytes() == token)

    def array_of(self, view: "_core.View") -> Any:
        if view.platform == "cpu":
            return super().array_of(view)
        cuda = _cuda()
        pointer = view.pointer
        memory = cuda.MemoryPointer(
            cuda.gpus[view.ordinal].get_primary_context(),
            ctypes.c_void_p(pointer) if pointer else 0,  # its .value is None for a null pointer
            view.nbytes,
            owner=view,
        )
        return cuda.Array(view.shape, view.strides, view.dtype, gpu_data=memory)

    def current_stream(self, ordinal: int) -> tuple[int, Any]:
        return _cuda().default_stream, None


adapter = NumbaAdapter()

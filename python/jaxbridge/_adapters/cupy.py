# SPDX-License-Identifier: Apache-2.0
"""CuPy, on CUDA."""

import functools
import gc
import math
from typing import TYPE_CHECKING, Any

import cupy
import numpy as np

from jaxbridge import _core

from ._common import (
    Nested,
    Relaxed,
    StreamCache,
    is_host_scalar,
    kept_scratch,
    standard_dtypes,
    unsupported,
)

if TYPE_CHECKING:
    from . import Scope, Signature, Viewer

_ndarray = cupy.ndarray
_MemoryPointer = cupy.cuda.MemoryPointer
_UnownedMemory = cupy.cuda.UnownedMemory
_get_device = cupy.cuda.runtime.getDevice
_set_device = cupy.cuda.runtime.setDevice
_current_stream = cupy.cuda.get_current_stream

# CuPy 14 knows ml_dtypes' bfloat16, where NumPy is new enough for it.
_has_bfloat16 = (
    int(cupy.__version__.split(".")[0]) >= 14 and np.lib.NumpyVersion(np.__version__) >= "2.1.2"
)
_dtypes = standard_dtypes | ({"bfloat16"} if _has_bfloat16 else frozenset())


def _quick_array(shape: Any, dtype: Any, memory: Any, strides: Any = None) -> Any:
    """As `cupy.ndarray(...)`, which for the sake of its subclasses takes twice as long."""
    array = _new_array(_ndarray)
    # It looks the dtype up in a table, where a dtype of NumPy's takes several times as long as its type.
    array._init(shape, dtype.type, memory, strides, None)
    return array


_new_array = _ndarray.__mro__[-2].__new__  # that of the type which has the content


def _is_quick() -> bool:
    """Whether this CuPy makes its arrays in those steps."""
    memory = _MemoryPointer(_UnownedMemory(64, 64, None, 0), 16)
    try:
        array = _quick_array((2, 3), np.dtype(np.float32), memory, (4, 8))
    except (AttributeError, TypeError):
        return False
    found = (type(array), array.shape, array.dtype, array.strides, array.data.ptr, array.size)
    return found == (_ndarray, (2, 3), np.float32, (4, 8), 80, 6)


_array = _quick_array if _is_quick() else _ndarray


def _array_of_parts(
    view: "_core.View",
    pointer: int,
    nbytes: int,
    ordinal: int,
    shape: Any,
    dtype: Any,
    strides: Any,
) -> Any:
    memory = _MemoryPointer(_UnownedMemory(pointer, nbytes, view, ordinal), 0)
    return _array(shape, dtype, memory, strides)


class _Handle:
    """The stream protocol of CUDA libraries for an address."""

    __slots__ = ("_address",)

    def __init__(self, address: int) -> None:
        self._address = address

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._address


def _make_stream(ordinal: int, stream: int) -> Any:
    if stream == 0:
        return cupy.cuda.Stream.null
    if not hasattr(cupy.cuda.Stream, "from_external"):  # before CuPy 14
        return cupy.cuda.ExternalStream(stream, ordinal)
    made = cupy.cuda.Stream.from_external(_Handle(stream))
    # The protocol does not say the device, and CuPy would take whichever is current at each use.
    made.device_id = ordinal
    return made


_streams = StreamCache(_make_stream)


class _Scope:
    """CuPy keeps a current stream per thread and device; the device is the CUDA runtime's."""

    __slots__ = ("_device_before", "_ordinal", "_stream", "_stream_before")

    def __init__(self, ordinal: int, stream: Any) -> None:
        self._ordinal = ordinal
        self._stream = stream

    def __enter__(self) -> None:
        ordinal = self._ordinal
        self._device_before = before = _get_device()
        if before != ordinal:
            _set_device(ordinal)
        try:
            self._stream_before = _current_stream(ordinal)
            # Entered, not only used: a `with` block of the function's own comes back to it.
            self._stream.__enter__()
        except BaseException:
            _set_device(before)
            raise

    def __exit__(self, *exc: object) -> None:
        ordinal, before = self._ordinal, self._stream_before
        if _get_device() != ordinal:  # the function has left another one
            _set_device(ordinal)
        try:
            self._stream.__exit__(*exc)
            # Leaving goes back to the `with` block around, past a stream set by `use()`.
            if _current_stream(ordinal) is not before:
                before.use()
        finally:
            if self._device_before != ordinal:
                _set_device(self._device_before)


class _Block:
    """Gives a block of scratch memory back when CuPy's last array on it ends.

    Not cupy.cuda.PythonFunctionAllocator: its memory crashes where a garbage collection ends it.
    """

    __slots__ = ("_pointer", "_scratch")

    def __init__(self, scratch: "_core.Scratch", pointer: int) -> None:
        self._scratch = scratch
        self._pointer = pointer

    def __del__(self) -> None:
        self._scratch.free(self._pointer)


class _Scratch:
    """Allocations come from memory of XLA's, which has it back when the call ends."""

    __slots__ = ("_allocator", "_scratch")

    def __init__(self, ordinal: int, scratch: "_core.Scratch") -> None:
        self._scratch = scratch

        def allocate(nbytes: int) -> Any:
            pointer = scratch.allocate(nbytes)
            memory = _UnownedMemory(pointer, nbytes, _Block(scratch, pointer), ordinal)
            return _MemoryPointer(memory, 0)

        self._allocator = cupy.cuda.using_allocator(allocate)

    def __enter__(self) -> None:
        self._allocator.__enter__()

    def __exit__(self, *exc: object) -> None:
        self._allocator.__exit__(None, None, None)
        if exc[0] is not None or not self._scratch.live:
            return
        gc.collect()  # a cycle is not kept
        live = self._scratch.live
        if live:
            raise kept_scratch("CuPy", _arrays_in(live), sum(n for _, n in live), "x.copy()")


def _arrays_in(blocks: list[tuple[int, int]]) -> list[str]:
    """The arrays whose memory lies in `blocks`, for a message."""
    return [
        f"an array {x.dtype}[{','.join(map(str, x.shape))}]"
        for x in gc.get_objects()
        if type(x) is _ndarray and any(b <= x.data.ptr < b + n for b, n in blocks)
    ]


class _PrivatePool:
    """Memory that only the work of one graph allocates.

    Its end gives that back to the device, which the end of a pool of CuPy 14 does not.
    """

    __slots__ = ("_pool",)

    def __init__(self) -> None:
        self._pool = cupy.cuda.MemoryPool()

    def allocate(self, nbytes: int) -> Any:
        with Relaxed():
            return self._pool.malloc(nbytes)

    def __del__(self) -> None:
        self._pool.free_all_blocks()


class CupyAdapter:
    """Arrays on CUDA. CuPy has no read-only arrays."""

    name = "cupy"
    platforms = frozenset({"cuda"})
    max_ndim = 64 if int(cupy.__version__.split(".")[0]) >= 14 else 25
    scalar_shape: tuple[int, ...] = ()
    how_to_copy = "x.copy()"
    always_checks_inputs = False
    always_checks_memory = False

    def check_dtype(self, dtype: np.dtype[Any], platform: str) -> None:
        if dtype.name not in _dtypes:
            raise unsupported(self.name, dtype, platform)

    def viewer(self, dtype: np.dtype[Any], shape: tuple[int, ...], platform: str) -> "Viewer":
        return self._viewer(dtype, shape)

    def _viewer(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Any:
        nbytes = dtype.itemsize * math.prod(shape)

        def source(buffer: "_core.Buffer") -> tuple[Any, Any]:
            # Every view of a view shares the memory object, and so keeps its owner.
            memory = _UnownedMemory(buffer.pointer, nbytes, buffer, buffer.ordinal)
            return memory, _MemoryPointer(memory, 0)

        return source, functools.partial(_array, shape, dtype)

    def view(self, buffer: "_core.Buffer") -> Any:
        source, view = self._viewer(buffer.dtype, buffer.shape)
        return view(source(buffer)[1])

    def scopes(self, platform: str) -> bool:
        return True

    def scope(self, platform: str, ordinal: int, stream: int) -> "Scope":
        return _Scope(ordinal, _streams[ordinal, stream])

    def capture_scope(self, ordinal: int, stream: int) -> "tuple[Scope, Any]":
        pool = _PrivatePool()
        scope = cupy.cuda.using_allocator(pool.allocate)
        return Nested(self.scope("cuda", ordinal, stream), scope), pool

    def scratch_scope(self, ordinal: int, stream: int, scratch: "_core.Scratch") -> "Scope":
        return Nested(self.scope("cuda", ordinal, stream), _Scratch(ordinal, scratch))

    def signature(self, value: Any) -> "Signature | None":
        if isinstance(value, _ndarray) or is_host_scalar(value):
            return value.shape, value.dtype
        return None

    def store(self, value: Any, out: Any) -> None:
        if not isinstance(value, _ndarray):
            # As an argument of a kernel: no transfer that would wait for the device.
            cupy.copyto(out, np.asarray(value)[()])
        elif value.flags.c_contiguous:
            out.data.copy_from_device_async(value.data, out.nbytes)
        else:
            cupy.copyto(out, value)

    def memory(self, array: Any) -> tuple[int, int]:
        return array.data.ptr, array.nbytes

    def snapshot(self, view: Any) -> Any:
        return view.copy()

    def unchanged(self, view: Any, token: Any) -> bool:
        if view.size == 0:
            return True
        # As bytes: a NaN is not equal to itself.
        now, then = (a.reshape(-1).view(np.uint8) for a in (view, token))
        return bool((now == then).all())

    def array_of(self, view: "_core.View") -> Any:
        return _array_of_parts(view, *view.parts)

    array_of_parts = staticmethod(_array_of_parts)

    def current_stream(self, ordinal: int) -> tuple[int, Any]:
        stream = _current_stream(ordinal)
        return stream.ptr, stream

    # The same in C.
    stream_object = staticmethod(_current_stream)

    array_type = _ndarray

    def view_of(self, array: Any) -> "_core.View":
        data = array.data
        ordinal = data.device_id
        return _core.view_of_memory(
            data.ptr,
            array.shape,
            array.dtype,
            "cuda",
            ordinal,
            array.strides,
            _current_stream(ordinal).ptr,
            False,
            array,
        )

    def copy_of(self, array: Any) -> Any:
        with array.device:
            return array.copy(order="C")


adapter = CupyAdapter()

# SPDX-License-Identifier: Apache-2.0
"""Warp, on the CPU and on CUDA."""

import functools
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import warp as wp

from jaxbridge import _core

from ._common import (
    Nested,
    Relaxed,
    StreamCache,
    is_host_scalar,
    standard_dtypes,
    unsupported,
)

if TYPE_CHECKING:
    from . import Scope, Signature

_array: Any = wp.array
_ScopedAllocator: Any = getattr(wp, "ScopedAllocator", None)  # not in old versions

_to_warp: dict[np.dtype[Any], Any] = {
    np.dtype(name): getattr(wp, name)
    for name in standard_dtypes
    if hasattr(wp, name)  # no complex numbers
}
if hasattr(wp, "bfloat16"):  # not in old versions
    import ml_dtypes

    _to_warp[np.dtype(ml_dtypes.bfloat16)] = wp.bfloat16
_to_numpy = {there: here for here, there in _to_warp.items()}


def _init_quietly() -> None:
    """Initialises Warp without its greeting, where the program has not done it yet."""
    option, quiet = (
        ("log_level", wp.LOG_WARNING) if hasattr(wp.config, "log_level") else ("quiet", True)
    )
    before = getattr(wp.config, option)
    setattr(wp.config, option, max(before, quiet))
    try:
        wp.init()
    finally:
        setattr(wp.config, option, before)


@functools.cache
def _device(name: str) -> Any:
    return wp.get_device(name)


def _make_stream(ordinal: int, stream: int) -> Any:
    return wp.Stream(_device(f"cuda:{ordinal}"), cuda_stream=stream or None)


_streams = StreamCache(_make_stream)


class _Allocator:
    """Warp's own allocator, with XLA's stream in the order of what it frees.

    Warp frees on the null stream, which waits for the streams that Warp makes, but not for XLA's: a
    temporary would be free, and in other hands, before the kernel that reads it has run.
    """

    deallocate_requires_context_guard = True

    def __init__(self, inner: Any, stream: Any) -> None:
        self.inner = inner
        self.memory_kind = getattr(inner, "memory_kind", None)
        self._stream = stream
        self._is_used = False
        self._in_call = False

    def enter(self) -> None:
        self._in_call = True

    def leave(self) -> None:
        self._in_call = False
        self._order()

    def allocate(self, size_in_bytes: int) -> Any:
        self._is_used = True
        return self.inner.allocate(size_in_bytes)

    def deallocate(self, ptr: int, size_in_bytes: int) -> None:
        # What outlives its call was put in order by the end of the call, or of a later one.
        if self._in_call:
            self._order()
        self.inner.deallocate(ptr, size_in_bytes)

    def _order(self) -> None:
        """What is freed from now on is freed after the work that XLA's stream has now."""
        # A capture keeps what was allocated under it, and does not take the null stream.
        if self._is_used and not self._stream.is_capturing:
            _core.stream_order(self._stream.cuda_stream or 0, 0, self._stream.device.ordinal)


class _Pool:
    """Memory that only the work of one graph allocates: as long as the graph."""

    deallocate_requires_context_guard = True

    def __init__(self, device: Any) -> None:
        self._device = device
        self._inner = device.default_allocator
        self.memory_kind = getattr(self._inner, "memory_kind", None)
        self._blocks: dict[int, int] = {}
        self._free: dict[int, list[int]] = {}
        # Warp's record of the capture, which keeps the modules of its kernels loaded.
        self.graph: Any = None

    def enter(self) -> None:
        pass

    def leave(self) -> None:
        pass

    def allocate(self, size_in_bytes: int) -> int:
        free = self._free.get(size_in_bytes)
        if free:
            return free.pop()  # in the order of the one stream that is captured
        with Relaxed():
            made: int = self._inner.allocate(size_in_bytes)
        self._blocks[made] = size_in_bytes
        return made

    def deallocate(self, ptr: int, size_in_bytes: int) -> None:
        self._free.setdefault(self._blocks[ptr], []).append(ptr)

    def __del__(self) -> None:
        if sys is None or sys.is_finalizing():
            return
        with self._device.context_guard, Relaxed():
            for ptr, size in self._blocks.items():
                self._inner.deallocate(ptr, size)


class _Turn:
    """Who has Warp's current device and stream, which it keeps for the whole process.

    Calls on one device and stream share them. Others wait until the last of these has returned:
    with another default device under it, a function would launch and allocate in the wrong place.
    The lock itself is held for moments only.
    """

    def __init__(self) -> None:
        self._free = threading.Condition()
        self._device: Any = None
        self._stream: Any = None
        self._threads: list[int] = []
        self._device_before: Any = None
        self._stream_before: Any = None
        self._allocators: dict[Any, _Allocator] = {}
        self._allocator: _Allocator | _Pool | None = None
        self._allocator_scope: Any = None

    def take(self, device: Any, stream: Any, pool: _Pool | None = None) -> None:
        me = threading.get_ident()
        with self._free:
            while self._threads and (device is not self._device or stream is not self._stream):
                if me in self._threads:
                    raise RuntimeError(
                        f"a Warp function on {self._device} called JAX, which called a Warp "
                        f"function on {device}; a function must not call JAX"
                    )
                self._free.wait()
            if not self._threads:
                self._set(device, stream, pool)
            self._threads.append(me)

    def give_back(self) -> None:
        with self._free:
            self._threads.remove(threading.get_ident())
            if self._threads:
                return
            try:
                self._restore()
            finally:
                self._free.notify_all()

    def _set(self, device: Any, stream: Any, pool: _Pool | None) -> None:
        if stream is not None:
            self._stream_before = device.stream
            # Without an order between the two: XLA's stream waits for nothing of Warp's.
            device.set_stream(stream, sync=False)
            try:
                self._set_allocator(device, pool or self._allocator_of(device, stream))
            except BaseException:
                device.set_stream(self._stream_before, sync=False)
                raise
        self._device_before = device.runtime.default_device
        device.runtime.default_device = device
        self._device, self._stream = device, stream

    def _restore(self) -> None:
        device, stream = self._device, self._stream
        device.runtime.default_device = self._device_before
        if stream is not None:
            device.set_stream(self._stream_before, sync=False)
            self._restore_allocator()

    def _allocator_of(self, device: Any, stream: Any) -> _Allocator | None:
        if _ScopedAllocator is None:
            return None
        inner = device.get_allocator()
        allocator = self._allocators.get(stream)
        if allocator is None or allocator.inner is not inner:
            if len(self._allocators) >= StreamCache.limit:
                self._allocators.clear()
            allocator = self._allocators[stream] = _Allocator(inner, stream)
        return allocator

    def _set_allocator(self, device: Any, allocator: _Allocator | _Pool | None) -> None:
        if allocator is None:
            return
        self._allocator = allocator
        self._allocator_scope = _ScopedAllocator(device, allocator)
        self._allocator_scope.__enter__()
        allocator.enter()

    def _restore_allocator(self) -> None:
        allocator, scope = self._allocator, self._allocator_scope
        if allocator is None:
            return
        self._allocator = self._allocator_scope = None
        scope.__exit__(None, None, None)
        allocator.leave()


_turn = _Turn()


class _Scope:
    """Warp's default device, its current stream, and the thread's CUDA context."""

    __slots__ = ("_device", "_pool", "_stream")

    def __init__(self, device: Any, stream: Any, pool: _Pool | None = None) -> None:
        self._device = device
        self._stream = stream
        self._pool = pool

    def __enter__(self) -> None:
        _turn.take(self._device, self._stream, self._pool)
        if self._stream is not None:
            try:
                self._device.context_guard.__enter__()
            except BaseException:
                _turn.give_back()
                raise

    def __exit__(self, *exc: object) -> None:
        try:
            if self._stream is not None:
                self._device.context_guard.__exit__(*exc)
        finally:
            _turn.give_back()


class _Capture:
    """Tells Warp that its current stream is being captured."""

    __slots__ = ("_pool", "_stream")

    def __init__(self, stream: Any, pool: _Pool) -> None:
        self._stream = stream
        self._pool = pool

    def __enter__(self) -> None:
        wp.capture_begin(stream=self._stream, force_module_load=False, external=True)

    def __exit__(self, *exc: object) -> None:
        try:
            self._pool.graph = wp.capture_end(stream=self._stream)
        except RuntimeError:
            # A capture that failed: that is known, where the function raised.
            if exc[0] is None:
                raise


class WarpAdapter:
    """Arrays of up to four axes. Warp has no read-only arrays, and none of rank 0."""

    name = "warp"
    platforms = frozenset({"cpu", "cuda"})
    max_ndim = 4
    scalar_shape: tuple[int, ...] = (1,)
    how_to_copy = "warp.clone(x)"
    always_checks_inputs = False
    always_checks_memory = False

    def check_dtype(self, dtype: np.dtype[Any], platform: str) -> None:
        if dtype not in _to_warp:
            raise unsupported(self.name, dtype, platform)

    def viewer(
        self, dtype: np.dtype[Any], shape: tuple[int, ...], platform: str
    ) -> Callable[["_core.Buffer"], Any]:
        if len(shape) > self.max_ndim:
            raise TypeError(
                f'framework="warp" has arrays of at most {self.max_ndim} axes, not {len(shape)}; '
                f"reshape before the call"
            )
        warp_dtype = _to_warp[dtype]
        warp_shape = shape or self.scalar_shape

        def view(buffer: "_core.Buffer") -> Any:
            device = _device("cpu" if platform == "cpu" else f"cuda:{buffer.ordinal}")
            array = _array(
                ptr=buffer.pointer, dtype=warp_dtype, shape=warp_shape, device=device, copy=False
            )
            # A view of a view refers to the array that it was made of.
            array._jaxbridge_buffer = buffer
            return array

        return view

    def view(self, buffer: "_core.Buffer") -> Any:
        return self.viewer(buffer.dtype, buffer.shape, buffer.platform)(buffer)

    def scopes(self, platform: str) -> bool:
        return True

    def scope(self, platform: str, ordinal: int, stream: int) -> "Scope":
        if platform == "cpu":
            return _Scope(_device("cpu"), None)
        return _Scope(_device(f"cuda:{ordinal}"), _streams[ordinal, stream])

    def capture_scope(self, ordinal: int, stream: int) -> "tuple[Scope, Any]":
        if _ScopedAllocator is None:
            raise NotImplementedError(
                f"Warp {wp.__version__} has no allocators for one device, which a graph needs; use "
                f"warp-lang 1.13 or later"
            )
        device = _device(f"cuda:{ordinal}")
        pool = _Pool(device)
        on = _streams[ordinal, stream]
        return Nested(_Scope(device, on, pool), _Capture(on, pool)), pool

    def signature(self, value: Any) -> "Signature | None":
        if not isinstance(value, (_array, wp.indexedarray)):
            return (value.shape, value.dtype) if is_host_scalar(value) else None
        dtype, inner = _scalar_type(value.dtype)
        if dtype not in _to_numpy:
            name = getattr(value.dtype, "__name__", value.dtype)
            raise TypeError(f"a Warp array of {name} cannot be a result: NumPy has no such dtype")
        return (*value.shape, *inner), _to_numpy[dtype]

    def store(self, value: Any, out: Any) -> None:
        if is_host_scalar(value):
            out.fill_(np.asarray(value).item())
            return
        _, inner = _scalar_type(value.dtype)
        if inner:
            value = _of_scalars(value)
        wp.copy(out, value)

    def memory(self, array: Any) -> tuple[int, int]:
        return array.ptr or 0, array.size

    def snapshot(self, view: Any) -> Any:
        return view.numpy().tobytes()

    def unchanged(self, view: Any, token: Any) -> bool:
        return bool(view.numpy().tobytes() == token)

    def array_of(self, view: "_core.View") -> Any:
        array = _array(
            ptr=view.pointer,
            dtype=_to_warp[view.dtype],
            shape=view.shape or self.scalar_shape,
            strides=None if view.layout == "compact" else view.strides,
            device=_device("cpu" if view.platform == "cpu" else f"cuda:{view.ordinal}"),
            copy=False,
        )
        array._jaxbridge_buffer = view
        return array

    def current_stream(self, ordinal: int) -> tuple[int, Any]:
        stream = _device(f"cuda:{ordinal}").stream
        return stream.cuda_stream or 0, stream


def _scalar_type(dtype: Any) -> tuple[Any, tuple[int, ...]]:
    """The type of the numbers in an array of vectors or matrices, and the shape of one of these."""
    if hasattr(dtype, "_wp_scalar_type_"):
        return dtype._wp_scalar_type_, tuple(dtype._shape_)
    return dtype, ()


def _of_scalars(array: Any) -> Any:
    """An array of vectors or matrices as one of numbers, with more axes."""
    dtype, inner = _scalar_type(array.dtype)
    itemsize = _to_numpy[dtype].itemsize
    strides = [itemsize] * len(inner)
    for axis in range(len(inner) - 1, 0, -1):
        strides[axis - 1] = strides[axis] * inner[axis]
    return _array(
        ptr=array.ptr,
        dtype=dtype,
        shape=(*array.shape, *inner),
        strides=(*array.strides, *strides),
        device=array.device,
        copy=False,
    )


_init_quietly()
adapter = WarpAdapter()

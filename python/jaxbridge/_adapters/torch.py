# SPDX-License-Identifier: Apache-2.0
"""PyTorch, on the CPU and on CUDA."""

import gc
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import torch

from jaxbridge import _compat, _config, _core, _frames

from ._common import (
    Nested,
    StreamCache,
    is_host_scalar,
    kept_scratch,
    standard_dtypes,
    unsupported,
)

if TYPE_CHECKING:
    from . import Scope, Signature

_Tensor = torch.Tensor
# Subclasses may stand for something else than memory, and say so when they are exported.
_plain_tensors = frozenset([torch.Tensor, torch.nn.Parameter])
# Of a capsule: the public form first looks for what a capsule has not.
_from_dlpack = getattr(torch._C, "_from_dlpack", torch.utils.dlpack.from_dlpack)


def _numpy_dtype(name: str) -> np.dtype[Any]:
    return np.dtype(name if name in standard_dtypes else getattr(ml_dtypes, name))


_float8 = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")
# The names are the same on both sides; what an older torch or ml_dtypes lacks is left out.
_to_torch: dict[np.dtype[Any], Any] = {
    _numpy_dtype(name): getattr(torch, name)
    for name in (*sorted(standard_dtypes), "bfloat16", *_float8)
    if hasattr(torch, name) and (name in standard_dtypes or hasattr(ml_dtypes, name))
}
_to_numpy = {there: here for here, there in _to_torch.items()}
# Viewed as bytes first: torch takes them by DLPack since a late version only.
_float8_dtypes = frozenset(d for d in _to_torch if d.name in _float8)


def _view(buffer: "_core.Buffer") -> Any:
    # The storage, which all views share, keeps the capsule's owner. No stream is given: it is the
    # call's own, and current.
    return _from_dlpack(buffer.__dlpack__())


class _Bytes:
    """The memory of a buffer as unsigned bytes, by NumPy's or the CUDA array interface."""

    def __init__(self, buffer: "_core.Buffer") -> None:
        self.buffer = buffer
        name = "__array_interface__" if buffer.platform == "cpu" else "__cuda_array_interface__"
        # Torch refuses read-only memory. No stream: the call's is current already.
        interface = {
            "shape": buffer.shape,
            "typestr": "|u1",
            "data": (buffer.pointer, False),
            "version": 3,
        }
        setattr(self, name, interface)


def _view_as_bytes(buffer: "_core.Buffer") -> Any:
    dtype = _to_torch[buffer.dtype]
    device = "cpu" if buffer.platform == "cpu" else f"cuda:{buffer.ordinal}"
    if buffer.nbytes == 0:
        return torch.empty(buffer.shape, dtype=dtype, device=device)
    array = _Bytes(buffer)
    if device == "cpu":
        return torch.from_numpy(np.asarray(array)).view(dtype)
    return torch.as_tensor(array, device=device).view(dtype)


def _current_stream_in_a_tuple(ordinal: int) -> tuple[Any, ...]:
    return (torch.cuda.current_stream(ordinal),)


# What torch's public functions call, to which they add objects and checks: three times as much.
_has_quick_streams = all(
    hasattr(torch._C, name)
    for name in ("_cuda_getDevice", "_cuda_getCurrentStream", "_cuda_setStream")
)
_current_device: Any = torch.cuda.current_device
_stream_on: Any = _current_stream_in_a_tuple
_set_stream: Any = torch.cuda.set_stream  # makes its device current, too
if _has_quick_streams:
    _current_device = torch._C._cuda_getDevice
    _stream_on = torch._C._cuda_getCurrentStream
    _set_stream = torch._C._cuda_setStream


def _as_set(stream: Any) -> tuple[Any, ...]:
    """A stream as `_stream_on` returns it, and `_set_stream` takes it apart."""
    if _has_quick_streams:
        return stream.stream_id, stream.device_index, stream.device_type
    return (stream,)


def _make_stream(ordinal: int, stream: int) -> Any:
    if stream == 0:
        return _as_set(torch.cuda.default_stream(ordinal))
    return _as_set(torch.cuda.ExternalStream(stream, device=ordinal))


_streams = StreamCache(_make_stream)


# What torch's own compiler asks, where it is there: the public form makes an object first, which takes as
# long as the rest of an export.
_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def _current_stream(ordinal: int) -> int:
    """The CUstream that is current for this thread."""
    if _raw_stream is None or not torch.cuda.is_initialized():
        return int(torch.cuda.current_stream(ordinal).cuda_stream)
    return int(_raw_stream(ordinal))


class _Scope:
    """Torch keeps a current stream per thread and device; the device is the CUDA runtime's."""

    __slots__ = ("_device_before", "_ordinal", "_stream", "_stream_before")

    def __init__(self, ordinal: int, stream: tuple[Any, ...]) -> None:
        self._ordinal = ordinal
        self._stream = stream

    def __enter__(self) -> None:
        self._device_before = _current_device()
        self._stream_before = _stream_on(self._ordinal)
        _set_stream(*self._stream)

    def __exit__(self, *exc: object) -> None:
        _set_stream(*self._stream_before)
        if self._device_before != self._ordinal:
            torch.cuda.set_device(self._device_before)


# Allocators of pools whose memory is the scratch of the call that its thread is in. Each is used by one
# call at a time, since torch keeps account of addresses in it, and XLA gives the same ones again.
_scratch_allocators: list[Any] = []
# Of pools that end some day, with a tensor that a function has kept; torch has no reference of its own.
_lost_allocators: list[Any] = []


def _scratch_allocator() -> Any:
    try:
        return _scratch_allocators.pop()
    except IndexError:
        pass
    try:
        # What torch.cuda.memory.CUDAPluggableAllocator does with functions of a library.
        return torch._C._cuda_customAllocator(*_core.scratch_hooks())
    except AttributeError as error:
        raise NotImplementedError(
            f'scratch="xla": torch {torch.__version__} takes no allocator for a pool; drop scratch=, or '
            f"use torch 2.5 or later"
        ) from error


class _Scratch:
    """Allocations come from memory of XLA's, which has it back when the call ends."""

    __slots__ = ("_allocator", "_ordinal", "_pool", "_scratch", "_use")

    def __init__(self, ordinal: int, scratch: "_core.Scratch") -> None:
        self._ordinal = ordinal
        self._scratch = scratch

    def __enter__(self) -> None:
        self._allocator = _scratch_allocator()
        self._pool: Any = torch.cuda.MemPool(self._allocator)
        self._use: Any = torch.cuda.use_mem_pool(self._pool, self._ordinal)
        _core.enter_scratch_hooks(self._scratch)
        try:
            self._use.__enter__()
        except BaseException:
            _core.leave_scratch_hooks()
            raise

    def __exit__(self, kind: object, raised: Any, traceback: object) -> None:
        try:
            self._use.__exit__(None, None, None)
            # The end of a pool gives back what no tensor has.
            self._use = self._pool = None
            if self._scratch.live:
                self._look_again(raised)
        finally:
            kept = self._scratch.live
            (_lost_allocators if kept else _scratch_allocators).append(self._allocator)
            _core.leave_scratch_hooks()
        if kept and raised is None:
            raise kept_scratch("torch", _tensors_in(kept), sum(n for _, n in kept), "x.clone()")

    def _look_again(self, raised: BaseException | None) -> None:
        """Frees what is not kept, but still there: in a cycle, or in the frames of an exception."""
        if raised is not None:
            _frames.end(raised, sys.exception(), sys._getframe(3))
        gc.collect()
        torch.cuda.empty_cache()


def _tensors_in(blocks: list[tuple[int, int]]) -> list[str]:
    """The tensors whose memory lies in `blocks`, for a message."""
    found = []
    for x in gc.get_objects():
        # By its type: some objects do things when their class is asked for.
        if issubclass(type(x), torch.Tensor) and x.is_cuda:
            pointer = x.untyped_storage().data_ptr()
            if any(b <= pointer < b + n for b, n in blocks):
                dtype = str(x.dtype).removeprefix("torch.")
                found.append(f"a tensor {dtype}[{','.join(map(str, x.shape))}]")
    return found


class TorchAdapter:
    """Tensors. Torch has no read-only ones: the version of an input tells whether it was written.

    Not seen by the version: writes through `.data`, `.numpy()` or a pointer. In debug mode the
    content is compared as well.
    """

    name = "torch"
    platforms = frozenset({"cpu", "cuda"})
    max_ndim = 64
    scalar_shape: tuple[int, ...] = ()
    how_to_copy = "x.clone()"
    always_checks_inputs = True
    always_checks_memory = True

    def check_dtype(self, dtype: np.dtype[Any], platform: str) -> None:
        if platform == "cuda" and torch.version.cuda is None:
            raise ImportError(
                f'framework="torch" on CUDA needs a torch built for CUDA, and {torch.__version__} '
                f"is not: pip install torch (see pytorch.org for the index of the CUDA builds)"
            )
        if dtype not in _to_torch:
            raise unsupported(self.name, dtype, platform)

    def viewer(
        self, dtype: np.dtype[Any], shape: tuple[int, ...], platform: str
    ) -> Callable[["_core.Buffer"], Any]:
        return _view_as_bytes if dtype in _float8_dtypes else _view

    def view(self, buffer: "_core.Buffer") -> Any:
        return self.viewer(buffer.dtype, buffer.shape, buffer.platform)(buffer)

    def scopes(self, platform: str) -> bool:
        return platform == "cuda"

    def scope(self, platform: str, ordinal: int, stream: int) -> "Scope":
        return _Scope(ordinal, _streams[ordinal, stream])

    def capture_scope(self, ordinal: int, stream: int) -> "tuple[Scope, Any]":
        if not hasattr(torch.cuda, "MemPool"):
            raise NotImplementedError(f"torch {torch.__version__} has no torch.cuda.MemPool")
        pool = torch.cuda.MemPool()
        scope = torch.cuda.use_mem_pool(pool, ordinal)
        return Nested(self.scope("cuda", ordinal, stream), scope), pool

    def scratch_scope(self, ordinal: int, stream: int, scratch: "_core.Scratch") -> "Scope":
        return Nested(self.scope("cuda", ordinal, stream), _Scratch(ordinal, scratch))

    def signature(self, value: Any) -> "Signature | None":
        if not isinstance(value, _Tensor):
            return (value.shape, value.dtype) if is_host_scalar(value) else None
        dtype = _to_numpy.get(value.dtype)
        if dtype is None:
            raise TypeError(
                f"a tensor of dtype {value.dtype} cannot be a result: NumPy and ml_dtypes have no "
                f"such dtype; convert it, for example with .to(torch.float32)"
            )
        if value.layout is not torch.strided:
            raise TypeError(
                f"a tensor of layout {value.layout} cannot be a result; convert it with .to_dense()"
            )
        return tuple(value.shape), dtype

    def store(self, value: Any, out: Any) -> None:
        if not isinstance(value, _Tensor):
            _fill(np.asarray(value), out)
            return
        if value.requires_grad:
            # JAX does not see torch's graph: derivatives are defined on the Function.
            value = value.detach()
        out.copy_(value)

    def memory(self, array: Any) -> tuple[int, int]:
        # Torch makes an out= tensor smaller where the result is, and only warns.
        return array.data_ptr(), array.numel()

    def snapshot(self, view: Any) -> Any:
        # A thread in inference mode makes tensors that have no version.
        version = None if view.is_inference() else view._version
        return version, view.detach().clone() if _config.debug else None

    def unchanged(self, view: Any, token: Any) -> bool:
        version, content = token
        if version is not None and view._version != version:
            return False
        if content is None or view.numel() == 0:
            return True
        # As bytes: a NaN is not equal to itself.
        now, then = (a.detach().reshape(-1).view(torch.uint8) for a in (view, content))
        return torch.equal(now, then)

    def array_of(self, view: "_core.View") -> Any:
        if view.dtype not in _float8_dtypes:
            return _from_dlpack(view.__dlpack__(stream=-1))
        # Its bytes as torch has them, and their type put back.
        as_bytes = _core.view_of_memory(
            view.pointer,
            view.shape,
            np.dtype(np.uint8),
            view.platform,
            view.ordinal,
            view.strides,
            None,
            False,
            view,
        )
        return _from_dlpack(as_bytes.__dlpack__(stream=-1)).view(_to_torch[view.dtype])

    def current_stream(self, ordinal: int) -> tuple[int, Any]:
        # Torch keeps its own streams for good, and does not own others.
        return _current_stream(ordinal), None

    array_type = _Tensor

    def wrote_to(self, array: Any) -> None:
        """Lets autograd know: what it has saved of the tensor is not what it was."""
        if not array.is_inference():
            torch.autograd.graph.increment_version(array)

    def view_of(self, array: Any) -> "_core.View":
        dtype = _to_numpy.get(array.dtype)
        if dtype is None:
            raise BufferError(
                f"a tensor of {array.dtype}: NumPy and ml_dtypes have no such dtype; convert it, for "
                f"example with x.to(torch.float32)"
            )
        if array.requires_grad:
            raise BufferError(
                "a tensor that requires grad: JAX does not see its graph; use x.detach()"
            )
        if array.layout is not torch.strided:
            raise BufferError(f"a tensor of layout {array.layout}: make it dense with x.to_dense()")
        if array.is_conj() or array.is_neg():
            raise BufferError(
                "a tensor that is conjugated or negated when it is read, and its memory is not; use "
                "x.resolve_conj().resolve_neg()"
            )
        device = array.device
        # A tensor can be given other memory (`x.data = y`); what it has now is another one's, too.
        array = array.detach()
        if device.type not in self.platforms or type(array) not in _plain_tensors:
            return _core.view_of_capsule(array.__dlpack__(max_version=(1, 0)), None, None, array)
        itemsize = dtype.itemsize
        on_cuda = device.type == "cuda"
        # To ask initialises CUDA. Torch does not say that it has pinned memory by itself.
        pinned = (
            not on_cuda
            and (torch.cuda.is_initialized() or _compat.has_begun_with_cuda())
            and array.is_pinned()
        )
        ordinal = device.index if on_cuda else 0
        return _core.view_of_memory(
            array.data_ptr(),
            array.shape,
            dtype,
            "pinned" if pinned else device.type,
            ordinal,
            tuple(n * itemsize for n in array.stride()),
            _current_stream(ordinal) if on_cuda else None,
            False,
            array,
        )

    def copy_of(self, array: Any) -> Any:
        return array.clone(memory_format=torch.contiguous_format)


def _fill(value: Any, out: Any) -> None:
    """Stores a number as an argument of a kernel: no transfer that would wait for the device."""
    if value.dtype.kind == "c":
        out.fill_(value.item())
        return
    # By its bits: exact for every dtype.
    bits = 8 * value.dtype.itemsize
    out.view(getattr(torch, f"int{bits}")).fill_(int(value.view(f"int{bits}")))


adapter = TorchAdapter()

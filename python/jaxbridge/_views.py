# SPDX-License-Identifier: Apache-2.0
"""Views of memory that others own: `buffer`, `empty`, `pointer`, `shares_memory`, and of any array."""

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from . import _adapters, _compat, _core

# XLA wants the address of an array on the CPU to be a multiple of this.
cpu_alignment = 64

# types.CapsuleType came with Python 3.13.
capsule_type: type = type(_core.handlers()[0][2])


def dtype_table(names: Sequence[str]) -> dict[str, Any]:
    """From the names of XLA's element types to dtype objects, where NumPy and ml_dtypes have them."""
    table: dict[str, Any] = {}
    for name in names:
        if (scalar := getattr(np, name, None) or getattr(ml_dtypes, name, None)) is not None:
            table[name] = np.dtype(scalar)
    return table


# Elements smaller than a byte.
_packed = frozenset(
    dtype_table(["int1", "uint1", "int2", "uint2", "int4", "uint4", "float4_e2m1fn"]).values()
)

_dlpack_version = (1, 2)
_no_order = -1
_cuda_kinds = (2, 13)  # DLPack's device codes: CUDA, and managed memory
_pinned_kind = 3


def buffer(
    pointer: int,
    shape: int | Sequence[int],
    dtype: Any,
    device: Any,
    *,
    strides: Sequence[int] | None = None,
    stream: Any = None,
    readonly: bool = False,
    owner: object = None,
) -> _core.View:
    """Memory at an address, as an array that `from_external` and every other library take.

    Args:
        pointer: address of the first element.
        shape: extents, or the one extent.
        dtype: anything that NumPy or ml_dtypes has a dtype for, of whole bytes.
        device: "cpu", "cuda", "cuda:1", or a `jax.Device`. All devices of the CPU have the same memory.
        strides: in bytes, one for each extent; None: dense and row-major.
        stream: on CUDA the stream on which the content is written: a handle (0 and 1: the legacy
            default stream, 2: that of the thread), or a stream object of CuPy, torch, Numba, Warp or
            cuda.core. None: the content is there.
        readonly: whether nobody may write to it.
        owner: kept alive as long as anybody uses the memory.

    Returns:
        A view, with DLPack, the array interfaces and the buffer protocol.

    Raises:
        TypeError: JAX has no arrays of that dtype; `pointer` is no number.
        ValueError: the shape, the strides or the address are impossible, or the driver says that the
            address is not on that device.
        BufferError: the elements are smaller than a byte.
    """
    platform, ordinal = _platform_and_ordinal(device)
    try:
        pointer = operator.index(pointer)
    except TypeError:
        raise TypeError(
            f"buffer: pointer is {pointer!r}; expected the address of the first element, a number"
        ) from None
    return _core.view_of_memory(
        pointer,
        _extents("buffer", shape),
        np.dtype(dtype),
        platform,
        ordinal,
        None if strides is None else tuple(strides),
        None if stream is None else stream_handle(stream),
        readonly,
        owner,
    )


def empty(shape: int | Sequence[int], dtype: Any) -> np.ndarray[Any, Any]:
    """A NumPy array of host memory that JAX takes over without a copy: aligned to 64 bytes.

    Its content is not set. About three quarters of the arrays that NumPy makes are not aligned so.

    Raises:
        TypeError: `from_external` takes over no arrays of that dtype.
        ValueError: a length is negative.
    """
    extents = _extents("empty", shape)
    if any(n < 0 for n in extents):
        raise ValueError(f"empty: the shape {extents} has a negative length")
    dtype = np.dtype(dtype)
    try:
        _core.view_of_memory(0, (0,), dtype, "cpu", 0, None, None, False, None)
    except (TypeError, BufferError) as error:
        raise TypeError(f"empty: from_external takes no arrays of dtype {dtype}") from error
    nbytes = math.prod(extents) * dtype.itemsize
    memory = np.empty(nbytes + cpu_alignment, np.uint8)
    start = -memory.ctypes.data % cpu_alignment
    return memory[start : start + nbytes].view(dtype).reshape(extents)


def _extents(what: str, shape: Any) -> tuple[int, ...]:
    """A shape, or the length of one axis."""
    try:
        return (operator.index(shape),)
    except TypeError:
        pass  # NumPy's arrays have the method, too
    try:
        return tuple(map(operator.index, shape))
    except TypeError:
        raise TypeError(f"{what}: shape is {shape!r}; expected lengths") from None


def pointer(a: Any) -> int:
    """The address of the first element of an array, of JAX or of anybody else.

    Of an array that XLA still computes, too: nothing is waited for. It holds as long as the array.

    Raises:
        BufferError: the array lies on several devices (ask for that of `a.addressable_shards[i].data`), is
            masked, or has elements smaller than a byte.
        TypeError: `a` is no array, of a dtype that JAX does not have, or being traced.
        RuntimeError: the array was deleted or donated.
    """
    return _address(a, "pointer")


def shares_memory(a: Any, b: Any) -> bool:
    """Whether two arrays, of JAX or of anybody else, have an element in common.

    Raises:
        TypeError, BufferError, RuntimeError: as `pointer`.
    """
    return bool(np.shares_memory(_shadow(a), _shadow(b)))


# ---- of any array --------------------------------------------------------------------------------


def of(x: Any, stream_of: Callable[[int], int] | None = None) -> tuple[_core.View, int | None]:
    """A view of an array of any library, and the stream of JAX's that was made to wait for it, if any.

    Args:
        x: what offers DLPack, an array interface or the buffer protocol; a capsule is consumed.
        stream_of: from a CUDA ordinal to a stream of JAX's, for producers that put a stream in order
            themselves. None: nothing is put in order, and only the address counts.

    Raises:
        TypeError: `x` is no array, or of a dtype that JAX does not have.
        BufferError: what the array is made of cannot be taken over, with the reason.
    """
    kind = type(x)
    if kind is _core.View:
        return x, None
    if kind is np.ndarray:
        return _core.view_of_interface(x.__array_interface__, x, x.dtype, False), None
    if (adapter := _adapters.of_array(x)) is not None:
        if stream_of is not None:
            _compat.local_platforms()  # JAX begins: memory is known for pinned only with CUDA
        return adapter.view_of(x), None
    if kind is capsule_type:
        return _of_capsule(x, None, stream_of is not None), None
    if isinstance(x, np.ma.MaskedArray):
        raise BufferError(
            "a masked array: fill it in first, or pass x.data and x.mask as two arrays"
        )
    if isinstance(x, np.ndarray) and not _is_on_the_device_too(x):
        return _core.view_of_interface(x.__array_interface__, x, x.dtype, False), None
    return _of_protocol(x, stream_of)


def _is_on_the_device_too(x: Any) -> bool:
    """Whether it is a subclass of NumPy's for mapped or managed memory, as Numba's are."""
    return hasattr(x, "__cuda_array_interface__") and "cuda" in _compat.local_platforms()


def _of_protocol(x: Any, stream_of: Callable[[int], int] | None) -> tuple[_core.View, int | None]:
    if isinstance(x, jax.core.Tracer):
        raise TypeError(
            f"{type_name(x)} has no memory: it is being traced; inside jit pass arrays to external "
            f"functions with jaxbridge.call"
        )
    refused: Exception | None = None
    if hasattr(x, "__dlpack__") and not isinstance(x, np.ndarray):
        try:
            return _of_dlpack(x, stream_of)
        except (BufferError, AttributeError) as error:
            # Not all that has a DLPack method can do it for every array; another protocol may.
            refused = error
    # An attribute that raises anything else is the array's own matter.
    if (fields := getattr(x, "__cuda_array_interface__", None)) is not None:
        if not isinstance(fields, dict):
            raise TypeError(
                f"{type_name(x)}.__cuda_array_interface__ is a {type_name(fields)}; expected a dict"
            )
        return _core.view_of_interface(fields, x, None, True), None
    if hasattr(x, "__array_interface__") or hasattr(x, "__buffer__"):
        host_fields = getattr(x, "__array_interface__", None)
        if (
            isinstance(host_fields, dict) and host_fields.get("mask") is not None
        ):  # NumPy ignores it
            raise BufferError("array interface: masked arrays are not taken; fill them in first")
        try:
            array = np.asarray(x if hasattr(x, "__array_interface__") else memoryview(x))
        except ValueError as error:  # of elements that are no numbers: ctypes pointers
            raise TypeError(
                f"{type_name(x)}: NumPy makes no array of its memory: {error}"
            ) from None
        return _core.view_of_interface(array.__array_interface__, array, array.dtype, False), None
    if refused is not None:
        raise refused
    if _compat.is_ref(x):
        way = "take its value, ref[...]"
    elif hasattr(x, "tocoo"):  # SciPy's, CuPy's
        way = "a sparse matrix has several: give these, such as x.data, x.indices and x.indptr"
    elif isinstance(x, str):
        way = "a string has none"
    else:
        way = "numpy.asarray(x) makes an array of a list, a number or a table of pandas"
    raise TypeError(
        f"expected an array with DLPack, an array interface or the buffer protocol, got {type_name(x)}; "
        f"{way}"
    )


def _of_dlpack(x: Any, stream_of: Callable[[int], int] | None) -> tuple[_core.View, int | None]:
    if not hasattr(x, "__dlpack_device__"):
        return _of_capsule(_capsule(x, None), x, stream_of is not None), None
    kind, ordinal = _dlpack_device(x)
    stream: int | None = None
    if kind in _cuda_kinds:
        stream = _no_order if stream_of is None else stream_of(ordinal)
    capsule = _capsule(x, stream)
    ready = None if stream == _no_order else stream
    v = _core.view_of_capsule(capsule, ready, None, None)
    if kind == _pinned_kind and v.memory == "host":  # torch's capsule does not say it
        v = _core.view_of_memory(
            v.pointer, v.shape, v.dtype, "pinned", 0, v.strides, None, v.readonly, v
        )
    return v, ready


def _dlpack_device(x: Any) -> tuple[int, int]:
    device = x.__dlpack_device__()
    try:
        kind, ordinal = device
        return int(kind), int(ordinal)
    except (TypeError, ValueError, OverflowError):
        raise TypeError(
            f"{type_name(x)}.__dlpack_device__() is {device!r}; expected (device type, device id)"
        ) from None


def _capsule(x: Any, stream: int | None) -> Any:
    order = {} if stream is None else {"stream": stream}
    try:
        return x.__dlpack__(**order, max_version=_dlpack_version)
    except TypeError:  # from before DLPack 1.0
        return x.__dlpack__(**order)


def _of_capsule(capsule: Any, owner: object, put_in_order: bool) -> _core.View:
    view = _core.view_of_capsule(capsule, None, None, owner)
    if put_in_order and view.platform == "cuda":
        # It does not say on which stream its content is written: all of them are waited for.
        _core.synchronize_device(view.ordinal)
    return view


def checked_copy(copy: Any) -> bool | None:
    """Raises TypeError where `copy=` is none."""
    if copy is None or isinstance(copy, (bool, np.bool_)):
        return None if copy is None else bool(copy)
    raise TypeError(f"copy={copy!r}; expected None, True or False")


def stream_handle(stream: Any) -> int:
    """The CUstream of a handle or of a stream object of any library.

    Raises:
        TypeError: it is neither.
    """
    if isinstance(stream, (int, np.integer)):
        stream = int(stream)
        # 1 is the driver's other handle of the legacy default stream.
        return 0 if stream == 1 else stream
    if hasattr(stream, "__cuda_stream__"):
        return stream_handle(int(stream.__cuda_stream__()[1]))
    for name in ("cuda_stream", "ptr"):
        if isinstance(handle := getattr(stream, name, None), int):
            return stream_handle(handle)
    if hasattr(stream, "handle"):  # Numba's: a ctypes pointer, or an integer
        handle = stream.handle
        return stream_handle(int(getattr(handle, "value", handle) or 0))
    raise TypeError(f"stream: expected a handle or a stream object, got {type_name(stream)}")


def host_copy(v: _core.View) -> _core.View:
    """A dense copy of memory that the host reaches, in memory that JAX takes over as it is."""
    dense = empty(v.shape, v.dtype)
    np.copyto(dense, _core.view_as_array(v))
    return of(dense)[0]


def copy_of(a: jax.Array, device: Any = None) -> jax.Array:
    """A row-major copy of an array of JAX, where it is or at `device`.

    Where it is: whatever device or mesh is the default.
    """
    with jax.ensure_compile_time_eval():  # also while something is traced
        if not _is_row_major(a):
            # Before JAX 0.11 `device_put` gets these wrong.
            a = jax.jit(jnp.copy, out_shardings=a.sharding)(a)
            return a if device is None else jax.device_put(a, device)
        if device is not None and len(a.sharding.device_set) > 1:
            a = jax.device_put(a, device)  # a replica that is there is no copy
        where = a.sharding if device is None and a.committed else device
        return jax.device_put(a, where, may_alias=False)


def _is_row_major(a: jax.Array) -> bool:
    if not hasattr(a, "format"):  # keys
        return True
    order = getattr(a.format.layout, "major_to_minor", None)
    return order is None or tuple(order) == tuple(range(a.ndim))


# ---- addresses -----------------------------------------------------------------------------------


def _address(a: Any, what: str) -> int:
    if isinstance(a := _array_of(a), jax.Array):
        check_one_device(a, what)
        return _pointer(a, what)
    return _of_lasting(a, what).pointer


def _pointer(a: jax.Array, what: str) -> int:
    check_not_deleted(a, what)
    return a.unsafe_buffer_pointer()


def check_not_deleted(a: jax.Array, what: str) -> None:
    if a.is_deleted():
        raise RuntimeError(f"{what}: the array was deleted or donated, and has no memory any more")


def _of_lasting(a: Any, what: str) -> _core.View:
    if type(a) is capsule_type:
        raise TypeError(
            f"{what}: a bare capsule is used up by who looks into it, and its owner goes; give the array"
        )
    return of(a)[0]


def _array_of(a: Any) -> Any:
    return _compat.ref_array(a) if _compat.is_concrete_ref(a) else a


def is_plain(dtype: Any) -> bool:
    """Whether arrays of a dtype of JAX's have an address for each element."""
    return isinstance(dtype, np.dtype) and dtype not in _packed


def check_one_device(a: jax.Array, what: str) -> None:
    """Whether an array of JAX has one memory.

    Raises:
        TypeError: it is being traced, or of a type that has no plain memory.
        BufferError: it lies on several devices, or its elements are packed.
        RuntimeError: it lay on several devices, and was deleted.
    """
    if isinstance(a, jax.core.Tracer):
        raise TypeError(
            f"{what}: {type_name(a)} has no memory, since it is being traced; inside jit pass arrays to "
            f"external functions with jaxbridge.call"
        )
    if not isinstance(a.dtype, np.dtype):
        raise TypeError(
            f"{what}: an array of keys has no plain memory; use jax.random.key_data(key)"
        )
    if a.dtype in _packed:
        raise BufferError(
            f"{what}: elements of type {a.dtype.name} are packed, and libraries do not agree on how; "
            f'convert the array first, with a.astype("{"int8" if "int" in a.dtype.name else "float32"}")'
        )
    if (count := len(a.sharding.device_set)) > 1:
        check_not_deleted(a, what)
        one = "one replica" if a.is_fully_replicated else "one shard"
        raise BufferError(
            f"{what}: the array lies on {count} devices, and has no one address; take each part of it, "
            f"s.data for s in a.addressable_shards, or {one}, a.addressable_shards[0].data"
        )


class _Shadow:
    """An array interface over an address, for comparisons of addresses: nothing is read there."""

    def __init__(self, address: int, shape: Any, strides: Any, itemsize: int) -> None:
        self.__array_interface__ = {
            "data": (address, True),
            "shape": shape,
            "strides": strides,
            "typestr": f"|V{itemsize}",
            "version": 3,
        }


def _shadow(a: Any) -> np.ndarray[Any, Any]:
    if isinstance(a := _array_of(a), jax.Array):
        check_one_device(a, "shares_memory")
        # Whatever the order of its axes, it is dense.
        shadow = _Shadow(_pointer(a, "shares_memory"), (a.nbytes,), None, 1)
    else:
        v = _of_lasting(a, "shares_memory")
        shadow = _Shadow(v.pointer, v.shape, v.strides, v.dtype.itemsize)
    return np.asarray(shadow)


def _platform_and_ordinal(device: Any) -> tuple[str, int]:
    if isinstance(device, jax.Device):
        if device.platform == "cpu":
            return "cpu", 0
        return "cuda", int(device.local_hardware_id or 0)
    platform, sep, ordinal = str(device).partition(":")
    if platform == "cuda" and (not sep or (ordinal.isdecimal() and len(ordinal) < 5)):
        return platform, int(ordinal or 0)
    if str(device) in ("cpu", "cpu:0"):
        return "cpu", 0
    raise ValueError(f'device={device!r}: expected "cpu", "cuda", "cuda:1" or a jax.Device')


def of_each(what: str, function: Callable[[Any], Any], tree: Any) -> Any:
    """`jax.tree.map`, with a note on exceptions that says where in the tree."""

    def named(path: Any, leaf: Any) -> Any:
        try:
            return function(leaf)
        except (TypeError, ValueError, BufferError, RuntimeError) as error:
            if path:
                error.add_note(f"in {what}, at {jax.tree_util.keystr(path)}")
            raise

    return jax.tree_util.tree_map_with_path(named, tree)


def type_name(x: Any) -> str:
    return f"{type(x).__module__}.{type(x).__qualname__}"

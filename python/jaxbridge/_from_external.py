# SPDX-License-Identifier: Apache-2.0
"""Arrays in, without a copy where there need be none: `from_external`, `release`."""

import functools
import threading
import time
import warnings
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from . import _adapters, _compat, _core, _views
from ._context import current
from ._function import call

# What XLA assumes of the address of an operand.
_alignments = {"cpu": _views.cpu_alignment, "cuda": 16}
_dlpack_kinds = {"host": 1, "device": 2, "pinned": 3, "managed": 2}
_wide = frozenset(np.dtype(name) for name in ("int64", "uint64", "float64", "complex128"))
# How many seconds release() waits for an owner after all programs are done.
_patience = 5.0
# What is no tree, known without a look.
_leaves = frozenset([_core.View, np.ndarray, _views.capsule_type])


def from_external(x: Any, *, copy: bool | None = None, device: Any = None) -> Any:
    """JAX arrays in the memory of arrays that others made.

    Args:
        x: a pytree of arrays: what offers DLPack or the CUDA array interface, NumPy arrays and what
            NumPy takes without a copy, bare DLPack capsules, what `buffer` makes. Any shape and strides;
            bool, integers, floats from float8 to float64, bfloat16, complex numbers.
        copy: None copies only where something stands in the way of sharing the memory, False is then an
            error, True copies always.
        device: a `jax.Device` or `Sharding` of one device to put the arrays on; None: where they are.

    Returns:
        The same tree of `jax.Array`, each with the shape and the dtype of its source. One that shares
        memory sees what the owner writes later. On CUDA it is ordered after what the producer has
        enqueued, and the host does not wait. The owner is kept until the device has finished JAX's last
        use of the memory.

    Raises:
        BufferError: with `copy=False`, why the memory cannot be shared (strides, alignment, read-only
            memory, another device); else an element type, a device or an array that JAX cannot have.
        TypeError: 64-bit data while JAX's 64-bit types are off; no array.
        ValueError: an impossible shape, stride or address.
        RuntimeError: JAX has no device for the memory.
    """
    if type(x) in _leaves or hasattr(x, "__dlpack__"):
        return _from_external(x, copy, device)
    return jax.tree_util.tree_map_with_path(lambda path, leaf: _named(path, leaf, copy, device), x)


def _named(path: Any, leaf: Any, copy: bool | None, device: Any) -> Any:
    try:
        return _from_external(leaf, copy, device)
    except (TypeError, ValueError, BufferError, RuntimeError) as error:
        error.add_note(f"in from_external, at {jax.tree_util.keystr(path)}")
        raise


def _from_external(x: Any, copy: bool | None, device: Any) -> jax.Array:
    copy = _views.checked_copy(copy)
    wanted = None if device is None else _only(device)
    if isinstance(x, jax.Array):
        return _own(x, copy, device)
    v, stream = _views.of(x, _import_stream)
    if type(x) is _views.capsule_type:
        try:
            return _from_external(v, copy, device)
        except (TypeError, ValueError, BufferError) as error:
            error.add_note("The capsule is used up: ask its producer for another one.")
            raise
    _check_width(v)
    here = _device_of(v, wanted)
    moves = wanted is not None and wanted != here
    if isinstance(device, Sharding) and not moves:
        kind = "pinned_host" if v.memory == "pinned" and here.platform != "cpu" else None
        moves = not _is_at(SingleDeviceSharding(here, memory_kind=kind), device, len(v.shape))
    reason = _obstacle(v) if copy is None or copy is False else None
    if copy is False and (moves or reason):
        raise BufferError(
            f"from_external: {_described(v)} cannot be shared, {reason or f'it is on {here}'}; allow a "
            f"copy with copy=None"
        )
    bring = functools.partial(_import_copy, x) if copy or reason else _import
    array = bring(v, here, stream)
    if not moves:
        if device is None and here.platform == "cpu":
            _warn_of_placement()
        return array
    with jax.ensure_compile_time_eval():  # also while something is traced
        moved = jax.device_put(array, device)
    # The copy reads memory that others may write as soon as this returns.
    return moved if copy or reason else jax.block_until_ready(moved)


def _own(x: jax.Array, copy: bool | None, device: Any) -> jax.Array:
    if isinstance(x, jax.core.Tracer):
        return jnp.array(x, copy=True) if copy else x
    is_there = device is None or (
        _is_at(x.sharding, device, x.ndim)
        if isinstance(device, Sharding)
        else x.sharding.device_set == {device}
    )
    if not is_there and copy is False:
        raise BufferError(f"from_external: the array is at {x.sharding}; allow copy=None")
    with jax.ensure_compile_time_eval():  # also while something is traced
        if not is_there:
            return jax.device_put(x, device)
        return jnp.array(x, copy=True) if copy else x


def _is_at(sharding: Sharding, wanted: Sharding, ndim: int) -> bool:
    kinds = (sharding.memory_kind, wanted.memory_kind)
    return sharding.is_equivalent_to(wanted, ndim) and (kinds[1] is None or kinds[0] == kinds[1])


def _only(device: Any) -> jax.Device:
    """The one device that `device=` says."""
    if not isinstance(device, (jax.Device, Sharding)):
        raise TypeError(f"device={device!r}; expected a jax.Device or a Sharding of one device")
    devices = device.device_set if isinstance(device, Sharding) else {device}
    if len(devices) != 1:
        raise ValueError(
            f"device={device!r} has {len(devices)} devices, and memory is on one; import first, then "
            f"jax.device_put(array, sharding)"
        )
    (one,) = devices
    return one


def _check_width(v: _core.View) -> None:
    if v.dtype in _wide and jax.dtypes.canonicalize_dtype(v.dtype) != v.dtype:
        narrow = jax.dtypes.canonicalize_dtype(v.dtype)
        raise TypeError(
            f"from_external: {_described(v)}, and JAX's 64-bit types are off: set "
            f'jax.config.update("jax_enable_x64", True), or convert the array to {narrow} first'
        )


def _obstacle(v: _core.View) -> str | None:
    """What stands in the way of sharing the memory; None: nothing."""
    if v.nbytes == 0:
        return None
    if v.layout not in ("compact", "transposed"):
        return f"its strides {v.strides} are not those of a dense array ({v.layout})"
    alignment = _alignments[v.platform]
    if v.pointer % alignment:
        return f"its address {v.pointer:#x} is no multiple of {alignment}, which XLA assumes"
    if v.readonly and v.platform == "cuda":
        return "it is read-only, and XLA writes into memory that is donated to it"
    return None


def _described(v: _core.View) -> str:
    shape = ",".join(map(str, v.shape))
    return f"{v.dtype.name}[{shape}] in {v.memory} memory"


def _device_of(v: _core.View, wanted: Any) -> jax.Device:
    """The device of JAX's on which the memory is."""
    if v.memory == "host" or (v.memory == "pinned" and "cuda" not in _compat.local_platforms()):
        # All devices of the CPU have the same memory.
        is_cpu = wanted is not None and wanted.platform == "cpu"
        return wanted if is_cpu else _cpu_device()
    if v.memory == "pinned":
        if not _compat.imports_pinned_memory:
            raise BufferError(
                f"JAX {jax.__version__} takes no pinned memory; use a later JAX, or numpy.asarray(x)"
            )
        return _cuda_device(0)
    return _cuda_device(v.ordinal)


@functools.cache
def _cpu_device() -> jax.Device:
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError as error:
        raise RuntimeError(
            f"the memory is on the host, and this JAX has no CPU backend ({error}); set "
            f"JAX_PLATFORMS=cuda,cpu, or copy it with jax.device_put(numpy.asarray(x))"
        ) from None


@functools.cache
def _cuda_device(ordinal: int) -> jax.Device:
    try:
        return _compat.cuda_device(ordinal)
    except RuntimeError as error:
        raise RuntimeError(
            f"the memory is on CUDA device {ordinal}, which this JAX does not have ({error}); install "
            f"JAX for CUDA, or copy the array to the host first"
        ) from None


def _import_stream(ordinal: int) -> int:
    return _compat.import_stream(_cuda_device(ordinal))


# ---- the two ways in -----------------------------------------------------------------------------


def _import(v: _core.View, device: Any, stream: int | None) -> jax.Array:
    # The device reaches pinned memory too.
    used_on = None if device.platform == "cpu" else _compute_stream(device)
    if v.platform == "cuda" and stream is None:
        stream = _compat.import_stream(device)
        _wait_for_producer(v, stream)
    ticket = _Import(v)
    capsule = _core.hand_over(v, used_on, ticket)
    kind = _dlpack_kinds["host" if device.platform == "cpu" else v.memory]
    array = _compat.import_dlpack(capsule, device, stream, kind)
    if v.nbytes and array.unsafe_buffer_pointer() != v.pointer:
        raise BufferError(
            f"JAX {jax.__version__} copied {_described(v)} at {v.pointer:#x} instead of sharing it; "
            f"please report this"
        )
    _remember(array, ticket)
    return array


class _Import:
    """One use of a view by JAX: it lives until the device is past the last of it."""

    __slots__ = ("__weakref__", "view")

    def __init__(self, view: _core.View) -> None:
        self.view = view


# By the id of an array that from_external has made: the array, and its import.
_imports: dict[int, tuple[Any, Any]] = {}


def _remember(array: jax.Array, ticket: _Import) -> None:
    key = id(array)
    # The entry goes with the array, before another one can have its id.
    _imports[key] = weakref.ref(array, lambda _: _imports.pop(key, None)), weakref.ref(ticket)


def _wait_for_producer(v: _core.View, stream: int) -> None:
    if v.stream is None:
        return
    if _core.is_capturing(v.stream, v.ordinal):
        raise BufferError(
            f"from_external: stream {v.stream:#x}, on which the array is written, is being captured "
            f"into a CUDA graph: its work has not run; import the array after the capture"
        )
    _core.stream_order(v.stream, stream, v.ordinal)


def _import_copy(x: Any, v: _core.View, device: jax.Device, stream: int | None) -> jax.Array:
    """A dense copy in memory that nobody else has."""
    if v.platform == "cpu":
        dense = _views.host_copy(v)
        if device.platform == "cpu":
            return _import(dense, device, None)
        pinned = SingleDeviceSharding(device, memory_kind="pinned_host")
        return jax.device_put(_import(dense, _cpu_device(), None), pinned)
    if (adapter := _adapters.of_array(x)) is not None:
        # On the producer's stream: what it enqueues next may write to the source.
        return _import(adapter.view_of(adapter.copy_of(x)), device, None)
    return _gathered(v, device, stream)


def _gathered(v: _core.View, device: jax.Device, stream: int | None) -> jax.Array:
    """A copy that XLA makes of memory on a device, whatever its strides and its alignment."""
    itemsize = v.dtype.itemsize
    low, high = v.reach
    # From an address that XLA accepts, in the same block of memory: blocks begin at multiples of more.
    start = (v.pointer + low) & -_alignments["cuda"]
    offset = v.pointer - start
    if offset % itemsize or any(s % itemsize for s in v.strides):
        raise BufferError(
            f"from_external: {_described(v)} at {v.pointer:#x} is not aligned to its elements; copy it "
            f"with its own library first"
        )
    count = (v.pointer + high - start) // itemsize
    if count > 2**31 - 1:
        raise BufferError(
            f"from_external: {_described(v)} reaches over {count} elements, more than a copy can index; "
            f"make it dense with its own library first"
        )
    ready = v.stream if v.stream is not None else stream
    flat = _core.view_of_memory(start, (count,), v.dtype, "cuda", v.ordinal, None, ready, False, v)
    with jax.ensure_compile_time_eval():
        array = _gather(
            _import(flat, device, None),
            offset // itemsize,
            v.shape,
            tuple(s // itemsize for s in v.strides),
        )
    if v.stream is None or stream is not None:
        # Nothing says on which stream the producer writes next.
        return jax.block_until_ready(array)
    _core.stream_order(_compute_stream(device), v.stream, v.ordinal)
    return array


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _gather(flat: jax.Array, offset: int, shape: Any, strides: Any) -> jax.Array:
    index = jnp.full(shape, offset, jnp.int32)
    for axis, stride in enumerate(strides):
        index += stride * jax.lax.broadcasted_iota(jnp.int32, shape, axis)
    return flat.at[index].get(mode="promise_in_bounds")


@functools.cache
def _compute_stream(device: jax.Device) -> int:
    """The stream on which XLA computes on a device; a program of ours is asked, once.

    What JAX does with memory of others has been done when this stream is past it: copies on other
    streams of XLA's keep their sources until they are done.
    """
    found: list[int | BaseException] = []

    def look(out: Any) -> None:
        found.append(current().stream)

    def ask() -> None:
        try:
            with jax.default_device(device):
                result = jax.ShapeDtypeStruct((1,), jnp.uint8)
                written = jax.jit(call(look, result, framework="buffer", out=0))()
            # Perhaps another thread dispatches it; that the device gets there is not waited for.
            while not found and not written.is_ready():
                time.sleep(0.0001)
            if not found:
                jax.block_until_ready(written)  # raises what went wrong
        except Exception as error:
            found.append(error)

    # In a thread of its own: this one may be tracing a program.
    asking = threading.Thread(target=ask, name="jaxbridge: XLA's stream")
    asking.start()
    asking.join()
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


_placement_is_known = False


def _warn_of_placement() -> None:
    global _placement_is_known
    if _placement_is_known:
        return
    _placement_is_known = True
    default = jax.config.jax_default_device
    platform = getattr(default, "platform", default) or jax.default_backend()
    if str(platform) != "cpu":
        warnings.warn(
            "from_external leaves memory of the host on the CPU, while JAX computes on "
            f"{platform} by default; give device= to move it (said once)",
            stacklevel=4,
        )


# ---- the end -------------------------------------------------------------------------------------


def release(x: Any) -> None:
    """Ends JAX's use of memory that `from_external` brought in: its owner is let go before this returns.

    Waits for what JAX still does with it. Later uses of `x` raise. A view, of `buffer` or of an array of
    JAX, is only marked: its owner goes with it and the last array that was made of it.

    As with `jax.Array.delete`, no other thread may be inside a program that uses `x` and calls Python:
    on the CPU both would wait for ever.

    Args:
        x: an array that `from_external` made without a copy, or a view.

    Raises:
        ValueError: the memory of `x` is JAX's own, or was released before.
        RuntimeError: something else still uses the memory: another array on it, or a consumer that
            `x` was handed to.
    """
    if isinstance(x, _core.View):
        x.release()
        return
    if not isinstance(x, jax.Array) or isinstance(x, jax.core.Tracer):
        raise TypeError(
            f"release: expected an array that from_external made, got {_views.type_name(x)}"
        )
    array, ticket = _imports.get(id(x), (None, None))
    if array is None or array() is not x or x.nbytes == 0:
        raise ValueError(
            "release: the memory of this array is JAX's own, or it was made of an imported one; give "
            "the very array with which from_external shares the memory of another library"
        )
    if x.is_deleted():
        raise ValueError("release: the array was released, or deleted or donated, before")
    address = _views.pointer(x)
    device: Any
    (device,) = x.sharding.device_set
    jax.block_until_ready(x)
    # Programs that read it keep it until they are done.
    _compat.wait_for_programs(seconds=float("inf"))
    x.delete()
    if device.platform != "cpu":
        _core.synchronize(_compute_stream(device), int(device.local_hardware_id or 0))
    end = time.monotonic() + _patience
    while ticket() is not None:
        _core.release_unused()
        if time.monotonic() > end:
            raise RuntimeError(
                f"release: JAX has let go of the array, but its memory at {address:#x} is still in "
                f"use: by another array of JAX, or by a consumer that it was handed to"
            )
        time.sleep(0.0005)

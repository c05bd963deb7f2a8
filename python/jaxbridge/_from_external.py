# SPDX-License-Identifier: Apache-2.0
"""Arrays in, without a copy where there need be none: `from_external`."""

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from . import _adapters, _core, _imports, _views
from ._current_device import keeps_current_device
from ._sharded import Sharded

# What is no tree, known without a look.
_leaves = frozenset([_core.View, np.ndarray, _views.capsule_type, Sharded])


@keeps_current_device
def from_external(x: Any, *, copy: bool | None = None, device: Any = None) -> Any:
    """JAX arrays in the memory of arrays that others made.

    Args:
        x: a pytree of arrays: what offers DLPack or the CUDA array interface, NumPy arrays and what
            NumPy takes without a copy, bare DLPack capsules, what `buffer` and `sharded` make. Any shape
            and strides; bool, integers, floats from float8 to float64, bfloat16, complex numbers.
        copy: None copies only where something stands in the way of sharing the memory (of NumPy's own
            arrays three quarters are not aligned as XLA assumes), False is then an error, True copies
            always.
        device: a `jax.Device` or `Sharding` of one device to put the arrays on, which is then their
            sharding; None: where they are.

    Returns:
        The same tree of `jax.Array`, each with the shape and the dtype of its source. One that shares
        memory sees what the owner writes later. On CUDA it is ordered after what the producer has
        enqueued, and the host does not wait. The owner is kept until the device has finished JAX's last
        use of the memory.

    Raises:
        BufferError: with `copy=False`, why the memory cannot be shared (strides, alignment, read-only
            memory, another device); else elements of less than a byte, a device or an array that JAX
            cannot have.
        TypeError: 64-bit data while JAX's 64-bit types are off; a dtype of NumPy's that JAX does not have
            (objects, texts, dates, fields), or another byte order; no array.
        ValueError: an impossible shape, stride or address; a sharding for arrays of more axes.
        RuntimeError: JAX has no device for the memory; an array of JAX was deleted or donated.
    """
    if type(x) in _leaves or hasattr(x, "__dlpack__"):
        return _from_external(x, copy, device)
    one = functools.partial(_from_external, copy=copy, device=device)
    return _views.of_each("from_external", one, x)


def _from_external(x: Any, copy: bool | None, device: Any) -> jax.Array:
    copy = _views.checked_copy(copy)
    wanted = None if device is None else _only(device)
    if isinstance(x, jax.Array):
        return _own(x, copy, device)
    if isinstance(x, Sharded):
        return _joined(x, copy, device)
    v, stream = _views.of(x, _imports.stream_of)
    if type(x) is _views.capsule_type:
        try:
            return _from_external(v, copy, device)
        except (TypeError, ValueError, BufferError) as error:
            error.add_note("The capsule is used up: ask its producer for another one.")
            raise
    _imports.check_width(v, "from_external")
    here = _imports.device_of(v, wanted)
    moves = wanted is not None and wanted != here
    if isinstance(device, Sharding) and not moves:
        kind = "pinned_host" if v.memory == "pinned" and here.platform != "cpu" else None
        moves = not _is_at(SingleDeviceSharding(here, memory_kind=kind), device, len(v.shape))
    reason = _imports.obstacle(v, v.platform) if copy is None or copy is False else None
    if copy is False and (moves or reason):
        made = ", or let jaxbridge.empty make the array" if reason and v.memory == "host" else ""
        reason = reason or f"it is on {here} ({v.memory}), and is to be at {device}"
        raise BufferError(
            f"from_external: {_imports.described(v)} cannot be shared, {reason}; "
            f"allow a copy with copy=None{made}"
        )
    # Before JAX 0.11 `device_put` moves only what is row-major.
    copies = copy or reason or (moves and v.layout != "compact")
    bring = functools.partial(_import_copy, x) if copies else _imports.share
    array = bring(v, here, stream)
    if not moves:
        if device is None and here.platform == "cpu":
            _warn_of_placement()
        return _placed(array, device)
    with jax.ensure_compile_time_eval():  # also while something is traced
        moved = jax.device_put(array, device)
    # The copy reads memory that others may write as soon as this returns.
    return moved if copies else jax.block_until_ready(moved)


def _joined(x: Sharded, copy: bool | None, device: Any) -> jax.Array:
    if device is not None:
        raise ValueError("from_external: what sharded() made has its devices; leave device= out")
    parts = [_from_external(part, copy, at) for part, at in x.placed()]
    return _imports.joined(x.join(parts), parts)


def _own(x: jax.Array, copy: bool | None, device: Any) -> jax.Array:
    if isinstance(x, jax.core.Tracer):
        return jnp.array(x, copy=True) if copy else x
    _views.check_not_deleted(x, "from_external")
    is_there = device is None or (
        _is_at(x.sharding, device, x.ndim)
        if isinstance(device, Sharding)
        else x.sharding.device_set == {device}
    )
    if is_there and not copy:
        return _placed(x, device)
    if not is_there and copy is False:
        raise BufferError(
            f"from_external: the array is at {x.sharding}, and moving it is a copy; allow copy=None"
        )
    copied = _views.copy_of(x, device)
    # The copy reads memory that others may write as soon as this returns.
    return jax.block_until_ready(copied) if _imports.is_import(x) else copied


def _placed(array: jax.Array, device: Any) -> jax.Array:
    """An array that is where `device=` says: in the same memory, committed, with that very sharding."""
    if device is None:
        return array
    had = array.sharding
    is_that = not isinstance(device, Sharding) or had == device
    # A sharding that says no kind of memory means any.
    if array.committed and (is_that or had.memory_kind != device.memory_kind):
        return array
    with jax.ensure_compile_time_eval():  # also while something is traced
        placed = jax.device_put(array, device)
    return _imports.joined(placed, [array])


def _is_at(sharding: Sharding, wanted: Sharding, ndim: int) -> bool:
    if (least := len(getattr(wanted, "spec", ()))) > ndim:
        raise ValueError(f"device={wanted!r} is for arrays of rank {least} at least, not {ndim}")
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
    if one.process_index != jax.process_index():
        raise ValueError(f"device={device!r} is of another process, which reaches other memory")
    return one


# ---- copies --------------------------------------------------------------------------------------


def _import_copy(x: Any, v: _core.View, device: jax.Device, stream: int | None) -> jax.Array:
    """A dense copy in memory that nobody else has."""
    if v.platform == "cpu":
        dense = _views.host_copy(v)
        if device.platform == "cpu":
            return _imports.share(dense, device, None)
        pinned = SingleDeviceSharding(device, memory_kind="pinned_host")
        return jax.device_put(_imports.share(dense, _imports.cpu_device(), None), pinned)
    if (adapter := _adapters.of_array(x)) is not None:
        # On the producer's stream: what it enqueues next may write to the source.
        return _imports.share(adapter.view_of(adapter.copy_of(x)), device, None)
    return _gathered(v, device, stream)


def _gathered(v: _core.View, device: jax.Device, stream: int | None) -> jax.Array:
    """A copy that XLA makes of memory on a device, whatever its strides and its alignment."""
    itemsize = v.dtype.itemsize
    low, high = v.reach
    # From an address that XLA accepts, in the same block of memory: blocks begin at multiples of more.
    start = (v.pointer + low) & -_imports.alignments["cuda"]
    offset = v.pointer - start
    if offset % itemsize or any(s % itemsize for s in v.strides):
        raise BufferError(
            f"from_external: {_imports.described(v)} at {v.pointer:#x} is not aligned to its elements; "
            f"copy it with its own library first"
        )
    count = (v.pointer + high - start) // itemsize
    if count > 2**31 - 1:
        raise BufferError(
            f"from_external: {_imports.described(v)} reaches over {count} elements, more than a copy can "
            f"index; make it dense with its own library first"
        )
    ready = v.stream if v.stream is not None else stream
    flat = _core.view_of_memory(start, (count,), v.dtype, "cuda", v.ordinal, None, ready, False, v)
    with jax.ensure_compile_time_eval():
        array = _gather(
            _imports.share(flat, device, None),
            offset // itemsize,
            v.shape,
            tuple(s // itemsize for s in v.strides),
        )
    if v.stream is None or stream is not None:
        # Nothing says on which stream the producer writes next.
        return jax.block_until_ready(array)
    _core.stream_order(_imports.compute_stream(device), v.stream, v.ordinal)
    return array


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _gather(flat: jax.Array, offset: int, shape: Any, strides: Any) -> jax.Array:
    index = jnp.full(shape, offset, jnp.int32)
    for axis, stride in enumerate(strides):
        index += stride * jax.lax.broadcasted_iota(jnp.int32, shape, axis)
    return flat.at[index].get(mode="promise_in_bounds")


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
            stacklevel=5,
        )

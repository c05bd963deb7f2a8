# SPDX-License-Identifier: Apache-2.0
"""Arrays of JAX for others, without a copy where there need be none: `to_external`, `view`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import _adapters, _compat, _core, _views
from ._current_device import keeps_current_device


def view(a: jax.Array) -> _core.View:
    """An array of JAX as an object that any library takes, without a copy.

    It has DLPack (all versions, streams and devices), the CUDA array interface of version 3 on CUDA, and
    NumPy's interface and the buffer protocol on the CPU. It is read-only, where the protocol can say so,
    and keeps the array's memory, also against donation. On CUDA its content is ready on `stream`, and
    the host does not wait; on the CPU the array is waited for.

    Raises:
        TypeError: `a` is no array of JAX, or one that is being traced.
        BufferError: the array lies on several devices, or is of a packed type.
    """
    return _as_view(a, _ordinal_of(a, "view"), None, None)


def _ordinal_of(a: Any, what: str) -> int | None:
    """The CUDA ordinal of the device that has an array; None: the host reaches it.

    Raises:
        TypeError, BufferError: as `view`.
    """
    if type(a) is not _compat.array_type:
        _check(a, what)
    ordinal = _ordinal_where(a.dtype, a.sharding)
    if ordinal is _nowhere:
        _check(a, what)
    return ordinal


_nowhere: Any = object()


# This, and which adapter takes such arrays, takes longer to find than all the rest.
@functools.lru_cache(256)
def _ordinal_where(dtype: Any, sharding: Any) -> Any:
    """Of arrays of this dtype and sharding; `_nowhere`: they have no plain memory in one place."""
    if not _views.is_plain(dtype) or len(sharding.device_set) > 1:
        return _nowhere
    (device,) = sharding.device_set
    if device.platform == "cpu" or sharding.memory_kind in ("pinned_host", "unpinned_host"):
        return None
    return int(device.local_hardware_id or 0)


@functools.lru_cache(256)
def _found_route(framework: str, dtype: Any, sharding: Any) -> tuple[Any, Any]:
    """The adapter that takes arrays of this dtype and sharding, and their `_ordinal_where`.

    No adapter: it has no arrays on their platform.

    Raises:
        ValueError, ImportError, TypeError: as `to_external`.
    """
    adapter = _adapters.get(framework)
    ordinal = _ordinal_where(dtype, sharding)
    if ordinal is _nowhere:
        return adapter, ordinal
    platform = "cpu" if ordinal is None else "cuda"
    if platform not in adapter.platforms:
        return None, ordinal
    adapter.check_dtype(dtype, platform)
    return adapter, ordinal


# What was asked last, and the answer. A sharding's hash is made in Python; the results of one program
# share theirs.
_last_route: tuple[Any, Any, Any, tuple[Any, Any]] = (None, None, None, (None, None))


def _route(framework: Any, dtype: Any, sharding: Any) -> tuple[Any, Any]:
    """As `_found_route`, of what was not asked last."""
    global _last_route
    if not isinstance(framework, str):
        _adapters.get(framework)  # which raises
    found = _found_route(framework, dtype, sharding)
    _last_route = (framework, dtype, sharding, found)
    return found


def _check(a: Any, what: str) -> None:
    if not isinstance(a, jax.Array):
        hint = (
            "; take its value, ref[...]" if _compat.is_ref(a) else "; jax.numpy.asarray makes one"
        )
        raise TypeError(f"{what}: expected a jax.Array, got {_views.type_name(a)}{hint}")
    _views.check_one_device(a, what)


def to_external(a: Any, framework: str, *, copy: bool | None = None, stream: Any = None) -> Any:
    """Arrays of JAX as arrays of another library.

    Args:
        a: a pytree of `jax.Array`, each on one device.
        framework: "numpy", "cupy", "torch", "numba", "warp", or "view" for what `view` makes.
        copy: None copies only from CUDA to "numpy", False is then an error, True copies always; the
            copy may be written to.
        stream: on CUDA, the consumer's stream: a handle, or a stream object of any library. None: the
            framework's current one.

    Returns:
        The same tree of arrays of that framework. What is not a copy must not be written to; NumPy and
        "view" say so, the others have no read-only arrays. On CUDA the stream waits for the arrays, and
        the host does not; their memory is JAX's again when that stream is past what it has when the last
        of the framework's arrays goes.

    Raises:
        ValueError: no framework of that name.
        ImportError: it is not installed.
        TypeError: it has no arrays of that dtype, rank or platform; no array of JAX.
        BufferError: an array lies on several devices, or `copy=False` cannot be.
        RuntimeError: an array was deleted or donated.
    """
    if type(a) is _compat.array_type or isinstance(a, jax.Array):
        return _to_external(a, framework, copy, stream)
    _views.checked_copy(copy)
    if framework != "view":
        _adapters.get(framework)
    one = functools.partial(_to_external, framework=framework, copy=copy, stream=stream)
    return _views.of_each("to_external", one, a)


def _to_external(a: Any, framework: str, copy: bool | None, stream: Any) -> Any:
    if copy is not None:
        copy = _views.checked_copy(copy)
    if framework == "view":
        return _as_view(a, _ordinal_of(a, "to_external"), copy, stream)
    if type(a) is not _compat.array_type:
        _check(a, "to_external")
    last, dtype, sharding = _last_route, a.dtype, a.sharding
    if last[0] is framework and last[1] is dtype and last[2] is sharding:
        adapter, ordinal = last[3]
    else:
        adapter, ordinal = _route(framework, dtype, sharding)
    if ordinal is _nowhere:
        _check(a, "to_external")
    if adapter is None:
        return _elsewhere(a, framework, "cpu" if ordinal is None else "cuda", copy)
    if a.ndim > adapter.max_ndim:
        raise TypeError(
            f'to_external: "{framework}" has arrays of at most {adapter.max_ndim} axes, not {a.ndim}; '
            f"reshape it first"
        )
    if copy:
        a = _copy_of(a)
    consumer = None
    if ordinal is not None:
        consumer = adapter.current_stream if stream is None else _given(stream)
    return _core.export_array(
        _compat.export_dlpack, a, ordinal, consumer, adapter.array_of, not copy
    )


def _as_view(a: Any, ordinal: int | None, copy: bool | None, stream: Any) -> _core.View:
    if copy:
        a = _copy_of(a)
    consumer = None if stream is None else _given(stream)
    view: _core.View = _core.export_array(
        _compat.export_dlpack, a, ordinal, consumer, None, not copy
    )
    return view


@keeps_current_device
def _given(stream: Any) -> tuple[int, Any]:
    """The handle of a consumer's stream, and what keeps it."""
    return _views.stream_handle(stream), stream


@keeps_current_device
def _copy_of(a: jax.Array) -> jax.Array:
    with jax.ensure_compile_time_eval():  # also while something is traced
        return jnp.array(a, copy=True)


@keeps_current_device
def _elsewhere(a: jax.Array, framework: str, platform: str, copy: bool | None) -> Any:
    """Of an array on a platform where the framework has none."""
    if framework != "numpy":
        raise TypeError(
            f'to_external: "{framework}" has no arrays on {platform}, where this one is; move it first '
            f"with jax.device_put, or take another framework"
        )
    if copy is False:
        raise BufferError(
            f"to_external: the array is on {a.devices()}, and NumPy's are on the host; allow a copy with "
            f"copy=None"
        )
    return np.array(a) if copy else np.asarray(a)


def _copied_view(
    v: _core.View, stream: int | None, dl_device: tuple[int, int] | None
) -> _core.View:
    """A view of a copy, for a consumer of DLPack that asks for one."""
    owner = v.owner
    if v.platform == "cpu" and dl_device in (None, v.__dlpack_device__()):
        return _views.host_copy(v)
    # An array that `view` was given, and not one that somebody made the owner of other memory.
    if (
        isinstance(owner, jax.Array)
        and not owner.is_deleted()
        and (owner.shape, owner.dtype) == (v.shape, v.dtype)
        and owner.unsafe_buffer_pointer() == v.pointer
    ):
        return _copied(owner, v.platform, stream, dl_device)
    raise BufferError("this view cannot copy its memory, or move it to another device")


@keeps_current_device
def _copied(
    array: Any, platform: str, stream: int | None, dl_device: tuple[int, int] | None
) -> _core.View:
    options: dict[str, Any] = {"copy": True}
    if dl_device is not None:
        kind = type(array.__dlpack_device__()[0])
        options["dl_device"] = (kind(dl_device[0]), dl_device[1])
    if platform == "cuda":
        options["stream"] = 1 if stream is None else stream
    with jax.ensure_compile_time_eval():  # also while something is traced
        capsule = array.__dlpack__(**options)
    copied: _core.View = _core.export_array(lambda *_: capsule, None, None, None, None, False)
    return copied


_core.set_view_copier(_copied_view)

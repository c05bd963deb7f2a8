# SPDX-License-Identifier: Apache-2.0
"""Arrays of JAX for others, without a copy where there need be none: `to_external`, `view`."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from . import _adapters, _compat, _core, _options, _views
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
    view: _core.View = _route(a, "view", "view").export(a)
    return view


_nowhere: Any = object()
_array_type = _compat.array_type


@functools.lru_cache(256)
def _ordinal_where(dtype: Any, sharding: Any) -> Any:
    """The CUDA ordinal of the device that has such arrays; None: the host reaches them.

    `_nowhere`: they have no plain memory in one place.
    """
    if not _views.is_plain(dtype) or len(sharding.device_set) > 1:
        return _nowhere
    (device,) = sharding.device_set
    if device.platform == "cpu" or sharding.memory_kind in ("pinned_host", "unpinned_host"):
        return None
    return int(device.local_hardware_id or 0)


@dataclasses.dataclass(slots=True)
class _Route:
    """How arrays of one dtype and sharding go to one framework; "view": to whoever asks the view."""

    framework: str
    dtype: Any
    sharding: Any
    ordinal: Any  # see _ordinal_where
    adapter: Any  # None: "view"
    # Of what is neither copied nor has a stream given; None: the framework has no arrays where these are.
    export: Any


def _exporter(
    adapter: Any, sharding: Any, ordinal: int | None, stream: Any, *, readonly: bool = True
) -> Callable[[Any], Any]:
    make, by_parts = (None, False) if adapter is None else _maker(adapter)
    (device,) = sharding.device_set
    export = _core.exporter(
        _compat.export_dlpack,
        data_of=_compat.data_on_one_device,
        ordinal=ordinal,
        stream=stream,
        make=make,
        by_parts=by_parts,
        readonly=readonly,
    )
    if ordinal is not None or device.platform == "cpu":
        return export  # which keeps the device by itself where there is an ordinal

    @keeps_current_device
    def export_from_host(array: Any) -> Any:
        return export(array)

    return export_from_host


def _maker(adapter: Any) -> tuple[Callable[..., Any], bool]:
    """What makes its arrays of views, and whether it also takes their parts."""
    if adapter.max_ndim < 64:
        return _checking_ndim(adapter), False
    if hasattr(adapter, "array_of_parts"):
        return adapter.array_of_parts, True
    return adapter.array_of, False


def _checking_ndim(adapter: Any) -> Callable[[_core.View], Any]:
    """Its `array_of`, where it has fewer axes than a view can have."""

    def array_of(view: _core.View) -> Any:
        if view.ndim > adapter.max_ndim:
            raise TypeError(
                f'to_external: "{adapter.name}" has arrays of at most {adapter.max_ndim} axes, not '
                f"{view.ndim}; reshape it first"
            )
        return adapter.array_of(view)

    return array_of


# What is found here takes longer to find than all the rest.
@functools.lru_cache(256)
def _found_route(framework: str, dtype: Any, sharding: Any) -> _Route:
    ordinal = _ordinal_where(dtype, sharding)
    platform = "cpu" if ordinal is None else "cuda"
    if platform not in _options.frameworks.get(framework, (platform,)):
        # Whether it is installed or not.
        return _Route(framework, dtype, sharding, ordinal, None, None)
    adapter = None if framework == "view" else _adapters.get(framework)
    export = None
    if ordinal is not _nowhere:
        if adapter is None:
            export = _exporter(None, sharding, ordinal, None)
        elif platform in adapter.platforms:
            adapter.check_dtype(dtype, platform)
            stream = getattr(adapter, "stream_object", adapter.current_stream)
            export = _exporter(adapter, sharding, ordinal, stream)
    return _Route(framework, dtype, sharding, ordinal, adapter, export)


# The last one. A sharding's hash is made in Python; the results of one program share theirs.
_last_route = _Route("", None, None, _nowhere, None, None)  # of no array


def _route(a: Any, framework: Any, what: str) -> _Route:
    """How `a` goes to a framework.

    Raises:
        ValueError, ImportError, TypeError, BufferError: as `to_external`.
    """
    global _last_route
    if type(a) is not _array_type:
        _check(a, what)
    last, dtype, sharding = _last_route, a.dtype, a.sharding
    if last.framework is framework and last.dtype is dtype and last.sharding is sharding:
        return last
    if not isinstance(framework, str):
        _adapters.get(framework)  # which raises
    found = _found_route(framework, dtype, sharding)
    if found.ordinal is _nowhere:
        _check(a, what)
    # With these very objects: of an equal sharding it was found before.
    route = _Route(framework, dtype, sharding, found.ordinal, found.adapter, found.export)
    if route.export is not None:
        _last_route = route
    return route


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
        of the framework's arrays goes. Until then the array cannot be donated.

    Raises:
        ValueError: no framework of that name.
        ImportError: it is not installed.
        TypeError: it has no arrays of that dtype, rank or platform; no array of JAX.
        BufferError: an array lies on several devices, or `copy=False` cannot be.
        RuntimeError: an array was deleted or donated.
    """
    if type(a) is _array_type and copy is None and stream is None:
        last = _last_route
        # Of `aval`: the array's own are properties of Python's.
        if (
            last.framework is framework
            and last.dtype is a.aval.dtype
            and last.sharding is a.sharding
        ):
            return last.export(a)
    elif not isinstance(a, jax.Array):
        _views.checked_copy(copy)
        if framework != "view":
            _adapters.get(framework)
        one = functools.partial(_to_external, framework=framework, copy=copy, stream=stream)
        return _views.of_each("to_external", one, a)
    return _to_external(a, framework, copy, stream)


def _to_external(a: Any, framework: str, copy: bool | None, stream: Any) -> Any:
    copy = _views.checked_copy(copy)
    route = _route(a, framework, "to_external")
    if route.export is None:
        return _elsewhere(a, framework, "cpu" if route.ordinal is None else "cuda", copy)
    if copy:
        a = _copy_of(a)
    elif stream is None:
        return route.export(a)
    consumer = None
    if stream is not None:
        consumer = _given(stream)
    elif route.adapter is not None:
        consumer = route.adapter.current_stream
    export = _exporter(route.adapter, route.sharding, route.ordinal, consumer, readonly=not copy)
    return export(a)


@keeps_current_device
def _given(stream: Any) -> tuple[int, Any]:
    """The handle of a consumer's stream, and what keeps it."""
    return _views.stream_handle(stream), stream


_copy_of = keeps_current_device(_views.copy_of)


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
        on_cuda = dl_device[0] != 1  # kDLCPU
        if on_cuda and "cuda" not in _compat.local_platforms():
            raise BufferError(f"dl_device={dl_device}: JAX has no such device in this process")
        kind = type(array.__dlpack_device__()[0])
        options["dl_device"] = (kind(dl_device[0]), dl_device[1])
    if platform == "cuda":
        options["stream"] = 1 if stream is None else stream
    with jax.ensure_compile_time_eval():  # also while something is traced
        capsule = array.__dlpack__(**options)
    return _core.view_of_capsule(capsule, None, False, None)


_core.set_view_copier(_copied_view)

# SPDX-License-Identifier: Apache-2.0
"""Memory of others as arrays of JAX, never a copy."""

import functools
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import _compat, _core, _views
from ._context import current
from ._function import call

# What XLA assumes of the address of an operand.
alignments = {"cpu": _views.cpu_alignment, "cuda": 16}
_dlpack_kinds = {"host": 1, "device": 2, "pinned": 3, "managed": 2}
_wide = frozenset(np.dtype(name) for name in ("int64", "uint64", "float64", "complex128"))
# How many seconds `end` waits for an owner before it looks whether a program can still have it.
_patience = 2.5


def check_width(v: _core.View, what: str) -> None:
    """Raises TypeError where JAX would make the elements narrower."""
    if v.dtype in _wide and jax.dtypes.canonicalize_dtype(v.dtype) != v.dtype:
        narrow = jax.dtypes.canonicalize_dtype(v.dtype)
        raise TypeError(
            f"{what}: {described(v)}, and JAX's 64-bit types are off: set "
            f'jax.config.update("jax_enable_x64", True), or convert the array to {narrow} first'
        )


def obstacle(v: _core.View, platform: str) -> str | None:
    """What stands in the way of sharing memory that a platform uses; None: nothing."""
    if v.nbytes == 0:
        return None
    if v.layout not in ("compact", "transposed"):
        return f"its strides {v.strides} are not those of a dense array ({v.layout})"
    alignment = alignments[platform]
    if v.pointer % alignment:
        return f"its address {v.pointer:#x} is no multiple of {alignment}, which XLA assumes"
    if v.readonly and v.platform == "cuda":
        return "it is read-only, and XLA writes into memory that is donated to it"
    return None


def described(v: _core.View) -> str:
    """What messages call a view."""
    shape = ",".join(map(str, v.shape))
    return f"{v.dtype.name}[{shape}] in {v.memory} memory"


def device_of(v: _core.View, wanted: Any) -> jax.Device:
    """The device of JAX's on which the memory is."""
    if v.memory == "host" or (v.memory == "pinned" and "cuda" not in _compat.local_platforms()):
        # All devices of the CPU have the same memory.
        is_cpu = wanted is not None and wanted.platform == "cpu"
        return wanted if is_cpu else cpu_device()
    if v.memory == "pinned":
        if not _compat.imports_pinned_memory:
            raise BufferError(
                f"JAX {jax.__version__} takes no pinned memory; use a later JAX, or numpy.asarray(x)"
            )
        return cuda_device(0)
    return cuda_device(v.ordinal)


@functools.cache
def cpu_device() -> jax.Device:
    """The first of the CPU's."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError as error:
        raise RuntimeError(
            f"the memory is on the host, and this JAX has no CPU backend ({error}); set "
            f"JAX_PLATFORMS=cuda,cpu, or copy it with jax.device_put(numpy.asarray(x))"
        ) from None


@functools.cache
def cuda_device(ordinal: int) -> jax.Device:
    """The one with that CUDA ordinal."""
    try:
        return _compat.cuda_device(ordinal)
    except RuntimeError as error:
        raise RuntimeError(
            f"the memory is on CUDA device {ordinal}, which this JAX does not have ({error}); install "
            f"JAX for CUDA, or copy the array to the host first"
        ) from None


def stream_of(ordinal: int) -> int:
    """A stream of JAX's on which imported memory becomes ready."""
    return _compat.import_stream(cuda_device(ordinal))


# ---- in ------------------------------------------------------------------------------------------


class Import:
    """One use of a view by JAX: it lives until the device is past the last of it."""

    __slots__ = ("__weakref__", "view")

    def __init__(self, view: _core.View) -> None:
        self.view = view


def share(v: _core.View, device: Any, stream: int | None) -> jax.Array:
    """The array of JAX in the memory of a dense view, which it keeps.

    Args:
        v: a view without obstacle.
        device: where it is.
        stream: one of JAX's on which the content is ready; None: the view's own stream is waited for.
    """
    array, ticket = _share(v, device, stream, "from_external", writable=False)
    _remember(array, [weakref.ref(ticket)])
    return array


def share_writable(
    v: _core.View, device: Any, stream: int | None, what: str
) -> tuple[jax.Array, "weakref.ref[Import]"]:
    """The same of memory that programs update in place where the array is donated.

    `what`: the function that takes it, for messages. A device reaches pinned memory as its own. The
    import lives until the device is past its last use.
    """
    array, ticket = _share(v, device, stream, what, writable=True)
    return array, weakref.ref(ticket)


def _share(
    v: _core.View, device: Any, stream: int | None, what: str, *, writable: bool
) -> tuple[jax.Array, Import]:
    on_cpu = device.platform == "cpu"
    # The device reaches pinned memory too.
    used_on = None if on_cpu else compute_stream(device)
    if v.platform == "cuda" and stream is None:
        stream = _compat.import_stream(device)
        _wait_for_producer(v, stream, what)
    ticket = Import(v)
    memory = "host" if on_cpu else "device" if writable else v.memory
    capsule = _core.hand_over(v, used_on, ticket, memory == "device")
    array = _compat.import_dlpack(
        capsule, device, stream, _dlpack_kinds[memory], writable=writable and on_cpu
    )
    if v.nbytes and array.unsafe_buffer_pointer() != v.pointer:
        raise BufferError(
            f"JAX {jax.__version__} copied {described(v)} at {v.pointer:#x} instead of sharing it; "
            f"please report this"
        )
    return array, ticket


# By the id of an array that `share` has made, or that is joined of such: the array, and its imports.
_shared: dict[int, tuple[Any, list[weakref.ref[Import]]]] = {}


def _remember(array: jax.Array, tickets: "list[weakref.ref[Import]]") -> None:
    key = id(array)
    # The entry goes with the array, before another one can have its id. No Python runs for that, in which
    # an interrupt would be lost.
    _shared[key] = weakref.ref(array, functools.partial(_shared.pop, key)), tickets


def joined(array: jax.Array, parts: Sequence[jax.Array]) -> jax.Array:
    """`array`, of which `parts` are what is on each device."""
    found = [imports_of(part) for part in parts]
    if all(found):
        _remember(array, [ticket for tickets in found for ticket in tickets])
    return array


def imports_of(array: jax.Array) -> "list[weakref.ref[Import]]":
    """Those of the very array that `share` or `joined` has made; of another one none."""
    shared, tickets = _shared.get(id(array), (None, []))
    return tickets if shared is not None and shared() is array else []


def is_import(array: jax.Array) -> bool:
    """Whether an array begins where memory came in, whichever object of JAX's it is."""
    return _views.is_plain(array.dtype) and any(
        _core.live_imports(part.unsafe_buffer_pointer()) for part in _compat.shards_of(array)
    )


def _wait_for_producer(v: _core.View, stream: int, what: str) -> None:
    if v.stream is None:
        return
    check_capture(v.stream, v.ordinal, what)
    _core.stream_order(v.stream, stream, v.ordinal)


def check_capture(stream: int, ordinal: int, what: str) -> None:
    """Raises BufferError where a stream on which others use memory is being captured."""
    if _core.is_capturing(stream, ordinal):
        raise BufferError(
            f"{what}: stream {stream:#x}, on which the array is used, is being captured into a CUDA graph: "
            f"its work has not run, and JAX's cannot be part of it; do this outside of the capture"
        )


@functools.cache
def compute_stream(device: jax.Device) -> int:
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

    # In a thread of its own: this one may be tracing a program, or have a mesh.
    asking = threading.Thread(target=ask, name="jaxbridge: XLA's stream")
    asking.start()
    asking.join()
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


# ---- the end -------------------------------------------------------------------------------------


def end(array: jax.Array, imports: "list[weakref.ref[Import]]") -> None:
    """Deletes an array in memory of others, and returns when their owners are let go.

    Waits for what JAX still does with it.

    Raises:
        RuntimeError: something else still uses the memory: another array on it, or a consumer that the
            array was handed to.
    """
    devices: Any = array.sharding.addressable_devices
    jax.block_until_ready(array)
    array.delete()
    for device in devices:
        if device.platform != "cpu":
            _core.synchronize(compute_stream(device), int(device.local_hardware_id or 0))
    stop, seemed_done = time.monotonic() + _patience, False
    for ticket in imports:
        while (still := ticket()) is not None:
            address = still.view.pointer
            del still
            _core.release_unused()
            if time.monotonic() > stop:
                # Programs that read it keep it until they are done, and nobody can say which these are.
                is_done = not _compat.is_computing()
                if is_done and seemed_done:
                    raise RuntimeError(
                        f"release: JAX has let go of the array, but its memory at {address:#x} is still in "
                        f"use: by another array of JAX, by a program whose results nobody keeps, or by a "
                        f"consumer that it was handed to"
                    )
                stop, seemed_done = time.monotonic() + _patience, is_done
            time.sleep(0.0005)

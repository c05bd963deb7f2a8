# SPDX-License-Identifier: Apache-2.0
"""Refs of memory of others: `ref`, `borrow`."""

from typing import Any

import jax

from . import _adapters, _compat, _core, _imports, _views
from ._current_device import keeps_current_device
from ._memory import Memory


@keeps_current_device
def ref(x: Any) -> jax.Ref:
    """A `jax.Ref` in the memory of an array that another library made.

    Programs of JAX that take it, or close over it, read and update that memory itself, and never a copy
    of it. On CUDA it is ordered after what the owner has enqueued so far; `borrow` puts what the owner
    does later in order with what JAX does.

    Args:
        x: an array that `from_external` takes, or what `sharded` makes of several. It has to be writable,
            row-major, and aligned to 16 bytes on CUDA and to 64 on the CPU, where `empty` makes such.
            Pinned and managed memory is used by the device where it is.

    Returns:
        A `jax.Ref` of its shape and dtype. The owner is kept as long as the Ref lives, and until the
        device has finished JAX's last use of the memory; or until `release`.

    Raises:
        BufferError: the memory cannot be updated in place, with the reason.
        TypeError: no array of another library, but a tree of them, or one of JAX's; 64-bit data while
            JAX's 64-bit types are off.
        RuntimeError: JAX has no device for the memory, or updates a copy of it (on the CPU before 0.8.3);
            inside a function that is being traced.
    """
    if _compat.is_tracing():
        raise RuntimeError(
            "ref: inside a function that JAX traces there is no memory yet; make the Ref outside, and pass "
            "it in or close over it"
        )
    if isinstance(x, jax.Array) or _compat.is_ref(x):
        raise TypeError(
            "ref: expected an array of another library; for one of JAX's own there is jax.new_ref(x)"
        )
    if isinstance(x, (dict, list, tuple)):
        raise TypeError(
            f"ref: expected one array, got {_views.type_name(x)}; for a Ref of each array of a tree there "
            f"is jax.tree.map(jaxbridge.ref, x)"
        )
    memory = Memory(x, "ref")
    made: jax.Ref = _compat.make_external_ref(memory.array, lambda kind: _Storage(kind, memory))
    return made


class _Storage(_compat.ref_storage_type):  # type: ignore[misc]
    """Where a Ref has its array: JAX asks for it at each use."""

    def __init__(self, kind: Any, memory: Memory) -> None:
        self._aval = kind
        self.memory = memory

    @property
    def _buf(self) -> jax.Array:
        return self.memory.usable()


class borrow:  # noqa: N801 (used as a function)
    """The memory of a Ref for its owner, or for anybody else: `with borrow(r, "cupy") as x: ...`.

    What JAX does with the Ref before is seen inside, and what is done inside is seen by JAX after it; on
    CUDA the streams wait for that, and the host does not. Inside JAX does not have the Ref: to use it
    there is an error. Several borrows of one Ref may be open at a time.

    Args:
        ref: what `ref` made.
        framework: "numpy", "cupy", "torch", "numba", "warp", or "view".
        stream: on CUDA the stream on which the memory is used: a handle, or a stream object of any
            library. None: the framework's current one; for "view" the legacy default stream. On the CPU
            it has no use.

    Returns:
        From `with` and `acquire`: a writable array of that framework, or a tuple of one for each part of a
        Ref of `sharded` memory. It must not be used after the end.

    Raises:
        TypeError: not a Ref of memory of others, or one that is being traced; no arrays of its dtype or
            rank, or on its platform, in the framework; no stream.
        ValueError, ImportError: no framework of that name, or not installed.
        BufferError: the stream is being captured into a CUDA graph.
        RuntimeError: the Ref was released, or has other memory by now; this borrow was begun or ended
            before; inside a function that is being traced.
    """

    def __init__(self, ref: Any, framework: str = "view", *, stream: Any = None) -> None:
        if not (_compat.is_concrete_ref(ref) and _compat.is_external_ref(ref)):
            traced = isinstance(ref, jax.core.Tracer)
            raise TypeError(
                f"borrow: expected a Ref that jaxbridge.ref made, got {_views.type_name(ref)}"
                + (
                    "; it has no memory while it is traced, and jaxbridge.call passes it on"
                    if traced
                    else ""
                )
            )
        self._memory: Memory = _compat.ref_storage(ref).memory
        self._framework = framework
        self._adapter: Any = None if framework == "view" else _adapters.get(framework)
        self._given = None if stream is None else _views.stream_handle(stream)
        self._streams: list[int | None] | None = None
        # Stream objects, which have to live as long as their handles are used.
        self._kept: list[Any] = [stream]

    @keeps_current_device
    def acquire(self) -> Any:
        """Begins it, as `with` does."""
        if self._streams is not None:
            raise RuntimeError("borrow: it has begun already; end it first, or make another one")
        if _compat.is_tracing():
            raise RuntimeError(
                "borrow: inside a function that JAX traces the memory is not yet what its program makes of "
                "it; borrow outside, or pass the Ref on with jaxbridge.call"
            )
        memory, adapter = self._memory, self._adapter
        for part in memory.parts:
            if adapter is not None:
                platform = part.view.platform
                if platform not in adapter.platforms:
                    raise TypeError(
                        f'borrow: "{self._framework}" has no arrays on {platform}, where the Ref is'
                    )
                if (ndim := len(part.view.shape)) > adapter.max_ndim:
                    raise TypeError(
                        f'borrow: "{self._framework}" has arrays of at most {adapter.max_ndim} axes, not '
                        f"{ndim}; give its owner's array another shape before jaxbridge.ref"
                    )
                adapter.check_dtype(part.view.dtype, platform)
        streams: list[int | None] = []
        try:
            memory.lend(self, self._framework)
            arrays = []
            for part, shard in zip(memory.parts, memory.shards(), strict=True):
                stream = None
                if part.device.platform == "cpu":
                    jax.block_until_ready(shard)
                else:
                    stream = self._stream_on(part.view.ordinal)
                    _imports.check_capture(stream, part.view.ordinal, "borrow")
                    _compat.stream_waits(stream, shard)
                streams.append(stream)
                v = part.view
                platform = "pinned" if v.memory == "pinned" else v.platform
                lent = _core.view_of_memory(
                    v.pointer, v.shape, v.dtype, platform, v.ordinal, None, stream, False, v
                )
                arrays.append(lent if adapter is None else adapter.array_of(lent))
            self._streams = streams
            return arrays[0] if len(arrays) == 1 else tuple(arrays)
        except BaseException:
            self._streams = None
            memory.take_back(self, [None] * len(memory.parts))
            raise

    def _stream_on(self, ordinal: int) -> int:
        if self._given is not None:
            return self._given
        if self._adapter is None:
            return 0
        handle, keep = self._adapter.current_stream(ordinal)
        self._kept.append(keep)
        return handle

    @keeps_current_device
    def release(self) -> None:
        """Ends it, as the end of `with` does. After an error it goes on, and can be ended again."""
        if self._streams is None:
            raise RuntimeError("borrow: it has not begun, or has ended")
        streams, self._streams = self._streams, None
        try:
            self._memory.take_back(self, streams)
        except BaseException:
            self._streams = streams
            raise
        del self._kept[1:]

    def __enter__(self) -> Any:
        return self.acquire()

    def __exit__(self, *exc: object) -> None:
        self.release()

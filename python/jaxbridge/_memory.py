# SPDX-License-Identifier: Apache-2.0
"""Memory of others that JAX updates in place: what `ref` and `inplace` rest on."""

import dataclasses
import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

from . import _compat, _core, _imports, _views
from ._sharded import Sharded


@dataclasses.dataclass
class Part:
    """What lies on one device."""

    view: _core.View
    pointer: int
    device: Any
    use: "weakref.ref[_imports.Import]"
    # On CUDA a stream of JAX's with which the memory is imported again: JAX has several, and gives
    # another one each time it is asked.
    ready: int | None = None


class Memory:
    """Memory of others, and the array of JAX in it now.

    Args:
        x: an array of another library that is writable, or what `sharded` made.
        what: the function that takes it, for messages.
        keeps: what keeps the memory, where that is less than `x` itself.

    Raises:
        TypeError: no array of others, or of a dtype that JAX would make narrower.
        BufferError: what stands in the way of an update in place.
    """

    def __init__(self, x: Any, what: str, *, keeps: Callable[[Any], Any] | None = None) -> None:
        parts = x.placed() if isinstance(x, Sharded) else [(x, None)]
        self.parts: list[Part] = []
        arrays = []
        for part, at in parts:
            view, stream = _views.of(part, _imports.stream_of)
            device = _checked(view, at, what)
            _self_test(device.platform, what)
            if keeps is not None:
                view = _kept_by(keeps(part), view)
            array, use = _imports.share_writable(view, device, stream, what)
            ready = None if device.platform == "cpu" else _compat.import_stream(device)
            self.parts.append(Part(view, view.pointer, device, use, ready))
            arrays.append(array)
        check_apart([p.view for p in self.parts], what)
        self.array = x.join(arrays) if isinstance(x, Sharded) else _committed(arrays[0])
        self._what = what
        # By the borrow that has it: to which framework.
        self._lent: dict[object, str] = {}
        # Whether what a borrow has put in order is still to be imported again.
        self._is_behind = False
        self._released = False
        self._lock = threading.Lock()

    def __reduce__(self) -> Any:
        raise TypeError(
            f"this {self._what} is in memory of its owner's, and cannot be copied or pickled: take what is "
            f"in it, {self._what}[...]"
        )

    @property
    def extents(self) -> list[tuple[int, int]]:
        """Of each part that is not empty, from where to where it is."""
        return [
            (p.view.pointer, p.view.pointer + p.view.nbytes) for p in self.parts if p.view.nbytes
        ]

    def usable(self) -> jax.Array:
        """The array of JAX in it.

        Raises:
            RuntimeError: others have the memory, or JAX has it no more.
        """
        if self._released:
            raise RuntimeError(f"this {self._what} was released: its memory is its owner's alone")
        if self._lent:
            others = ", ".join(sorted(set(self._lent.values())))
            raise RuntimeError(
                f"this {self._what} is lent to {others}: JAX has it again at the end of the borrow"
            )
        return self.array

    def is_in_place(self, array: jax.Array) -> bool:
        """Whether an array that JAX computed is in this memory."""
        if len(self.parts) == 1:
            return array.unsafe_buffer_pointer() == self.parts[0].pointer or not array.nbytes
        return all(
            shard.unsafe_buffer_pointer() == p.pointer or not shard.nbytes
            for p, shard in zip(self.parts, self._shards_of(array), strict=True)
        )

    def shards(self) -> list[jax.Array]:
        """The array on each device, in the order of the parts."""
        return self._shards_of(self.array)

    def _shards_of(self, array: jax.Array) -> list[jax.Array]:
        if len(self.parts) == 1:
            return [array]
        on = {next(iter(d.devices())): d for d in _compat.shards_of(array)}
        return [on[p.device] for p in self.parts]

    # ---- lent to others ----

    def lend(self, borrow: object, to: str) -> None:
        """Nobody in JAX may use the memory from now on. `to`: whose it is, for messages."""
        with self._lock:
            if not self._lent:
                self.usable()
                self._check_place()
            self._lent[borrow] = to

    def take_back(self, borrow: object, streams: Sequence[int | None]) -> None:
        """The end of lend(), where that has begun; after an error the memory is still lent.

        Args:
            borrow: as it was given there.
            streams: for each part, on which its content is written; None: it is there.
        """
        with self._lock:
            for part, stream in zip(self.parts, streams, strict=True):
                if stream is not None and part.ready is not None:
                    _imports.check_capture(stream, part.view.ordinal, "borrow")
                    _core.stream_order(stream, part.ready, part.view.ordinal)
                    self._is_behind = True
            # The last to end may be one that could not begin, and has no streams.
            if self._is_behind and self._lent.keys() == {borrow}:
                self._import_again()
                self._is_behind = False
            self._lent.pop(borrow, None)

    def _import_again(self) -> None:
        # What is imported anew is ordered after the stream that it is imported with.
        arrays = []
        for part in self.parts:
            array, part.use = _imports.share_writable(part.view, part.device, part.ready, "borrow")
            arrays.append(array)
        if len(self.parts) == 1:
            self.array = _committed(arrays[0])
        else:
            self.array = jax.make_array_from_single_device_arrays(
                self.array.shape, self.array.sharding, arrays
            )

    def _check_place(self) -> None:
        if self.array.is_deleted():
            raise RuntimeError(
                f"this {self._what} has no content: a program that updated it failed, or another thread is "
                f"in one now; take a new {self._what} of the memory"
            )
        if not self.is_in_place(self.array):
            raise RuntimeError(
                f"this {self._what} is in other memory than its owner's: JAX made a copy, as it does where "
                f"something else held the array during an update; take a new {self._what}"
            )

    def release(self) -> None:
        """JAX uses the memory no more, and its owner is let go.

        Raises:
            ValueError: it was released before.
            RuntimeError: it is lent, or something else still uses it.
        """
        with self._lock:
            if self._released:
                raise ValueError(f"release: the {self._what} was released before")
            array = self.usable()
            self._check_place()
            self._released = True
        uses = [part.use for part in self.parts]
        self.parts.clear()
        _imports.end(array, uses)


def _committed(array: jax.Array) -> jax.Array:
    """As the content of a Ref is: it stays on its device."""
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, [array])


def _kept_by(owner: Any, v: _core.View) -> _core.View:
    platform = "pinned" if v.memory == "pinned" else v.platform
    return _core.view_of_memory(
        v.pointer, v.shape, v.dtype, platform, v.ordinal, None, v.stream, False, owner
    )


def _checked(v: _core.View, at: Any, what: str) -> Any:
    """The device of memory that can be updated in place."""
    _imports.check_width(v, what)
    device = _imports.device_of(v, at)
    if at is not None and device != at:
        raise BufferError(
            f"{what}: {_imports.described(v)} is on {device}, and its shard is on {at}"
        )
    reason = _imports.obstacle(v, "cpu" if device.platform == "cpu" else "cuda")
    if reason is None and v.readonly:
        reason = "it is read-only"
    if reason is None and v.layout != "compact":
        reason = f"its strides {v.strides} are not those of a row-major array"
    if reason:
        raise BufferError(
            f"{what}: {_imports.described(v)} cannot be updated in place: {reason}"
            + _advice(v, device)
        )
    return device


def _advice(v: _core.View, device: Any) -> str:
    platform = "cpu" if device.platform == "cpu" else "cuda"
    whole = "give the whole array, and take the part of it in the program"
    if v.layout not in ("compact", "transposed"):
        return f"; {whole}"
    if v.pointer % _imports.alignments[platform]:
        made = (
            "jaxbridge.empty makes memory that is aligned; of a part, " if platform == "cpu" else ""
        )
        return f"; {made}{whole}"
    if not v.readonly:
        return "; give its transpose, and transpose it in the program"
    return "; give its owner's writable array"


def check_apart(views: Sequence[_core.View], what: str) -> None:
    """Raises ValueError where two of the views have memory in common."""
    in_order = sorted((v for v in views if v.nbytes), key=lambda v: v.pointer)
    for a, b in itertools.pairwise(in_order):
        if a.pointer + a.nbytes > b.pointer:
            raise ValueError(
                f"{what}: two of the arrays are in the same memory: {_imports.described(a)} at "
                f"{a.pointer:#x}, and {_imports.described(b)} at {b.pointer:#x}; give each memory once"
            )


@functools.cache
def _copies(platform: str) -> str | None:
    """Whether this JAX copies what it should update in place: why that is thought, or None."""
    if platform == "cpu":
        v, _ = _views.of(_views.empty((16,), "float32"))
        device = _imports.cpu_device()
        held: Any = None
    else:
        held = jnp.zeros(16, jnp.float32, device=jax.local_devices(backend="cuda")[0])
        device = next(iter(held.devices()))
        ordinal = int(device.local_hardware_id or 0)
        v = _core.view_of_memory(
            held.unsafe_buffer_pointer(),
            (16,),
            held.dtype,
            "cuda",
            ordinal,
            None,
            None,
            False,
            held,
        )
        jax.block_until_ready(held)
    array, _ = _imports.share_writable(v, device, None, "ref")
    array = _committed(array)
    ref = _compat.make_external_ref(array, lambda kind: _compat.ref_storage_type(kind, array))
    # In a thread of its own: this one may have a mesh, or forbid to trace or to transfer.
    with ThreadPoolExecutor(1, "jaxbridge: in place") as thread:
        thread.submit(_add_one, ref).result()
    moved = array.unsafe_buffer_pointer() != v.pointer
    return f"JAX {jax.__version__} updates a copy of it" if moved else None


@jax.jit
def _add_one(ref: Any) -> None:
    ref[...] = ref[...] + 1


def _self_test(platform: str, what: str) -> None:
    if (reason := _copies(platform)) is not None:
        advice = "; JAX 0.8.3 and later do not" if platform == "cpu" else "; please report this"
        raise RuntimeError(
            f"{what}: memory of others on {platform} cannot be updated in place: {reason}{advice}"
        )

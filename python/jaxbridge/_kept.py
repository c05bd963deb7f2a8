# SPDX-License-Identifier: Apache-2.0
"""Arrays of others that are imported for `inplace`, and the calls that use them."""

import contextlib
import functools
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import jax

from . import _compat, _core, _imports, _owners, _views
from ._memory import Memory
from ._sharded import Sharded


class Call:
    """A call of an InPlace."""

    has_ended = False


# From where memory begins that a call of any InPlace uses to that call.
in_use: dict[int, Call] = {}
# Held while memory is taken from a call that has ended.
_taking_over = threading.Lock()


def _take_over(start: int, call: Call) -> bool:
    """Whether memory is this call's from now on that another call had."""
    with _taking_over:
        if (other := in_use.get(start)) is not None and other.has_ended:
            in_use[start] = call
    return in_use.setdefault(start, call) is call


class Kept:
    """The import of one array object; where it `lasts`, as long as that lives."""

    def __init__(self, x: Any, memories: "dict[int, Kept]") -> None:
        parts = x.parts if isinstance(x, Sharded) else (x,)
        if any(type(part) is _views.capsule_type for part in parts):
            raise TypeError(
                "inplace: a bare capsule is used up by who looks into it; give the array"
            )
        # What else keeps memory, nobody knows: that is imported for one call, which keeps all of it.
        self.lasts = all(_owners.is_known(part) for part in parts)
        self.memory = Memory(x, "inplace", keeps=_owners.keeper if self.lasts else None)
        self.sharding = self.memory.array.sharding
        self.key = key = id(x)
        self.on_cpu = self.memory.parts[0].device.platform == "cpu"
        self._is_there = _owners.watch(x, self.memory) if self.lasts else lambda _: False
        # Of a call with that many arguments, of which this is the one that is updated.
        self.program: Callable[..., Any] | None = None
        self.count = 0
        # Of each part: the ordinal, XLA's stream, and from the ordinal to the stream of its owner.
        self._places = [
            (
                p.view.ordinal,
                0 if self.on_cpu else _imports.compute_stream(p.device),
                _owners.stream_of(part),
            )
            for p, part in zip(self.memory.parts, parts, strict=True)
        ]
        # Of the call that uses it: for each part, on which the owner does; None: nobody knows.
        self._streams: list[int | None] = []
        self._tell = _owners.teller_of(x)
        self.extents = self.memory.extents
        self._object: Callable[[], Any]
        try:
            # As in _imports._remember.
            self._object = weakref.ref(x, functools.partial(memories.pop, key))
        except TypeError:
            self.lasts = False
            self._object = lambda: x

    def is_of(self, x: Any) -> bool:
        """Whether this is the import of `x`, which has not moved since."""
        # A call that was interrupted more than once may have left what it had donated.
        return self._object() is x and self._is_there(x) and not self.memory.array.is_deleted()

    def is_used_by(self, call: Call) -> bool:
        return all(in_use.get(start) is call for start, _ in self.extents)

    def leave(self, call: Call) -> None:
        """Lets other calls use it, if this one does."""
        for start, _ in self.extents:
            if in_use.get(start) is call:
                del in_use[start]

    def outlast_the_program(self) -> None:
        """Keeps the owner's array until a program that was interrupted is done."""
        for part in self.memory.parts:
            if (use := part.use()) is not None:
                weakref.finalize(use, lambda _: None, self._object()).atexit = False

    def wait_for_the_program(self, is_lost: bool) -> None:
        """Waits for what a program that failed, or was interrupted, still does.

        `is_lost`: whether its results may have come and gone in an interrupt.
        """
        if not self.on_cpu:
            for ordinal, jax_stream, _ in self._places:
                # The error that the caller gets is the one that there was before.
                with contextlib.suppress(RuntimeError):
                    _core.synchronize(jax_stream, ordinal)
        elif is_lost and self.memory.array.is_deleted():
            # Nobody has them, and XLA lets go of the memory when it is done.
            while any(part.use() is not None for part in self.memory.parts):
                _core.release_unused()
                time.sleep(0.0005)

    def begin(self, call: Call, number: int, given: int | None) -> int:
        """What the owner has enqueued comes first. Returns the number of the update in `_core`."""
        for start, _ in self.extents:
            # In one step: two threads may be here.
            if in_use.setdefault(start, call) is not call and not _take_over(start, call):
                raise RuntimeError(
                    "inplace: the array is in use by a call that has not returned: of another thread, or "
                    "of a function that the program calls"
                )
        if self.on_cpu:
            return 0
        self._streams = [of(n) if given is None else given for n, _, of in self._places]
        for k, (ordinal, jax_stream, _) in enumerate(self._places):
            number = _core.begin_update(self._streams[k], jax_stream, ordinal, number)
        return number

    def end(self, array: jax.Array, number: int) -> None:
        """What the owner enqueues from now on comes after the computation of `array`."""
        memory = self.memory
        memory.array = array
        if self.on_cpu:
            # At once: what else is done before the wait can cost a thread's sleep.
            array.block_until_ready()
        elif len(self._places) == 1:
            self._give_back(0, array, number)
        else:
            for k, shard in enumerate(memory.shards()):
                self._give_back(k, shard, number)
        if not memory.is_in_place(array):
            raise RuntimeError(
                "inplace: JAX computed the new values in memory of its own, and the array was not updated; "
                "please report this with the program"
            )
        if self._tell is not None:
            self._tell(self._object())

    def _give_back(self, k: int, shard: jax.Array, number: int) -> None:
        """What the owner of part `k` enqueues from now on comes after the computation of `shard`."""
        ordinal, stream = self._places[k][0], self._streams[k]
        if stream is None:
            shard.block_until_ready()
        elif not _core.end_update(number, stream, ordinal):
            # Raises, too, what went wrong in the program.
            _compat.stream_waits(stream, shard)

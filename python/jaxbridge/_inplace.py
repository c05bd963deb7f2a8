# SPDX-License-Identifier: Apache-2.0
"""Updates of memory of others by donation: `inplace`."""

import contextlib
import functools
import inspect
import operator
import types
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import _compat, _core, _enqueued, _errors, _imports, _owners, _primitive, _views
from ._current_device import keeps_current_device
from ._memory import Memory, check_apart
from ._sharded import Sharded

_either_way = inspect.Parameter.POSITIONAL_OR_KEYWORD


def inplace(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    *,
    has_aux: bool = False,
    static_argnums: int | Sequence[int] | None = None,
    stream: Any = None,
) -> "InPlace":
    """`fun` as a program that updates arrays of other libraries in their own memory.

    A call is compiled once, as by `jax.jit`, and costs what a program costs that gets its arguments
    donated. The same array object is imported once.

    Args:
        fun: a function of JAX. It gets arrays of JAX for the arguments in `argnums`, and returns their
            new values: of one argument its tree, of several a tuple of their trees; with `has_aux`
            `(new values, aux)`.
        argnums: positions of the arguments that are trees of arrays of other libraries, as `ref` takes
            them.
        has_aux: whether `fun` returns something else too.
        static_argnums: positions of arguments that are constants, as in `jax.jit`, also where they are
            given by name.
        stream: on CUDA, where the owner uses the arrays: a handle, or a stream object of any library.
            None: the current stream of the array's library; of libraries that have none that is known
            here, the host waits for the update.

    Returns:
        A function that returns aux, or None; as an attribute of a class, a method. On CUDA what the
        owner's stream has before a call is seen by it, and what it gets after the call sees the update;
        the host does not wait. On the CPU a call returns when the update is done. After an error the
        content of the arrays is undefined. Arrays of NumPy, CuPy, torch, Numba and Warp are imported as
        long as they live, others for one call; `clear()` of the function ends that at once.

    Raises:
        (from a call)
        BufferError: an array cannot be updated in place, with the reason.
        TypeError, ValueError: the new values are not of the shapes and dtypes of the arguments; one
            memory is two arguments, of which another one may be a NumPy array, what `from_external`
            made, or a Ref.
        RuntimeError: JAX has no device for the memory, or updates copies of it; another thread is in a
            call with the same array; inside a function that is being traced.
        BaseException: what an external function in `fun` raised.
    """
    return InPlace(fun, argnums, has_aux, static_argnums, stream)


class InPlace:
    """Made by `inplace`."""

    def __init__(
        self,
        fun: Callable[..., Any],
        argnums: int | Sequence[int],
        has_aux: bool,
        static_argnums: int | Sequence[int] | None,
        stream: Any,
    ) -> None:
        if not callable(fun):
            raise TypeError(f"inplace: expected a function of JAX, got {_views.type_name(fun)}")
        self._fun = fun
        self._is_one, self._argnums = _positions("argnums", argnums)
        self._static = frozenset(
            () if static_argnums is None else _positions("static_argnums", static_argnums)[1]
        )
        self._static_names = _names_of(fun, self._static)
        if not self._argnums or len(set(self._argnums)) < len(self._argnums):
            raise ValueError(f"inplace: argnums={argnums!r} names no argument, or one twice")
        if self._static & set(self._argnums):
            raise ValueError("inplace: an array that is updated cannot be static")
        self._has_aux = has_aux
        self._stream = None if stream is None else _views.stream_handle(stream)
        self._kept_stream = stream
        self._name = getattr(fun, "__name__", "function")
        functools.update_wrapper(self, fun, updated=())
        # One for each number of arguments, which says where the static ones are, and sharding of arrays.
        self._programs: dict[Any, Callable[..., Any]] = {}
        self._memories: dict[int, _Kept] = {}

    def __repr__(self) -> str:
        return f"<jaxbridge.inplace of {self._name}, argnums={self._argnums}>"

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """As an attribute of a class: a method, where `fun` would be one; `self` is argument 0."""
        is_method = isinstance(self._fun, types.FunctionType) and instance is not None
        return types.MethodType(self, instance) if is_method else self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _compat.is_tracing():
            raise RuntimeError(
                f"inplace: {self._name} updates memory, and inside a function that JAX traces there is "
                f"none yet; call it outside, or use jaxbridge.ref"
            )
        count, first = len(args), self._argnums[0]
        if self._is_one and count > first:
            kept = self._memories.get(id(args[first]))
            if kept is not None and kept.is_of(args[first]):
                program = kept.program
                if program is not None and kept.count == count:
                    others = (*args[:first], *args[first + 1 :])
                    return self._run(program, (kept,), None, others, kwargs)
        if count <= max(self._argnums):
            raise TypeError(
                f"inplace: {self._name} got {count} arguments by position, and argnums names "
                f"{max(self._argnums)}; pass what is updated by position"
            )
        given = tuple(args[n] for n in self._argnums)
        leaves, tree = jax.tree.flatten(given[0] if self._is_one else given)
        if not leaves:
            raise TypeError(
                f"inplace: {self._name}: there is no array in argument "
                f"{', '.join(map(str, self._argnums))}, which argnums says is updated"
            )
        all_kept: list[_Kept] = []
        for leaf in leaves:
            try:
                all_kept.append(self._kept(leaf))
            except (TypeError, ValueError, BufferError) as error:
                error.add_note(self._place(given, len(all_kept)))
                raise
        if len({id(leaf) for leaf in leaves}) < len(leaves):
            raise ValueError(
                "inplace: two of the arrays are in the same memory: they are one object"
            )
        check_apart([p.view for kept in all_kept for p in kept.memory.parts], "inplace")
        alone = len(leaves) == 1 and leaves[0] is given[0] and self._is_one
        program = self._program_of(count, None if alone else tree, [k.sharding for k in all_kept])
        if alone:
            all_kept[0].program, all_kept[0].count = program, count
        others = tuple(a for n, a in enumerate(args) if n not in self._argnums)
        return self._run(program, all_kept, None if alone else tree, others, kwargs)

    def _run(
        self, program: Any, all_kept: "Sequence[_Kept]", tree: Any, others: Any, kwargs: Any
    ) -> Any:
        """One call. `tree`: of the arrays; None: it is one, and not in a tree."""
        call = object()
        context = None if all_kept[0].on_cpu else _core.current_context()
        updated: Any = None
        number = 0
        try:
            for kept in all_kept:
                number = kept.begin(call, number, self._stream)
            if others or kwargs:
                self._check_others(all_kept, others, kwargs)
            if _compat.is_debugging():
                program = _debugged(program, self._name)
            if tree is None:
                (kept,) = all_kept
                updated, aux = program(kept.memory.array, *others, **kwargs)
                kept.end(updated, number)
            else:
                taken = jax.tree.unflatten(tree, [kept.memory.array for kept in all_kept])
                updated, aux = program(taken, *others, **kwargs)
                for kept, array in zip(all_kept, jax.tree.leaves(updated), strict=True):
                    kept.end(array, number)
            return aux
        except BaseException as error:
            # An interrupt comes before the end of the update, which goes on in the memory. If that fails
            # too, `error` is still what the caller gets.
            with contextlib.suppress(Exception):
                jax.block_until_ready(updated)
            # What was donated is gone; the next call imports anew.
            for kept in all_kept:
                if kept.is_used_by(call):
                    kept.outlast_the_program()
                    self._forget(kept)
            raised = _errors.original(error) if isinstance(error, _errors.from_xla) else None
            if raised is None:
                raise
        finally:
            for kept in all_kept:
                kept.leave(call)
            if context is not None:
                _core.make_current(context)
        _compat.forget_failed_effects()
        return _errors.raise_again(raised)

    def _place(self, given: tuple[Any, ...], index: int) -> str:
        """Which leaf it is of the arguments in argnums, for messages."""
        path = jax.tree_util.tree_flatten_with_path(given)[0][index][0]
        within = jax.tree_util.keystr(path[1:])
        return f"This is argument {self._argnums[path[0].idx]}{within and ' at '}{within} of {self._name}."

    def _check_others(self, all_kept: "Sequence[_Kept]", others: Any, kwargs: Any) -> None:
        """Raises ValueError where an argument that is not updated is in memory that is."""
        for argument in (*others, *kwargs.values()) if kwargs else others:
            for x in (argument,) if isinstance(argument, _leaves) else jax.tree.leaves(argument):
                for start, end in _extents_of(x):
                    for kept in all_kept:
                        if any(start < last and first < end for first, last in kept.extents):
                            raise ValueError(
                                f"inplace: {self._name} got memory that it updates as another argument "
                                f"too, a {_views.type_name(x)}; give a copy there, jax.numpy.array(x)"
                            )

    def clear(self) -> None:
        """Forgets the arrays that it has imported; the next call imports them again."""
        self._memories.clear()

    # ---- programs ----

    def _program_of(self, count: int, tree: Any, shardings: list[Any]) -> Callable[..., Any]:
        key = (count, shardings[0] if tree is None else (tree, *shardings))
        if (found := self._programs.get(key)) is not None:
            return found
        others = [n for n in range(count) if n not in self._argnums]
        spread = any(len(s.device_set) > 1 for s in shardings)

        def run(taken: Any, *rest: Any, **kwargs: Any) -> Any:
            args: list[Any] = [None] * count
            for n, x in zip(others, rest, strict=True):
                args[n] = x
            for n, x in zip(self._argnums, (taken,) if self._is_one else taken, strict=True):
                args[n] = x
            new, aux = self._split(self._fun(*args, **kwargs))
            updated = _checked(self._name, taken, new)
            if not spread:  # on several devices other threads enqueue it
                updated = _enqueued.enqueued(updated)
            return jax.tree.unflatten(jax.tree.structure(taken), updated), aux

        run.__name__ = self._name
        static = [1 + i for i, n in enumerate(others) if n in self._static]
        # New values lie where the old ones do; the rest is XLA's to say.
        placed: Any = {
            "out_shardings": (
                shardings[0] if tree is None else jax.tree.unflatten(tree, shardings),
                None,
            )
        }
        program = jax.jit(
            run,
            donate_argnums=0,
            # An argument that is left out donates nothing.
            keep_unused=True,
            static_argnums=static or None,
            static_argnames=self._static_names or None,
            **(placed if spread else {}),
        )
        return self._programs.setdefault(key, program)

    def _split(self, out: Any) -> tuple[Any, Any]:
        if not self._has_aux:
            return out, None
        if not (isinstance(out, tuple) and len(out) == 2):
            raise TypeError(
                f"inplace: {self._name} returned {type(out).__name__}; with has_aux=True it returns "
                f"(new values, aux)"
            )
        return out

    # ---- memory ----

    def _kept(self, x: Any) -> "_Kept":
        kept = self._memories.get(id(x))
        if kept is not None and kept.is_of(x):
            return kept
        if isinstance(x, jax.Array) or _compat.is_ref(x):
            raise TypeError(
                f"inplace: {self._name}: expected an array of another library, got {_views.type_name(x)}"
                f"; one of JAX's own is donated by jax.jit(..., donate_argnums=...)"
            )
        kept = keeps_current_device(_Kept)(x, self._memories)
        if kept.lasts:
            self._memories[kept.key] = kept
        return kept

    def _forget(self, kept: "_Kept") -> None:
        if self._memories.get(kept.key) is kept:
            del self._memories[kept.key]


# From where memory begins that a call of any InPlace uses to that call.
_in_use: dict[int, object] = {}


class _Kept:
    """The import of one array object; where it `lasts`, as long as that lives."""

    def __init__(self, x: Any, memories: "dict[int, _Kept]") -> None:
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
            # The entry goes with the array, before another one can have its id.
            self._object = weakref.ref(x, lambda _: memories.pop(key, None))
        except TypeError:
            self.lasts = False
            self._object = lambda: x

    def is_of(self, x: Any) -> bool:
        """Whether this is the import of `x`, which has not moved since."""
        return self._object() is x and self._is_there(x)

    def is_used_by(self, call: object) -> bool:
        return all(_in_use.get(start) is call for start, _ in self.extents)

    def leave(self, call: object) -> None:
        """Lets other calls use it, if this one does."""
        for start, _ in self.extents:
            if _in_use.get(start) is call:
                del _in_use[start]

    def outlast_the_program(self) -> None:
        """Keeps the owner's array until a program that was interrupted is done."""
        if self.memory.array.is_deleted():
            for part in self.memory.parts:
                if (use := part.use()) is not None:
                    weakref.finalize(use, lambda _: None, self._object()).atexit = False

    def begin(self, call: object, number: int, given: int | None) -> int:
        """What the owner has enqueued comes first. Returns the number of the update in `_core`."""
        for start, _ in self.extents:
            # In one step: two threads may be here.
            if _in_use.setdefault(start, call) is not call:
                raise RuntimeError(
                    "inplace: the array is in use by a call that has not returned: of another thread, or "
                    "of a function that the program calls"
                )
        if self.on_cpu:
            return 0
        self._streams = [of(n) if given is None else given for n, _, of in self._places]
        for k, (ordinal, jax_stream, _) in enumerate(self._places):
            if (stream := self._streams[k]) is not None:
                number = _core.begin_update(stream, jax_stream, ordinal, number)
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


def _positions(option: str, given: Any) -> tuple[bool, tuple[int, ...]]:
    """Whether an option names one position and no sequence of them, and which."""
    is_one = hasattr(given, "__index__")
    try:
        found = tuple(map(operator.index, (given,) if is_one else tuple(given)))
    except TypeError:
        raise TypeError(
            f"inplace: {option}={given!r}: expected the position of an argument, or several"
        ) from None
    for n in found:
        if n < 0:
            raise ValueError(f"inplace: {option}={given!r}: count from the first argument, 0")
    return is_one, found


def _names_of(fun: Any, positions: Collection[int]) -> list[str]:
    """By which names the arguments at these positions can be given too."""
    if not positions:
        return []
    try:
        parameters = list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):  # a builtin can be without one
        return []
    return [p.name for n, p in enumerate(parameters) if n in positions and p.kind is _either_way]


# Arguments that are no trees of others, most of them.
_leaves = (float, int, np.ndarray, jax.Array)


def _extents_of(x: Any) -> list[tuple[int, int]]:
    """From where to where an argument of JAX is in memory of others, as far as that is known."""
    if isinstance(x, np.ndarray):
        # JAX on the CPU reads it where it is.
        return [np.lib.array_utils.byte_bounds(x)] if x.size else []
    if isinstance(x, jax.Array):
        uses = [use() for use in _imports.imports_of(x)]
        return [(u.view.pointer, u.view.pointer + u.view.nbytes) for u in uses if u is not None]
    if _compat.is_concrete_ref(x) and _compat.is_external_ref(x):
        return _compat.ref_storage(x).memory.extents
    return []


_numbers = {"nan": "NaN", "inf": "infinity"}


def _debugged(program: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The program where JAX would run it op by op, or run it again when it finds a NaN.

    It donates nothing then, and memory of others would not be updated.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        nans, infs = jax.config.jax_debug_nans, jax.config.jax_debug_infs
        with jax.disable_jit(False), jax.debug_nans(False), jax.debug_infs(False):
            out = program(*args, **kwargs)
            kind = _primitive.invalid_number(jax.tree.leaves(out), nans, infs)
        if kind is not None:
            raise FloatingPointError(
                f"inplace: {_numbers[kind]} is in what {name} returned; the arrays have been updated. Call "
                f"{name} itself with copies of its arguments, and JAX says where it comes from"
            )
        return out

    return run


def _checked(name: str, taken: Any, new: Any) -> list[Any]:
    """The leaves of the new values."""
    structures: Any = (jax.tree.structure(new), jax.tree.structure(taken))
    if structures[0] != structures[1]:
        raise TypeError(
            f"inplace: {name} returned new values of the structure {structures[0]}; those of the arguments "
            f"are {structures[1]}; has_aux=True is for what it returns beside them"
        )
    paths = jax.tree_util.tree_flatten_with_path(taken)[0]
    leaves = [jnp.asarray(x) for x in jax.tree.leaves(new)]
    for (path, old), leaf in zip(paths, leaves, strict=True):
        if (leaf.shape, leaf.dtype) != (old.shape, old.dtype):
            where = jax.tree_util.keystr(path)
            raise TypeError(
                f"inplace: {name} returned {leaf.dtype}{list(leaf.shape)} as the new value of "
                f"{f'{where}, which is' if where else 'an array of'} {old.dtype}{list(old.shape)}"
            )
    return leaves

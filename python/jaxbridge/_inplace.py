# SPDX-License-Identifier: Apache-2.0
"""Updates of memory of others by donation: `inplace`."""

import contextlib
import functools
import inspect
import operator
import traceback
import types
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import _compat, _core, _enqueued, _errors, _imports, _primitive, _views
from ._current_device import keeps_current_device
from ._kept import Call, Kept
from ._memory import check_apart

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
        BufferError: an array cannot be updated in place, with the reason; its stream is being captured
            into a CUDA graph.
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
        self._memories: dict[int, Kept] = {}

    def __repr__(self) -> str:
        return f"<jaxbridge.inplace of {self._name}, argnums={self._argnums}>"

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """As an attribute of a class: a method, where `fun` would be one; `self` is argument 0."""
        is_method = isinstance(self._fun, types.FunctionType) and instance is not None
        return types.MethodType(self, instance) if is_method else self

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
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
        all_kept: list[Kept] = []
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
        self, program: Any, all_kept: Sequence[Kept], tree: Any, others: Any, kwargs: Any
    ) -> Any:
        """One call. `tree`: of the arrays; None: it is one, and not in a tree."""
        call = Call()
        context = None if all_kept[0].on_cpu else _core.current_context()
        updated: Any = None
        number = 0
        is_dispatched = False
        try:
            for kept in all_kept:
                number = kept.begin(call, number, self._stream)
            if others or kwargs:
                self._check_others(all_kept, others, kwargs)
            if _compat.is_debugging():
                program = _debugged(program, self._name)
            is_dispatched = True
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
            # What was donated is gone; the next call imports anew.
            used = [kept for kept in all_kept if is_dispatched and kept.is_used_by(call)]
            for kept in used:
                kept.outlast_the_program()
                self._forget(kept)
            # An interrupt comes before the end of the update, which goes on in the memory. If that fails
            # too, `error` is still what the caller gets.
            with contextlib.suppress(Exception):
                jax.block_until_ready(updated)
            is_lost = updated is None and not isinstance(error, Exception)
            if is_lost:
                # Results that came just then, and are in frames that the interrupt has ended.
                traceback.clear_frames(error.__traceback__)
            for kept in used:
                kept.wait_for_the_program(is_lost)
            raised = _errors.original(error) if isinstance(error, _errors.from_xla) else None
            if raised is None:
                raise
        finally:
            try:
                for kept in all_kept:
                    kept.leave(call)
                if context is not None:
                    _core.make_current(context)
            finally:
                # What it could not leave, because it was interrupted, others may take.
                call.has_ended = True
        _compat.forget_failed_effects()
        return _errors.raise_again(raised)

    def _place(self, given: tuple[Any, ...], index: int) -> str:
        """Which leaf it is of the arguments in argnums, for messages."""
        path = jax.tree_util.tree_flatten_with_path(given)[0][index][0]
        within = jax.tree_util.keystr(path[1:])
        return f"This is argument {self._argnums[path[0].idx]}{within and ' at '}{within} of {self._name}."

    def _check_others(self, all_kept: Sequence[Kept], others: Any, kwargs: Any) -> None:
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

        # Without names that a keyword could have.
        def run(*_given: Any, **kwargs: Any) -> Any:
            taken, *rest = _given
            args: list[Any] = [None] * count
            for n, x in zip(others, rest, strict=True):
                args[n] = x
            for n, x in zip(self._argnums, (taken,) if self._is_one else taken, strict=True):
                args[n] = x
            new, aux = self._split(self._fun(*args, **kwargs))
            updated = _checked(self._name, taken, new)
            if not spread:  # on several devices other threads enqueue it
                updated = _enqueued.enqueued(updated, _computed(aux, [taken, updated]))
            return jax.tree.unflatten(jax.tree.structure(taken), updated), aux

        run.__name__ = run.__qualname__ = self._name
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

    def _kept(self, x: Any) -> Kept:
        kept = self._memories.get(id(x))
        if kept is not None and kept.is_of(x):
            return kept
        if isinstance(x, jax.Array) or _compat.is_ref(x):
            raise TypeError(
                f"inplace: {self._name}: expected an array of another library, got {_views.type_name(x)}"
                f"; one of JAX's own is donated by jax.jit(..., donate_argnums=...)"
            )
        kept = _imported(x, self._memories)
        if kept.lasts:
            self._memories[kept.key] = kept
        return kept

    def _forget(self, kept: Kept) -> None:
        if self._memories.get(kept.key) is kept:
            del self._memories[kept.key]


_imported = keeps_current_device(Kept)


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


def _computed(aux: Any, others: Any) -> list[Any]:
    """What a program computes for `aux` beside `others`, as arrays without keys."""
    known = {id(x) for x in jax.tree.leaves(others)}
    found = [
        x for x in jax.tree.leaves(aux) if isinstance(x, jax.core.Tracer) and id(x) not in known
    ]
    return [
        jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        for x in found
    ]


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

# SPDX-License-Identifier: Apache-2.0
"""`jax.experimental.buffer_callback.buffer_callback` on top of `jaxbridge.call`.

For JAX's own tests of it (README.md beside this file), and an example of how such code moves over.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import buffer_callback as theirs

import jaxbridge

# How often a callback has run through jaxbridge: tests that leave it 0 have tested nothing.
runs = 0


class ExecutionContext:
    """What JAX's class of that name has: the stage and the stream."""

    stage = theirs.ExecutionStage.EXECUTE

    @property
    def stream(self) -> int:
        context = jaxbridge.current()
        if context.platform == "cpu":
            raise jax.errors.JaxRuntimeError("XLA FFI GPU context is not available")
        return context.stream


class Buffer:
    """A jaxbridge buffer with the attributes of JAX's.

    Args:
        buffer: what the function got.
        writeable: False for an argument, also where its memory is that of a result.
    """

    def __init__(self, buffer: Any, writeable: bool) -> None:
        self._buffer = buffer
        self.writeable = writeable

    @property
    def shape(self) -> tuple[int, ...]:
        return self._buffer.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._buffer.dtype

    @property
    def ndim(self) -> int:
        return self._buffer.ndim

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        array = np.asarray(self._buffer)
        if not self.writeable:
            array.flags.writeable = False
        return np.array(array, dtype, copy=copy)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        interface = self._buffer.__cuda_array_interface__
        return {**interface, "data": (interface["data"][0], not self.writeable)}

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self._buffer.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._buffer.__dlpack_device__()


def buffer_callback(
    callback: Callable[..., None],
    result_shape_dtypes: Any,
    *,
    has_side_effect: bool = False,
    vmap_method: str | None = None,
    input_output_aliases: dict[int, int] | None = None,
    command_buffer_compatible: bool = False,
) -> Callable[..., Any]:
    """JAX's signature and convention: `callback(ctx, out, *args, **kwargs) -> None`.

    `command_buffer_compatible` allows XLA to run the callback once and replay what it enqueued;
    here it runs at every call.
    """
    del command_buffer_compatible
    results, out_tree = jax.tree.flatten(result_shape_dtypes)
    results = [jax.ShapeDtypeStruct(r.shape, r.dtype) for r in results]
    aliases = {int(i): int(o) for i, o in (input_output_aliases or {}).items()}
    own = [o for o in range(len(results)) if o not in aliases.values()]

    # One Function for each structure, so that JAX finds what it has compiled.
    @functools.cache
    def function(in_tree: Any) -> jaxbridge.Function[..., Any]:
        for i, o in aliases.items():
            for what, position, count in (
                ("input", i, in_tree.num_leaves),
                ("output", o, len(results)),
            ):
                if position >= count:
                    raise ValueError(
                        f"input_output_aliases contains the mapping '{i}:{o}' with {what} index "
                        f"{position} outside the range [0, {count})."
                    )

        def flat(*buffers: Any, out: Any) -> None:
            global runs
            runs += 1
            # The results that are no argument's memory: one, several or none.
            by_position = dict(zip(own, jax.tree.leaves(out), strict=True))
            by_position |= {o: buffers[i] for i, o in aliases.items()}
            outs = [Buffer(by_position[o], writeable=True) for o in range(len(results))]
            args, kwargs = jax.tree.unflatten(
                in_tree, [Buffer(b, writeable=False) for b in buffers]
            )
            returned = callback(
                ExecutionContext(), jax.tree.unflatten(out_tree, outs), *args, **kwargs
            )
            if returned is not None:
                raise ValueError("buffer_callback callback must not return any values.")

        functools.update_wrapper(flat, callback)
        del flat.__wrapped__
        return jaxbridge.call(
            flat,
            tuple(results),
            framework="buffer",
            out="out",
            inout=aliases,
            has_side_effect=has_side_effect,
            vmap_method=vmap_method,
        )

    def call(*args: Any, **kwargs: Any) -> Any:
        leaves, in_tree = jax.tree.flatten((args, kwargs))
        # Every leaf is an array there; to jaxbridge a Python number is static.
        outs = function(in_tree)(*map(jnp.asarray, leaves))
        return jax.tree.unflatten(out_tree, outs)

    return call


def install() -> None:
    """Puts ours in place of JAX's, for modules that look it up in its module."""
    theirs.buffer_callback = buffer_callback

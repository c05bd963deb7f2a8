# SPDX-License-Identifier: Apache-2.0
"""The end of JAX's use of memory of others: `release`."""

from typing import Any

import jax

from . import _compat, _core, _imports, _views
from ._current_device import keeps_current_device


def release(x: Any) -> None:
    """Ends JAX's use of memory that `from_external` or `ref` brought in.

    Its owner is let go before this returns. Waits for what JAX still does with it. Later uses of `x`
    raise. Memory that came in twice is used twice: each array is released by itself, and the owner is free
    after the last. A view, of `buffer` or of an array of JAX, is only marked: its owner goes with it and
    the last array that was made of it.

    As with `jax.Array.delete`, no other thread may be inside a program that uses `x` and calls Python:
    on the CPU both would wait for ever. In a function that a program calls it returns where nothing else
    uses the memory, and that program least of all.

    Args:
        x: an array that `from_external` made, what `ref` made, or a view.

    Raises:
        ValueError: the memory of `x` is JAX's own, or was released before.
        RuntimeError: something else still uses what came in with `x`: an array that JAX made of it, a
            consumer that `x` was handed to, a program that takes seconds and whose results nobody keeps,
            or a `borrow` that has not ended.
    """
    if isinstance(x, _core.View):
        # Without a look at JAX, which may not have begun, and is not begun by that.
        x.release()
    else:
        _release(x)


@keeps_current_device
def _release(x: Any) -> None:
    if _compat.is_concrete_ref(x) and _compat.is_external_ref(x):
        _compat.ref_storage(x).memory.release()
        return
    if not isinstance(x, jax.Array) or isinstance(x, jax.core.Tracer):
        raise TypeError(
            f"release: expected an array that from_external made, or what ref made, got "
            f"{_views.type_name(x)}"
        )
    imports = _imports.imports_of(x)
    if not imports or x.nbytes == 0:
        raise ValueError(
            "release: the memory of this array is JAX's own, or it was made of an imported one, or of a "
            "Ref; give the very array with which from_external shares the memory of another library, or "
            "the Ref"
        )
    if x.is_deleted():
        raise ValueError("release: the array was released, or deleted or donated, before")
    _imports.end(x, imports)

# SPDX-License-Identifier: Apache-2.0
"""What is known of the arrays of other libraries, beside their memory: who keeps it, who uses it where."""

from collections.abc import Callable
from typing import Any

import numpy as np

from . import _adapters, _core, _views
from ._memory import Memory
from ._sharded import Sharded

_libraries = ("cupy", "torch", "numba", "warp")


def _package(x: Any) -> str:
    return type(x).__module__.partition(".")[0]


def is_known(x: Any) -> bool:
    """Whether it is known what keeps the memory of an array."""
    return isinstance(x, (np.ndarray, _core.View)) or _package(x) in _libraries


def keeper(x: Any) -> Any:
    """What keeps the memory of an array, and not the array: its end is looked for."""
    match _package(x):
        case "cupy":
            return x.data.mem
        case "torch":
            return x.untyped_storage()
        case "numba":
            return getattr(x, "gpu_data", None)
    return x.owner if isinstance(x, _core.View) else None


def watch(x: Any, memory: Memory) -> Callable[[Any], bool]:
    """A function that tells whether the array is where it was: on other memory it is another one."""
    if isinstance(x, np.ndarray):
        view = memory.parts[0].view
        pointer, nbytes, shape, dtype = view.pointer, view.nbytes, view.shape, view.dtype
        return lambda a: (
            _core.is_dense_at(a, pointer, nbytes) and a.shape == shape and a.dtype == dtype
        )
    place_of = _place_of(x)
    place = place_of(x)
    return lambda a: bool(place_of(a) == place)


def _place_of(x: Any) -> Callable[[Any], Any]:
    """A function of an array that gives all that can change while it stays the same object."""
    if isinstance(x, Sharded):
        functions = [_place_of(part) for part in x.parts]
        return lambda s: [f(part) for f, part in zip(functions, s.parts, strict=True)]
    match _package(x):
        case "cupy":
            return lambda a: (a.data.ptr, a.dtype, a.shape, a.strides)
        case "torch":
            return lambda a: (a.data_ptr(), a.dtype, a.shape, a.stride(), a.requires_grad)
    if isinstance(x, _core.View):
        return lambda v: v.pointer
    if isinstance(getattr(x, "__cuda_array_interface__", None), dict):
        fields = ("data", "typestr", "shape", "strides")
        return lambda a: [a.__cuda_array_interface__.get(name) for name in fields]
    return _place_by_protocol


def _place_by_protocol(x: Any) -> Any:
    v = _views.of(x)[0]
    return v.pointer, v.dtype, v.shape, v.strides, v.readonly


def teller_of(x: Any) -> Callable[[Any], None] | None:
    """What tells the array's library that the array was written to; None: it need not know."""
    if isinstance(x, Sharded):
        tellers = [teller_of(part) for part in x.parts]
        if not any(tellers):
            return None

        def tell_all(s: Any) -> None:
            for tell, part in zip(tellers, s.parts, strict=True):
                if tell is not None:
                    tell(part)

        return tell_all
    if _package(x) != "torch":
        return None
    adapter: Any = _adapters.get("torch")
    tell: Callable[[Any], None] = adapter.wrote_to
    return tell


def stream_of(x: Any) -> Callable[[int], int | None]:
    """From an ordinal to the stream on which the array is used; None: nobody knows it."""
    if isinstance(x, _core.View):
        stream = x.stream
        return lambda _: stream
    if (package := _package(x)) in _libraries:
        adapter = _adapters.get(package)
        return lambda ordinal: adapter.current_stream(ordinal)[0]
    return lambda _: None

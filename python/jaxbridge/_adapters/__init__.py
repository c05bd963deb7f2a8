# SPDX-License-Identifier: Apache-2.0
"""Adapters: what turns the core's buffers into a framework's arrays, for the time of one call.

One file per framework, imported at the first use of that framework; no other file imports one.
"""

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np

if TYPE_CHECKING:
    from jaxbridge import _core

Signature = tuple[tuple[int, ...], np.dtype[Any]]


# What makes an array for one call:
# - None: the function gets the buffer itself;
# - `view(buffer)`;
# - `(source, view)`: `source(buffer)` is called once for each memory and gives what every view refers to,
#   and what `view` makes one of. Both are kept between calls, so nothing that a function can change may be
#   in them.
Viewer = None | Callable[[Any], Any] | tuple[Callable[[Any], tuple[Any, Any]], Callable[[Any], Any]]


class Scope(Protocol):
    """A context manager for one use, in one thread."""

    def __enter__(self) -> object: ...

    def __exit__(self, *exc: object) -> None: ...


class Adapter(Protocol):
    """One framework.

    Whatever a viewer makes, and every view made of that, refers to the buffer or to what `source` gave:
    the caller drops its own references after the call and takes a higher reference count as a view that
    was kept.

    All methods may be called by several threads at once.
    """

    name: str
    platforms: frozenset[str]
    # Most axes of an array; the caller refuses more at trace time.
    max_ndim: int
    # How an array of rank 0 looks: () where the framework has such arrays. The caller takes a
    # result of this shape where a rank-0 result is expected.
    scalar_shape: tuple[int, ...]
    # How a function copies an array `x` of this framework, for messages.
    how_to_copy: str
    # True where `snapshot` and `unchanged` are nearly free and are used outside debug mode too.
    always_checks_inputs: bool
    # True where a function puts an array on other memory by ordinary means (torch's `out.data = x`):
    # what it is to write is then looked at outside debug mode too.
    always_checks_memory: bool

    def check_dtype(self, dtype: np.dtype[Any], platform: str) -> None:
        """Asked at trace time.

        Raises:
            TypeError: the framework has no arrays of that dtype on that platform.
            ImportError: what the framework needs on that platform is not installed.
        """

    def viewer(self, dtype: np.dtype[Any], shape: tuple[int, ...], platform: str) -> Viewer:
        """How arrays are made of buffers of one dtype and shape."""

    def view(self, buffer: "_core.Buffer") -> Any:
        """The framework's array on that memory; read-only where the framework has that."""

    def scopes(self, platform: str) -> bool:
        """Whether `scope` has anything to do there."""

    def scope(self, platform: str, ordinal: int, stream: int) -> Scope | None:
        """Makes device and stream current for this thread; None where there is nothing to do."""

    def capture_scope(self, ordinal: int, stream: int) -> tuple[Scope, Any]:
        """The scope of a call on CUDA that is captured, and the memory that is allocated in it.

        Nobody else gets that memory as long as it is kept.

        Raises:
            NotImplementedError: the framework's work can't be captured; says why.
        """

    def scratch_scope(self, ordinal: int, stream: int, scratch: "_core.Scratch") -> Scope:
        """The scope of a call on CUDA whose allocations come from `scratch`. Asked where
        `_options.scratch_frameworks` has the framework.

        Its end raises ViewKeptError where the function, which did not raise, kept some of it.
        """

    def signature(self, value: Any) -> Signature | None:
        """Shape and dtype of an array of this framework, None for anything else.

        NumPy scalars and 0-d NumPy arrays count as arrays of every framework: they are rank-0
        results that were computed on the host.

        Raises:
            TypeError: an array that cannot be a result at all (sparse, or of a dtype of its own).
        """

    def store(self, value: Any, out: Any) -> None:
        """Copies `value` into `out`, a view of a result, on the current stream.

        `signature(value)` is that of `out`. `value` may be strided, on another device, or a view
        of an argument.
        """

    def memory(self, array: Any) -> tuple[int, int]:
        """Address and size of an array of this framework, which stay as long as its memory does."""

    def snapshot(self, view: Any) -> Any:
        """What `unchanged` needs to know about the content of `view` now."""

    def unchanged(self, view: Any, token: Any) -> bool:
        """Whether `view`, the very array that `snapshot` saw, has kept its content."""

    # ---- outside of calls ----

    def array_of(self, view: "_core.View") -> Any:
        """The framework's array in the memory of a view, which it keeps: any dense layout.

        On CUDA the framework's stream is in order with it already. `array_of_parts`, where an adapter has
        that too, takes the view and its `parts` as arguments, and less time.
        """

    def current_stream(self, ordinal: int) -> tuple[int, Any]:
        """The stream on which this thread's work on that device goes: its CUstream, and what keeps it.

        `stream_object`, where an adapter has that too, returns it in less time, as an object which keeps it
        and has the CUstream as `ptr`.
        """


class Source(Protocol):
    """An adapter that describes its framework's arrays itself, faster or more fully than a protocol."""

    def view_of(self, array: Any) -> "_core.View":
        """A view of an array; on CUDA its stream is the one that is current.

        Raises:
            BufferError: the array is more than its memory, with the way out.
        """

    def copy_of(self, array: Any) -> Any:
        """A dense row-major copy in new memory, on the same device and its current stream."""


names: tuple[str, ...] = ("numpy", "cupy", "torch", "numba", "warp", "buffer")

_install = {
    "cupy": "pip install cupy-cuda13x, or cupy-cuda12x for CUDA 12",
    "torch": "pip install torch",
    "numba": "pip install numba, and numba-cuda for CUDA",
    "warp": "pip install warp-lang",
}

_loaded: dict[str, Adapter] = {}


def get(name: str) -> Adapter:
    """The adapter of a framework; its first use imports the framework.

    Raises:
        ValueError: no framework of that name is known.
        ImportError: the framework is not installed, or does not import.
    """
    if not isinstance(name, str) or name not in names:
        raise ValueError(
            f'framework={name!r} is not known; the frameworks are {", ".join(names)}, and "view" is an '
            f"object with every protocol"
        )
    found = _loaded.get(name)
    if found is not None:
        return found
    try:
        module = importlib.import_module(f".{name}", __name__)
    except ModuleNotFoundError as e:
        if e.name != name:  # a package that the framework needs
            raise _does_not_import(name, e) from e
        default = ", which is the default on CUDA," if name == "cupy" else ""
        raise ImportError(
            f'framework="{name}"{default} needs a package that is not installed: {_install[name]}; '
            f"or give another framework="
        ) from e
    except Exception as e:
        raise _does_not_import(name, e) from e
    # Two threads at the first use get the same object: Python runs the module once.
    return _loaded.setdefault(name, cast(Adapter, module.adapter))


# Packages whose arrays their adapters describe.
_sources = frozenset({"cupy", "torch"})


def of_array(x: Any) -> Source | None:
    """The adapter of the framework that made an array, where it describes its arrays itself."""
    package = type(x).__module__.partition(".")[0]
    if package not in _sources:
        return None
    adapter: Any = get(package)
    return cast(Source, adapter) if isinstance(x, adapter.array_type) else None


def _does_not_import(name: str, error: Exception) -> ImportError:
    return ImportError(
        f'framework="{name}": the package is installed, but importing it failed with '
        f"{type(error).__name__}: {error}; see that `python -c 'import {name}'` works"
    )

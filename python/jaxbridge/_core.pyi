"""The part of jaxbridge that is written in C++."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy
import numpy.typing


class Buffer:
    """A dense row-major array that XLA owns, for the time of one call."""

    def __buffer__(self, flags, /):
        """
        Return a buffer object that exposes the underlying memory of the object.
        """

    @property
    def pointer(self) -> int:
        """Address of the first element; may be 0 where there are no elements."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> numpy.dtype[Any]:
        """NumPy's or ml_dtypes' dtype."""

    @property
    def ndim(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def platform(self) -> str:
        """"cpu" or "cuda"."""

    @property
    def ordinal(self) -> int:
        """The device within its platform."""

    @property
    def stream(self) -> int:
        """XLA's CUstream for this call; 0 on the CPU."""

    @property
    def readonly(self) -> bool: ...

    @property
    def __array_interface__(self) -> dict[str, Any]: ...

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...

    def __array__(self, dtype: object = None, copy: bool | None = None) -> numpy.typing.NDArray[Any]: ...

    def __dlpack_device__(self) -> tuple[int, int]: ...

    def __dlpack__(self, *, stream: int | None = None, max_version: tuple[int, int] | None = None, dl_device: tuple[int, int] | None = None, copy: bool | None = None) -> object: ...

    def __repr__(self) -> str: ...

def set_dtypes(by_name: dict[str, numpy.dtype[Any]]) -> None:
    """Sets the table from names to dtype objects; once, at import."""

def dtype_names() -> list[str]:
    """The names of XLA's element types."""

def current_call() -> tuple[str, int, int, bool] | None:
    """
    (platform, device ordinal, stream, capturing) of the call that this thread is in.
    """

def call_depth() -> int:
    """How many calls, one inside the other, this thread is in."""

def stream_order(from_stream: int, to_stream: int, ordinal: int) -> None:
    """
    Later work on to_stream waits for what is on from_stream now; the host does not. 0 is the legacy default stream.
    """

def synchronize(stream: int, ordinal: int) -> None:
    """The host waits for the stream."""

def exchange_capture_mode(mode: int) -> int:
    """
    Sets what this thread's captures forbid it (2: nothing); returns what was set before.
    """

def copy(source: Buffer, destination: Buffer) -> None:
    """Copies a buffer of this call; on CUDA on the call's stream."""

def fill(buffer: Buffer, value: int) -> None:
    """
    Sets every byte of a buffer of this call; on CUDA on the call's stream.
    """

def driver_info() -> dict[str, object]:
    """
    Loads the driver and says what was found: error, path, version, missing, devices.
    """

def as_array(buffer: Buffer) -> numpy.ndarray:
    """A NumPy array over a buffer on the CPU, which is its base."""

class Scratch:
    """
    Memory of XLA's for one call. Any thread; once the call has ended nothing can be allocated, and what is freed is not looked at.
    """

    def allocate(self, nbytes: int) -> int:
        """
        The address of at least so many bytes on the device of the call; 0 for none.
        """

    def free(self, pointer: int) -> None:
        """Gives a block back."""

    @property
    def live(self) -> list[tuple[int, int]]:
        """(address, size in bytes) of the blocks that were not given back."""

def scratch_hooks() -> tuple[int, int]:
    """
    The addresses of `void* allocate(ssize_t bytes, int device, void* stream)` and `void free(void*, ssize_t bytes, int device, void* stream)`.
    """

def enter_scratch_hooks(scratch: Scratch) -> None:
    """The hooks give this thread memory of that scratch."""

def leave_scratch_hooks() -> None:
    """
    They give this thread memory of the scratch before; what was not freed is not listened for.
    """

class Plan:
    """What is done at a call of one platform and one list of shapes."""

    def __init__(self, *, operand_viewers: list[Any], own_viewers: list[tuple[int, Any]], scope: Callable[..., Any] | None = None, scratch: bool = False, capture_scope: Callable[[int, int], tuple[Any, Any]] | None = None, staged: bool = False, state: Callable[[int, int], Any] | None = None, function: Callable[..., Any] | None = None, arguments: list[tuple[str, Any]] = [], keywords: tuple[str, ...] | None = None, finish: Callable[..., None] | None = None, writes: bool = False, work: Callable[..., None] | None = None) -> None: ...

class Target:
    """What a key stands for: calls Python."""

    def __init__(self, *, make_plan: Callable[..., Plan], on_error: Callable[..., str], on_held: Callable[..., None], on_not_captured: Callable[[str], None], on_compared: Callable[..., None], in_place: Sequence[tuple[int, int]], limit: int, graph: str) -> None: ...

    @property
    def replays(self) -> int:
        """How many of the calls replayed a graph."""

    @property
    def staged(self) -> int:
        """How many of these replayed it on copies of their arrays."""

    @property
    def captures(self) -> int:
        """How often a call was captured."""

    @property
    def hits(self) -> int:
        """How many of the calls came with addresses that were known."""

    @property
    def kept(self) -> int:
        """How many lists of addresses are kept."""

    @property
    def calls(self) -> int:
        """How often XLA has called it."""

    def clear_plans(self) -> None:
        """Forgets its plans; they are made anew."""

def register(key: int, target: Target) -> None:
    """Counts one more user of the key."""

def unregister(key: int) -> None:
    """Counts one user of the key less; the last one takes the target along."""

def registered(key: int) -> bool: ...

def registry_size() -> int: ...

def set_resolver(resolve: Callable[[int, str], Target]) -> None:
    """
    Sets resolve(key, spec) -> Target, asked for keys that no one has registered.
    """

def handlers() -> list[tuple[str, str, Any]]:
    """(target name, platform, capsule) of each handler."""

def ffi_versions() -> tuple[int, int]:
    """
    Minor FFI version of the runtime (-1: it did not say) and the one that we answered.
    """

def begin_exit() -> bool:
    """
    From now on nothing calls Python or CUDA; called through atexit. Whether every call has ended.
    """

def after_fork_in_child() -> None:
    """Forgets the calls of threads that a forked child does not have."""

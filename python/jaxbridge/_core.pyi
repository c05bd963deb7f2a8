"""The part of jaxbridge that is written in C++."""

from collections.abc import Callable, Sequence
from typing import Any, overload

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

def begin_update(owner_stream: int | None, jax_stream: int, ordinal: int, number: int) -> int:
    """
    What JAX's stream gets from now on comes after what that of an owner of memory has; None: it is not known. Returns the number of the update, which is given for more memory of the same program; 0: none yet.

    Raises BufferError where the owner's stream is being captured.
    """

def end_update(number: int, owner_stream: int, ordinal: int) -> bool:
    """
    What the owner's stream gets from now on comes after the program. False: it is not known that this thread has enqueued all of it.
    """

def current_context() -> int:
    """The CUcontext that is current for this thread; 0: none."""

def make_current(context: int) -> None:
    """Makes a CUcontext, or none, current for this thread, where it is not."""

def export_stream(ordinal: int) -> int:
    """A stream without work, on which arrays of JAX become ready for others."""

def synchronize_device(ordinal: int) -> None:
    """The host waits for all that the device was given."""

def is_capturing(stream: int, ordinal: int) -> bool:
    """Whether a capture forbids to wait for the stream."""

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

def is_dense_at(array: object, pointer: int, nbytes: int) -> bool:
    """
    Whether an object with the buffer protocol is writable, row-major and has that memory.
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

    def __init__(self, *, make_plan: Callable[..., Plan], on_error: Callable[..., str], on_held: Callable[..., None], on_not_captured: Callable[[str], None], on_compared: Callable[..., None], operand_names: Sequence[str], in_place: Sequence[tuple[int, int]], external: Sequence[int], limit: int, graph: str) -> None: ...

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

class NativeFunction:
    """A function of a native library, on one platform."""

    @property
    def name(self) -> str: ...

    @property
    def doc(self) -> str: ...

    @property
    def signatures(self) -> list[str]:
        """One for each overload."""

    @property
    def parameters(self) -> str: ...

    @property
    def results(self) -> list[str]:
        """A rule for the shape of each result, or none."""

    @property
    def vmap_method(self) -> str: ...

    @property
    def flags(self) -> int: ...

    @property
    def platform(self) -> str: ...

    @property
    def has_shape_function(self) -> bool: ...

    @property
    def execute(self) -> object: ...

    @property
    def initialize(self) -> object: ...

    @property
    def calls(self) -> int:
        """How often XLA has called it."""

    def infer(self, operands: Sequence[tuple[str, Sequence[int]]], attributes: dict[str, Any], result_count: int) -> list[tuple[str, list[int]]]:
        """
        (dtype, shape) of each result, hidden ones last, by the shape function.
        """

def open_library(path: str) -> list[NativeFunction]:
    """
    Opens a library of native functions, for as long as the process lives. ValueError: it is none.
    """

class NativeTarget:
    """What a key stands for: calls no Python."""

    @property
    def calls(self) -> int:
        """How often XLA has called it."""

    @property
    def replays(self) -> int: ...

    @property
    def captures(self) -> int: ...

    @property
    def kept(self) -> int: ...

    @property
    def hits(self) -> int: ...

    @property
    def staged(self) -> int: ...

    def clear_plans(self) -> None: ...

max_arguments: int = 64

def c_function(*, name: str, address: int, arguments: Sequence[tuple[str, bool, int, int]], texts: Sequence[str], returns_error_code: bool, operand_names: Sequence[str], in_place: Sequence[tuple[int, int]], external: Sequence[int], inspects: bool) -> NativeTarget:
    """A target that calls the C function at an address."""

def library_function(*, name: str, functions: Sequence[NativeFunction], operand_names: Sequence[str], in_place: Sequence[tuple[int, int]], external: Sequence[int]) -> NativeTarget:
    """
    A target that calls a function of a library, one for each platform, and inspects each call.
    """

def compute_capability(ordinal: int) -> tuple[int, int]:
    """Of a CUDA device. RuntimeError: there is none."""

class Kernel:
    """One kernel of a module of device code: PTX, or a cubin."""

    def __init__(self, *, image: bytes, name: str, shared: int) -> None: ...

    @property
    def loaded(self) -> int:
        """On how many devices it is loaded."""

    def target(self, *, name: str, arguments: Sequence[tuple[str, bool, int, int]], grid: Sequence[int], block: Sequence[int], shared: int, operand_names: Sequence[str], in_place: Sequence[tuple[int, int]], external: Sequence[int], limit: int, inspects: bool) -> NativeTarget:
        """A target that launches it on the call's stream."""

@overload
def register(key: int, target: Target) -> None:
    """Counts one more user of the key."""

@overload
def register(key: int, target: NativeTarget) -> None: ...

def unregister(key: int) -> None:
    """Counts one user of the key less; the last one takes the target along."""

def registered(key: int) -> bool: ...

def registry_size() -> int: ...

def set_resolver(resolve: Callable[[int, str], Target | NativeTarget]) -> None:
    """
    Sets resolve(key, spec) -> Target, asked for keys that no one has registered.
    """

def handlers() -> list[tuple[str, str, Any]]:
    """(target name, platform, capsule) of each handler."""

def ffi_versions() -> tuple[int, int]:
    """
    Minor FFI version of the runtime (-1: it did not say) and the one that we answered.
    """

class View:
    """
    An array in memory that somebody owns, with every protocol by which libraries hand arrays to one another. It keeps the memory alive.
    """

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
    def strides(self) -> tuple[int, ...]:
        """In bytes."""

    @property
    def dtype(self) -> numpy.dtype[Any]:
        """NumPy's or ml_dtypes' dtype."""

    @property
    def ndim(self) -> int: ...

    @property
    def nbytes(self) -> int:
        """Of the elements, without gaps between them."""

    @property
    def platform(self) -> str:
        """"cpu" or "cuda"."""

    @property
    def ordinal(self) -> int:
        """The device within its platform."""

    @property
    def memory(self) -> str:
        """"host", "device", "pinned" (of the host, page-locked) or "managed"."""

    @property
    def layout(self) -> str:
        """
        "compact" (dense and row-major), "transposed" (dense), "strided", "broadcast" or "negative".
        """

    @property
    def stream(self) -> int | None:
        """
        CUstream on which the content is ready, 0 for the legacy default one; None: it is there.
        """

    @property
    def readonly(self) -> bool: ...

    @property
    def parts(self) -> tuple[int, int, int, tuple[int, ...], numpy.dtype[Any], tuple[int, ...] | None]:
        """
        (pointer, nbytes, ordinal, shape, dtype, strides; None: compact), all at once.
        """

    @property
    def owner(self) -> Any:
        """
        The object that is kept alive for the memory; None where there is none to be seen.
        """

    @property
    def reach(self) -> tuple[int, int]:
        """The bytes from `pointer` in which all elements lie: [low, high)."""

    def release(self) -> None:
        """
        Later uses raise ValueError. The owner goes with this object, which arrays that were made of it keep: their memory stays.
        """

    @property
    def __array_interface__(self) -> dict[str, Any]: ...

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...

    def __array__(self, dtype: object = None, copy: bool | None = None) -> numpy.typing.NDArray[Any]: ...

    def __dlpack_device__(self) -> tuple[int, int]: ...

    def __dlpack__(self, *, stream: int | None = None, max_version: tuple[int, int] | None = None, dl_device: tuple[int, int] | None = None, copy: bool | None = None) -> Any: ...

    def __repr__(self) -> str: ...

def view_as_array(view: View) -> numpy.ndarray:
    """A NumPy array over memory that the host reaches; the view is its base."""

def set_view_copier(copy: Callable[[View, int | None, tuple[int, int] | None], View]) -> None:
    """Sets what makes a view of a copy, for consumers that ask for one."""

def view_of_memory(pointer: int, shape: tuple[int, ...], dtype: numpy.dtype[Any], platform: str, ordinal: int, strides: tuple[int, ...] | None, stream: int | None, readonly: bool, owner: object) -> View:
    """`platform`: "cpu", "cuda", or "pinned"."""

def view_of_interface(fields: dict[str, Any], owner: object, dtype: numpy.dtype[Any] | None, on_cuda: bool) -> View:
    """Of an array interface's dictionary; a dtype goes before its typestr."""

def view_of_capsule(capsule: Any, stream: int | None, readonly: bool | None, owner: object) -> View:
    """
    Of a DLPack capsule, which it consumes. `stream`: where the content is ready. The driver is asked who owns the memory.
    """

def hand_over(view: View, used_on: int | None, kept: object, as_device: bool) -> Any:
    """
    A DLPack capsule for JAX, dense views only. The view ends when the device is past what `used_on` has when JAX lets go. `as_device`: pinned memory as that of a device.
    """

def live_imports(pointer: int) -> int:
    """
    How many arrays of JAX, or uses by the device, still keep the memory at an address.
    """

def release_unused() -> int:
    """Releases owners that the device has finished with; how many are left."""

def exporter(exporter: Callable[..., Any], *, data_of: Callable[[Any], Any] | None = None, ordinal: int | None = None, stream: tuple[int, object] | Callable[[int], tuple[int, object]] | None = None, make: Callable[..., Any] | None = None, by_parts: bool = False, readonly: bool = True) -> Callable[[Any], Any]:
    """
    A function that makes a view of an array of JAX, or what `make` makes of that.

    `exporter(array, stream=)` returns a DLPack capsule of an array on one device, ready on a stream by DLPack's number, or (None) at once. `data_of`: returns the `addressable_data(0)` of an array that is not deleted. `ordinal`: of the CUDA device that has the arrays; it is current meanwhile, and what was so before at the end. `stream`: the consumer's, a CUstream and what keeps it, or what returns that for the ordinal, or an object with the CUstream as `ptr`; the memory is JAX's again when it is past what it has at the view's end. None: no consumer is known, and the view is ready on a stream of ours. `by_parts`: `make` gets the view's `parts` after it.
    """

def begin_exit() -> bool:
    """
    From now on nothing calls Python or CUDA; called through atexit. Whether every call has ended.
    """

def after_fork_in_child() -> None:
    """Forgets the calls of threads that a forked child does not have."""

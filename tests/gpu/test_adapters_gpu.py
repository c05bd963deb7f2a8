# SPDX-License-Identifier: Apache-2.0
"""The adapters on a device, one by one: views, leases, results, scopes. Calls: test_call_gpu.py.

As a program it prints what each step costs: python tests/gpu/test_adapters_gpu.py
"""

import contextlib
import ctypes
import functools
import gc
import importlib.util
import pathlib
import sys
import threading
import time
import timeit
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from jaxbridge import _adapters

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "python"))
import fake_buffer as cpu
from fake_buffer import FakeBuffer, Lease, bits, example
from interchange import dtype_of

pytestmark = [
    pytest.mark.gpu,
    # Numba's, for the small arrays of these tests.
    pytest.mark.filterwarnings("ignore:Grid size .* will likely result in GPU under-utilization"),
]

HAS = {
    "cupy": {*cpu.STANDARD, "bfloat16"},
    "torch": cpu.HAS["torch"],
    "numba": set(cpu.STANDARD),
    "warp": cpu.HAS["warp"],
}
FRAMEWORKS = list(HAS)
PACKAGE = {"numba": "numba_cuda"}
# Far longer than the host needs to enqueue what follows.
SLEEP_US = 300_000


class Driver:
    """The few driver functions that the tests need, of no framework's."""

    def __init__(self) -> None:
        self.lib = ctypes.CDLL("libcuda.so.1")
        self.usleep = ctypes.cast(ctypes.CDLL(None).usleep, ctypes.c_void_p)
        self.contexts: list[ctypes.c_void_p] = []
        self("cuInit", 0)
        count = ctypes.c_int()
        self("cuDeviceGetCount", ctypes.byref(count))
        for ordinal in range(count.value):
            context = ctypes.c_void_p()
            self("cuDevicePrimaryCtxRetain", ctypes.byref(context), ordinal)
            self.contexts.append(context)

    def __call__(self, name: str, *args: Any) -> None:
        wide = [ctypes.c_void_p(a) if isinstance(a, int) and a > 2**31 else a for a in args]
        code = getattr(self.lib, name)(*wide)
        if code != 0:
            raise RuntimeError(f"{name} failed with {code}")

    @contextlib.contextmanager
    def current(self, ordinal: int) -> Iterator[None]:
        self("cuCtxPushCurrent_v2", self.contexts[ordinal])
        try:
            yield
        finally:
            self("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def allocate(self, size: int) -> int:
        pointer = ctypes.c_uint64()
        self("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size))
        return pointer.value

    def stream(self) -> int:
        """A stream as XLA's: it does not wait for the default stream."""
        stream = ctypes.c_void_p()
        self("cuStreamCreate", ctypes.byref(stream), 1)
        assert stream.value is not None
        return stream.value

    def sleep(self, stream: int) -> None:
        self("cuLaunchHostFunc", ctypes.c_void_p(stream), self.usleep, ctypes.c_void_p(SLEEP_US))

    def is_idle(self, stream: int) -> bool:
        return bool(self.lib.cuStreamQuery(ctypes.c_void_p(stream)) == 0)

    def set_float(self, buffer: "CudaBuffer", value: float, stream: int) -> None:
        word = int(np.float32(value).view(np.uint32))
        count = ctypes.c_size_t(buffer.nbytes // 4)
        self(
            "cuMemsetD32Async",
            ctypes.c_uint64(buffer.pointer),
            ctypes.c_uint(word),
            count,
            ctypes.c_void_p(stream),
        )

    def read(self, buffer: "CudaBuffer", stream: int) -> Any:
        """The content as the stream sees it: after what it has been given, and nothing else."""
        host = np.empty(buffer.shape, buffer.dtype)
        self(
            "cuMemcpyDtoHAsync_v2",
            ctypes.c_void_p(host.ctypes.data),
            ctypes.c_uint64(buffer.pointer),
            ctypes.c_size_t(buffer.nbytes),
            ctypes.c_void_p(stream),
        )
        self("cuStreamSynchronize", ctypes.c_void_p(stream))
        return host


@functools.cache
def driver() -> Driver:
    return Driver()


class CudaBuffer(FakeBuffer):
    """Memory on a device, made and read by the driver alone."""

    def __init__(self, content: Any, *, ordinal: int = 0, stream: int = 0) -> None:
        content = np.asarray(content)
        pointer = 0
        if content.nbytes:
            with driver().current(ordinal):
                pointer = driver().allocate(content.nbytes)
                host = np.array(content, order="C")
                driver()(
                    "cuMemcpyHtoD_v2",
                    ctypes.c_uint64(pointer),
                    ctypes.c_void_p(host.ctypes.data),
                    ctypes.c_size_t(host.nbytes),
                )
                # The copy may be under way still, on the default stream.
                driver()("cuCtxSynchronize")
        super().__init__(
            content,
            platform="cuda",
            ordinal=ordinal,
            stream=stream,
            pointer=pointer,
            readonly=False,
        )

    def __del__(self) -> None:
        if self.pointer:
            with driver().current(self.ordinal):
                driver()("cuMemFree_v2", ctypes.c_uint64(self.pointer))

    @property
    def content(self) -> Any:
        host = np.empty(self.shape, self.dtype)
        if self.nbytes:
            with driver().current(self.ordinal):
                driver()("cuCtxSynchronize")
                driver()(
                    "cuMemcpyDtoH_v2",
                    ctypes.c_void_p(host.ctypes.data),
                    ctypes.c_uint64(self.pointer),
                    ctypes.c_size_t(self.nbytes),
                )
        return host


class Cupy:
    def __init__(self) -> None:
        import cupy

        self.cp = cupy

    def pointer(self, view: Any) -> int:
        return int(view.data.ptr)

    def host(self, view: Any, name: str) -> Any:
        return view.get()

    def add_one(self, x: Any, out: Any) -> None:
        self.cp.add(x, 1, out=out)

    def stream(self) -> int:
        return int(self.cp.cuda.get_current_stream().ptr)

    def device(self) -> int:
        return int(self.cp.cuda.runtime.getDevice())

    def null_stream(self) -> Any:
        return self.cp.cuda.Stream.null

    def own_stream(self) -> Any:
        return self.cp.cuda.Stream(non_blocking=True)

    derived: tuple[Callable[[Any], Any], ...] = (
        lambda x: x[1:, ::2],
        lambda x: x.T,
        lambda x: x.reshape(-1),
        lambda x: x.ravel()[1:],
        lambda x: x.view("int32"),
        lambda x: x.data,
        lambda x: x.data.mem,
        lambda x: x.data + 4,
        lambda x: __import__("cupy").broadcast_to(x, (4, 2, 3)),
        lambda x: __import__("cupy").asarray(x),
        lambda x: __import__("cupy").from_dlpack(x),
        lambda x: x.diagonal(),
    )
    strided: tuple[Callable[[Any], Any], ...] = (
        lambda x: x[:, ::2],
        lambda x: x[1:2],
        lambda x: x.T,
        lambda x: x[::-1, ::-1],
        lambda x: x.diagonal(),
        lambda x: x[2, 1],
        lambda x: x[:0],
    )


class Torch:
    def __init__(self) -> None:
        import torch

        self.torch = torch

    def pointer(self, view: Any) -> int:
        return int(view.data_ptr())

    def host(self, view: Any, name: str) -> Any:
        return cpu.to_host(view.cpu(), name)

    def add_one(self, x: Any, out: Any) -> None:
        self.torch.add(x, 1, out=out)

    def stream(self) -> int:
        return int(self.torch.cuda.current_stream().cuda_stream)

    def device(self) -> int:
        return int(self.torch.cuda.current_device())

    def null_stream(self) -> Any:
        return self.torch.cuda.stream(self.torch.cuda.default_stream())

    def own_stream(self) -> Any:
        return self.torch.cuda.stream(self.torch.cuda.Stream())

    derived: tuple[Callable[[Any], Any], ...] = (
        lambda x: x[1:, ::2],
        lambda x: x.T,
        lambda x: x.reshape(-1),
        lambda x: x.flatten()[1:],
        lambda x: x.expand(4, 2, 3),
        lambda x: x.detach(),
        lambda x: x.data,
        lambda x: x.untyped_storage(),
        lambda x: x.unbind(),
        lambda x: x.requires_grad_() * 2,
    )
    strided: tuple[Callable[[Any], Any], ...] = (
        lambda x: x[:, ::2],
        lambda x: x[1:2],
        lambda x: x.T,
        lambda x: x.diagonal(),
        lambda x: x[2, 1],
        lambda x: x[:0],
    )


class Numba:
    def __init__(self) -> None:
        from numba import cuda

        self.cuda = cuda

        @cuda.jit
        def add_one(x: Any, out: Any) -> None:
            i = cuda.grid(1)
            if i < x.size:
                out[i] = x[i] + 1

        self.kernel = add_one

    def pointer(self, view: Any) -> int:
        return int(view.device_ctypes_pointer.value or 0)

    def host(self, view: Any, name: str) -> Any:
        return view.copy_to_host()

    def add_one(self, x: Any, out: Any) -> None:
        # On Numba's default stream, as a plain launch is: XLA's must wait for it.
        driver().sleep(0)
        self.kernel[(x.size + 127) // 128, 128](x, out)

    def device(self) -> int:
        return int(self.cuda.current_context().device.id)

    derived: tuple[Callable[[Any], Any], ...] = (
        lambda x: x[1:, ::2],
        lambda x: x[1],
        lambda x: x.reshape(6),
        lambda x: x.ravel()[1:],
        lambda x: x.view("int32"),
        lambda x: x.squeeze(),
        lambda x: x.bind(0),
        lambda x: x.gpu_data,
        lambda x: __import__("numba.cuda").cuda.as_cuda_array(x),
    )
    strided: tuple[Callable[[Any], Any], ...] = (
        lambda x: x[:, ::2],
        lambda x: x[1:2],
        lambda x: x[:, 1],
        lambda x: x.reshape(4, 3),
    )


class Warp:
    def __init__(self) -> None:
        import warp

        import _warp_kernels

        self.wp = warp
        self.kernel = _warp_kernels.slow_add

    def pointer(self, view: Any) -> int:
        return int(view.ptr or 0)

    def host(self, view: Any, name: str) -> Any:
        return view.numpy().view(dtype_of(name))

    def add_one(self, x: Any, out: Any) -> None:
        self.wp.launch(self.kernel, dim=x.size, inputs=[x, 0], outputs=[out])

    def stream(self) -> int:
        return int(self.wp.get_stream().cuda_stream or 0)

    def device(self) -> int:
        return int(self.wp.get_device().ordinal)

    def null_stream(self) -> Any:
        device = self.wp.get_device("cuda:0")
        assert device.stream is not None  # makes the null stream, too
        return self.wp.ScopedStream(device.null_stream)

    def own_stream(self) -> Any:
        return self.wp.ScopedStream(self.wp.Stream("cuda:0"))

    derived: tuple[Callable[[Any], Any], ...] = (
        lambda x: x[1:, ::2],
        lambda x: x[1],
        lambda x: x.transpose(),
        lambda x: x.reshape((6,)),
        lambda x: x.flatten()[1:],
    )
    strided: tuple[Callable[[Any], Any], ...] = (
        lambda x: x[:, ::2],
        lambda x: x[1:2],
        lambda x: x.transpose(),
        lambda x: x[:, 1],
    )


OPERATIONS: dict[str, Any] = {"cupy": Cupy, "torch": Torch, "numba": Numba, "warp": Warp}


@functools.cache
def operations(framework: str) -> Any:
    return OPERATIONS[framework]()


def pair(framework: str) -> tuple[Any, Any]:
    package = PACKAGE.get(framework, framework)
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}, which is not installed")
    return _adapters.get(framework), operations(framework)


@pytest.fixture(params=FRAMEWORKS)
def both(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """An adapter, and how to do things with its arrays."""
    return pair(request.param)


@pytest.fixture(params=["cupy", "torch", "warp"])
def both_with_streams(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """The same for those that have a current stream."""
    return pair(request.param)


@pytest.fixture(autouse=True)
def context() -> Iterator[None]:
    """The core has the call's device current."""
    with driver().current(0):
        yield


@pytest.fixture(scope="module")
def stream() -> int:
    with driver().current(0):
        return driver().stream()


CASES = [
    pytest.param(framework, name, id=f"{framework}-{name}")
    for framework in FRAMEWORKS
    for name in cpu.ALL
    if name in HAS[framework]
]


# --- dtypes and views ---


@pytest.mark.parametrize("name", [*cpu.ALL, *cpu.PACKED])
def test_check_dtype(both: Any, name: str) -> None:
    adapter, _ = both
    if name in HAS[adapter.name]:
        adapter.check_dtype(dtype_of(name), "cuda")
    else:
        with pytest.raises(TypeError, match=f'"{adapter.name}" has no {name} arrays on cuda'):
            adapter.check_dtype(dtype_of(name), "cuda")


@pytest.mark.parametrize(("framework", "name"), CASES)
def test_view_is_the_memory(framework: str, name: str) -> None:
    adapter, ops = pair(framework)
    content = example(name)
    buffer = CudaBuffer(content)
    with Lease(buffer) as lease:
        view = adapter.view(buffer)
        assert lease.held()
        assert adapter.signature(view) == ((2, 3), dtype_of(name))
        assert ops.pointer(view) == buffer.pointer
        assert bits(ops.host(view, name)) == bits(content)
        del view


@pytest.mark.parametrize("shape", [(), (1,), (0,), (0, 3), (3, 0, 2), (2, 1, 3, 2)])
def test_view_of_each_shape(both: Any, shape: tuple[int, ...], stream: int) -> None:
    adapter, ops = both
    content = example("float32", shape)
    source, out = CudaBuffer(content), CudaBuffer(np.zeros_like(content))
    with Lease(source), Lease(out), adapter.scope("cuda", 0, stream):
        view = adapter.view(source)
        assert adapter.signature(view) == (shape or adapter.scalar_shape, np.dtype("float32"))
        if content.size:
            assert ops.pointer(view) == source.pointer
        assert adapter.unchanged(view, adapter.snapshot(view))
        adapter.store(view, adapter.view(out))
        del view
    assert bits(out.content) == bits(content)


def test_torch_float8_of_rank_and_size_0(stream: int) -> None:
    adapter, _ = pair("torch")
    for shape in ((), (0, 3)):
        buffer = CudaBuffer(example("float8_e5m2", shape))
        with Lease(buffer), adapter.scope("cuda", 0, stream):
            view = adapter.view(buffer)
            assert adapter.signature(view) == (shape, buffer.dtype)
            adapter.store(view, view)
            del view


def test_view_of_high_rank(both: Any) -> None:
    adapter, ops = both
    buffer = CudaBuffer(example("int32", (1,) * (min(adapter.max_ndim, 32) - 2) + (2, 3)))
    view = adapter.view(buffer)
    assert adapter.signature(view) == (buffer.shape, buffer.dtype)
    assert bits(ops.host(view, "int32")) == bits(buffer.content)


@pytest.mark.parametrize(
    ("framework", "i"), [(f, i) for f in FRAMEWORKS for i in range(len(OPERATIONS[f].derived))]
)
def test_every_view_of_a_view_holds_the_buffer(framework: str, i: int, stream: int) -> None:
    adapter, ops = pair(framework)
    buffer = CudaBuffer(example("float32"))
    with Lease(buffer) as lease:
        with adapter.scope("cuda", 0, stream):
            kept = ops.derived[i](adapter.view(buffer))
            gc.collect()
            assert lease.held()
            del kept
        assert not lease.held()  # and that without a collection


def test_a_graph_of_torch_ends_with_the_call(stream: int) -> None:
    adapter, _ = pair("torch")
    buffer, out = CudaBuffer(example("float32")), CudaBuffer(example("float32"))
    gc.disable()
    try:
        with Lease(buffer) as lease, Lease(out):
            with adapter.scope("cuda", 0, stream):
                x = adapter.view(buffer).requires_grad_()
                (x**3).sum().backward()
                adapter.store(x.grad, adapter.view(out))
                del x
            # Torch's own thread of the device may drop the last node a moment after backward().
            deadline = time.monotonic() + 10
            while lease.held() and time.monotonic() < deadline:
                time.sleep(0.001)
    finally:
        gc.enable()
    np.testing.assert_array_equal(out.content, 3 * buffer.content**2)


# --- store ---


@pytest.mark.parametrize(("framework", "name"), CASES)
def test_store(framework: str, name: str, stream: int) -> None:
    adapter, _ = pair(framework)
    content = example(name)
    source, out = CudaBuffer(content), CudaBuffer(np.zeros_like(content))
    with Lease(source), Lease(out), adapter.scope("cuda", 0, stream):
        adapter.store(adapter.view(source), adapter.view(out))
    assert bits(out.content) == bits(content)


@pytest.mark.parametrize(
    ("framework", "name", "i"),
    [
        (framework, name, i)
        for framework in FRAMEWORKS
        for name in ("float32", "complex64", "bool", "bfloat16", "float8_e5m2", "uint16")
        if name in HAS[framework]
        for i in range(len(OPERATIONS[framework].strided))
    ],
)
def test_store_of_strided_values(framework: str, name: str, i: int, stream: int) -> None:
    adapter, ops = pair(framework)
    content = example(name, (3, 4))
    take = ops.strided[i]
    expected = np.asarray(take(content))
    out = CudaBuffer(np.zeros_like(expected, order="C"))
    source = CudaBuffer(content)
    with Lease(source), Lease(out):
        with adapter.scope("cuda", 0, stream):
            value = take(adapter.view(source))
            assert adapter.signature(value) == (out.shape, out.dtype)
            adapter.store(value, adapter.view(out))
        assert bits(driver().read(out, stream)) == bits(expected)
        del value


@pytest.mark.parametrize("framework", ["cupy", "torch", "numba"])
def test_store_of_a_broadcast_value(framework: str, stream: int) -> None:
    adapter, ops = pair(framework)
    row = example("float32", (4,))
    source, out = CudaBuffer(row), CudaBuffer(np.zeros((3, 4), np.float32))
    with Lease(source), Lease(out), adapter.scope("cuda", 0, stream):
        view = adapter.view(source)
        if framework == "cupy":
            value = ops.cp.broadcast_to(view, (3, 4))
        elif framework == "torch":
            value = view.expand(3, 4)
        else:
            shown = {
                "shape": (3, 4), "strides": (0, 4), "typestr": "<f4", "version": 3,
                "data": (source.pointer, False),
            }  # fmt: skip
            value = ops.cuda.from_cuda_array_interface(shown, owner=view)
        adapter.store(value, adapter.view(out))
        del view, value
    assert bits(out.content) == bits(np.broadcast_to(row, (3, 4)))


@pytest.mark.parametrize(
    ("framework", "name", "number"),
    [
        (f, n, v)
        for f in FRAMEWORKS
        for n, values in cpu.NUMBERS.items()
        if n in HAS[f]
        for v in values
    ],
)
def test_store_of_a_number_from_the_host(
    framework: str, name: str, number: Any, stream: int
) -> None:
    adapter, _ = pair(framework)
    value = np.array(number, dtype_of(name))
    for given in (value, value[()]):
        out = CudaBuffer(np.ones((), value.dtype))
        with adapter.scope("cuda", 0, stream):
            assert adapter.signature(given) == ((), value.dtype)
            adapter.store(given, adapter.view(out))
        assert bits(driver().read(out, stream)) == bits(value)


def test_torch_results_of_every_kind(stream: int) -> None:
    adapter, ops = pair("torch")
    torch = ops.torch
    x = torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex64, device="cuda")
    for value, expected in [
        (x.conj(), np.array([1 - 2j, 3 + 1j], np.complex64)),
        (x.conj().imag, np.array([-2, 1], np.float32)),
        (torch.ones(3, requires_grad=True, device="cuda") * 2, np.full(3, 2, np.float32)),
        (torch.arange(3.0), np.arange(3, dtype=np.float32)),  # left on the host
    ]:
        torch.cuda.synchronize()
        out = CudaBuffer(np.zeros_like(expected))
        with Lease(out), adapter.scope("cuda", 0, stream):
            assert adapter.signature(value) == (expected.shape, expected.dtype)
            adapter.store(value, adapter.view(out))
        np.testing.assert_array_equal(out.content, expected)


def test_warp_arrays_of_vectors_are_results(stream: int) -> None:
    adapter, ops = pair("warp")
    content = np.arange(12, dtype=np.float32).reshape(4, 3)
    vectors = ops.wp.array(content, dtype=ops.wp.vec3, device="cuda:0")
    ops.wp.synchronize()
    for value, expected in [(vectors, content), (vectors[::2], content[::2])]:
        out = CudaBuffer(np.zeros_like(expected))
        with adapter.scope("cuda", 0, stream):
            assert adapter.signature(value) == (expected.shape, expected.dtype)
            adapter.store(value, adapter.view(out))
        np.testing.assert_array_equal(out.content, expected)


# --- unchanged inputs ---


def test_unchanged(both: Any, stream: int) -> None:
    adapter, _ = both
    buffer = CudaBuffer(np.array([1, np.nan, 3], np.float32))
    with adapter.scope("cuda", 0, stream):
        view = adapter.view(buffer)
        token = adapter.snapshot(view)
        assert adapter.unchanged(view, token)
        if adapter.name in ("warp", "cupy"):
            view.fill_(2.0) if adapter.name == "warp" else view.fill(2)
        elif adapter.name == "torch":
            view.fill_(2)
        else:
            view[0:1] = 2
        assert not adapter.unchanged(view, token)


# --- scope ---


@pytest.mark.parametrize("before", ["null_stream", "own_stream"])
def test_scope_sets_and_restores_the_stream(
    both_with_streams: Any, before: str, stream: int
) -> None:
    adapter, ops = both_with_streams
    with getattr(ops, before)():
        was = ops.stream()
        assert was != stream
        assert (was == 0) == (before == "null_stream")
        for _ in range(2):
            with adapter.scope("cuda", 0, stream):
                assert ops.stream() == stream
                assert ops.device() == 0
                with ops.own_stream():  # the function's own
                    assert ops.stream() not in (stream, was)
                assert ops.stream() == stream
            assert ops.stream() == was
            with pytest.raises(KeyError), adapter.scope("cuda", 0, stream):
                raise KeyError
            assert ops.stream() == was


@pytest.mark.parametrize("framework", ["cupy", "torch"])  # Warp's is that of the process
def test_scope_is_of_the_thread(framework: str, stream: int) -> None:
    adapter, ops = pair(framework)
    inside, looked = threading.Event(), threading.Event()
    seen: list[int] = []

    def other() -> None:
        with driver().current(0):
            inside.wait(60)
            seen.append(ops.stream())
            looked.set()

    thread = threading.Thread(target=other, daemon=True)
    thread.start()
    with adapter.scope("cuda", 0, stream):
        inside.set()
        assert looked.wait(60)
    thread.join()
    assert seen == [0]


def test_cupy_keeps_a_stream_set_by_use(stream: int) -> None:
    adapter, ops = pair("cupy")
    own = ops.cp.cuda.Stream(non_blocking=True)
    own.use()
    try:
        with adapter.scope("cuda", 0, stream):
            assert ops.stream() == stream
        assert ops.cp.cuda.get_current_stream() is own
    finally:
        ops.cp.cuda.Stream.null.use()


def test_cupy_of_a_function_that_leaves_its_stream_behind(stream: int) -> None:
    adapter, ops = pair("cupy")
    with adapter.scope("cuda", 0, stream):
        ops.cp.cuda.Stream(non_blocking=True).use()
    assert ops.stream() == 0


def test_scope_gives_no_warning(both: Any, stream: int) -> None:
    adapter, _ = both  # warnings are errors; a stream of its own, so that nothing is cached
    with adapter.scope("cuda", 0, driver().stream()):
        pass


def test_a_call_on_the_other_device(both: Any) -> None:
    adapter, ops = both
    if len(driver().contexts) < 2:
        pytest.skip("needs 2 GPUs")
    with driver().current(1):
        stream = driver().stream()
    content = example("float32", (4,))
    source, out = CudaBuffer(content, ordinal=1), CudaBuffer(np.zeros(4, np.float32), ordinal=1)
    before = ops.device()
    with Lease(source), Lease(out):
        with adapter.scope("cuda", 1, stream):
            assert ops.device() == 1
            ops.add_one(adapter.view(source), adapter.view(out))
        assert ops.device() == before
    with driver().current(1):
        assert bits(driver().read(out, stream)) == bits(content + 1)


def warm(adapter: Any, ops: Any, stream: int) -> None:
    """Compiles what is compiled at the first use."""
    x, y = (CudaBuffer(np.zeros(1024, np.float32)) for _ in range(2))
    with adapter.scope("cuda", 0, stream):
        ops.add_one(adapter.view(x), adapter.view(y))
        adapter.store(adapter.view(x), adapter.view(y))
    np.testing.assert_array_equal(y.content, 0)


def test_the_function_works_between_what_xla_has_done_and_does_next(both: Any, stream: int) -> None:
    adapter, ops = both
    warm(adapter, ops, stream)
    x, y = (CudaBuffer(np.zeros(1024, np.float32)) for _ in range(2))
    driver()("cuCtxSynchronize")
    driver().sleep(stream)
    driver().set_float(x, 7, stream)
    with Lease(x), Lease(y):
        with adapter.scope("cuda", 0, stream):
            ops.add_one(adapter.view(x), adapter.view(y))
        assert not driver().is_idle(stream), "the host waited for the device"
    # Nothing but the stream's own order.
    np.testing.assert_array_equal(driver().read(y, stream), 8)


def test_a_failing_function_is_ordered_too(both: Any, stream: int) -> None:
    adapter, ops = both
    warm(adapter, ops, stream)
    x, y = (CudaBuffer(np.zeros(1024, np.float32)) for _ in range(2))
    driver()("cuCtxSynchronize")
    driver().sleep(stream)
    driver().set_float(x, 7, stream)

    def fail() -> None:
        with adapter.scope("cuda", 0, stream):
            ops.add_one(adapter.view(x), adapter.view(y))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    np.testing.assert_array_equal(driver().read(y, stream), 8)


@pytest.mark.parametrize(
    ("framework", "form"),
    [
        (framework, form)
        for framework in FRAMEWORKS
        for form in ("contiguous", "strided", "number")
        if (framework, form) != ("numba", "number")  # a copy from the host, which waits
    ],
)
def test_store_is_ordered_and_does_not_wait(framework: str, form: str, stream: int) -> None:
    adapter, ops = pair(framework)
    warm(adapter, ops, stream)
    shape = () if form == "number" else (32, 16) if form == "strided" else (32, 32)
    x, y = CudaBuffer(np.zeros((32, 32), np.float32)), CudaBuffer(np.zeros(shape, np.float32))

    def store() -> None:
        with adapter.scope("cuda", 0, stream):
            view = adapter.view(x)
            value = {"contiguous": lambda: view, "strided": lambda: view[:, ::2]}.get(
                form, lambda: np.float32(7)
            )()
            adapter.store(value, adapter.view(y))

    store()
    driver()("cuCtxSynchronize")
    driver().sleep(stream)
    driver().set_float(x, 7, stream)
    driver().set_float(y, 1, stream)
    store()
    assert not driver().is_idle(stream), "the host waited for the device"
    np.testing.assert_array_equal(driver().read(y, stream), 7)


def test_warp_frees_after_the_work_of_the_stream(stream: int) -> None:
    adapter, ops = pair("warp")
    wp = ops.wp
    warm(adapter, ops, stream)
    n = 1 << 20
    x, y = (CudaBuffer(np.zeros(n, np.float32)) for _ in range(2))
    own = wp.Stream("cuda:0")
    driver()("cuCtxSynchronize")
    driver().sleep(stream)
    driver().set_float(x, 7, stream)
    with Lease(x), Lease(y), adapter.scope("cuda", 0, stream):
        temporary = wp.clone(adapter.view(x))
        ops.add_one(temporary, adapter.view(y))
        del temporary  # free for Warp, while the kernels still wait
    assert not driver().is_idle(stream)
    with wp.ScopedStream(own):
        others = [wp.full(n, 100.0, dtype=wp.float32, device="cuda:0") for _ in range(8)]
    driver()("cuCtxSynchronize")
    np.testing.assert_array_equal(y.content, 8)
    for other in others:
        np.testing.assert_array_equal(other.numpy(), 100)


def test_warp_threads_on_one_device(stream: int) -> None:
    adapter, ops = pair("warp")
    warm(adapter, ops, stream)
    failed: list[str] = []

    def work(number: int) -> None:
        with driver().current(0):
            x, y = (CudaBuffer(np.full(256, number, np.float32)) for _ in range(2))
            for _ in range(50):
                with adapter.scope("cuda", 0, stream):
                    if ops.stream() != stream:
                        failed.append("stream")
                    ops.add_one(adapter.view(x), adapter.view(y))
            if not (driver().read(y, stream) == number + 1).all():
                failed.append("value")

    with ops.own_stream():
        was = ops.stream()
        threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(120)
            assert not t.is_alive()
        assert failed == []
        assert ops.stream() == was


def main() -> None:
    """Prints the cost on the host of each step, in microseconds: medians of 7 repeats."""
    print(f"{'':8}{'view':>8}{'scope':>8}{'store':>8}{'number':>8}{'check':>8}")
    with driver().current(0):
        stream = driver().stream()
        for framework in FRAMEWORKS:
            if importlib.util.find_spec(PACKAGE.get(framework, framework)) is None:
                continue
            adapter = _adapters.get(framework)
            x, y = (CudaBuffer(np.zeros(1024, np.float32)) for _ in range(2))
            number = CudaBuffer(np.zeros((), np.float32))

            def scoped(adapter: Any = adapter) -> None:
                with adapter.scope("cuda", 0, stream):
                    pass

            with adapter.scope("cuda", 0, stream):
                views = [adapter.view(b) for b in (x, y, number)]
                steps: list[Callable[[], Any]] = [
                    functools.partial(adapter.view, x),
                    scoped,
                    lambda a=adapter, v=views: a.store(v[0], v[1]),
                    lambda a=adapter, v=views: a.store(np.float32(1), v[2]),
                    lambda a=adapter, v=views: a.unchanged(v[0], a.snapshot(v[0])),
                ]
                costs = []
                for step in steps:
                    step()
                    times = sorted(timeit.repeat(step, number=300, repeat=7))
                    driver()("cuCtxSynchronize")
                    costs.append(times[3] / 300 * 1e6)
            print(f"{framework:8}" + "".join(f"{c:8.2f}" for c in costs), flush=True)


if __name__ == "__main__":
    main()

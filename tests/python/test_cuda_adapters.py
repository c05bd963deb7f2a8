# SPDX-License-Identifier: Apache-2.0
"""The adapters of CuPy, torch and Numba on CUDA, on devices that are none."""

import contextlib
import importlib.util
import sys
import types
from typing import Any

import numpy as np
import pytest

from fake_buffer import ALL, FRAMEWORKS, PACKED, FakeBuffer, Lease, adapter_of, example
from interchange import FLOAT8, STANDARD, dtype_of
from jaxbridge import _adapters


@pytest.fixture(params=FRAMEWORKS)
def adapter(request: pytest.FixtureRequest) -> Any:
    return adapter_of(request.param)


@pytest.fixture
def numba_cuda(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Numba's device arrays on a context that does nothing, and the calls that order streams."""
    adapter = adapter_of("numba")
    if importlib.util.find_spec("numba_cuda") is None:
        pytest.skip("numba-cuda is not installed")
    module: Any = sys.modules["jaxbridge._adapters.numba"]
    calls: list[Any] = []

    class Gpu:
        def get_primary_context(self) -> Any:
            return "context"

        def __enter__(self) -> None:
            calls.append("enter")

        def __exit__(self, *exc: object) -> None:
            calls.append("exit")

    cuda = module._Cuda()
    cuda.gpus = {0: Gpu(), 1: Gpu()}
    monkeypatch.setattr(module, "_cuda", lambda: cuda)
    core = types.SimpleNamespace(stream_order=lambda *a: calls.append(a))
    monkeypatch.setattr(module, "_core", core)
    return types.SimpleNamespace(adapter=adapter, calls=calls, core=core, cuda=cuda)


def on_cuda(content: Any) -> FakeBuffer:
    return FakeBuffer(content, platform="cuda", pointer=0x1000, stream=77)


@pytest.mark.parametrize("name", sorted({*STANDARD} - {"complex128"}))
def test_numba_device_views(numba_cuda: Any, name: str) -> None:
    adapter = numba_cuda.adapter
    adapter.check_dtype(dtype_of(name), "cuda")
    buffer = on_cuda(example(name, (2, 3, 4)))
    with Lease(buffer) as lease:
        view = adapter.view(buffer)
        assert lease.held()
        assert adapter.signature(view) == ((2, 3, 4), dtype_of(name))
        assert view.strides == example(name, (2, 3, 4)).strides
        assert adapter.memory(view) == (0x1000, 24)
        assert view.flags["C_CONTIGUOUS"]
        assert view.__cuda_array_interface__["stream"] is None
        kept = view.reshape(6, 4)
        del view
        assert lease.held()
        kept = kept.ravel()
        assert lease.held()
        kept = kept.gpu_data.view(8, 16)  # what slicing does
        assert kept.device_pointer_value == 0x1008
        assert lease.held()
        del kept


def test_numba_device_views_of_rank_and_size_0(numba_cuda: Any) -> None:
    adapter = numba_cuda.adapter
    buffer = on_cuda(np.float32(1))
    with Lease(buffer) as lease:
        view = adapter.view(buffer)
        assert lease.held()
        assert adapter.signature(view) == ((), np.dtype("float32"))
        assert view.strides == ()
        del view
    high = on_cuda(np.zeros((1,) * 30 + (2, 3)))
    assert adapter.view(high).shape == high.shape


def test_numba_refuses_dtypes_on_cuda(numba_cuda: Any) -> None:
    for name in ("bfloat16", *FLOAT8):
        with pytest.raises(TypeError, match=f"numba.*{name}.*on cuda"):
            numba_cuda.adapter.check_dtype(dtype_of(name), "cuda")


def test_numba_orders_its_default_stream(numba_cuda: Any) -> None:
    adapter, calls = numba_cuda.adapter, numba_cuda.calls
    with adapter.scope("cuda", 1, 77):
        assert calls == ["enter", (77, 0, 1)]
    assert calls[2:] == [(0, 77, 1), "exit"]
    calls.clear()
    with pytest.raises(KeyError), adapter.scope("cuda", 1, 77):
        raise KeyError
    assert calls == ["enter", (77, 0, 1), (0, 77, 1), "exit"]
    # Per-thread default streams.
    numba_cuda.cuda.default_stream = 2
    calls.clear()
    with adapter.scope("cuda", 0, 77):
        pass
    assert calls == ["enter", (77, 2, 0), (2, 77, 0), "exit"]

    def fail(*order: int) -> None:
        raise RuntimeError("driver")

    numba_cuda.core.stream_order = fail
    calls.clear()
    with pytest.raises(RuntimeError, match="driver"), adapter.scope("cuda", 0, 77):
        pass
    assert calls == ["enter", "exit"]


def test_numba_names_what_is_missing_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = adapter_of("numba")
    module: Any = sys.modules["jaxbridge._adapters.numba"]
    module._cuda.cache_clear()
    monkeypatch.setitem(sys.modules, "numba.cuda", None)
    monkeypatch.delattr("numba.cuda", raising=False)
    with pytest.raises(ImportError, match="pip install numba-cuda"):
        adapter.check_dtype(np.dtype("float32"), "cuda")


class FakeCuda:
    """What a thread has current, as the CUDA runtime and CuPy 14 keep it."""

    def __init__(self) -> None:
        self.device = 0
        self.null = FakeStream(self, 0, -1)
        self.current = [self.null, self.null]
        self.entered = [[self.null], [self.null]]  # the `with` blocks of each device
        self.order: list[int] = []
        self.fail = False

    def set(self, stream: "FakeStream") -> None:
        # As in CuPy, a stream of no known device counts as one of the current device.
        at = self.device if stream.device_id == -1 else stream.device_id
        assert at == self.device
        self.current[at] = stream

    def set_device(self, ordinal: int) -> None:
        self.device = ordinal


class FakeStream:
    def __init__(self, cuda: FakeCuda, ptr: int, device_id: int) -> None:
        self.cuda, self.ptr, self.device_id = cuda, ptr, device_id

    def __enter__(self) -> None:
        if self.cuda.fail:
            raise RuntimeError("driver")
        self.cuda.set(self)
        self.cuda.entered[self.cuda.device].append(self)
        self.cuda.order.append(self.cuda.device)

    def __exit__(self, *exc: object) -> None:
        ordinal = self.cuda.order.pop()
        self.cuda.entered[ordinal].pop()
        self.cuda.set(self.cuda.entered[ordinal][-1])

    def use(self) -> None:
        self.cuda.set(self)


class FakeMemory:
    def __init__(self, ptr: int, size: int, owner: Any, device_id: int) -> None:
        self.ptr, self.size, self.owner, self.device_id = ptr, size, owner, device_id


class FakeMemoryPointer:
    def __init__(self, mem: FakeMemory, offset: int) -> None:
        self.mem, self.ptr = mem, mem.ptr + offset
        self.copies: list[Any] = []

    def copy_from_device_async(self, source: Any, size: int) -> None:
        self.copies.append((source, size))


class FakeArray:
    def __init__(self, shape: Any, dtype: Any, data: Any, c_contiguous: bool = True) -> None:
        self.shape, self.dtype, self.data = shape, dtype, data
        self.nbytes = int(np.prod(shape)) * dtype.itemsize
        self.flags = types.SimpleNamespace(c_contiguous=c_contiguous)


@pytest.fixture(params=["14.2.0", "13.6.0"])
def fake_cupy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    state = FakeCuda()
    module: Any = types.ModuleType("cupy")
    stream_class: Any = type("Stream", (), {"null": state.null})

    def from_external(protocol: Any) -> FakeStream:
        version, ptr = protocol.__cuda_stream__()
        assert version == 0
        return FakeStream(state, ptr, -1)

    def external(ptr: int, device_id: int) -> FakeStream:
        assert request.param < "14", "deprecated"
        return FakeStream(state, ptr, device_id)

    if request.param >= "14":
        stream_class.from_external = from_external
    module.__version__ = request.param
    module.ndarray = FakeArray
    module.state = state
    module.copied = []
    module.copyto = lambda *args: module.copied.append(args)
    module.cuda = types.SimpleNamespace(
        MemoryPointer=FakeMemoryPointer,
        UnownedMemory=FakeMemory,
        Stream=stream_class,
        ExternalStream=external,
        get_current_stream=lambda ordinal: state.current[ordinal],
        runtime=types.SimpleNamespace(getDevice=lambda: state.device, setDevice=state.set_device),
    )
    monkeypatch.setitem(sys.modules, "cupy", module)
    monkeypatch.delitem(sys.modules, "jaxbridge._adapters.cupy", raising=False)
    monkeypatch.setattr(_adapters, "_loaded", {})
    yield module
    sys.modules.pop("jaxbridge._adapters.cupy", None)


def test_cupy_view_and_store(fake_cupy: Any) -> None:
    adapter = _adapters.get("cupy")
    buffer, out = on_cuda(example("float32")), on_cuda(example("float32"))
    with Lease(buffer):
        view = adapter.view(buffer)
        memory = view.data.mem
        assert (memory.ptr, memory.size, memory.device_id) == (0x1000, 24, 0)
        assert memory.owner is buffer
        assert adapter.memory(view) == (0x1000, view.nbytes)
        assert adapter.signature(view) == ((2, 3), np.dtype("float32"))
        target = adapter.view(out)
        adapter.store(view, target)
        assert target.data.copies == [(view.data, 24)]
        assert fake_cupy.copied == []
        view.flags.c_contiguous = False
        adapter.store(view, target)
        adapter.store(np.array(1.5), target)
        assert fake_cupy.copied == [(target, view), (target, 1.5)]
        assert type(fake_cupy.copied[1][1]) is np.float64
        assert len(target.data.copies) == 1
        fake_cupy.copied.clear()
        target.data.copies.clear()
        del view, memory


def test_cupy_dtypes(fake_cupy: Any) -> None:
    adapter = _adapters.get("cupy")
    has = {*STANDARD, "bfloat16"} if fake_cupy.__version__ >= "14" else {*STANDARD}
    for name in [*ALL, *PACKED]:
        if name in has:
            adapter.check_dtype(dtype_of(name), "cuda")
        else:
            with pytest.raises(TypeError, match=f'"cupy" has no {name} arrays on cuda'):
                adapter.check_dtype(dtype_of(name), "cuda")
    assert adapter.platforms == {"cuda"}


@pytest.mark.parametrize("before", ["null", "with", "use", "use in with"])
@pytest.mark.parametrize("ordinal", [0, 1])
@pytest.mark.parametrize("leaves", ["nothing", "stream", "device", "exception"])
def test_cupy_scope(fake_cupy: Any, before: str, ordinal: int, leaves: str) -> None:
    adapter: Any = _adapters.get("cupy")
    state = fake_cupy.state
    state.device = ordinal
    own, used = FakeStream(state, 5, ordinal), FakeStream(state, 6, ordinal)
    if "with" in before:
        own.__enter__()
    if "use" in before:
        used.use()
    state.device = 0
    was = list(state.current)

    def call() -> None:
        with adapter.scope("cuda", ordinal, 77):
            assert state.device == ordinal
            assert (state.current[ordinal].ptr, state.current[ordinal].device_id) == (77, ordinal)
            with FakeStream(state, 8, ordinal):
                assert state.current[ordinal].ptr == 8
            assert state.current[ordinal].ptr == 77
            if leaves == "stream":
                FakeStream(state, 9, ordinal).use()
            if leaves == "device":
                state.device = 1 - ordinal
            if leaves == "exception":
                raise KeyError

    with pytest.raises(KeyError) if leaves == "exception" else contextlib.nullcontext():
        call()
    assert state.device == 0
    assert [a is b for a, b in zip(state.current, was, strict=True)] == [True, True]
    assert state.order == ([ordinal] if "with" in before else [])


def test_cupy_scope_that_cannot_be_entered(fake_cupy: Any) -> None:
    adapter: Any = _adapters.get("cupy")
    state = fake_cupy.state
    state.fail = True
    with pytest.raises(RuntimeError, match="driver"), adapter.scope("cuda", 1, 77):
        pass
    assert state.device == 0
    assert state.current == [state.null, state.null]


@pytest.mark.parametrize("ordinal", [0, 1])
@pytest.mark.parametrize("leaves", ["nothing", "stream", "device", "exception"])
def test_torch_scope(monkeypatch: pytest.MonkeyPatch, ordinal: int, leaves: str) -> None:
    adapter = adapter_of("torch")
    import torch

    state = types.SimpleNamespace(device=0, streams=["default 0", "own 1"])

    def set_stream(stream: str) -> None:
        state.device = int(stream[-1])  # as torch does
        state.streams[state.device] = stream

    def set_device(ordinal: int) -> None:
        state.device = ordinal

    module = sys.modules["jaxbridge._adapters.torch"]
    for of, name, value in [
        (module, "_current_device", lambda: state.device),
        (module, "_stream_on", lambda ordinal: (state.streams[ordinal],)),
        (module, "_set_stream", set_stream),
        (module, "_as_set", lambda stream: (stream,)),
        (torch.cuda, "set_device", set_device),
        (torch.cuda, "ExternalStream", lambda stream, device: f"external {stream} {device}"),
    ]:
        monkeypatch.setattr(of, name, value)
    module._streams.clear()

    def call() -> None:
        with adapter.scope("cuda", ordinal, 77):
            assert state.device == ordinal
            assert state.streams[ordinal] == f"external 77 {ordinal}"
            if leaves == "stream":
                set_stream(f"other {ordinal}")
            if leaves == "device":
                set_device(1 - ordinal)
            if leaves == "exception":
                raise KeyError

    with pytest.raises(KeyError) if leaves == "exception" else contextlib.nullcontext():
        call()
    assert state == types.SimpleNamespace(device=0, streams=["default 0", "own 1"])
    module._streams.clear()


def test_torch_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = adapter_of("torch")
    monkeypatch.setattr("torch.version.cuda", None)
    adapter.check_dtype(np.dtype("float32"), "cpu")
    with pytest.raises(ImportError, match="built for CUDA"):
        adapter.check_dtype(np.dtype("float32"), "cuda")

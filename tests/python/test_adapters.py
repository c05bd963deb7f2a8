# SPDX-License-Identifier: Apache-2.0
"""The adapters on the CPU, one by one: views, leases, results, scopes. Calls: test_call.py."""

import gc
import itertools
import subprocess
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fake_buffer import (
    ALL,
    FRAMEWORKS,
    HAS,
    NUMBERS,
    PACKED,
    FakeBuffer,
    Lease,
    adapter_of,
    bits,
    example,
    to_host,
)
from interchange import dtype_of
from jaxbridge import _adapters, _core


@pytest.fixture(params=FRAMEWORKS)
def adapter(request: pytest.FixtureRequest) -> Any:
    return adapter_of(request.param)


def test_get_gives_one_object_each() -> None:
    assert _adapters.get("numpy") is _adapters.get("numpy")
    assert _adapters.get("numpy").name == "numpy"


def test_get_names_the_frameworks_for_an_unknown_one() -> None:
    with pytest.raises(ValueError, match=r"'jax' is not known.*numpy, cupy, torch, numba, warp"):
        _adapters.get("jax")


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("cupy", "pip install cupy-cuda13x"),
        ("torch", "pip install torch"),
        ("numba", "pip install numba"),
        ("warp", "pip install warp-lang"),
    ],
)
def test_get_says_how_to_install_a_missing_framework(
    name: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, f"jaxbridge._adapters.{name}", raising=False)
    monkeypatch.setattr(_adapters, "_loaded", {})
    with pytest.raises(ImportError, match=f'framework="{name}".*{command}'):
        _adapters.get(name)


def test_get_passes_on_why_an_installed_framework_does_not_import(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    (tmp_path / "cupy.py").write_text("import numpy\nnumpy.row_stack_of_old")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.delitem(sys.modules, "jaxbridge._adapters.cupy", raising=False)
    monkeypatch.setattr(_adapters, "_loaded", {})
    with pytest.raises(ImportError, match=r"AttributeError.*row_stack_of_old"):
        _adapters.get("cupy")


def test_importing_the_package_imports_no_framework() -> None:
    code = (
        "import sys, jaxbridge._adapters as a; a.get('numpy');"
        "print([n for n in ('cupy', 'torch', 'numba', 'warp') if n in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


@pytest.mark.parametrize("name", [*ALL, *PACKED])
def test_check_dtype(adapter: Any, name: str) -> None:
    if name in HAS[adapter.name]:
        assert adapter.check_dtype(dtype_of(name), "cpu") is None
    else:
        with pytest.raises(TypeError) as caught:
            adapter.check_dtype(dtype_of(name), "cpu")
        for part in (
            f'framework="{adapter.name}"',
            name,
            "on cpu",
            'framework="buffer"',
            "convert",
        ):
            assert part in str(caught.value)


CASES = [
    pytest.param(framework, name, id=f"{framework}-{name}")
    for framework, names in HAS.items()
    for name in ALL
    if name in names
]


@pytest.mark.parametrize(("framework", "name"), CASES)
def test_view_is_the_memory(framework: str, name: str) -> None:
    adapter = adapter_of(framework)
    content = example(name)
    buffer = FakeBuffer(content, readonly=False)
    with Lease(buffer) as lease:
        view = adapter.view(buffer)
        assert lease.held()
        assert adapter.signature(view) == ((2, 3), dtype_of(name))
        assert bits(to_host(view, name)) == bits(content)
        # Both ways: it is the same memory, not a copy.
        buffer.memory[:] = np.roll(buffer.memory, dtype_of(name).itemsize)
        assert bits(to_host(view, name)) == bits(np.roll(content, 1))
        del view


@pytest.mark.parametrize("shape", [(), (1,), (0,), (0, 3), (3, 0, 2), (2, 1, 3, 2)])
def test_view_of_each_shape(adapter: Any, shape: tuple[int, ...]) -> None:
    content = example("float32", shape)
    buffer = FakeBuffer(content, readonly=False)
    with Lease(buffer):
        view = adapter.view(buffer)
        seen = shape or adapter.scalar_shape
        assert adapter.signature(view) == (seen, np.dtype("float32"))
        assert bits(to_host(view, "float32")) == bits(content)
        adapter.store(adapter.view(FakeBuffer(content)), view)
        del view


def test_a_viewer_serves_many_buffers(adapter: Any) -> None:
    view = adapter.viewer(np.dtype("int32"), (2, 3), "cpu")
    if view is _core.as_array:  # which takes the core's own buffers only: test_bindings.py
        view = adapter.view
    buffers = [FakeBuffer(example("int32") + i, readonly=False) for i in range(3)]
    for buffer in buffers * 2:
        with Lease(buffer) as lease:
            array = view(buffer)
            assert lease.held()
            assert bits(to_host(array, "int32")) == bits(buffer.content)
            del array


@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_memory_of_a_view(adapter: Any, shape: tuple[int, ...]) -> None:
    buffer = FakeBuffer(example("float32", shape), readonly=False)
    with Lease(buffer):
        view = adapter.view(buffer)
        address, size = adapter.memory(view)
        assert size == buffer.content.size
        assert address == buffer.pointer or not size
        if len(shape) == 2 and size:
            inner, _ = adapter.memory(view[1:])
            assert inner == buffer.pointer + 12
        del view


def test_view_of_high_rank(adapter: Any) -> None:
    rank = min(adapter.max_ndim, 32)
    buffer = FakeBuffer(example("int32", (1,) * (rank - 2) + (2, 3)))
    view = adapter.view(buffer)
    assert adapter.signature(view) == (buffer.shape, buffer.dtype)
    assert bits(to_host(view, "int32")) == bits(buffer.content)


def test_warp_refuses_a_fifth_axis() -> None:
    adapter = adapter_of("warp")
    assert adapter.max_ndim == 4
    with pytest.raises(TypeError, match="at most 4 axes, not 5"):
        adapter.view(FakeBuffer(example("int32", (1, 1, 1, 2, 3))))


def test_torch_float8_of_rank_and_size_0() -> None:
    adapter = adapter_of("torch")
    for shape in ((), (0, 3)):
        buffer = FakeBuffer(example("float8_e5m2", shape), readonly=False)
        with Lease(buffer):
            view = adapter.view(buffer)
            assert adapter.signature(view) == (shape, buffer.dtype)
            adapter.store(view, view)
            assert adapter.unchanged(view, adapter.snapshot(view))
            del view


@pytest.mark.parametrize("framework", ["numpy", "numba"])
def test_numpy_views_of_arguments_are_read_only(framework: str) -> None:
    adapter = adapter_of(framework)
    view = adapter.view(FakeBuffer(example("float32")))
    assert not view.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        view[0, 0] = 1
    with pytest.raises(ValueError, match="cannot set WRITEABLE"):
        view.flags.writeable = True
    assert adapter.view(FakeBuffer(example("float32"), readonly=False)).flags.writeable


DERIVED: dict[str, list[Callable[[Any], Any]]] = {
    "numpy": [
        lambda x: x[1:, ::2],
        lambda x: x.T,
        lambda x: x.reshape(-1),
        lambda x: x.ravel()[1:],
        lambda x: x.view(np.uint8),
        lambda x: np.broadcast_to(x, (4, 2, 3)),
        lambda x: memoryview(x),
        lambda x: x.flat,
        lambda x: np.asarray(memoryview(x)),
        lambda x: np.lib.stride_tricks.sliding_window_view(x, (2, 2)),
    ],
    "torch": [
        lambda x: x[1:, ::2],
        lambda x: x.T,
        lambda x: x.reshape(-1),
        lambda x: x.flatten()[1:],
        lambda x: x.view(x.new_empty(0).int().dtype),
        lambda x: x.expand(4, 2, 3),
        lambda x: x.detach(),
        lambda x: x.data,
        lambda x: x.numpy(),
        lambda x: x.untyped_storage(),
        lambda x: x.unbind(),
        lambda x: x.requires_grad_() * 2,
    ],
    "warp": [
        lambda x: x[1:, ::2],
        lambda x: x.transpose(),
        lambda x: x.reshape((6,)),
        lambda x: x.flatten()[1:],
        lambda x: x[1],
        lambda x: x.numpy(),
        lambda x: __import__("warp").indexedarray1d(
            x.flatten(), [__import__("warp").array([0, 2], dtype=int, device="cpu")]
        ),
    ],
}

DERIVED["numba"] = DERIVED["numpy"]


@pytest.mark.parametrize(
    ("framework", "derive"),
    [pytest.param(f, d, id=f"{f}-{i}") for f, all_ in DERIVED.items() for i, d in enumerate(all_)],
)
def test_every_view_of_a_view_holds_the_buffer(framework: str, derive: Any) -> None:
    adapter = adapter_of(framework)
    buffer = FakeBuffer(example("float32"), readonly=False)
    with Lease(buffer) as lease:
        kept = derive(adapter.view(buffer))
        gc.collect()
        assert lease.held()
        del kept


def test_a_graph_of_torch_ends_with_the_call() -> None:
    adapter = adapter_of("torch")
    import torch

    buffer = FakeBuffer(example("float32"))

    def gradient(x: Any) -> Any:
        x.requires_grad_()
        (g,) = torch.autograd.grad((x**3).sum(), x)
        return g

    def backward(x: Any) -> Any:
        x.requires_grad_()
        (x**3).sum().backward()
        return x.grad

    gc.disable()
    try:
        with Lease(buffer):
            for function in (gradient, backward):
                out = FakeBuffer(example("float32"), readonly=False)
                with Lease(out):
                    adapter.store(function(adapter.view(buffer)), adapter.view(out))
                np.testing.assert_array_equal(out.content, 3 * buffer.content**2)
    finally:
        gc.enable()


@pytest.mark.parametrize(("framework", "name"), CASES)
def test_store(framework: str, name: str) -> None:
    adapter = adapter_of(framework)
    content = example(name)
    source = FakeBuffer(content)
    out = FakeBuffer(np.zeros_like(content), readonly=False)
    with Lease(source), Lease(out):
        adapter.store(adapter.view(source), adapter.view(out))
    assert bits(out.content) == bits(content)


STRIDED: list[tuple[str, Callable[[Any], Any]]] = [
    ("slice", lambda x: x[:, ::2]),
    ("row", lambda x: x[1:2]),
    ("transposed", lambda x: x.T if hasattr(x, "T") else x.transpose()),
]

NOT_IN_WARP: list[tuple[str, Callable[[Any], Any]]] = [
    (
        "broadcast",
        lambda x: x.expand(5, 3, 4) if hasattr(x, "expand") else np.broadcast_to(x, (5, 3, 4)),
    ),
    ("diagonal", lambda x: x.diagonal()),
    ("scalar", lambda x: x[2, 1]),
]


@pytest.mark.parametrize(
    ("framework", "name", "take"),
    [
        pytest.param(framework, name, take, id=f"{framework}-{name}-{case}")
        for framework in FRAMEWORKS
        for name in ("float32", "complex64", "bool", "bfloat16", "float8_e5m2", "uint16")
        for case, take in (STRIDED if framework == "warp" else [*STRIDED, *NOT_IN_WARP])
        if name in HAS[framework]
    ],
)
def test_store_of_strided_values(framework: str, name: str, take: Callable[[Any], Any]) -> None:
    adapter = adapter_of(framework)
    content = example(name, (3, 4))
    expected = take(content)
    value = take(adapter.view(FakeBuffer(content)))
    out = FakeBuffer(np.zeros(expected.shape, expected.dtype), readonly=False)
    assert adapter.signature(value) == (out.shape, out.dtype)
    adapter.store(value, adapter.view(out))
    assert bits(out.content) == bits(expected)


@pytest.mark.parametrize("framework", ["numpy", "torch", "numba"])
def test_store_of_negative_strides_or_memory_of_the_result(framework: str) -> None:
    adapter = adapter_of(framework)
    out = FakeBuffer(np.arange(5, dtype=np.float32), readonly=False)
    view = adapter.view(out)
    adapter.store(view, view)
    np.testing.assert_array_equal(out.content, np.arange(5))
    if framework != "torch":
        adapter.store(view[::-1], view)  # overlaps
        np.testing.assert_array_equal(out.content, np.arange(5)[::-1])


@pytest.mark.parametrize(
    ("framework", "name", "number"),
    [(f, n, v) for f in FRAMEWORKS for n in NUMBERS if n in HAS[f] for v in NUMBERS[n]],
)
@pytest.mark.parametrize("form", ["scalar", "array"])
def test_store_of_a_number_from_the_host(framework: str, name: str, number: Any, form: str) -> None:
    adapter = adapter_of(framework)
    value = np.array(number, dtype_of(name))
    value.flags.writeable = False
    given = value[()] if form == "scalar" else value
    out = FakeBuffer(np.ones((), value.dtype), readonly=False)
    assert adapter.signature(given) == ((), value.dtype)
    adapter.store(given, adapter.view(out))
    assert bits(out.content) == bits(value)


def test_signature_knows_only_arrays(adapter: Any) -> None:
    for value in (None, 1, 1.5, "x", [1.0], object(), (1, 2)):
        assert adapter.signature(value) is None
    host = np.zeros((2, 3), np.float32)
    known = adapter.signature(host) is not None
    assert known == (adapter.name in ("numpy", "numba"))


def test_numpy_takes_what_shows_its_memory() -> None:
    adapter = _adapters.get("numpy")
    shown = types.SimpleNamespace(__array_interface__=np.arange(4.0).__array_interface__)
    assert adapter.signature(shown) == ((4,), np.dtype("float64"))
    out = FakeBuffer(np.zeros(4), readonly=False)
    keep = np.arange(4.0)
    adapter.store(
        types.SimpleNamespace(__array_interface__=keep.__array_interface__), adapter.view(out)
    )
    np.testing.assert_array_equal(out.content, keep)


def test_torch_results_of_every_kind() -> None:
    adapter = adapter_of("torch")
    import torch

    x = torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex64)
    for value, expected in [
        (x.conj(), np.array([1 - 2j, 3 + 1j], np.complex64)),  # conjugated lazily
        (x.conj().imag, np.array([-2, 1], np.float32)),  # negated lazily
        (torch.ones(3, requires_grad=True) * 2, np.full(3, 2, np.float32)),
        (torch.nn.Parameter(torch.ones(2)), np.ones(2, np.float32)),
    ]:
        out = FakeBuffer(np.zeros_like(expected), readonly=False)
        view = adapter.view(out)
        assert adapter.signature(value) == (expected.shape, expected.dtype)
        adapter.store(value, view)
        np.testing.assert_array_equal(out.content, expected)
        assert not view.requires_grad

    with torch.inference_mode():
        value = torch.ones(2) * 3
    out = FakeBuffer(np.zeros(2, np.float32), readonly=False)
    adapter.store(value, adapter.view(out))
    np.testing.assert_array_equal(out.content, [3, 3])

    with pytest.raises(TypeError, match="to_dense"):
        adapter.signature(torch.eye(2).to_sparse())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch finds this dtype experimental
        half = torch.zeros(2, dtype=torch.complex32)
    with pytest.raises(TypeError, match="complex32"):
        adapter.signature(half)


def test_warp_arrays_of_vectors_are_results() -> None:
    adapter = adapter_of("warp")
    import warp as wp

    content = np.arange(12, dtype=np.float32).reshape(4, 3)
    vectors = wp.array(content, dtype=wp.vec3, device="cpu")
    matrices = wp.array(
        np.arange(8, dtype=np.float64).reshape(2, 2, 2), dtype=wp.mat22d, device="cpu"
    )
    for value, expected in [
        (vectors, content),
        (vectors[::2], content[::2]),
        (matrices, np.arange(8, dtype=np.float64).reshape(2, 2, 2)),
    ]:
        out = FakeBuffer(np.zeros_like(expected), readonly=False)
        assert adapter.signature(value) == (expected.shape, expected.dtype)
        adapter.store(value, adapter.view(out))
        np.testing.assert_array_equal(out.content, expected)


def test_warp_indexed_arrays_are_results() -> None:
    adapter = adapter_of("warp")
    import warp as wp

    source = FakeBuffer(np.arange(5, dtype=np.float32))
    picks = wp.array([4, 0, 2], dtype=int, device="cpu")
    out = FakeBuffer(np.zeros(3, np.float32), readonly=False)
    with Lease(source):
        value = wp.indexedarray1d(adapter.view(source), [picks])
        assert adapter.signature(value) == ((3,), np.dtype("float32"))
        adapter.store(value, adapter.view(out))
        del value
    np.testing.assert_array_equal(out.content, [4, 0, 2])


def test_unchanged(adapter: Any) -> None:
    content = np.array([1, np.nan, 3], np.float32)
    buffer = FakeBuffer(content, readonly=False)
    view = adapter.view(buffer)
    token = adapter.snapshot(view)
    assert adapter.unchanged(view, token)
    if adapter.name == "warp":
        view.fill_(2.0)
    else:
        view[:] = 2
    assert not adapter.unchanged(view, token)


def test_torch_sees_writes_by_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = adapter_of("torch")
    import torch

    assert adapter.always_checks_inputs and adapter.always_checks_memory
    writes: list[Callable[[Any], Any]] = [
        lambda x: x.add_(1),
        lambda x: x[1:].zero_(),
        lambda x: x.T.mul_(2),
        lambda x: x.detach().add_(1),
        lambda x: torch.add(x, 1, out=x),
        lambda x: torch.sin_(x),
    ]
    for write in writes:
        view = adapter.view(FakeBuffer(example("float32"), readonly=False))
        token = adapter.snapshot(view)
        (view * 2).sum()
        view.requires_grad_(False)
        assert adapter.unchanged(view, token)
        with torch.inference_mode():
            write(view)
        assert not adapter.unchanged(view, token), write

    with torch.inference_mode():  # the thread of an eager call
        view = adapter.view(FakeBuffer(example("float32"), readonly=False))
        token = adapter.snapshot(view)
        assert adapter.unchanged(view, token)

    view = adapter.view(FakeBuffer(example("complex64"), readonly=False))
    token = adapter.snapshot(view)
    view.data.zero_()
    assert adapter.unchanged(view, token)  # the limit
    holes = np.array([1, np.nan, complex(np.nan, 2)], np.complex64)
    view = adapter.view(FakeBuffer(holes, readonly=False))
    monkeypatch.setattr("jaxbridge._config.debug", True)
    token = adapter.snapshot(view)
    assert adapter.unchanged(view, token)
    view.data.zero_()
    assert not adapter.unchanged(view, token)


@pytest.mark.parametrize("framework", ["numpy", "torch", "numba"])
def test_no_scope_on_the_cpu(framework: str) -> None:
    assert not adapter_of(framework).scopes("cpu")


def test_stream_cache_is_bounded() -> None:
    from jaxbridge._adapters._common import StreamCache

    made = itertools.count()
    cache = StreamCache(lambda ordinal, stream: (ordinal, stream, next(made)))
    assert cache[0, 5] is cache[0, 5]
    assert cache[1, 5] != cache[0, 5]
    for stream in range(1000):
        assert cache[0, stream][:2] == (0, stream)
    assert len(cache) == StreamCache.limit
    assert cache[0, 999][2] < cache[0, 0][2]  # the oldest went, the newest stayed


def test_stream_cache_makes_one_object_for_all_threads() -> None:
    from jaxbridge._adapters._common import StreamCache

    def make(ordinal: int, stream: int) -> object:
        time.sleep(0.01)
        return object()

    cache = StreamCache(make)
    together = threading.Barrier(4, timeout=30)
    got: list[object] = []

    def work() -> None:
        together.wait()
        got.append(cache[0, 1])

    threads = [threading.Thread(target=work, daemon=True) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert len(got) == 4
    assert len(set(map(id, got))) == 1


@pytest.fixture
def buffers(monkeypatch: pytest.MonkeyPatch) -> Any:
    adapter = _adapters.get("buffer")
    module = sys.modules["jaxbridge._adapters.buffer"]

    def copy(source: FakeBuffer, destination: FakeBuffer) -> None:
        destination.memory[:] = source.memory

    core = types.SimpleNamespace(Buffer=FakeBuffer, copy=copy)
    monkeypatch.setattr(module, "_core", core)
    return adapter


def test_buffer_is_itself(buffers: Any) -> None:
    buffer = FakeBuffer(example("float32"))
    assert buffers.view(buffer) is buffer
    assert not buffers.scopes("cpu") and not buffers.scopes("cuda")
    for name in [*ALL, *PACKED]:
        assert buffers.check_dtype(dtype_of(name), "cuda") is None
    assert buffers.signature(buffer) == ((2, 3), np.dtype("float32"))


def test_buffer_results(buffers: Any) -> None:
    out = FakeBuffer(np.zeros((2, 3), np.float32), readonly=False)
    buffers.store(FakeBuffer(example("float32")), out)
    assert bits(out.content) == bits(example("float32"))
    with pytest.raises(TypeError, match=r"out=.*numpy.ndarray"):
        buffers.signature(np.zeros(3))
    assert buffers.signature(1.5) is None
    number = FakeBuffer(np.zeros((), np.float32), readonly=False)
    buffers.store(np.float32(1.5), number)
    assert number.content == 1.5
    with pytest.raises(TypeError, match="out="):
        buffers.store(np.float32(1.5), FakeBuffer(np.zeros(()), platform="cuda"))


def test_buffer_unchanged(buffers: Any) -> None:
    buffer = FakeBuffer(np.zeros(3), readonly=False)
    with Lease(buffer):
        token = buffers.snapshot(buffer)
        assert buffers.unchanged(buffer, token)
        buffer.memory[0] = 1
        assert not buffers.unchanged(buffer, token)

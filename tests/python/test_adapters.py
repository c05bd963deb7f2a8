# SPDX-License-Identifier: Apache-2.0
"""The adapters on the CPU, one by one: views, leases, results, scopes. Calls: test_call.py."""

import contextlib
import ctypes
import gc
import importlib.util
import itertools
import subprocess
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jaxbridge import _adapters, _core

STANDARD = [
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "float32", "float64", "complex64", "complex128",
]  # fmt: skip
FLOAT8 = [
    "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz",
    "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu",
]  # fmt: skip
PACKED = ["int2", "uint2", "int4", "uint4", "float4_e2m1fn"]
ALL = [*STANDARD, "bfloat16", *FLOAT8]
TORCH_FLOAT8 = {
    "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"
}  # fmt: skip
HAS = {
    "numpy": set(ALL),
    "torch": {*STANDARD, "bfloat16", *TORCH_FLOAT8},
    "numba": set(STANDARD) - {"float16"},
    "warp": {n for n in STANDARD if not n.startswith("complex")} | {"bfloat16"},
}
FRAMEWORKS = list(HAS)


def dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(name if name in STANDARD else getattr(ml_dtypes, name))


class DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class DLManagedTensor(ctypes.Structure):
    pass


Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(DLManagedTensor))
DLManagedTensor._fields_ = (
    ("tensor", DLTensor),
    ("context", ctypes.c_void_p),
    ("deleter", Deleter),
)
new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.restype = ctypes.py_object
new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
exported: dict[int, tuple[Any, ...]] = {}


@Deleter
def delete(tensor: Any) -> None:
    del exported[ctypes.addressof(tensor.contents)]


CODES = {"i": 0, "u": 1, "f": 2, "bfloat16": 4, "c": 5, "b": 6}


class FakeBuffer:
    """Does what `_core.Buffer` does, which cannot be made outside a call."""

    def __init__(
        self,
        content: Any,
        *,
        readonly: bool = True,
        platform: str = "cpu",
        ordinal: int = 0,
        stream: int = 0,
        pointer: int | None = None,
    ) -> None:
        content = np.asarray(content)
        self.shape = content.shape
        self.dtype = content.dtype
        self.nbytes = content.nbytes
        self.platform, self.ordinal, self.stream, self.readonly = (
            platform, ordinal, stream, readonly,
        )  # fmt: skip
        # Aligned as XLA's memory is.
        block = np.zeros(self.nbytes + 64, np.uint8)
        start = -block.ctypes.data % 64
        self.memory = block[start : start + self.nbytes]
        self.memory[:] = np.frombuffer(content.tobytes(), np.uint8)
        if pointer is None:
            pointer = self.memory.ctypes.data if self.nbytes else 0
        self.pointer = pointer

    @property
    def content(self) -> Any:
        return self.memory.view(self.dtype).reshape(self.shape)

    def __buffer__(self, flags: int) -> memoryview:
        view = memoryview(self.memory)
        return view.toreadonly() if self.readonly else view

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0) if self.platform == "cpu" else (2, self.ordinal)

    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: Any = None,
        dl_device: Any = None,
        copy: Any = None,
    ) -> Any:
        rank = len(self.shape)
        shape = (ctypes.c_int64 * max(rank, 1))(*self.shape)
        # Compact row-major, of elements; also where there are none.
        strides = (ctypes.c_int64 * max(rank, 1))(
            *[int(np.prod([max(n, 1) for n in self.shape[i + 1 :]])) for i in range(rank)]
        )
        name = self.dtype.name
        code = CODES[name] if name in CODES else CODES[self.dtype.kind]
        made = DLManagedTensor()
        made.tensor = DLTensor(
            self.pointer, *self.__dlpack_device__(), rank, code, 8 * self.dtype.itemsize, 1, shape,
            strides, 0,
        )  # fmt: skip
        made.deleter = delete
        address = ctypes.addressof(made)
        exported[address] = (made, shape, strides, self)
        return new_capsule(address, b"dltensor", None)


def example(name: str, shape: tuple[int, ...] = (2, 3)) -> Any:
    """An array with other values at each position, as far as the dtype goes."""
    dtype = dtype_of(name)
    count = int(np.prod(shape))
    numbers = np.arange(1, count + 1) % 7
    if name == "bool":
        numbers = numbers % 2
    if name == "float8_e8m0fnu":
        numbers = 2.0 ** (numbers % 4)
    if dtype.kind == "c":
        numbers = numbers + 1j * (numbers + 1)
    return numbers.astype(dtype).reshape(shape)


def to_host(value: Any, name: str) -> Any:
    """A framework's CPU array as NumPy's, by its bytes where the framework gives no dtype."""
    dtype = dtype_of(name)
    if isinstance(value, np.ndarray | np.generic):
        return np.asarray(value)
    if hasattr(value, "untyped_storage"):
        import torch

        if dtype.kind == "c":
            return value.resolve_conj().numpy()
        whole = value.detach().contiguous().view(getattr(torch, f"uint{8 * dtype.itemsize}"))
        return whole.numpy().view(dtype)
    return np.asarray(value.numpy()).view(dtype)


def bits(array: Any) -> bytes:
    return np.ascontiguousarray(array).tobytes()


def adapter_of(framework: str) -> Any:
    if framework not in ("numpy", "buffer"):
        pytest.importorskip(framework, reason=f"{framework} is not installed")
    return _adapters.get(framework)


@pytest.fixture(params=FRAMEWORKS)
def adapter(request: pytest.FixtureRequest) -> Any:
    return adapter_of(request.param)


class Lease:
    """Fails unless nothing but the test refers to the buffer at the end."""

    def __init__(self, buffer: FakeBuffer) -> None:
        self.buffer = buffer

    def held(self) -> bool:
        return sys.getrefcount(self.buffer) > self.before

    def __enter__(self) -> "Lease":
        self.before = sys.getrefcount(self.buffer)
        return self

    def __exit__(self, kind: Any, *rest: Any) -> None:
        if kind is None:
            assert not self.held()


# --- get ---


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


# --- dtypes ---


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


# --- view ---


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


# --- lease ---

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
        # Without a collection: an ordinary function is no false alarm.


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


# --- signature and store ---


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


NUMBERS = {
    "bool": [True],
    "uint8": [255],
    "uint64": [2**64 - 1],
    "int64": [-(2**63)],
    "float32": [-0.0, float("inf"), 1.5],
    "float16": [-0.0, 65504.0],
    "bfloat16": [-0.0, 3.0],
    "float8_e5m2": [1.5],
    "float8_e4m3fn": [-2.0],
    "complex64": [complex(-0.0, 2)],
    "complex128": [1 - 2j],
}


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


# --- unchanged inputs ---


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


# --- scope ---


@pytest.mark.parametrize("framework", ["numpy", "torch", "numba"])
def test_no_scope_on_the_cpu(framework: str) -> None:
    assert not adapter_of(framework).scopes("cpu")


@pytest.fixture
def other_device() -> Iterator[Any]:
    """Warp's default device is another one, as it is where a GPU is present."""
    import warp as wp

    runtime = wp.get_device("cpu").runtime
    before = runtime.default_device
    runtime.default_device = types.SimpleNamespace(alias="other", is_cuda=False, is_cpu=False)
    yield runtime.default_device
    runtime.default_device = before


def test_warp_works_on_the_device_of_the_call(request: pytest.FixtureRequest) -> None:
    adapter = adapter_of("warp")
    import warp as wp

    other = request.getfixturevalue("other_device")
    with adapter.scope("cpu", 0, 0):
        assert wp.get_device() is wp.get_device("cpu")
        with adapter.scope("cpu", 0, 0):
            assert wp.get_device() is wp.get_device("cpu")
        assert wp.get_device() is wp.get_device("cpu")
        assert wp.zeros(3).device.is_cpu
    assert wp.get_device() is other
    with pytest.raises(KeyError), adapter.scope("cpu", 0, 0):
        raise KeyError
    assert wp.get_device() is other


def test_warp_calls_of_several_threads(request: pytest.FixtureRequest) -> None:
    adapter = adapter_of("warp")
    import warp as wp

    other = request.getfixturevalue("other_device")
    cpu = wp.get_device("cpu")
    together = threading.Barrier(4, timeout=30)
    wrong: list[Any] = []

    def work() -> None:
        for _ in range(100):
            with adapter.scope("cpu", 0, 0):
                together.wait()  # all four are inside: they share the device
                if wp.get_device() is not cpu:
                    wrong.append(wp.get_device())

    threads = [threading.Thread(target=work, daemon=True) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
        assert not t.is_alive()
    assert wrong == []
    assert wp.get_device() is other


class FakeCudaDevice:
    """Of a Warp device what `_Turn` uses."""

    def __init__(self, name: str, runtime: Any) -> None:
        self.name, self.runtime, self.stream = name, runtime, f"own stream of {name}"
        self.ordinal = int(name[-1])
        self.own_allocator = self.allocator = FakeAllocator()

    def set_stream(self, stream: Any, sync: bool) -> None:
        assert not sync
        self.stream = stream

    def get_allocator(self) -> Any:
        return self.allocator

    def __repr__(self) -> str:
        return self.name


class FakeAllocator:
    memory_kind = "pool"

    def __init__(self) -> None:
        self.freed: list[Any] = []

    def allocate(self, size: int) -> int:
        return 0x2000

    def deallocate(self, ptr: int, size: int) -> None:
        self.freed.append((ptr, size))


class FakeWarpStream:
    def __init__(self, cuda_stream: int, device: FakeCudaDevice) -> None:
        self.cuda_stream, self.device, self.is_capturing = cuda_stream, device, False


class FakeScopedAllocator:
    def __init__(self, device: FakeCudaDevice, allocator: Any) -> None:
        self.device, self.allocator = device, allocator

    def __enter__(self) -> None:
        self.before, self.device.allocator = self.device.allocator, self.allocator

    def __exit__(self, *exc: object) -> None:
        self.device.allocator = self.before


@pytest.fixture
def warp_devices(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Two CUDA devices of Warp's, streams on them, and the calls that order streams."""
    adapter_of("warp")
    module: Any = sys.modules["jaxbridge._adapters.warp"]
    orders: list[Any] = []
    core = types.SimpleNamespace(stream_order=lambda *order: orders.append(order))
    monkeypatch.setattr(module, "_core", core)
    monkeypatch.setattr(module, "_ScopedAllocator", FakeScopedAllocator)
    runtime = types.SimpleNamespace(default_device="user's")
    devices = [FakeCudaDevice(f"cuda:{i}", runtime) for i in range(2)]
    streams = [FakeWarpStream(70 + i, devices[i % 2]) for i in range(4)]
    return types.SimpleNamespace(
        turn=module._Turn(), devices=devices, streams=streams, orders=orders, runtime=runtime
    )


def test_warp_devices_take_turns(warp_devices: Any) -> None:
    turn, devices, streams = warp_devices.turn, warp_devices.devices, warp_devices.streams
    runtime = warp_devices.runtime
    wrong: list[Any] = []

    def work(stream: Any) -> None:
        device = stream.device
        for _ in range(200):
            turn.take(device, stream)
            time.sleep(0)  # others run
            now = (runtime.default_device, device.stream, device.allocator.inner)
            if now != (device, stream, device.own_allocator):
                wrong.append((device, stream, now))
            turn.give_back()

    threads = [threading.Thread(target=work, args=(streams[i % 4],), daemon=True) for i in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
        assert not t.is_alive()
    assert wrong == []
    assert runtime.default_device == "user's"
    assert [d.stream for d in devices] == ["own stream of cuda:0", "own stream of cuda:1"]
    assert [d.allocator is d.own_allocator for d in devices] == [True, True]
    assert warp_devices.orders == []  # nothing was allocated

    turn.take(devices[0], streams[0])
    with pytest.raises(RuntimeError, match=r"cuda:0 called JAX.*cuda:1"):
        turn.take(devices[1], streams[1])
    turn.give_back()
    assert runtime.default_device == "user's"


def test_warp_frees_after_the_work_of_the_stream(warp_devices: Any) -> None:
    turn, orders = warp_devices.turn, warp_devices.orders
    device, stream = warp_devices.devices[0], warp_devices.streams[0]
    turn.take(device, stream)
    allocator = device.get_allocator()
    assert allocator.memory_kind == "pool"
    kept = [allocator.allocate(8), allocator.allocate(8)]
    allocator.deallocate(kept.pop(), 8)
    assert orders == [(70, 0, 0)]  # before the free
    assert device.own_allocator.freed == [(0x2000, 8)]
    turn.give_back()
    assert orders == [(70, 0, 0)] * 2  # for what outlives the call
    allocator.deallocate(kept.pop(), 8)
    assert orders == [(70, 0, 0)] * 2
    assert len(device.own_allocator.freed) == 2

    # A later call may use what an earlier one has allocated.
    turn.take(device, stream)
    assert device.get_allocator() is allocator
    turn.give_back()
    assert orders == [(70, 0, 0)] * 3

    stream.is_capturing = True
    turn.take(device, stream)
    allocator.deallocate(allocator.allocate(8), 8)
    turn.give_back()
    assert orders == [(70, 0, 0)] * 3

    # Another allocator of the user's.
    stream.is_capturing = False
    device.allocator = other = FakeAllocator()
    turn.take(device, stream)
    device.get_allocator().deallocate(device.get_allocator().allocate(8), 8)
    turn.give_back()
    assert other.freed == [(0x2000, 8)]
    assert device.allocator is other


def test_warp_starts_without_a_greeting() -> None:
    pytest.importorskip("warp", reason="warp is not installed")
    code = (
        "import warp; before = vars(warp.config).copy();"
        "import jaxbridge._adapters as a; a.get('warp');"
        "assert warp.config.log_level == before['log_level']"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout == ""


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


# --- buffer ---


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


# --- numba on CUDA, as far as it goes without a device ---


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


# --- CuPy and torch on CUDA, as far as it goes without a device ---


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

    for name, value in {
        "current_device": lambda: state.device,
        "current_stream": lambda ordinal: state.streams[ordinal],
        "set_stream": set_stream,
        "set_device": set_device,
        "ExternalStream": lambda stream, device: f"external {stream} {device}",
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    sys.modules["jaxbridge._adapters.torch"]._streams.clear()

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
    sys.modules["jaxbridge._adapters.torch"]._streams.clear()


def test_torch_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = adapter_of("torch")
    monkeypatch.setattr("torch.version.cuda", None)
    adapter.check_dtype(np.dtype("float32"), "cpu")
    with pytest.raises(ImportError, match="built for CUDA"):
        adapter.check_dtype(np.dtype("float32"), "cuda")

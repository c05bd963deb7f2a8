# SPDX-License-Identifier: Apache-2.0
"""What the tests of the adapters share: a buffer outside a call, leases, an array of each dtype."""

import ctypes
import sys
from typing import Any

import numpy as np
import pytest

from interchange import DTYPES as ALL
from interchange import STANDARD, dtype_of
from jaxbridge import _adapters

PACKED = ["int2", "uint2", "int4", "uint4", "float4_e2m1fn"]
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

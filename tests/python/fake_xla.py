# SPDX-License-Identifier: Apache-2.0
"""XLA's side of a call on CUDA, on the fake driver: the handlers are called with frames as XLA makes them.

Needs the libraries of tests/cpp, beside the driver that JAXBRIDGE_CUDA_DRIVER names.
"""

import ctypes
import os
from collections.abc import Sequence
from typing import Any

from jaxbridge import _core

_types = {"int32": 4, "float32": 11, "uint8": 6}
_xla = ctypes.CDLL(
    os.path.join(os.path.dirname(os.environ["JAXBRIDGE_CUDA_DRIVER"]), "libfake_xla.so")
)


class _Buffer(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("data", ctypes.c_void_p),
    )


def live_blocks() -> int:
    """How many blocks of the runtime's memory are given out."""
    _xla.fake_xla_live_blocks.restype = ctypes.c_int64
    return int(_xla.fake_xla_live_blocks())


def call(
    target: str,
    operands: Sequence[Any],
    results: Sequence[Any],
    stream: int,
    *,
    key: int = 0,
    spec: str = "",
) -> None:
    """One call of a handler of ours for CUDA; what it returns as an error is raised.

    Args:
        target: its name.
        operands, results: NumPy arrays, which stand for those on the device.
    """
    message = ctypes.create_string_buffer(4096)
    ins, keep = _described(operands)
    outs, also = _described(results)
    code = _xla.fake_xla_call(
        ctypes.c_void_p(_handler(target)),
        ctypes.c_int64(key),
        spec.encode(),
        ctypes.c_void_p(stream),
        ins,
        len(operands),
        outs,
        len(results),
        message,
        ctypes.c_size_t(len(message)),
    )
    del keep, also
    if code:
        raise RuntimeError(message.value.decode())


def _handler(target: str) -> Any:
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    name_of = ctypes.pythonapi.PyCapsule_GetName
    name_of.restype, name_of.argtypes = ctypes.c_char_p, [ctypes.py_object]
    for name, platform, capsule in _core.handlers():
        if (name, platform) == (target, "CUDA"):
            return get(capsule, name_of(capsule))
    raise LookupError([h[:2] for h in _core.handlers()])


def _described(arrays: Sequence[Any]) -> tuple[Any, Any]:
    out = (_Buffer * len(arrays))()
    shapes = []
    for b, a in zip(out, arrays, strict=True):
        shape = (ctypes.c_int64 * a.ndim)(*a.shape)
        shapes.append(shape)
        b.type, b.rank, b.shape, b.data = _types[a.dtype.name], a.ndim, shape, a.ctypes.data
    return out, shapes

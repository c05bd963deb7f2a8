# SPDX-License-Identifier: Apache-2.0
"""Calls on CUDA without a GPU: the handler is called as XLA would, on the fake driver.

"Device memory" is the host's, so NumPy arrays are arrays on the device. Needs the libraries of tests/cpp,
in the directory that JAXBRIDGE_FAKES names, and the driver chosen before anything has loaded one: run in
a process of its own.
"""

import ctypes
import os
import re

import jax
import numpy as np

from fake_cuda import FakeCuda
from jaxbridge import _core

_types = {"int32": 4, "float32": 11, "uint8": 6}


class _Buffer(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("data", ctypes.c_void_p),
    ]


fake = FakeCuda()
fake.reset(1)
_directory = os.path.dirname(os.environ["JAXBRIDGE_CUDA_DRIVER"])
_driver = ctypes.CDLL(os.environ["JAXBRIDGE_CUDA_DRIVER"])
_xla = ctypes.CDLL(os.path.join(_directory, "libfake_xla.so"))


def live_blocks():
    """How many blocks of the runtime's memory are given out."""
    _xla.fake_xla_live_blocks.restype = ctypes.c_int64
    return _xla.fake_xla_live_blocks()


def driver_functions(*names):
    """Functions of the fake driver, by name."""
    found = {}
    for name in names:
        address = ctypes.c_void_p()
        _driver.cuGetProcAddress_v2(
            name.encode(), ctypes.byref(address), 12000, ctypes.c_uint64(0), None
        )
        found[name] = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(address.value)
    return found


def _handler():
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    name_of = ctypes.pythonapi.PyCapsule_GetName
    name_of.restype, name_of.argtypes = ctypes.c_char_p, [ctypes.py_object]
    for name, platform, capsule in _core.handlers():
        if (name, platform) == ("jaxbridge.call", "CUDA"):
            return get(capsule, name_of(capsule))
    raise LookupError([h[:2] for h in _core.handlers()])


def _described(arrays):
    out = (_Buffer * len(arrays))()
    shapes = []
    for b, a in zip(out, arrays, strict=True):
        shape = (ctypes.c_int64 * a.ndim)(*a.shape)
        shapes.append(shape)
        b.type, b.rank, b.shape, b.data = _types[a.dtype.name], a.ndim, shape, a.ctypes.data
    return out, shapes


class Program:
    """The external call of `f` in a program for CUDA: `program(operands, results, stream)`."""

    def __init__(self, f, *args, **kwargs):
        # Holds the call's registration. Keywords are static.
        traced = jax.jit(lambda *operands: f(*operands, **kwargs)).trace(*args)
        self._lowered = traced.lower(lowering_platforms=("cuda",))
        text = self._lowered.as_text()
        self._key = int(re.search(r"key = (-?\d+) : i64", text).group(1))
        raw = re.search(r'spec = "(.*?)"(?=[,}])', text).group(1)
        self._spec = re.sub(r"\\([0-9A-F]{2})", lambda m: chr(int(m.group(1), 16)), raw)

    def __call__(self, operands, results, stream):
        message = ctypes.create_string_buffer(4096)
        ins, keep = _described(operands)
        outs, also = _described(results)
        code = _xla.fake_xla_call(
            ctypes.c_void_p(_handler()),
            ctypes.c_int64(self._key),
            self._spec.encode(),
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


def array(n, value=0):
    """An array "on the device"."""
    return np.full(n, value, np.float32)

# SPDX-License-Identifier: Apache-2.0
"""Calls on CUDA without a GPU: the handler is called as XLA would, on the fake driver.

"Device memory" is the host's, so NumPy arrays are arrays on the device. Needs the libraries of tests/cpp,
in the directory that JAXBRIDGE_FAKES names, and the driver chosen before anything has loaded one: run in
a process of its own.
"""

import copy
import ctypes
import os
import re
import time

import jax
import jax.numpy as jnp
import numpy as np

import fake_xla
import jaxbridge
from fake_cuda import FakeCuda
from jaxbridge import _core, _spec

fake = FakeCuda()
fake.reset(1)
_driver = ctypes.CDLL(os.environ["JAXBRIDGE_CUDA_DRIVER"])


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


class Program:
    """The external call of `f` in a program for CUDA: `program(operands, results, stream)`.

    `capturable`: it is the target that XLA captures.
    """

    def __init__(self, f, *args, capturable=False, **kwargs):
        self._target = "jaxbridge.call_capturable" if capturable else "jaxbridge.call"
        # Holds the call's registration. Keywords are static.
        traced = jax.jit(lambda *operands: f(*operands, **kwargs)).trace(*args)
        self._lowered = traced.lower(lowering_platforms=("cuda",))
        self.text = text = self._lowered.as_text()
        self._key = int(re.search(r"key = (-?\d+) : i64", text).group(1))
        raw = re.search(r'spec = "(.*?)"(?=[,}])', text).group(1)
        self._spec = re.sub(r"\\([0-9A-F]{2})", lambda m: chr(int(m.group(1), 16)), raw)

    def of_parts(self, operands, results):
        """The call of each device, where XLA splits it: on parts of these types, (dtype, shape)."""
        part = copy.copy(self)
        del part._lowered  # only this one holds a registration
        part._spec = _spec.of_part(self._spec, self._key, (operands, results))
        part._key = _spec.key_of(part._spec)
        return part

    def __call__(self, operands, results, stream):
        fake_xla.call(self._target, operands, results, stream, key=self._key, spec=self._spec)


def array(n, value=0):
    """An array "on the device"."""
    return np.full(n, value, np.float32)


# ---- functions on buffers ------------------------------------------------------------------------

N = 16
X = jnp.zeros(N, jnp.float32)


def like(x, *rest, **kw):
    return x


def made(fn, spec=like, **options):
    apart = []  # Functions of equal content would share what other tests have left

    def own(*args, **kwargs):
        return (apart, fn(*args, **kwargs))[1]

    return jaxbridge.call(own, spec, framework="buffer", **{"out": "out", **options})


def copies(v, out):
    _core.copy(v, out)


def longer_than_copies():
    """What a function takes whose calls on new memory are to be replayed on copies: runs are timed."""
    if not jaxbridge.current().capturing:
        time.sleep(0.002)


def copied_slowly(v, out):
    longer_than_copies()
    _core.copy(v, out)


def never_again(program, n, stream):
    """Calls on memory of which no piece comes twice."""
    kept = []
    for k in range(n):
        a, b = array(N, k + 1), array(N)
        program([a], [b], stream)
        np.testing.assert_array_equal(b, a)
        kept.append((a, b))
    return kept

# SPDX-License-Identifier: Apache-2.0
"""Programs about memory on CUDA against the fake driver, each in a process: it is loaded once."""

import textwrap
from pathlib import Path

from fake_cuda import library
from processes import run

START = """
import gc, weakref
import numpy as np
from fake_cuda import FakeCuda
import jaxbridge
from jaxbridge import _core, _views

fake = FakeCuda()
fake.reset()
block = np.arange(24, dtype=np.float32)
fake.declare(block, 1)

class Interface:
    def __init__(self, **fields):
        self.__cuda_array_interface__ = dict(block.__array_interface__, version=3) | fields
        self.kept = block

def raises(kind, text, use):
    try:
        use()
    except kind as error:
        assert text in str(error), error
        return
    raise AssertionError(f"no {kind}")

class OnOneDevice:
    def addressable_data(self, index):
        return self

def trusted_view(capsule, ordinal=None, consumer=None):
    # As an array of JAX's goes out of which the export makes that capsule.
    export = _core.exporter(
        lambda _, stream: capsule, ordinal=ordinal, stream=consumer, readonly=False
    )
    return export(OnOneDevice())

def for_consumer(v, stream, keep=None):
    return trusted_view(v.__dlpack__(stream=-1), 1, (stream, keep))

def waits():
    # (stream that waits, stream that it waits for): an event is used again and again.
    recorded, out = {}, []
    for name, arguments in fake.calls():
        if name == "cuEventRecord":
            recorded[arguments[0]] = arguments[1]
        elif name == "cuStreamWaitEvent":
            out.append((arguments[0], recorded[arguments[1]]))
    return out

def waited(to, source):
    return (to, source) in waits()
"""


def run_with_fake(program: str, start: str = START) -> None:
    done = run(
        start + textwrap.dedent(program) + "\nprint('end')\n",
        path=Path(__file__).parent,
        env={"JAXBRIDGE_CUDA_DRIVER": str(library())},
    )
    assert done.stdout.splitlines()[-1] == "end", done.stderr


# JAX's own steps, put aside.
WITH_STUBS = """
import jax, jax.numpy as jnp
from jaxbridge import _adapters, _compat, _from_external, _imports, _to_external

class Device:
    platform, local_hardware_id = "gpu", 1

class Array:
    # What JAX would make of a capsule, which it keeps.
    def __init__(self, view):
        self.view = view
    def unsafe_buffer_pointer(self):
        return self.view.pointer

device, compute, jaxs = Device(), fake.stream(1), fake.stream(1)
imports = []

def import_dlpack(capsule, device, stream, kind, *, writable):
    imports.append((device, stream, kind))
    return Array(trusted_view(capsule))

_compat.cuda_device = lambda ordinal: {1: device}[ordinal]
_compat.import_stream = lambda d: jaxs
_compat.import_dlpack = import_dlpack
_imports.compute_stream = lambda d: compute

def bring_in(x, **options):
    imports.clear()
    fake.clear_calls()
    return jaxbridge.from_external(x, **options)
"""

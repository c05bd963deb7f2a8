# SPDX-License-Identifier: Apache-2.0
"""What the acceptance cases on a GPU share."""

import contextlib
import ctypes

import jax
import pytest

import jaxbridge


def like(x, *rest, **kw):
    return x


def memory_kind(pointer):
    """What the driver says about an address: "device", "host", or None for memory it does not know."""
    driver = ctypes.CDLL("libcuda.so.1")
    kind = ctypes.c_int(0)
    attribute_memory_type = 2
    failed = driver.cuPointerGetAttribute(
        ctypes.byref(kind), attribute_memory_type, ctypes.c_uint64(pointer)
    )
    return None if failed else {1: "host", 2: "device"}.get(kind.value)


def replayed(fn, spec=like, **options):
    apart = []  # a Function of its own: equal ones share counts and graphs

    def own(*args, **kwargs):
        return (apart, fn(*args, **kwargs))[1]

    return jaxbridge.call(own, spec, graph="replay", **{"out": "out", **options})


def looped(f, n):
    return jax.jit(lambda v: jax.lax.fori_loop(0, n, lambda i, c: f(c), v))


@contextlib.contextmanager
def wide():
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        yield


def second_gpu():
    if len(jax.devices("cuda")) < 2:
        pytest.skip("needs two GPUs")
    return jax.devices("cuda")[1]

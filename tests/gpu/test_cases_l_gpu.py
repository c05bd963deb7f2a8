# SPDX-License-Identifier: Apache-2.0
"""Letter L of the acceptance cases on a GPU: memory pools, contexts and imports."""

import ctypes
import os
import subprocess
import sys
import textwrap
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbridge
from gpu_cases import like

pytestmark = pytest.mark.gpu


@pytest.fixture
def x(gpu):
    return jax.device_put(jnp.arange(4096, dtype=jnp.float32) / 4096, gpu)


def in_a_process(source, *arguments, **environment):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source), *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


PREALLOCATED = {"XLA_PYTHON_CLIENT_PREALLOCATE": "true", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9"}


ALLOCATE = """
    import sys, jax, jax.numpy as jnp, numpy as np, jaxbridge

    framework, scratch = sys.argv[1], sys.argv[2] or None
    x = jax.block_until_ready(jax.device_put(jnp.ones(1024), jax.devices("cuda")[0]))

    if framework == "cupy":
        import cupy as xp
        free, total = xp.cuda.runtime.memGetInfo()
        empty = lambda n: xp.empty(n, "uint8")
    elif framework == "torch":
        import torch as xp
        free, total = xp.cuda.mem_get_info()
        empty = lambda n: xp.empty(n, dtype=xp.uint8, device="cuda")
    elif framework == "numba":
        from numba import cuda
        free, total = cuda.current_context().get_memory_info()
        empty = lambda n: cuda.device_array(n, np.uint8)
    else:
        import warp as wp
        device = wp.get_device("cuda:0")
        free, total = device.free_memory, device.total_memory
        empty = lambda n: wp.empty((n >> 20, 1 << 20), dtype=wp.uint8, device=device)
    assert free < 0.15 * total, (free, total)
    n = int(0.3 * total)
"""


@pytest.mark.parametrize("framework", ["cupy", "torch"])
def test_L01_temporaries_from_xlas_memory(needs, framework):
    """30 % of the device, while JAX holds 90 % of it; again and again, so that each is given back."""
    needs(framework)
    out = in_a_process(
        ALLOCATE
        + """
    def fn(v, out):
        large = empty(n)
        large[-4:] = 3
        out[...] = v + large[-1]

    f = jaxbridge.call(fn, lambda v: v, framework=framework, out="out", scratch=scratch)
    program = jax.jit(lambda v: jax.lax.fori_loop(0, 10, lambda i, c: f(c), v))
    for _ in range(3):
        np.testing.assert_array_equal(program(x), np.full(1024, 31))
    np.testing.assert_array_equal(f(x), np.full(1024, 4))
    print("right")
    """,
        framework,
        "xla",
        **PREALLOCATED,
    )
    assert out.strip() == "right"


@pytest.mark.parametrize("framework", ["cupy", "torch", "numba", "warp"])
def test_L02_out_of_memory_names_preallocation(needs, framework):
    """And the process goes on."""
    needs({"numba": "numba_cuda"}.get(framework, framework))
    out = in_a_process(
        ALLOCATE
        + """
    def fn(v):
        if failing:
            empty(n)
        return v

    f = jaxbridge.call(fn, lambda v: v, framework=framework)
    failing = True
    for program in (f, jax.jit(lambda v: f(v) + 1)):
        try:
            jax.block_until_ready(program(x))
        except Exception as error:
            text = str(error) + "".join(getattr(error, "__notes__", ()))
        assert "XLA_PYTHON_CLIENT_PREALLOCATE=false" in text, text
        assert 'scratch="xla"' in text and "XLA_PYTHON_CLIENT_MEM_FRACTION" in text
    failing = False
    np.testing.assert_array_equal(jax.jit(lambda v: f(v) + 2)(x), np.full(1024, 3))
    print("right")
    """,
        framework,
        "",
        **PREALLOCATED,
    )
    assert out.strip().endswith("right")


class Contexts:
    """The contexts of this thread, asked of the driver itself."""

    def __init__(self):
        self.driver = ctypes.CDLL("libcuda.so.1")

    def __call__(self, name, *args):
        code = getattr(self.driver, name)(*args)
        assert code == 0, f"{name} failed with {code}"

    def current(self):
        context = ctypes.c_void_p()
        self("cuCtxGetCurrent", ctypes.byref(context))
        return context.value

    def primary(self, ordinal):
        context = ctypes.c_void_p()
        self("cuDevicePrimaryCtxRetain", ctypes.byref(context), ordinal)
        self("cuDevicePrimaryCtxRelease_v2", ordinal)
        return context.value

    def push(self, context):
        self("cuCtxPushCurrent_v2", ctypes.c_void_p(context))

    def pop(self):
        self("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))


CONTEXT_FRAMEWORKS = ["cupy", "torch", "numba", "warp", "buffer"]


@pytest.fixture(params=CONTEXT_FRAMEWORKS)
def seeing(request, needs):
    """A Function that notes the context that is current in it, and these notes."""
    if request.param != "buffer":
        needs({"numba": "numba_cuda"}.get(request.param, request.param))
    contexts, seen = Contexts(), []

    def fn(v, out):
        seen.append((jaxbridge.current().device, contexts.current()))
        if request.param == "cupy":
            out[...] = v + 1

    f = jaxbridge.call(fn, like, framework=request.param, out="out")
    return f, seen, contexts, request.param


def test_L03_the_primary_context_on_a_fresh_thread(seeing, x):
    f, seen, contexts, framework = seeing
    jax.block_until_ready(f(x))
    found = []

    def work():
        y = jax.block_until_ready(f(x))
        found.append(framework != "cupy" or np.array_equal(y, np.asarray(x) + 1))

    for _ in range(3):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join(120)
    assert found == [True] * 3
    assert seen == [(0, contexts.primary(0))] * 4


def test_L03_over_a_context_that_is_not_primary(seeing, x):
    """It works in the primary one, and leaves what an operation of JAX's own leaves."""
    f, seen, contexts, framework = seeing
    native = jax.jit(lambda v: v + 1)
    jax.block_until_ready((f(x), native(x)))
    other = ctypes.c_void_p()
    contexts("cuCtxCreate_v2", ctypes.byref(other), 0, 0)
    contexts.pop()

    def left_by(run):
        contexts.push(other.value)
        try:
            return jax.block_until_ready(run(x)), contexts.current()
        finally:
            contexts.pop()

    try:
        (_, expected), (y, left) = left_by(native), left_by(f)
    finally:
        contexts("cuCtxDestroy_v2", other)
    assert left == expected
    if framework == "cupy":
        np.testing.assert_array_equal(y, np.asarray(x) + 1)
    assert seen == [(0, contexts.primary(0))] * 2 and other.value != contexts.primary(0)


def test_L04_memory_of_a_context_that_is_not_primary(needs):
    """As PyCUDA allocates: found by the driver, and refused."""
    contexts = Contexts()
    other, memory = ctypes.c_void_p(), ctypes.c_uint64()
    contexts("cuCtxCreate_v2", ctypes.byref(other), 0, 0)
    try:
        contexts("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(64))

        class Foreign:
            def __init__(self):
                at = {"shape": (16,), "typestr": "<f4", "data": (memory.value, False)}
                self.__cuda_array_interface__ = {**at, "version": 3}

        with pytest.raises(BufferError, match="not the primary one of its device"):
            jaxbridge.from_external(Foreign())
        contexts("cuMemFree_v2", memory)
    finally:
        contexts("cuCtxDestroy_v2", other)


@pytest.mark.parametrize("ordinal", [0, 1])
def test_L03_on_a_thread_bound_to_the_other_gpu(seeing, two_gpus, ordinal):
    f, seen, contexts, framework = seeing
    x = jax.device_put(jnp.arange(16, dtype=jnp.float32), two_gpus[ordinal])
    contexts.push(contexts.primary(1 - ordinal))
    try:
        y = jax.block_until_ready(f(x))
        assert contexts.current() == contexts.primary(ordinal)  # JAX leaves its own
    finally:
        contexts.pop()
    if framework == "cupy":
        np.testing.assert_array_equal(y, np.arange(16) + 1)
    assert seen == [(ordinal, contexts.primary(ordinal))]


@pytest.mark.parametrize("order", [("torch", "jax"), ("jax", "torch")])
def test_L05_jax_keeps_its_gpu(needs, order):
    needs("torch")
    out = in_a_process(
        """
        import sys
        for name in sys.argv[1:]:
            __import__(name)
        import jax, jax.numpy as jnp, jaxbridge, torch
        from jaxbridge import _diagnostics
        f = jaxbridge.call(lambda v: torch.add(v, 1), lambda v: v, framework="torch")
        y = jax.jit(f)(jax.device_put(jnp.arange(3.0), jax.devices("cuda")[0]))
        assert y.tolist() == [1, 2, 3] and torch.cuda.is_available()
        loaded = _diagnostics.report()["loaded"]
        assert loaded["default backend"] == "gpu", loaded
        names = " ".join(loaded["CUDA libraries"])
        assert "/libcuda.so" in names and "/libcudart" in names, loaded
        print("right")
        """,
        *order,
    )
    assert out.strip().endswith("right")


def test_L06_soak_with_growing_allocators(cp, needs, two_gpus):
    """CuPy and torch at work on all devices at once, each with an allocator that grows."""
    needs("torch")
    import torch

    devices = jax.devices("cuda")
    mesh = jax.sharding.Mesh(np.array(devices), "i")
    P = jax.sharding.PartitionSpec

    def by_cupy(v, n, out):
        large = cp.full(int(n) * 65536, 1, "float32")
        out[...] = v + large[-1]

    def by_torch(v, n, out):
        large = torch.ones(n * 65536, dtype=torch.float32, device=v.device)
        torch.add(v, large[-1], out=out)

    def program(n):
        f = jaxbridge.call(by_cupy, like, framework="cupy", out="out")
        g = jaxbridge.call(by_torch, like, framework="torch", out="out")

        def four(v):
            for _ in range(4):
                v = jnp.sin(g(f(v, n), n) * 0) + v + 2
            return v

        return jax.jit(jax.shard_map(four, mesh=mesh, in_specs=P("i"), out_specs=P("i")))

    v = jax.device_put(
        jnp.arange(1024 * len(devices), dtype=jnp.float32),
        jax.sharding.NamedSharding(mesh, P("i")),
    )
    want = np.arange(1024 * len(devices), dtype=np.float32) + 8
    for n in (1, 7, 31, 127, 3):
        step = program(n)
        for _ in range(20):
            np.testing.assert_array_equal(step(v), want)

# SPDX-License-Identifier: Apache-2.0
"""The acceptance cases of letters A to C, E to H, K and L in their forms for a GPU."""

import contextlib
import ctypes
import gc
import os
import subprocess
import sys
import textwrap
import threading
import warnings
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbridge
from jaxbridge import _core, _from_external, _imports, errors

sys.path.insert(0, str(Path(__file__).parents[1] / "python"))
from device_arrays import FLOAT8_OF_TORCH, spin
from interchange import Only, dtype_of, same_bits

pytestmark = pytest.mark.gpu


def like(x, *rest, **kw):
    return x


@pytest.fixture
def cp(needs):
    needs("cupy")
    import cupy

    return cupy


@pytest.fixture
def gpu():
    return jax.devices("cuda")[0]


def memory_kind(pointer):
    """What the driver says about an address: "device", "host", or None for memory it does not know."""
    driver = ctypes.CDLL("libcuda.so.1")
    kind = ctypes.c_int(0)
    attribute_memory_type = 2
    failed = driver.cuPointerGetAttribute(
        ctypes.byref(kind), attribute_memory_type, ctypes.c_uint64(pointer)
    )
    return None if failed else {1: "host", 2: "device"}.get(kind.value)


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("framework", ["cupy", "numpy", "buffer"])
def test_F08_runtime_error_on_a_scalar(cp, gpu, framework, jit):
    """The same catchable error as on the CPU; the process lives on."""

    def fails(v, out):
        raise RuntimeError("on the GPU")

    f = jaxbridge.call(fails, like, framework=framework, out="out")
    x = jax.device_put(jnp.float32(2), gpu)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="on the GPU") as caught, jaxbridge.reraise():
            jax.block_until_ready((jax.jit(f) if jit else f)(x))
        assert type(caught.value) is RuntimeError
        assert float(jaxbridge.call(lambda v: -v, like)(x)) == -2
    cpu = jax.device_put(jnp.float32(2), jax.devices("cpu")[0])
    on_cpu = jaxbridge.call(fails, like, framework="numpy", out="out")
    with pytest.raises(RuntimeError, match="on the GPU") as caught:
        on_cpu(cpu)
    assert type(caught.value) is RuntimeError


def test_F11_a_gibibyte_does_not_leave_the_device(cp, gpu):
    n = 1 << 28  # float32: 1 GiB
    pointers = []

    def add(v, out):
        pointers.append((v.data.ptr, out.data.ptr))
        cp.add(v, 1, out=out)

    f = jaxbridge.call(add, like, out="out")
    x = jax.block_until_ready(jax.device_put(jnp.ones(n, jnp.float32), gpu))
    program = jax.jit(lambda v: f(f(v)).sum())
    expected = float(program(x))
    pointers.clear()
    with jax.transfer_guard("disallow"):
        for _ in range(3):
            y = program(x)
            jax.block_until_ready(y)
            made = cp.cuda.runtime.memGetInfo()
    assert made and float(y) == expected == 3 * n
    assert all(memory_kind(p) == "device" for pair in pointers for p in pair)
    assert pointers[0][0] == x.unsafe_buffer_pointer(), "the operand itself, not a copy"
    assert pointers[0][1] == pointers[1][0], "one call's result is the next one's operand"


def test_F11_results_and_returned_arrays_stay_on_the_device(cp, gpu):
    x = jax.block_until_ready(jax.device_put(jnp.arange(1 << 20, dtype=jnp.float32), gpu))
    f = jax.jit(jaxbridge.call(lambda v: v[::-1] * 2, like))
    f(x)
    with jax.transfer_guard("disallow"):
        y = jax.block_until_ready(f(x))
    assert y.devices() == {gpu}
    np.testing.assert_array_equal(y, np.arange(1 << 20, dtype=np.float32)[::-1] * 2)


@pytest.mark.parametrize("shape", [(), (3,)])
@pytest.mark.parametrize("framework", [None, "cupy", "torch", "numpy", "buffer"])
def test_F12_the_arguments_type_is_the_same_everywhere(cp, gpu, needs, framework, shape):
    if framework == "torch":
        needs("torch")
    types = []

    def fn(out, v):
        types.append((f"{type(v).__module__}.{type(v).__name__}", type(out) is type(v)))

    f = jaxbridge.call(fn, like, framework=framework, out=0, vmap_method="sequential")
    v = jax.device_put(jnp.ones(shape), gpu)
    for program in (
        f,
        jax.jit(f),
        lambda u: jax.lax.scan(lambda c, _: (f(c), None), u, None, length=1)[0],
        lambda u: jax.vmap(f)(u[None]),
        lambda u: jax.lax.cond(True, f, f, u),
    ):
        jax.block_until_ready(program(v))
    want = {
        None: "cupy.ndarray",
        "cupy": "cupy.ndarray",
        "torch": "torch.Tensor",
        "numpy": "numpy.ndarray",
        "buffer": "jaxbridge._core.Buffer",
    }[framework]
    assert {(name.replace("cupy._core.core", "cupy"), same) for name, same in types} == {
        (want, True)
    }
    assert len(types) == 5

    # The platform decides, not the machine: on the CPU it is NumPy.
    types.clear()
    if framework in (None, "numpy"):
        f(jax.device_put(jnp.ones(shape), jax.devices("cpu")[0]))
        assert types == [("numpy.ndarray", True)]


@pytest.mark.parametrize("shape", [(), (1,), (4,), (2, 3)])
@pytest.mark.parametrize("dtype", ["int32", "float32", "complex64"])
def test_F13_one_array_api_function_on_both(cp, gpu, shape, dtype):
    """0-d int32 on a GPU among them; the function writes into what it gets."""

    def double(v, out):
        xp = cp.get_array_module(v)  # CuPy 14 has no __array_namespace__
        out[...] = xp.add(v, v) + xp.asarray(1, dtype=v.dtype)

    def returned(v):
        xp = cp.get_array_module(v)  # CuPy 14 has no __array_namespace__
        return xp.add(v, v) + xp.asarray(1, dtype=v.dtype)

    value = np.full(shape, 20).astype(dtype)
    for device in (jax.devices("cpu")[0], gpu):
        x = jax.device_put(value, device)
        for f in (jaxbridge.call(double, like, out="out"), jaxbridge.call(returned, like)):
            for y in (f(x), jax.jit(f)(x)):
                assert y.shape == shape and y.devices() == {device}
                np.testing.assert_array_equal(y, np.full(shape, 41))


@pytest.mark.parametrize("first_inside_jit", [False, True])
def test_G05_foreign_arrays_go_in_and_out_in_any_order(cp, gpu, first_inside_jit):
    """A foreign array is made and becomes JAX's; then a wrapped function gets it, and its own results."""
    f = jaxbridge.call(lambda v: cp.asfortranarray(v) * 2, like)
    program = jax.jit(lambda v: f(v) + 1)
    if first_inside_jit:
        program(jax.device_put(jnp.zeros((2, 3)), gpu))
    foreign = cp.arange(6, dtype=cp.float32).reshape(2, 3)
    x = jnp.from_dlpack(foreign)
    want = np.arange(6).reshape(2, 3) * 2
    np.testing.assert_array_equal(program(x), want + 1)
    np.testing.assert_array_equal(f(x), want)
    back = cp.from_dlpack(f(x))
    back += 1
    np.testing.assert_array_equal(program(jnp.from_dlpack(back)), (want + 1) * 2 + 1)
    np.testing.assert_array_equal(cp.asnumpy(foreign), want / 2)


def test_G07_a_cpu_function_is_not_called_with_device_memory(cp, gpu):
    rows = jax.device_put(jnp.arange(12, dtype=jnp.float32).reshape(3, 4), gpu)
    ran = []

    def on_host(v):
        ran.append((type(v), memory_kind(v.__array_interface__["data"][0])))
        return v + 1

    only_cpu = jaxbridge.call({"cpu": on_host}, like, framework="numpy")
    for program in (only_cpu, jax.jit(only_cpu)):
        with pytest.raises(errors.PlatformError, match="a function for cpu, none for cuda"):
            program(rows)
    assert not ran
    # Asked for on CUDA too, it gets a copy on the host.
    both = jaxbridge.call(on_host, like, framework="numpy")
    y = jax.jit(both)(rows)
    np.testing.assert_array_equal(y, np.arange(12).reshape(3, 4) + 1)
    assert ran == [(np.ndarray, "host")] and y.devices() == {gpu}
    with jax.default_device(jax.devices("cpu")[0]):
        np.testing.assert_array_equal(only_cpu(jnp.zeros((3, 4))), np.ones((3, 4)))


def test_G15_a_cpu_call_while_a_gpu_is_visible(cp, gpu):
    n = 1_000_000
    cpu = jax.devices("cpu")[0]
    seen = []

    def fn(v):
        seen.append((type(v), jaxbridge.current()))
        return v + 1

    f = jaxbridge.call(fn, like)
    v = np.arange(n, dtype=np.float32)
    for program in (f, jax.jit(f)):
        with jax.default_device(cpu):
            y = program(jnp.asarray(v))
        assert y.devices() == {cpu}
        np.testing.assert_array_equal(y, v + 1)
    y = jax.jit(f)(jax.device_put(v, cpu))
    assert y.devices() == {cpu}
    np.testing.assert_array_equal(y, v + 1)
    assert {t for t, _ in seen} == {np.ndarray}
    assert {c for _, c in seen} == {jaxbridge.Context("cpu", 0, 0, False)}

    seen.clear()
    y = jax.jit(f)(jax.device_put(v, gpu))
    np.testing.assert_array_equal(y, v + 1)
    assert seen[0][0] is cp.ndarray and seen[0][1].platform == "cuda" and seen[0][1].stream != 0


def test_G16_only_the_c_abi_and_pointers_cross_library_borders(cp, gpu):
    """It works with the CUDA that JAX brings, and the extension is linked to no CUDA library."""
    from jaxbridge import _core

    needed = subprocess.run(
        ["readelf", "-d", _core.__file__], capture_output=True, text=True, check=False
    )
    if needed.returncode == 0:
        libraries = [line for line in needed.stdout.splitlines() if "NEEDED" in line]
        assert libraries and not any("cuda" in line or "cudart" in line for line in libraries)
    program = """
import jax, jax.numpy as jnp, jaxbridge
f = jaxbridge.call(lambda v: v + 1, lambda v: v)
x = jax.device_put(jnp.arange(4.0), jax.devices("cuda")[0])
print(jax.jit(lambda v: f(v) * 2)(x).tolist(), jax.lib.__version__)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("[2.0, 4.0, 6.0, 8.0]")


# ---- H: CUDA graphs and command buffers, and G04 -------------------------------------------------


def replayed(fn, spec=like, **options):
    apart = []  # a Function of its own: equal ones share counts and graphs

    def own(*args, **kwargs):
        return (apart, fn(*args, **kwargs))[1]

    return jaxbridge.call(own, spec, graph="replay", **{"out": "out", **options})


def looped(f, n):
    return jax.jit(lambda v: jax.lax.fori_loop(0, n, lambda i, c: f(c), v))


@pytest.fixture
def x(gpu):
    return jax.device_put(jnp.arange(4096, dtype=jnp.float32) / 4096, gpu)


@pytest.fixture
def two_gpus():
    found = jax.devices("cuda")
    if len(found) < 2:
        pytest.skip("needs 2 GPUs")
    return found[:2]


@pytest.mark.parametrize("end", ["clear", "of the executable"])
def test_G04_many_call_sites_with_graphs_are_freed(cp, gpu, end):
    """48 call sites whose graphs have some megabytes of their own each."""
    x = jax.device_put(jnp.ones(1 << 20, jnp.float32), gpu)

    class Step:
        def __init__(self, i):
            self.i = i

        def __call__(self, v, out):
            out[...] = cp.sin(v) * 0 + v + self.i  # temporaries of 4 MiB

    def free():
        gc.collect()
        cp.get_default_memory_pool().free_all_blocks()
        return cp.cuda.runtime.memGetInfo()[0]

    np.testing.assert_array_equal(looped(replayed(Step(1)), 10)(x), np.full(1 << 20, 11))
    jax.clear_caches()
    before = free()
    steps = [Step(i) for i in range(48)]
    ended = [weakref.ref(step) for step in steps]
    functions = [
        jaxbridge.call(step, like, framework="cupy", graph="replay", out="out") for step in steps
    ]
    programs = [looped(f, 10) for f in functions]
    for i, program in enumerate(programs):
        assert float(program(x)[0]) == 1 + 10 * i
    assert all(f.stats()["captures"] >= 1 and f.stats()["replays"] >= 1 for f in functions)
    kept = before - free()
    assert kept > 48 * (4 << 20), kept
    if end == "clear":
        for f in functions:
            f.clear()
        assert before - free() < kept / 4
        for i, program in enumerate(programs):
            assert float(program(x)[0]) == 1 + 10 * i
    else:
        del steps, functions, programs, program
        jax.clear_caches()
        gc.collect()
        assert before - free() < kept / 4
        assert not any(ref() for ref in ended)


def test_H02_a_kernel_that_is_compiled_anew(cp, x):
    """The graph goes on with the kernel that it was captured with."""

    def kernel(amount):
        return cp.RawKernel(
            'extern "C" __global__ void add(const float* v, float* out) {'
            "int i = blockDim.x * blockIdx.x + threadIdx.x;"
            f"out[i] = v[i] + {amount}; }}",
            "add",
        )

    using = {"add": kernel("1.0f")}
    f = replayed(lambda v, out: using["add"]((16,), (256,), (v, out)))
    program = looped(f, 10)
    np.testing.assert_allclose(program(x), np.asarray(x) + 10, rtol=1e-5)
    before = f.stats()["replays"]
    assert before > 0
    using["add"] = kernel("2.0f")
    gc.collect()
    using["add"]((16,), (256,), (cp.zeros(4096, "float32"), cp.zeros(4096, "float32")))
    np.testing.assert_allclose(program(x), np.asarray(x) + 10, rtol=1e-5)
    assert f.stats()["replays"] > before
    f.clear()
    np.testing.assert_allclose(program(x), np.asarray(x) + 20, rtol=1e-5)


def test_H02_a_warp_module_that_is_reloaded(needs, x):
    needs("warp")
    import warp as wp

    from _warp_kernels import slow_add

    def fn(v, out):
        wp.launch(slow_add, dim=v.shape, inputs=[v, 3], outputs=[out])

    f = replayed(fn, framework="warp")
    program = looped(f, 10)
    np.testing.assert_allclose(program(x), np.asarray(x) + 10, rtol=1e-5)
    before = f.stats()["replays"]
    assert before > 0
    slow_add.module.unload()
    gc.collect()
    v, out = (
        wp.zeros(8, dtype=wp.float32, device="cuda:0"),
        wp.zeros(8, dtype=float, device="cuda:0"),
    )
    wp.launch(slow_add, dim=8, inputs=[v, 3], outputs=[out], device="cuda:0")
    assert out.numpy().tolist() == [1] * 8
    np.testing.assert_allclose(program(x), np.asarray(x) + 10, rtol=1e-5)
    assert f.stats()["replays"] > before


@pytest.mark.parametrize("state", ["not donated", "donated", "a Ref"])
def test_H03_a_step_in_a_python_loop(cp, x, state):
    if state == "a Ref":

        def fn(v):
            v += 1

        f = replayed(fn, (), out=None)
        ref = jax.new_ref(x + 0)
        step = jax.jit(lambda r: f(r))
        for _ in range(100):
            step(ref)
        y = ref[...]
    else:
        f = replayed(lambda v, out: cp.add(v, 1, out=out))
        step = jax.jit(f, donate_argnums=0 if state == "donated" else ())
        y = x + 0
        for _ in range(100):
            y = step(y)
    np.testing.assert_allclose(y, np.asarray(x) + 100, rtol=1e-5)
    stats = f.stats()
    assert stats["calls"] == 100
    # XLA alternates between a few addresses: each list is captured once.
    assert 1 <= stats["captures"] <= (2 if state == "a Ref" else 8)
    assert stats["replays"] >= 100 - 3 * 8


def test_H04_a_capture_that_is_invalidated(cp, x):
    """The warning names what failed first, not what failed for it; the work is done."""

    def waits_for_the_device(v, out):
        cp.add(v, 1, out=out)
        cp.cuda.runtime.deviceSynchronize()
        cp.add(out, 0, out=out)

    f = replayed(waits_for_the_device, name="H04.waits_for_the_device")
    program = looped(f, 10)
    reason = "waits_for_the_device.*could not be captured.*(?i:StreamCaptureUnsupported)"
    with pytest.warns(RuntimeWarning, match=reason) as warned:
        np.testing.assert_allclose(program(x), np.asarray(x) + 10, rtol=1e-5)
    assert len(warned) == 1
    stats = f.stats()
    assert stats["calls"] == 10 and stats["replays"] == 0
    other = looped(replayed(lambda v, out: cp.add(v, 2, out=out)), 10)
    np.testing.assert_allclose(other(x), np.asarray(x) + 20, rtol=1e-5)


def test_H05_the_capturable_trait_takes_effect(cp, x):
    """XLA's command buffers run the work without calling the function."""
    runs = {"xla": [], "off": []}

    def program(graph):
        def fn(v, out):
            runs[graph].append(jaxbridge.current().capturing)
            cp.add(v, 1, out=out)

        f = jaxbridge.call(fn, like, graph=graph, out="out")

        def eight(v):
            for _ in range(8):
                v = f(v)
            return v

        return jax.jit(eight)

    for graph in runs:
        run = program(graph)
        for _ in range(20):
            np.testing.assert_allclose(run(x), np.asarray(x) + 8, rtol=1e-5)
    assert runs["off"] == [False] * 160
    assert True in runs["xla"] and len(runs["xla"]) < 160


def test_H06_graphs_on_two_gpus(cp, two_gpus):
    mesh = jax.sharding.Mesh(np.array(two_gpus), "i")
    P = jax.sharding.PartitionSpec
    f = replayed(lambda v, out: cp.add(v, 1 + jaxbridge.current().device, out=out))

    def ten(v):
        for _ in range(10):
            v = f(v)
        return v

    program = jax.jit(jax.shard_map(ten, mesh=mesh, in_specs=P("i"), out_specs=P("i")))
    v = jax.device_put(
        jnp.arange(8192, dtype=jnp.float32), jax.sharding.NamedSharding(mesh, P("i"))
    )
    want = np.arange(8192, dtype=np.float32) + np.repeat([10, 20], 4096)
    for _ in range(6):
        np.testing.assert_array_equal(program(v), want)
    stats = f.stats()
    assert stats["captures"] >= 2 and stats["replays"] > 0 and stats["calls"] == 120


def matmul(cp, a):
    return lambda v, out: cp.matmul(a, v, out=out), lambda v: cp.asnumpy(a) @ v


def solve(cp, a):
    def fn(v, out):
        out[...] = cp.linalg.solve(a, v)

    return fn, lambda v: np.linalg.solve(cp.asnumpy(a), v)


def sparse(cp, a):
    from cupyx.scipy import sparse

    s = sparse.csr_matrix(a)

    def fn(v, out):
        out[...] = s @ v

    return fn, lambda v: cp.asnumpy(a) @ v


def transform(cp, a):
    def fn(v, out):
        out[...] = cp.fft.ifft(cp.fft.fft(v, axis=0), axis=0).real

    return fn, lambda v: v


@pytest.mark.parametrize("make", [matmul, solve, sparse, transform])
def test_H07_libraries_in_a_captured_region(cp, gpu, make):
    """Captured or not: the values are right, and at most one warning says why not."""
    rng = np.random.default_rng(0)
    a = cp.asarray(rng.normal(size=(32, 32)) + 8 * np.eye(32), "float32")
    fn, want = make(cp, a)
    program = jax.jit(replayed(fn, name=f"H07.{make.__name__}"))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(10):
            v = rng.normal(size=(32, 4)).astype(np.float32)
            got = program(jax.device_put(v, gpu))
            np.testing.assert_allclose(got, want(v), rtol=1e-2, atol=1e-2)
    ours = [w for w in warned if issubclass(w.category, RuntimeWarning)]
    assert len(ours) <= 1 and all("could not be captured" in str(w.message) for w in ours)


def test_H07_random_numbers_in_a_captured_region(cp, x):
    def fn(v, out):
        out[...] = v + cp.random.random(v.shape, dtype=cp.float32)

    program = jax.jit(replayed(fn, name="H07.random"))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for k in range(10):
            noise = np.asarray(program(x + k)) - (np.asarray(x) + k)
            assert noise.min() >= -1e-3 and noise.max() <= 1 + 1e-3
            assert 0.4 < noise.mean() < 0.6
    ours = [w for w in warned if issubclass(w.category, RuntimeWarning)]
    assert len(ours) <= 1 and all("could not be captured" in str(w.message) for w in ours)


def test_H08_an_allocation_that_is_not_stream_ordered(cp, x):
    """In the environment of each CUDA major version."""
    runtime = cp.cuda.runtime

    def allocates(v, out):
        pointer = runtime.malloc(1 << 20)
        try:
            cp.add(v, 1, out=out)
        finally:
            runtime.free(pointer)

    f = replayed(allocates, name="H08.allocates")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        np.testing.assert_allclose(looped(f, 20)(x), np.asarray(x) + 20, rtol=1e-5)
    ours = [str(w.message) for w in warned if issubclass(w.category, RuntimeWarning)]
    # Either it was captured, or it ran each time and one warning says so.
    assert (f.stats()["replays"] > 0) != any("could not be captured" in text for text in ours)
    assert f.stats()["calls"] == 20 and len(ours) <= 1


# ---- L: memory pools, contexts, imports ----------------------------------------------------------


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


# ---- letters A to C and E: arrays in and out -----------------------------------------------------


@pytest.fixture
def torch(needs):
    needs("torch")
    import torch

    return torch


@pytest.fixture
def exchange(cp, gpu, monkeypatch):
    """What happens once in a process is done, so that nobody waits for it behind a slow kernel."""
    monkeypatch.setattr(_from_external, "_placement_is_known", True)
    _imports.compute_stream(gpu)
    spin()
    cp.cuda.Device().synchronize()
    return jaxbridge.from_external


@contextlib.contextmanager
def wide():
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        yield


def second_gpu():
    if len(jax.devices("cuda")) < 2:
        pytest.skip("needs two GPUs")
    return jax.devices("cuda")[1]


def test_A02_a_slice_of_cupy(cp, exchange):
    source = cp.arange(6).reshape(2, 3)[:, :2]
    with wide():
        for given in (source, Only(source, "__dlpack__", "__dlpack_device__")):
            np.testing.assert_array_equal(exchange(given), [[0, 1], [3, 4]])
            with pytest.raises(BufferError, match=r"strides \(24, 8\)"):
                exchange(given, copy=False)


def test_A06_a_permuted_tensor(torch, exchange):
    source = torch.arange(24, dtype=torch.float32, device="cuda").reshape(2, 3, 4)
    array = exchange(source.permute(2, 0, 1), copy=False)
    assert array.unsafe_buffer_pointer() == source.data_ptr()
    np.testing.assert_array_equal(array, np.arange(24).reshape(2, 3, 4).transpose(2, 0, 1))
    np.testing.assert_array_equal(jax.jit(lambda v: v * 2)(array), np.asarray(array) * 2)


@pytest.mark.parametrize("protocol", ["itself", "interface"])
def test_A10_gaps_and_repetitions(cp, exchange, protocol):
    sources = [
        cp.arange(10, dtype=cp.float32)[::2],
        cp.broadcast_to(cp.asarray(3, cp.float32), (10,)),
        cp.asfortranarray(cp.arange(12, dtype=cp.float32).reshape(3, 4))[::2, :],
        cp.arange(12, dtype=cp.float32).reshape(3, 4)[::-1, ::-2],
    ]
    for source in sources:
        given = source if protocol == "itself" else Only(source, "__cuda_array_interface__")
        np.testing.assert_array_equal(exchange(given), source.get())
        with pytest.raises(BufferError, match="allow a copy"):
            exchange(given, copy=False)


@pytest.mark.parametrize("protocol", ["itself", "interface"])
@pytest.mark.parametrize("dtype", ["float32", "uint8"])
def test_A14_aligned_to_the_item_only(cp, exchange, dtype, protocol):
    base = cp.arange(1025, dtype=cp.float32).astype(dtype)
    source = base[1:]
    given = source if protocol == "itself" else Only(source, "__cuda_array_interface__")
    array = exchange(given)
    assert array.unsafe_buffer_pointer() % 16 == 0
    np.testing.assert_array_equal(jax.jit(lambda v: v + v)(array), (source + source).get())
    with pytest.raises(BufferError, match="no multiple of 16"):
        exchange(given, copy=False)
    v = jaxbridge.buffer(source.data.ptr, source.shape, dtype, "cuda", owner=source)
    assert v.__cuda_array_interface__["data"][0] == source.data.ptr


def test_A16_pinned_memory(cp, torch, gpu, exchange):
    source = torch.zeros(32).pin_memory()
    source += 3
    if not jaxbridge._compat.imports_pinned_memory:
        with pytest.raises(BufferError, match="takes no pinned memory"):
            exchange(source)
        return
    array = exchange(source, copy=False)
    assert array.sharding.memory_kind == "pinned_host"
    assert array.devices() == {gpu}
    np.testing.assert_array_equal(np.asarray(array), np.full(32, 3, np.float32))
    # CuPy's says that it is NumPy's.
    plain = np.frombuffer(cp.cuda.alloc_pinned_memory(128), np.float32, 32)
    assert exchange(plain).devices() == {jax.devices("cpu")[0]}


def test_A17_a_tensor_of_the_cpu_stays_there(torch, gpu, exchange):
    source = torch.arange(32, dtype=torch.float32)
    array = exchange(source)
    assert array.devices() == {jax.devices("cpu")[0]}
    moved = exchange(source, device=gpu)
    source += 1
    assert moved.devices() == {gpu}
    np.testing.assert_array_equal(moved, np.arange(32))


def test_A18_one_warning(exchange, gpu, monkeypatch):
    monkeypatch.setattr(_from_external, "_placement_is_known", False)
    source = np.ones(3, np.float32)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        array = exchange(source)
        exchange(source)
        assert jax.jit(lambda v: v * 2)(array).devices() == {jax.devices("cpu")[0]}
    assert len(caught) == 1 and "give device= to move it" in str(caught[0].message)
    assert exchange(source, device=gpu).devices() == {gpu}


def test_A20_a_copy_shares_nothing(cp, exchange):
    for device in jax.devices("cuda"):
        x = jax.device_put(jnp.ones(3), device)
        for given in (x, jaxbridge.view(x), jaxbridge.to_external(x, "cupy")):
            array = exchange(given, copy=True)
            assert array.devices() == {device}
            assert not jaxbridge.shares_memory(array, x)
            np.testing.assert_array_equal(array, np.ones(3))


def test_A21_a_copy_of_a_producer_that_cannot_copy(cp, exchange):
    source = cp.ones(3, cp.float32)
    array = exchange(Only(source, "__dlpack__", "__dlpack_device__"), copy=True)
    assert not jaxbridge.shares_memory(array, source)
    np.testing.assert_array_equal(array, np.ones(3))


def test_B02_bfloat16_of_cupy(cp, exchange):
    bits = cp.asarray(np.array([0x3F80, 0x7FC1, 0xFF80, 0x0001], np.uint16))
    from jaxbridge._adapters import cupy as adapter

    if not adapter._has_bfloat16:
        pytest.skip("this CuPy has no bfloat16")
    source = cp.ndarray(4, jnp.dtype("bfloat16"), bits.data)
    array = exchange(source, copy=False)
    assert array.dtype == jnp.bfloat16
    assert array.unsafe_buffer_pointer() == bits.data.ptr
    assert np.asarray(array).view(np.uint16).tolist() == bits.get().tolist()


def test_B03_bool(cp, exchange):
    source = cp.asarray([True, False, True])
    ways = (
        source,
        Only(source, "__cuda_array_interface__"),
        Only(source, "__dlpack__", "__dlpack_device__"),
    )
    for given in ways:
        array = exchange(given)
        assert array.dtype == bool
        assert array.tolist() == [True, False, True]
    out = jaxbridge.to_external(array, "cupy")
    assert out.dtype == bool and out.get().tolist() == [True, False, True]


def test_B05_bool_of_warp(needs, exchange):
    needs("warp")
    import warp as wp

    source = wp.array([True, False, True], dtype=wp.bool, device="cuda:0")
    array = exchange(source)
    assert array.dtype == bool and array.tolist() == [True, False, True]
    assert jaxbridge.to_external(array, "warp").dtype is wp.bool


def test_B06_torch_to_cupy_through_jax(torch, exchange):
    flags = torch.tensor([[True, False]] * 4, device="cuda")
    out = jaxbridge.to_external(exchange(flags), "cupy")
    assert out.dtype == bool and out.shape == (4, 2)
    with pytest.raises(BufferError, match=r"requires grad.*detach"):
        exchange(torch.ones(8, device="cuda", requires_grad=True))


@pytest.mark.parametrize("dtype, text", [("complex64", "<c8"), ("complex128", "<c16")])
def test_B07_complex(cp, torch, gpu, exchange, dtype, text):
    with wide():
        x = jax.device_put(np.zeros(10, dtype) + 2j, gpu)
        v = jaxbridge.view(x)
        assert v.__cuda_array_interface__["typestr"] == text
        for out in (cp.asarray(v), cp.from_dlpack(v), jaxbridge.to_external(x, "cupy")):
            assert out.dtype == dtype and (out.get() == 2j).all()
        lazy = torch.ones(8, dtype=getattr(torch, dtype), device="cuda").conj()
        with pytest.raises(BufferError, match="resolve_conj"):
            exchange(lazy)


@pytest.mark.parametrize("dtype", FLOAT8_OF_TORCH)
def test_B08_float8_of_torch(torch, gpu, exchange, dtype):
    bits = torch.arange(64, dtype=torch.uint8, device="cuda")
    array = exchange(bits.view(getattr(torch, dtype)), copy=False)
    assert array.dtype == dtype_of(dtype)
    assert array.unsafe_buffer_pointer() == bits.data_ptr()
    assert same_bits(np.asarray(array), np.arange(64, dtype=np.uint8).view(dtype_of(dtype)))
    back = jaxbridge.to_external(array, "torch")
    assert back.dtype is getattr(torch, dtype) and back.data_ptr() == bits.data_ptr()


def test_C03_an_empty_array_with_an_address(cp, exchange):
    source = cp.arange(3, dtype=cp.float32)[0:1:-1]
    for given in (source, Only(source, "__cuda_array_interface__")):
        array = exchange(given)
        assert array.shape == (0,)
    v = jaxbridge.view(jnp.zeros(0, device=jax.devices("cuda")[0]))
    assert v.__cuda_array_interface__["data"][0] == 0


def test_C07_a_view_as_the_input_of_a_kernel(needs, gpu, exchange):
    needs("numba_cuda")
    from numba import cuda

    @cuda.jit
    def add_up(x, sums):
        i = cuda.grid(1)
        if i < x.size:
            cuda.atomic.add(sums, i % 2, x[i])

    x = jax.device_put(jnp.arange(10_000, dtype=jnp.float32), gpu)

    def launch(v, out):
        cuda.to_device(np.zeros(2, np.float32), to=out)
        add_up[(v.size + 255) // 256, 256](v, out)

    sums = jaxbridge.call(
        launch, jax.ShapeDtypeStruct((2,), jnp.float32), framework="numba", out="out"
    )
    want = [float(np.arange(0, 10_000, 2).sum()), float(np.arange(1, 10_000, 2).sum())]
    np.testing.assert_allclose(sums(x), want, rtol=1e-5)  # in any order
    # The view itself, outside of a call: its stream is waited for by Numba.
    total = cuda.to_device(np.zeros(2, np.float32))
    add_up[40, 256](cuda.as_cuda_array(jaxbridge.view(x)), total)
    np.testing.assert_allclose(total.copy_to_host(), want, rtol=1e-5)


@pytest.mark.parametrize("version", [2, 3])
def test_C08_interfaces_of_both_versions(cp, exchange, version):
    source = cp.arange(6, dtype=cp.float32).reshape(2, 3)
    stream = cp.cuda.Stream(non_blocking=True)
    fields = dict(source.__cuda_array_interface__, version=version)
    fields.pop("stream", None)
    if version == 3:
        fields["stream"] = stream.ptr

    class Source:
        __cuda_array_interface__ = fields
        kept = source

    with stream:
        spin()
        source += 1
    if version == 2:
        stream.synchronize()
    np.testing.assert_array_equal(exchange(Source(), copy=False), np.arange(6).reshape(2, 3) + 1)
    for change, text in [({"mask": object()}, "mask"), ({"stream": 0}, "stream 0 is not allowed")]:
        Source.__cuda_array_interface__ = fields | change
        with pytest.raises((BufferError, ValueError), match=text):
            exchange(Source())


def test_C09_attributes(gpu):
    on_gpu = jaxbridge.view(jnp.ones(3, device=gpu))
    on_cpu = jaxbridge.view(jnp.ones(3, device=jax.devices("cpu")[0]))
    assert hasattr(on_gpu, "__cuda_array_interface__")
    assert not hasattr(on_cpu, "__cuda_array_interface__")
    assert not hasattr(on_gpu, "__array_interface__")
    with pytest.raises(TypeError, match="on CUDA"):
        np.asarray(on_gpu)
    assert on_gpu.__dlpack_device__() == (2, 0) and on_cpu.__dlpack_device__() == (1, 0)


def test_C10_what_a_strict_consumer_asks(cp, gpu, exchange):
    x = jax.device_put(jnp.eye(2), gpu)
    own = cp.cuda.Stream(non_blocking=True)
    for stream in (None, -1, 1, 2, own.ptr):
        for max_version in (None, (1, 0)):
            v = jaxbridge.view(x)
            capsule = v.__dlpack__(
                stream=stream, max_version=max_version, dl_device=(2, 0), copy=False
            )
            versioned = max_version is not None
            assert ("versioned" in repr(capsule)) == versioned
            again = _core.view_of_capsule(capsule, None, None, None)
            assert (again.pointer, again.readonly) == (x.unsafe_buffer_pointer(), versioned)
    with pytest.raises(ValueError, match="stream 0 is not allowed"):
        jaxbridge.view(x).__dlpack__(stream=0)
    copied = cp.from_dlpack(Only(jaxbridge.view(x), "__dlpack__", "__dlpack_device__"))
    assert (copied.get() == np.eye(2)).all()
    capsule = jaxbridge.view(x).__dlpack__(copy=True, max_version=(1, 0))
    again = _core.view_of_capsule(capsule, None, None, None)
    assert again.pointer != x.unsafe_buffer_pointer() and not again.readonly


def test_C11_no_strides_are_compact(cp, exchange):
    source = cp.random.rand(10_000)
    fields = source.__cuda_array_interface__
    assert fields.get("strides") is None
    with wide():
        array = exchange(Only(source, "__cuda_array_interface__"), copy=False)
        np.testing.assert_array_equal(array, source.get())
        assert jaxbridge.view(array).__cuda_array_interface__["strides"] is None


def test_C12_mapped_and_managed_memory(needs, cp, gpu, exchange):
    needs("numba_cuda")
    from numba import cuda

    mapped = cuda.mapped_array(2**18, dtype=np.float32)
    mapped[:] = 3
    fields = dict(mapped.__cuda_array_interface__)
    fields.pop("stream", None)

    class Source:
        __cuda_array_interface__ = fields
        kept = mapped

    array = exchange(Source(), copy=False)
    assert array.devices() == {gpu}
    assert float(jax.jit(jnp.sum)(array)) == 3 * 2**18
    managed = cp.cuda.malloc_managed(4096)
    block = cp.ndarray(1024, cp.float32, managed)
    block.fill(2)
    for given in (block, Only(block, "__cuda_array_interface__")):
        array = exchange(given, copy=False)
        assert array.unsafe_buffer_pointer() == block.data.ptr
        assert float(jax.jit(jnp.sum)(array)) == 2048


@pytest.mark.parametrize("framework", ["cupy", "torch", "numba", "warp"])
def test_C13_rank_0(needs, gpu, exchange, framework):
    needs({"numba": "numba_cuda"}.get(framework, framework))
    x = jax.device_put(jnp.float32(3), gpu)
    out = jaxbridge.to_external(x, framework)
    assert tuple(out.shape) == ((1,) if framework == "warp" else ())
    back = exchange(out, copy=False)
    assert back.unsafe_buffer_pointer() == x.unsafe_buffer_pointer()
    assert float(back.reshape(())) == 3


def test_C14_C15_the_driver_says_the_device(cp, exchange):
    device = second_gpu()
    with cp.cuda.Device(1):
        source = cp.arange(6, dtype=cp.float32)
        source += 1
    ways = (
        source,
        Only(source, "__cuda_array_interface__"),
        Only(source, "__dlpack__", "__dlpack_device__"),
    )
    for given in ways:
        array = exchange(given, copy=False)
        assert array.devices() == {device}
        np.testing.assert_array_equal(array, np.arange(6) + 1)
    v = jaxbridge.view(array)
    assert v.__dlpack_device__() == (2, 1)
    out = jaxbridge.to_external(array, "cupy")
    assert out.device.id == 1
    assert int(out.sum()) == 21
    strided = exchange(Only(source[::2], "__cuda_array_interface__"))
    assert strided.devices() == {device}
    np.testing.assert_array_equal(strided, [1, 3, 5])
    with pytest.raises(ValueError, match="is on CUDA device 1, not on device 0"):
        jaxbridge.buffer(source.data.ptr, (6,), "f4", "cuda:0")


@pytest.mark.parametrize("size", [2**31 + 17, 2**32 + 17])
def test_C16_more_than_2_and_4_gibibytes(cp, exchange, size):
    source = cp.zeros(size, cp.uint8)
    source[-1] = 7
    array = exchange(source, copy=False)
    assert array.unsafe_buffer_pointer() == source.data.ptr
    assert array.shape == (size,) and array.nbytes == size
    tail = jaxbridge.to_external(array, "cupy")[-1:]
    assert tail.get().tolist() == [7]
    assert int(jax.jit(lambda v: jax.lax.slice(v, (size - 1,), (size,))[0])(array)) == 7


def test_C17_dlpack_or_the_device_is_named(torch, cp, exchange):
    for device in jax.devices("cuda"):
        x = jax.device_put(jnp.ones(5), device)
        tensor = jaxbridge.to_external(x, "torch")
        assert tensor.device == torch.device("cuda", device.local_hardware_id)
        assert torch.from_dlpack(jaxbridge.view(x)).device == tensor.device


def test_D04_memory_with_a_wrong_label():
    host = np.ones(4, np.float32)
    with pytest.raises(ValueError, match="the driver knows no such memory"):
        jaxbridge.buffer(host.ctypes.data, (4,), "f4", "cuda")

    class Source:
        @property
        def __cuda_array_interface__(self):
            return dict(host.__array_interface__, version=3)

    with pytest.raises(ValueError, match="the driver knows no such memory"):
        jaxbridge.from_external(Source())


@pytest.mark.parametrize("library", ["cupy", "cupy by DLPack", "cupy by interface", "torch"])
def test_E02_a_slow_kernel_before_the_import(cp, needs, exchange, library):
    if library == "torch":
        needs("torch")
        import torch
    stream = cp.cuda.Stream(non_blocking=True)
    for i in range(20):
        with stream:
            source = cp.zeros(1 << 18, cp.float32)
            spin()
            source.fill(i)
            if library == "torch":
                with torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)):
                    array = exchange(torch.from_dlpack(source), copy=False)
            elif library == "cupy":
                array = exchange(source, copy=False)
            elif library == "cupy by DLPack":
                array = exchange(Only(source, "__dlpack__", "__dlpack_device__"), copy=False)
            else:
                array = exchange(Only(source, "__cuda_array_interface__"), copy=False)
        assert (np.asarray(jax.jit(lambda v: v + 1)(array)) == i + 1).all()


def test_E03_a_bare_capsule_and_back(cp, gpu, exchange):
    stream = cp.cuda.Stream(non_blocking=True)
    x = jnp.zeros(1 << 22, jnp.float32, device=gpu)
    for _ in range(50):
        capsule = jaxbridge.view(x).__dlpack__(stream=stream.ptr)
        y = exchange(capsule, copy=False)
        assert y.unsafe_buffer_pointer() == x.unsafe_buffer_pointer()
        x = jax.jit(lambda v: v + 1)(y)
    assert (np.asarray(x) == 50).all()
    with stream:
        source = cp.zeros(1 << 20, cp.float32)
        spin()
        source.fill(5)
        capsule = source.__dlpack__(stream=-1)
    assert (np.asarray(exchange(capsule, copy=False)) == 5).all()


def test_E04_streams_of_the_export(torch, gpu, exchange):
    big = torch.empty(1 << 30, dtype=torch.float32, device="cuda")  # 4 GiB
    big.fill_(3)
    array = exchange(big, copy=False)
    assert float(jax.jit(lambda v: v[-1] + v[0])(array)) == 6
    del array, big
    gc.collect()
    x = jnp.full(1 << 20, 4, jnp.float32, device=gpu)
    default = torch.from_dlpack(Only(jaxbridge.view(x), "__dlpack__", "__dlpack_device__"))
    assert (default == 4).all()


def test_E05_a_capture_survives(torch, gpu, exchange):
    source = torch.ones(1 << 10, device="cuda")
    x = jax.block_until_ready(jnp.ones(1 << 10, device=gpu))
    target = torch.zeros(1 << 10, device="cuda")
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    jaxbridge.to_external(x, "torch")
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        target.copy_(jaxbridge.to_external(x, "torch"))
        with pytest.raises(BufferError, match="being captured"):
            exchange(source)
        target.add_(1)
    graph.replay()
    torch.cuda.synchronize()
    assert (target == 2).all()


def test_E06_devices_and_streams_of_the_caller_stay(cp, exchange):
    second_gpu()
    stream = cp.cuda.Stream(non_blocking=True)
    with cp.cuda.Device(1):
        other = cp.ones(16, cp.float32)
    with stream:
        for given in (other, other[::-1], Only(other, "__cuda_array_interface__")):
            array = exchange(given)
            jaxbridge.to_external(array, "cupy")
            assert cp.cuda.runtime.getDevice() == 0
            assert cp.cuda.get_current_stream() == stream
        with pytest.raises(BufferError):
            exchange(other[::-1], copy=False)
        assert cp.cuda.runtime.getDevice() == 0


def test_E07_the_import_owns_the_tensor(torch, cp, gpu, exchange):
    """A long kernel of JAX's is queued, the tensor dropped, and memory of its size filled at once."""
    slow = jaxbridge.call(lambda v, out: (spin(), cp.copyto(out, v)), lambda v: v, out="out")
    program = jax.jit(lambda v: slow(v) + 0)
    size = 1 << 22
    jax.block_until_ready(program(jnp.zeros(size, jnp.float32, device=gpu)))
    stream = torch.cuda.Stream()
    for i in range(3):
        with torch.cuda.stream(stream):
            tensor = torch.full((size,), float(i + 1), device="cuda")
            array = exchange(tensor, copy=False)
            result = program(array)
            del tensor, array
            gc.collect()
            for _ in range(3):
                torch.empty(size, device="cuda").fill_(-1)
        assert (np.asarray(result) == i + 1).all()


@pytest.mark.parametrize("framework", ["cupy", "torch"])
def test_E09_memory_stays_flat(cp, needs, gpu, exchange, framework):
    needs(framework)
    x = jnp.ones((1000, 1000), jnp.float32, device=gpu)
    used = []
    for i in range(2000):
        out = jaxbridge.to_external(x, framework)
        back = exchange(out, copy=True)
        del out, back
        if i in (200, 1999):
            jax.block_until_ready(x)
            cp.cuda.Device().synchronize()
            _core.release_unused()
            free, total = cp.cuda.runtime.memGetInfo()
            used.append(total - free)
    assert used[1] - used[0] < 200 << 20, "of 8 GB that went through"
    assert _core.release_unused() == 0


def test_E11_a_library_with_a_stream_of_its_own(cp, gpu, exchange):
    """Complex transforms, planned on one stream and run on two others."""
    from cupyx.scipy import fft

    streams = [cp.cuda.Stream(non_blocking=True) for _ in range(3)]
    data = np.random.default_rng(0).standard_normal((64, 256)) + 0j
    with streams[0]:
        plan = fft.get_fft_plan(cp.asarray(data, cp.complex64), axes=(1,))
    x = jax.device_put(data.astype(np.complex64), gpu)
    want = np.fft.fft(data, axis=1)
    for stream in streams[1:] * 5:
        with stream:
            transformed = fft.fft(jaxbridge.to_external(x, "cupy"), axis=1, plan=plan)
            spin()
            transformed *= 2
            result = exchange(transformed, copy=False)
        np.testing.assert_allclose(result, 2 * want, rtol=2e-3, atol=2e-3)


def test_E12_a_loss_of_torch_in_a_loop(torch, gpu, exchange):
    def distances(a, b):
        return ((a[:, :, None, :] - b[:, None, :, :]) ** 2).sum(-1).amin(-1)

    result = jax.ShapeDtypeStruct((1, 500), jnp.float32)
    loss = jaxbridge.call(distances, result, framework="torch")
    pure = lambda a, b: ((a[:, :, None, :] - b[:, None, :, :]) ** 2).sum(-1).min(-1)
    rng = np.random.default_rng(0)
    a, b = (jax.device_put(rng.random((1, 500, 3), np.float32), gpu) for _ in range(2))

    @jax.jit
    def step(v):
        return v + 0.01 * loss(v, b)[..., None], loss(v, b) - pure(v, b)

    for _ in range(200):
        a, difference = step(a)
        assert float(jnp.abs(difference).max()) < 1e-5


WAVES = r"""
#include <cupy/complex.cuh>
extern "C" __global__
void waves(const complex<float>* source, const float* points, complex<float>* out, int n, int m, int k,
           float sign) {
  int at = blockIdx.x * blockDim.x + threadIdx.x, batch = blockIdx.y;
  if (at >= k) return;
  source += (long)batch * n * m;
  float x = sign * points[(long)batch * k + at];
  complex<float> sum = 0;
  for (int i = 0; i < n; i++)
    for (int j = 0; j < m; j++)
      sum += source[i * m + j] * exp(complex<float>(0, x * (i + 2 * j)));
  out[(long)batch * k + at] = sum;
}
"""


def at_points(xp, source, points, sign):
    """Sums of waves at points."""
    waves = xp.arange(source.shape[-2])[:, None] + 2 * xp.arange(source.shape[-1])
    phases = xp.exp(1j * sign * points[..., None, None] * waves)
    return (source[..., None, :, :] * phases).sum((-1, -2)).astype("complex64")


def on_gpu(cp, method):
    kernel = cp.RawKernel(WAVES, "waves")

    def run(source, points, sign):
        *batch, n, m = source.shape
        k = points.shape[-1]
        count = int(np.prod(batch))
        out = cp.empty((count, k), cp.complex64)
        args = (source, points, out, n, m, k, np.float32(sign))
        kernel(((k + 31) // 32, count), (32,), args)
        return out.reshape(*batch, k)

    spec = lambda source, points, sign: jax.ShapeDtypeStruct(points.shape, source.dtype)
    return jaxbridge.call(run, spec, framework="cupy", vmap_method=method)


@pytest.mark.parametrize("method", ["sequential", "broadcast_all"])
def test_K06_batched_over_points_and_over_sources_together(cp, gpu, method):
    rng = np.random.default_rng(0)
    sources = (rng.random((3, 10, 11)) + 1j * rng.random((3, 10, 11))).astype(np.complex64)
    points = rng.random((5, 4), np.float32)
    transform = on_gpu(cp, method)
    f = lambda s, p: transform(s, p, 1)
    on = [jax.device_put(a, gpu) for a in (sources, points)]
    got = jax.jit(jax.vmap(jax.vmap(f, (None, 0)), (0, None)))(*on)
    want = [[at_points(np, s, p, 1) for p in points] for s in sources]
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("sign", [1, -1])
def test_K07_static_options_are_those_of_the_cpu(cp, gpu, sign):
    rng = np.random.default_rng(0)
    source = (rng.random((10, 11)) + 1j * rng.random((10, 11))).astype(np.complex64)
    points = rng.random(4, np.float32)
    got = on_gpu(cp, None)(*(jax.device_put(a, gpu) for a in (source, points)), sign)
    np.testing.assert_allclose(got, at_points(np, source, points, sign), rtol=1e-4, atol=1e-3)


def test_K11_the_backward_pass_has_the_forward_shapes(cp, gpu):
    forward = lambda x, w: (x * w).sum(-1)
    backward = lambda x, w, ct: (ct[..., None] * w, (ct[..., None] * x).sum((0, 1, 2)))
    f = jaxbridge.call(forward, lambda x, w: jax.ShapeDtypeStruct(x.shape[:-1], x.dtype))
    b = jaxbridge.call(backward, lambda x, w, ct: (x, w))
    f.defvjp(lambda x, w: (f(x, w), (x, w)), lambda r, ct: b(*r, ct))
    rng = np.random.default_rng(0)
    x = jax.device_put(rng.random((16, 128, 2, 4), np.float32), gpu)
    w = jax.device_put(rng.random(4, np.float32), gpu)
    loss = lambda g: lambda x, w: jnp.sum(jnp.sin(g(x, w)))
    got = jax.jit(jax.grad(loss(f), (0, 1)))(x, w)
    for a, b in zip(got, jax.grad(loss(forward), (0, 1))(x, w), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3)


@pytest.mark.filterwarnings("ignore:.*pmap:DeprecationWarning")
def test_K12_a_loop_is_always_possible(cp, gpu):
    f = jaxbridge.call(lambda x: cp.sort(x)[::-1], like, vmap_method="sequential")
    x = jax.device_put(np.random.default_rng(0).random((1, 3, 5), np.float32), gpu)
    want = np.sort(x, -1)[..., ::-1]
    np.testing.assert_array_equal(jax.vmap(jax.vmap(f))(x), want)
    np.testing.assert_array_equal(jax.pmap(jax.vmap(f), devices=[gpu])(x), want)

# SPDX-License-Identifier: Apache-2.0
"""Native functions on a device: kernels of every origin, libraries, C functions, captures, Refs."""

import ctypes
import gc
import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

root = Path(__file__).parents[2]
sys.path.insert(0, str(root / "tests/python"))
import jaxbridge
from device_arrays import spin
from jaxbridge import _compat, _config
from native_libraries import built, compiler

pytestmark = pytest.mark.gpu
N = 1000
PTX = (root / "benchmarks/noops/add.ptx").read_text()
SIGNATURE = "x: float32[n], out y: float32[n], n: int32"
IN_PLACE = "inout x: float32[n], n: int32"
SOURCE = r"""
extern "C" __global__ void add(float* x, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) x[i] += 1;
}
"""


def kernel(code=PTX, name="add_one", signature=SIGNATURE, **options):
    return jaxbridge.cuda_kernel(
        code, name, signature=signature, grid="(n + 255) // 256", block=256, **options
    )


@pytest.fixture(autouse=True)
def on_the_device():
    with jax.default_device(jax.devices("cuda")[0]):
        yield


@pytest.fixture
def x():
    return jnp.arange(N, dtype=jnp.float32)


@pytest.fixture
def source_is_compiled(tmp_path, monkeypatch):
    if not any(map(_has, ("cuda.core", "cupy"))):
        pytest.skip("needs cuda.core or cupy, and neither is installed")
    monkeypatch.setattr(_config, "cache_directory", str(tmp_path))
    return tmp_path


def _has(name):
    try:
        __import__(name)
    except ImportError:
        return False
    return True


@pytest.fixture(scope="module")
def ops():
    return jaxbridge.load(built("cuda.cpp", "libcudaops", "-ldl"))


# ---- kernels ---------------------------------------------------------------------------------------


def test_ptx_in_order_with_the_program(x):
    f = kernel()
    np.testing.assert_array_equal(f(x), np.arange(N) + 1)
    # Each link needs the one before, on XLA's stream.
    chain = jax.jit(lambda x: jnp.flip(f(jnp.flip(f(2 * x)) * 2)))
    np.testing.assert_array_equal(chain(x), (2 * np.arange(N) + 1) * 2 + 1)
    loop = jax.jit(lambda x: jax.lax.fori_loop(0, 500, lambda i, y: f(y), x))
    np.testing.assert_array_equal(loop(x), np.arange(N) + 500)
    assert f.stats()["calls"] >= 500
    assert f(jnp.zeros(0, jnp.float32)).shape == (0,)  # a grid without blocks


@pytest.mark.parametrize("capturable", [True, False])
def test_in_command_buffers(x, capturable):
    f = kernel(capturable=capturable)

    @jax.jit
    def many(x):
        for _ in range(20):
            x = f(x)
        return x

    for k in range(5):  # replayed, with other addresses
        held = jnp.zeros(N + k)
        np.testing.assert_array_equal(many(x + k), np.arange(N) + k + 20)
        del held


def test_code_is_kept_while_a_program_may_launch_it(x):
    def program_of(f):
        return jax.jit(lambda x: f(f(x)))

    program = program_of(kernel())
    program(x)
    gc.collect()
    for _ in range(3):
        np.testing.assert_array_equal(program(x), np.arange(N) + 2)


def test_source_is_compiled_and_kept_on_disk(x, source_is_compiled):
    f = kernel(SOURCE, "add", IN_PLACE)
    np.testing.assert_array_equal(jax.jit(f)(x), np.arange(N) + 1)
    (file,) = source_is_compiled.iterdir()
    cubin = file.read_bytes()
    assert cubin[:4] == b"\x7fELF"
    np.testing.assert_array_equal(kernel(cubin, "add", IN_PLACE)(x), np.arange(N) + 1)
    with pytest.raises(Exception, match="nothing"):
        kernel("extern nothing", "add", IN_PLACE)(x)


def test_raw_kernel(x):
    cupy = pytest.importorskip("cupy")
    f = kernel(cupy.RawKernel(SOURCE, "add"), None, IN_PLACE)
    np.testing.assert_array_equal(jax.jit(f)(x), np.arange(N) + 1)


def test_numba_kernel_in_a_loop(x):
    """F19: launched by the driver on XLA's stream, with no Python in the loop."""
    cuda = pytest.importorskip("numba.cuda")

    @cuda.jit
    def increment(x, y):
        i = cuda.grid(1)
        if i < y.shape[0]:
            y[i] = x[i] + 1

    f = kernel(increment, None, "x: float32[n], out y: float32[n]")
    loop = jax.jit(lambda x: jax.lax.fori_loop(0, 1000, lambda i, y: f(y), x))
    np.testing.assert_array_equal(loop(x), np.arange(N) + 1000)


def test_dynamic_shared_memory_and_three_axes(source_is_compiled):
    source = r"""
    extern "C" __global__ void reverse(const float* x, float* y, int n, int m) {
      extern __shared__ float row[];
      row[threadIdx.x] = x[blockIdx.y * m + threadIdx.x];
      __syncthreads();
      y[blockIdx.y * m + threadIdx.x] = row[m - 1 - threadIdx.x];
    }
    """
    f = jaxbridge.cuda_kernel(
        source,
        "reverse",
        signature="x: float32[n, m], out y: float32[n, m], n: int32, m: int32",
        grid=(1, "n"),
        block="m",
        shared="64 * 1024 + 4 * m",  # more than a kernel has by default
    )
    x = np.arange(6 * 32, dtype=np.float32).reshape(6, 32)
    np.testing.assert_array_equal(f(x), x[:, ::-1])


def test_what_the_driver_refuses_is_named(x):
    with pytest.raises(jax.errors.JaxRuntimeError, match="the code has no kernel 'sub'"):
        jax.block_until_ready(kernel(name="sub")(x))
    with pytest.raises(jax.errors.JaxRuntimeError, match="cuModuleLoadData"):
        jax.block_until_ready(kernel(".version 8.0\nnonsense\n")(x))
    np.testing.assert_array_equal(kernel()(x), np.arange(N) + 1)  # nothing is broken


# ---- libraries and C functions ---------------------------------------------------------------------


def test_a_library_on_the_stream(ops, x):
    zeros = jnp.zeros((3, N), jnp.int32)
    both = jax.jit(lambda z: ops.fill(z, 7) + 1)
    assert (both(zeros) == 8).all()
    on_cpu = jax.device_put(np.zeros(4, np.int32), jax.devices("cpu")[0])
    np.testing.assert_array_equal(ops.fill(on_cpu, 5), [5] * 4)  # the other function
    for f in (ops.through_scratch, ops.through_workspace):
        np.testing.assert_array_equal(
            jax.jit(lambda x, f=f: f(f(x + 1)) * 2)(x), 2 * np.arange(N) + 2
        )


def test_a_library_in_command_buffers(ops, x):
    many = jax.jit(lambda x: sum(ops.through_workspace(x + i) for i in range(10)))
    for k in range(4):
        np.testing.assert_array_equal(many(x + k), 10 * (np.arange(N) + k) + 45)


def test_state_on_each_device(ops):
    for k, device in enumerate(jax.devices("cuda")):
        zeros = jax.device_put(np.zeros(1, np.int32), device)
        np.testing.assert_array_equal(ops.ordinals(zeros), [k, k])


def test_a_c_function_that_takes_the_stream(x):
    library = ctypes.CDLL(str(built("cuda.cpp", "libcudaops", "-ldl")))
    f = jaxbridge.bind(library.plain_copy, "x: f32[n], out y: f32[n], n: i64, stream -> int32")
    np.testing.assert_array_equal(jax.jit(lambda x: f(f(x + 1)) * 2)(x), 2 * np.arange(N) + 2)


# ---- Refs ------------------------------------------------------------------------------------------


def test_memory_of_others(ops):
    cupy = pytest.importorskip("cupy")
    state = cupy.arange(N, dtype=cupy.int32)
    r = jaxbridge.ref(state)

    @jax.jit
    def program(r):
        r[...] = r[...] + 1
        ops.overwrite(r, 5)
        r[0] += 1

    for _ in range(3):
        program(r)
    with jaxbridge.borrow(r, "cupy") as borrowed:
        assert borrowed.data.ptr == state.data.ptr
        assert borrowed[0] == 6 and (borrowed[1:] == 5).all()


def test_a_kernel_waits_for_the_owner_and_the_owner_for_it(source_is_compiled):
    cupy = pytest.importorskip("cupy")
    f = kernel(SOURCE, "add", IN_PLACE)
    state = cupy.zeros(N, cupy.float32)
    r = jaxbridge.ref(state)
    step = jax.jit(lambda r: f(r))
    step(r)  # compiled
    with jaxbridge.borrow(r, "cupy") as borrowed:
        spin()
        borrowed *= 10
    step(r)
    with jaxbridge.borrow(r, "cupy") as borrowed:
        assert (borrowed == 11).all() and borrowed.data.ptr == state.data.ptr


def test_one_memory_twice_is_an_error(ops):
    cupy = pytest.importorskip("cupy")
    state = cupy.zeros(N, cupy.int32)
    one, other = jaxbridge.ref(state), jaxbridge.from_external(state, copy=False)

    pair = jaxbridge.ffi("jaxbridge.test.pair", None)
    handler = ctypes.CDLL(ops.path).jaxbridge_ffi_overwrite_cuda
    jax.ffi.register_ffi_target("jaxbridge.test.pair", jax.ffi.pycapsule(handler), "CUDA")
    with pytest.raises(jax.errors.JaxRuntimeError, match="are in the same memory"):
        jax.jit(lambda r, x: pair(r, x))(one, other)
        _compat.wait_until_ready(one)


def test_two_devices_at_once(x):
    devices = jax.devices("cuda")
    if len(devices) < 2:
        pytest.skip("needs two devices")
    f = kernel()
    mesh = jax.sharding.Mesh(devices[:2], ("d",))
    spec = jax.sharding.PartitionSpec("d")
    loop = jax.shard_map(
        lambda x: jax.lax.fori_loop(0, 100, lambda i, y: f(y), x),
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
        check_vma=False,
    )
    np.testing.assert_array_equal(jax.jit(loop)(np.asarray(x)), np.arange(N) + 100)


def test_the_stencil_example(source_is_compiled, tmp_path):
    command = [sys.executable, root / "examples/stencil.py", "--size", "128", "--steps", "200"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert float(re.search(r"after 100 steps: (\S+)", done.stdout)[1]) < 1e-4
    assert int(re.search(r"\((\d+) launches\)", done.stdout)[1]) >= 400


def test_the_sparse_example(tmp_path):
    found = importlib.util.find_spec("nvidia")
    roots = [Path(p) / "cu13" for p in (found.submodule_search_locations or ())] if found else []
    roots = [r for r in roots if (r / "include/cudss.h").exists()]
    if not roots:
        pytest.skip("needs nvidia-cudss-cu13, which is not installed")
    library = tmp_path / "libsolve.so"
    command = [compiler(), "-std=c++20", "-O1", "-shared", "-fPIC", "-fvisibility=hidden"]
    command += [f"-I{jaxbridge.get_include()}", f"-I{roots[0]}/include", f"-L{roots[0]}/lib"]
    if (nvcc := shutil.which("nvcc")) is not None:
        command += [f"-I{Path(nvcc).resolve().parents[1]}/include"]
    command += [str(root / "examples/sparse/solve.cpp"), "-o", str(library)]
    command += ["-l:libcudss.so.1", "-l:libcudart.so.13"]
    subprocess.run([*command, f"-Wl,-rpath,{roots[0]}/lib"], check=True)
    command = [sys.executable, root / "examples/sparse/conductivity.py", "--library", library]
    done = subprocess.run([*command, "--size", "12"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    before, after = map(float, re.search(r"misfit (\S+) -> (\S+)", done.stdout).groups())
    assert after < before / 10


# ---- debug mode --------------------------------------------------------------------------------------

SPOILS = r"""
extern "C" __global__ void spoils(float* x, float* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = x[i]++;
}
"""
HALF = r"""
extern "C" __global__ void half(float* x, float* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n / 2) y[i] = x[i] + 1;
}
"""


@pytest.fixture
def debug(monkeypatch):
    monkeypatch.setattr(_config, "debug", True)
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_debug_mode_sees_into_kernels(debug, source_is_compiled, x, jit):
    half = kernel(HALF, "half")
    y = np.asarray((jax.jit(half) if jit else half)(x))
    np.testing.assert_array_equal(y[: N // 2], np.arange(N // 2) + 1)
    assert set(y[N // 2 :].view(np.uint32)) == {0xA5A5A5A5}
    spoils = kernel(SPOILS, "spoils")
    with pytest.raises(jax.errors.JaxRuntimeError, match="argument 'x' was written to"):
        jax.block_until_ready((jax.jit(spoils) if jit else spoils)(x + 0))
    right = kernel(SOURCE, "add", IN_PLACE)
    program = jax.jit(lambda x: jax.lax.fori_loop(0, 30, lambda i, y: right(y) * 1, x))
    np.testing.assert_array_equal(program(x), np.arange(N) + 30)


def test_debug_mode_and_libraries(debug, ops, x):
    assert ops.ordinals(jnp.zeros(2, jnp.int32)).tolist() == [0, 0]
    f = kernel()
    np.testing.assert_array_equal(jax.jit(lambda x: f(f(x)))(x), np.arange(N) + 2)

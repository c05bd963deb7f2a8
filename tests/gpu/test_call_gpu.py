# SPDX-License-Identifier: Apache-2.0
"""`call` on a real device, with each framework: values, streams, order, errors, lifetimes."""

import os
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbridge
from jaxbridge import errors

N = 1 << 20
FRAMEWORKS = ["cupy", "torch", "numba", "warp"]
PACKAGE = {
    "cupy": "cupy",
    "torch": "torch",
    "numba": "numba_cuda",
    "warp": "warp",
    "numpy": "numpy",
}
# Long enough that a missing wait is seen: some 50 ms at 2 GHz.
CYCLES = 100_000_000


def like(x, *rest, **kw):
    return x


@pytest.fixture
def x():
    return jnp.arange(N, dtype=jnp.float32)


class Cupy:
    def __init__(self):
        import cupy

        self.cp = cupy
        self.spin = cupy.RawKernel(
            'extern "C" __global__ void spin(long long n)'
            "{ long long t = clock64(); while (clock64() - t < n) {} }",
            "spin",
        )

    def slow_add(self, v, out):
        """Waits on the device, then out = v + 1, all on the current stream."""
        self.spin((1,), (1,), (CYCLES,))
        self.cp.add(v, 1, out=out)

    def add(self, v, out):
        self.cp.add(v, 1, out=out)

    def returned(self, v):
        return v + 1

    def stream(self):
        return self.cp.cuda.get_current_stream().ptr

    def with_stream(self):
        return self.cp.cuda.Stream(non_blocking=True)


class Torch:
    def __init__(self):
        import torch

        self.torch = torch

    def slow_add(self, v, out):
        self.torch.cuda._sleep(CYCLES)
        self.torch.add(v, 1, out=out)

    def add(self, v, out):
        self.torch.add(v, 1, out=out)

    def returned(self, v):
        return v + 1

    def stream(self):
        return self.torch.cuda.current_stream().cuda_stream

    def with_stream(self):
        return self.torch.cuda.stream(self.torch.cuda.Stream())


class Numba:
    def __init__(self):
        from numba import cuda

        @cuda.jit
        def kernel(v, out, n):
            i = cuda.grid(1)
            s = np.float32(0)
            for _k in range(n):
                s = s * np.float32(0.999) + v[0]
            if i < out.size:
                out[i] = v[i] + np.float32(1) + np.float32(0) * s

        self.cuda = cuda
        self.kernel = kernel

    def slow_add(self, v, out):
        # Without a stream: the legacy default stream, which jaxbridge puts in order.
        self.kernel[(out.size + 255) // 256, 256](v, out, 2_000_000)

    def add(self, v, out):
        stream = self.cuda.external_stream(jaxbridge.current().stream)
        self.kernel[(out.size + 255) // 256, 256, stream](v, out, 0)

    def returned(self, v):
        out = self.cuda.device_array_like(v)
        self.kernel[(v.size + 255) // 256, 256](v, out, 0)
        return out


class Warp:
    def __init__(self):
        import warp as wp

        import _warp_kernels

        self.wp = wp
        self.kernel = _warp_kernels.slow_add

    def slow_add(self, v, out):
        self.wp.launch(self.kernel, dim=v.shape, inputs=[v, 2_000_000], outputs=[out])

    def add(self, v, out):
        self.wp.launch(self.kernel, dim=v.shape, inputs=[v, 0], outputs=[out])

    def returned(self, v):
        out = self.wp.empty_like(v)
        self.wp.launch(self.kernel, dim=v.shape, inputs=[v, 0], outputs=[out])
        return out

    def stream(self):
        return self.wp.get_stream().cuda_stream or 0

    def with_stream(self):
        return self.wp.ScopedStream(self.wp.Stream("cuda:0"))


_made = {}


@pytest.fixture(params=FRAMEWORKS)
def framework(request, needs):
    name = request.param
    needs(PACKAGE[name])
    if name not in _made:
        _made[name] = {"cupy": Cupy, "torch": Torch, "numba": Numba, "warp": Warp}[name]()
    return name, _made[name]


@pytest.mark.parametrize("jit", [False, True])
def test_values(framework, x, jit):
    name, lib = framework
    f = jaxbridge.call(lib.add, like, out=-1, framework=name)
    g = jaxbridge.call(lib.returned, like, framework=name)
    h = lambda v: g(f(v) * 2)
    np.testing.assert_array_equal((jax.jit(h) if jit else h)(x), (np.arange(N) + 1) * 2 + 1)


def test_scan_and_cond(framework, x):
    name, lib = framework
    f = jaxbridge.call(lib.add, like, out=-1, framework=name)

    @jax.jit
    def program(v):
        v, _ = jax.lax.scan(lambda c, _: (f(c), None), v, None, length=20)
        return jax.lax.cond(v[0] > 0, f, lambda u: u, v)

    np.testing.assert_array_equal(program(x), np.arange(N) + 21)


def test_order_before_and_after(framework, x):
    """A slow kernel of XLA's producer, the callee, and XLA's consumer: only order gives these values."""
    name, lib = framework
    slow = jaxbridge.call(lib.slow_add, like, out=-1, framework=name)
    quick = jaxbridge.call(lib.add, like, out=-1, framework=name)

    @jax.jit
    def program(v):
        return quick(slow(v) * 2) + quick(slow(v * 3))

    for _ in range(3):
        got = np.asarray(program(x))
        np.testing.assert_array_equal(got, ((np.arange(N) + 1) * 2 + 1) + (np.arange(N) * 3 + 2))


def test_stream_is_xlas_and_is_restored(framework, x):
    name, lib = framework
    if name == "numba":
        pytest.skip("Numba has no current stream; test_order_before_and_after proves its order")
    seen = []

    def look(v, out):
        seen.append((lib.stream(), jaxbridge.current().stream))
        lib.add(v, out)

    def fail(v, out):
        raise ValueError("on purpose")

    f = jaxbridge.call(look, like, out=-1, framework=name)
    bad = jaxbridge.call(fail, like, out=-1, framework=name)
    before = lib.stream()
    f(x)
    assert lib.stream() == before
    with pytest.raises(ValueError, match="on purpose"):
        bad(x)
    assert lib.stream() == before
    with lib.with_stream():
        inside = lib.stream()
        assert inside != before
        f(x)
        assert lib.stream() == inside
        with pytest.raises(ValueError, match="on purpose"):
            bad(x)
        assert lib.stream() == inside
    assert lib.stream() == before
    assert all(a == b != 0 for a, b in seen) and len(seen) == 2


def test_error_is_the_original_and_the_next_call_works(framework, x):
    name, lib = framework

    class OwnError(Exception):
        pass

    raised = OwnError("x", 3)

    def fail(v, out):
        raise raised

    bad = jaxbridge.call(fail, like, out=-1, framework=name)
    with pytest.raises(OwnError) as caught:
        bad(x)
    assert caught.value is raised
    with pytest.raises(jax.errors.JaxRuntimeError, match="OwnError"):
        jax.block_until_ready(jax.jit(bad)(x))
    with pytest.raises(OwnError), jaxbridge.reraise():
        jax.block_until_ready(jax.jit(lambda v: bad(v) + 1)(x))
    good = jaxbridge.call(lib.add, like, out=-1, framework=name)
    np.testing.assert_array_equal(jax.jit(good)(x), np.arange(N) + 1)


def test_kept_view_is_reported(framework, x):
    name, lib = framework
    kept = []

    def keep(v, out):
        kept.append(v if name == "warp" else v[1:])
        lib.add(v, out)

    with pytest.raises(errors.ViewKeptError, match="argument 0"):
        jaxbridge.call(keep, like, out=-1, framework=name)(x)
    kept.clear()
    np.testing.assert_array_equal(
        jaxbridge.call(lib.add, like, out=-1, framework=name)(x), np.arange(N) + 1
    )


def test_wrong_result(framework, x):
    name, lib = framework
    spec = jax.ShapeDtypeStruct((N,), jnp.int32)
    with pytest.raises(
        errors.ResultError, match=r"expected int32\[1048576\], got float32\[1048576\]"
    ):
        jaxbridge.call(lib.returned, spec, framework=name)(x)


def call_in_two_threads(f, x, times):
    """Each thread calls a function that adds one on what it has returned; values checked."""
    outs = {}

    def run(i):
        v = x + i
        for _ in range(times):
            v = f(v)
        outs[i] = np.asarray(v)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    [t.start() for t in threads]
    [t.join(120) for t in threads]
    for i in range(2):
        np.testing.assert_array_equal(outs[i], np.arange(N) + i + times)


def test_two_threads_at_once(framework, x):
    name, lib = framework
    f = jax.jit(jaxbridge.call(lib.add, like, out=-1, framework=name))
    f(x).block_until_ready()
    call_in_two_threads(f, x, 50)


def test_ref_in_place(framework):
    name, lib = framework
    ref = jax.new_ref(jnp.zeros(N))
    before = ref.unsafe_buffer_pointer()
    f = jaxbridge.call(lambda r: lib.add(r, r), (), framework=name)

    @jax.jit
    def program(r):
        jax.lax.fori_loop(0, 10, lambda i, c: (f(r), c)[1], 0)

    program(ref)
    f(ref)
    np.testing.assert_array_equal(ref[...], np.full(N, 11))
    assert ref.unsafe_buffer_pointer() == before


DTYPES = {
    "cupy": "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 bfloat16 float32 float64 "
    "complex64 complex128",
    "torch": "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 bfloat16 float32 float64 "
    "complex64 complex128 float8_e4m3fn float8_e5m2",
    "numba": "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 "
    "complex128",
    "warp": "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64",
    "numpy": "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 bfloat16 float32 float64 "
    "complex64 complex128 float8_e3m4 float8_e4m3 float8_e4m3b11fnuz float8_e4m3fn float8_e4m3fnuz "
    "float8_e5m2 float8_e5m2fnuz float8_e8m0fnu",
    "buffer": "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 bfloat16 float32 float64 "
    "complex64 complex128 float8_e3m4 float8_e4m3 float8_e4m3b11fnuz float8_e4m3fn float8_e4m3fnuz "
    "float8_e5m2 float8_e5m2fnuz float8_e8m0fnu",
}


@pytest.mark.parametrize("name, dtype", [(n, d) for n, ds in DTYPES.items() for d in ds.split()])
@pytest.mark.parametrize("shape", [(4,), (), (0, 3)])
def test_every_dtype(name, dtype, shape, needs):
    needs(PACKAGE.get(name, "jax"))
    with jax.enable_x64(True):
        v = jnp.broadcast_to(jnp.asarray(1, jnp.dtype(dtype)), shape)
        y = jax.jit(jaxbridge.call(lambda a: a, like, framework=name))(v)
        assert y.dtype == v.dtype and y.shape == shape
        np.testing.assert_array_equal(
            np.asarray(y).reshape(-1).view(np.uint8), np.asarray(v).reshape(-1).view(np.uint8)
        )


@pytest.mark.parametrize(
    "name, dtype", [("cupy", "float8_e5m2"), ("warp", "complex64"), ("numba", "bfloat16")]
)
def test_dtypes_that_a_framework_lacks(name, dtype, needs):
    needs(PACKAGE[name])
    with pytest.raises(TypeError, match=dtype):
        jaxbridge.call(lambda a: a, like, framework=name)(jnp.ones(4, jnp.dtype(dtype)))


# ---- NumPy on CUDA -------------------------------------------------------------------------------


def test_numpy_is_staged(x):
    seen = []

    def fn(a, b, *, out):
        seen.append((type(a), a.flags.writeable, out.flags.writeable))
        np.add(a, b, out=out)

    f = jax.jit(jaxbridge.call(fn, lambda a, b: a, framework="numpy", out="out"))
    for i in range(5):
        np.testing.assert_array_equal(f(x * i, x) * 2, (np.arange(N) * i + np.arange(N)) * 2)
    assert seen[0] == (np.ndarray, False, True)


def test_numpy_staged_after_a_slow_kernel(x, needs):
    needs("cupy")
    lib = Cupy()
    slow = jaxbridge.call(lib.slow_add, like, out=-1, framework="cupy")
    host = jaxbridge.call(lambda a: a + 1, like, framework="numpy")
    f = jax.jit(lambda v: slow(host(slow(v))))
    np.testing.assert_array_equal(f(x), np.arange(N) + 3)


def test_numpy_staged_in_place(x):
    def scale(v):
        v *= 2

    f = jax.jit(jaxbridge.call(scale, like, framework="numpy", inout={0: 0}))
    np.testing.assert_array_equal(f(x), np.arange(N) * 2)
    np.testing.assert_array_equal(x, np.arange(N))


def test_numpy_staged_in_two_threads(x):
    call_in_two_threads(jax.jit(jaxbridge.call(lambda a: a + 1, like, framework="numpy")), x, 20)


# ---- both platforms ------------------------------------------------------------------------------


def test_one_program_on_both_platforms(x, needs):
    needs("cupy")
    kinds = []

    def double(a):
        kinds.append(type(a).__module__.split(".")[0])
        return a * 2

    f = jax.jit(jaxbridge.call(double, like))
    on_gpu, on_cpu = jax.devices("cuda")[0], jax.devices("cpu")[0]
    for device in (on_gpu, on_cpu, on_gpu):
        y = f(jax.device_put(x, device))
        assert y.devices() == {device}
        np.testing.assert_array_equal(y, np.arange(N) * 2)
    assert kinds == ["cupy", "numpy", "cupy"]
    with jax.default_device(on_cpu):
        assert f(jnp.ones(3)).devices() == {on_cpu}
    assert kinds[-1] == "numpy"


def test_buffer_pointers_and_stream(x):
    seen = []

    def look(a, out):
        interface = a.__cuda_array_interface__
        seen.append(
            (a.pointer, a.platform, a.ordinal, a.stream, interface["stream"], a.__dlpack_device__())
        )

    jaxbridge.call(look, like, out=-1, framework="buffer")(x)
    pointer, platform, ordinal, stream, protocol, device = seen[0]
    assert (pointer, platform, ordinal) == (x.unsafe_buffer_pointer(), "cuda", 0)
    assert stream == protocol != 0 and device == (2, 0)


def test_debug_mode():
    code = """
import jax, jax.numpy as jnp, jaxbridge, cupy
def bad(a, out):
    a += 1
    cupy.add(a, 1, out=out)
f = jaxbridge.call(bad, lambda a: a, out=-1)
try:
    f(jnp.ones(8))
except jaxbridge.errors.InputChangedError as e:
    print("changed", e)
g = jaxbridge.call(lambda a: a + 1, lambda a: a)
print(g(jnp.ones(2)))
"""
    env = {**os.environ, "JAXBRIDGE_DEBUG": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "changed" in done.stdout and "[2. 2.]" in done.stdout


def test_no_memory_is_lost(framework):
    """Failures and successes leave no device memory behind."""
    name, lib = framework
    f = jax.jit(jaxbridge.call(lib.add, like, out=-1, framework=name))
    v = jnp.zeros(N)
    f(v).block_until_ready()
    device = jax.devices()[0]
    before = device.memory_stats()["bytes_in_use"]
    for _ in range(200):
        f(v)
    f(v).block_until_ready()
    assert device.memory_stats()["bytes_in_use"] <= before

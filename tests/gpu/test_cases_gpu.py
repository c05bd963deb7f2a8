# SPDX-License-Identifier: Apache-2.0
"""The acceptance cases of letters F and G in their forms for a GPU, with CuPy."""

import ctypes
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbridge
from jaxbridge import errors

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

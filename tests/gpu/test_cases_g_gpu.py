# SPDX-License-Identifier: Apache-2.0
"""Letter G of the acceptance cases on a GPU: registration, caching and binding."""

import gc
import subprocess
import sys
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbridge
from gpu_cases import like, looped, memory_kind, replayed
from jaxbridge import errors

pytestmark = pytest.mark.gpu


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

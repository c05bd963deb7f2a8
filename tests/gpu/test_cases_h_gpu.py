# SPDX-License-Identifier: Apache-2.0
"""Letter H of the acceptance cases: CUDA graphs and command buffers."""

import gc
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbridge
from gpu_cases import like, looped, replayed

pytestmark = pytest.mark.gpu


@pytest.fixture
def x(gpu):
    return jax.device_put(jnp.arange(4096, dtype=jnp.float32) / 4096, gpu)


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

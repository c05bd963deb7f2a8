# SPDX-License-Identifier: Apache-2.0
"""Letter E of the acceptance cases on a GPU: streams and lifetimes."""

import gc
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbridge
from jaxbridge import _core

sys.path.insert(0, str(Path(__file__).parents[1] / "python"))
from device_arrays import spin
from gpu_cases import second_gpu
from interchange import Only

pytestmark = pytest.mark.gpu


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
def test_E07_jax_goes_on_where_it_has_let_go_first(needs, cp, gpu, framework):
    """Memory that only a consumer has is kept until it is done, and JAX's stream does not wait for that."""
    needs(framework)
    twice = jax.jit(lambda v: v * 2)
    x = jnp.ones(1 << 20, jnp.float32, device=gpu)
    twice(twice(x)).block_until_ready()
    pointers = []

    def one():
        array = twice(x)
        pointers.append(array.unsafe_buffer_pointer())
        given = jaxbridge.to_external(array, framework)
        del array
        spin()
        return given.copy() if framework == "cupy" else given.clone()

    one()
    cp.cuda.Device().synchronize()
    pointers.clear()
    copy = one()
    others = [twice(x) for _ in range(8)]
    jax.block_until_ready(others)
    assert not cp.cuda.Stream.null.done, "JAX has waited for the consumer"
    assert pointers[0] not in [a.unsafe_buffer_pointer() for a in others]
    assert (copy.get() if framework == "cupy" else copy.cpu().numpy()).min() == 2
    while _core.release_unused():
        pass


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

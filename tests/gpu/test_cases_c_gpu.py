# SPDX-License-Identifier: Apache-2.0
"""Letter C of the acceptance cases on a GPU: array interfaces."""

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
from gpu_cases import second_gpu, wide
from interchange import Only

pytestmark = pytest.mark.gpu


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

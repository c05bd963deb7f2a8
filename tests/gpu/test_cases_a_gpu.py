# SPDX-License-Identifier: Apache-2.0
"""Letter A of the acceptance cases on a GPU: layouts and copies."""

import sys
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbridge
from jaxbridge import _from_external

sys.path.insert(0, str(Path(__file__).parents[1] / "python"))
from gpu_cases import wide
from interchange import Only

pytestmark = pytest.mark.gpu


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


def test_A16_pinned_memory_comes_first(torch, gpu):
    """Before anything else uses CUDA, by which torch could tell that memory is pinned."""
    from processes import run

    done = run(
        """
        import torch
        import jaxbridge

        array = jaxbridge.from_external(torch.zeros(32).pin_memory(), copy=False)
        print(array.sharding.memory_kind)
        """,
        env={"JAX_PLATFORMS": "cuda,cpu"},
    )
    kind = "pinned_host" if jaxbridge._compat.imports_pinned_memory else "device"
    assert done.stdout.split() == [kind]


@pytest.mark.parametrize("framework", ["numpy", "torch", "numba"])
def test_A16_page_locked_memory_of_jax_goes_out(needs, gpu, framework):
    needs(framework)
    where = jax.sharding.SingleDeviceSharding(gpu, memory_kind="pinned_host")
    array = jax.device_put(np.arange(32, dtype=np.float32), where)
    given = jaxbridge.to_external(array, framework, copy=False)
    pointer = given.data_ptr() if framework == "torch" else given.ctypes.data
    assert pointer == array.unsafe_buffer_pointer()
    np.testing.assert_array_equal(given, np.arange(32))
    assert jaxbridge.view(array).__dlpack_device__() == (3, 0)


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

# SPDX-License-Identifier: Apache-2.0
"""Letter B of the acceptance cases on a GPU: dtypes."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbridge

sys.path.insert(0, str(Path(__file__).parents[1] / "python"))
from device_arrays import FLOAT8_OF_TORCH
from gpu_cases import wide
from interchange import Only, dtype_of, same_bits

pytestmark = pytest.mark.gpu


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

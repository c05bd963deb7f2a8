# SPDX-License-Identifier: Apache-2.0
"""Public failures with layouts and copies: letter A of the acceptance cases, on the CPU."""

import ctypes
import gc
import platform
import subprocess
import sys
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbridge
from fake_buffer import DLManagedTensor, DLTensor
from interchange import Only, memory


def capsule_of(
    array: np.ndarray[Any, Any], strides: Any, byte_offset: int = 0, device: Any = (1, 0)
) -> Any:
    """A hand-made unversioned capsule over a float32 array; `strides` in elements, or None: null."""
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = (
        ctypes.py_object,
        (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p),
    )
    ndim = array.ndim
    shape = (ctypes.c_int64 * max(ndim, 1))(*array.shape)
    steps = None if strides is None else (ctypes.c_int64 * ndim)(*strides)
    managed = DLManagedTensor()
    t = managed.tensor
    t.data, t.device_type, t.device_id = array.ctypes.data - byte_offset, *device
    t.ndim, t.code, t.bits, t.lanes = ndim, 2, 32, 1
    t.shape = ctypes.cast(shape, ctypes.POINTER(ctypes.c_int64))
    if steps is not None:
        t.strides = ctypes.cast(steps, ctypes.POINTER(ctypes.c_int64))
    t.byte_offset = byte_offset
    _kept.append((array, shape, steps, managed))
    return new(ctypes.addressof(managed), b"dltensor", None)


_kept: list[Any] = []


def strides_in(capsule: Any) -> tuple[list[int], int]:
    """The strides and the byte_offset that an unversioned capsule says."""
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    t = ctypes.cast(get(capsule, b"dltensor"), ctypes.POINTER(DLTensor)).contents
    assert t.ndim == 0 or t.strides
    return [t.strides[i] for i in range(t.ndim)], t.byte_offset


def test_A02_a_slice_has_strides(x64):
    source = np.arange(6).reshape(2, 3)[:, :2]
    np.testing.assert_array_equal(jaxbridge.from_external(source), [[0, 1], [3, 4]])
    with pytest.raises(BufferError, match=r"strides \(24, 8\).*copy=None"):
        jaxbridge.from_external(source, copy=False)


@pytest.mark.parametrize("order", [(2, 0, 1), (0, 2, 1), (1, 2, 0)], ids=str)
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_A06_permuted_axes(library, order, needs):
    source = memory(24, np.dtype("f4")).reshape(2, 3, 4)
    if library == "torch":
        needs("torch")
        import torch

        permuted = torch.from_numpy(source).permute(order)
    else:
        permuted = source.transpose(order)
    array = jaxbridge.from_external(permuted, copy=False)
    assert array.unsafe_buffer_pointer() == source.ctypes.data
    np.testing.assert_array_equal(array, source.transpose(order))
    np.testing.assert_array_equal(jax.jit(lambda v: v * 2)(array), source.transpose(order) * 2)


def test_A06_a_refusal_names_shape_strides_and_the_way_out():
    source = memory(48, np.dtype("f4")).reshape(2, 6, 4)[:, ::2].transpose(2, 0, 1)
    with pytest.raises(BufferError, match=r"float32\[4,2,3\].*strides \(4, 96, 32\).*copy=None"):
        jaxbridge.from_external(source, copy=False)


@pytest.mark.parametrize(
    "shape, strides, want",
    [((1, 128), (128, 1), [128, 1]), ((1024, 1), (1, 1024), [1, 1]), ((1, 1), (7, 9), [1, 1])],
)
def test_A07_exported_strides_are_computed_from_the_shape(shape, strides, want):
    source = memory(1024, np.dtype("f4"))[: shape[0] * shape[1]]
    source = np.lib.stride_tricks.as_strided(source, shape, [4 * s for s in strides])
    array = jaxbridge.from_external(source, copy=False)
    assert array.unsafe_buffer_pointer() == source.ctypes.data
    assert strides_in(jaxbridge.view(array).__dlpack__()) == (want, 0)
    assert strides_in(jaxbridge.view(jnp.zeros(shape)).__dlpack__()) == (want, 0)


def test_A08_null_strides_are_compact():
    source = memory(6, np.dtype("f4")).reshape(2, 3)
    array = jaxbridge.from_external(capsule_of(source, None), copy=False)
    np.testing.assert_array_equal(array, source)
    assert array.unsafe_buffer_pointer() == source.ctypes.data
    strides, _ = strides_in(jaxbridge.view(array).__dlpack__())
    assert strides == [3, 1]


def test_A09_a_reversed_axis(x64, needs):
    source = np.arange(12.0).reshape(3, 4)[:, ::-1]
    array = jaxbridge.from_external(source)
    np.testing.assert_array_equal(array, source)
    with pytest.raises(BufferError, match="negative"):
        jaxbridge.from_external(source, copy=False)
    needs("torch")
    # Through us into torch, which has no negative strides: dense by then.
    tensor = jaxbridge.to_external(array, "torch")
    np.testing.assert_array_equal(tensor.numpy(), source)


@pytest.mark.parametrize(
    "make, reason",
    [
        (lambda: np.arange(10, dtype="f4")[::2], "strided"),
        (lambda: np.broadcast_to(np.float32(3), (10,)), "broadcast"),
        (lambda: np.asfortranarray(np.arange(12, dtype="f4").reshape(3, 4))[::2, :], "strided"),
    ],
    ids=["step 2", "stride 0", "column-major rows"],
)
def test_A10_gaps_and_repetitions(make, reason):
    source = make()
    np.testing.assert_array_equal(jaxbridge.from_external(source), source)
    with pytest.raises(BufferError, match=reason):
        jaxbridge.from_external(source, copy=False)


def test_A11_steps_backwards_and_byte_offsets():
    base = memory(120, np.dtype("f4")).reshape(10, 12)
    source = base[::2, ::-2]
    np.testing.assert_array_equal(jaxbridge.from_external(source), source)
    v = jaxbridge.buffer(source.ctypes.data, source.shape, "f4", "cpu", strides=source.strides)
    # The lowest and the highest byte, from the first element.
    assert v.reach == (-40, 4 * 12 * 8 + 4)
    assert not jaxbridge.shares_memory(source, base[1::2])
    assert not jaxbridge.shares_memory(source, base[::2, ::2])
    assert jaxbridge.shares_memory(source, base[0, 1:2])
    # Exported and imported again, and through a capsule with an offset.
    again = jaxbridge.from_external(Only(v, "__dlpack__", "__dlpack_device__"))
    np.testing.assert_array_equal(again, source)
    part = base[4:6]
    array = jaxbridge.from_external(capsule_of(part, (12, 1), byte_offset=192), copy=False)
    assert array.unsafe_buffer_pointer() == part.ctypes.data
    np.testing.assert_array_equal(array, part)


@pytest.mark.parametrize("dtype", ["float32", "uint8"])
def test_A14_an_address_that_xla_does_not_take(dtype):
    source = memory(1025, np.dtype(dtype))[1:]
    array = jaxbridge.from_external(source)
    np.testing.assert_array_equal(jax.jit(lambda v: v + v)(array), source + source)
    with pytest.raises(BufferError, match="is no multiple of 64"):
        jaxbridge.from_external(source, copy=False)
    v = jaxbridge.buffer(source.ctypes.data, source.shape, dtype, "cpu", owner=source)
    assert strides_in(v.__dlpack__()) == ([1], 0)


def test_A15_addresses_are_equal_where_the_alignment_holds():
    """On any machine; on aarch64 by itself."""
    assert platform.machine() in ("x86_64", "aarch64")
    for offset in range(0, 128, 4):
        source = memory(1088, np.dtype("f4"))[offset // 4 :][:1024]
        array = jaxbridge.from_external(source)
        assert (array.unsafe_buffer_pointer() == source.ctypes.data) == (offset % 64 == 0)
        assert jaxbridge.from_external(jaxbridge.empty(3, "f4"), copy=False).shape == (3,)


def test_A16_an_unknown_device_is_named():
    source = memory(6, np.dtype("f4")).reshape(2, 3)
    with pytest.raises(BufferError, match="device type 8 is not supported"):
        jaxbridge.from_external(capsule_of(source, None, device=(8, 0)))


def test_A17_the_device_that_is_asked_for():
    source = memory(8, np.dtype("f4"))
    first, second = jax.devices("cpu")[:2]
    with jax.default_device(second):
        assert jaxbridge.from_external(source).devices() == {first}
    array = jaxbridge.from_external(source, device=second, copy=False)
    # All devices of the CPU have the same memory.
    assert (array.devices(), array.unsafe_buffer_pointer()) == ({second}, source.ctypes.data)
    sharding = jax.sharding.SingleDeviceSharding(second)
    assert jaxbridge.from_external(source, device=sharding).devices() == {second}
    mesh = jax.sharding.Mesh([first, second], "x")
    both = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    with pytest.raises(ValueError, match="2 devices"):
        jaxbridge.from_external(source, device=both)
    # What is JAX's already stays what it is.
    assert jaxbridge.from_external(array) is array
    moved = jaxbridge.from_external(array, device=first)
    assert moved.devices() == {first}
    with pytest.raises(BufferError, match="allow copy=None"):
        jaxbridge.from_external(array, device=first, copy=False)


def test_A19_a_method_alone_and_a_bare_capsule():
    source = memory(6, np.dtype("f4")).reshape(2, 3)
    for given in (Only(source, "__dlpack__"), source.__dlpack__()):
        array = jaxbridge.from_external(given, copy=False)
        assert array.unsafe_buffer_pointer() == source.ctypes.data
    capsule = source.__dlpack__()
    jaxbridge.from_external(capsule)
    with pytest.raises(TypeError, match="has been consumed"):
        jaxbridge.from_external(capsule)
    v = jaxbridge.view(array)
    assert callable(v.__dlpack__) and v.__dlpack_device__() == (1, 0)


@pytest.mark.parametrize("index", [0, 1])
def test_A20_copies_share_nothing_on_any_device(index):
    device = jax.devices("cpu")[index]
    x = jax.device_put(jnp.ones(3), device)
    for source in (x, jaxbridge.view(x), np.asarray(x)):
        array = jaxbridge.from_external(source, copy=True, device=device)
        assert array.devices() == {device}
        assert not jaxbridge.shares_memory(array, x)
        np.testing.assert_array_equal(array, np.ones(3))


def test_A21_a_copy_of_a_producer_that_cannot_copy():
    source = memory(3, np.dtype("f4"))

    class NoCopy:
        def __dlpack__(self, *, stream=None, max_version=None, copy=None):
            assert not copy
            return source.__dlpack__()

        def __dlpack_device__(self):
            return 1, 0

    array = jaxbridge.from_external(NoCopy(), copy=True)
    np.testing.assert_array_equal(array, source)
    assert not jaxbridge.shares_memory(array, source)
    # As a producer we can: for JAX's arrays and for memory of the host.
    for v in (
        jaxbridge.view(jnp.ones(3)),
        jaxbridge.buffer(source.ctypes.data, 3 * (1,), "f4", "cpu"),
    ):
        copied = np.from_dlpack(v, copy=True)
        assert not np.shares_memory(copied, np.asarray(v))
        np.testing.assert_array_equal(copied, np.asarray(v))
        copied[...] = 0


def test_A22_exports_consume_nothing():
    x = jnp.ones(2)
    address = x.unsafe_buffer_pointer()
    capsules = [jaxbridge.view(x).__dlpack__() for _ in range(2)]
    views = [jaxbridge.to_external(x, "numpy") for _ in range(3)]
    np.testing.assert_array_equal(x + 1, [2, 2])
    assert {v.ctypes.data for v in views} == {address}
    # Donated meanwhile: the CPU takes another memory, and what others hold stays as it is.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        y = jax.jit(lambda v: v + 5, donate_argnums=0)(x)
    assert y.unsafe_buffer_pointer() != address
    np.testing.assert_array_equal(views[0], [1, 1])
    np.testing.assert_array_equal(jaxbridge.from_external(capsules[0]), [1, 1])
    del capsules
    gc.collect()


def test_A23_no_elements():
    source = np.empty((1, 8, 0, 128), np.float32)
    strided = np.lib.stride_tricks.as_strided(source, source.shape, (-4, 12, 0, 5))
    for given in (
        source,
        strided,
        source[:, ::-2],
        Only(source, "__dlpack__", "__dlpack_device__"),
    ):
        array = jaxbridge.from_external(given, copy=False)
        assert array.shape == given.shape if isinstance(given, np.ndarray) else source.shape
        assert jaxbridge.to_external(array, "numpy").shape == array.shape
        assert jax.jit(lambda v: v + 1)(array).shape == array.shape
    assert jaxbridge.view(jnp.zeros((1, 8, 0, 128))).__array_interface__["data"] == (0, True)


def test_A18_one_warning_where_jax_computes_elsewhere():
    """With another default platform, which a process without a GPU can only be told."""
    program = """
import warnings, jax, numpy as np, jaxbridge
jax.default_backend = lambda: "gpu"
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(3):
        a = jaxbridge.from_external(np.ones(3, "f4"))
    b = jaxbridge.from_external(np.ones(3, "f4"), device=jax.devices("cpu")[0])
assert [str(w.message) for w in caught if "device=" in str(w.message)] != [], caught
assert len(caught) == 1, caught
assert a.devices() == b.devices() == {jax.devices("cpu")[0]}
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr

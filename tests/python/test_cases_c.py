# SPDX-License-Identifier: Apache-2.0
"""Public failures with array interfaces: letter C of the acceptance cases, in their forms for the CPU."""

import jax.numpy as jnp
import numpy as np
import pytest

import jaxbridge
from interchange import Only, memory
from jaxbridge import _core


class Interface:
    """An object with an array interface alone."""

    def __init__(self, name="__array_interface__", **fields):
        setattr(self, name, fields)


def test_C03_an_empty_array_with_an_address():
    source = np.lib.stride_tricks.as_strided(np.arange(3, dtype="f4"), (0,), (-4,))
    assert source.ctypes.data != 0 and source.strides == (-4,)
    array = jaxbridge.from_external(Only(source, "__array_interface__"), copy=False)
    assert array.shape == (0,)
    assert jaxbridge.view(array).__array_interface__["data"][0] == 0


def fields_of(a, **other):
    return dict(a.__array_interface__, **other)


@pytest.mark.parametrize("on_cuda", [False, True], ids=["cpu", "cuda"])
@pytest.mark.parametrize(
    "change, error, text",
    [
        ({"mask": object()}, BufferError, "has a mask"),
        ({"descr": [("x", "<f4"), ("y", "<f4")], "typestr": "<V8"}, BufferError, "structured"),
        ({"typestr": "<V8"}, BufferError, "raw bytes or a structure"),
        ({"typestr": ">f4"}, BufferError, "other byte order"),
        ({"typestr": 7}, TypeError, "typestr to be a string"),
        ({"shape": (2, -3)}, ValueError, "negative extent"),
        ({"shape": [6]}, TypeError, "shape to be a tuple"),
        ({"shape": (2.5,)}, TypeError, "shape: expected a whole number"),
        ({"shape": (2**70,)}, ValueError, "does not fit 64 bits"),
        ({"strides": (4,)}, ValueError, "1 strides for 2 axes"),
        ({"strides": (2**63 - 1, 4)}, ValueError, "address space"),
        ({"data": None}, TypeError, r"data to be \(address, read-only\)"),
        ({"data": (-4, False)}, ValueError, "no address"),
        ({"data": (0, False)}, ValueError, "address is null"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_C08_what_an_interface_may_not_say(on_cuda, change, error, text):
    """Found before the driver is asked."""
    source = memory(6, np.dtype("f4")).reshape(2, 3)
    with pytest.raises(error, match=text):
        _core.view_of_interface(fields_of(source, **change), None, None, on_cuda)


def test_C08_masked_and_structured_arrays_of_numpy():
    with pytest.raises(BufferError, match="a masked array: fill it in"):
        jaxbridge.from_external(np.ma.array([1.0, 2.0], mask=[True, False]))
    with pytest.raises(TypeError, match="JAX has no arrays of dtype"):
        jaxbridge.from_external(np.zeros(3, [("x", "f4")]))


def test_C08_older_interfaces_lack_fields():
    source = memory(6, np.dtype("f4")).reshape(2, 3)
    fields = {n: source.__array_interface__[n] for n in ("data", "shape", "typestr")}
    array = jaxbridge.from_external(Interface(**fields, version=3))
    assert array.unsafe_buffer_pointer() == source.ctypes.data
    v = _core.view_of_interface(fields, source, None, False)
    assert (v.shape, v.strides, v.readonly) == ((2, 3), (12, 4), False)


def test_C09_attributes_are_there_where_the_protocol_is():
    v = jaxbridge.view(jnp.ones((2, 3)))
    assert not hasattr(v, "__cuda_array_interface__")
    with pytest.raises(AttributeError, match="on the CPU"):
        _ = v.__cuda_array_interface__
    assert v.__dlpack_device__() == (1, 0)
    np.testing.assert_array_equal(np.from_dlpack(v), np.ones((2, 3)))


@pytest.mark.parametrize("max_version", [None, (0, 8), (1, 0), (1, 2), (2, 0)])
@pytest.mark.parametrize("stream", [None, -1])
def test_C10_what_a_strict_consumer_asks(stream, max_version):
    v = jaxbridge.view(jnp.eye(2))
    capsule = v.__dlpack__(stream=stream, max_version=max_version, dl_device=(1, 0), copy=False)
    versioned = max_version is not None and max_version[0] >= 1
    assert repr(capsule).split('"')[1] == ("dltensor_versioned" if versioned else "dltensor")
    again = _core.view_of_capsule(capsule, None, None, None)
    # The older form cannot say it.
    assert again.readonly == versioned
    assert again.pointer == v.pointer
    np.testing.assert_array_equal(again, np.eye(2))
    copied = _core.view_of_capsule(
        v.__dlpack__(max_version=max_version, copy=True), None, None, None
    )
    assert copied.pointer != v.pointer and not copied.readonly
    np.testing.assert_array_equal(copied, np.eye(2))
    with pytest.raises(BufferError, match="on another device"):
        v.__dlpack__(dl_device=(2, 0), copy=False)


def test_C11_no_strides_are_compact_and_exact_ones_exact():
    source = memory(24, np.dtype("f4")).reshape(4, 6)
    assert jaxbridge.view(jaxbridge.from_external(source)).__array_interface__["strides"] is None
    turned = jaxbridge.view(jaxbridge.from_external(source.T, copy=False))
    assert turned.__array_interface__["strides"] == (4, 24)
    np.testing.assert_array_equal(np.asarray(turned), source.T)
    v = _core.view_of_interface(fields_of(source, strides=None), source, None, False)
    assert v.strides == (24, 4)


@pytest.mark.parametrize("framework", ["numpy", "torch", "numba", "warp", "view"])
def test_C13_rank_0_survives(framework, needs):
    if framework not in ("numpy", "view"):
        needs(framework)
    array = jnp.float32(3)
    out = jaxbridge.to_external(array, framework)
    # Warp has no arrays of rank 0: one of length 1 stands for it.
    assert tuple(out.shape) == ((1,) if framework == "warp" else ())
    back = jaxbridge.from_external(out, copy=False)
    assert back.shape == tuple(out.shape)
    assert back.unsafe_buffer_pointer() == array.unsafe_buffer_pointer()
    assert float(back.reshape(())) == 3


def test_C16_sizes_are_64_bit_from_end_to_end():
    """Memory that is only said to be there: nothing of it is touched."""
    size = 2**32 + 5
    v = jaxbridge.buffer(2**40, (size,), "uint8", "cpu", strides=(1,))
    assert (v.nbytes, v.reach, v.layout) == (size, (0, size), "compact")
    again = _core.view_of_capsule(v.__dlpack__(), None, None, v)
    assert (again.shape, again.reach) == ((size,), (0, size))
    v = jaxbridge.buffer(2**40, (3, 2**33), "float32", "cpu")
    assert v.strides == (2**35, 4)
    assert v.nbytes == 3 * 2**35

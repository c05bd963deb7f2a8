# SPDX-License-Identifier: Apache-2.0
"""Arrays in and out: what the matrix (test_interchange.py) and the cases do not show."""

import ctypes
import gc
import itertools
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbridge
from interchange import LAYOUTS, Only, dtype_of, is_dead, memory, same_bits
from jaxbridge import _compat, _core, _from_external, _imports, _to_external, _views

# ---- trees ---------------------------------------------------------------------------------------


def test_trees_in_and_out():
    a, b = memory(4, np.dtype("f4")), memory(6, np.dtype("i4")).reshape(2, 3)
    tree = {"a": a, "rest": [b, (b.T, None)]}
    arrays = jaxbridge.from_external(tree, copy=False)
    assert jax.tree.structure(arrays) == jax.tree.structure(tree)
    assert arrays["rest"][0].unsafe_buffer_pointer() == b.ctypes.data
    out = jaxbridge.to_external(arrays, "numpy")
    assert out["rest"][1][1] is None
    for x, y in zip(jax.tree.leaves(out), jax.tree.leaves(tree), strict=True):
        assert x.ctypes.data == y.ctypes.data
        np.testing.assert_array_equal(x, y)


def test_an_error_names_the_leaf():
    with pytest.raises(TypeError, match="x64") as caught:
        jaxbridge.from_external({"a": [memory(4, np.dtype("f4")), np.zeros(3)]})
    assert caught.value.__notes__ == ["in from_external, at ['a'][1]"]
    with pytest.raises(
        TypeError, match=r"expected a jax\.Array, got builtins.float; .*asarray"
    ) as out:
        jaxbridge.to_external({"a": [jnp.ones(3), 2.0]}, "numpy")
    assert out.value.__notes__ == ["in to_external, at ['a'][1]"]


@pytest.mark.parametrize("given", [1.5, "text", object()], ids=["number", "text", "object"])
def test_what_is_no_array(given):
    with pytest.raises(TypeError, match="expected an array with DLPack"):
        jaxbridge.from_external(given)
    with pytest.raises(TypeError, match=r"expected a jax\.Array, got"):
        jaxbridge.to_external(given, "numpy")


def test_jax_arrays_come_in_as_they_are():
    x = jnp.ones(3)
    assert jaxbridge.from_external(x) is x
    y = jaxbridge.from_external(x, copy=True)
    assert not jaxbridge.shares_memory(x, y)


def test_buffers_of_the_standard_library():
    import array

    for given in (b"abcd", bytearray(b"abcd"), memoryview(b"abcd"), array.array("f", [1, 2, 3])):
        got = jaxbridge.from_external(given)
        np.testing.assert_array_equal(got, np.asarray(memoryview(given)))


def test_protocols_are_tried_in_turn():
    source = memory(4, np.dtype("f4"))

    class Refuses(Only):
        def __dlpack__(self, **_):
            raise BufferError("not today")

        def __dlpack_device__(self):
            return 1, 0

    array = jaxbridge.from_external(Refuses(source, "__array_interface__"), copy=False)
    assert array.unsafe_buffer_pointer() == source.ctypes.data
    with pytest.raises(BufferError, match="not today"):
        jaxbridge.from_external(Refuses(source))


@pytest.mark.parametrize("how", ["deleted", "donated"])
def test_a_deleted_array_does_not_go_out(how):
    """Also after it went out before: older JAX still has what is on its device then."""
    array = jnp.arange(4.0) + 1
    for framework in ("numpy", "view"):
        jaxbridge.to_external(array, framework)
    if how == "deleted":
        array.delete()
    else:
        jax.block_until_ready(jax.jit(lambda v: v + 1, donate_argnums=0)(array))
    for framework in ("numpy", "view", "numpy"):
        with pytest.raises(RuntimeError, match="deleted"):
            jaxbridge.to_external(array, framework)


# ---- tracing and sharding ------------------------------------------------------------------------


def test_tracers_have_no_memory():
    for use in (
        jaxbridge.view,
        jaxbridge.pointer,
        lambda a: jaxbridge.to_external(a, "numpy"),
        lambda a: jaxbridge.shares_memory(a, a),
    ):
        with pytest.raises(TypeError, match=r"traced.*jaxbridge\.call"):
            jax.jit(use)(jnp.ones(3))


def test_memory_of_others_comes_in_while_a_program_is_traced():
    source = memory(6, np.dtype("f4"))
    program = jax.jit(lambda v: v + jaxbridge.from_external(source[::2]))
    np.testing.assert_array_equal(program(jnp.ones(3)), source[::2] + 1)


@pytest.mark.parametrize("replicated", [False, True])
def test_arrays_on_several_devices(replicated):
    mesh = jax.sharding.Mesh(jax.devices("cpu")[:2], "x")
    spec = jax.sharding.PartitionSpec(None if replicated else "x")
    a = jax.device_put(jnp.arange(4.0), jax.sharding.NamedSharding(mesh, spec))
    for use in (jaxbridge.view, jaxbridge.pointer, lambda a: jaxbridge.to_external(a, "numpy")):
        one = "one replica" if replicated else "one shard"
        with pytest.raises(BufferError, match=rf"on 2 devices.*addressable_shards.*{one}"):
            use(a)
    parts = [jaxbridge.to_external(s.data, "numpy") for s in a.addressable_shards]
    for part, shard in zip(parts, a.addressable_shards, strict=True):
        assert part.ctypes.data == shard.data.unsafe_buffer_pointer()
        np.testing.assert_array_equal(part, np.arange(4.0)[shard.index])
    gone = jax.device_put(jnp.arange(4.0), a.sharding)
    gone.delete()
    for use in (jaxbridge.view, jaxbridge.pointer, lambda a: jaxbridge.to_external(a, "numpy")):
        with pytest.raises(RuntimeError, match="deleted or donated"):
            use(gone)


def test_keys_and_refs_say_what_to_pass():
    with pytest.raises(TypeError, match="key_data"):
        jaxbridge.view(jax.random.key(0))
    ref = jax.new_ref(jnp.ones(3))
    with pytest.raises(TypeError, match=r"ref\[\.\.\.\]"):
        jaxbridge.view(ref)
    with pytest.raises(TypeError, match=r"ref\[\.\.\.\]"):
        jaxbridge.from_external(ref)
    assert jaxbridge.pointer(ref) != 0


# ---- to_external ---------------------------------------------------------------------------------


def test_frameworks_that_are_not():
    for tree in (jnp.ones(3), [jnp.ones(3)], ()):
        for framework in ("nump", ["numpy"], {}, None):
            with pytest.raises(ValueError, match=r"framework=.* is not known"):
                jaxbridge.to_external(tree, framework)
    with pytest.raises(TypeError, match="copy='x'"):
        jaxbridge.to_external((), "numpy", copy="x")


def test_a_copy_may_be_written():
    x = jnp.ones(3)
    out = jaxbridge.to_external(x, "numpy", copy=True)
    out[...] = 7
    np.testing.assert_array_equal(x, [1, 1, 1])
    plain = jaxbridge.to_external(x, "numpy")
    with pytest.raises(ValueError, match="read-only"):
        plain[...] = 7
    assert not jaxbridge.to_external(x, "view", copy=True).readonly


def test_warp_has_four_axes(needs):
    needs("warp")
    with pytest.raises(TypeError, match="at most 4 axes, not 5"):
        jaxbridge.to_external(jnp.zeros((1,) * 5), "warp")


def test_cupy_has_none_on_the_cpu(monkeypatch):
    from jaxbridge import _adapters

    class OnCuda:
        platforms = frozenset({"cuda"})

    monkeypatch.setitem(_adapters._loaded, "cupy", OnCuda())
    with pytest.raises(TypeError, match=r'"cupy" has no arrays on cpu.*device_put'):
        jaxbridge.to_external(jnp.ones(3), "cupy")


# ---- views and buffers ---------------------------------------------------------------------------


def test_what_a_buffer_says():
    block = memory(24, np.dtype("f4"))
    source = block.reshape(4, 6)[::-1, ::2]
    v = jaxbridge.buffer(
        source.ctypes.data, source.shape, np.float32, "cpu", strides=source.strides, owner=block
    )
    assert (v.pointer, v.shape, v.strides, v.dtype) == (
        source.ctypes.data,
        (4, 3),
        (-24, 8),
        np.float32,
    )
    assert (v.ndim, v.nbytes, v.platform, v.ordinal, v.memory) == (2, 48, "cpu", 0, "host")
    assert (v.layout, v.stream, v.readonly, v.owner) == ("negative", None, False, block)
    assert v.reach == (-72, 20)
    assert repr(v) == "<jaxbridge view of float32[4,3] in host memory, negative>"
    out = np.asarray(v)
    assert out.ctypes.data == source.ctypes.data and out.base.obj is v
    out[0, 0] = 77
    assert source[0, 0] == 77
    np.testing.assert_array_equal(np.asarray(memoryview(v)), source)
    for asks in (lambda: bytes(memoryview(v).cast("B")), lambda: np.frombuffer(v, np.uint8)):
        with pytest.raises((BufferError, TypeError, ValueError)):
            asks()


class _PyBuffer(ctypes.Structure):
    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.POINTER(ctypes.c_ssize_t)),
        ("strides", ctypes.POINTER(ctypes.c_ssize_t)),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


def _is_granted(exporter, flags):
    out = _PyBuffer()
    try:
        ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(exporter), ctypes.byref(out), flags)
    except (BufferError, ValueError):  # NumPy raises the second
        return False
    ctypes.pythonapi.PyBuffer_Release(ctypes.byref(out))
    return True


@pytest.mark.parametrize("order", ["rows", "columns", "both", "strided"])
def test_a_view_grants_the_buffers_that_numpy_grants(order):
    rows = memory(12, np.dtype("f4")).reshape(3, 4)
    source = {"rows": rows, "columns": rows.T, "both": rows[:1, :1], "strided": rows[:, ::2]}[order]
    v = _views.of(source)[0]
    nd, strides, c, f, either, text = 0x08, 0x18, 0x38, 0x58, 0x98, 0x04
    for flags, with_text in itertools.product((nd, strides, c, f, either), (0, text)):
        granted = _is_granted(v, flags | with_text)
        assert granted == _is_granted(source, flags | with_text), hex(flags | with_text)


@pytest.mark.parametrize(
    "change, error, text",
    [
        ({"dtype": "float4"}, TypeError, "float4"),
        ({"dtype": ">f4"}, TypeError, "another order"),
        ({"shape": (-1,)}, ValueError, "negative extent"),
        ({"shape": (2**62,)}, ValueError, "more bytes"),
        ({"strides": (4, 4)}, ValueError, "2 strides"),
        ({"pointer": 0}, ValueError, "address is null"),
        ({"pointer": -1}, ValueError, "no address"),
        ({"pointer": "x"}, TypeError, "expected the address"),
        ({"device": "gpu"}, ValueError, "'gpu'"),
        ({"device": "cuda:x"}, ValueError, "cuda:x"),
        ({"device": f"cuda:{2**70}"}, ValueError, "cuda:1180"),
        ({"device": "cuda", "stream": object()}, TypeError, "stream object"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_impossible_buffers(change, error, text):
    given = {"pointer": 4096, "shape": (3,), "dtype": "f4", "device": "cpu"} | change
    with pytest.raises(error, match=text):
        jaxbridge.buffer(**given)


def test_devices_of_buffers():
    assert _views._platform_and_ordinal("cuda:3") == ("cuda", 3)
    assert _views._platform_and_ordinal("cpu:0") == ("cpu", 0)
    assert _views._platform_and_ordinal(jax.devices("cpu")[1]) == ("cpu", 0)
    for wrong in ("cpu:1", "cuda:", "cuda:-1", "gpu"):
        with pytest.raises(ValueError, match='expected "cpu", "cuda", "cuda:1"'):
            _views._platform_and_ordinal(wrong)


class _Stream:
    def __init__(self, **attributes):
        self.__dict__.update(attributes)


class _CudaStream:
    def __cuda_stream__(self):
        return 0, 77


def test_streams_of_every_library():
    class Handle:
        value = 77

    given = [77, _CudaStream(), _Stream(cuda_stream=77), _Stream(ptr=77), _Stream(handle=Handle)]
    assert [_views.stream_handle(s) for s in given] == [77] * 5
    assert [_views.stream_handle(s) for s in (0, 1, 2, _Stream(ptr=0))] == [0, 0, 2, 0]


def test_a_view_is_an_argument_of_any_consumer():
    x = jnp.arange(6.0).reshape(2, 3)
    v = jaxbridge.view(x)
    for out in (
        np.asarray(v),
        np.from_dlpack(v),
        np.array(v, copy=False),
        np.asarray(memoryview(v)),
        np.asarray(Only(v, "__array_interface__")),
    ):
        assert out.ctypes.data == x.unsafe_buffer_pointer()
        assert not out.flags.writeable
        np.testing.assert_array_equal(out, x)
    assert np.asarray(v, np.float64).dtype == np.float64
    assert bytes(v) == np.asarray(x).tobytes()


def test_a_released_view_says_so():
    x = jnp.ones(3)
    alive = weakref.ref(x)
    v = jaxbridge.view(x)
    made = np.asarray(v)
    del x
    jaxbridge.release(v)
    for use in (np.asarray, lambda v: v.pointer, lambda v: v.__dlpack__(), jaxbridge.from_external):
        with pytest.raises(ValueError, match="was released"):
            use(v)
    with pytest.raises(BufferError, match="was released"):
        memoryview(v)
    # What was made of it before is still there, and so is its memory.
    del v, use
    np.testing.assert_array_equal(made, [1, 1, 1])
    assert alive() is not None
    del made
    assert is_dead(alive)


def test_a_view_that_was_not_made():
    import warnings

    blank = _core.View.__new__(_core.View)
    with pytest.raises(BufferError, match="no content"):
        memoryview(blank)
    gc.collect()
    with warnings.catch_warnings(), pytest.raises(TypeError):
        warnings.simplefilter("ignore")
        _ = blank.pointer
    with pytest.raises(TypeError):
        type("Sub", (_core.View,), {})


@pytest.mark.parametrize("shape", [(), 3, (2, 3), (0,), (0, 4), (1000, 1000)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "uint8", "complex128", "bfloat16"])
def test_empty_is_aligned(shape, dtype):
    a = jaxbridge.empty(shape, jnp.dtype(dtype))
    assert a.shape == ((shape,) if isinstance(shape, int) else shape)
    assert a.dtype == jnp.dtype(dtype)
    assert a.ctypes.data % 64 == 0 or not a.size
    assert a.flags.writeable and a.flags.c_contiguous


def test_shares_memory_is_exact():
    block = memory(12, np.dtype("f4"))
    a = jaxbridge.from_external(block, copy=False)
    assert jaxbridge.shares_memory(a, block[::2])
    assert not jaxbridge.shares_memory(block[::2], block[1::2])
    assert not jaxbridge.shares_memory(a, jnp.zeros(12))
    assert not jaxbridge.shares_memory(a[:0], block)
    assert jaxbridge.shares_memory(jaxbridge.view(a), jaxbridge.to_external(a, "numpy"))
    ref = jax.new_ref(jnp.ones(3))
    assert jaxbridge.shares_memory(ref, ref)


def test_without_cuda_the_error_says_so():
    with pytest.raises(RuntimeError, match="CUDA device 0, which this JAX does not have"):
        _imports.cuda_device(0)


# ---- the parts of the way in on CUDA that need no device -----------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "dtype", ["float32", "bool", "complex64", "bfloat16", "float8_e5m2", "int8"]
)
def test_a_copy_by_xla_has_any_strides(dtype, layout):
    block = memory(64, dtype_of(dtype))
    source = LAYOUTS[layout](block)
    flat = jaxbridge.from_external(block, copy=False)
    offset, rest = divmod(source.ctypes.data - block.ctypes.data, block.itemsize)
    assert rest == 0
    strides = tuple(s // block.itemsize for s in source.strides)
    got = _from_external._gather(flat, offset, source.shape, strides)
    assert same_bits(got, source)
    assert not jaxbridge.shares_memory(got, block)


def test_the_stream_of_a_device_is_asked_once_and_outside_of_traces():
    second = jax.devices("cpu")[1]
    _imports.compute_stream.cache_clear()

    def program(v):
        assert _imports.compute_stream(second) == 0  # the CPU has none
        return v + 1

    text = str(jax.make_jaxpr(program)(1.0))
    assert "jaxbridge" not in text
    assert jax.jit(program)(1.0) == 2
    assert _imports.compute_stream.cache_info().misses == 1


def test_without_a_cpu_backend_the_error_says_so(monkeypatch):
    def no_backend(**_):
        raise RuntimeError("Unknown backend cpu")

    _imports.cpu_device.cache_clear()
    monkeypatch.setattr(jax, "local_devices", no_backend)
    with pytest.raises(RuntimeError, match=r"no CPU backend.*JAX_PLATFORMS=cuda,cpu"):
        jaxbridge.from_external(memory(4, np.dtype("f4")))


# ---- odd arguments -------------------------------------------------------------------------------


def test_shapes_of_empty():
    assert jaxbridge.empty(np.int64(3), "f4").shape == (3,)
    assert jaxbridge.empty([2, 0], "f4").shape == (2, 0)
    for shape in (-1, (-1,), (2, -1)):
        with pytest.raises(ValueError, match="negative length"):
            jaxbridge.empty(shape, "f4")
    with pytest.raises(TypeError):
        jaxbridge.empty(1.5, "f4")


def test_odd_protocols_are_errors_that_say_so():
    class Array:
        def __init__(self, **attributes):
            vars(self).update(attributes)

    class Refuses:
        def __bool__(self):
            raise KeyError("neither")

    block = memory(4, np.dtype("f4"))
    fields = dict(block.__array_interface__)
    address, _ = fields["data"]
    for flag in (0, None, np.False_, 0.0):
        odd = Array(__cuda_array_interface__=fields | {"data": (address, flag)}, kept=block)
        assert not _core.view_of_interface(odd.__cuda_array_interface__, odd, None, False).readonly
    with pytest.raises(KeyError, match="neither"):
        _core.view_of_interface(fields | {"data": (address, Refuses())}, block, None, False)
    with pytest.raises(
        TypeError, match=r"__cuda_array_interface__ is a builtins\.list; expected a dict"
    ):
        jaxbridge.from_external(Array(__cuda_array_interface__=[1]))
    for device in (None, (1,), "xx", (1, 2, 3)):

        class Odd:
            def __dlpack__(self, **options):
                raise AssertionError("not asked")

            def __dlpack_device__(self, device=device):
                return device

        with pytest.raises(TypeError, match=r"expected \(device type, device id\)"):
            jaxbridge.from_external(Odd())


def test_a_mask_is_not_dropped():
    class Masked:
        def __init__(self):
            self.values = np.arange(4, dtype="f4")
            mask = np.array([1, 0, 1, 0], bool)
            self.__array_interface__ = {**self.values.__array_interface__, "mask": mask}

    with pytest.raises(BufferError, match="masked arrays"):
        jaxbridge.from_external(Masked())


def test_a_tensor_that_is_given_other_memory(needs):
    needs("torch")
    import torch

    tensor = torch.full((1 << 16,), 3.0)
    array = jaxbridge.from_external(tensor, copy=False)
    tensor.data = torch.zeros(4)
    others = [torch.full((1 << 16,), 7.0) for _ in range(4)]
    assert float(array.sum()) == 3 * (1 << 16)
    del others


def test_arrays_of_one_kind_go_one_way(monkeypatch):
    """What was found for the last array is used for the next, whose sharding is another object."""
    first, second = jnp.arange(3.0), jax.device_put(np.ones(4, np.float32))
    for a in (first, second):
        jaxbridge.to_external(a, "numpy")
        before = _to_external._found_route.cache_info()
        np.testing.assert_array_equal(jaxbridge.to_external(a, "numpy"), np.asarray(a))
        assert _to_external._found_route.cache_info() == before
    view = jaxbridge.view(first)
    assert isinstance(view, _core.View) and view.owner is first and view.readonly


def test_what_has_more_axes_than_a_view():
    a = jnp.ones((1,) * 65)
    for use in (jaxbridge.view, lambda a: jaxbridge.to_external(a, "numpy")):
        with pytest.raises(ValueError, match="an array of 65 axes; expected 0 to 64"):
            use(a)


def test_errors_say_what_was_given():
    for shape, what in ((None, "shape is None"), ("ab", "shape is 'ab'"), ((1, 2.5), "2.5")):
        with pytest.raises(TypeError, match=what):
            jaxbridge.empty(shape, np.float32)
        with pytest.raises(TypeError, match=what):
            jaxbridge.buffer(64, shape, "f4", "cpu")
    with pytest.raises(TypeError, match="pointer is '0x10'; expected the address"):
        jaxbridge.buffer("0x10", 3, "f4", "cpu")
    for dtype in (object, "M8[ns]", "S3", [("a", "f4")], jnp.int4, ">f4"):
        with pytest.raises(TypeError, match="empty: from_external takes no arrays of dtype"):
            jaxbridge.empty(3, dtype)
    with pytest.raises(TypeError, match="dtype >f4 has the bytes of a number in another order"):
        jaxbridge.from_external(np.zeros(2, ">f4"))
    with pytest.raises(TypeError, match="JAX has no arrays of dtype object; convert it"):
        jaxbridge.from_external(np.array([None]))
    with pytest.raises(TypeError, match="stream: expected a handle or a stream object"):
        jaxbridge.to_external(jnp.ones(3), "numpy", stream="s")
    with pytest.raises(TypeError, match='"cupy" has no arrays on cpu, where this one is'):
        jaxbridge.to_external(jax.device_put(1.0, jax.devices("cpu")[0]), "cupy")
    if "cuda" not in _compat.local_platforms():
        with pytest.raises(BufferError, match="JAX has no such device in this process"):
            jaxbridge.view(jnp.ones(3)).__dlpack__(dl_device=(2, 0))
    block = jaxbridge.empty(4, np.float32)
    for shape, extents in ((4, (4,)), (np.array([2, 2]), (2, 2)), ([np.int8(4)], (4,))):
        v = jaxbridge.buffer(block.ctypes.data, shape, "f4", "cpu", owner=block)
        assert v.shape == extents and jaxbridge.empty(shape, np.float32).shape == extents

# SPDX-License-Identifier: Apache-2.0
"""Arrays in and out on a device: each library, protocol, layout, dtype and kind of stream, with its value,
address, dtype and lifetime.

As a program it writes what it finds into docs/interchange.md: python tests/gpu/test_interchange_gpu.py
"""

import functools
import gc
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "python"))
import jaxbridge
from device_arrays import FLOAT8_OF_TORCH, blocks, spin, strided
from interchange import (
    DTYPES,
    LAYOUTS,
    SHARED,
    STANDARD,
    Only,
    columns_of,
    dtype_of,
    has,
    is_dead,
    same_bits,
    table,
    table_on_page,
    write_table,
)
from jaxbridge import _core, _from_external, _imports

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not has("cupy"), reason="needs cupy, which is not installed"),
]


@pytest.fixture
def x64():
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        yield


def gpu() -> Any:
    return jax.devices("cuda")[0]


@pytest.fixture(autouse=True)
def warm(monkeypatch):
    """What happens once in a process is done, so that nobody waits for it behind a slow kernel."""
    import cupy as cp

    monkeypatch.setattr(_from_external, "_placement_is_known", True)
    _imports.compute_stream(gpu())
    spin_once()
    cp.zeros(1 << 20, cp.float32).fill(1)
    cp.cuda.Device().synchronize()


@functools.cache
def spin_once() -> None:
    spin()


# ---- in ------------------------------------------------------------------------------------------


def torch_of(a: Any) -> Any:
    """A torch tensor over a CuPy array: as bytes of the same size, with the type put back."""
    import torch

    name = a.dtype.name
    if name in STANDARD:
        return torch.from_dlpack(a)
    return torch.from_dlpack(a.view(f"u{a.itemsize}")).view(getattr(torch, name))


def numba_of(a: Any) -> Any:
    from numba import cuda

    return cuda.as_cuda_array(Only(a, "__cuda_array_interface__"))


def warp_of(a: Any) -> Any:
    import warp as wp

    made = wp.array(
        ptr=a.data.ptr,
        dtype=getattr(wp, a.dtype.name),
        shape=a.shape,
        strides=a.strides,
        device=f"cuda:{a.data.device_id}",
        copy=False,
    )
    made.kept = a
    return made


def buffer_of(a: Any) -> Any:
    import cupy as cp

    return jaxbridge.buffer(
        a.data.ptr, a.shape, a.dtype, "cuda", strides=a.strides, owner=a,
        stream=cp.cuda.get_current_stream(),
    )  # fmt: skip


WAYS = {
    ("cupy", "itself"): lambda a: a,
    ("cupy", "DLPack"): lambda a: Only(a, "__dlpack__", "__dlpack_device__"),
    ("cupy", "capsule"): lambda a: a.__dlpack__(),
    ("cupy", "CUDA array interface"): lambda a: Only(a, "__cuda_array_interface__"),
    ("torch", "itself"): torch_of,
    ("torch", "DLPack"): lambda a: Only(torch_of(a), "__dlpack__", "__dlpack_device__"),
    ("numba", "CUDA array interface"): numba_of,
    ("warp", "itself"): warp_of,
    ("warp", "CUDA array interface"): lambda a: Only(warp_of(a), "__cuda_array_interface__"),
    ("buffer", "itself"): buffer_of,
    ("buffer", "DLPack"): lambda a: Only(buffer_of(a), "__dlpack__", "__dlpack_device__"),
}
PACKAGE = {"numba": "numba_cuda", "buffer": "cupy"}
ALL = set(DTYPES)
CUPY = {*STANDARD, "bfloat16"}
TORCH = {*STANDARD, "bfloat16", *FLOAT8_OF_TORCH}
WARP = {n for n in STANDARD if not n.startswith("complex")}
KNOWS = {
    ("cupy", "itself"): CUPY,
    ("torch", "itself"): TORCH,
    ("torch", "DLPack"): {*STANDARD, "bfloat16"},
    ("warp", "itself"): WARP,
    ("warp", "CUDA array interface"): WARP,
    ("buffer", "itself"): ALL,
    ("buffer", "DLPack"): ALL,
}
HAS_NOT = {
    "torch": {"negative", "broadcast"},  # CuPy's exporter makes these, not torch's importer
    "numba": {"broadcast"},
    "warp": {"rank 0", "no elements", "broadcast", "negative", "axes of length 1"},
}


def ways() -> list[tuple[str, str]]:
    return [w for w in WAYS if has(PACKAGE.get(w[0], w[0]))]


def is_there(way: tuple[str, str], layout: str, dtype: str) -> bool:
    return layout not in HAS_NOT.get(way[0], ()) and dtype in KNOWS.get(way, STANDARD)


def bring_in(way: tuple[str, str], layout: str, dtype: str, copy: bool | None) -> str:
    """One cell: "shared" or "copied", after value, address, dtype and lifetime were checked."""
    base, host, memory = blocks(dtype_of(dtype))
    like = LAYOUTS[layout](host)
    want = like.copy()
    source = strided(base, like, host) if dtype in CUPY else None
    if source is None:  # a type that CuPy does not have: bytes, and the type said anew
        as_bytes = strided(base, like.view("u1"), host)
        if way[0] == "torch":
            import torch

            given = torch.from_dlpack(as_bytes).view(getattr(torch, dtype))
        else:
            v = jaxbridge.buffer(
                as_bytes.data.ptr,
                like.shape,
                like.dtype,
                "cuda",
                strides=like.strides,
                owner=as_bytes,
                stream=1,
            )
            given = v if way[1] == "itself" else Only(v, "__dlpack__", "__dlpack_device__")
            del v
        address = as_bytes.data.ptr
        del as_bytes
    else:
        given, address = WAYS[way](source), source.data.ptr
    array = jaxbridge.from_external(given, copy=copy)
    assert (array.shape, array.dtype, array.devices()) == (like.shape, like.dtype, {gpu()})
    assert same_bits(array + 0 if dtype in STANDARD and dtype != "bool" else array, want)
    shared = array.unsafe_buffer_pointer() == address or not like.size
    del base, source, given
    if like.size and shared:
        assert memory() is not None
    elif like.size:
        jax.block_until_ready(array)
        assert drained(memory)
    del array
    assert drained(memory)
    return "shared" if shared else "copied"


def exports_wrong_strides(way: tuple[str, str], layout: str, dtype: str) -> bool:
    """CuPy's DLPack divides a negative stride by the item size as a number without sign."""
    itemsize = dtype_of(dtype).itemsize
    return (
        layout == "negative" and way in (("cupy", "DLPack"), ("cupy", "capsule")) and itemsize > 1
    )


def drained(memory: Any) -> bool:
    """Whether the owner goes, once the device is done."""
    jax.block_until_ready(jax.device_put(1.0, gpu()) + 1)
    end = time.monotonic() + 20  # others may use the device
    while memory() is not None and time.monotonic() < end:
        _core.release_unused()
    return is_dead(memory)


CELLS = [(w, layout) for w in ways() for layout in LAYOUTS]


@pytest.mark.parametrize(
    "way, layout", CELLS, ids=lambda x: x if isinstance(x, str) else "-".join(x)
)
def test_layouts_in(way, layout):
    for dtype in ("float32", "complex64", "bool", "int16", "bfloat16"):
        if not is_there(way, layout, dtype):
            continue
        if exports_wrong_strides(way, layout, dtype):
            with pytest.raises(BufferError, match="pass the array itself"):
                bring_in(way, layout, dtype, None)
            continue
        want = "shared" if layout in SHARED else "copied"
        assert bring_in(way, layout, dtype, None) == want
        if want == "shared":
            assert bring_in(way, layout, dtype, False) == want
        else:
            with pytest.raises(BufferError, match="allow a copy"):
                bring_in(way, layout, dtype, False)
        if layout != "no elements":
            assert bring_in(way, layout, dtype, True) == "copied"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", ways(), ids="-".join)
def test_dtypes_in(way, dtype, x64):
    if not is_there(way, "row-major", dtype):
        pytest.skip(f"{way[0]} has no {dtype} by this way")
    assert bring_in(way, "row-major", dtype, False) == "shared"


# How a producer's stream comes to be what it is.
STREAMS = {
    "null": lambda cp: cp.cuda.Stream.null,
    "per thread": lambda cp: cp.cuda.Stream.ptds,
    "own": lambda cp: cp.cuda.Stream(),
    "own, non-blocking": lambda cp: cp.cuda.Stream(non_blocking=True),
}


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("way", [w for w in ways() if w[1] != "capsule"], ids="-".join)
def test_order_in(way, stream):
    """A slow kernel on the producer's stream, then its write, then the import: always the new value."""
    import cupy as cp

    library = way[0]
    if library in ("numba", "warp") and stream != "null":
        pytest.skip(f"{library} here stands on its default stream")
    if library == "torch" and stream == "per thread":
        pytest.skip("torch has no stream object for it")
    made = STREAMS[stream](cp)
    wrong = 0
    for i in range(5):
        with made:
            block = cp.zeros(1 << 20, cp.float32)
        made.synchronize()
        with made:
            given = WAYS[way](block)
            if library == "torch":
                import torch

                current = (
                    torch.cuda.ExternalStream(made.ptr) if made.ptr else torch.cuda.default_stream()
                )
            spin()
            block.fill(i + 1)
            if library == "torch":
                with torch.cuda.stream(current):
                    array = jaxbridge.from_external(given, copy=False)
            else:
                array = jaxbridge.from_external(given, copy=False)
        assert not made.done, "the host did not wait"
        wrong += int((np.asarray(array) != i + 1).any())
    assert wrong == 0


@pytest.mark.parametrize("way", ways(), ids="-".join)
def test_memory_is_not_reused_too_early(way):
    """JAX is still at it when everybody has let go; the producer's pool then gives the block anew."""
    import cupy as cp

    slow = jaxbridge.call(lambda v, out: (spin(), cp.copyto(out, v)), lambda v: v, out="out")
    program = jax.jit(lambda v: slow(v) + 0)
    size = 1 << 20
    jax.block_until_ready(program(jnp.zeros(size, jnp.float32, device=gpu())))
    for i in range(3):
        block = cp.full(size, i + 1, cp.float32)
        address = block.data.ptr
        array = jaxbridge.from_external(WAYS[way](block), copy=False)
        result = program(array)
        del array, block
        gc.collect()
        # The same size again, as a pool would give it out at once.
        others = [cp.full(size, -1, cp.float32) for _ in range(3)]
        assert all(o.data.ptr != address for o in others) or np.asarray(result)[0] == i + 1
        np.testing.assert_array_equal(np.asarray(result), np.full(size, i + 1, np.float32))


def test_a_copy_of_an_import_is_made_before_its_owner_writes():
    """XLA's stream is behind: a copy there would read what the owner has written by then."""
    import cupy as cp

    busy = jax.jit(
        jaxbridge.call(lambda v, out: (spin(), cp.copyto(out, v)), lambda v: v, out="out")
    )
    other = jnp.zeros(8, jnp.float32, device=gpu())
    block = cp.ones(1 << 12, cp.float32)
    array = jaxbridge.from_external(block, copy=False)
    jax.block_until_ready([busy(other), jaxbridge.from_external(array, copy=True)])
    waits = busy(other)
    copy = jaxbridge.from_external(array, copy=True)
    block.fill(5)
    assert copy.unsafe_buffer_pointer() != block.data.ptr
    assert (np.asarray(copy) == 1).all()
    jax.block_until_ready(waits)


def test_columns_are_copied_and_moved_as_what_they_are_on_a_device():
    import cupy as cp

    block = cp.arange(12, dtype=cp.float32).reshape(4, 3)
    want = np.arange(12, dtype=np.float32).reshape(4, 3).T
    x = jaxbridge.from_external(block.T, copy=False)
    cpu = jax.devices("cpu")[0]
    on_host = jax.sharding.SingleDeviceSharding(gpu(), memory_kind="pinned_host")
    host = jaxbridge.empty((4, 3), np.float32)
    host[...] = want.T
    for given in (x, block.T, Only(block.T, "__cuda_array_interface__"), host.T):
        for options in ({"copy": True}, {"device": cpu}, {"device": gpu()}, {"device": on_host}):
            got = jaxbridge.from_external(given, **options)
            np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(jaxbridge.to_external(x, "cupy", copy=True).get(), want)


def test_a_sharding_is_what_comes_in_on_a_device():
    import cupy as cp

    mesh = jax.sharding.Mesh([gpu()], "x")
    named = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    block = cp.arange(1 << 10, dtype=cp.float32)
    array = jaxbridge.from_external(block, device=named, copy=False)
    assert array.sharding == named and array.unsafe_buffer_pointer() == block.data.ptr
    assert float(jax.jit(jnp.sum)(array)) == float(np.arange(1 << 10).sum())
    own = jax.device_put(jnp.arange(4.0), gpu())
    placed = jaxbridge.from_external(own, device=named, copy=False)
    assert placed.sharding == named
    assert placed.unsafe_buffer_pointer() == own.unsafe_buffer_pointer()
    jaxbridge.release(array)
    assert _core.live_imports(block.data.ptr) == 0


# ---- out -----------------------------------------------------------------------------------------

FRAMEWORKS = {
    "cupy": CUPY,
    "torch": TORCH,
    "numba": set(STANDARD),
    "warp": {*WARP, "bfloat16"},
    "view": ALL,
    "numpy": ALL,
}


def frameworks() -> list[str]:
    return [f for f in FRAMEWORKS if f in ("view", "numpy") or has(PACKAGE.get(f, f))]


def address(x: Any) -> int:
    if hasattr(x, "device_ctypes_pointer"):
        return x.device_ctypes_pointer.value or 0
    if hasattr(x, "__cuda_array_interface__") and not hasattr(x, "data_ptr"):
        return x.__cuda_array_interface__["data"][0]
    return x.data_ptr() if hasattr(x, "data_ptr") else jaxbridge.pointer(x)


def hand_out(framework: str, dtype: str, shape: tuple[int, ...], copy: bool | None) -> str:
    _, host, _ = blocks(dtype_of(dtype))
    host = host[: int(np.prod(shape))].reshape(shape)
    array = jax.device_put(host, gpu())
    assert array.dtype == dtype_of(dtype)
    out = jaxbridge.to_external(array, framework, copy=copy)
    if framework == "numpy":
        assert same_bits(out, host) and out.flags.writeable == bool(copy)
        return "copied"
    if dtype in ("bfloat16",) or dtype.startswith("float8"):
        shared = jaxbridge.pointer(out) == array.unsafe_buffer_pointer()
    else:
        shared = address(out) == array.unsafe_buffer_pointer()
    assert shared == (not copy) or not host.size
    if framework == "view":
        assert out.readonly == (not copy)
        assert out.__dlpack_device__() == (2, 0)
        if dtype in STANDARD:
            assert out.__cuda_array_interface__["data"][1] == (not copy)
            assert out.__cuda_array_interface__["stream"] not in (0, None)
    alive = weakref.ref(array)
    del array
    # Read back through the framework's array alone.
    back = jaxbridge.from_external(out, copy=True)
    assert same_bits(np.asarray(back).reshape(shape), host)
    assert copy or not host.size or alive() is not None
    del out, back
    assert drained(alive)
    return "copied" if copy else "shared"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("framework", frameworks())
def test_dtypes_out(framework, dtype, x64):
    if dtype not in FRAMEWORKS[framework]:
        with pytest.raises(TypeError, match=dtype):
            hand_out(framework, dtype, (2, 3), None)
        return
    hand_out(framework, dtype, (2, 3), None)
    hand_out(framework, dtype, (2, 3), True)
    if framework == "numpy":
        with pytest.raises(BufferError, match="NumPy's are on the host"):
            hand_out(framework, dtype, (2, 3), False)
    else:
        assert hand_out(framework, dtype, (2, 3), False) == "shared"


@pytest.mark.parametrize("shape", [(), (1,), (0,), (2, 0, 3), (1, 5), (5, 1), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("framework", frameworks())
def test_shapes_out(framework, shape):
    hand_out(framework, "float32", shape, None)


@pytest.mark.parametrize("framework", [f for f in frameworks() if f != "numpy"])
def test_order_out(framework):
    """JAX is still computing when the consumer's stream gets its work: always the new value."""
    import cupy as cp

    slow = jaxbridge.call(lambda v, out: (spin(), cp.add(v, 1, out=out)), lambda v: v, out="out")
    program = jax.jit(lambda v: slow(v))
    first = jax.block_until_ready(program(jnp.zeros(1 << 20, jnp.float32, device=gpu())))
    # What the library does once takes longer than the kernel.
    jaxbridge.to_external(first, framework)
    consumer = cp.cuda.Stream(non_blocking=True)
    for i in range(5):
        start = jax.block_until_ready(jnp.full(1 << 20, i, jnp.float32, device=gpu()))
        array = program(start)
        with consumer:
            out = jaxbridge.to_external(
                array, framework, stream=None if framework == "view" else consumer
            )
            if framework == "view":
                mine = cp.from_dlpack(Only(out, "__dlpack__", "__dlpack_device__"))
            else:
                memory = cp.cuda.UnownedMemory(array.unsafe_buffer_pointer(), 4 << 20, out, 0)
                mine = cp.ndarray(1 << 20, cp.float32, cp.cuda.MemoryPointer(memory, 0))
            copied = mine.copy()
            assert not consumer.done, "the host has waited"
            assert (copied.get() == i + 1).all()


@pytest.mark.parametrize("framework", [f for f in frameworks() if f not in ("numpy", "view")])
def test_jax_does_not_reuse_memory_too_early(framework):
    """The consumer's stream is still at it when its array is dropped and JAX allocates."""
    import cupy as cp

    consumer = cp.cuda.Stream(non_blocking=True)
    size = 1 << 20
    for i in range(3):
        array = jax.block_until_ready(jnp.full(size, i + 1, jnp.float32, device=gpu()))
        pointer = array.unsafe_buffer_pointer()
        out = jaxbridge.to_external(array, framework, stream=consumer)
        memory = cp.cuda.UnownedMemory(pointer, 4 * size, None, 0)
        mine = cp.ndarray(size, cp.float32, cp.cuda.MemoryPointer(memory, 0))
        with consumer:
            target = cp.empty(size, cp.float32)
            spin()
            cp.copyto(target, mine)
        del array, out
        gc.collect()
        others = [
            jax.block_until_ready(jnp.full(size, -1, jnp.float32, device=gpu())) for _ in range(3)
        ]
        consumer.synchronize()
        assert (target.get() == i + 1).all()
        del others


@pytest.mark.parametrize("kind", ["blocking", "of another thread"])
def test_the_legacy_stream_is_not_past_what_it_waits_for(kind):
    """The owner stays while a stream is at work that the consumer's, the legacy one, waits for."""
    import cupy as cp

    def work():
        with cp.cuda.Stream.ptds if kind == "of another thread" else cp.cuda.Stream() as stream:
            spin()
            started.set()
            ended.wait()
            stream.synchronize()

    base, _, owner = blocks(np.dtype("f4"))
    v = jaxbridge.buffer(base.data.ptr, base.shape, "f4", "cuda", owner=base)
    capsules = [v.__dlpack__(stream=-1)]
    exporter = _core.exporter(lambda *_, **__: capsules.pop(), ordinal=0, stream=(0, None))
    v = exporter(jnp.zeros(1))
    started, ended = threading.Event(), threading.Event()
    thread = threading.Thread(target=work)
    thread.start()
    started.wait()
    del v, base
    _core.release_unused()
    assert owner() is not None
    ended.set()
    thread.join()
    while not is_dead(owner):
        _core.release_unused()


def test_a_view_is_an_argument_of_functions_and_kernels():
    import cupy as cp

    x = jax.device_put(jnp.arange(256, dtype=jnp.float32), gpu())
    want = np.arange(256, dtype=np.float32) + 1
    assert (cp.add(cp.asarray(jaxbridge.view(x)), 1).get() == want).all()
    raw = cp.RawKernel(
        'extern "C" __global__ void add_one(const float* x, float* y)'
        "{ y[threadIdx.x] = x[threadIdx.x] + 1; }",
        "add_one",
    )
    out = cp.zeros(256, cp.float32)
    raw((1,), (256,), (cp.asarray(jaxbridge.view(x)), out))
    assert (out.get() == want).all()
    # By its address, on a stream that was put in order.
    stream = cp.cuda.Stream(non_blocking=True)
    v = jaxbridge.to_external(x, "view", stream=stream)
    out = cp.zeros(256, cp.float32)
    cp.cuda.Device().synchronize()
    with stream:
        raw((1,), (256,), (np.uint64(v.pointer), out))
        assert (out.get() == want).all()
    del v


@pytest.mark.skipif(not has("numba_cuda"), reason="needs numba-cuda, which is not installed")
def test_a_view_is_an_argument_of_numba():
    from numba import cuda

    @cuda.jit
    def add_one(a, b):
        b[cuda.grid(1)] = a[cuda.grid(1)] + 1

    x = jax.device_put(jnp.arange(256, dtype=jnp.float32), gpu())
    out = cuda.device_array(256, np.float32)
    add_one[1, 256](jaxbridge.view(x), out)
    np.testing.assert_array_equal(out.copy_to_host(), np.arange(256) + 1)


@pytest.mark.skipif(not has("warp"), reason="needs warp, which is not installed")
def test_a_view_is_an_argument_of_warp():
    import warp as wp

    from _warp_kernels import slow_add

    x = jax.device_put(jnp.arange(256, dtype=jnp.float32), gpu())
    out = wp.zeros(256, dtype=wp.float32, device="cuda:0")
    jax.block_until_ready(x)  # Warp looks at no stream of an array interface
    wp.launch(slow_add, dim=256, inputs=[jaxbridge.view(x), 0, out], device="cuda:0")
    np.testing.assert_array_equal(out.numpy(), np.arange(256) + 1)


def test_donating_what_others_hold_is_refused():
    x = jax.block_until_ready(jnp.ones(1 << 10, device=gpu()))
    out = jaxbridge.to_external(x, "cupy")
    with pytest.raises(Exception, match=r"(?i)external reference|donat"):
        jax.block_until_ready(jax.jit(lambda v: v + 1, donate_argnums=0)(x))
    assert (out.get() == 1).all()


def test_donating_what_came_in_writes_into_it():
    import cupy as cp

    block = cp.arange(1 << 10, dtype=cp.float32)
    array = jaxbridge.from_external(block, copy=False)
    result = jax.jit(lambda v: v + 1, donate_argnums=0)(array)
    jax.block_until_ready(result)
    assert result.unsafe_buffer_pointer() == block.data.ptr
    # The import is JAX's as long as the result is.
    assert _core.live_imports(block.data.ptr) == 1
    del result, array
    assert drained(lambda: None if _core.live_imports(block.data.ptr) == 0 else block)
    assert (block.get() == np.arange(1 << 10) + 1).all()


def test_release_on_a_device():
    import cupy as cp

    block = cp.arange(1 << 10, dtype=cp.float32)
    array = jaxbridge.from_external(block, copy=False)
    total = jax.jit(jnp.sum)(array)
    jaxbridge.release(array)
    assert _core.live_imports(block.data.ptr) == 0
    with pytest.raises(RuntimeError, match="deleted"):
        array + 1
    assert float(total) == float(np.arange(1 << 10).sum())


def test_release_while_a_program_reads_the_array():
    import cupy as cp

    slow = jaxbridge.call(lambda v, out: (spin(), cp.copyto(out, v)), lambda v: v, out="out")
    program = jax.jit(lambda v: slow(v) + 1)
    block = cp.arange(1 << 10, dtype=cp.float32)
    jax.block_until_ready(program(jnp.zeros(1 << 10, jnp.float32, device=gpu())))
    array = jaxbridge.from_external(block, copy=False)
    result = program(array)
    jaxbridge.release(array)
    assert _core.live_imports(block.data.ptr) == 0
    assert result.is_ready()
    block.fill(-1)
    np.testing.assert_array_equal(result, np.arange(1 << 10) + 1)


def test_the_compute_stream_is_that_of_calls():
    seen = []
    f = jaxbridge.call(
        lambda v: seen.append(jaxbridge.current().stream), None, has_side_effect=True
    )
    f(jnp.ones(3, device=gpu()))
    jax.effects_barrier()
    assert seen == [_imports.compute_stream(gpu())]


def test_owners_at_exit_with_work_on_the_device():
    from processes import run

    program = """
    import cupy as cp, jax, jax.numpy as jnp, jaxbridge
    from device_arrays import spin
    block = cp.ones(1 << 20, cp.float32)
    array = jaxbridge.from_external(block)
    out = jaxbridge.to_external(jnp.ones(3, device=jax.devices("cuda")[0]), "cupy")
    slow = jaxbridge.call(lambda v, out: (spin(), cp.copyto(out, v)), lambda v: v, out="out")
    result = jax.jit(slow)(array)
    del array, block
    print("end")
    """
    done = run(program, path=Path(__file__).parent, env={"JAX_PLATFORMS": "cuda,cpu"})
    assert done.stdout.splitlines() == ["end"]


# ---- the page ------------------------------------------------------------------------------------


def layouts_table() -> str:
    def cell(way: tuple[str, str], layout: str) -> str:
        if exports_wrong_strides(way, layout, "float32"):
            return "error"
        return bring_in(way, layout, "float32", None) if is_there(way, layout, "float32") else "-"

    rows = {layout: {" ".join(w): cell(w, layout) for w in ways()} for layout in LAYOUTS}
    return table([" ".join(w) for w in ways()], rows, "layout")


def dtypes_table() -> str:
    def came_in(way: tuple[str, str], dtype: str) -> str:
        return bring_in(way, "row-major", dtype, None) if is_there(way, "row-major", dtype) else "-"

    def went_out(framework: str, dtype: str) -> str:
        return hand_out(framework, dtype, (2, 3), None) if dtype in FRAMEWORKS[framework] else "-"

    first = {w[0]: w for w in reversed(ways())}
    columns = [f"from {lib}" for lib in first] + [f"to {f}" for f in frameworks()]
    rows = {
        dtype: {f"from {lib}": came_in(way, dtype) for lib, way in first.items()}
        | {f"to {f}": went_out(f, dtype) for f in frameworks()}
        for dtype in DTYPES
    }
    return table(columns, rows, "dtype")


TABLES = {"cuda layouts": layouts_table, "cuda dtypes": dtypes_table}


@pytest.mark.parametrize("name", TABLES)
def test_page_shows_what_is_found(name, x64):
    page = columns_of(table_on_page(name))
    if any("not yet run" in column for column in page):
        pytest.skip(
            "the page has no table of a device yet: python tests/gpu/test_interchange_gpu.py"
        )
    found = columns_of(TABLES[name]())
    assert found.items() <= page.items()


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    for name, make in TABLES.items():
        write_table(name, make())

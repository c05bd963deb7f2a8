# SPDX-License-Identifier: Apache-2.0
"""Memory of others that JAX updates in place, on a device: kinds of memory, streams, lifetimes."""

import gc
import subprocess
import sys
import textwrap
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
from device_arrays import spin
from interchange import has, is_dead
from jaxbridge import _core, _imports

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not has("cupy"), reason="needs cupy, which is not installed"),
]

SIZE = 1024


def gpu() -> Any:
    return jax.devices("cuda")[0]


@pytest.fixture(autouse=True)
def warm():
    """What happens once in a process is done, so that nobody waits for it behind a slow kernel."""
    import cupy as cp

    _imports.compute_stream(gpu())
    spin()
    jaxbridge.ref(cp.zeros(SIZE, cp.float32))
    cp.cuda.Device().synchronize()


@jax.jit
def plus_one(r):
    r[...] = r[...] + 1


@jax.jit
def step(r):
    def body(i, c):
        r[i] += 1
        return c

    jax.lax.fori_loop(0, SIZE, body, 0)
    jax.lax.cond(r[0] > 0, lambda: r.__setitem__(0, r[0] + 1), lambda: None)


def external():
    """An external function that adds one, and the addresses that it was given."""
    addresses = []

    def add(x):
        addresses.append(x.data.ptr)
        x += 1

    return jaxbridge.call(add, None, framework="cupy"), addresses


# ---- kinds of memory -----------------------------------------------------------------------------


def cupy_default():
    import cupy as cp

    return cp.zeros(SIZE, cp.float32)


def cupy_managed():
    import cupy as cp

    return cp.ndarray(SIZE, cp.float32, cp.cuda.malloc_managed(4 * SIZE))


def cupy_async():
    import cupy as cp

    return cp.ndarray(SIZE, cp.float32, cp.cuda.malloc_async(4 * SIZE))


def cupy_part():
    import cupy as cp

    return cp.zeros(4 * SIZE, cp.float32)[SIZE : 2 * SIZE]


def torch_tensor():
    import torch

    return torch.zeros(SIZE, device="cuda")


def numba_device():
    from numba import cuda

    return cuda.device_array(SIZE, np.float32)


def numba_mapped():
    from numba import cuda

    return cuda.mapped_array(SIZE, np.float32)


def numba_managed():
    from numba import cuda

    return cuda.managed_array(SIZE, np.float32)


def cuda_core_buffer(make):
    from cuda.core import Device

    device = Device(0)
    device.set_current()
    buffer = make(device)
    return jaxbridge.buffer(int(buffer.handle), (SIZE,), "float32", "cuda", owner=buffer)


def cuda_core_vmm():
    from cuda.core import VirtualMemoryResource, VirtualMemoryResourceOptions

    def make(device):
        options = VirtualMemoryResourceOptions(handle_type="posix_fd")
        return VirtualMemoryResource(device, config=options).allocate(4 * SIZE)

    return cuda_core_buffer(make)


def cuda_core_pool():
    return cuda_core_buffer(
        lambda device: device.memory_resource.allocate(4 * SIZE, stream=device.default_stream)
    )


def driver_allocation():
    from cuda.bindings import driver

    error, pointer = driver.cuMemAlloc(4 * SIZE)
    assert int(error) == 0

    class Owner:
        def __del__(self):
            driver.cuMemFree(pointer)

    return jaxbridge.buffer(int(pointer), (SIZE,), "float32", "cuda", owner=Owner())


KINDS = {
    "cupy": (cupy_default, "cupy"),
    "cupy, managed": (cupy_managed, "cupy"),
    "cupy, async": (cupy_async, "cupy"),
    "cupy, a part": (cupy_part, "cupy"),
    "torch": (torch_tensor, "torch"),
    "numba, device": (numba_device, "numba_cuda"),
    "numba, mapped": (numba_mapped, "numba_cuda"),
    "numba, managed": (numba_managed, "numba_cuda"),
    "cuda.core, VMM": (cuda_core_vmm, "cuda.core"),
    "cuda.core, pool": (cuda_core_pool, "cuda.core"),
    "cuMemAlloc": (driver_allocation, "cuda.bindings"),
}


def as_cupy(x: Any) -> Any:
    """CuPy's array on memory of anybody's."""
    import cupy as cp

    if isinstance(x, cp.ndarray):
        return x
    pointer = jaxbridge.pointer(x)
    memory = cp.cuda.UnownedMemory(pointer, 4 * SIZE, x)
    return cp.ndarray(SIZE, cp.float32, cp.cuda.MemoryPointer(memory, 0))


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_memory(kind):
    make, package = KINDS[kind]
    if not has(package):
        pytest.skip(f"needs {package}, which is not installed")
    import cupy as cp

    x = make()
    owners = as_cupy(x)
    owners[...] = 0
    cp.cuda.Device().synchronize()
    pointer = jaxbridge.pointer(x)
    r = jaxbridge.ref(x)
    assert next(iter(r.sharding.device_set)) == gpu()
    plus_one(r)
    step(r)
    add, addresses = external()
    add(r)
    jax.jit(lambda r: (add(r), r.__setitem__(1, r[1] * 2), add(r), None)[3])(r)
    assert jaxbridge.pointer(r) == pointer and set(addresses) == {pointer}
    with jaxbridge.borrow(r, "cupy") as lent:
        assert lent.data.ptr == pointer
        assert lent[:3].tolist() == [6, 9, 5]
        lent += 1
    plus_one(r)
    assert r[2] == 7
    jax.block_until_ready(r[...])
    assert owners[:3].tolist() == [8, 11, 7]
    jaxbridge.release(r)
    assert _core.live_imports(pointer) == 0
    # And by donation.
    add_two = jaxbridge.inplace(lambda v: v + 2)
    for _ in range(3):
        add_two(x)
    cp.cuda.Device().synchronize()
    assert owners[:3].tolist() == [14, 17, 13]


def test_memory_of_another_process():
    """A pool of cuda.core that two processes share."""
    if not has("cuda.core"):
        pytest.skip("needs cuda.core, which is not installed")
    source = """
        import os, sys
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
        import multiprocessing as mp
        import numpy as np

        SIZE = 1024

        def child(resource, buffer_descriptor, seen, done):
            from cuda.core import Buffer, Device
            device = Device(0); device.set_current()
            buffer = Buffer.from_ipc_descriptor(
                resource, buffer_descriptor, stream=device.default_stream
            )
            import jax, jaxbridge
            v = jaxbridge.buffer(int(buffer.handle), (SIZE,), "float32", "cuda", owner=buffer)
            r = jaxbridge.ref(v)
            jax.jit(lambda r: r.__setitem__(..., r[...] + 41))(r)
            jaxbridge.inplace(lambda x: x + 1)  # another form, not called: the Ref has the memory
            seen.put(float(r[0]))
            jax.block_until_ready(r[...])
            done.set()

        if __name__ == "__main__":
            mp.set_start_method("spawn")
            from cuda.core import Device, DeviceMemoryResource, DeviceMemoryResourceOptions
            device = Device(0); device.set_current()
            resource = DeviceMemoryResource(device, DeviceMemoryResourceOptions(ipc_enabled=True))
            buffer = resource.allocate(4 * SIZE, stream=device.default_stream)
            import cupy as cp
            memory = cp.cuda.UnownedMemory(int(buffer.handle), 4 * SIZE, buffer)
            x = cp.ndarray(SIZE, cp.float32, cp.cuda.MemoryPointer(memory, 0))
            x[...] = 1
            cp.cuda.Device().synchronize()
            seen, done = mp.Queue(), mp.Event()
            p = mp.Process(target=child, args=(resource, buffer.ipc_descriptor, seen, done))
            p.start()
            while not done.wait(0.1):
                assert p.is_alive(), "the other process has failed"
            print(seen.get(), float(x[0]), float(x[-1]))
            p.join()
    """
    path = Path(__file__).with_name("_ipc_child.py")
    path.write_text(textwrap.dedent(source))
    try:
        out = subprocess.run(
            [sys.executable, str(path)], capture_output=True, text=True, timeout=180, check=False
        )
    finally:
        path.unlink()
    assert out.stdout.split() == ["42.0", "42.0", "42.0"], out.stderr


# ---- streams -------------------------------------------------------------------------------------


def blocked(work) -> float:
    """Seconds for which the host was in it."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


@pytest.mark.parametrize("framework", ["cupy", "torch"])
@pytest.mark.parametrize("own_stream", [False, True])
def test_inplace_on_streams(framework, own_stream, needs):
    """A slow kernel of the owner before each call, and its next kernel right after it."""
    needs(framework)
    import cupy as cp

    stream = cp.cuda.Stream(non_blocking=True) if own_stream else cp.cuda.Stream.null
    add_one = jaxbridge.inplace(lambda x: x + 1)
    with stream:
        x = cp.zeros(SIZE, cp.float32)
        y = cp.zeros(SIZE, cp.float32)
        given, options = x, {}
        if framework == "torch":
            import torch

            given = torch.from_dlpack(x)
            options = {"stream": torch.cuda.ExternalStream(stream.ptr) if own_stream else None}
        context = (
            __import__("torch").cuda.stream(options["stream"])
            if options.get("stream") is not None
            else __import__("contextlib").nullcontext()
        )
        with context:
            add_one(given)
            x[...] = 0
            stream.synchronize()
            host = 0.0
            for _ in range(6):
                spin()
                x += 1
                host = max(host, blocked(lambda: add_one(given)))
                y[...] = x
                x += 1
            assert not stream.done, "the host has waited for the slow kernels"
            stream.synchronize()
    assert x.get().tolist() == [18] * SIZE
    assert y.get().tolist() == [17] * SIZE
    assert host < 0.05


def halves(x, y):
    return jnp.roll(x, 1) + y, y - x


def doubled(v):
    import cupy as cp

    def twice(v, out):
        cp.multiply(v, 2, out=out)

    return jaxbridge.call(twice, lambda v: v, out="out", framework="cupy")(v)


PROGRAMS = {
    "unused": jnp.zeros_like,
    "the same": lambda x: x,
    "reversed": lambda x: x[::-1],
    "a loop": lambda x: jax.lax.fori_loop(0, 7, lambda i, x: jnp.roll(x, 1) * 2 + i, x),
    "a branch": lambda x: jax.lax.cond(x[3] > 2, lambda x: x * 2, lambda x: x[::-1], x),
    "an external call": lambda x: doubled(x) + 1,
    "a library": lambda x: jnp.sort(-x),
    "two": halves,
    "swapped": lambda x, y: (y, x),
    "one is the same": lambda x, y: (x, x + y),
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("has_aux", [False, True])
def test_programs_of_inplace(name, has_aux, monkeypatch):
    """Values, places, and that XLA's and the owner's streams were put in order without JAX's export."""
    import cupy as cp

    def export(*args):
        raise AssertionError("an export")

    fun = PROGRAMS[name]
    with cp.cuda.Stream(non_blocking=True) as stream:
        arrays = [cp.arange(SIZE, dtype=cp.float32), cp.full(SIZE, 5, cp.float32)]
        arrays = arrays[: 2 if name in ("two", "swapped", "one is the same") else 1]
        pointers = [x.data.ptr for x in arrays]
        want = [jnp.asarray(x.get()) for x in arrays]

        def new(*args):
            out = fun(*args)
            return (out, [v[-3:] for v in jax.tree.leaves(out)]) if has_aux else out

        step = jaxbridge.inplace(new, (0, 1) if len(arrays) == 2 else 0, has_aux=has_aux)
        program = jax.jit(fun)
        seen = []
        for turn in range(4):
            spin()
            for x in arrays:
                x += turn
            aux = step(*arrays)
            seen.append([x.copy() for x in arrays])
            want = program(*[w + turn for w in want])
            want = list(want) if isinstance(want, tuple) else [want]
            if has_aux:
                np.testing.assert_allclose(aux, [w[-3:] for w in want], rtol=1e-6)
            monkeypatch.setattr(jaxbridge._compat, "stream_waits", export)
            for x, w in zip(seen[-1], want, strict=True):
                np.testing.assert_allclose(x.get(), w, rtol=1e-6)
        stream.synchronize()
    assert [x.data.ptr for x in arrays] == pointers


@pytest.mark.parametrize("is_slow", [False, True])
def test_inplace_of_a_program_that_fails(is_slow):
    """The call itself raises, also while the owner's work before it goes on; the next one works."""
    import cupy as cp

    fails = False

    def checked(v):
        if fails:
            raise ZeroDivisionError("of the function")
        return v + 1

    step = jaxbridge.inplace(jaxbridge.call(checked, lambda v: v, framework="cupy"))
    x = cp.zeros(SIZE, cp.float32)
    step(x)
    for _ in range(3):
        fails = True
        if is_slow:
            spin()
        with pytest.raises(ZeroDivisionError, match="of the function"):
            step(x)
        fails = False
        x[...] = 5
        step(x)
        assert x.get().tolist() == [6] * SIZE


@pytest.mark.parametrize("own_stream", [False, True])
def test_borrow_on_streams(own_stream):
    import cupy as cp

    stream = cp.cuda.Stream(non_blocking=True) if own_stream else cp.cuda.Stream.null
    x = cp.zeros(SIZE, cp.float32)
    cp.cuda.Device().synchronize()
    r = jaxbridge.ref(x)
    slow = jaxbridge.call(lambda v: (spin(), v.__iadd__(1), None)[2], None, framework="cupy")
    slow_step = jax.jit(lambda r: (slow(r), None)[1])
    slow_step(r)
    with stream, jaxbridge.borrow(r, "cupy") as v:
        v *= 1
    jax.block_until_ready(r[...])
    for _ in range(5):
        slow_step(r)
        with stream:
            with jaxbridge.borrow(r, "cupy") as v:
                v *= 2
                spin()
                v *= 2
            assert not stream.done, "the host has waited"
        plus_one(r)
    value = 1.0
    for _ in range(5):
        value = (value + 1) * 4 + 1
    assert np.asarray(r[...]).tolist() == [value] * SIZE
    assert jaxbridge.pointer(r) == x.data.ptr


def test_a_borrow_on_a_given_stream():
    import cupy as cp

    stream = cp.cuda.Stream(non_blocking=True)
    x = cp.zeros(SIZE, cp.float32)
    cp.cuda.Device().synchronize()
    r = jaxbridge.ref(x)
    plus_one(r)
    with jaxbridge.borrow(r, "view", stream=stream) as v:
        assert v.stream == stream.ptr and v.pointer == x.data.ptr
        with stream:
            spin()
            cp.asarray(v)[...] += 5
    plus_one(r)
    assert r[0] == 7


def test_an_owner_goes_after_the_last_use():
    import cupy as cp

    block = cp.zeros(SIZE, cp.float32)
    cp.cuda.Device().synchronize()
    gone = weakref.ref(block)
    r = jaxbridge.ref(block)
    slow = jaxbridge.call(lambda v: (spin(), None)[1], None, framework="cupy")
    jax.jit(lambda r: (slow(r), None)[1])(r)
    del block
    gc.collect()
    assert gone() is not None
    del r
    for _ in range(2000):
        _core.release_unused()
        if is_dead(gone):
            break
        time.sleep(0.001)
    assert gone() is None


def test_a_live_export_is_an_error():
    import cupy as cp

    x = cp.zeros(SIZE, cp.float32)
    r = jaxbridge.ref(x)
    plus_one(r)
    held = jaxbridge.view(jaxbridge._compat.ref_array(r))
    with pytest.raises(Exception, match="external reference"):
        plus_one(r)
    del held


def test_a_ref_costs_no_second_copy():
    import cupy as cp

    size = 1 << 26
    x = cp.zeros(size, cp.float32)
    r = jaxbridge.ref(x)
    program = jax.jit(lambda r: r.__setitem__(..., r[...] * 2 + 1))
    used = program.lower(r).compile().memory_analysis()
    assert used.temp_size_in_bytes < size
    before = gpu().memory_stats()["bytes_in_use"]
    program(r)
    jax.block_until_ready(r[:8])
    assert gpu().memory_stats()["bytes_in_use"] - before < size
    assert float(x[-1]) == 1

# SPDX-License-Identifier: Apache-2.0
"""Memory of others on two devices: in and out, and updated in place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxbridge
from device_arrays import spin
from jaxbridge import _core

P = PartitionSpec
N = 1024


@pytest.fixture
def parts(cp):
    """An array of CuPy's on each device: 0, 0, ... and 1, 1, ..."""
    out = []
    for k in range(2):
        with cp.cuda.Device(k):
            out.append(cp.full(N, k, cp.float32))
            cp.cuda.Device().synchronize()
    return out


def whole(parts):
    return np.concatenate([p.get() for p in parts])


@pytest.fixture
def sharded(parts, mesh):
    return jaxbridge.sharded(parts, (2 * N,), NamedSharding(mesh, P("d")))


START = np.repeat([0, 1], N).astype(np.float32)


def external(cp, seen):
    """Adds 1 + the device, in the memory that it gets."""

    def add(v):
        device = jaxbridge.current().device
        assert v.device.id == device == cp.cuda.runtime.getDevice()
        seen.add(v.data.ptr)
        v += 1 + device

    return jaxbridge.call(add, None, framework="cupy", elementwise=True)


def test_a_ref_over_both_devices(cp, parts, sharded, mesh):
    where = [p.data.ptr for p in parts]
    r = jaxbridge.ref(sharded)
    program = jax.jit(lambda r: r.__setitem__(..., r[...] * 2 + jnp.arange(2.0 * N)))
    seen = set()
    f = external(cp, seen)
    by_parts = jax.jit(lambda r: (f(r), None)[1])
    in_shard_map = jax.jit(
        lambda r: jax.shard_map(
            lambda r: (f(r), None)[1], mesh=mesh, in_specs=P("d"), out_specs=None, check_vma=False
        )(r)
    )
    want = START
    for _ in range(3):
        program(r)
        by_parts(r)
        in_shard_map(r)
        want = want * 2 + np.arange(2 * N) + 2 * np.repeat([1, 2], N)
    with jaxbridge.borrow(r, "cupy") as lent:
        assert [x.data.ptr for x in lent] == where
        assert [x.device.id for x in lent] == [0, 1]
        for k, x in enumerate(lent):
            with cp.cuda.Device(k):
                spin()
                x *= 2
    program(r)  # after the slow kernels of both devices
    want = want * 2 * 2 + np.arange(2 * N)
    np.testing.assert_array_equal(r[...], want)
    np.testing.assert_array_equal(whole(parts), want)
    assert seen == set(where)
    jaxbridge.release(r)
    assert all(_core.live_imports(p) == 0 for p in where)


def test_inplace_over_both_devices(cp, parts, sharded):
    where = [p.data.ptr for p in parts]
    step = jaxbridge.inplace(lambda x, y: (x * 2 + y, x.sum()), has_aux=True)
    want = START
    for k in range(4):
        for d in range(2):  # the owner's kernels before, on both devices
            with cp.cuda.Device(d):
                spin()
                parts[d] += 1
        total = step(sharded, float(k))
        for d in range(2):  # and its next ones
            with cp.cuda.Device(d):
                parts[d] *= 3
        want = want + 1
        assert float(total) == want.sum()
        want = (want * 2 + k) * 3
    np.testing.assert_array_equal(whole(parts), want)
    assert [p.data.ptr for p in parts] == where


def test_inplace_of_a_call_on_parts(cp, parts, sharded):
    seen = set()
    add = jaxbridge.call(
        lambda v: (seen.add((v.device.id, jaxbridge.current().device)), v + 1)[1],
        lambda v: v,
        framework="cupy",
        elementwise=True,
    )
    step = jaxbridge.inplace(lambda x: add(x) * 2)
    for _ in range(3):
        step(sharded)
    for k in range(2):
        with cp.cuda.Device(k):
            cp.cuda.Device().synchronize()
    want = START
    for _ in range(3):
        want = (want + 1) * 2
    np.testing.assert_array_equal(whole(parts), want)
    assert seen == {(0, 0), (1, 1)}


def staying(cp, current):
    """Makes a device current, does something, and looks whether it still is."""

    def stays(work):
        cp.cuda.Device(current).use()
        out = work()
        assert cp.cuda.runtime.getDevice() == current
        return out

    return stays


@pytest.mark.parametrize("current", [0, 1])
def test_ref_and_inplace_of_the_second_device(cp, parts, current, devices):
    """Whichever device is current: the memory's counts, and the other one stays current."""
    x = parts[1]
    stays = staying(cp, current)
    r = stays(lambda: jaxbridge.ref(x))
    assert r.sharding.device_set == {devices[1]}
    jax.jit(lambda r: r.__setitem__(..., r[...] + 1))(r)
    seen = set()
    external(cp, seen)(r)
    lending = jaxbridge.borrow(r, "cupy")
    lent = stays(lending.acquire)
    assert lent.device.id == 1 and lent.data.ptr == x.data.ptr
    with cp.cuda.Device(1):
        lent += 1
    stays(lending.release)
    jax.block_until_ready(r[...])
    assert x.get().tolist() == [5] * N
    stays(lambda: jaxbridge.release(r))
    step = jaxbridge.inplace(lambda v: v * 2)
    for _ in range(3):
        stays(lambda: step(x))
    with cp.cuda.Device(1):
        cp.cuda.Device().synchronize()
    assert x.get().tolist() == [40] * N


def make_on(framework, ordinal):
    if framework == "cupy":
        import cupy as cp

        with cp.cuda.Device(ordinal):
            return cp.arange(N, dtype=cp.float32)
    if framework == "torch":
        import torch

        return torch.arange(N, dtype=torch.float32, device=f"cuda:{ordinal}")
    from numba import cuda

    with cuda.gpus[ordinal]:
        return cuda.to_device(np.arange(N, dtype=np.float32))


def device_of(framework, x):
    if framework == "cupy":
        return x.device.id
    if framework == "torch":
        return x.device.index
    return x.gpu_data.device.id if hasattr(x.gpu_data, "device") else jaxbridge_device(x)


def jaxbridge_device(x):
    return jaxbridge.view(jaxbridge.from_external(x)).__dlpack_device__()[1]


def on_host(framework, x):
    return (
        x.get()
        if framework == "cupy"
        else x.cpu().numpy()
        if framework == "torch"
        else x.copy_to_host()
    )


@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize("framework", ["cupy", "torch", "numba"])
def test_in_and_out_on_the_second_device(framework, current, devices, needs, cp):
    needs({"numba": "numba_cuda"}.get(framework, framework))
    theirs = make_on(framework, 1)
    stays = staying(cp, current)
    a = stays(lambda: jaxbridge.from_external(theirs, copy=False))
    assert a.devices() == {devices[1]}
    assert a.unsafe_buffer_pointer() == jaxbridge.pointer(theirs)
    np.testing.assert_array_equal(jax.jit(lambda a: a + 1)(a), np.arange(N) + 1)
    copied = stays(lambda: jaxbridge.from_external(theirs, copy=True))
    assert copied.devices() == {devices[1]}
    np.testing.assert_array_equal(copied, np.arange(N))
    ours = jax.device_put(np.arange(N, dtype=np.float32) * 2, devices[1])
    out = stays(lambda: jaxbridge.to_external(ours, framework))
    assert jaxbridge.pointer(out) == ours.unsafe_buffer_pointer()
    if framework != "numba":
        assert device_of(framework, out) == 1
    np.testing.assert_array_equal(on_host(framework, out), np.arange(N) * 2)
    assert stays(lambda: jaxbridge.view(ours)).__dlpack_device__() == (2, 1)


def test_order_on_the_second_device(cp, devices):
    """A slow kernel of the owner before the import, and of JAX before the export."""
    with cp.cuda.Device(1):
        spin()  # compiled
        x = cp.zeros(N, cp.float32)
        cp.cuda.Device().synchronize()
    jaxbridge.from_external(x)
    for k in range(1, 4):
        with cp.cuda.Device(1):
            spin()
            x += 1
            a = jaxbridge.from_external(x, copy=False)
        np.testing.assert_array_equal(jax.jit(lambda a: a * 2)(a), [2 * k] * N)
    slow = jaxbridge.call(lambda v: (spin(), v + 1)[1], lambda v: v, framework="cupy")
    program = jax.jit(slow)
    program(a)
    with cp.cuda.Device(1):
        b = jaxbridge.to_external(program(a), "cupy")
        out = b * 10
    assert out.get().tolist() == [40] * N


def test_an_array_over_both_is_exported_by_parts(mesh, cp):
    a = jax.device_put(np.arange(2.0 * N, dtype=np.float32), NamedSharding(mesh, P("d")))
    with pytest.raises(BufferError, match="addressable_shards"):
        jaxbridge.to_external(a, "cupy")
    for k, s in enumerate(a.addressable_shards):
        part = jaxbridge.to_external(s.data, "cupy")
        assert part.device.id == k
        np.testing.assert_array_equal(part.get(), np.arange(k * N, (k + 1) * N))


def test_parts_on_the_wrong_device(parts, mesh):
    with pytest.raises((BufferError, ValueError), match="its shard is on"):
        jaxbridge.ref(jaxbridge.sharded(parts[::-1], (2 * N,), NamedSharding(mesh, P("d"))))

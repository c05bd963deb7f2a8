# SPDX-License-Identifier: Apache-2.0
"""Calls on two devices at once: where each runs, what it is given, what stays apart, what fails alone."""

import sys
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxbridge
from jaxbridge import errors
from native_libraries import built

P = PartitionSpec
N = 512  # elements of each device
FRAMEWORKS = ["cupy", "torch", "numba", "warp", "numpy"]
PACKAGES = {"numba": "numba_cuda"}
PTX = (Path(__file__).parents[2] / "benchmarks/noops/add.ptx").read_text()


def like(x, *rest, **kw):
    return x


@pytest.fixture
def x(mesh):
    return jax.device_put(np.arange(2 * N, dtype=np.float32), NamedSharding(mesh, P("d")))


def split(fn, mesh, **options):
    """The program that calls `fn` on each device's part."""
    return jax.jit(
        jax.shard_map(fn, mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=False, **options)
    )


class Adds:
    """out = x + 1 + the device, in a framework; where it was is kept."""

    def __init__(self, framework):
        self.framework = framework
        self.seen = set()
        self.made = getattr(self, framework)()

    def __call__(self, x, out):
        context = jaxbridge.current()
        device, current = self.made(x, out, 1 + context.device)
        self.seen.add((context.device, device, current, context.stream, threading.get_ident()))

    def check(self):
        """Each call was on its own device, stream and thread, and on no other."""
        if self.framework == "numpy":  # on the host
            assert {context for context, *_ in self.seen} == {0, 1}
            return
        for context, device, current, _, _ in self.seen:
            assert context == device == current
        assert {context for context, *_ in self.seen} == {0, 1}
        streams = {(context, stream) for context, _, _, stream, _ in self.seen}
        assert len({stream for _, stream in streams}) == len(streams)

    def cupy(self):
        import cupy

        def add(x, out, amount):
            cupy.add(x, amount, out=out)
            return int(x.device.id), cupy.cuda.runtime.getDevice()

        return add

    def torch(self):
        import torch

        def add(x, out, amount):
            torch.add(x, amount, out=out)
            return x.device.index, torch.cuda.current_device()

        return add

    def numba(self):
        from numba import cuda

        @cuda.jit
        def kernel(x, out, amount):
            i = cuda.grid(1)
            if i < out.shape[0]:
                out[i] = x[i] + amount

        stream = cuda.external_stream

        def add(x, out, amount):
            kernel[(N + 127) // 128, 128, stream(jaxbridge.current().stream)](
                x, out, np.float32(amount)
            )
            current = cuda.current_context().device.id
            return current, current

        return add

    def warp(self):
        import warp as wp

        import _warp_kernels

        def add(x, out, amount):
            # x + 1, again and again: a kernel each.
            wp.launch(_warp_kernels.add_one, dim=x.shape[0], inputs=[x], outputs=[out])
            for _ in range(amount - 1):
                wp.launch(_warp_kernels.add_one, dim=x.shape[0], inputs=[out], outputs=[out])
            return x.device.ordinal, wp.get_device().ordinal

        return add

    def numpy(self):
        def add(x, out, amount):
            np.add(x, np.float32(amount), out=out)
            return None, None

        return add


def expected(times):
    return np.arange(2 * N, dtype=np.float32) + np.repeat([times, 2 * times], N)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("how", ["shard_map", "jit", "eager"])
def test_each_device_calls_with_its_own(framework, how, mesh, x, needs):
    needs(PACKAGES.get(framework, framework))
    adds = Adds(framework)
    f = jaxbridge.call(
        adds,
        like,
        out="out",
        framework=framework,
        elementwise=how != "shard_map",
        name=f"m.{how}.{framework}",
    )
    step = {"shard_map": split(f, mesh), "jit": jax.jit(f), "eager": f}[how]
    y = x
    for _ in range(5):
        y = step(y)
    np.testing.assert_array_equal(y, expected(5))
    assert y.sharding.is_equivalent_to(x.sharding, 1)
    adds.check()


@pytest.mark.parametrize("framework", ["cupy", "torch", "numba", "warp"])
@pytest.mark.parametrize("form", ["loop", "unrolled"])
def test_replay_on_both(framework, form, mesh, x, needs):
    needs(PACKAGES.get(framework, framework))
    adds = Adds(framework)
    f = jaxbridge.call(adds, like, out="out", framework=framework, graph="replay")

    def many(v):
        if form == "loop":
            return jax.lax.fori_loop(0, 20, lambda i, v: f(v), v)
        for _ in range(20):
            v = f(v)
        return v

    program = split(many, mesh)
    for _ in range(6):
        np.testing.assert_array_equal(program(x), expected(20))
    stats = f.stats()
    assert stats["calls"] == 2 * 20 * 6 and stats["captures"] >= 2
    assert stats["replays"] > stats["calls"] / 2
    adds.check()


def add_kernel(**options):
    return jaxbridge.cuda_kernel(
        PTX,
        "add_one",
        signature="x: float32[n], out y: float32[n], n: int32",
        grid="(n + 255) // 256",
        block=256,
        **options,
    )


def test_kernels_and_libraries(mesh, x, devices):
    add = add_kernel()
    loop = split(lambda v: jax.lax.fori_loop(0, 100, lambda i, v: add(v), v), mesh)
    np.testing.assert_array_equal(loop(x), np.arange(2 * N) + 100)
    ops = jaxbridge.load(built("cuda.cpp", "libcudaops", "-ldl"))
    zeros = jax.device_put(np.zeros(2, np.int32), NamedSharding(mesh, P("d")))
    for _ in range(3):  # the device that was told, and that of its state
        assert split(ops.ordinals, mesh)(zeros).tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("rule", [None, "i -> i"])
def test_a_kernel_is_launched_on_parts(rule, mesh, x):
    """In plain jit: with the lengths and the grid of each device's part."""
    add = add_kernel(elementwise=rule is None)
    if rule is not None:
        add.defsharding(rule)
    program = jax.jit(lambda v: jax.lax.fori_loop(0, 100, lambda i, v: add(v), v))
    y = program(x)
    np.testing.assert_array_equal(y, np.arange(2 * N) + 100)
    assert y.sharding.is_equivalent_to(x.sharding, 1)
    assert "all-gather" not in program.lower(x).compile().as_text()
    assert add.stats()["calls"] > 0
    np.testing.assert_array_equal(add(x), np.arange(2 * N) + 1)


def test_devices_call_at_the_same_time(mesh, x):
    """Each call waits in Python for the other device's."""
    barrier = threading.Barrier(2, timeout=30)

    def meet(x):
        barrier.wait()
        return x + 1

    f = jaxbridge.call(meet, like, framework="numpy")
    g = jaxbridge.call(lambda x, out: barrier.wait() and None, like, out="out", framework="buffer")
    np.testing.assert_array_equal(split(f, mesh)(x), np.arange(2 * N) + 1)
    jax.block_until_ready(split(g, mesh)(x))
    assert not barrier.broken


def test_native_calls_are_made_at_the_same_time(mesh):
    """Each call waits in C++ for the other device's."""
    ops = jaxbridge.load(built("cuda.cpp", "libcudaops", "-ldl"))
    zeros = jax.device_put(np.zeros(2, np.int32), NamedSharding(mesh, P("d")))
    for _ in range(3):
        assert sorted(split(ops.meet, mesh)(zeros).tolist()) == [0, 1]


def test_a_device_replays_while_the_other_one_has_the_gil(mesh, x, cp):
    """In one program device 0 is in Python, and gives the GIL away when device 1 has replayed."""
    f = jaxbridge.call(lambda v, out: cp.add(v, 1, out=out), like, out="out", graph="replay")
    before, has_replayed = [], []

    def hold(v):
        if before:
            end = time.monotonic() + 20
            while f.stats()["replays"] == before[0] and time.monotonic() < end:
                pass
            has_replayed.append(f.stats()["replays"] > before[0])
        return v

    h = jaxbridge.call(hold, like, framework="numpy")
    program = split(
        lambda v: jax.lax.cond(jax.lax.axis_index("d") == 0, h, lambda v: f(f(v)), v), mesh
    )
    want = np.arange(2 * N) + np.repeat([0, 2], N)
    interval = sys.getswitchinterval()
    try:
        for _ in range(8):
            np.testing.assert_array_equal(program(x), want)
        before.append(f.stats()["replays"])
        sys.setswitchinterval(60)
        np.testing.assert_array_equal(program(x), want)
    finally:
        sys.setswitchinterval(interval)
    assert has_replayed == [True]


@pytest.mark.parametrize("graph", ["off", "replay"])
@pytest.mark.parametrize("failing", [0, 1])
def test_an_exception_on_one_device(failing, graph, mesh, x, cp):
    fails = [True]

    def add(v, out):
        if fails and jaxbridge.current().device == failing:
            raise ArithmeticError(f"not on {failing}")
        cp.add(v, 1, out=out)

    f = jaxbridge.call(add, like, out="out", graph=graph)
    program = split(lambda v: f(v) * 2, mesh)
    for _ in range(3):
        with pytest.raises(
            (jax.errors.JaxRuntimeError, ArithmeticError), match=f"not on {failing}"
        ):
            jax.block_until_ready(program(x))
    fails.clear()
    for _ in range(4):
        np.testing.assert_array_equal(program(x), 2 * (np.arange(2 * N) + 1))
    for d in mesh.devices:  # and so does each alone
        alone = jax.device_put(np.ones(N, np.float32), d)
        np.testing.assert_array_equal(jax.jit(f)(alone), 2)


def test_a_native_error_on_one_device(mesh, x):
    f = jaxbridge.cuda_kernel(
        ".version 8.0\nnonsense\n",
        "nothing",
        signature="x: float32[n], out y: float32[n]",
        grid="n",
        block=1,
    )
    v = jax.device_put(np.zeros(4, np.float32), mesh.devices[1])
    with pytest.raises(jax.errors.JaxRuntimeError, match="cuModuleLoadData"):
        jax.block_until_ready(jax.jit(f)(v))
    ops = jaxbridge.load(built("cuda.cpp", "libcudaops", "-ldl"))
    zeros = jax.device_put(np.zeros(2, np.int32), NamedSharding(mesh, P("d")))
    assert split(ops.ordinals, mesh)(zeros).tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("framework", ["cupy", "torch", "numba"])
def test_another_device_is_current_in_the_framework(framework, mesh, x, needs):
    """The caller has device 1 current, or what JAX makes of it; a function leaves another one behind."""
    needs(PACKAGES.get(framework, framework))
    adds = Adds(framework)

    def leaves_another(v, out):
        adds(v, out)
        other = 1 - jaxbridge.current().device
        if framework == "cupy":
            import cupy

            cupy.cuda.Device(other).use()
        elif framework == "torch":
            import torch

            torch.cuda.set_device(other)

    f = jaxbridge.call(leaves_another, like, out="out", framework=framework)
    program = split(lambda v: f(f(v)), mesh)
    plain = split(lambda v: v + 1, mesh)
    current, use = current_device(framework)
    before = current()
    try:
        use(1)
        jax.block_until_ready(plain(x))
        of_jax = current()
        for _ in range(3):
            use(1)
            jax.block_until_ready(y := program(x))
            assert current() == of_jax
            np.testing.assert_array_equal(y, expected(2))
            alone = jax.jit(f)(jax.device_put(np.zeros(N, np.float32), mesh.devices[0]))
            np.testing.assert_array_equal(alone, 1)
    finally:
        use(before)
    adds.check()


def current_device(framework):
    if framework == "cupy":
        import cupy

        return cupy.cuda.runtime.getDevice, lambda i: cupy.cuda.Device(i).use()
    if framework == "torch":
        import torch

        return torch.cuda.current_device, torch.cuda.set_device
    from numba import cuda

    return lambda: cuda.current_context().device.id, cuda.select_device


def test_caches_are_of_a_device(mesh, cp):
    """The same Function and program on one device after the other, with addresses that come again."""
    adds = Adds("cupy")
    f = jaxbridge.call(adds, like, out="out")
    program = jax.jit(lambda v: f(v) + 0)
    for _ in range(4):
        for k, d in enumerate(mesh.devices):
            v = jax.device_put(np.zeros(N, np.float32), d)
            y = program(v)
            np.testing.assert_array_equal(y, 1 + k)
            assert y.devices() == {d}
    adds.check()


@pytest.mark.parametrize("framework", ["cupy", "torch"])
def test_state_and_scratch_are_of_a_device(framework, mesh, x, needs):
    needs(framework)
    made = []

    def make(context, v):
        made.append(context.device)
        return context.device

    def add(v, out, *, state):
        assert state == jaxbridge.current().device
        if framework == "cupy":
            import cupy

            out[...] = v + cupy.full(v.shape, 1 + state, v.dtype)
        else:
            import torch

            out.copy_(v + torch.full(v.shape, 1 + state, dtype=v.dtype, device=v.device))

    f = jaxbridge.call(add, like, out="out", framework=framework, state=make, scratch="xla")
    program = split(lambda v: f(f(v)), mesh)
    for _ in range(3):
        np.testing.assert_array_equal(program(x), expected(2))
    assert sorted(made) == [0, 1]


def test_I03_a_mesh_with_explicit_axes(devices, cp):
    explicit = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Explicit,), devices=devices)
    adds = Adds("cupy")
    f = jaxbridge.call(adds, like, out="out", elementwise=True)
    whole = jaxbridge.call(lambda v: v - v.mean(), like)
    with jax.set_mesh(explicit):
        v = jax.device_put(np.arange(2 * N, dtype=np.float32), NamedSharding(explicit, P("d")))
        y = jax.jit(f)(v)
        assert jax.typeof(y).sharding.spec == P("d")
        np.testing.assert_array_equal(y, expected(1))
        assert "all-gather" not in jax.jit(f).lower(v).compile().as_text()
        with pytest.raises(errors.ShardingError, match="axis 0 of argument 0 is sharded over 'd'"):
            whole(v)
    adds.check()


@pytest.mark.parametrize("graph", ["off", "replay"])
def test_I05_a_long_run_with_collectives_and_donated_state(graph, mesh, x, cp):
    """Python on both devices, a sum over both after each call, state that is donated: it ends, rightly."""
    f = jaxbridge.call(lambda v, out: cp.add(v, 1, out=out), like, out="out", graph=graph)
    g = jaxbridge.call(lambda v: v * 0.5, like, framework="numpy")

    def step(v):
        for _ in range(4):
            v = f(v)
            v = v - jax.lax.pmean(v, "d") + 1
        return g(v)

    program = jax.jit(
        jax.shard_map(step, mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=False),
        donate_argnums=0,
    )
    state, want = x + 0, np.arange(2 * N, dtype=np.float64)
    for _ in range(300):
        state = program(state)
        for _ in range(4):
            want = want + 1
            want = want - np.tile(want.reshape(2, N).mean(0), 2) + 1
        want = want * 0.5
    np.testing.assert_allclose(state, want, rtol=1e-5, atol=1e-4)


def test_I06_torch_on_the_second_device(devices, needs):
    needs("torch")
    import torch

    f = jaxbridge.torch_function(lambda x, y: torch.sin(x) * y)
    on = [jax.device_put(np.linspace(0, 1, 5, dtype=np.float32), d) for d in devices]
    y = f(on[1], on[1])
    assert y.devices() == {devices[1]}
    np.testing.assert_allclose(y, np.sin(on[1]) * np.asarray(on[1]), rtol=1e-6)
    g = jax.jit(jax.grad(lambda x: f(x, x).sum()))(on[1])
    assert g.devices() == {devices[1]}
    np.testing.assert_allclose(g, np.cos(on[1]) * np.asarray(on[1]) + np.sin(on[1]), rtol=1e-5)
    with pytest.raises(ValueError, match="incompatible devices"):
        jax.jit(f)(on[0], on[1])


def test_threads_with_a_device_each(devices, cp):
    """The same Function from two threads, each with its own device, at once."""
    adds = Adds("cupy")
    f = jaxbridge.call(adds, like, out="out", graph="replay")
    program = jax.jit(lambda v: jax.lax.fori_loop(0, 10, lambda i, v: f(v), v))
    failed = []

    def work(k):
        try:
            v = jax.device_put(np.zeros(N, np.float32), devices[k])
            for _ in range(50):
                np.testing.assert_array_equal(program(v), 10 * (1 + k))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(k % 2,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failed, failed
    adds.check()

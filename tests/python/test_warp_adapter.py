# SPDX-License-Identifier: Apache-2.0
"""Warp's adapter on fake devices: their turns, streams and allocators."""

import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator
from typing import Any

import pytest

from fake_buffer import FRAMEWORKS, adapter_of


@pytest.fixture(params=FRAMEWORKS)
def adapter(request: pytest.FixtureRequest) -> Any:
    return adapter_of(request.param)


@pytest.fixture
def other_device() -> Iterator[Any]:
    """Warp's default device is another one, as it is where a GPU is present."""
    import warp as wp

    runtime = wp.get_device("cpu").runtime
    before = runtime.default_device
    runtime.default_device = types.SimpleNamespace(alias="other", is_cuda=False, is_cpu=False)
    yield runtime.default_device
    runtime.default_device = before


def test_warp_works_on_the_device_of_the_call(request: pytest.FixtureRequest) -> None:
    adapter = adapter_of("warp")
    import warp as wp

    other = request.getfixturevalue("other_device")
    with adapter.scope("cpu", 0, 0):
        assert wp.get_device() is wp.get_device("cpu")
        with adapter.scope("cpu", 0, 0):
            assert wp.get_device() is wp.get_device("cpu")
        assert wp.get_device() is wp.get_device("cpu")
        assert wp.zeros(3).device.is_cpu
    assert wp.get_device() is other
    with pytest.raises(KeyError), adapter.scope("cpu", 0, 0):
        raise KeyError
    assert wp.get_device() is other


def test_warp_calls_of_several_threads(request: pytest.FixtureRequest) -> None:
    adapter = adapter_of("warp")
    import warp as wp

    other = request.getfixturevalue("other_device")
    cpu = wp.get_device("cpu")
    together = threading.Barrier(4, timeout=30)
    wrong: list[Any] = []

    def work() -> None:
        for _ in range(100):
            with adapter.scope("cpu", 0, 0):
                together.wait()  # all four are inside: they share the device
                if wp.get_device() is not cpu:
                    wrong.append(wp.get_device())

    threads = [threading.Thread(target=work, daemon=True) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
        assert not t.is_alive()
    assert wrong == []
    assert wp.get_device() is other


class FakeCudaDevice:
    """Of a Warp device what `_Turn` uses."""

    def __init__(self, name: str, runtime: Any) -> None:
        self.name, self.runtime, self.stream = name, runtime, f"own stream of {name}"
        self.ordinal = int(name[-1])
        self.own_allocator = self.allocator = FakeAllocator()

    def set_stream(self, stream: Any, sync: bool) -> None:
        assert not sync
        self.stream = stream

    def get_allocator(self) -> Any:
        return self.allocator

    def __repr__(self) -> str:
        return self.name


class FakeAllocator:
    memory_kind = "pool"

    def __init__(self) -> None:
        self.freed: list[Any] = []

    def allocate(self, size: int) -> int:
        return 0x2000

    def deallocate(self, ptr: int, size: int) -> None:
        self.freed.append((ptr, size))


class FakeWarpStream:
    def __init__(self, cuda_stream: int, device: FakeCudaDevice) -> None:
        self.cuda_stream, self.device, self.is_capturing = cuda_stream, device, False


class FakeScopedAllocator:
    def __init__(self, device: FakeCudaDevice, allocator: Any) -> None:
        self.device, self.allocator = device, allocator

    def __enter__(self) -> None:
        self.before, self.device.allocator = self.device.allocator, self.allocator

    def __exit__(self, *exc: object) -> None:
        self.device.allocator = self.before


@pytest.fixture
def warp_devices(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Two CUDA devices of Warp's, streams on them, and the calls that order streams."""
    adapter_of("warp")
    module: Any = sys.modules["jaxbridge._adapters.warp"]
    orders: list[Any] = []
    core = types.SimpleNamespace(stream_order=lambda *order: orders.append(order))
    monkeypatch.setattr(module, "_core", core)
    monkeypatch.setattr(module, "_ScopedAllocator", FakeScopedAllocator)
    runtime = types.SimpleNamespace(default_device="user's")
    devices = [FakeCudaDevice(f"cuda:{i}", runtime) for i in range(2)]
    streams = [FakeWarpStream(70 + i, devices[i % 2]) for i in range(4)]
    return types.SimpleNamespace(
        turn=module._Turn(), devices=devices, streams=streams, orders=orders, runtime=runtime
    )


def test_warp_devices_take_turns(warp_devices: Any) -> None:
    turn, devices, streams = warp_devices.turn, warp_devices.devices, warp_devices.streams
    runtime = warp_devices.runtime
    wrong: list[Any] = []

    def work(stream: Any) -> None:
        device = stream.device
        for _ in range(200):
            turn.take(device, stream)
            time.sleep(0)  # others run
            now = (runtime.default_device, device.stream, device.allocator.inner)
            if now != (device, stream, device.own_allocator):
                wrong.append((device, stream, now))
            turn.give_back()

    threads = [threading.Thread(target=work, args=(streams[i % 4],), daemon=True) for i in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
        assert not t.is_alive()
    assert wrong == []
    assert runtime.default_device == "user's"
    assert [d.stream for d in devices] == ["own stream of cuda:0", "own stream of cuda:1"]
    assert [d.allocator is d.own_allocator for d in devices] == [True, True]
    assert warp_devices.orders == []  # nothing was allocated

    turn.take(devices[0], streams[0])
    with pytest.raises(RuntimeError, match=r"cuda:0 called JAX.*cuda:1"):
        turn.take(devices[1], streams[1])
    turn.give_back()
    assert runtime.default_device == "user's"


def test_warp_frees_after_the_work_of_the_stream(warp_devices: Any) -> None:
    turn, orders = warp_devices.turn, warp_devices.orders
    device, stream = warp_devices.devices[0], warp_devices.streams[0]
    turn.take(device, stream)
    allocator = device.get_allocator()
    assert allocator.memory_kind == "pool"
    kept = [allocator.allocate(8), allocator.allocate(8)]
    allocator.deallocate(kept.pop(), 8)
    assert orders == [(70, 0, 0)]  # before the free
    assert device.own_allocator.freed == [(0x2000, 8)]
    turn.give_back()
    assert orders == [(70, 0, 0)] * 2  # for what outlives the call
    allocator.deallocate(kept.pop(), 8)
    assert orders == [(70, 0, 0)] * 2
    assert len(device.own_allocator.freed) == 2

    # A later call may use what an earlier one has allocated.
    turn.take(device, stream)
    assert device.get_allocator() is allocator
    turn.give_back()
    assert orders == [(70, 0, 0)] * 3

    stream.is_capturing = True
    turn.take(device, stream)
    allocator.deallocate(allocator.allocate(8), 8)
    turn.give_back()
    assert orders == [(70, 0, 0)] * 3

    # Another allocator of the user's.
    stream.is_capturing = False
    device.allocator = other = FakeAllocator()
    turn.take(device, stream)
    device.get_allocator().deallocate(device.get_allocator().allocate(8), 8)
    turn.give_back()
    assert other.freed == [(0x2000, 8)]
    assert device.allocator is other


def test_warp_starts_without_a_greeting() -> None:
    pytest.importorskip("warp", reason="warp is not installed")
    code = (
        "import warp; before = vars(warp.config).copy();"
        "import jaxbridge._adapters as a; a.get('warp');"
        "assert warp.config.log_level == before['log_level']"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout == ""

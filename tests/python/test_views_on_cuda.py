# SPDX-License-Identifier: Apache-2.0
"""Views of memory on CUDA, against the fake driver: in processes of their own, since it is loaded once."""

import pytest

from fake_cuda import library
from processes import run

pytestmark = pytest.mark.skipif(
    library() is None, reason="needs the fake driver (make test builds it)"
)

START = """
import gc, weakref
import numpy as np
from fake_cuda import FakeCuda
import jaxbridge
from jaxbridge import _core, _views

fake = FakeCuda()
fake.reset()
block = np.arange(24, dtype=np.float32)
fake.declare(block, 1)

class Interface:
    def __init__(self, **fields):
        self.__cuda_array_interface__ = dict(block.__array_interface__, version=3) | fields
        self.kept = block

def raises(kind, text, use):
    try:
        use()
    except kind as error:
        assert text in str(error), error
        return
    raise AssertionError(f"no {kind}")

def waits():
    # (stream that waits, event that it waits for) and (event, stream on which it was recorded)
    calls = fake.calls()
    return (
        [tuple(a[:2]) for n, a in calls if n == "cuStreamWaitEvent"],
        {a[0]: a[1] for n, a in calls if n == "cuEventRecord"},
    )

def waited(to, source):
    waiting, recorded = waits()
    return any(s == to and recorded.get(e) == source for s, e in waiting)
"""


def run_with_fake(program: str) -> None:
    import textwrap
    from pathlib import Path

    done = run(
        START + textwrap.dedent(program) + "\nprint('end')\n",
        path=Path(__file__).parent,
        env={"JAXBRIDGE_CUDA_DRIVER": str(library())},
    )
    assert done.stdout.splitlines()[-1] == "end", done.stderr


def test_the_driver_says_where_memory_is():
    """C15, D04, and mapped and managed memory of C12."""
    run_with_fake("""
    v = _views.of(Interface())[0]
    assert (v.platform, v.memory, v.ordinal, v.__dlpack_device__()) == ("cuda", "device", 1, (2, 1))
    host = np.ones(4, np.float32)
    raises(ValueError, "the driver knows no such memory",
           lambda: jaxbridge.buffer(host.ctypes.data, (4,), "f4", "cuda"))
    raises(ValueError, "is on CUDA device 1, not on device 0",
           lambda: jaxbridge.buffer(block.ctypes.data, (4,), "f4", "cuda"))
    assert jaxbridge.buffer(block.ctypes.data, (4,), "f4", "cuda:1").ordinal == 1
    mapped, managed = np.ones(4, np.float32), np.ones(4, np.float32)
    fake.declare(mapped, 0, on_host=True)
    fake.declare(managed, 1, managed=True)
    v = jaxbridge.buffer(mapped.ctypes.data, (4,), "f4", "cuda")
    assert (v.memory, v.platform) == ("device", "cuda")
    v = jaxbridge.buffer(managed.ctypes.data, (4,), "f4", "cuda:1")
    assert (v.memory, v.__dlpack_device__()) == ("managed", (13, 1))
    np.testing.assert_array_equal(np.asarray(v), managed)
    # Nothing is asked about an array without elements.
    fake.clear_calls()
    jaxbridge.buffer(0, (0, 3), "f4", "cuda")
    assert fake.calls() == []
    """)


def test_streams_of_the_interface():
    run_with_fake("""
    own = fake.stream(1)
    for stream, want in [(None, 0), (1, 0), (2, 2), (own, own)]:
        assert _views.of(Interface(stream=stream))[0].stream == want
    assert _views.of(Interface())[0].stream == 0
    raises(ValueError, "stream 0 is not allowed", lambda: _views.of(Interface(stream=0)))
    raises(ValueError, "got -3", lambda: _views.of(Interface(stream=-3)))
    v = jaxbridge.buffer(block.ctypes.data, (4,), "f4", "cuda:1", stream=own)
    assert v.__cuda_array_interface__["stream"] == own
    assert v.__cuda_array_interface__["data"] == (block.ctypes.data, False)
    ready = jaxbridge.buffer(block.ctypes.data, (4,), "f4", "cuda:1")
    assert ready.__cuda_array_interface__["stream"] is None
    at_null = jaxbridge.buffer(block.ctypes.data, (4,), "f4", "cuda:1", stream=0)
    assert at_null.__cuda_array_interface__["stream"] == 1
    assert not hasattr(v, "__array_interface__")
    raises(TypeError, "on CUDA", lambda: np.asarray(v))
    raises(BufferError, "on CUDA", lambda: memoryview(v))
    """)


def test_the_consumer_waits_for_the_producer():
    """E02, E04: which stream waits, for each stream that DLPack knows."""
    run_with_fake("""
    own, other = fake.stream(1), fake.stream(1)
    v = jaxbridge.buffer(block.ctypes.data, (4,), "f4", "cuda:1", stream=own)
    for asked, waiting in [(None, 0), (1, 0), (2, 2), (other, other)]:
        fake.clear_calls()
        v.__dlpack__(stream=asked)
        assert waited(waiting, own), (asked, fake.calls())
    for asked in (-1, own):
        fake.clear_calls()
        v.__dlpack__(stream=asked)
        assert waits()[0] == []
    raises(ValueError, "stream 0 is not allowed", lambda: v.__dlpack__(stream=0))
    # A device whose primary context was not current before, and is not after.
    names = [n for n, _ in fake.calls()]
    assert names.count("cuCtxPushCurrent") == names.count("cuCtxPopCurrent")
    # What is ready already makes nobody wait.
    fake.clear_calls()
    jaxbridge.buffer(block.ctypes.data, (4,), "f4", "cuda:1").__dlpack__(stream=other)
    assert waits()[0] == []
    """)


def test_a_consumer_that_is_captured():
    """E05: the host waits instead, and the capture goes on."""
    run_with_fake("""
    import ctypes
    own, captured = fake.stream(1), fake.stream(1)
    v = jaxbridge.buffer(block.ctypes.data, (4,), "f4", "cuda:1", stream=own)
    relaxed = ctypes.c_int(2)
    assert fake("begin_capture", ctypes.c_int, ctypes.c_void_p(captured), relaxed) == 0
    assert _core.is_capturing(captured, 1) and not _core.is_capturing(own, 1)
    fake.clear_calls()
    v.__dlpack__(stream=captured)
    names = [n for n, _ in fake.calls()]
    assert "cuStreamSynchronize" in names and "cuStreamWaitEvent" not in names
    work = ctypes.c_size_t()
    at = ctypes.c_void_p(ctypes.addressof(work))
    assert fake("end_capture", ctypes.c_int, ctypes.c_void_p(captured), at) == 0
    """)


def test_an_owner_goes_after_the_last_use():
    """E07: for what goes out, and for what comes in."""
    run_with_fake("""
    class Owner:
        pass

    def pending():
        # Work that is not done as long as the stream is held.
        stream = fake.stream(1)
        blocker = fake.stream(1)
        fake.hold(stream, 2)
        _core.stream_order(blocker, stream, 1)
        return stream

    def is_dead(reference):
        while reference() is not None:
            _core.release_unused()
        return True

    # Out: the consumer's stream.
    stream, owner = pending(), Owner()
    dead = weakref.ref(owner)
    v = jaxbridge.buffer(block.ctypes.data, (4,), "f4", "cuda:1", owner=owner)
    v.use_on(stream, object())
    del owner, v
    assert dead() is not None and _core.release_unused() == 1
    fake.hold(stream, 0)
    assert is_dead(dead)

    # In: XLA's, when JAX lets go of its capsule.
    stream, owner = pending(), Owner()
    dead = weakref.ref(owner)
    v = jaxbridge.buffer(block.ctypes.data, (4,), "f4", "cuda:1", owner=owner)
    capsule = _core.hand_over(v, stream)
    assert _core.live_imports(block.ctypes.data) == 1
    del owner, v, capsule
    assert dead() is not None
    assert _core.live_imports(block.ctypes.data) == 1
    fake.hold(stream, 0)
    assert is_dead(dead)
    while _core.live_imports(block.ctypes.data):
        pass

    # An idle stream: at once.
    owner = Owner()
    dead = weakref.ref(owner)
    v = jaxbridge.buffer(block.ctypes.data, (4,), "f4", "cuda:1", owner=owner)
    del owner
    capsule = _core.hand_over(v, fake.stream(1))
    del v, capsule
    assert dead() is None

    # The stream of a thread is looked for on any thread: the legacy one stands for it.
    v = jaxbridge.buffer(block.ctypes.data, (4,), "f4", "cuda:1")
    v.use_on(2, None)
    fake.clear_calls()
    del v
    assert [a[1] for n, a in fake.calls() if n == "cuEventRecord"] == [0]

    # At the end of the process: left where it is.
    stream, owner = pending(), Owner()
    v = jaxbridge.buffer(block.ctypes.data, (4,), "f4", "cuda:1", owner=owner)
    v.use_on(stream, object())
    """)


def test_export_streams():
    run_with_fake("""
    first, second = _core.export_stream(0), _core.export_stream(1)
    assert first and second and first != second
    assert _core.export_stream(0) == first
    """)

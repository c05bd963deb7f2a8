# SPDX-License-Identifier: Apache-2.0
"""Memory of others on CUDA that JAX updates, against the fake driver."""

import pytest

from fake_cuda import library
from views_on_fake import START, WITH_STUBS, run_with_fake

pytestmark = pytest.mark.skipif(
    library() is None, reason="needs the fake driver (make test builds it)"
)


IN_PLACE = """
from jaxbridge import _kept, _memory
from jaxbridge._memory import Memory

_memory._self_test = lambda platform, what: None
_memory._committed = lambda array: array
exports = []
_compat.stream_waits = lambda stream, array: exports.append((array, stream))
Array.sharding = None
Array.is_deleted = lambda self: False
Array.nbytes = property(lambda self: self.view.nbytes)
own = fake.stream(1)
"""


def run_in_place(program: str) -> None:
    run_with_fake(program, START + WITH_STUBS + IN_PLACE)


def test_inplace_waits_for_the_owner_and_the_owner_for_it():
    run_in_place("""
    x = jaxbridge.buffer(block.ctypes.data, (24,), "f4", "cuda:1", stream=own, owner=block)
    kept = _kept.Kept(x, {})
    assert waited(jaxs, own), "the import itself"
    assert _core.live_imports(block.ctypes.data) == 1
    fake.clear_calls()
    number = kept.begin("call", 0, None)
    assert waits() == [(compute, own)]
    new = Array(kept.memory.array.view)
    fake.clear_calls()
    kept.end(new, number)
    # Nothing has told that the program was enqueued: JAX orders the streams.
    assert exports == [(new, own)] and waits() == [] and kept.memory.array is new
    kept.leave("call")

    # A stream that is given goes before the array's own.
    other = fake.stream(1)
    for given in (other, 0):
        exports.clear()
        fake.clear_calls()
        number = kept.begin("call", 0, given)
        kept.end(new, number)
        kept.leave("call")
        assert waits() == [(compute, given)] and exports == [(new, given)]
    raises(RuntimeError, "was not updated", lambda: kept.end(Array(x.__class__ and
        jaxbridge.buffer(block.ctypes.data + 16, (4,), "f4", "cuda:1")), number))

    # What tells is the handler at the end of the program.
    exports.clear()
    assert kept.begin("call", 0, None) == number + 1
    import fake_xla

    fake_xla.call("jaxbridge.enqueued", [block], [block], compute)
    fake.clear_calls()
    kept.end(new, number + 1)
    kept.leave("call")
    assert waits() == [(own, compute)] and exports == []

    # No stream is known: the host waits.
    waits_of_host = []
    Array.block_until_ready = lambda self: waits_of_host.append(self)
    blind = _kept.Kept(jaxbridge.buffer(block.ctypes.data, (24,), "f4", "cuda:1"), {})
    fake.clear_calls()
    # It has a number all the same, lest the end of its program pass for that of one around it.
    assert blind.begin("call", 0, None) == number + 2
    assert [n for n, _ in fake.calls() if n == "cuEventRecord"] == []
    blind.end(blind.memory.array, 0)
    assert waits_of_host == [blind.memory.array]
    """)


def test_a_borrow_orders_both_ways():
    run_in_place("""
    x = jaxbridge.buffer(block.ctypes.data, (24,), "f4", "cuda:1", stream=own, owner=block)
    class Ref:
        pass
    memory = Memory(x, "ref")
    _compat.is_concrete_ref = _compat.is_external_ref = lambda ref: True
    storage = type("Storage", (), {"memory": memory})
    _compat.ref_storage = lambda ref: storage
    before = memory.array
    consumer = fake.stream(1)
    imports.clear()
    with jaxbridge.borrow(Ref(), "view", stream=consumer) as v:
        assert exports == [(before, consumer)], "the consumer's stream waits for JAX"
        assert (v.pointer, v.stream, v.readonly) == (block.ctypes.data, consumer, False)
        raises(RuntimeError, "lent to view", memory.usable)
        fake.clear_calls()
        assert imports == []
    assert waited(jaxs, consumer), "and JAX for the consumer's"
    assert imports == [(device, jaxs, 2)], "what is imported anew is behind that"
    assert memory.usable() is not before and _core.live_imports(block.ctypes.data) >= 1

    # Two at a time: JAX has it again behind both.
    second = fake.stream(1)
    a, b = jaxbridge.borrow(Ref(), stream=consumer), jaxbridge.borrow(Ref(), stream=second)
    a.acquire(), b.acquire()
    imports.clear()
    fake.clear_calls()
    a.release()
    assert imports == [] and waited(jaxs, consumer)
    b.release()
    assert len(imports) == 1 and waited(jaxs, second)

    # A borrow that could not begin leaves the Ref with JAX.
    def fails(stream, array):
        raise BufferError("no")
    _compat.stream_waits = fails
    raises(BufferError, "no", jaxbridge.borrow(Ref(), stream=consumer).acquire)
    memory.usable()

    # Another borrow ends while it cannot begin: JAX is behind that one.
    def ends_a(stream, array):
        a.release()
        raise BufferError("no")
    _compat.stream_waits = lambda stream, array: None
    a = jaxbridge.borrow(Ref(), stream=consumer)
    a.acquire()
    imports.clear()
    _compat.stream_waits = ends_a
    raises(BufferError, "no", jaxbridge.borrow(Ref(), stream=second).acquire)
    assert len(imports) == 1
    memory.usable()
    """)


def test_memory_that_a_captured_stream_uses_is_not_jaxs():
    run_in_place("""
    import ctypes
    import jax
    from jaxbridge import _core

    x = jaxbridge.buffer(block.ctypes.data, (24,), "f4", "cuda:1", stream=own, owner=block)
    memory = Memory(x, "ref")
    _compat.is_concrete_ref = _compat.is_external_ref = lambda ref: True
    storage = type("Storage", (), {"memory": memory})
    _compat.ref_storage = lambda ref: storage
    kept = _kept.Kept(x, {})
    before = memory.array

    def capture():
        relaxed = ctypes.c_int(2)
        assert fake("begin_capture", ctypes.c_int, ctypes.c_void_p(own), relaxed) == 0

    def end_of_capture():
        work = ctypes.c_size_t()
        at = ctypes.c_void_p(ctypes.addressof(work))
        assert fake("end_capture", ctypes.c_int, ctypes.c_void_p(own), at) == 0
        assert work.value == 0, "something of JAX's was captured"

    capture()
    begun = jaxbridge.borrow(object(), stream=own)
    raises(BufferError, "outside of the capture", begun.acquire)
    raises(BufferError, "inplace: the stream", lambda: kept.begin(_kept.Call(), 0, None))
    for take, what in ((jaxbridge.ref, "ref"), (lambda x: _kept.Kept(x, {}), "inplace")):
        raises(BufferError, f"{what}: stream", lambda: take(x))
    end_of_capture()
    assert memory.usable() is before and exports == []
    begun.acquire()
    capture()
    imports.clear()
    raises(BufferError, "outside of the capture", begun.release)
    end_of_capture()
    raises(RuntimeError, "lent to view", memory.usable)
    assert imports == []
    begun.release()
    assert len(imports) == 1
    memory.usable()
    """)


def test_a_call_of_inplace_that_fails():
    """What its program has enqueued is waited for: the owner's stream is not behind it."""
    run_in_place("""
    import ctypes

    x = jaxbridge.buffer(block.ctypes.data, (24,), "f4", "cuda:1", stream=own, owner=block)
    step = jaxbridge.inplace(lambda x: x)
    kept = step._memories[id(x)] = _kept.Kept(x, step._memories)
    kept.count = 1

    def synchronized():
        return [a[0] for n, a in fake.calls() if n == "cuStreamSynchronize"]

    # Before the program runs there is nothing to wait for, and no harm to a capture.
    kept.program = lambda *_: 1 / 0
    assert fake("begin_capture", ctypes.c_int, ctypes.c_void_p(own), ctypes.c_int(2)) == 0
    fake.clear_calls()
    raises(BufferError, "outside of the capture", lambda: step(x))
    assert synchronized() == [] and _kept.in_use == {} and step._memories == {id(x): kept}
    work = ctypes.c_size_t()
    at = ctypes.c_void_p(ctypes.addressof(work))
    assert fake("end_capture", ctypes.c_int, ctypes.c_void_p(own), at) == 0

    _core.make_current(0)
    for failure in (KeyError("of the program"), KeyboardInterrupt("of the user")):
        def fails(array):
            assert synchronized() == []
            _core.make_current(fake("primary", ctypes.c_void_p, ctypes.c_int(1)))
            raise failure
        step._memories[id(x)], kept.program = kept, fails
        fake.clear_calls()
        raises(type(failure), "of the", lambda: step(x))
        assert synchronized() == [compute]
        assert _kept.in_use == {} and step._memories == {} and _core.current_context() == 0
    """)


def test_pinned_memory_is_the_devices_where_it_is_updated():
    run_in_place("""
    host = np.arange(24, dtype=np.float32)
    fake.declare(host, 1, on_host=True)
    address, dtype = host.ctypes.data, np.dtype("f4")
    pinned = _core.view_of_memory(address, (24,), dtype, "pinned", 1, None, None, False, host)
    _imports.device_of = lambda v, wanted: device
    imports.clear()
    Memory(pinned, "ref")
    assert [kind for *_, kind in imports] == [2], imports
    """)

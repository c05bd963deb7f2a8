# SPDX-License-Identifier: Apache-2.0
"""Views of memory on CUDA, and the ways in and out, against the fake driver."""

import pytest

from fake_cuda import library
from views_on_fake import START, WITH_STUBS, run_with_fake

pytestmark = pytest.mark.skipif(
    library() is None, reason="needs the fake driver (make test builds it)"
)


def test_L04_memory_of_another_context():
    """JAX works in the primary context, and does not reach it."""
    run_with_fake("""
    foreign = np.ones(4, np.float32)
    fake.declare_foreign(foreign, 1)
    class Foreign:
        __cuda_array_interface__ = dict(foreign.__array_interface__, version=3)
    for use in (
        lambda: _views.of(Foreign()),
        lambda: jaxbridge.buffer(foreign.ctypes.data, (4,), "f4", "cuda:1"),
        lambda: jaxbridge.from_external(Foreign()),
    ):
        raises(BufferError, "belongs to a CUDA context that is not the primary one", use)
    """)


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
    # That of a thread is another one in another thread: the legacy one waits for all of them.
    for stream, want in [(None, 0), (1, 0), (2, 0), (own, own)]:
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
        assert waits() == []
    raises(ValueError, "stream 0 is not allowed", lambda: v.__dlpack__(stream=0))
    for wrong in ("x", 1.5, b"", object(), [1]):
        raises(TypeError, "expected None or an integer", lambda: v.__dlpack__(stream=wrong))
    raises(ValueError, "no handle", lambda: v.__dlpack__(stream=2**70))
    v.__dlpack__(stream=np.int64(other))
    # A device whose primary context was not current before, and is not after.
    names = [n for n, _ in fake.calls()]
    assert names.count("cuCtxPushCurrent") == names.count("cuCtxPopCurrent")
    # What is ready already makes nobody wait.
    fake.clear_calls()
    jaxbridge.buffer(block.ctypes.data, (4,), "f4", "cuda:1").__dlpack__(stream=other)
    assert waits() == []
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
    v = for_consumer(v, stream, object())
    del owner, v
    assert dead() is not None and _core.release_unused() == 1
    fake.hold(stream, 0)
    assert is_dead(dead)

    # In: XLA's, when JAX lets go of its capsule.
    stream, owner = pending(), Owner()
    dead = weakref.ref(owner)
    v = jaxbridge.buffer(block.ctypes.data, (4,), "f4", "cuda:1", owner=owner)
    capsule = _core.hand_over(v, stream, v, False)
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
    capsule = _core.hand_over(v, fake.stream(1), v, False)
    del v, capsule
    assert dead() is None

    # The stream of a thread is looked for on any thread: the legacy one stands for it.
    v = jaxbridge.buffer(block.ctypes.data, (4,), "f4", "cuda:1")
    v = for_consumer(v, 2)
    fake.clear_calls()
    del v
    assert [a[0] for n, a in fake.calls() if n == "cuStreamQuery"] == [0]

    # At the end of the process: left where it is.
    stream, owner = pending(), Owner()
    v = jaxbridge.buffer(block.ctypes.data, (4,), "f4", "cuda:1", owner=owner)
    v = for_consumer(v, stream, object())
    """)


def test_memory_of_others_that_jax_has_by_dlpack():
    """E07: JAX gives it back at once, to an owner who uses it again on any stream."""
    run_with_fake(
        """
    class Tensor:
        pass

    export_of_jax = _compat.export_dlpack
    _compat.export_dlpack = lambda part, stream: export_of_jax(part, stream=None)
    _to_external._ordinal_where = lambda dtype, sharding: 1
    own, blocker = fake.stream(1), fake.stream(1)

    class Adapter:
        platforms, max_ndim = frozenset({"cuda"}), 64
        def check_dtype(self, dtype, platform):
            pass
        def current_stream(self, ordinal):
            return own, None
        def array_of(self, view):
            return view
    _adapters._loaded["cupy"] = Adapter()

    tensor = Tensor()
    memory = jaxbridge.empty(1024, "f4")
    place = jaxbridge.buffer(memory.ctypes.data, (1024,), "f4", "cpu", owner=tensor)
    array = jax.dlpack.from_dlpack(place)
    assert array.unsafe_buffer_pointer() == memory.ctypes.data
    dead = weakref.ref(tensor)
    del tensor, place

    fake.hold(own, 2)
    _core.stream_order(blocker, own, 1)
    given = jaxbridge.to_external(array, "cupy")
    del given
    del array
    gc.collect()
    assert dead() is not None, "the consumer is at work"
    fake.hold(own, 0)
    while dead() is not None:
        _core.release_unused()
        gc.collect()
    """,
        START + WITH_STUBS,
    )


def test_page_locked_memory_goes_out_as_that_of_the_host():
    """Not all libraries know it by the name that DLPack has for it."""
    run_with_fake("""
    def out(make):
        host = jaxbridge.empty(4, "f4")
        place = host.ctypes.data, host.shape, host.dtype
        v = _core.view_of_memory(*place, "pinned", 1, None, None, False, host)
        capsule = v.__dlpack__()
        return _core.exporter(lambda _, stream: capsule, make=make)(OnOneDevice())
    assert out(None).__dlpack_device__() == (3, 0)
    assert out(lambda view: view).__dlpack_device__() == (1, 0)
    assert out(np.asarray).shape == (4,)
    """)


def test_export_streams():
    run_with_fake("""
    first, second = _core.export_stream(0), _core.export_stream(1)
    assert first and second and first != second
    assert _core.export_stream(0) == first
    """)


# ---- the ways in and out, with JAX's own steps put aside -----------------------------------------


def test_the_way_in():
    run_with_fake(
        """
    own = fake.stream(1)
    array = bring_in(Interface(stream=own), copy=False)
    assert imports == [(device, jaxs, 2)]
    assert waited(jaxs, own)
    assert array.unsafe_buffer_pointer() == block.ctypes.data
    # No stream: the legacy one. Ours: the one that is said, or none.
    bring_in(Interface(), copy=False)
    assert waited(jaxs, 0)
    bring_in(jaxbridge.buffer(block.ctypes.data, (4,), "f4", "cuda:1", stream=own), copy=False)
    assert waited(jaxs, own)
    bring_in(jaxbridge.buffer(block.ctypes.data, (4,), "f4", "cuda:1"), copy=False)
    assert waits() == [] and imports == [(device, jaxs, 2)]

    # A producer that puts JAX's stream in order itself.
    asked = []
    class Producer:
        def __dlpack_device__(self):
            return 2, 1
        def __dlpack__(self, *, stream=None, max_version=None):
            asked.append((stream, max_version))
            v = jaxbridge.buffer(block.ctypes.data, (24,), "f4", "cuda:1", owner=block)
            return v.__dlpack__(stream=-1, max_version=max_version)
    bring_in(Producer(), copy=False)
    assert asked == [(jaxs, (1, 2))] and imports == [(device, jaxs, 2)]
    assert waits() == []

    # A bare capsule says no stream: everything is waited for.
    capsule = Producer().__dlpack__(stream=-1)
    bring_in(capsule, copy=False)
    assert "cuCtxSynchronize" in [n for n, _ in fake.calls()]

    # An address only, and no order.
    fake.clear_calls()
    assert jaxbridge.pointer(Producer()) == block.ctypes.data
    assert asked[-1][0] == -1

    # Captured: refused before anything is enqueued.
    import ctypes
    assert fake("begin_capture", ctypes.c_int, ctypes.c_void_p(own), ctypes.c_int(2)) == 0
    raises(BufferError, "is being captured", lambda: bring_in(Interface(stream=own), copy=False))
    assert imports == [] and waits() == []
    work = ctypes.c_size_t()
    at = ctypes.c_void_p(ctypes.addressof(work))
    assert fake("end_capture", ctypes.c_int, ctypes.c_void_p(own), at) == 0

    # What XLA does not take, and how it is copied: from the first element reached, on.
    base = block.ctypes.data
    raises(BufferError, "no multiple of 16",
           lambda: bring_in(Interface(data=(base + 4, False), shape=(20,)), copy=False))
    raises(BufferError, "it is read-only", lambda: bring_in(Interface(data=(base, True)), copy=False))
    copied = []
    _from_external._gather = lambda *args: copied.append(args) or jnp.zeros(3)
    bring_in(Interface(data=(base + 4 * 20, False), shape=(5,), strides=(-16,), stream=own))
    flat, offset, shape, strides = copied.pop()
    start = flat.unsafe_buffer_pointer()
    assert start % 16 == 0 and base <= start <= base + 16
    assert start + 4 * offset == base + 80 and (shape, strides) == ((5,), (-4,))
    assert waited(jaxs, own) and waited(own, compute), "the producer's next write waits for the copy"
    bring_in(Interface(data=(base, True)))
    assert copied.pop()[1:] == (0, (24,), (1,))
    raises(BufferError, "is not aligned to its elements",
           lambda: bring_in(Interface(data=(base + 2, False), shape=(4,))))
    """,
        START + WITH_STUBS,
    )


def test_what_comes_in_is_kept_until_xla_is_past_it():
    run_with_fake(
        """
    class Owner:
        pass
    owner = Owner()
    dead = weakref.ref(owner)
    v = jaxbridge.buffer(block.ctypes.data, (24,), "f4", "cuda:1", owner=owner)
    array = bring_in(v, copy=False)
    del owner, v
    blocker = fake.stream(1)
    fake.hold(compute, 2)
    _core.stream_order(blocker, compute, 1)
    del array
    assert dead() is not None and _core.live_imports(block.ctypes.data) == 1
    fake.hold(compute, 0)
    while dead() is not None:
        _core.release_unused()
    while _core.live_imports(block.ctypes.data):
        pass
    """,
        START + WITH_STUBS,
    )


def test_the_end_of_a_borrow_is_on_the_stream_that_the_memory_is_imported_with():
    """JAX has several such streams, and gives the next one each time it is asked."""
    run_with_fake(
        """
    import itertools
    from jaxbridge import _memory

    several = itertools.cycle([fake.stream(1) for _ in range(4)])
    _compat.import_stream = lambda d: next(several)
    _memory._self_test = lambda *_: None
    _memory._committed = lambda array: array
    Array.is_deleted = lambda self: False

    memory = _memory.Memory(jaxbridge.buffer(block.ctypes.data, (24,), "f4", "cuda:1"), "Ref")
    own, other = fake.stream(1), fake.stream(1)
    for _ in range(3):
        one, two = object(), object()
        memory.lend(one, "cupy")
        memory.lend(two, "torch")
        imports.clear()
        fake.clear_calls()
        memory.take_back(one, [own])
        assert imports == []
        memory.take_back(two, [other])
        (_, ready, _), = imports
        assert waited(ready, own) and waited(ready, other)
    """,
        START + WITH_STUBS,
    )


def test_the_way_out():
    run_with_fake(
        """
    exported = []
    def export_dlpack(part, stream):
        exported.append(stream)
        return jaxbridge.buffer(block.ctypes.data, (24,), "f4", "cuda:1").__dlpack__(stream=-1)
    _compat.export_dlpack = export_dlpack
    _to_external._ordinal_where = lambda dtype, sharding: 1
    own = fake.stream(1)

    class Adapter:
        platforms, max_ndim, stream = frozenset({"cuda"}), 8, (own, None)
        def check_dtype(self, dtype, platform):
            pass
        def current_stream(self, ordinal):
            assert ordinal == 1
            return self.stream
        def array_of(self, view):
            return view
    adapter = _adapters._loaded["cupy"] = Adapter()

    a = jnp.zeros(24)
    for current, given, handle, jax_gets in [
        ((own, None), None, own, own),
        ((0, "kept"), None, 0, 1),
        ((0, None), own, own, own),
        ((0, None), 1, 0, 1),
    ]:
        adapter.stream = current
        exported.clear()
        v = jaxbridge.to_external(a, "cupy", stream=given)
        assert exported == [jax_gets]
        assert (v.stream, v.readonly, v.owner) == (handle, True, a)
        fake.clear_calls()
        del v
        looked_at = [c[1] for n, c in fake.calls() if n == "cuEventRecord"]
        looked_at += [c[0] for n, c in fake.calls() if n == "cuStreamQuery"]
        assert looked_at == [handle]
    v = jaxbridge.view(a)
    assert exported[-1] == v.stream == _core.export_stream(1)
    assert v.__cuda_array_interface__["stream"] == v.stream
    v = jaxbridge.to_external(a, "view", stream=own)
    assert (v.stream, exported[-1]) == (own, own)
    assert not jaxbridge.to_external(a, "cupy", copy=True).readonly

    # A stream that comes as an object.
    class Stream:
        ptr = own
    class WithObject(Adapter):
        current_stream, stream_object = None, staticmethod(lambda ordinal: Stream())
    _adapters._loaded["torch"] = WithObject()
    v = jaxbridge.to_external(a, "torch")
    assert (v.stream, exported[-1]) == (own, own)

    # Under a capture the host waits.
    import ctypes
    assert fake("begin_capture", ctypes.c_int, ctypes.c_void_p(own), ctypes.c_int(2)) == 0
    adapter.stream = (own, None)
    v = jaxbridge.to_external(a, "cupy")
    assert exported[-1] is None and v.stream is None
    fake.clear_calls()
    del v
    assert "cuEventRecord" not in [n for n, _ in fake.calls()]
    work = ctypes.c_size_t()
    at = ctypes.c_void_p(ctypes.addressof(work))
    assert fake("end_capture", ctypes.c_int, ctypes.c_void_p(own), at) == 0
    while _core.release_unused():
        pass
    """,
        START + WITH_STUBS,
    )


def test_what_was_current_is_so_again():
    run_with_fake("""
        import ctypes
        from jaxbridge import _compat
        from jaxbridge._current_device import keeps_current_device

        zero, one = (fake("primary", ctypes.c_void_p, ctypes.c_int(device)) for device in (0, 1))

        @keeps_current_device
        def leaves(context, fails=False):
            _core.make_current(context)
            if fails:
                raise KeyError("of the function")
            return context

        _core.stream_order(fake.stream(0), fake.stream(0), 0)
        _core.stream_order(fake.stream(1), fake.stream(1), 1)
        _compat.local_platforms = lambda: {"cpu", "cuda"}

        class Part:
            def addressable_data(self, index):
                return self

        def exported(left, fails):
            # As an array on device 1 goes out, by steps that each make something current.
            def stream(ordinal):
                assert _core.current_context() == one
                _core.make_current(left)
                return 0, None
            def export(part, stream):
                _core.make_current(left)
                return jaxbridge.buffer(block.ctypes.data, (4,), "f4", "cuda:1").__dlpack__(stream=-1)
            def make(view):
                _core.make_current(left)
                if fails:
                    raise KeyError("of the consumer")
                return view
            return _core.exporter(export, ordinal=1, stream=stream, make=make)(Part())

        for before in (zero, one, 0):
            _core.make_current(before)
            for left in (zero, one, 0):
                v = exported(left, False)
                assert _core.current_context() == before and v.stream == 0
                raises(KeyError, "of the consumer", lambda: exported(left, True))
                assert _core.current_context() == before
            for left in (zero, one, 0):
                assert leaves(left) == left
                assert _core.current_context() == before
                raises(KeyError, "of the function", lambda: leaves(left, fails=True))
                assert _core.current_context() == before
        _compat.local_platforms = lambda: {"cpu"}
        fake.clear_calls()
        assert leaves(one) == one
        assert [name for name, _ in fake.calls()] == ["cuCtxGetCurrent", "cuCtxSetCurrent"]
        assert _core.current_context() == one
        """)

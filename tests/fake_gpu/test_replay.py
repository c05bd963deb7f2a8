# SPDX-License-Identifier: Apache-2.0
"""graph= as XLA's calls on CUDA meet it, without a GPU."""

import gc
import threading
import weakref

import fake_gpu
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_gpu import (
    N,
    Program,
    X,
    array,
    copied_slowly,
    copies,
    fake,
    like,
    longer_than_copies,
    made,
    never_again,
)

import jaxbridge
from jaxbridge import _adapters, _core, current, errors


def test_a_list_is_captured_when_it_comes_again():
    runs = []
    f = made(lambda v, out: (runs.append(current().capturing), _core.copy(v, out)), graph="replay")
    program, stream = Program(f, X), fake.stream()
    a, b = array(N), array(N)
    for k in range(6):
        a[:] = k
        program([a], [b], stream)
        np.testing.assert_array_equal(b, k)
    assert runs == [False, True]
    stats = f.stats()
    assert (stats["calls"], stats["captures"], stats["replays"], stats["staged"]) == (6, 1, 4, 0)


def test_keys_are_exact():
    """Another device memory, stream or shape is another graph."""
    f = made(copies, graph="replay")
    program, other_shape = Program(f, X), Program(f, jnp.zeros(2, jnp.float32))
    streams = [fake.stream(), fake.stream()]
    a, b, c = array(N, 1), array(N), array(N)
    calls = [(program, [a], [b]), (program, [a], [c]), (other_shape, [a[:2]], [b[:2]])]
    for k in range(5):
        a[:] = k
        for stream in streams:
            for run, operands, results in calls:
                results[0][:] = -1
                run(operands, results, stream)
                np.testing.assert_array_equal(results[0], k)
    stats = f.stats()
    assert stats["captures"] == 6 and stats["replays"] == 18


def test_memory_that_never_comes_again(monkeypatch):
    f = made(copied_slowly, graph="replay")
    program, stream = Program(f, X), fake.stream()
    kept = never_again(program, 50, stream)
    stats = f.stats()
    assert stats["captures"] == 1 and stats["staged"] == stats["replays"] == 41
    # What comes again after all gets a graph of its own.
    a, b = kept[-1]
    for k in range(3):
        a[:] = k
        program([a], [b], stream)
        np.testing.assert_array_equal(b, k)
    assert f.stats()["captures"] == 2 and f.stats()["replays"] - f.stats()["staged"] == 2
    f.clear()
    never_again(program, 3, stream)
    assert f.stats()["captures"] == 2


def test_a_quick_function_is_not_staged():
    """Where running costs less than copying; `copy` on the fake driver does."""
    f = made(lambda v, out: _core.copy(v, out), graph="replay")
    # A call takes some microseconds here: more than the launch of a graph, so large arrays decide.
    n = 1 << 22
    program, stream = Program(f, jnp.zeros(n, jnp.float32)), fake.stream()
    kept = []
    for _ in range(12):
        a, b = array(n, 1), array(n)
        program([a], [b], stream)
        kept.append((a, b))
    assert f.stats()["captures"] in (0, 1)  # machines differ; the values are right either way
    assert all(b[-1] == 1 for _, b in kept)


def test_in_place_on_copies():
    def fn(v):
        longer_than_copies()
        _core.fill(v, 0)

    f = made(fn, inout={0: 0}, out=None, graph="replay")
    program, stream = Program(f, X), fake.stream()
    kept = []
    for k in range(14):
        a = array(N, k + 1)
        program([a], [a], stream)
        np.testing.assert_array_equal(a, 0)
        kept.append(a)
    assert f.stats()["staged"] == 5


def test_fallbacks_are_told_once_and_forgotten():
    def fn(v, out):
        if current().capturing:
            raise ValueError("not there")
        _core.copy(v, out)

    f = made(fn, graph="replay")
    program, stream = Program(f, X), fake.stream()
    a, b = array(N, 3), array(N)
    for _ in range(2):
        program([a], [b], stream)
        with pytest.warns(RuntimeWarning, match="could not be captured"):
            program([a], [b], stream)
        assert f.stats()["fallbacks"] == ["ValueError: not there"]
        f.clear()
        assert f.stats()["fallbacks"] == []
        program = Program(f, X)


def test_what_cannot_be_captured():
    def fn(v, out):
        if current().capturing:
            raise ValueError("not there")
        _core.copy(v, out)

    f = made(fn, graph="replay", name="test.refuses")
    program, stream = Program(f, X), fake.stream()
    a, b = array(N, 3), array(N)
    program([a], [b], stream)
    with pytest.warns(
        RuntimeWarning, match="test.refuses.*could not be captured.*ValueError: not there"
    ):
        program([a], [b], stream)
    for k in range(4):
        a[:] = k
        program([a], [b], stream)
        np.testing.assert_array_equal(b, k)
    assert f.stats()["fallbacks"] == ["ValueError: not there"]
    assert f.stats()["replays"] == f.stats()["captures"] == 0


def test_a_function_that_enqueues_nothing():
    f = made(lambda v, out: None, graph="replay")
    program, stream = Program(f, X), fake.stream()
    a, b = array(N), array(N)
    program([a], [b], stream)
    with pytest.warns(RuntimeWarning, match="enqueued nothing"):
        program([a], [b], stream)
    program([a], [b], stream)


def test_an_interrupt_in_a_capture_is_an_interrupt():
    def fn(v, out):
        if current().capturing:
            raise KeyboardInterrupt
        _core.copy(v, out)

    f = made(fn, graph="replay")
    program, stream = Program(f, X), fake.stream()
    a, b = array(N), array(N)
    program([a], [b], stream)
    with pytest.raises(RuntimeError, match="KeyboardInterrupt"):
        program([a], [b], stream)
    assert f.stats()["fallbacks"] == []


def test_a_view_that_is_kept_in_a_capture():
    kept = []

    def fn(v, out):
        _core.copy(v, out)
        if current().capturing:
            kept.append(v)

    f = made(fn, graph="replay")
    program, stream = Program(f, X), fake.stream()
    a, b = array(N), array(N)
    program([a], [b], stream)
    with pytest.raises(RuntimeError, match="ViewKeptError"):
        program([a], [b], stream)
    assert f.stats()["captures"] == 0


@pytest.mark.parametrize("graph", ["replay", "verify"])
def test_threads(graph):
    f = made(copies, graph=graph)
    program = Program(f, X)
    wrong = []
    barrier = threading.Barrier(4)

    def work(k):
        stream, a, b = fake.stream(), array(N), array(N)
        barrier.wait()
        for i in range(50):
            a[:] = k * 1000 + i
            program([a], [b], stream)
            if not (b == a).all():
                wrong.append((k, i))

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert wrong == [] and f.stats()["calls"] == 200


def test_graphs_end_with_clear():
    class Step:
        def __call__(self, v, out):
            _core.copy(v, out)

    fn = Step()
    ref = weakref.ref(fn)
    f = jaxbridge.call(fn, like, framework="buffer", out="out", graph="replay")
    program, stream = Program(f, X), fake.stream()
    a, b = array(N, 1), array(N)
    for _ in range(4):
        program([a], [b], stream)
    f.clear()
    a[:] = 7
    program([a], [b], stream)
    np.testing.assert_array_equal(b, 7)
    assert f.stats()["replays"] == 2
    del f, fn, program
    jax.clear_caches()
    gc.collect()
    assert ref() is None


# ---- what ends -----------------------------------------------------------------------------------


def never_captured_or_copied(v, out, raises=ValueError):
    if current().capturing:
        raise raises("on purpose")
    longer_than_copies()
    _core.copy(v, out)


def interrupted(v, out):
    never_captured_or_copied(v, out, KeyboardInterrupt)


@pytest.mark.parametrize(
    "fn, waits_in",
    [
        (never_captured_or_copied, "cuMemFree"),
        (interrupted, "cuMemFree"),
        (copied_slowly, "cuGraphLaunch"),
    ],
    ids=["memory of copies", "where it is interrupted", "a launch that fails"],
)
def test_what_ends_or_waits_does_so_without_the_gil(fn, waits_in):
    """Another thread has to run for the call to go on, and runs once the call is in the driver."""
    import ctypes
    import faulthandler

    f = made(fn, graph="replay")
    program, stream = Program(f, X), fake.stream()
    never_again(program, 7, stream)
    name = ctypes.c_char_p(waits_in.encode())
    a, b = array(N, 1), array(N)
    if waits_in == "cuGraphLaunch":
        fake.hold(stream, 2)  # the end of the graph that was not launched waits for it
        c, d = array(N, 1), array(N)
        program([c], [d], stream)
        fake.fail_next("cuGraphLaunch")
    else:
        never_again(program, 1, stream)
        fake("gather", None, name, ctypes.c_int(2))
    fake.clear_calls()

    def release():
        while waits_in not in [n for n, _ in fake.calls()]:
            pass
        fake("gather", None, name, ctypes.c_int(0))
        fake.hold(stream, 0)

    thread = threading.Thread(target=release)
    faulthandler.dump_traceback_later(60, exit=True)  # where no other thread can run
    try:
        thread.start()
        if fn is interrupted:
            with pytest.raises(RuntimeError, match="KeyboardInterrupt: on purpose"):
                program([a], [b], stream)
        else:
            with pytest.warns(RuntimeWarning, match="could not be captured"):
                program([a], [b], stream)
            np.testing.assert_array_equal(b, a)
        thread.join()
    finally:
        faulthandler.cancel_dump_traceback_later()


# ---- one inside the other ------------------------------------------------------------------------


@pytest.mark.parametrize("on", ["known memory", "copies"])
@pytest.mark.parametrize("graph", ["replay", "verify"])
def test_a_capture_from_before_clear_is_not_replayed(graph, on):
    """The function is cleared in the middle of its capture, here by itself."""
    value, captured = 1, []

    def fn(v, out):
        longer_than_copies()
        _core.fill(out, value)
        if current().capturing:
            captured.append(value)
            if value == 1:
                f.clear()

    f = made(fn, graph=graph)
    program, stream = Program(f, X), fake.stream()
    memory = [(array(N), array(N)) for _ in range(2 if on == "known memory" else 30)]

    def calls():
        for a, b in memory:
            program([a], [b], stream)
            assert (b.view(np.uint8) == value).all()
            if captured == [1] and value == 1:
                return

    calls()
    calls()
    assert captured == [1] and f.stats()["cache_size"] <= 1
    value = 2
    del memory[:]
    memory += [(array(N), array(N)) for _ in range(1 if on == "known memory" else 30)]
    for _ in range(5):
        calls()
    assert captured[1:] == [2] * len(captured[1:]) and len(captured) >= 2
    assert f.stats()["replays"] > 0 and f.stats()["fallbacks"] == []


def test_a_staged_call_inside_a_capture():
    """Its copies are not those of the call around it."""

    def small(v, out):
        longer_than_copies()
        _core.copy(v, out)

    inner = made(small, graph="replay")
    inner_program = Program(inner, jnp.zeros(0, jnp.float32))
    scratch, stream = [], fake.stream()

    def call_inner():
        a, b = array(0), array(0)
        scratch.append((a, b))
        inner_program([a], [b], stream)

    def outer(v, out):
        if current().capturing:
            call_inner()
        else:
            longer_than_copies()
        _core.copy(v, out)

    def twelve_times():
        for _ in range(12):
            call_inner()

    with pytest.warns(RuntimeWarning, match="enqueued nothing"):  # of the inner one
        twelve_times()
    f = made(outer, graph="replay")
    kept = never_again(Program(f, X), 40, stream)
    assert f.stats()["staged"] > 20
    assert all((a == b).all() for a, b in kept)


def test_the_context_in_a_capture():
    """It is the device's, as in a run, and what the function leaves current ends with the call."""
    import ctypes

    driver = fake_gpu.driver_functions("cuCtxGetCurrent", "cuCtxSetCurrent")
    seen = []

    def now():
        context = ctypes.c_void_p()
        assert driver["cuCtxGetCurrent"](ctypes.byref(context)) == 0
        return context.value

    def fn(v, out):
        seen.append((current().capturing, now()))
        _core.copy(v, out)
        assert driver["cuCtxSetCurrent"](None) == 0

    f = made(fn, graph="replay")
    program, stream = Program(f, X), fake.stream()
    a, b = array(N, 1), array(N)
    before = now()
    for _ in range(3):
        program([a], [b], stream)
        assert now() == before
    assert [capturing for capturing, _ in seen] == [False, True]
    assert seen[0][1] == seen[1][1] is not None


def test_a_call_that_failed_is_not_captured_next():
    failing = True

    def fn(v, out):
        assert not failing or not current().capturing
        if failing:
            raise OSError("not yet")
        _core.copy(v, out)

    f = made(fn, graph="replay")
    program, stream = Program(f, X), fake.stream()
    a, b = array(N, 1), array(N)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="not yet"):
            program([a], [b], stream)
    failing = False
    for _ in range(4):
        program([a], [b], stream)
    assert f.stats()["captures"] == 1 and f.stats()["replays"] == 2


def test_one_shape_that_cannot_be_captured():
    def fn(v, out):
        if current().capturing and v.shape == (4,):
            raise ValueError("not of four")
        _core.copy(v, out)

    f = made(fn, graph="replay")
    stream = fake.stream()
    four, eight = Program(f, jnp.zeros(4)), Program(f, jnp.zeros(8))
    a, b, c, d = array(4, 1), array(4), array(8, 1), array(8)
    four([a], [b], stream)
    with pytest.warns(RuntimeWarning, match="not of four"):
        four([a], [b], stream)
    for _ in range(5):
        four([a], [b], stream)
        eight([c], [d], stream)
    assert f.stats()["replays"] == 3
    assert (b == 1).all() and (d == 1).all()


class _Text(str):
    __slots__ = ()

    def encode(self, *args):
        return 5


class _Odd(Exception):
    def __str__(self):
        return _Text("odd")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (_Odd(), "_Odd: odd"),
        (ValueError("\udc80"), r"ValueError: \\udc80"),
        (MemoryError(), "MemoryError"),
        (KeyError("x"), "KeyError: 'x'"),
    ],
)
def test_texts_of_exceptions(error, text):
    def fn(v, out):
        if current().capturing:
            raise error
        _core.copy(v, out)

    f = made(fn, graph="replay")
    program, stream = Program(f, X), fake.stream()
    a, b = array(N, 1), array(N)
    program([a], [b], stream)
    with pytest.warns(RuntimeWarning, match="could not be captured"):
        program([a], [b], stream)
    program([a], [b], stream)
    assert f.stats()["fallbacks"] == [text.replace("\\\\", "\\")]


def test_a_graph_that_ends_in_a_capture():
    """A collection can come at any time."""
    ended = made(copies, graph="replay")
    stream = fake.stream()
    program = Program(ended, X)
    a, b = array(N, 1), array(N)
    for _ in range(3):
        program([a], [b], stream)

    def fn(v, out):
        nonlocal ended, program
        if current().capturing:
            ended.clear()
            del ended, program
            gc.collect()
        _core.copy(v, out)

    f = made(fn, graph="replay")
    other = Program(f, X)
    for k in range(4):
        a[:] = k
        other([a], [b], stream)
        np.testing.assert_array_equal(b, k)
    assert f.stats()["captures"] == 1 and f.stats()["fallbacks"] == []


def test_a_launch_that_fails_is_not_kept():
    f = made(copies, graph="replay")
    program, stream = Program(f, X), fake.stream()
    a, b = array(N, 1), array(N)
    program([a], [b], stream)
    fake.fail_next("cuGraphLaunch")
    with pytest.warns(RuntimeWarning, match="cuGraphLaunch"):
        program([a], [b], stream)
    for k in range(3):
        a[:] = k
        program([a], [b], stream)
        np.testing.assert_array_equal(b, k)
    assert f.stats()["replays"] == 0


def test_packed_and_narrow_types():
    from jaxbridge import _replay

    class Site:
        name = "test"

    import ml_dtypes

    for dtype in (ml_dtypes.int4, ml_dtypes.float8_e8m0fnu, np.int8):
        _replay.compare(Site, [(np.dtype(dtype), b"\x10", b"\x10")])
        with pytest.raises(errors.ReplayError):
            _replay.compare(Site, [(np.dtype(dtype), b"\x10", b"\x20")])


def test_the_end_of_graphs_waits_without_the_gil():
    """The stream waits for something that another Python thread gives."""
    f = made(copies, graph="replay")
    program, stream = Program(f, X), fake.stream()
    a, b = array(N, 1), array(N)
    for _ in range(3):
        program([a], [b], stream)
    fake.hold(stream, 2)
    program([a], [b], stream)  # waits in the stream
    done = []

    def release():
        while fake.blocked_threads() == 0 and not done:
            pass
        fake.hold(stream, 0)

    thread = threading.Thread(target=release)
    thread.start()
    del f, program
    jax.clear_caches()
    gc.collect()
    done.append(1)
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.parametrize("raises", [ValueError, KeyboardInterrupt])
def test_memory_of_a_capture_that_failed(monkeypatch, raises):
    """It is freed in the capture, where the driver forbids that to who does not ask."""
    import contextlib
    import ctypes

    driver = fake_gpu.driver_functions("cuMemAlloc", "cuMemFree")
    freed = []

    class Memory:
        def __init__(self):
            self.address = ctypes.c_uint64()
            before = _core.exchange_capture_mode(2)
            arguments = ctypes.byref(self.address), ctypes.c_size_t(256)
            assert (
                ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t)(
                    ctypes.cast(driver["cuMemAlloc"], ctypes.c_void_p).value
                )(*arguments)
                == 0
            )
            _core.exchange_capture_mode(before)

        def __del__(self):
            freed.append(driver["cuMemFree"](self.address.value))

    class Adapter(type(_adapters.get("buffer"))):
        name = "cupy"

        def capture_scope(self, ordinal, stream):
            return contextlib.nullcontext(), Memory()

    monkeypatch.setitem(_adapters._loaded, "cupy", Adapter())
    apart = []

    def fn(v, out):
        apart.append(1)
        if current().capturing:
            raise raises
        _core.copy(v, out)

    f = jaxbridge.call(fn, like, framework={"cuda": "cupy"}, out="out", graph="replay")
    program, stream = Program(f, X), fake.stream()
    a, b = array(N, 1), array(N)
    program([a], [b], stream)
    how = (
        pytest.warns(RuntimeWarning, match="ValueError")
        if raises is ValueError
        else pytest.raises(RuntimeError, match="KeyboardInterrupt")
    )
    with how:
        program([a], [b], stream)
    gc.collect()
    assert freed == [0]

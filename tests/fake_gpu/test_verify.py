# SPDX-License-Identifier: Apache-2.0
"""graph="verify": a replay is compared with a run, without a GPU."""

import ctypes
import threading

import jax.numpy as jnp
import numpy as np
import pytest
from fake_gpu import N, Program, X, array, copies, fake, longer_than_copies, made

from jaxbridge import _core, current


def test_verify_agrees():
    f = made(copies, graph="verify")
    program, stream = Program(f, X), fake.stream()
    a, b = array(N), array(N)
    for k in range(5):
        a[:] = k
        program([a], [b], stream)
        np.testing.assert_array_equal(b, k)
    stats = f.stats()
    assert (stats["calls"], stats["captures"], stats["replays"]) == (5, 1, 3)


def test_verify_finds_what_is_frozen():
    value = 1
    f = made(lambda v, out: _core.fill(out, value), graph="verify", name="test.frozen")
    program, stream = Program(f, jnp.zeros(N, jnp.int32)), fake.stream()
    a, b = np.zeros(N, np.int32), np.zeros(N, np.int32)
    for _ in range(3):
        program([a], [b], stream)
    value = 2
    with pytest.raises(
        RuntimeError, match=r"test\.frozen: a replay .* element 0 of result 0.*16843009"
    ):
        program([a], [b], stream)
    assert (b == 0x02020202).all()  # what the function itself gives
    value = 1
    program([a], [b], stream)


def test_verify_finds_what_is_frozen_on_copies():
    """On memory that does not come again, as replays are made there."""
    value, runs = 1, 0

    def fn(v):
        nonlocal runs
        runs += 1
        longer_than_copies()
        _core.fill(v, value)

    f = made(fn, inout={0: 0}, out=None, graph="verify")
    program, stream = Program(f, X), fake.stream()
    kept = [array(N, k) for k in range(14)]
    for a in kept[:12]:
        program([a], [a], stream)
        assert (a.view(np.uint8) == 1).all()
    stats = f.stats()
    assert (stats["calls"], stats["captures"], stats["replays"]) == (12, 1, 3)
    assert stats["staged"] == 3 and runs == 13
    value = 2
    with pytest.raises(RuntimeError, match="ReplayError: .*a replay of the function's CUDA graph"):
        program([kept[12]], [kept[12]], stream)
    assert (kept[12].view(np.uint8) == 2).all()  # what the function itself gives
    value = 1
    program([kept[13]], [kept[13]], stream)


@pytest.mark.parametrize("on", ["known memory", "copies"])
def test_verify_sees_work_outside_of_the_graph(on):
    """Its result is there from the capture on, as of work on CUDA's default stream."""

    def fn(v, out):
        first, second = out
        longer_than_copies()
        _core.copy(v, first)
        ctypes.memset(second.pointer, 7, second.nbytes)

    f = made(fn, lambda v: (v, v), graph="verify")
    program, stream = Program(f, X), fake.stream()
    kept = [(array(N, 1), array(N), array(N)) for _ in range(1 if on == "known memory" else 30)]
    with pytest.raises(RuntimeError, match="ReplayError.*result 1"):
        for a, b, c in kept * (4 if len(kept) == 1 else 1):
            program([a], [b, c], stream)
    assert f.stats()["captures"] == 1


def test_verify_puts_back_what_is_in_place():
    """Each of the two starts from the argument as it was: what it has is copied out, then cleared."""

    def moves(v, out):
        _core.copy(v, out)
        _core.fill(v, 0)

    f = made(moves, lambda v: (v, v), inout={0: 0}, graph="verify")
    program, stream = Program(f, X), fake.stream()
    a, b = array(N), array(N)
    for k in range(1, 5):
        a[:] = k
        program([a], [a, b], stream)
        assert (a == 0).all() and (b == k).all()
    assert f.stats()["captures"] == 1


def test_verify_sees_what_a_replay_does_not_write():
    def writes_one_of_two(v, out):
        first, second = out
        _core.copy(v, first)
        if not current().capturing:
            _core.copy(v, second)

    f = made(writes_one_of_two, lambda v: (v, v), graph="verify")
    program, stream = Program(f, X), fake.stream()
    a, b, c = array(N, 1), array(N), array(N)
    program([a], [b, c], stream)
    with pytest.raises(RuntimeError, match="ReplayError.*result 1"):
        program([a], [b, c], stream)


def test_a_graph_that_the_function_clears_ends_without_the_gil():
    """What was compared last is kept by nobody else when it ends."""
    import faulthandler

    def fn(v, out):
        _core.copy(v, out)
        if clears:
            f.clear()
            fake("gather", None, name, ctypes.c_int(2))

    f, clears, name = made(fn, graph="verify"), [], ctypes.c_char_p(b"cuGraphExecDestroy")
    program, stream = Program(f, X), fake.stream()
    a, b = array(N, 1), array(N)
    for _ in range(3):
        program([a], [b], stream)
    clears.append(True)

    def release():
        while not fake("gathered", ctypes.c_int):
            pass
        fake("gather", None, name, ctypes.c_int(0))

    thread = threading.Thread(target=release)
    faulthandler.dump_traceback_later(60, exit=True)
    try:
        thread.start()
        program([a], [b], stream)
        thread.join()
    finally:
        faulthandler.cancel_dump_traceback_later()
    np.testing.assert_array_equal(b, a)


def test_comparison():
    from jaxbridge import _replay

    f32 = np.float32

    def differ(run, replay):
        return _replay._difference(np.asarray(run), np.asarray(replay))

    assert differ(f32([1, np.nan, np.inf, 0.0]), f32([1 + 1e-6, np.nan, np.inf, -0.0])) is None
    assert differ(f32([1, 2]), f32([1, 2.1]))[0] == 1
    assert differ(f32([1e6, 1, 1]), f32([1e6, 100, 1]))[0] == 1
    assert differ(f32([1, 2]), f32([1, 2.0002]))[0] == 1
    assert differ(f32([]), f32([])) is None
    assert differ(f32([np.inf]), f32([-np.inf])) is not None
    assert differ(f32([np.nan]), f32([1])) is not None
    assert differ(np.int32([1, 2]), np.int32([1, 3])) == (1, 2, 3)
    assert differ(np.complex64([1 + 1j]), np.complex64([1 + 1.1j])) is not None
    assert differ(np.complex64([1 + 1j]), np.complex64([1 + 1.000001j])) is None
    half = jnp.bfloat16
    assert differ(np.asarray([1, 2], half), np.asarray([1, 2.0], half)) is None
    assert differ(np.asarray([1, 2], half), np.asarray([1, 3], half)) is not None

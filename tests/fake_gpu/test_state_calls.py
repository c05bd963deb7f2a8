# SPDX-License-Identifier: Apache-2.0
"""state= as XLA's calls on CUDA meet it, without a GPU."""

import ctypes
import gc
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_gpu import N, Program, X, array, fake, made

from jaxbridge import _core


@pytest.mark.parametrize("graph", ["off", "replay", "verify"])
def test_state_is_made_once(graph):
    made_of, seen = [], []

    def make(context, v, *, k):
        made_of.append((context.platform, context.device, context.capturing, v, k))
        return {"k": k}

    def fn(v, out, *, k, state):
        seen.append(state)
        _core.fill(out, state["k"])

    f = made(fn, graph=graph, state=make)
    program, other = Program(f, X, k=1), Program(f, X, k=2)
    stream = fake.stream()
    a, b = array(N), array(N)
    for _ in range(4):
        program([a], [b], stream)
        assert (b.view(np.uint8) == 1).all()
    other([a], [b], stream)
    spec = jax.ShapeDtypeStruct((N,), np.dtype(np.float32))
    assert made_of == [("cuda", 0, False, spec, 1), ("cuda", 0, False, spec, 2)]
    assert all(s is seen[0] for s in seen[:-1])
    f.clear()
    program([a], [b], stream)
    assert len(made_of) == 3


def test_state_that_can_not_be_made():
    attempts = []

    def make(context, v):
        attempts.append(1)
        if len(attempts) < 3:
            raise OSError("no plan today")
        return 5

    f = made(lambda v, out, state: _core.fill(out, state), state=make)
    program, stream = Program(f, X), fake.stream()
    a, b = array(N), array(N)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="OSError: no plan today"):
            program([a], [b], stream)
    program([a], [b], stream)
    program([a], [b], stream)
    assert len(attempts) == 3


def test_what_began_before_clear_leaves_nothing():
    """The call that made the state goes on with it; the next one makes its own, not in a capture."""
    inside, go, states = threading.Event(), threading.Event(), []

    def make(context, v):
        states.append(1)
        return len(states)

    def fn(v, out, state):
        if not inside.is_set():
            inside.set()
            assert go.wait(20)
        _core.fill(out, state)

    f = made(fn, graph="replay", state=make)
    program, stream = Program(f, X), fake.stream()
    a, b = array(N), array(N)
    thread = threading.Thread(target=lambda: program([a], [b], stream))
    thread.start()
    assert inside.wait(20)
    f.clear()
    go.set()
    thread.join()
    assert (b.view(np.uint8) == 1).all()
    for _ in range(4):
        program([a], [b], stream)
        assert (b.view(np.uint8) == 2).all()
    stats = f.stats()
    assert (stats["captures"], stats["replays"], stats["fallbacks"]) == (1, 2, [])


def test_states_of_graphs_of_xla_stay():
    """XLA makes its graphs again when it likes, and a state can't be made in a capture."""
    f = made(
        lambda v, out, state: _core.fill(out, state[0]), graph="xla", state=lambda c, v: states[-1]
    )
    states = [[5]]
    program, stream, captured = Program(f, X, capturable=True), fake.stream(), fake.stream()
    a, b = array(N), array(N)
    program([a], [b], stream)
    for _ in range(2):
        states.append([6])
        f.clear()
        assert fake("begin_capture", ctypes.c_int, ctypes.c_void_p(captured), ctypes.c_int(2)) == 0
        try:
            program([a], [b], captured)
        finally:
            works = ctypes.c_size_t()
            ended = fake(
                "end_capture", ctypes.c_int, ctypes.c_void_p(captured), ctypes.pointer(works)
            )
        assert (ended, works.value) == (0, 1)
    program([a], [b], stream)
    assert (b.view(np.uint8) == 5).all()


def test_state_ends():
    class State:
        pass

    refs = []

    def make(context, v):
        state = State()
        refs.append(weakref.ref(state))
        return state

    f = made(lambda v, out, state: _core.copy(v, out), state=make, graph="replay")
    program, stream = Program(f, X), fake.stream()
    a, b = array(N), array(N)
    for _ in range(4):
        program([a], [b], stream)
    gc.collect()
    assert refs[0]() is not None
    f.clear()
    gc.collect()
    assert refs[0]() is None


def test_state_in_threads():
    count = []
    barrier = threading.Barrier(4)

    def make(context, v):
        count.append(1)
        return 9

    f = made(lambda v, out, state: _core.fill(out, state), state=make)
    program = Program(f, X)
    right = []

    def work(stream):
        a, b = array(N), array(N)
        barrier.wait()
        program([a], [b], stream)
        right.append((b.view(np.uint8) == 9).all())

    shared = fake.stream()
    streams = [shared, shared, shared, fake.stream()]
    threads = [threading.Thread(target=work, args=(s,)) for s in streams]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert right == [True] * 4
    assert count == [1, 1]  # one for each stream


def test_states_outlive_plans():
    """Plans of many shapes come and go; what was made for them stays, for graphs, too."""
    made_of = []

    def make(context, v):
        made_of.append(v.shape)
        return len(made_of)

    f = made(lambda v, out, state: _core.copy(v, out), graph="replay", state=make)
    stream = fake.stream()
    programs = [Program(f, jnp.zeros(n, jnp.float32)) for n in range(1, 71)]
    arrays = [(array(n, n), array(n)) for n in range(1, 71)]
    for _ in range(4):
        for program, (a, b) in zip(programs, arrays, strict=True):
            b[:] = 0
            program([a], [b], stream)
            np.testing.assert_array_equal(b, a)
    stats = f.stats()
    assert made_of == [(n,) for n in range(1, 71)]
    assert stats["captures"] == 70 and stats["replays"] == 140 and stats["fallbacks"] == []


def test_makers_get_containers_of_their_own():
    attempts = []

    def make(context, options, v):
        attempts.append(options.pop("n"))
        if len(attempts) == 1:
            raise OSError("once")
        return 1

    f = made(lambda options, v, out, state: _core.fill(out, state), lambda o, v: v, state=make)
    program = Program(lambda v: f({"n": 3}, v), X)
    stream, a, b = fake.stream(), array(N), array(N)
    with pytest.raises(RuntimeError, match="once"):
        program([a], [b], stream)
    program([a], [b], stream)
    assert attempts == [3, 3]

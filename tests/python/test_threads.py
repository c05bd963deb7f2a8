# SPDX-License-Identifier: Apache-2.0
"""Calls at once, calls inside calls, and that nothing is locked while Python runs."""

import faulthandler
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbridge
from jaxbridge import _core, errors

WAIT = 30  # seconds until a barrier is broken


def like(x, *rest, **kw):
    return x


def at_once(*functions):
    """Runs each in a thread of its own; returns what they return, raises what they raise."""
    results = [None] * len(functions)
    raised = []

    def work(i):
        try:
            results[i] = functions[i]()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(functions))]
    [t.start() for t in threads]
    [t.join() for t in threads]
    if raised:
        raise raised[0]
    return results


def on(device, value):
    return jax.device_put(jnp.full(3, value, jnp.float32), jax.devices()[device])


@pytest.fixture(autouse=True)
def watchdog():
    """A deadlock ends the run and shows where every thread is."""
    faulthandler.dump_traceback_later(120, exit=True, file=sys.__stderr__)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def barrier():
    return threading.Barrier(2, timeout=WAIT)


@pytest.fixture
def busy_switching():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def test_one_function_on_two_devices(barrier):
    contexts = []

    def fn(v):
        barrier.wait()
        contexts.append((jaxbridge.current().device, float(v[0])))
        barrier.wait()
        assert jaxbridge.current().device == contexts[-1][0] or len(set(contexts)) == 2
        return v + 1

    f = jax.jit(jaxbridge.call(fn, like))
    a, b = at_once(lambda: f(on(0, 10)), lambda: f(on(1, 20)))
    assert a[0] == 11 and b[0] == 21 and a.devices() != b.devices()
    assert sorted(contexts) == [(0, 10), (1, 20)]


def test_two_functions_on_two_devices(barrier):
    def one(v):
        barrier.wait()
        return v + 1

    def two(v):
        barrier.wait()
        return v * 2

    f, g = jaxbridge.call(one, like), jaxbridge.call(two, like)
    a, b = at_once(lambda: f(on(0, 10)), lambda: g(on(1, 20)))
    assert a[0] == 11 and b[0] == 40


def test_shard_map_runs_devices_at_once(barrier):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), "i")
    P = jax.sharding.PartitionSpec

    def fn(v):
        barrier.wait()
        return v + jaxbridge.current().device

    f = jaxbridge.call(fn, like)
    y = jax.jit(jax.shard_map(lambda v: f(f(v)), mesh=mesh, in_specs=P("i"), out_specs=P("i")))
    np.testing.assert_array_equal(y(jnp.zeros(4)), [0, 0, 2, 2])


def test_the_first_call_of_one_function_by_two_threads(barrier, busy_switching):
    """Tracing, lowering, registering and planning at once."""
    for _ in range(5):
        captured = []

        def fn(v, captured=captured):
            captured.append(1)
            return v + 1

        f = jaxbridge.call(fn, like)

        def first(device, f=f):
            barrier.wait()
            return float(jax.jit(lambda v: f(v))(on(device, device))[0])

        assert at_once(lambda: first(0), lambda: first(1)) == [1, 2]
        assert len(captured) == 2 and f.stats()["calls"] == 2


def test_many_shapes_and_many_threads(busy_switching):
    f = jax.jit(jaxbridge.call(lambda v: v + v.size, like))
    for n in range(1, 9):
        f(jnp.zeros(n))

    def work(seed):
        for k in range(200):
            n = 1 + (seed + k) % 8
            y = f(jnp.full(n, seed, jnp.float32))
            assert y.shape == (n,) and float(y[-1]) == seed + n
        return True

    assert all(at_once(*[lambda i=i: work(i) for i in range(4)]))


def test_clear_while_others_call(busy_switching):
    f = jaxbridge.call(lambda v: v + v.size, like)
    g = jax.jit(f)
    stop = threading.Event()

    def clear():
        while not stop.is_set():
            f.clear()
            f.stats()
        return True

    def call():
        try:
            for n in range(300):
                assert float(g(jnp.zeros(1 + n % 3))[0]) == 1 + n % 3
        finally:
            stop.set()
        return True

    assert at_once(clear, call) == [True, True]
    assert f.stats()["calls"] == 300


@pytest.mark.parametrize("jit", [True, False], ids=["jit", "eager"])
def test_the_same_and_different_functions_at_once(jit, busy_switching):
    """In each round every thread calls another of the functions, then all call the same one."""
    count, rounds = 4, 12
    at = threading.Barrier(count, timeout=WAIT)
    states = [[0] for _ in range(count)]  # so that each Function counts for itself

    def add(i, state):
        return lambda v, out: (np.add(v, i, out=out), state)[0]

    functions = [
        jaxbridge.call(add(10**i, state), like, out="out") for i, state in enumerate(states)
    ]
    programs = [jax.jit(lambda v, f=f: f(v)) for f in functions] if jit else functions

    def work(k):
        v = want = np.full(5, k, np.float32)
        x = jax.device_put(v, jax.devices()[k % 2])
        for r in range(rounds):
            for i in ((k + r) % count, r % count):
                at.wait()
                x, want = programs[i](x), want + 10**i
            np.testing.assert_array_equal(x, want)
        return True

    assert at_once(*[lambda k=k: work(k) for k in range(count)]) == [True] * count
    assert [f.stats()["calls"] for f in functions] == [2 * rounds] * count


def test_one_function_twice_at_once_has_two_results(barrier):
    """On the same operand: each call writes its own result, and has arrays of its own."""
    ids = []

    def fn(v, out):
        barrier.wait()
        ids.append((id(v), id(out)))
        np.add(v, len(ids), out=out)
        barrier.wait()

    f = jax.jit(jaxbridge.call(fn, like, out="out"))
    x = on(0, 0)
    f_alone = f.lower(x).compile()
    for _ in range(5):
        ids.clear()
        a, b = at_once(lambda: np.asarray(f_alone(x)), lambda: np.asarray(f_alone(x)))
        assert sorted((a[0], b[0])) == [1, 2]
        assert len({i for pair in ids for i in pair}) == 4


def test_a_view_that_is_kept_on_one_thread_only(barrier):
    """The other thread's call of the same function, on the same array, is not to blame."""
    kept, keeper = [], []

    def fn(v):
        barrier.wait()
        if threading.get_ident() in keeper:
            kept.append(v)
        barrier.wait()
        return v + 1

    x = on(0, 1)
    # Compiled before: of a first call, JAX lets others wait until it has run.
    f = jax.jit(jaxbridge.call(fn, like)).lower(x).compile()

    def keeps():
        keeper.append(threading.get_ident())
        error = pytest.raises(errors.ViewKeptError, match="kept a view of argument 0")
        with error, jaxbridge.reraise():
            jax.block_until_ready(f(x))
        return True

    for _ in range(3):
        y, done = at_once(lambda: np.asarray(f(x)), keeps)
        assert done and (y == 2).all()
        kept.clear()
        keeper.clear()


def test_a_ref_for_each_thread(busy_switching):
    """One function updates several Refs in place at once."""
    count, turns = 4, 50
    at = threading.Barrier(count, timeout=WAIT)

    def add(r, amount):
        r += amount

    f = jaxbridge.call(add, ())
    step = jax.jit(lambda r, amount: f(r, amount))

    def work(k):
        ref = jax.new_ref(on(k % 2, 0))
        amount = on(k % 2, k + 1)
        at.wait()
        for _ in range(turns):
            step(ref, amount)
        return np.asarray(ref[...]).tolist()

    results = at_once(*[lambda k=k: work(k) for k in range(count)])
    assert results == [[turns * (k + 1.0)] * 3 for k in range(count)]


def test_functions_that_come_and_go_at_once(collected):
    """Registered, called and destroyed by several threads; nothing of them stays."""
    count = 4
    at = threading.Barrier(count, timeout=WAIT)
    collected()
    before = _core.registry_size()

    def work(k):
        for turn in range(20):
            captured = [turn]
            at.wait()
            f = jaxbridge.call(lambda v, captured=captured: v + captured[0] + k, like)
            assert float(jax.jit(lambda v, f=f: f(v))(on(k % 2, 0))[0]) == turn + k
            del f
        return True

    assert at_once(*[lambda k=k: work(k) for k in range(count)]) == [True] * count
    collected()
    assert _core.registry_size() == before


def test_ufuncs_and_lazy_calls_at_once(busy_switching):
    """The other entry points, the same on two threads and different ones on two others."""
    count = 4
    at = threading.Barrier(count, timeout=WAIT)
    exp = jaxbridge.from_ufunc(np.exp)
    calls = [
        lambda x: exp(x),
        lambda x: jaxbridge.lazy_apply(np.exp, x, shape=x.shape, dtype=x.dtype),
    ]

    def work(k):
        for turn in range(20):
            x = on(k % 2, turn / 8)
            at.wait()
            y = jax.jit(calls[k // 2])(x)
            np.testing.assert_allclose(y, np.exp(np.full(3, turn / 8, np.float32)), rtol=1e-6)
        return True

    assert at_once(*[lambda k=k: work(k) for k in range(count)]) == [True] * count


# ---- calls inside calls --------------------------------------------------------------------------


def test_a_call_inside_a_call():
    contexts = []

    def inner(v):
        contexts.append(("inner", jaxbridge.current(), _core.call_depth()))
        return v * 2

    f = jaxbridge.call(inner, like)
    program = jax.jit(lambda v: f(v) + 1)

    def outer(v):
        contexts.append(("outer", jaxbridge.current(), _core.call_depth()))
        before = v.copy()
        y = np.asarray(program(on(1, 5)))
        z = np.asarray(f(on(1, 6)))
        assert jaxbridge.current() == contexts[0][1] and _core.call_depth() == 1
        np.testing.assert_array_equal(v, before)
        return v + y + z

    np.testing.assert_array_equal(jaxbridge.call(outer, like)(on(0, 1)), [24, 24, 24])
    # A program that runs inside a call may run on a thread of XLA's.
    assert [(name, c.device) for name, c, _ in contexts] == [
        ("outer", 0), ("inner", 1), ("inner", 1),
    ]  # fmt: skip
    assert contexts[0][2] == 1 and _core.call_depth() == 0
    with pytest.raises(RuntimeError, match="inside a function"):
        jaxbridge.current()


def test_deep_calls():
    def level(n):
        if n == 0:
            return jaxbridge.call(lambda v: v + 1, like)
        below = jax.jit(level(n - 1))
        return jaxbridge.call(lambda v: v + np.asarray(below(jnp.ones(3))), like)

    np.testing.assert_array_equal(level(6)(jnp.zeros(3)), [7, 7, 7])


def test_an_error_inside_a_call_inside_a_call():
    def fail(v):
        raise KeyError("inner")

    inner = jaxbridge.call(fail, like)

    def outer(v):
        with pytest.raises(KeyError, match="inner"):
            inner(on(1, 5))
        with pytest.raises(KeyError), jaxbridge.reraise():
            jax.block_until_ready(jax.jit(inner)(on(1, 5)))
        return v + 1

    f = jaxbridge.call(outer, like)
    np.testing.assert_array_equal(f(on(0, 1)), [2, 2, 2])
    with jaxbridge.reraise():
        np.testing.assert_array_equal(jax.jit(f)(on(0, 1)), [2, 2, 2])


# ---- nothing is locked while Python runs ---------------------------------------------------------


def test_tracing_inside_a_call_while_another_thread_calls(barrier):
    """A callee traces, lowers and runs a new call; meanwhile another thread does the same."""

    def busy(offset):
        captured = [offset]
        new = jaxbridge.call(lambda v: v + captured[0], like)
        return float(jax.jit(lambda v: new(v) * 2)(on(offset, 1))[0])

    def one(v):
        barrier.wait()
        y = busy(0)
        barrier.wait()
        return v + y

    def two(v):
        barrier.wait()
        y = busy(1)
        barrier.wait()
        return v + y

    f, g = jaxbridge.call(one, like), jaxbridge.call(two, like)
    a, b = at_once(lambda: f(on(0, 10)), lambda: g(on(1, 20)))
    assert a[0] == 12 and b[0] == 24


def test_every_entry_works_while_a_call_waits(barrier):
    """What takes a lock of ours, done while another thread stands in the middle of a call."""

    def waiting(v):
        barrier.wait()
        barrier.wait()
        return v + 1

    f = jaxbridge.call(waiting, like)
    g = jaxbridge.call(lambda v: v + 2, like, name="works meanwhile")

    def fail(v):
        raise ValueError("meanwhile")

    def others():
        barrier.wait()
        try:
            assert float(g(on(1, 1))[0]) == 3
            jax.jit(lambda v: g(v)).lower(on(1, 1)).compile()
            with pytest.raises(ValueError, match="meanwhile"):
                jaxbridge.call(fail, like)(on(1, 1))
            with pytest.raises(ValueError), jaxbridge.reraise():
                jax.block_until_ready(jax.jit(jaxbridge.call(fail, like))(on(1, 1)))
            f.stats(), f.clear(), g.clear()
            assert _core.registry_size() > 0
            jaxbridge.call(lambda v: v, like, name="new meanwhile")
            jax.clear_caches()
        finally:
            barrier.wait()
        return True

    y, done = at_once(lambda: f(on(0, 1)), others)
    assert y[0] == 2 and done


def test_making_a_plan_holds_no_lock(barrier, monkeypatch):
    """Two targets make their plans at once."""
    from jaxbridge import _plan

    made = _plan.make_plan

    def meet(*args):
        barrier.wait()
        return made(*args)

    monkeypatch.setattr(_plan, "make_plan", meet)
    captured = [0]
    f = jaxbridge.call(lambda v: v + 1 + captured[0], like)
    g = jaxbridge.call(lambda v: v + 2 + captured[0], like)
    a, b = at_once(lambda: f(on(0, 1)), lambda: g(on(1, 1)))
    assert a[0] == 2 and b[0] == 3


def test_looking_for_an_unknown_key_holds_no_lock(barrier, monkeypatch):
    """Two programs from elsewhere look for their functions at once; one registers the other's."""
    from jaxbridge import _lowering, _programs

    resolved = []

    def resolve(key, text):
        resolved.append(key)
        barrier.wait()
        assert float(known(on(key, 1))[0]) == 2
        barrier.wait()
        raise errors.NotRegisteredError(f"no {key}")

    known = jaxbridge.call(lambda v: v + 1, like)
    rule = jax.ffi.ffi_call(_lowering._target, jax.ShapeDtypeStruct((3,), jnp.float32))

    def lost(key):
        f = jax.jit(lambda v: rule(v, key=np.int64(key), spec="{}"))
        with pytest.raises(jax.errors.JaxRuntimeError, match=f"NOT_FOUND: no {key}"):
            jax.block_until_ready(f(on(key, 1)))
        return True

    _core.set_resolver(resolve)
    try:
        assert at_once(lambda: lost(0), lambda: lost(1)) == [True, True]
    finally:
        _core.set_resolver(_programs._resolve)
    assert sorted(resolved) == [0, 1]


# ---- errors --------------------------------------------------------------------------------------


def test_an_exception_on_one_thread_only(barrier):
    def fn(v):
        barrier.wait()
        if v[0] == 1:
            raise ValueError("on device 1")
        return v + 1

    f = jaxbridge.call(fn, like)
    for program in (f, jax.jit(f)):

        def fails(program=program):
            with pytest.raises(ValueError, match="on device 1"), jaxbridge.reraise():
                jax.block_until_ready(program(on(1, 1)))
            return True

        def works(program=program):
            with jaxbridge.reraise():
                return float(program(on(0, 0))[0])

        assert at_once(works, fails) == [1, True]


def test_each_thread_gets_its_own_exception(barrier):
    def fn(v):
        barrier.wait()
        raise ValueError(f"number {v[0]:.0f}")

    f = jaxbridge.call(fn, like)
    g = jax.jit(f)

    def expect(program, i):
        for _ in range(10):
            with pytest.raises(ValueError, match=f"^number {i}$"), jaxbridge.reraise():
                jax.block_until_ready(program(on(i, i)))
        return True

    for program in (f, g):
        assert at_once(lambda: expect(program, 0), lambda: expect(program, 1)) == [True, True]  # noqa: B023


# ---- what the GIL does not do --------------------------------------------------------------------


def test_a_function_that_gives_the_gil_away_lets_others_run(barrier):
    """One waits in a call without the GIL until the other has made a hundred calls."""
    many = threading.Event()

    def waits(v):
        barrier.wait()
        assert many.wait(WAIT)
        return v

    f, g = jaxbridge.call(waits, like), jax.jit(jaxbridge.call(lambda v: v + 1, like))

    def hundred():
        barrier.wait()
        v = on(1, 0)
        for _ in range(100):
            v = g(v)
        many.set()
        return float(v[0])

    y, n = at_once(lambda: f(on(0, 7)), hundred)
    assert y[0] == 7 and n == 100

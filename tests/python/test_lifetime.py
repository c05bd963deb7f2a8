# SPDX-License-Identifier: Apache-2.0
"""How long functions, their registrations and what they hold live; what is counted."""

import decimal
import gc
import sys
import threading
import time
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbridge
from jaxbridge import _call_site, _compat, _core, _errors, _primitive

F32 = jax.ShapeDtypeStruct((4,), jnp.float32)


def like(x, *rest, **kw):
    return x


def module_level(v):
    return v + 1


class Array(np.ndarray):
    """NumPy's own take no weak references."""


def make():
    """A function with an array in its closure, and weak references to both."""
    captured = np.arange(4, dtype=np.float32).view(Array)

    def fn(v):
        return v + captured

    return fn, [weakref.ref(fn), weakref.ref(captured)]


def alive(refs):
    return sum(r() is not None for r in refs)


@pytest.fixture
def x():
    return jnp.arange(4, dtype=jnp.float32)


@pytest.fixture
def size(collected):
    """How many targets are registered beyond those that were at the start."""
    _errors._originals.clear()  # the frames of other tests' errors hold functions
    collected()
    before = _core.registry_size()
    return lambda: _core.registry_size() - before


def scan_of(f):
    return lambda v: jax.lax.scan(lambda c, _: (f(c), None), v, None, length=2)[0]


PROGRAMS = {
    "eager": lambda f, x: f(x),
    "jit": lambda f, x: jax.jit(lambda v: f(v))(x),
    "nested jit": lambda f, x: jax.jit(jax.jit(lambda v: f(v)))(x),
    "scan": lambda f, x: jax.jit(scan_of(f))(x),
    "cond": lambda f, x: jax.lax.cond(True, f, f, x),
    "vmap": lambda f, x: jax.vmap(f)(x[None]),
    "vmap in jit": lambda f, x: jax.jit(jax.vmap(f))(x[None]),
    "checkpoint": lambda f, x: jax.jit(jax.checkpoint(f))(x),
    "eval_shape": lambda f, x: jax.eval_shape(f, x),
    "make_jaxpr": lambda f, x: jax.make_jaxpr(f)(x),
    "lower": lambda f, x: jax.jit(f).lower(x),
    "compile": lambda f, x: jax.jit(f).lower(x).compile()(x),
    "two devices": lambda f, x: [
        jax.jit(f)(jax.device_put(x, d)).block_until_ready() for d in jax.devices()[:2]
    ],
    "disable_jit": lambda f, x: f(x),
}


@pytest.mark.parametrize("how", list(PROGRAMS))
def test_anonymous_functions_end_with_their_executables(x, size, collected, how):
    fn, refs = make()
    f = jaxbridge.call(fn, like, vmap_method="sequential")
    with jax.disable_jit(how == "disable_jit"):
        PROGRAMS[how](f, x)
    refs.append(weakref.ref(f))
    del fn, f
    collected()
    assert alive(refs) == 0 and size() == 0


def test_with_a_ref(x, size, collected):
    fn, refs = make()

    def update(r, fn=fn):
        r[...] = fn(r)

    ref = jax.new_ref(x + 0)
    jaxbridge.call(update, ())(ref)
    jax.jit(jaxbridge.call(update, ()))(ref)
    np.testing.assert_array_equal(ref[...], np.arange(4) * 3)
    del fn, update
    collected()
    assert alive(refs) == 0 and size() == 0


def test_after_failures(x, size, collected):
    fn, refs = make()

    def fail(v, fn=fn):
        raise ValueError(fn(v).shape)

    f = jaxbridge.call(fail, F32)
    with pytest.raises(ValueError):
        f(x)
    with pytest.raises(jax.errors.JaxRuntimeError):
        jax.jit(f)(x)
    wrong = jaxbridge.call(lambda v, fn=fn: fn(v)[1:], F32)
    with pytest.raises(jaxbridge.errors.ResultError):
        wrong(x)
    with pytest.raises(TypeError):
        jaxbridge.call(fn, F32, inout={3: 0})(x)
    _errors._originals.clear()  # bounded, and the user's to take
    del fn, f, fail, wrong
    collected()
    assert alive(refs) == 0 and size() == 0


def test_an_executable_keeps_its_function(x, size, collected):
    fn, refs = make()
    compiled = jax.jit(jaxbridge.call(fn, F32)).lower(x).compile()
    del fn
    collected()
    assert alive(refs) == 2 and size() == 1
    np.testing.assert_array_equal(compiled(x), np.arange(4) * 2)
    del compiled
    collected()
    assert alive(refs) == 0 and size() == 0


def test_each_of_several_executables_keeps_it(x, size, collected):
    fn, refs = make()
    f = jaxbridge.call(fn, like)
    compiled = [jax.jit(lambda v, k=k, f=f: f(v) * k).lower(x).compile() for k in range(3)]
    del fn, f
    for k in (1, 0, 2):
        collected()
        assert size() == 1 and refs[0]() is not None
        np.testing.assert_array_equal(compiled[k](x), np.arange(4) * 2 * k)
        compiled[k] = None
    collected()
    assert size() == 0 and refs[0]() is None


def test_the_function_alone_keeps_nothing_registered(x, size, collected):
    f = jaxbridge.call(make()[0], like)
    f(x)
    assert size() == 1
    collected()
    assert size() == 0
    np.testing.assert_array_equal(f(x), np.arange(4) * 2)
    assert size() == 1 and f.stats()["calls"] == 2


def test_named_ones_live_on(x, size, collected):
    jaxbridge.call(module_level, F32)(x)
    fn, refs = make()
    jaxbridge.call(fn, F32, name="lives on")(x)
    del fn
    collected()
    assert size() == 2 and alive(refs) == 2


def test_equal_functions_share_a_registration(x, size, collected):
    keep = []
    for _ in range(5):
        keep.append(jax.jit(lambda v: jaxbridge.call(lambda u: u + 1, like)(v)))
        keep[-1](x)
        jaxbridge.call(lambda u: u + 1, like)(x)
    assert size() == 2  # two lambdas
    captured = [1]
    for _ in range(5):
        keep.append(jax.jit(lambda v: jaxbridge.call(lambda u: u + captured[0], like)(v)))
        keep[-1](x)
    assert size() == 7  # what they capture can change
    del keep
    collected()
    assert size() == 0


def test_statics_live_as_long_as_the_function(x, collected):
    class Thing:
        pass

    thing = Thing()
    ref = weakref.ref(thing)
    f = jaxbridge.call(lambda v, t: v + 0, F32)
    jax.jit(lambda v, f=f, thing=thing: f(v, thing))(x)
    f(x, thing)
    del thing
    collected()
    del f
    collected()
    assert ref() is None


def test_operands_and_results_are_not_kept(x, collected):
    f = jaxbridge.call(make()[0], like)
    operand = x + 0
    refs = [weakref.ref(operand), weakref.ref(f(operand))]
    del operand
    gc.collect()
    assert alive(refs) == 0


def test_the_callee_can_drop_its_own_function(x, collected):
    """Nothing that runs is freed under it."""
    held = []

    def fn(v):
        held.clear()
        jax.clear_caches()
        gc.collect()
        return v + 1

    def run():
        held.append(jax.jit(jaxbridge.call(fn, like)))
        return held[0](x)

    np.testing.assert_array_equal(run(), np.arange(4) + 1)
    np.testing.assert_array_equal(run(), np.arange(4) + 1)


def test_giving_up_and_registering_at_once(x, collected):
    """A target that one thread gives up, while another lowers the same call, is not lost."""
    f = jaxbridge.call(make()[0], like)
    (site,) = [e.params["call"].site for e in jax.make_jaxpr(f)(x).eqns if "call" in e.params]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    lost = []
    end = time.monotonic() + 0.5

    def work():
        while time.monotonic() < end:
            hold = site.hold()
            if not _core.registered(hold.registration.key):
                lost.append(1)
            del hold

    threads = [threading.Thread(target=work) for _ in range(4)]
    try:
        [t.start() for t in threads]
        [t.join() for t in threads]
    finally:
        sys.setswitchinterval(before)
    assert not lost
    assert site.key not in _call_site._registrations and not _core.registered(site.key)


def test_an_eager_anonymous_function_ends_with_its_Function(x, size):
    """Nothing has to be cleared for that: a loop that makes closures does not grow."""
    fn, refs = make()
    f = jaxbridge.call(fn, like)
    ref = jax.new_ref(x + 0)

    def update(r, fn=fn):
        r[...] = fn(r)

    g = jaxbridge.call(update, ())
    for _ in range(2):
        f(x)
        g(ref)
    assert size() == 2
    del fn, f, g, update
    gc.collect()
    assert size() == 0 and alive(refs) == 0


def test_eager_functions_that_content_tells_are_bounded(x, size, monkeypatch):
    kept = _compat.bounded_cache(8)(lambda told: _primitive.Programs())
    monkeypatch.setattr(_primitive, "_programs_by_content", kept)

    def scaled(k):
        return jaxbridge.call(lambda v: v * k, F32)

    for k in range(20):
        assert float(scaled(float(k))(x)[1]) == k
    gc.collect()
    assert size() == 8
    same = scaled(19.0)
    assert same.stats()["calls"] == 0
    same(x)
    assert same.stats()["calls"] == 1 and size() == 8  # the program of the first was still there


def test_instances_end_with_their_calls(x, size):
    """`self` of a method is a static argument."""

    class Filter:
        @jaxbridge.function(result=lambda self, v: v)
        def apply(self, v):
            return v + 1

    alive = weakref.WeakSet()
    for _ in range(200):
        one = Filter()
        alive.add(one)
        one.apply(x)
    del one
    Filter.apply.clear()
    jax.clear_caches()
    gc.collect()
    assert len(alive) == 0 and size() == 0


def test_durable_calls_are_bounded(x, size, monkeypatch):
    monkeypatch.setattr(_call_site, "_most_durable", 5)

    def shifted(v, by):
        return v + by

    f = jaxbridge.call(shifted, lambda v, by: v, name="shifted, bounded")
    programs = [jax.jit(lambda v, k=k: f(v, k)) for k in range(12)]
    for _ in range(2):
        assert [float(p(x)[0]) for p in programs] == list(range(12))
        assert _core.registry_size() >= 12  # what programs call is kept with them
    del programs
    gc.collect()
    assert size() <= 5


def test_clear_gives_up_what_static_values_left(x, size):
    def shifted(v, by):
        return v + float(str(by))

    f = jaxbridge.call(shifted, lambda v, by: v, name="shifted by a static value")
    g = jaxbridge.call(shifted, lambda v, by: v)
    by = decimal.Decimal(7)
    programs = [jax.jit(lambda v, k=k: f(v, k)) for k in range(10)]
    for k, program in enumerate(programs):
        assert float(program(x)[0]) == k
    assert float(g(x, by)[0]) == 7
    assert size() == 11
    f.clear()
    g.clear()
    gc.collect()
    assert size() == 10  # what the programs call
    assert [float(program(x)[0]) for program in programs] == list(range(10))
    del program, programs
    gc.collect()
    assert size() == 0
    assert float(f(x, 3)[0]) == 3


# Top-level functions and classes, which text names, are these whatever becomes of their names.


def scaled(v, kind=None):
    return v * np.float32(2 if kind is None else kind.factor)


class Kind:
    factor = 2


@pytest.mark.parametrize("give_up", ["clear", "bound", "clear and bound"])
@pytest.mark.parametrize("by", ["function", "class"])
def test_a_program_calls_what_it_was_made_with(x, monkeypatch, by, give_up):
    module = sys.modules[__name__]
    f = jaxbridge.call(scaled, lambda v, kind=None: v)
    operands = (x,) if by == "function" else (x, Kind)
    program = jax.jit(lambda v: f(v, *operands[1:]))
    traced = program.lower(x).compile()
    for _ in range(3):
        np.testing.assert_array_equal(program(x), 2 * np.asarray(x))
    if by == "function":
        monkeypatch.setattr(module, "scaled", jax.jit(f))
    else:
        later = type("Kind", (), {"factor": 3, "__module__": __name__})
        monkeypatch.setattr(module, "Kind", later)
    if "clear" in give_up:
        f.clear()
    if "bound" in give_up:
        monkeypatch.setattr(_call_site, "_most_durable", 1)
        for name in ("first", "second", "third"):
            jaxbridge.call(np.negative, like, name=f"{name}, {by}, {give_up}")(x)
    gc.collect()
    np.testing.assert_array_equal(program(x), 2 * np.asarray(x))
    np.testing.assert_array_equal(traced(x), 2 * np.asarray(x))


def test_what_ends_under_the_lock_is_destroyed_without_it():
    """The end of a target can wait for the device, and that for a thread that wants the lock."""
    free = []

    class End:
        def __del__(self):
            def ask():
                with _call_site._registration_lock:
                    free.append(True)

            thread = threading.Thread(target=ask, daemon=True)
            thread.start()
            thread.join(20)
            free.append(thread.is_alive())

    def fn(v):
        return v

    fn.end = End()
    f = jaxbridge.call(fn, like)
    del fn
    compiled = jax.jit(f).lower(jnp.zeros(3)).compile()
    compiled(jnp.zeros(3))
    del f
    jax.clear_caches()
    gc.collect()
    assert not free
    with _call_site._registration_lock:
        del compiled
        gc.collect()
        assert not free
    jaxbridge.call(np.negative, like).stats()  # the next who has had the lock
    assert free == [True, False]


# ---- stats and clear -----------------------------------------------------------------------------


def test_stats_count_calls_of_xla(x):
    f = jaxbridge.call(make()[0], like, vmap_method="sequential")
    names = ("calls", "cache_hits", "replays", "staged", "captures", "cache_size")
    assert f.stats() == {**dict.fromkeys(names, 0), "fallbacks": []}
    jax.eval_shape(f, x)
    jax.jit(f).lower(x)
    assert f.stats()["calls"] == 0
    f(x)
    assert f.stats()["calls"] == 1
    jax.jit(lambda v: f(f(v)))(x)
    assert f.stats()["calls"] == 3
    jax.block_until_ready(jax.jit(scan_of(f))(x))
    assert f.stats()["calls"] == 5
    jax.block_until_ready(jax.vmap(f)(jnp.ones((3, 4))))
    assert f.stats()["calls"] == 8


def test_stats_count_failures_and_what_ended(x, collected):
    fails = []

    def fn(v):
        if fails:
            raise ValueError
        return v + 1

    f = jaxbridge.call(fn, like)
    f(x)
    fails.append(1)
    with pytest.raises(ValueError):
        f(x)
    assert f.stats()["calls"] == 2
    collected()
    assert f.stats()["calls"] == 2
    fails.clear()
    f(x)
    assert f.stats()["calls"] == 3


def test_stats_are_each_functions_own(x):
    def fn(v, captured=[]):  # noqa: B006
        return v + 1

    f, g = jaxbridge.call(fn, like), jaxbridge.call(fn, like)
    f(x), f(x), g(x)
    assert (f.stats()["calls"], g.stats()["calls"]) == (2, 1)


def test_clear_keeps_everything_working(x):
    f = jaxbridge.call(make()[0], like)
    g = jax.jit(lambda v: f(v))
    f.clear()
    g(x)
    f.clear()
    f.clear()
    np.testing.assert_array_equal(g(x), np.arange(4) * 2)
    np.testing.assert_array_equal(g(jnp.ones(4)), np.arange(4) + 1)
    assert f.stats()["calls"] == 3


def test_clear_within_the_call_itself(x):
    functions = []

    def fn(v):
        functions[0].clear()
        return v + 1

    functions.append(jaxbridge.call(fn, like))
    np.testing.assert_array_equal(functions[0](x), np.arange(4) + 1)
    np.testing.assert_array_equal(functions[0](x), np.arange(4) + 1)


def test_counting_while_a_collection_ends_a_registration():
    """What is in a cycle ends whenever something is allocated, also while counts are read."""

    class Counted:
        calls = hits = replays = staged = captures = kept = 1

    class Ends:
        """Another registration ends while this one is read."""

        def __init__(self, stats):
            self.stats = stats
            self.other = None

        @property
        def target(self):
            self.stats.live.discard(self.other)
            return Counted

    stats = _call_site.Stats()
    one, other = Ends(stats), Ends(stats)
    one.other, other.other = other, one
    none = stats.totals()
    for read in (stats.totals, lambda: stats.read(none)):
        stats.live |= {one, other}
        assert read()["calls"] >= 1

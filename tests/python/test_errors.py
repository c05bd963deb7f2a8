# SPDX-License-Identifier: Apache-2.0
"""Exceptions of external functions on their way to the user, and errors that jaxbridge finds."""

import builtins
import contextlib
import gc
import importlib
import os
import pickle
import signal
import sys
import threading
import traceback
import types
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbridge
import processes
from jaxbridge import _adapters, _errors, errors

F32 = jax.ShapeDtypeStruct((4,), jnp.float32)
SCALAR = jax.ShapeDtypeStruct((), jnp.float32)


def like(x, *rest, **kw):
    return x


def resident_mib():
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


class Stubborn(Exception):
    """Can't be made again from its `args`."""

    def __init__(self, code, *, reason):
        super().__init__(f"{reason} ({code})")
        self.code = code


kept = []


class Mute(Exception):
    def __str__(self):
        raise RuntimeError("no text")


@pytest.fixture
def x():
    return jnp.arange(4, dtype=jnp.float32)


@pytest.fixture
def plain_tracebacks():
    """JAX's filtering of tracebacks costs milliseconds each time."""
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "off")
    yield
    jax.config.update("jax_traceback_filtering", before)


@pytest.fixture
def two_devices(x):
    """A program that fails on two devices at once, and an operand for it."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), "i")
    spec = jax.sharding.PartitionSpec("i")

    def fail(v):
        raise Stubborn(7, reason="on a device")

    f = jaxbridge.call(fail, like)
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec)), x


# ---- eager calls ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "exception",
    [
        ValueError("plain"),
        Stubborn(7, reason="custom"),
        Mute(),
        KeyError("key"),
        StopIteration(5),
        GeneratorExit(),
        KeyboardInterrupt(),
        SystemExit(3),
        ExceptionGroup("some", [ValueError("a"), KeyError("b")]),
        ValueError("a\0b"),
        ValueError("\ud800"),
        ValueError("x" * 3_000_000),
        ValueError(""),
    ],
    ids=lambda e: f"{type(e).__name__}-{e.args!r:.12}",
)
def test_eager_raises_the_object_itself(x, exception):
    args = exception.args

    def fail(v):
        raise exception

    with pytest.raises(type(exception)) as caught:
        jaxbridge.call(fail, F32)(x)
    assert caught.value is exception and exception.args == args
    assert not getattr(exception, "__notes__", [])
    frames = [frame.f_code for frame, _ in traceback.walk_tb(exception.__traceback__)]
    assert fail.__code__ in frames
    assert frames[0] is sys._getframe().f_code
    np.testing.assert_array_equal(jaxbridge.call(np.copy, F32)(x), x)


def test_eager_keeps_cause_context_and_notes(x):
    def fail(v):
        part = v[1:]
        try:
            raise KeyError(str(part[0]))
        except KeyError as error:
            later = ValueError("outer")
            later.add_note("a note")
            raise later from error

    with pytest.raises(ValueError, match="outer") as caught:
        jaxbridge.call(fail, F32)(x)
    assert isinstance(caught.value.__cause__, KeyError)
    assert caught.value.__notes__ == ["a note"]
    text = jax_error(jax.jit(jaxbridge.call(fail, F32)), x)
    assert "KeyError" in text and "direct cause" in text and "a note" in text


def test_eager_has_the_context_of_where_it_is_called(x):
    def fail(v):
        raise ValueError("inner")

    f = jaxbridge.call(fail, F32)
    with pytest.raises(ValueError) as caught:
        try:
            raise KeyError("the caller's")
        except KeyError:
            f(x)
    assert isinstance(caught.value.__context__, KeyError)
    with pytest.raises(ValueError) as caught:
        f(x)
    assert caught.value.__context__ is None and caught.value.__cause__ is None


@pytest.mark.parametrize(
    "program",
    [
        lambda f, x: f(x),
        lambda f, x: jax.vmap(f)(jnp.stack([x, x])),
        lambda f, x: jax.grad(
            lambda v: (v * jax.lax.stop_gradient(f(jax.lax.stop_gradient(v)))).sum()
        )(x),
    ],
    ids=["call", "vmap", "grad"],
)
def test_eager_transforms_raise_the_original(x, program):
    def fail(v):
        raise Stubborn(1, reason="r")

    f = jaxbridge.call(fail, like, vmap_method="broadcast_all")
    with pytest.raises(Stubborn):
        program(f, x)
    with jax.disable_jit(), pytest.raises(Stubborn):
        jax.jit(lambda v: program(f, v))(x)


@pytest.mark.parametrize("size", [1, 3_000_000])
@pytest.mark.parametrize("results", [like, ()], ids=["result", "logger"])
def test_eager_does_not_depend_on_size_or_results(size, results):
    def fail(v):
        raise Stubborn(1, reason="r")

    with pytest.raises(Stubborn):
        jaxbridge.call(fail, results)(jnp.zeros(size))
    jax.effects_barrier()


@pytest.mark.parametrize("results", [like, ()], ids=["result", "logger"])
def test_eager_waits_for_operands_that_are_still_computed(results):
    """Otherwise the function runs later and its exception comes as JAX's, somewhere else."""

    def fail(v):
        raise Stubborn(1, reason="r")

    slow = jax.jit(lambda v: v @ v @ v @ v)
    v = jnp.ones((500, 500))
    jax.block_until_ready(slow(v))
    f = jaxbridge.call(fail, results)
    for _ in range(5):
        with pytest.raises(Stubborn):
            f(slow(v))


def test_eager_waits_for_refs_that_are_still_computed():
    def fail(*_):
        raise Stubborn(1, reason="of a Ref")

    big = jnp.ones((1500, 1500))
    ref = jax.new_ref(big @ big @ big)
    other = jax.new_ref(jnp.zeros(4))
    with pytest.raises(Stubborn):
        jaxbridge.call(fail, ())(ref)
    with pytest.raises(Stubborn):
        jaxbridge.call(fail, ())(other, big @ big @ big)


@pytest.mark.parametrize("value, option", [(np.nan, "jax_debug_nans"), (-np.inf, "jax_debug_infs")])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.complex64])
@pytest.mark.parametrize("way", ["eager", "jit", "in a program", "disable_jit"])
def test_debug_nans_and_infs(x, value, option, dtype, way):
    f = jaxbridge.call(lambda v: np.full_like(v, value), like)
    good = jaxbridge.call(
        lambda v: (v + 1, np.int32(7)), lambda v: (v, jax.ShapeDtypeStruct((), jnp.int32))
    )
    program = {"jit": jax.jit(f), "in a program": jax.jit(lambda v: f(v + 1) * 2)}.get(way, f)
    jax.config.update(option, True)
    try:
        with (
            jax.disable_jit(way == "disable_jit"),
            pytest.raises(FloatingPointError, match="nan" if np.isnan(value) else "inf"),
        ):
            jax.block_until_ready(program(x.astype(dtype)))
        assert good(x)[1] == jax.jit(good)(x)[1] == 7
    finally:
        jax.config.update(option, False)
    assert not np.isfinite(np.asarray(f(x))).any()


@pytest.mark.parametrize("disable_jit", [False, True])
def test_debug_nans_leaves_a_ref_as_the_function_did(x, disable_jit):
    """JAX would run the program again, whose Ref is donated by then."""
    calls = []

    def fn(r, v):
        calls.append(1)
        r[...] = v
        with np.errstate(invalid="ignore"):
            return v - v

    f = jaxbridge.call(fn, lambda r, v: v)
    for value in (1, np.nan, np.inf):  # in neither, in the Ref and the result, in the result
        ref, v = jax.new_ref(x + 0), jnp.full_like(x, value)
        calls.clear()
        with jax.debug_nans(True), jax.disable_jit(disable_jit):
            if value == 1:
                np.testing.assert_array_equal(f(ref, v), np.zeros_like(x))
            else:
                with pytest.raises(FloatingPointError, match=r"\(nan\).*fn"):
                    f(ref, v)
        assert len(calls) == 1
        np.testing.assert_array_equal(ref[...], np.full_like(x, value))


def test_eager_with_ref(x):
    ref = jax.new_ref(x + 0)

    def fail(r):
        raise Stubborn(1, reason="r")

    with pytest.raises(Stubborn):
        jaxbridge.call(fail, ())(ref)


# ---- inside jit ----------------------------------------------------------------------------------


def jax_error(f, *args):
    """The text of the error that JAX raises."""
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        jax.block_until_ready(f(*args))
    return str(caught.value)


def test_jit_message_says_all(x):
    def helper():
        raise Stubborn(7, reason="the reason")

    def callee(v):
        helper()

    text = jax_error(jax.jit(jaxbridge.call(callee, F32, name="the.function")), x)
    assert text.startswith("INTERNAL: test_errors.Stubborn: the reason (7)\n")
    assert "raised by the external function 'the.function'" in text
    assert "Traceback (most recent call last)" in text
    assert "in callee" in text and "in helper" in text and "helper()" in text
    assert "_plan.py" not in text, "frames of jaxbridge itself"


@pytest.mark.parametrize(
    "fn, spec",
    [
        (lambda v: v[:1], F32),
        (lambda v: 2**40, jax.ShapeDtypeStruct((), "int32")),
        (lambda v: (kept.append(v), v)[1], F32),
        (lambda v: (kept.append(v), v[:1])[1], F32),
    ],
    ids=["shape", "number", "view", "shape and view"],
)
def test_jit_message_of_what_jaxbridge_finds_is_said_once(x, fn, spec):
    text = jax_error(jax.jit(jaxbridge.call(fn, spec, name=None)), x)
    kept.clear()
    first, *_ = text.removeprefix("INTERNAL: ").splitlines()
    assert first.startswith("jaxbridge.errors.") and text.count(first) == 1
    assert "in a call of the external function" in text and "_plan.py" not in text


@pytest.mark.parametrize(
    "exception, text",
    [
        (ValueError("before\0after"), "ValueError: before\\0after"),
        (ValueError("a \ud800 b"), "ValueError: a \\ud800 b"),
        (ValueError("snowman ☃"), "ValueError: snowman ☃"),
        (Mute(), "test_errors.Mute: (str() of the exception failed)"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (SystemExit(3), "SystemExit: 3"),
        (ExceptionGroup("some", [ValueError("a")]), "ExceptionGroup: some (1 sub-exception)"),
    ],
    ids=lambda x: type(x).__name__,
)
def test_jit_message_of_odd_exceptions(x, exception, text):
    def fail(v):
        raise exception

    f = jax.jit(jaxbridge.call(fail, F32))
    assert jax_error(f, x).startswith(f"INTERNAL: {text}\n")
    with pytest.raises(type(exception)) as caught, jaxbridge.reraise():
        f(x)
    assert caught.value is exception


def test_error_of_a_callee_that_runs_jax(x):
    def fail(v):
        raise ValueError("the inner one")

    inner = jax.jit(jaxbridge.call(fail, F32, name="inner_program"))
    outer = jaxbridge.call(lambda v: np.asarray(inner(jnp.ones(4))), F32, name="outer_function")
    with pytest.raises(jax.errors.JaxRuntimeError, match="the inner one"):
        outer(x)
    text = jax_error(jax.jit(outer), x)
    assert "'inner_program'" in text and "'outer_function'" in text
    text = "raised by the external"
    with pytest.raises(jax.errors.JaxRuntimeError, match=text) as caught, jaxbridge.reraise():
        jax.jit(outer)(x)
    assert "'outer_function'" not in str(caught.value), (
        "that of the outer call is JAX's inner error"
    )


# ---- reraise -------------------------------------------------------------------------------------


def test_reraise_as_block_and_as_decorator(x):
    exception = Stubborn(1, reason="r")

    def fail(v):
        raise exception

    f = jax.jit(jaxbridge.call(fail, F32))
    with pytest.raises(Stubborn) as caught, jaxbridge.reraise():
        f(x)
    assert caught.value is exception

    @jaxbridge.reraise()
    def step(v):
        return f(v)

    with pytest.raises(Stubborn) as caught:
        step(x)
    assert caught.value is exception
    assert isinstance(caught.value.__context__, jax.errors.JaxRuntimeError)


def test_reraise_on_several_devices_inside(two_devices):
    f, x = two_devices
    with pytest.raises(Stubborn, match="on a device"), jaxbridge.reraise():
        jax.block_until_ready(f(x))


def test_reraise_on_exit(two_devices):
    f, x = two_devices
    running = []
    with pytest.raises(Stubborn, match="on a device"), jaxbridge.reraise():
        running.append(f(x))
        with pytest.raises(jax.errors.JaxRuntimeError):
            jax.block_until_ready(running)


def test_reraise_leaves_other_things_alone(x):
    def fail(v):
        raise ValueError("before")

    jax_error(jax.jit(jaxbridge.call(fail, F32)), x)
    with jaxbridge.reraise():  # what was recorded before it is not its
        pass
    with pytest.raises(KeyError), jaxbridge.reraise():
        raise KeyError("other")
    with pytest.raises(jax.errors.JaxRuntimeError, match="of others"), jaxbridge.reraise():
        raise jax.errors.JaxRuntimeError("INTERNAL: of others")


def test_reraise_nested(x):
    def fail(v):
        raise Stubborn(int(v[0]), reason="r")

    f = jax.jit(jaxbridge.call(fail, F32))
    block = jaxbridge.reraise()
    with pytest.raises(Stubborn, match="1"), block:
        with pytest.raises(Stubborn, match="0"), block:
            f(x)
        with pytest.raises(Stubborn, match="2"), jaxbridge.reraise(), jaxbridge.reraise():
            f(x + 2)
        f(x + 1)

    @jaxbridge.reraise()
    def recursive(n):
        if n == 0:
            f(x + 9)
        recursive(n - 1)

    with pytest.raises(Stubborn, match="9"):
        recursive(3)


def test_reraise_gives_each_thread_its_own():
    # XLA runs one program at a time on a CPU device.
    count = 2
    barrier = threading.Barrier(count, timeout=30)

    def fail(v):
        barrier.wait()
        raise Stubborn(int(v), reason="thread")

    f = jax.jit(jaxbridge.call(fail, like))

    @jaxbridge.reraise()
    def step(i):
        return jax.block_until_ready(f(jax.device_put(jnp.float32(i), jax.devices()[i])))

    caught = [None] * count

    def work(i):
        for _ in range(10):
            try:
                step(i)
            except Stubborn as error:
                caught[i] = error.code if caught[i] in (None, error.code) else "mixed"

    threads = [threading.Thread(target=work, args=(i,)) for i in range(count)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert caught == list(range(count))


def test_one_decorated_function_in_two_threads_at_once(x):
    """Each call has a block of its own, whichever ends first."""
    failed, entered, left = threading.Event(), threading.Event(), threading.Event()

    def fail(v):
        raise Stubborn(1, reason="of the first call")

    f = jax.jit(jaxbridge.call(fail, F32))

    @jaxbridge.reraise()
    def step(is_first):
        if is_first:
            jax_error(f, x)  # recorded, and taken by nobody yet
            failed.set()
            assert entered.wait(30)
        else:
            entered.set()
            assert left.wait(30)

    def second():
        failed.wait(30)
        step(False)

    thread = threading.Thread(target=second)
    thread.start()
    try:
        with pytest.raises(Stubborn, match="of the first call"):
            step(True)
    finally:
        left.set()
        thread.join()


def test_reraise_on_exit_does_not_take_the_error_of_another_thread(x):
    entered, failing = threading.Barrier(2, timeout=30), threading.Barrier(2, timeout=30)
    seen = []

    def fail(v):
        raise Stubborn(1, reason="of the other thread")

    f = jax.jit(jaxbridge.call(fail, F32))

    def other():
        try:
            entered.wait()
            jax_error(f, x)  # recorded, and taken by nobody yet
            failing.wait()
        except BaseException as error:
            seen.append(error)

    thread = threading.Thread(target=other)
    thread.start()
    with jaxbridge.reraise():
        entered.wait()
        failing.wait()
    thread.join()
    assert not seen


# ---- the table of originals ----------------------------------------------------------------------


def test_table_is_bounded_and_a_lost_original_leaves_jaxs_error(x, plain_tracebacks):
    def fail(v):
        raise Stubborn(int(v[0]), reason="number")

    f = jax.jit(jaxbridge.call(fail, F32))
    with pytest.raises(jax.errors.JaxRuntimeError) as first:
        f(x)
    for _ in range(_errors._kept_errors):
        with pytest.raises(jax.errors.JaxRuntimeError):
            f(x + 1)
    assert len(_errors._originals) == _errors._kept_errors
    text = r"number \(0\)"
    with pytest.raises(jax.errors.JaxRuntimeError, match=text) as caught, jaxbridge.reraise():
        raise first.value
    assert caught.value is first.value


def test_an_original_is_given_once(x):
    def fail(v):
        raise Stubborn(1, reason="r")

    with pytest.raises(jax.errors.JaxRuntimeError) as first:
        jax.jit(jaxbridge.call(fail, F32))(x)
    for expected in (Stubborn, jax.errors.JaxRuntimeError):
        with pytest.raises(expected), jaxbridge.reraise():
            raise first.value


def test_a_destructor_may_fail_a_call_while_an_error_is_recorded(x, plain_tracebacks):
    done = threading.Event()
    ran = []

    def fail(v):
        raise Stubborn(1, reason="r")

    f = jax.jit(jaxbridge.call(fail, F32))

    class Late:
        def __del__(self):
            ran.append(jax_error(f, x))

    def fail_with_late():
        raise ValueError(Late())

    g = jax.jit(jaxbridge.call(fail_with_late, SCALAR))

    def work():
        with pytest.raises(jax.errors.JaxRuntimeError):
            g()
        for _ in range(_errors._kept_errors + 1):
            with pytest.raises(jax.errors.JaxRuntimeError):
                f(x)
        done.set()

    threading.Thread(target=work, daemon=True).start()
    assert done.wait(60), "a lock is held while the exception dies"
    assert len(ran) == 1


# ---- a failed call leaves the process usable -----------------------------------------------------


def test_the_next_call_works(x, two_devices):
    fails = [True]

    def sometimes(v):
        if fails[0]:
            raise ValueError("this time")
        return v + 1

    f = jaxbridge.call(sometimes, F32)
    g = jax.jit(lambda v: f(f(v)))
    for call in (f, g):
        fails[0] = True
        with pytest.raises((ValueError, jax.errors.JaxRuntimeError)):
            call(x)
        fails[0] = False
        np.testing.assert_array_equal(f(x), np.arange(4) + 1)
        np.testing.assert_array_equal(g(x), np.arange(4) + 2)
    failing, operand = two_devices
    jax_error(failing, operand)
    np.testing.assert_array_equal(g(x), np.arange(4) + 2)


def test_failing_calls_leak_nothing(x, plain_tracebacks):
    class Thing:
        pass

    things = weakref.WeakSet()

    def fail(v):
        thing = Thing()
        things.add(thing)
        big = np.empty(10_000)
        raise ValueError("again", big.shape)

    f = jaxbridge.call(fail, F32)
    g = jax.jit(f)

    def rounds(n):
        for _ in range(n):
            with contextlib.suppress(ValueError):
                f(x)
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                g(x)

    rounds(300)
    before = resident_mib()
    rounds(2500)
    assert resident_mib() - before < 4
    gc.collect()
    assert not things
    assert len(_errors._originals) <= _errors._kept_errors


def test_weakrefs_die_with_an_eager_exception(x):
    class Thing:
        pass

    refs = []

    def fail(v):
        thing = Thing()
        refs.append(weakref.ref(thing))

        def helper():
            return v[99], thing

        helper()

    with pytest.raises(IndexError) as caught:
        jaxbridge.call(fail, F32)(x)
    assert not getattr(caught.value, "__notes__", [])
    del caught
    gc.collect()
    assert refs[0]() is None


def test_sigint_during_a_callee():
    done = processes.run(
        """
        import os, signal, jax, jax.numpy as jnp, numpy as np, jaxbridge
        spec = jax.ShapeDtypeStruct((4,), jnp.float32)

        def interrupted(v):
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(10_000_000):
                pass

        f = jaxbridge.call(interrupted, spec)
        try:
            f(jnp.zeros(4))
        except KeyboardInterrupt:
            print("eager")
        try:
            jax.jit(f)(jnp.zeros(4))
        except jax.errors.JaxRuntimeError as error:
            assert str(error).startswith("INTERNAL: KeyboardInterrupt")
            print("jit")
        try:
            with jaxbridge.reraise():
                jax.jit(f)(jnp.zeros(4))
        except KeyboardInterrupt:
            print("reraise")
        print(float(jaxbridge.call(np.copy, spec)(jnp.ones(4)).sum()))
        os.kill(os.getpid(), signal.SIGINT)  # the process is an ordinary one again
        """,
        status=None,
    )
    assert done.stdout.split() == ["eager", "jit", "reraise", "4.0"]
    assert done.returncode == -signal.SIGINT, done.stderr


# ---- results -------------------------------------------------------------------------------------


def result_error(fn, spec, *args, **options):
    with pytest.raises(errors.ResultError) as caught:
        jaxbridge.call(fn, spec, name=None, **options)(*args)
    return str(caught.value)


@pytest.mark.parametrize(
    "value, spec, leaf, expected, got",
    [
        (np.zeros(4), F32, "result:", "float32[4]", "float64[4]"),
        (np.zeros(3, "f4"), F32, "result:", "float32[4]", "float32[3]"),
        (np.zeros((), "f4"), F32, "result:", "float32[4]", "float32[]"),
        (np.zeros(1, "f4"), SCALAR, "result:", "float32[]", "float32[1]"),
        (None, F32, "result:", "float32[4]", "NoneType"),
        ("text", F32, "result:", "float32[4]", "str"),
        ([1.0] * 4, F32, "result:", "float32[4]", "list"),
        (7, F32, "result:", "float32[4]", "int"),
        ((np.zeros(4, "f4"),), F32, "result:", "float32[4]", "tuple"),
        (1.5, jax.ShapeDtypeStruct((), jnp.int32), "result:", "int32[]", "float"),
        (True, jax.ShapeDtypeStruct((), jnp.int32), "result:", "int32[]", "bool"),
        (1j, SCALAR, "result:", "float32[]", "complex"),
        (2**40, jax.ShapeDtypeStruct((), jnp.int32), "result:", "int32[]", "1099511627776"),
        (-1, jax.ShapeDtypeStruct((), jnp.uint8), "result:", "uint8[]", "-1"),
        ({"a": np.zeros(4, "f4"), "b": [np.zeros(4, "f4"), np.zeros(9, "f4")]},
         {"a": F32, "b": [F32, F32]}, "result['b'][1]:", "float32[4]", "float32[9]"),
        (np.zeros(4, "f4"), (F32, F32), "results", "(*, *)", "got *"),
        ((np.zeros(4, "f4"),), (F32, F32), "results", "(*, *)", "(*,)"),
        ([np.zeros(4, "f4")] * 2, (F32, F32), "results", "(*, *)", "[*, *]"),
        ({"a": np.zeros(4, "f4")}, {"b": F32}, "results", "{'b': *}", "{'a': *}"),
        ((), (F32,), "results", "(*,)", "()"),
    ],
)  # fmt: skip
def test_wrong_results_are_named(value, spec, leaf, expected, got):
    text = result_error(lambda: value, spec)
    assert "test_wrong_results_are_named.<locals>.<lambda>" in text
    assert leaf in text and expected in text and got in text
    assert text.index(expected) < text.rindex(got) or got == "1099511627776" or got == "-1"
    assert f"errors.{errors.ResultError.__name__}: " in jax_error(
        jax.jit(jaxbridge.call(lambda: value, spec))
    )


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_nothing_is_written_when_a_result_is_wrong(x, bad, monkeypatch):
    written = []
    adapter = _adapters.get("numpy")
    store = type(adapter).store

    def noted(self, value, out):
        written.append(value)
        store(self, value, out)

    monkeypatch.setattr(type(adapter), "store", noted)
    values = [np.ones(4, "f4") for _ in range(3)]
    values[bad] = np.ones(5, "f4")
    text = result_error(lambda: tuple(values), (F32,) * 3)
    assert f"result[{bad}]" in text and not written
    values[bad] = np.ones(4, "f4")
    jaxbridge.call(lambda: tuple(values), (F32,) * 3)()
    assert len(written) == 3, "the test sees what is written"


def test_wrong_results_leave_an_argument_in_place_alone(x):
    """What the function itself did to it stays; its neighbours are not touched by us."""
    seen = {}

    def fn(state, v):
        seen["before"] = state.copy()
        return np.zeros(9, "f4")

    state = jnp.full(4, 5.0)
    spec = (F32, F32)
    assert "float32[9]" in result_error(fn, spec, state, x, inout={0: 0})
    np.testing.assert_array_equal(seen["before"], [5, 5, 5, 5])
    np.testing.assert_array_equal(state, [5, 5, 5, 5])


@pytest.mark.parametrize(
    "value, dtype, want",
    [
        (3, "int32", 3), (3, "float32", 3), (2.5, "float32", 2.5), (2.5, "bfloat16", 2.5),
        (1, "complex64", 1), (1.5, "complex64", 1.5), (2j, "complex64", 2j), (True, "bool", True),
        (200, "uint8", 200), (np.float32(2), "float32", 2), (np.bool_(True), "bool", True),
    ],
)  # fmt: skip
def test_python_numbers_are_rank_0_results(value, dtype, want):
    spec = jax.ShapeDtypeStruct((), dtype)
    y = jaxbridge.call(lambda: value, spec)()
    assert y.dtype == jnp.dtype(dtype) and y.shape == () and y == want
    a, b = jaxbridge.call(lambda: {"a": value, "b": value}, {"a": spec, "b": spec})().values()
    assert a == want and b == want


@pytest.mark.parametrize(
    "value, dtype",
    [
        (1e300, "float32"), (-1e300, "float32"), (70000, "float16"), (1e39, "bfloat16"),
        (1e300j, "complex64"), (1e4, "float8_e4m3fn"), (10**400, "float32"), (10**30, "float16"),
    ],
)  # fmt: skip
def test_python_numbers_that_do_not_fit(value, dtype):
    text = result_error(lambda: value, jax.ShapeDtypeStruct((), dtype))
    assert f"result: {value!r} does not fit {dtype}[]" in text


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), 1e-300, 3e38])
def test_python_numbers_that_are_infinite_stay_so(value):
    y = jaxbridge.call(lambda: value, SCALAR)()
    np.testing.assert_array_equal(y, np.float32(value))


def test_named_tuples_are_tuples():
    def eigh():
        return np.linalg.eigh(np.diag(np.arange(1, 4, dtype="f4")))

    spec = (jax.ShapeDtypeStruct((3,), "float32"), jax.ShapeDtypeStruct((3, 3), "float32"))
    values, _ = jax.jit(jaxbridge.call(eigh, spec))()
    np.testing.assert_array_equal(values, [1, 2, 3])
    nested = {"a": [spec]}
    values, _ = jaxbridge.call(lambda: {"a": [eigh()]}, nested)()["a"][0]
    np.testing.assert_array_equal(values, [1, 2, 3])


def test_results_that_alias_arguments(x):
    y = jaxbridge.call(lambda v: v, F32)(x)
    assert y.unsafe_buffer_pointer() != x.unsafe_buffer_pointer()
    a, b = jax.jit(jaxbridge.call(lambda v: (v[::-1], v), (F32, F32)))(x)
    np.testing.assert_array_equal(a, [3, 2, 1, 0])
    np.testing.assert_array_equal(b, [0, 1, 2, 3])

    def swap(s, t):
        return s, t  # views of the memory that is updated

    def update(s, v):
        s += v
        return s[::-1]

    state, other = jaxbridge.call(update, (F32, F32), inout={0: 0})(x, x)
    np.testing.assert_array_equal(state, [0, 2, 4, 6])
    np.testing.assert_array_equal(other, [6, 4, 2, 0])


def test_what_a_function_returns_without_declared_results_is_ignored(x):
    assert jaxbridge.call(lambda v: v, ())(x) == ()
    y = jaxbridge.call(lambda v, *, out: (out.fill(7), "ignored")[1], F32, out="out")(x)
    np.testing.assert_array_equal(y, [7, 7, 7, 7])


@pytest.mark.parametrize("spec", [F32, (F32, F32), {"a": F32}], ids=["one", "two", "dict"])
@pytest.mark.parametrize("out", ["out", 0, -1])
def test_an_array_that_is_returned_and_not_written(x, out, spec):
    def fn(*args, **kwargs):
        return x_of(args, kwargs) * 2

    def x_of(args, kwargs):
        return next(a for a in args if isinstance(a, np.ndarray) and not a.flags.writeable)

    for wrong in (fn, lambda *a, **k: (x_of(a, k),), lambda *a, **k: [np.float32(3)]):
        text = result_error(wrong, spec, x, out=out)
        assert "returned an array, float32[" in text and f"although out={out!r}" in text


@pytest.mark.parametrize(
    "finish",
    [
        lambda a, b: None, lambda a, b: (a, b), lambda a, b: [b, a], lambda a, b: a,
        lambda a, b: a[1:], lambda a, b: b[::-1], lambda a, b: a.reshape(2, 2), lambda a, b: 0,
        lambda a, b: {"status": 0, "of": a}, lambda a, b: np.empty(0), lambda a, b: (),
    ],
)  # fmt: skip
def test_written_results_may_be_returned_too(x, finish):
    def fn(v, out):
        out[0][...], out[1][...] = v + 1, v + 2
        return finish(*out)

    for y, n in zip(jaxbridge.call(fn, (F32, F32), out=-1)(x), (1, 2), strict=True):
        np.testing.assert_array_equal(y, np.arange(4) + n)

    def update(state, v, out):
        state += v
        out[...] = v + 2
        return finish(state, out)

    spec = (F32, F32)
    state, y = jaxbridge.call(update, spec, out=-1, inout={0: 0})(x, x)
    np.testing.assert_array_equal(state, 2 * np.arange(4))
    np.testing.assert_array_equal(y, np.arange(4) + 2)


@pytest.mark.parametrize("framework", ["torch", "numba", "warp"])
def test_returned_arrays_of_a_framework(x, framework, needs):
    needs(framework)

    def copy(v, out):
        if framework == "warp":
            import warp

            warp.copy(out, v)
        else:
            out[:] = v

    def written(v, out):
        copy(v, out)
        return out, out[1:]

    def written_through_another(v, out):
        copy(v, out)
        return np.asarray(out)[1:]

    def not_written(v, out):
        copy(v, out)
        return v

    options = {"framework": framework, "out": "out"}
    for fn in (written, written_through_another):
        np.testing.assert_array_equal(jaxbridge.call(fn, F32, **options)(x), x)
    assert "returned an array" in result_error(not_written, F32, x, **options)
    assert "returned an array" in result_error(
        lambda v: v.numpy().copy() if hasattr(v, "numpy") else v.copy(),
        F32,
        x,
        framework=framework,
        inout={0: 0},
    )


_moves = {
    "data": lambda v, out: setattr(out, "data", v * 2),
    "set_": lambda v, out: out.set_(v * 2),
    "swapped": lambda v, out: swap_tensors(out, v * 2),
    "smaller": lambda v, out: out.resize_(2),
}


def swap_tensors(a, b):
    import torch

    torch.utils.swap_tensors(a, b)


@pytest.mark.parametrize("move", _moves)
@pytest.mark.parametrize("way", ["out", "inout", "ref"])
def test_a_tensor_that_was_put_on_other_memory(x, move, way, needs):
    needs("torch")
    fn = _moves[move]
    if way == "out":
        text = result_error(lambda v, out: fn(v, out), F32, x, framework="torch", out="out")
        assert "gave result other memory" in text
        spec = {"a": F32, "b": [F32]}
        text = result_error(
            lambda v, out: [out["a"].copy_(v), fn(v, out["b"][0]), None][2],
            spec,
            x,
            framework="torch",
            out=-1,
        )
        assert "gave result['b'][0] other memory" in text
    else:
        options = {"inout": {0: 0}} if way == "inout" else {}
        state = x + 0 if way == "inout" else jax.new_ref(x + 0)
        spec = F32 if way == "inout" else ()
        text = result_error(
            lambda s, v: [fn(v, s), None][1], spec, state, x, framework="torch", **options
        )
        assert "gave argument 0 other memory" in text
    assert "out.copy_(x)" in text


def test_what_leaves_a_tensor_on_its_memory(x, needs):
    needs("torch")

    def fn(v, state, out):
        import torch

        out.data.copy_(v)
        out.detach().add_(1)
        torch.add(out, 1, out=out)
        out.unsqueeze_(0).squeeze_(0)
        state.data.add_(v)

    y, state = jaxbridge.call(fn, lambda v, s: (v, s), framework="torch", out="out", inout={1: 1})(
        x, x
    )
    np.testing.assert_array_equal(y, np.arange(4) + 2)
    np.testing.assert_array_equal(state, np.arange(4) * 2)
    empty = jaxbridge.call(lambda v, out: out.copy_(v), like, framework="torch", out="out")
    assert empty(x[:0]).shape == (0,)


def test_an_argument_in_place_that_was_not_written(x):
    text = result_error(lambda v: v + 1, F32, x, inout={0: 0})
    assert "returned an array, float32[4]" in text and "inout=" in text
    for fn in (
        lambda v: np.add(v, 1, out=v),
        lambda v: np.add(v, 1, out=v)[::-1],
        lambda v: np.add(v, 1, out=v).fill(7),
    ):
        assert jaxbridge.call(fn, F32, inout={0: 0})(x)[0] in (1, 7)


@pytest.mark.parametrize("spec", [F32, (F32, F32)], ids=["one", "two"])
def test_none_in_place_of_results_hints_at_out(x, spec):
    text = result_error(lambda v: None, spec, x)
    assert "out=" in text and "inout=" in text
    assert "out=" not in result_error(lambda v: 7, spec, x)


def test_wrong_arguments_are_the_functions_own_error(x):
    with pytest.raises(TypeError, match="takes 0 positional arguments but 1 was given"):
        jaxbridge.call(lambda: None, ())(x)


# ---- what can be known at trace time -------------------------------------------------------------


def test_missing_framework_at_trace_time(x, monkeypatch):
    real = builtins.__import__

    def without_torch(name, *args, **kw):
        if name.split(".")[0] == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
        return real(name, *args, **kw)

    for module in [m for m in sys.modules if m.split(".")[0] == "torch"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.delitem(sys.modules, "jaxbridge._adapters.torch", raising=False)
    monkeypatch.delitem(_adapters._loaded, "torch", raising=False)
    monkeypatch.setattr(builtins, "__import__", without_torch)
    ran = []
    f = jaxbridge.call(lambda v: ran.append(1), F32, framework="torch")
    for program in (f, jax.jit(f)):
        with pytest.raises(ImportError, match='framework="torch".*pip install torch'):
            program(x)
    with pytest.raises(ImportError, match="pip install torch"):
        jax.jit(f).lower(x)
    assert not ran


def test_missing_framework_of_another_platform_does_not_count(x):
    f = jaxbridge.call(lambda v: v, F32)  # CuPy on CUDA
    text = jax.jit(f).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    assert "jaxbridge.call" in text
    np.testing.assert_array_equal(f(x), x)


@pytest.mark.parametrize("dtype", [">f4", ">i8", ">c8"])
def test_another_byte_order(x, dtype):
    name = np.dtype(dtype).name
    f = jaxbridge.call(lambda a, v: v, lambda a, v: v)
    text = f"argument 0 is an array of another byte order \\({dtype}\\).*x.astype\\('{name}'\\)"
    with pytest.raises(TypeError, match=text):
        f(np.arange(3).astype(dtype), x)
    for spec in (jax.ShapeDtypeStruct((4,), dtype), np.zeros(4, dtype)):
        with pytest.raises(TypeError, match=f"another byte order.*declare {name}"):
            jax.jit(jaxbridge.call(lambda v: v, spec))(x)
    np.testing.assert_array_equal(f(x.astype("float32"), x), x)


def test_results_that_are_a_python_number():
    f = jaxbridge.call(lambda v: v + 1, like, name=None)
    text = r"hold 1.0; expected.*static.*jnp.asarray\(1.0\)"
    with pytest.raises(TypeError, match=text):
        f(1.0)
    for given in (jnp.asarray(1.0), np.float32(1)):
        assert f(given) == 2


def test_a_failing_declaration_of_results_is_named(x):
    def results(v):
        return v.missing

    f = jaxbridge.call(np.copy, results, name="the.test")
    for program in (f, jax.jit(f)):
        with pytest.raises(AttributeError, match="missing") as caught:
            program(x)
        (note, *_) = caught.value.__notes__
        assert note.startswith("raised by the result_shape_dtypes of the.test")


@pytest.mark.parametrize(
    "results",
    [
        "float32",
        lambda v: "float32",
        lambda v: [object()],
        lambda v: jax.ShapeDtypeStruct((), jax.random.key(0).dtype),
        lambda v: types.SimpleNamespace(shape=3, dtype="float32"),
        lambda v: types.SimpleNamespace(shape=(3,), dtype="no dtype"),
    ],
)
def test_declared_results_that_are_none(x, results):
    f = jaxbridge.call(np.copy, results)
    with pytest.raises(TypeError, match=r"copy: the declared results \(result_shape_dtypes\) hold"):
        f(x)


@pytest.mark.parametrize(
    "framework, copied",
    [
        ("numpy", "x.copy()"),
        ("numba", "x.copy(), on CUDA x.copy_to_host()"),
        ("torch", "x.clone()"),
        ("warp", "warp.clone(x)"),
        ("buffer", "numpy.array(x)"),
    ],
)
def test_a_kept_view_says_how_to_copy(x, framework, copied, needs):
    if framework != "buffer":
        needs(framework)
    f = jaxbridge.call(lambda v, out: kept.append(v), like, framework=framework, out=-1)
    with pytest.raises(errors.ViewKeptError) as caught:
        f(x)
    kept.clear()
    assert str(caught.value).endswith(f"(for example {copied})")


def test_unknown_platform(x):
    with pytest.raises(errors.PlatformError, match="not on tpu"):
        jax.jit(jaxbridge.call(np.copy, F32)).trace(x).lower(lowering_platforms=("tpu",))


def test_key_that_nobody_registered(x):
    from jaxbridge import _lowering

    rule = jax.ffi.ffi_call(_lowering._target, F32)
    spec = '{"durable":false,"name":"lost"}'
    text = jax_error(jax.jit(lambda v: rule(v, key=np.int64(12345), spec=spec)), x)
    assert "'lost'" in text and "anonymous" in text and "name=" in text


@pytest.mark.parametrize("attributes", [{}, {"key": np.int64(1)}, {"spec": "{}"}])
def test_custom_calls_of_others_are_refused(x, attributes):
    from jaxbridge import _lowering

    rule = jax.ffi.ffi_call(_lowering._target, F32)
    assert "serves what jaxbridge lowers" in jax_error(jax.jit(lambda v: rule(v, **attributes)), x)


@pytest.mark.parametrize("spec", ["", "[", "{}", "null", '{"durable":true}'])
def test_spec_that_is_no_spec(x, spec):
    from jaxbridge import _lowering

    rule = jax.ffi.ffi_call(_lowering._target, F32)
    jax_error(jax.jit(lambda v: rule(v, key=np.int64(54321), spec=spec)), x)


@pytest.mark.parametrize("way", ["eager", "reraise", "jit"])
def test_the_exception_of_a_later_call_is_the_original_too(way):
    """From its second call on a program takes jaxlib's fast path, which raises a ValueError."""

    class OwnError(Exception):
        pass

    def fn(v):
        if v[0] < 0:
            raise OwnError("negative")
        return v

    f = jaxbridge.call(fn, lambda v: v)
    g = f if way == "eager" else jax.jit(f)
    x = jnp.ones(3)
    for _ in range(3):
        jax.block_until_ready(g(x))
    if way == "eager":
        with pytest.raises(OwnError):
            g(-x)
    elif way == "reraise":
        with pytest.raises(OwnError), jaxbridge.reraise():
            jax.block_until_ready(g(-x))
    else:
        with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="OwnError: negative"):
            jax.block_until_ready(g(-x))
    jax.block_until_ready(g(x))


def test_an_exception_that_cannot_be_described_is_the_original_all_the_same():
    class Hostile(Exception):
        def __str__(self):
            raise KeyboardInterrupt

    def fn(v):
        raise Hostile

    with pytest.raises(Hostile):
        jaxbridge.call(fn, lambda v: v)(jnp.ones(2))


# ---- the classes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "JaxbridgeError",
        "ResultError",
        "ViewKeptError",
        "InputChangedError",
        "NotRegisteredError",
        "PlatformError",
        "DerivativeError",
        "BatchingError",
    ],
)
def test_error_classes_are_found_under_the_name_that_they_show(name):
    kind = getattr(errors, name)
    assert f"{kind.__module__}.{kind.__qualname__}" == f"jaxbridge.errors.{name}"
    assert getattr(importlib.import_module("jaxbridge.errors"), name) is kind
    error = pickle.loads(pickle.dumps(kind("a message")))
    assert type(error) is kind and error.args == ("a message",)


def test_a_traceback_shows_the_public_name_of_an_error():
    shown = traceback.format_exception_only(errors.ResultError("the message"))
    assert shown == ["jaxbridge.errors.ResultError: the message\n"]

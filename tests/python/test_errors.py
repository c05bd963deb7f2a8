# SPDX-License-Identifier: Apache-2.0
"""Exceptions of external functions on their way to the user, and errors that jaxbridge finds."""

import contextlib
import gc
import importlib
import os
import pickle
import signal
import sys
import traceback
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbridge
import processes
from failing import Stubborn, jax_error
from jaxbridge import _errors, errors

F32 = jax.ShapeDtypeStruct((4,), jnp.float32)


def like(x, *rest, **kw):
    return x


def resident_mib():
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


kept = []


class Mute(Exception):
    def __str__(self):
        raise RuntimeError("no text")


@pytest.fixture
def x():
    return jnp.arange(4, dtype=jnp.float32)


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


def test_jit_message_says_all(x):
    def helper():
        raise Stubborn(7, reason="the reason")

    def callee(v):
        helper()

    text = jax_error(jax.jit(jaxbridge.call(callee, F32, name="the.function")), x)
    assert text.startswith("INTERNAL: failing.Stubborn: the reason (7)\n")
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

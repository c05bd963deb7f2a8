# SPDX-License-Identifier: Apache-2.0
"""The end of the process: what still runs, what still has to run, and what must not run any more."""

import inspect

import pytest

import processes

PRELUDE = """
import atexit, os, sys, threading, time
import jax, jax.numpy as jnp, numpy as np

def late():
    outcome("after jaxbridge's own atexit")

def outcome(when):
    try:
        print(when, float(jax.jit(lambda v: f(v) * 2)(x)[0]), flush=True)
    except BaseException as error:
        print(when, type(error).__name__, str(error)[:120], flush=True)

if "late" in sys.argv:
    atexit.register(late)  # what is registered first runs last
import jaxbridge

x = jnp.ones(4)
spec = jax.ShapeDtypeStruct((4,), jnp.float32)
started = threading.Event()
mesh = jax.sharding.Mesh(np.array(jax.devices()), "i")
P = jax.sharding.PartitionSpec

def like(v):
    return v

def on_all_devices(f):
    # Dispatched, not waited for.
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("i"), out_specs=P("i")))
"""


def run(body, *args, **options):
    done = processes.run(PRELUDE + inspect.cleandoc(body), *args, **options)
    return done.stdout, done.stderr


def test_a_program_that_still_runs():
    out, err = run("""
        def slow(v):
            started.set()
            for _ in range(300_000):
                pass
            return v + 1
        f = jaxbridge.call(slow, like)
        y = on_all_devices(lambda v: f(f(f(v))))(x)
        started.wait()
        print("end of program", flush=True)
        """)
    assert out == "end of program\n" and err == ""


@pytest.mark.parametrize("devices", [1, 2])
def test_a_program_that_still_computes(devices):
    """It has not come to its call: that is refused, and no thread is in the program any more."""
    out, err = run(
        """
        f = jaxbridge.call(np.negative, like)
        big = jnp.ones((1500, 1500))
        def program(v):
            for _ in range(3):
                v = v @ v * 1e-3
            return f(v[:4, 0])
        y = [jax.jit(program)(big) for _ in jax.devices()]
        print("end of program", flush=True)
        """,
        devices=devices,
    )
    assert out == "end of program\n" and err == ""


def test_a_logger_that_has_not_been_waited_for_runs():
    out, err = run("""
        def log(v):
            started.wait()
            os.write(1, b"logged %d\\n" % int(v.sum()))
        f = jaxbridge.call(log, ())
        y = on_all_devices(lambda v: (f(v), v + 1)[1])(x)
        print("end of program", flush=True)
        threading.Timer(0.2, started.set).start()
        """)
    assert out == "end of program\nlogged 2\nlogged 2\n" and err == ""


def test_a_logger_that_fails_is_reported_once():
    out, err = run("""
        def log(v):
            raise ValueError("the log is full")
        f = jaxbridge.call(log, (), name="the.logger")
        y = on_all_devices(lambda v: (f(v), v + 1)[1])(x)
        """)
    assert out == ""
    assert err.startswith("jaxbridge: a call made for its side effect failed:")
    assert "the log is full" in err and "'the.logger'" in err
    assert err.count("ValueError: the log is full") == 2, "first line, and end of the traceback"
    assert "atexit" not in err


def test_an_error_that_was_caught_is_not_reported_again():
    out, err = run("""
        def fail(v):
            raise ValueError("caught")
        for f in (jaxbridge.call(fail, spec), jaxbridge.call(fail, ())):
            try:
                f(x)
            except ValueError:
                print("caught")
        f = jaxbridge.call(fail, like)
        try:
            jax.block_until_ready(on_all_devices(f)(x))
        except jax.errors.JaxRuntimeError:
            print("caught")
        """)
    assert out == "caught\n" * 3 and err == ""


def test_a_pure_call_that_failed_is_not_reported():
    """That of an anonymous function is an effect to JAX, which says so at exit."""
    out, err = run("""
        f = on_all_devices(jaxbridge.call(lambda v: 1 / 0, like))
        try:
            jax.block_until_ready(f(x))
        except jax.errors.JaxRuntimeError:
            print("caught")
        y = f(x)
        """)
    assert out == "caught\n" and err == ""


def test_an_effect_whose_exception_was_raised_is_not_reported():
    out, err = run("""
        def log(v):
            raise ValueError("seen")
        log = jaxbridge.call(log, ())
        f = jax.jit(lambda v: (log(v), v + 1)[1])
        spread = jax.device_put(x, jax.sharding.NamedSharding(mesh, P("i")))
        try:
            with jaxbridge.reraise():
                jax.block_until_ready(f(spread))
        except ValueError:
            print("caught")
        """)
    assert out == "caught\n" and err == ""


# The function runs on XLA's threads when the main thread ends. (Not on a daemon thread of Python: JAX
# itself aborts when a thread of its caller wants the GIL back too late.)
PROGRAM = "f = on_all_devices(jaxbridge.call(fn, like))"
BACKGROUND = """

y = f(x)
started.wait()
print("end of program", flush=True)
"""


@pytest.mark.parametrize(
    "fn",
    [
        """
def fn(v):
    started.set()
    total = 0
    for i in range(2_000_000):  # holds the GIL most of the time
        total += i
    return v + 1
""",
        """
def fn(v):
    started.set()
    time.sleep(0.3)  # gives the GIL away, and wants it back later
    return v + 1
""",
        """
def fn(v):
    started.set()
    for _ in range(50):
        time.sleep(0.005)
    raise ValueError("nobody waits for this")
""",
    ],
    ids=["computes", "sleeps", "raises"],
)
def test_functions_that_run_on_other_threads(fn):
    out, err = run(fn + PROGRAM + BACKGROUND)
    assert out == "end of program\n" and err == ""


def test_calls_that_come_one_after_another():
    """The one that runs ends; the next ones are not made; nothing crashes."""
    program = """
def fn(v):
    started.set()
    return np.sin(v)
call = jaxbridge.call(fn, like)
f = on_all_devices(lambda v: jax.lax.fori_loop(0, 100_000_000, lambda i, c: call(c), v))
"""
    out, err = run(program + BACKGROUND)
    assert out == "end of program\n" and err == ""


def test_calls_made_by_atexit():
    out, err = run(
        """
        f = jaxbridge.call(np.negative, spec)
        atexit.register(outcome, "before jaxbridge's own atexit")
        """,
        "late",
    )
    first, second = out.splitlines()
    assert first == "before jaxbridge's own atexit -2.0"
    assert second.startswith(
        "after jaxbridge's own atexit JaxRuntimeError FAILED_PRECONDITION: the "
    )
    assert "interpreter is shutting down" in second
    assert err == ""


def test_everything_alive_at_exit():
    """Functions, executables, exceptions, kept buffers and contexts in globals, and in cycles."""
    out, err = run("""
        class Cycle: pass
        kept, cycle = [], Cycle()
        def keep(v):
            kept.append(v)
            kept.append(v.base)
            return v + 1
        def fail(v):
            raise ValueError("kept", v.sum())
        f, g = jaxbridge.call(keep, spec), jaxbridge.call(fail, spec, name="fails")
        try:
            f(x)
        except jaxbridge.errors.ViewKeptError as error:
            kept.append(error)
        try:
            jax.jit(g)(x)
        except jax.errors.JaxRuntimeError as error:
            cycle.error = error
        cycle.self, cycle.f = cycle, f
        h = jax.jit(jaxbridge.call(lambda v: v + 1, spec)).lower(x).compile()
        ref = jax.new_ref(x)
        jaxbridge.call(lambda r: None, ())(ref)
        capsule = None
        def export(v):
            global capsule
            capsule = v.base.__dlpack__()
            return v + 1
        try:
            jaxbridge.call(export, spec)(x)
        except jaxbridge.errors.ViewKeptError:
            print("kept a capsule")
        print(float(h(x)[0]))
        """)
    assert out == "kept a capsule\n2.0\n" and err == ""


@pytest.mark.parametrize("how", ["sys.exit(3)", "raise SystemExit(3)", "os._exit(3)"])
def test_the_exit_status_is_the_programs(how):
    out, err = run(
        f"""
        print(float(jaxbridge.call(np.negative, spec)(x)[0]), flush=True)
        {how}
        """,
        status=3,
    )
    assert out == "-1.0\n" and err == ""


def test_an_uncaught_exception_of_a_function():
    out, err = run(
        """
        def fail(v):
            raise ZeroDivisionError("the program ends here")
        jaxbridge.call(fail, spec)(x)
        """,
        status=1,
    )
    assert err.rstrip().endswith("ZeroDivisionError: the program ends here")
    assert "in fail" in err and out == ""


def test_an_uncaught_interrupt_of_a_function():
    out, _ = run(
        """
        import signal
        def fn(v):
            os.kill(os.getpid(), signal.SIGINT)
            while True:
                pass
        try:
            jaxbridge.call(fn, spec)(x)
        finally:
            print("cleaned up", flush=True)
        """,
        status=-2,
    )
    assert out == "cleaned up\n"


# JAX itself does not survive the end of a forked child: the child leaves after our function of atexit.
FORK = """
import warnings
warnings.simplefilter("ignore")  # of JAX and Python: about threads and fork

parent = os.getpid()

@atexit.register
def leave():
    if os.getpid() != parent:
        os._exit(3 if jaxbridge._core.begin_exit() else 4)

def end_of_child():
    if child := os.fork():
        print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    else:
        sys.exit()
"""


def test_a_child_forked_after_a_call():
    out, err = run(
        FORK
        + inspect.cleandoc("""
        jaxbridge.call(np.negative, spec)(x)
        end_of_child()
        """)
    )
    assert out == "child 3\n" and err == ""


@pytest.mark.parametrize("how", ["result", "side effect"])
def test_a_child_forked_during_a_call(how):
    out, err = run(
        FORK
        + inspect.cleandoc(f"""
        go_on = threading.Event()
        def fn(v):
            started.set()
            go_on.wait()
            return v + 1
        y = on_all_devices(jaxbridge.call(fn, like, has_side_effect={how == "side effect"}))(x)
        started.wait()
        end_of_child()
        go_on.set()
        print(float(y[0]))
        """)
    )
    assert out == "child 3\n2.0\n" and err == ""


def test_import_alone():
    done = processes.run("import jaxbridge")
    assert done.stdout == done.stderr == ""

# SPDX-License-Identifier: Apache-2.0
"""reraise, and the table of the exceptions that it finds."""

import threading

import jax
import jax.numpy as jnp
import pytest

import jaxbridge
from failing import Stubborn, jax_error
from jaxbridge import _errors

F32 = jax.ShapeDtypeStruct((4,), jnp.float32)
SCALAR = jax.ShapeDtypeStruct((), jnp.float32)


def like(x, *rest, **kw):
    return x


@pytest.fixture
def x():
    return jnp.arange(4, dtype=jnp.float32)


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

# SPDX-License-Identifier: Apache-2.0
"""Public failures of registration, caching and binding: letter G of the acceptance cases.

G02's property over all options is test_keys.py's. The forms that need a GPU (G05, G07, G15, G16) are
in tests/gpu/test_cases_g_gpu.py, and so is G04. G08 is test_native_examples.py, and test_docs.py.
"""

import ctypes
import os
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbridge
import processes
from jaxbridge import _core, errors
from native_libraries import built


def like(x, *rest, **kw):
    return x


P = jax.sharding.PartitionSpec


@pytest.fixture
def x():
    return jnp.arange(4, dtype=jnp.float32)


def test_G02_one_function_wrapped_twice(x):
    def kernel(a, b):
        if a.flags.writeable:
            a += b
            return None
        return a + 10 * b

    plain, in_place = jaxbridge.call(kernel, like), jaxbridge.call(kernel, like, inout={0: 0})
    for _ in range(2):
        np.testing.assert_array_equal(plain(x, x), np.arange(4) * 11)
        np.testing.assert_array_equal(in_place(x, x), np.arange(4) * 2)
    a, b = jax.jit(lambda v: (plain(v, v), in_place(v, v)))(x)
    np.testing.assert_array_equal(a, np.arange(4) * 11)
    np.testing.assert_array_equal(b, np.arange(4) * 2)


@pytest.mark.parametrize("what", ["shapes", "jit objects", "Functions"])
def test_G03_36_retraces_register_one_target(what, collected):
    collected()
    before = _core.registry_size()
    f = jaxbridge.call(lambda v: v + 1, like)
    keep = []
    for i in range(36):
        if what == "shapes":
            f(jnp.zeros(i + 1))
            continue
        g = f if what == "jit objects" else jaxbridge.call(lambda v: v + 2, like)
        step = jax.jit(lambda v, g=g: g(v))
        step.lower(jnp.zeros(3))
        keep.append(step)
        assert _core.registry_size() - before <= 1
    del keep, f
    collected()
    assert _core.registry_size() == before


@pytest.mark.parametrize("first_inside_jit", [False, True])
def test_G05_foreign_arrays_go_in_and_out_in_any_order(first_inside_jit):
    """On a GPU with CuPy: tests/gpu."""
    foreign = np.arange(6, dtype=np.float32).reshape(2, 3)
    f = jaxbridge.call(lambda v: np.asfortranarray(v) * 2, like)
    program = jax.jit(lambda v: f(v) + 1) if first_inside_jit else lambda v: f(v) + 1
    y = program(jnp.asarray(foreign) if first_inside_jit else foreign)
    np.testing.assert_array_equal(y, foreign * 2 + 1)
    np.testing.assert_array_equal(np.from_dlpack(f(jnp.from_dlpack(foreign))), foreign * 2)


def test_G07_a_platform_without_a_function_is_refused_at_lowering(x):
    """On a GPU: tests/gpu."""
    only_cpu = jaxbridge.call({"cpu": lambda v: v}, like)
    only_cuda = jaxbridge.call({"cuda": lambda v: v}, like)
    np.testing.assert_array_equal(only_cpu(x), x)
    with pytest.raises(errors.PlatformError, match="a function for cpu, none for cuda"):
        jax.jit(only_cpu).trace(x).lower(lowering_platforms=("cuda",))
    with pytest.raises(errors.PlatformError, match="a function for cpu, none for cuda"):
        jax.jit(only_cpu).trace(x).lower(lowering_platforms=("cpu", "cuda"))
    with pytest.raises(errors.PlatformError, match="a function for cuda, none for cpu"):
        only_cuda(x)
    text = jax.jit(only_cuda).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    assert "custom_call @jaxbridge.call" in text


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_G09_static_values_arrive_intact(x, jit, x64):
    given = {
        "dictionary": {"a": {"b": [1, 2.5, None]}, "c": ()},
        "text": "☃",
        "flag": True,
        "nothing": [],
        "number": 2**70,
    }
    arrays = {"array": np.array([1, -2, 2**40]), "scalar": np.int64(2**41), "half": np.float16(0.1)}
    seen = []

    def fn(v, **rest):
        # Arrays are views that end with the call.
        seen.append({k: r.copy() if k in arrays else r for k, r in rest.items()})
        return v + 0

    f = jaxbridge.call(fn, like)
    (jax.jit(lambda v: f(v, **given, **arrays)) if jit else lambda v: f(v, **given, **arrays))(x)
    for name, value in given.items():
        assert type(seen[0][name]) is type(value) and seen[0][name] == value
    for name, value in arrays.items():
        assert seen[0][name].dtype == value.dtype
        np.testing.assert_array_equal(seen[0][name], value)


def test_G09_what_cannot_arrive_is_refused_by_name(x):
    f = jaxbridge.call(lambda v, **rest: v, like)
    for value, text in [
        (np.array(["a"]), r"argument k\['a'\] is an array of dtype"),
        (np.array([None]), r"argument k\['a'\] is an array of dtype object"),
        (jax.random.key(0), r"argument k\['a'\] is an array of PRNG keys"),
        (np.array([2**40]), r"argument k\['a'\] has values that do not fit int32"),
    ]:
        with pytest.raises(TypeError, match=text):
            jax.jit(lambda v, value=value: f(v, k={"a": value}))(x)


def test_G10_equal_new_arrays_are_one_compilation(x):
    traces, seen = [], []

    def fn(v, table):
        seen.append(table.tolist())
        return v + np.float32(table[0])

    f = jaxbridge.call(fn, like)

    @jax.jit
    def program(v, table):
        traces.append(1)
        return f(v, table)

    for i in range(5):
        table = np.array([1, 2, 3]) if i < 3 else np.array([4, 5, 6])
        np.testing.assert_array_equal(program(x, table), np.arange(4) + table[0])
    assert traces == [1] and seen == [[1, 2, 3]] * 3 + [[4, 5, 6]] * 2

    # Eagerly too: arrays are operands, and another array is the same program.
    eager = jaxbridge.call(lambda v, table, s: v + np.float32(table[0]), like)
    eager(x, np.array([1, 2, 3]), ("a", 1))
    assert eager_compilations(lambda: eager(x, np.array([7, 8, 9]), ("a", 1))) == 0
    assert eager_compilations(lambda: eager(x, np.array([7, 8, 9]), ("a", 2))) > 0


def eager_compilations(run):
    """How many programs JAX compiles for `run`."""
    events = []

    def listen(event, duration, **kw):
        events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        run()
    finally:
        stop = getattr(jax.monitoring, "unregister_event_duration_listener", None)
        if stop is not None:
            stop(listen)
    return sum("backend_compile" in event for event in list(events))


def test_G11_plain_handlers_without_types_or_state():
    """What breaks with new runtimes is registered types and state: there is none of either."""
    handlers = _core.handlers()
    assert {(name, platform) for name, platform, _ in handlers} == {
        (name, platform)
        for name in ("jaxbridge.call", "jaxbridge.call_capturable")
        for platform in ("cpu", "CUDA")
    } | {
        ("jaxbridge.enqueued", "CUDA"),
        ("jaxbridge.check_external", "cpu"),
        ("jaxbridge.check_external", "CUDA"),
    }
    assert all(type(h).__name__ == "PyCapsule" for _, _, h in handlers)  # not a dict of stages
    jaxbridge.call(lambda: 1.0, jax.ShapeDtypeStruct((), jnp.float32))()
    runtime, answered = _core.ffi_versions()
    assert answered >= 1 and (runtime == -1 or answered <= runtime)


@pytest.mark.parametrize("method", ["sequential", "expand_dims", "broadcast_all", "batched"])
def test_G12_complex_vmap(method):
    """On every JAX that is supported: scripts/all_jax_versions.sh."""
    v = (jnp.arange(64) + 1j * jnp.arange(64)[::-1]).reshape(4, 16).astype(jnp.complex64)
    f = jaxbridge.call(lambda u: np.fft.fft(u).astype(u.dtype), like, vmap_method=method)
    for program in (jax.vmap(f), jax.jit(jax.vmap(f)), lambda u: jnp.stack([f(w) for w in u])):
        y = program(v)
        assert y.dtype == jnp.complex64
        np.testing.assert_allclose(y, np.fft.fft(np.asarray(v)), rtol=1e-5, atol=1e-3)


def test_G13_without_a_gpu():
    """The import and a CPU call do not touch CUDA; a program for CUDA can still be lowered."""
    done = processes.run(
        """
        import jax, jax.numpy as jnp, numpy as np, jaxbridge

        def cuda_libraries():
            with open("/proc/self/maps") as f:
                return sorted({line.split()[-1] for line in f if "libcuda" in line})

        spec = jax.ShapeDtypeStruct((4,), jnp.float32)
        f = jaxbridge.call(np.negative, spec)
        print(float(f(jnp.ones(4)).sum()), float(jax.jit(f)(jnp.ones(4)).sum()))
        g = jaxbridge.call({"cpu": np.negative, "cuda": np.positive}, spec)
        text = jax.jit(g).trace(jnp.ones(4)).lower(lowering_platforms=("cuda",)).as_text()
        print("custom_call @jaxbridge.call" in text, cuda_libraries())
        """,
        env={"JAXBRIDGE_CUDA_DRIVER": "/there/is/no/such/driver.so"},
    )
    assert done.stdout.split() == ["-4.0", "-4.0", "True", "[]"] and done.stderr == ""


def test_G14_side_effects_are_kept(x):
    seen = []
    log = jaxbridge.call(lambda v: seen.append(float(v.sum())), (), vmap_method="sequential")
    result = jaxbridge.call(lambda v: (seen.append(-1), v)[1], like, has_side_effect=True)

    def ignored(v):
        log(v)
        result(v)
        return v

    def expect(*values):
        jax.effects_barrier()
        assert sorted(seen) == sorted(values)
        seen.clear()

    jax.block_until_ready(jax.jit(ignored)(x))
    expect(6, -1)
    jax.block_until_ready(
        jax.jit(lambda v: jax.lax.scan(lambda c, _: (ignored(c), None), v, None, 3))(x)
    )
    expect(6, 6, 6, -1, -1, -1)
    jax.block_until_ready(jax.jit(lambda v: jax.lax.fori_loop(0, 2, lambda i, c: ignored(c), v))(x))
    expect(6, 6, -1, -1)
    jax.block_until_ready(jax.jit(jax.checkpoint(ignored))(x))
    expect(6, -1)
    jax.block_until_ready(jax.pmap(ignored)(jnp.stack([x, x + 1])))
    expect(6, 10, -1, -1)
    jax.block_until_ready(jax.jit(jax.vmap(log))(jnp.stack([x, x + 1])))
    expect(6, 10)
    jax.block_until_ready(jax.jit(lambda v: (log(v), v)[1] * 0)(x))
    expect(6)


@pytest.mark.parametrize("loop", ["straight", "scan", "fori_loop", "cond"])
def test_G14_writes_of_a_ref_keep_their_place(x, loop):
    """A call that writes a Ref is not dropped, and not moved across the Ref's other uses."""

    def double(r):
        r *= 2

    f = jaxbridge.call(double, ())

    def step(ref):
        ref[...] += 1
        f(ref)  # no result, no declared effect: the Ref is its result
        return ref[...]

    def program(ref):
        if loop == "straight":
            return [step(ref) for _ in range(3)][-1]
        if loop == "scan":
            return jax.lax.scan(lambda c, _: (c, step(ref)), None, None, length=3)[1][-1]
        if loop == "fori_loop":
            return jax.lax.fori_loop(0, 3, lambda i, c: step(ref), x)
        step(ref)
        jax.lax.cond(ref[...][0] > 0, lambda: step(ref), lambda: x)
        return jax.lax.cond(ref[...][0] < 0, lambda: x, lambda: step(ref))

    ref = jax.new_ref(x + 0)
    want = np.arange(4) * 8 + 14
    np.testing.assert_array_equal(jax.jit(program)(ref), want)
    np.testing.assert_array_equal(ref[...], want)


@pytest.mark.parametrize("device", [0, 1])
def test_G15_the_device_of_the_call_counts_not_the_default_one(device):
    """A CPU call while a GPU is visible: tests/gpu."""
    seen = []
    v = np.arange(1_000_000, dtype=np.float32)
    f = jaxbridge.call(lambda u: (seen.append(jaxbridge.current().device), u + 1)[1], like)
    with jax.default_device(jax.devices()[1 - device]):
        y = jax.jit(f)(jax.device_put(v, jax.devices()[device]))
        y.block_until_ready()
    assert seen == [device] and y.devices() == {jax.devices()[device]}
    np.testing.assert_array_equal(y, v + 1)


def test_G17_the_thread_count_is_a_static_argument(needs):
    """And without threads of the function there are none of ours."""
    needs("scipy")
    done = processes.run(
        """
        import os
        import jax, jax.numpy as jnp, numpy as np, scipy.fft, jaxbridge

        v = jnp.asarray(np.random.default_rng(0).standard_normal((64, 512)), jnp.complex64)
        seen = []

        def transform(u, *, workers):
            seen.append(workers)
            return scipy.fft.fft(u, workers=workers)

        f = jaxbridge.call(transform, lambda u, **kw: u)
        program = jax.jit(f, static_argnames="workers")
        want = np.fft.fft(np.asarray(v))
        tasks = lambda: len(os.listdir("/proc/self/task"))
        program(v, workers=1).block_until_ready()
        before = tasks()
        for _ in range(20):
            program(v, workers=1).block_until_ready()
        print(tasks() - before)
        y = program(v, workers=8)
        assert np.allclose(y, want, atol=1e-2) and seen == [1] * 21 + [8]
        print(tasks() - before <= 8, f.stats()["calls"])
        """,
        env={"OMP_NUM_THREADS": "1"},
    )
    assert done.stdout.split() == ["0", "True", "22"] and done.stderr == ""


def in_threads(count, work):
    results = [None] * count

    def run(i):
        results[i] = work(i)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    return results


def test_G18_many_threads_and_one_native_function():
    """A reentrant C function, called without the GIL by 8 threads on two devices."""
    libc = ctypes.CDLL(None)
    libc.memmove.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    n = 4096

    def native(v, out):
        libc.memmove(out.ctypes.data, v.ctypes.data, v.nbytes)

    f = jax.jit(lambda v: jaxbridge.call(native, like, out="out")(v) + 1)

    def work(i):
        device = jax.devices()[i % 2]
        for k in range(50):
            v = np.full(n, 100 * i + k, np.float32)
            if not (np.asarray(f(jax.device_put(v, device))) == v + 1).all():
                return (i, k)
        return "right"

    assert in_threads(8, work) == ["right"] * 8


def test_G18_a_function_that_is_not_reentrant_needs_a_lock():
    """As the docs show it. The lock is the function's: no thread holds one of ours meanwhile."""
    static = np.zeros(256, np.float32)
    lock = threading.Lock()
    at_once = []

    def native(v):
        with lock:
            static[:] = v
            at_once.append(len(at_once))
            os.sched_yield()
            return static * 2

    f = jax.jit(jaxbridge.call(native, like))

    def work(i):
        for k in range(50):
            v = np.full(256, 100 * i + k, np.float32)
            if not (np.asarray(f(jax.device_put(v, jax.devices()[i % 2]))) == v * 2).all():
                return (i, k)
        return "right"

    assert in_threads(4, work) == ["right"] * 4 and at_once == list(range(200))


def test_G19_functions_made_in_20_threads():
    """The entry points are compiled and few: nothing of ctypes' is made for each function."""
    barrier = threading.Barrier(20, timeout=60)

    def work(i):
        captured = [i]
        barrier.wait()
        f = jaxbridge.call(lambda v: v + captured[0], like)
        y = jax.jit(lambda v: f(v))(jax.device_put(np.float32(1), jax.devices()[i % 2]))
        return float(y), f.stats()["calls"]

    assert in_threads(20, work) == [(i + 1.0, 1) for i in range(20)]


def test_G17_the_number_of_threads_of_a_binding():
    """A documented static argument, and XLA's own threads: nothing of ours makes any."""
    ops = jaxbridge.load(built("ops.cpp", "libops"))
    x = np.ones((64, 8), np.float32)
    ops.sums(x)
    before = len(os.listdir("/proc/self/task"))
    for _ in range(20):
        np.testing.assert_array_equal(ops.sums(x), 8)
    assert len(os.listdir("/proc/self/task")) <= before


def test_G18_one_native_function_in_parallel_threads():
    ops = jaxbridge.load(built("ops.cpp", "libops"))
    a, b = np.random.default_rng(0).normal(size=(2, 40, 40)).astype(np.float32)
    expected = np.asarray(ops.matmul(a, b))
    f = jax.jit(ops.matmul)
    wrong = []

    def work():
        for _ in range(50):
            if not np.array_equal(f(a, b), expected):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong

# SPDX-License-Identifier: Apache-2.0
"""graph= on a real device: values, what is captured, what falls back, what ends when."""

import gc
import threading
import warnings
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbridge
from jaxbridge import _config, errors

N = 1 << 12
FRAMEWORKS = ["cupy", "torch"]


def like(x, *rest, **kw):
    return x


@pytest.fixture
def x():
    return jnp.arange(N, dtype=jnp.float32) / N


@pytest.fixture(params=FRAMEWORKS)
def xp(request, needs):
    needs(request.param)
    return pytest.importorskip(request.param)


@pytest.fixture(autouse=True)
def nothing_is_warned():
    """A fall-back is a warning: where none is expected it is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield


def made(xp, fn, spec=like, **options):
    apart = []  # Functions of equal content would share what other tests have left

    def own(*args, **kwargs):
        return (apart, fn(*args, **kwargs))[1]

    return jaxbridge.call(own, spec, framework=xp.__name__, graph="replay", **options)


def looped(f, n):
    return jax.jit(lambda v: jax.lax.fori_loop(0, n, lambda i, c: f(c), v))


def unrolled(f, n):
    def run(v):
        for _ in range(n):
            v = f(v)
        return v

    return jax.jit(run)


@pytest.mark.parametrize("how", [looped, unrolled])
def test_values_and_counts(x, xp, how):
    f = made(xp, lambda v, out: xp.add(v, 1, out=out), out="out")
    program = how(f, 50)
    for k in range(4):
        np.testing.assert_allclose(program(x + k), np.asarray(x) + k + 50, rtol=1e-6)
    stats = f.stats()
    assert stats["calls"] == 200 and stats["captures"] >= 1
    assert stats["replays"] >= (140 if how is looped else 40)


def test_temporaries_are_the_graphs_own(x, xp):
    """Right for every input, while others allocate and free."""

    def fn(v, out):
        out[...] = xp.sin(v) * 2 + xp.cos(v) * xp.exp(-v)

    f = made(xp, fn, out="out")
    program = jax.jit(f)
    others = []
    for k in range(30):
        v = x + k
        want = np.sin(v) * 2 + np.cos(v) * np.exp(-v)
        np.testing.assert_allclose(program(v), want, rtol=2e-5, atol=1e-5)
        if xp.__name__ == "cupy":
            others.append(xp.full(N, 7, dtype="float32"))
        else:
            others.append(xp.full((N,), 7.0, device="cuda"))
        del others[:-3]
    assert all(float(o.sum()) == 7 * N for o in others)
    assert f.stats()["replays"] > 10


def test_results_that_are_returned(x, xp):
    f = made(xp, lambda v: (v + 1, (v * 2).sum()), lambda v: (v, jax.ShapeDtypeStruct((), v.dtype)))

    @jax.jit
    def program(v):
        return jax.lax.scan(lambda c, _: f(c), v, None, length=20)

    last, sums = program(x)
    np.testing.assert_allclose(last, np.asarray(x) + 20, rtol=1e-6)
    want = [2 * np.sum(np.asarray(x, np.float64) + k) for k in range(20)]
    np.testing.assert_allclose(sums, want, rtol=1e-4)
    assert f.stats()["captures"] >= 1 and f.stats()["replays"] >= 2


def test_in_place(x, xp):
    def fn(v):
        v += 1

    f = made(xp, fn, inout={0: 0})
    np.testing.assert_allclose(looped(f, 30)(x), np.asarray(x) + 30, rtol=1e-6)
    g = made(xp, fn, ())
    ref = jax.new_ref(x + 0)
    step = jax.jit(lambda r: [g(r) for _ in range(5)] and None)
    for _ in range(6):
        step(ref)
    np.testing.assert_allclose(ref[...], np.asarray(x) + 30, rtol=1e-6)
    assert f.stats()["replays"] > 20 and g.stats()["replays"] > 10


def host_read(xp):
    def fn(v, out):
        out[...] = v + float(v[0])

    return fn, lambda v: v + v[0]


def synchronizes(xp):
    def fn(v, out):
        xp.add(v, 1, out=out)
        (xp.cuda.runtime.deviceSynchronize if xp.__name__ == "cupy" else xp.cuda.synchronize)()

    return fn, lambda v: v + 1


def on_a_stream_of_its_own(xp):
    stream = xp.cuda.Stream(non_blocking=True) if xp.__name__ == "cupy" else xp.cuda.Stream()

    def fn(v, out):
        if xp.__name__ == "cupy":
            stream.wait_event(xp.cuda.get_current_stream().record())
        else:
            stream.wait_stream(xp.cuda.current_stream())
        with stream if xp.__name__ == "cupy" else xp.cuda.stream(stream):
            xp.add(v, 1, out=out)
        stream.synchronize()

    return fn, lambda v: v + 1


def refuses(xp):
    def fn(v, out):
        xp.add(v, 1, out=out)
        if jaxbridge.current().capturing:
            raise ValueError("not under a capture")

    return fn, lambda v: v + 1


@pytest.mark.parametrize("make", [host_read, synchronizes, on_a_stream_of_its_own, refuses])
def test_what_cannot_be_captured(x, xp, make):
    """It is done by a normal run; one warning says why; the stream and the framework go on."""
    fn, want = make(xp)
    f = made(xp, fn, out="out", name=f"{xp.__name__}.{make.__name__}")
    program = jax.jit(f)

    def eight():
        for k in range(8):
            v = np.asarray(x) + k
            np.testing.assert_allclose(program(x + k), want(v), rtol=1e-6)

    with pytest.warns(RuntimeWarning, match=f"{make.__name__}.*could not be captured") as warned:
        eight()
    assert len(warned) == 1
    assert f.stats()["calls"] == 8 and f.stats()["replays"] == 0
    other = made(xp, lambda v, out: xp.add(v, 2, out=out), out="out")
    np.testing.assert_allclose(looped(other, 20)(x), np.asarray(x) + 40, rtol=1e-5)
    assert other.stats()["replays"] > 10


def test_an_exception_in_every_run(x, xp):
    def fn(v, out):
        xp.add(v, 1, out=out)
        if failing:
            raise KeyError("on purpose")

    f = made(xp, fn, out="out")
    failing = True
    for _ in range(3):
        with pytest.raises(KeyError, match="on purpose"):
            f(x)
    failing = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        np.testing.assert_allclose(looped(f, 10)(x), np.asarray(x) + 10, rtol=1e-6)


def test_a_view_that_was_kept(x, xp):
    kept = []

    def fn(v, out):
        xp.add(v, 1, out=out)
        kept.append(v[1:])

    f = made(xp, fn, out="out")
    for _ in range(3):
        with pytest.raises(errors.ViewKeptError):
            f(x)


def test_what_python_decides_is_frozen(x, xp):
    """Documented: the capture has the value that was there then."""
    f = made(xp, lambda v, out: xp.add(v, k, out=out), out="out")
    program = jax.jit(f).lower(x).compile()
    k = 1
    for _ in range(10):
        np.testing.assert_allclose(program(x), np.asarray(x) + 1, rtol=1e-6)
    assert f.stats()["replays"] > 3
    f.clear()
    k = 5
    np.testing.assert_allclose(program(x), np.asarray(x) + 5, rtol=1e-6)


@pytest.mark.parametrize("limit", [0, 2, 256])
def test_many_lists_of_addresses(x, xp, monkeypatch, limit):
    monkeypatch.setattr(_config, "cache_limit", limit)
    f = made(xp, lambda v, out: xp.add(v, 1, out=out), out="out")
    program = jax.jit(f)
    inputs = [x + i for i in range(20)]
    for _ in range(6):
        outs = [program(v) for v in inputs]  # all alive
        for i, out in enumerate(outs):
            np.testing.assert_allclose(out, np.asarray(x) + i + 1, rtol=1e-6)
    stats = f.stats()
    assert stats["calls"] == 120
    if limit == 0:
        assert stats["captures"] == 0
    elif limit == 2:  # forgotten before they come again: one graph on copies serves them
        assert stats["captures"] == 1 and stats["staged"] >= 100
    else:  # twenty lists, or forty: results are there twice for a while
        assert 20 <= stats["captures"] <= 41 and stats["replays"] - stats["staged"] >= 30


def test_clear_and_the_end_of_a_function(x, xp):
    class Step:
        def __call__(self, v, out):
            xp.add(v, 1, out=out)

    fn = Step()
    ref = weakref.ref(fn)
    f = made(xp, fn, out="out")
    program = looped(f, 20)
    np.testing.assert_allclose(program(x), np.asarray(x) + 20, rtol=1e-6)
    before = f.stats()["captures"]
    f.clear()
    np.testing.assert_allclose(program(x), np.asarray(x) + 20, rtol=1e-6)
    assert f.stats()["captures"] > before
    del f, fn, program
    jax.clear_caches()
    gc.collect()
    assert ref() is None


def test_threads(x, xp):
    f = made(xp, lambda v, out: xp.add(v, 1, out=out), out="out")
    program = looped(f, 40)
    results = {}

    def work(k):
        for _ in range(5):
            results[k] = np.asarray(program(x + k))

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    [t.start() for t in threads]
    [t.join(120) for t in threads]
    for k in range(4):
        np.testing.assert_allclose(results[k], np.asarray(x) + k + 40, rtol=1e-6)
    assert f.stats()["calls"] == 4 * 5 * 40


def test_order_with_slow_work_before_and_after(xp):
    """A replay is in XLA's order: it reads what a long computation before it gives."""
    n = 2048
    m = jnp.eye(n, dtype=jnp.float32) * 0.5

    def slow(v):
        return jax.lax.fori_loop(0, 30, lambda i, c: (c @ m) * 2, v)

    f = made(xp, lambda v, out: xp.add(v, 1, out=out), out="out")
    program = jax.jit(lambda v: slow(f(slow(v))))
    v = jnp.ones((n, n), jnp.float32)
    for k in range(6):
        np.testing.assert_allclose(program(v * k)[::97, ::97], k + 1, rtol=1e-5)
    assert f.stats()["replays"] >= 2


def test_cublas(x, needs):
    needs("cupy")
    import cupy

    f = jaxbridge.call(
        lambda a, b, out: cupy.matmul(a, b, out=out), like, out="out", graph="replay"
    )
    rng = np.random.default_rng(0)
    b = jnp.asarray(rng.normal(size=(64, 64)), jnp.float32)
    program = jax.jit(f)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for _ in range(8):
            a = jnp.asarray(rng.normal(size=(64, 64)), jnp.float32)
            want = np.asarray(a) @ np.asarray(b)
            np.testing.assert_allclose(program(a, b), want, rtol=1e-2, atol=1e-2)


def test_xla_captures(x, xp):
    """graph="xla": XLA's command buffers hold the function's work."""

    def fn(v, out):
        out[...] = xp.sin(v) + 1

    f = jaxbridge.call(fn, like, framework=xp.__name__, graph="xla", out="out")

    def run(v):
        for _ in range(8):
            v = f(v) * 0.5
        return v

    program = jax.jit(run)
    for k in range(10):
        want = np.asarray(x, np.float64) + k
        for _ in range(8):
            want = (np.sin(want) + 1) * 0.5
        np.testing.assert_allclose(program(x + k), want, rtol=1e-4)


def as_many_arrays(program, x, n):
    """Calls on memory that never comes again, since all of it stays in use."""
    inputs = [x + k for k in range(n)]
    return inputs, [program(v) for v in inputs]


def test_memory_that_never_comes_again(x, xp):
    f = made(xp, lambda v, out: xp.add(v, 1, out=out), out="out")
    inputs, outs = as_many_arrays(jax.jit(f), x, 60)
    for v, out in zip(inputs, outs, strict=True):
        np.testing.assert_allclose(out, np.asarray(v) + 1, rtol=1e-6)
    stats = f.stats()
    assert stats["staged"] == stats["replays"] >= 45
    assert stats["captures"] == 1 and stats["fallbacks"] == []


def test_memory_that_never_comes_again_in_place(x, xp):
    def fn(v):
        v *= 3

    f = made(xp, fn, inout={0: 0})
    inputs, outs = as_many_arrays(jax.jit(f), x, 40)  # XLA copies an operand that is used later
    for v, out in zip(inputs, outs, strict=True):
        np.testing.assert_allclose(out, np.asarray(v) * 3, rtol=1e-6)
    assert f.stats()["staged"] >= 1


def test_large_arrays_are_not_copied(xp):
    f = made(xp, lambda v, out: xp.add(v, 1, out=out), out="out")
    x = jnp.ones(1 << 25, jnp.float32)
    _, outs = as_many_arrays(jax.jit(f), x, 12)
    assert all(float(out[k]) == k + 2 for k, out in enumerate(outs))
    assert f.stats()["staged"] == 0


def test_fifty_lists_in_one_program(x, xp):
    f = made(xp, lambda v, out: xp.add(v, 1, out=out), out="out")

    def run(v):
        outs = []
        for _ in range(50):
            v = f(v)
            outs.append(v)
        return outs  # 50 places

    program = jax.jit(run, donate_argnums=())
    for _ in range(8):
        outs = program(x)
        for k, out in enumerate(outs):
            np.testing.assert_allclose(out, np.asarray(x) + k + 1, rtol=1e-5)
        del outs
    stats = f.stats()
    assert stats["calls"] == 400 and stats["replays"] >= 300
    assert stats["captures"] <= 120  # XLA may have given two sets of addresses


def test_verify_finds_what_is_frozen(x, xp):
    scale = [1.0]
    f = jaxbridge.call(
        lambda v, out: xp.multiply(v, scale[0], out=out),
        like,
        framework=xp.__name__,
        graph="verify",
        out="out",
        name=f"test.scaled.{xp.__name__}",
    )
    program = jax.jit(f)
    v = x + 1
    for _ in range(6):
        np.testing.assert_allclose(program(v), np.asarray(v), rtol=1e-6)
    assert f.stats()["captures"] >= 1
    scale[0] = 3.0
    with pytest.raises(jax.errors.JaxRuntimeError, match="ReplayError.*gave other values"):
        for _ in range(6):
            program(v).block_until_ready()
    scale[0] = 1.0
    np.testing.assert_allclose(program(v), np.asarray(v), rtol=1e-6)


def test_verify_in_place(x, xp):
    def fn(v):
        v += 1

    f = jaxbridge.call(
        fn,
        like,
        framework=xp.__name__,
        graph="verify",
        inout={0: 0},
        name=f"in_place.{xp.__name__}",
    )
    np.testing.assert_allclose(looped(f, 20)(x), np.asarray(x) + 20, rtol=1e-6)
    stats = f.stats()
    assert stats["calls"] == 20 and stats["captures"] >= 1
    assert stats["captures"] + stats["replays"] == 19  # all but the first were compared


def test_verify_on_memory_that_never_comes_again(x, xp):
    """What is compared there is the replay on copies; a counter of Python's is frozen in it."""
    count, counts_up = [1.0], [False]

    def fn(v, out):
        count[0] += counts_up[0]
        xp.add(v, count[0], out=out)

    f = jaxbridge.call(
        fn,
        like,
        framework=xp.__name__,
        graph="verify",
        out="out",
        name=f"test.counts.{xp.__name__}",
    )
    program = jax.jit(f)
    inputs, outs = as_many_arrays(program, x, 40)
    for v, out in zip(inputs, outs, strict=True):
        np.testing.assert_allclose(out, np.asarray(v) + 1, rtol=1e-6)
    stats = f.stats()
    assert stats["captures"] == 1 and stats["fallbacks"] == []
    assert stats["staged"] == stats["replays"] >= 25
    counts_up[0] = True
    with pytest.raises(jax.errors.JaxRuntimeError, match="ReplayError.*gave other values"):
        outs.append(program(x + 100).block_until_ready())
    counts_up[0] = False
    np.testing.assert_allclose(program(x + 200), np.asarray(x) + 200 + count[0], rtol=1e-6)


def test_verify_on_copies_in_place(x, xp):
    def fn(v):
        v *= 3

    f = jaxbridge.call(
        fn, like, framework=xp.__name__, graph="verify", inout={0: 0}, name=f"thrice.{xp.__name__}"
    )
    inputs, outs = as_many_arrays(jax.jit(f), x, 40)
    for v, out in zip(inputs, outs, strict=True):
        np.testing.assert_allclose(out, np.asarray(v) * 3, rtol=1e-6)
    stats = f.stats()
    assert stats["staged"] >= 1 and stats["fallbacks"] == []


def test_numba_is_captured(x, needs):
    needs("numba_cuda")
    from numba import cuda

    @cuda.jit
    def kernel(v, out):
        i = cuda.grid(1)
        if i < out.size:
            out[i] = v[i] + 1

    def default_stream(v, out):
        kernel[N // 256, 256](v, out)

    def stream_of_the_call(v, out):
        stream = cuda.external_stream(jaxbridge.current().stream)
        kernel[N // 256, 256, stream](v, out)

    def several(v, out):
        kernel[N // 256, 256](v, out)
        kernel[1, 256](out, out)

    for fn in (default_stream, stream_of_the_call, several):
        f = jaxbridge.call(fn, like, framework="numba", graph="replay", out="out")
        for how in (looped, unrolled):
            want = np.asarray(x) + 30
            if fn is several:
                want[:256] += 30
            for _ in range(4):
                np.testing.assert_allclose(how(f, 30)(x), want, rtol=1e-5)
        assert f.stats()["replays"] > 60, (fn.__name__, f.stats())


def test_numba_copies(x, needs):
    """Captured or not, the values are right: results that are returned, and copies."""
    needs("numba_cuda")
    from numba import cuda

    @cuda.jit
    def kernel(v):
        i = cuda.grid(1)
        if i < v.size:
            v[i] = v[i] + 1

    def returns(v):
        kernel[N // 256, 256](v)
        return v

    def copies(v, out):
        out.copy_to_device(v)

    def to_host(v, out):
        out.copy_to_device(v.copy_to_host() + 2)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        f = jaxbridge.call(returns, like, framework="numba", graph="replay")
        program = looped(f, 20)
        for k in range(3):
            np.testing.assert_allclose(program(x + k), np.asarray(x) + k + 20, rtol=1e-6)
        for fn, plus in ((copies, 0), (to_host, 2)):
            f = jaxbridge.call(fn, like, framework="numba", graph="replay", out="out")
            program = jax.jit(f)
            for k in range(12):
                np.testing.assert_allclose(program(x + k), np.asarray(x) + k + plus, rtol=1e-6)


def test_numba_elsewhere_is_not_redirected(x, needs):
    """Threads that capture nothing launch where they always did."""
    test_numba_is_captured(x, needs)
    from numba import cuda

    @cuda.jit
    def kernel(v):
        i = cuda.grid(1)
        if i < v.size:
            v[i] = i

    array = cuda.device_array(N, np.int32)
    kernel[N // 256, 256](array)
    np.testing.assert_array_equal(array.copy_to_host(), np.arange(N))


def warp_add(wp, kernel):
    def fn(v, out):
        middle = wp.zeros(N, dtype=wp.float32)  # of the graph's own pool
        wp.launch(kernel, dim=N, inputs=[v], outputs=[middle])
        wp.copy(out, middle)

    return fn


def test_warp_is_captured(x, needs):
    needs("warp")
    import warp as wp

    import _warp_kernels

    fn = warp_add(wp, _warp_kernels.add_one)
    f = jaxbridge.call(fn, like, framework="warp", graph="replay", out="out")
    others = []
    for how in (looped, unrolled):
        program = how(f, 30)
        for k in range(4):
            np.testing.assert_allclose(program(x + k), np.asarray(x) + k + 30, rtol=1e-5)
            others.append(wp.full(N, 7.0, dtype=wp.float32, device="cuda:0"))
    assert f.stats()["replays"] > 100, f.stats()
    assert all(float(o.numpy().sum()) == 7 * N for o in others)
    f.clear()
    np.testing.assert_allclose(program(x), np.asarray(x) + 30, rtol=1e-5)
    assert not wp.get_device("cuda:0").is_capturing


def test_warp_that_can_not_be_captured(x, needs):
    needs("warp")
    import warp as wp

    import _warp_kernels

    def fn(v, out):
        wp.launch(_warp_kernels.add_one, dim=N, inputs=[v], outputs=[out])
        out.numpy()

    f = jaxbridge.call(fn, like, framework="warp", graph="replay", out="out")
    with pytest.warns(RuntimeWarning, match="could not be captured"):
        np.testing.assert_allclose(looped(f, 10)(x), np.asarray(x) + 10, rtol=1e-6)
    assert len(f.stats()["fallbacks"]) == 1
    g = jaxbridge.call(warp_add(wp, _warp_kernels.add_one), like, framework="warp", out="out")
    np.testing.assert_allclose(looped(g, 10)(x), np.asarray(x) + 10, rtol=1e-6)


def test_warp_xla_captures(x, needs):
    needs("warp")
    import warp as wp

    import _warp_kernels

    f = jaxbridge.call(
        warp_add(wp, _warp_kernels.add_one), like, framework="warp", graph="xla", out="out"
    )
    program = unrolled(f, 10)
    for k in range(6):
        np.testing.assert_allclose(program(x + k), np.asarray(x) + k + 10, rtol=1e-5)


def test_numba_xla_captures(x, needs):
    needs("numba_cuda")
    from numba import cuda

    @cuda.jit
    def kernel(v, out):
        i = cuda.grid(1)
        if i < out.size:
            out[i] = v[i] + 1

    f = jaxbridge.call(
        lambda v, out: kernel[N // 256, 256](v, out),
        like,
        framework="numba",
        graph="xla",
        out="out",
    )
    program = unrolled(f, 10)
    for k in range(6):
        np.testing.assert_allclose(program(x + k), np.asarray(x) + k + 10, rtol=1e-5)


def test_xla_captures_a_loop(x, xp):
    """XLA's flag for loops in command buffers."""
    f = jaxbridge.call(
        lambda v, out: xp.add(v, 1, out=out), like, framework=xp.__name__, graph="xla", out="out"
    )
    options = {
        "xla_gpu_enable_command_buffer": "FUSION,CUSTOM_CALL,WHILE,CONDITIONAL",
        "xla_gpu_graph_min_graph_size": "1",
    }
    program = looped(f, 200).lower(x).compile(compiler_options=options)
    for k in range(4):
        np.testing.assert_allclose(program(x + k), np.asarray(x) + k + 200, rtol=1e-5)
    assert f.stats()["calls"] < 600  # most turns are the graph's

# SPDX-License-Identifier: Apache-2.0
"""Public failures of callbacks and their errors: letter F of the acceptance cases.

F11 and F13, and the kernel of F19, need a GPU: tests/gpu/test_cases_f_gpu.py, tests/gpu/test_native_gpu.py.
"""

import sys
import threading
import traceback
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbridge
import processes
from jaxbridge import _core


def like(x, *rest, **kw):
    return x


class Custom(Exception):
    def __init__(self, code, *, detail):
        super().__init__(code)
        self.code, self.detail = code, detail


@pytest.fixture
def x():
    return jnp.arange(4, dtype=jnp.float32)


@pytest.fixture
def mesh():
    return jax.sharding.Mesh(np.array(jax.devices()), "i")


P = jax.sharding.PartitionSpec


@pytest.mark.parametrize("async_dispatch", [True, False], ids=["async", "sync"])
def test_F03_logger_in_a_loop_of_a_loop(async_dispatch):
    done = processes.run(
        """
        import sys, jax
        jax.config.update("jax_cpu_enable_async_dispatch", sys.argv[1] == "True")
        import jax.numpy as jnp, numpy as np, jaxbridge
        seen = []
        log = jaxbridge.call(lambda d: seen.append((int(d["i"]), float(d["v"]))), ())
        pure = jaxbridge.call(lambda d: d["v"] + 1, jax.ShapeDtypeStruct((), jnp.float32))

        @jax.jit
        def program(v):
            def body(c):
                i, v = c
                log({"i": i, "v": v})
                return i + 1, pure({"i": i, "v": v})
            return jax.lax.while_loop(lambda c: c[0] < 20, body, (0, v))[1]

        v = jnp.float32(0)
        for _ in range(50):
            v = program(v)
        print(float(v))
        jax.effects_barrier()
        print(len(seen), sorted(seen) == sorted((k % 20, float(k)) for k in range(1000)))
        """,
        async_dispatch,
    )
    assert done.stdout.split() == ["1000.0", "1000", "True"] and done.stderr == ""


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_F06_custom_exception_class(x, jit):
    raised = Custom(7, detail=["some"])

    def rejects(v):
        raise raised

    f = jaxbridge.call(rejects, like)
    program = jax.jit(f) if jit else f
    with pytest.raises(Custom) as caught, jaxbridge.reraise():
        program(x)
    assert caught.value is raised
    assert (caught.value.code, caught.value.detail) == (7, ["some"])
    frames = [frame.f_code for frame, _ in traceback.walk_tb(caught.value.__traceback__)]
    assert rejects.__code__ in frames


def test_F06_one_exception_per_call_and_thread():
    barrier = threading.Barrier(2, timeout=30)

    def rejects(v):
        barrier.wait()
        raise Custom(int(v[0]), detail=None)

    f = jax.jit(jaxbridge.call(rejects, like))
    codes = {0: [], 1: []}

    def work(i):
        for k in range(10):
            operand = jax.device_put(jnp.full(3, 100 * i + k, jnp.float32), jax.devices()[i])
            try:
                with jaxbridge.reraise():
                    jax.block_until_ready(f(operand))
            except Custom as error:
                codes[i].append(error.code)

    threads = [threading.Thread(target=work, args=(i,)) for i in codes]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert codes == {0: list(range(10)), 1: list(range(100, 110))}


def test_F07_a_value_is_rejected_on_one_of_4_devices():
    done = processes.run(
        """
        import jax, jax.numpy as jnp, numpy as np, jaxbridge
        mesh = jax.sharding.Mesh(np.array(jax.devices()), "i")
        P = jax.sharding.PartitionSpec

        def check(v):
            if (v < 0).any():
                raise ValueError("a negative value")

        def over(f):
            return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("i"), out_specs=P("i")))

        log = jaxbridge.call(check, (), name="the.check")
        pure = jaxbridge.call(lambda v: v + 1, lambda v: v)
        checked = over(lambda v: (log(v), pure(v))[1])
        good, bad = jnp.arange(8.0), jnp.arange(8.0).at[5].set(-1)
        try:
            with jaxbridge.reraise():
                jax.block_until_ready(checked(bad))
                jax.effects_barrier()
        except ValueError as error:
            print(error)
        for _ in range(3):
            print(float(over(pure)(good).sum()), float(jax.jit(pure)(good).sum()))
            print(float(jnp.cumsum(good)[-1]), float(jaxbridge.call(np.sum, good[0])(good)))
        print(float(checked(good).sum()))
        """,
        devices=4,
    )
    lines = done.stdout.splitlines()
    assert lines[0] == "a negative value"
    assert lines[1:] == ["36.0 36.0", "28.0 28.0"] * 3 + ["36.0"]
    # Its token fails again at the end: one report, of that error alone.
    assert done.stderr == "" or (
        done.stderr.startswith("jaxbridge: a call made for its side effect failed: ")
        and "a negative value" in done.stderr
        and "'the.check'" in done.stderr
    )


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_F08_runtime_error_on_a_scalar(jit):
    """On a GPU: tests/gpu."""

    def fails(v):
        raise RuntimeError(f"got {float(v)}")

    f = jaxbridge.call(fails, like)
    for _ in range(3):
        with pytest.raises(RuntimeError, match=r"got 2\.0") as caught, jaxbridge.reraise():
            (jax.jit(f) if jit else f)(jnp.float32(2))
        assert type(caught.value) is RuntimeError
        assert float(jaxbridge.call(np.negative, like)(jnp.float32(2))) == -2


def test_F09_large_arrays_are_not_copied(x64):
    """144 MiB, made by one call and used by the next."""
    n = 18_982_041
    spec = jax.ShapeDtypeStruct((n,), jnp.float64)
    addresses = []

    def address(v):
        addresses.append(v.__array_interface__["data"][0])

    def make(out):
        address(out)
        out[0], out[-1] = 1, 2

    def use(v):
        address(v)
        assert v.shape == (n,) and v.dtype == np.float64 and not v.flags.owndata
        return v[0] + v[-1]

    make_call = jaxbridge.call(make, spec, out=0)
    use_call = jaxbridge.call(use, jax.ShapeDtypeStruct((), jnp.float64))
    total, made = jax.jit(lambda: (lambda v: (use_call(v), v))(make_call()))()
    assert float(total) == 3
    assert addresses == [made.unsafe_buffer_pointer()] * 2
    addresses.clear()
    y = make_call()
    assert float(use_call(y)) == 3
    assert addresses == [y.unsafe_buffer_pointer()] * 2


def test_F10_out_and_returned_inputs(x):
    seen = []

    def into(v, out):
        seen.append(out.__array_interface__["data"][0])
        np.add(v, 1, out=out)

    y = jax.jit(jaxbridge.call(into, like, out="out"))(x)
    assert seen == [y.unsafe_buffer_pointer()]
    np.testing.assert_array_equal(y, np.arange(4) + 1)

    for fn in (lambda v: v, lambda v: v[::-1][::-1], lambda v: v[:]):
        f = jaxbridge.call(fn, like)
        for program in (f, jax.jit(f), jax.jit(f, donate_argnums=0)):
            operand = x + 0
            np.testing.assert_array_equal(program(operand), np.arange(4))
    a, b = jax.jit(jaxbridge.call(lambda v, w: (w, v), lambda v, w: (w, v)))(x, x + 10)
    np.testing.assert_array_equal(a, np.arange(4) + 10)
    np.testing.assert_array_equal(b, np.arange(4))

    def overwrites(v):
        v += 1
        return v

    with pytest.raises(ValueError, match="read-only"):
        jaxbridge.call(overwrites, like)(x)
    np.testing.assert_array_equal(x, np.arange(4))
    y = jaxbridge.call(lambda v: overwrites(v) is None, like, inout={0: 0})(x)
    np.testing.assert_array_equal(y, np.arange(4) + 1)
    np.testing.assert_array_equal(x, np.arange(4))


@pytest.mark.parametrize("shape", [(), (3,), (2, 1)])
@pytest.mark.parametrize("framework", [None, "numpy", "buffer"])
def test_F12_the_arguments_type_is_the_same_everywhere(shape, framework, mesh):
    """On a GPU, and with the other frameworks there: tests/gpu."""
    types = []

    def fn(out, v):
        types.append((type(v), type(out)))

    v = jnp.ones(shape)
    f = jaxbridge.call(fn, like, framework=framework, out=0, vmap_method="sequential")
    f(v)
    jax.jit(f)(v)
    jax.jit(lambda u: jax.lax.scan(lambda c, _: (f(c), None), u, None, length=1)[0])(v)
    jax.vmap(f)(v[None])
    jax.lax.cond(True, f, f, v)
    with jax.disable_jit():
        f(v)
    replicated = jax.shard_map(f, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    jax.block_until_ready(jax.jit(replicated)(v))
    f(np.ones(shape, np.float32))
    want = _core.Buffer if framework == "buffer" else np.ndarray
    assert len(types) >= 8 and set(types) == {(want, want)}


@pytest.mark.parametrize("batched", [False, True], ids=["predicate", "batched predicate"])
@pytest.mark.parametrize("method", ["sequential", "broadcast_all", "batched"])
def test_F14_pure_calls_in_a_vmapped_while_loop(batched, method):
    f = jaxbridge.call(lambda v: v + 1, like, vmap_method=method)

    def program(n, v):
        return jax.lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, f(c[1])), (0, v))[1]

    n = jnp.array([1, 3]) if batched else 2
    y = jax.jit(jax.vmap(program, in_axes=(0 if batched else None, 0)))(n, jnp.zeros((2, 3)))
    np.testing.assert_array_equal(y[:, 0], [1, 3] if batched else [2, 2])


def effectful(n, batched):
    count = []

    def log(v):
        count.append(1)

    f = jaxbridge.call(log, (), vmap_method="sequential")

    def program(n, v):
        def body(c):
            f(c[1])
            return c[0] + 1, c[1]

        return jax.lax.while_loop(lambda c: c[0] < n, body, (0, v))[1]

    jax.block_until_ready(
        jax.jit(jax.vmap(program, in_axes=(0 if batched else None, 0)))(n, jnp.zeros((2, 3)))
    )
    jax.effects_barrier()
    return len(count)


def test_F14_effectful_call_in_a_vmapped_while_loop():
    assert effectful(2, False) == 4, "each element makes its own calls"


def test_F14_effectful_call_with_a_batched_predicate():
    """It would be made for elements that have finished, too: an error when it is traced."""
    with pytest.raises(Exception, match=r"effects? not supported"):
        effectful(jnp.array([1, 3]), True)
    f = jaxbridge.call(lambda v: None, (), vmap_method="sequential")
    with pytest.raises(NotImplementedError, match="effect not supported in vmap-of-cond"):
        jax.vmap(lambda p, v: jax.lax.cond(p, lambda: (f(v), v)[1], lambda: v))(
            jnp.array([True, False]), jnp.zeros((2, 3))
        )


def test_F15_the_second_call_runs_the_function_and_nothing_else(x):
    traces = []

    def fn(v):
        return v + 1

    f = jaxbridge.call(fn, like)

    @jax.jit
    def program(v):
        traces.append(1)
        return f(v) * 2

    program(x)
    program(x)
    calls = []

    def note(frame, event, arg):
        if event == "call":
            calls.append((frame.f_globals["__name__"], frame.f_code.co_name))

    sys.setprofile(note)
    try:
        y = program(x)
    finally:
        sys.setprofile(None)
    np.testing.assert_array_equal(y, (np.arange(4) + 1) * 2)
    assert traces == [1]
    assert calls.count((__name__, "fn")) == 1
    others = {module for module, _ in calls} - {__name__}
    of_a_call = ("jaxbridge._plan", "jaxbridge._returned", "jaxbridge._adapters")
    assert all(m.startswith(of_a_call) for m in others), calls
    assert len(calls) < 12, calls


def test_F15_the_first_program_of_a_process_is_traced_once():
    """What a module of JAX's brings that is imported meanwhile can make JAX trace all again."""
    processes.run(
        """
        import jax, jax.numpy as jnp, jaxbridge
        import sys

        f = jaxbridge.call(lambda v: v + 1, lambda v: v)
        traces = []

        @jax.jit
        def program(v):
            traces.append(1)
            return f(v) * 2

        for _ in range(3):
            assert program(jnp.zeros(2)).tolist() == [2, 2]
        assert traces == [1]
        assert "jax.extend.pallas" not in sys.modules
        """
    )


def test_F16_a_thousand_closures(collected):
    class Array(np.ndarray):
        pass

    collected()
    before = _core.registry_size()
    refs = []
    programs = []
    for i in range(1000):
        big = np.zeros(250_000, np.float32).view(Array)  # 1 MB

        def fn(v, big=big):
            return v + big[0]

        refs.append(weakref.ref(big))
        program = jax.jit(jaxbridge.call(fn, like))
        # Most are lowered only: it is the lowering that registers, the compiler takes the time.
        programs.append(program(jnp.float32(i)) if i % 50 == 0 else program.lower(jnp.float32(i)))
        programs.append(program)
    del big, fn, program
    assert _core.registry_size() - before == 1000
    programs.clear()
    collected()
    assert sum(r() is not None for r in refs) == 0
    assert _core.registry_size() == before


def test_F17_a_sharded_operand_of_a_host_call(mesh):
    """The rule, eagerly and under jit: whole arrays where nothing is said, each device's part where the
    function is elementwise or has a rule, and inside shard_map."""
    n = mesh.size
    sharding = jax.sharding.NamedSharding(mesh, P("i"))
    v = np.arange(n * 64 * 64, dtype=np.float32).reshape(n, 64, 64)
    sharded = jax.device_put(v, sharding)
    shapes = []

    def host(u):
        shapes.append(u.shape)
        return u * 2

    f = jaxbridge.call(host, like)
    for program in (f, jax.jit(f), jax.jit(f, out_shardings=sharding)):
        shapes.clear()
        y = jax.block_until_ready(program(sharded))
        np.testing.assert_array_equal(y, v * 2)
        assert set(shapes) == {(n, 64, 64)}
    assert y.sharding.is_equivalent_to(sharding, 3)
    elementwise = jaxbridge.call(host, like, elementwise=True)
    for program in (elementwise, jax.jit(elementwise)):
        shapes.clear()
        y = jax.block_until_ready(program(sharded))
        assert shapes == [(1, 64, 64)] * n and y.sharding.is_equivalent_to(sharding, 3)
        np.testing.assert_array_equal(y, v * 2)
    restored = jax.jit(lambda u: jax.lax.with_sharding_constraint(f(u), sharding))(sharded)
    jax.block_until_ready(restored)
    assert restored.sharding.is_equivalent_to(sharding, 3)
    shapes.clear()
    over = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("i"), out_specs=P("i")))
    y = jax.block_until_ready(over(sharded))
    assert shapes == [(1, 64, 64)] * n and y.sharding.is_equivalent_to(sharding, 3)
    np.testing.assert_array_equal(y, v * 2)


@pytest.mark.parametrize("shardy", [True, False], ids=["shardy", "gspmd"])
def test_F18_two_results_in_shard_map(shardy, mesh):
    if not hasattr(jax.config, "jax_use_shardy_partitioner"):
        pytest.skip("this JAX has one partitioner only")
    before = jax.config.jax_use_shardy_partitioner
    jax.config.update("jax_use_shardy_partitioner", shardy)
    jax.clear_caches()
    try:
        total = jax.ShapeDtypeStruct((2,), jnp.float32)
        f = jaxbridge.call(lambda v: (v + 1, v.sum(0)), lambda v: (v, total))
        v = jnp.arange(32, dtype=jnp.float32).reshape(16, 2)
        over = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("i"), out_specs=(P("i"), P("i"))))
        text = over.lower(v).as_text()
        assert text.count("custom_call @jaxbridge.call") == 1
        a, b = over(v)
        np.testing.assert_array_equal(a, v + 1)
        np.testing.assert_array_equal(b.reshape(mesh.size, 2), v.reshape(mesh.size, -1, 2).sum(1))
    finally:
        jax.config.update("jax_use_shardy_partitioner", before)
        jax.clear_caches()


def test_F19_a_numba_cfunc_in_a_jitted_loop():
    """Called through a native entry: no Python in the loop, and the GIL may be elsewhere."""
    numba = pytest.importorskip("numba")
    pointer = numba.types.CPointer(numba.types.float32)

    @numba.cfunc(numba.types.void(pointer, numba.types.intp, pointer))
    def increment(x, n, y):
        for i in range(n):
            y[i] = x[i] + 1

    f = jaxbridge.bind(increment, "x: float32[n], n: int64, out y: float32[n]")
    loop = jax.jit(lambda x: jax.lax.fori_loop(0, 1000, lambda i, y: f(y), x))
    python_calls = []
    sys.setprofile(lambda frame, event, arg: python_calls.append(frame.f_code.co_name))
    try:
        compiled = loop.lower(jnp.zeros(4, jnp.float32)).compile()
        python_calls.clear()
        out = compiled(jnp.zeros(4, jnp.float32))
    finally:
        sys.setprofile(None)
    np.testing.assert_array_equal(out, 1000)
    assert "increment" not in python_calls and f.stats()["calls"] == 1000

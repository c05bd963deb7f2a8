# SPDX-License-Identifier: Apache-2.0
"""Each private need of `_compat.py`, run on every supported JAX: here a new JAX breaks first."""

import functools
import pickle
import subprocess
import sys
import textwrap
import threading
import warnings
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.interpreters import mlir
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jaxbridge
from jaxbridge import _compat, _core
from processes import run

P = PartitionSpec
F32 = jax.ShapeDtypeStruct((), jnp.float32)


def like(x, *rest):
    return x


def mesh_of(axis_type):
    return jax.make_mesh((2,), ("i",), axis_types=(axis_type,))


def mapped(fn, in_specs, out_specs, **options):
    mesh = mesh_of(AxisType.Auto)
    return jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **options)


# A function of the module is a named one, which can be exported.
def double(x):
    return x * 2


@pytest.fixture
def x():
    return jnp.float32(2)


# ---- version -------------------------------------------------------------------------------------


def test_this_jax_is_supported():
    assert _compat.jax_version >= _compat.oldest_jax
    _compat.check_version()


def test_what_is_public_in_jax_extend_comes_without_it():
    from jax.extend import core
    from jax.extend.mlir import ir

    assert _compat.Primitive is core.Primitive and _compat.ir.StringAttr is ir.StringAttr
    out = run("""
        import jax, sys
        before = set(sys.modules)
        import jaxbridge
        print([m for m in set(sys.modules) - before if m.startswith("jax.extend") or "pallas" in m])
        """)
    assert out.stdout == "[]\n"


def test_an_older_jax_is_refused(monkeypatch):
    monkeypatch.setattr(_compat, "jax_version", (0, 7, 2))
    with pytest.raises(ImportError, match=r"needs JAX 0\.8\.0 or later"):
        _compat.check_version()


# ---- the effect ----------------------------------------------------------------------------------


def _custom_jvp(log):
    f = jax.custom_jvp(lambda v: (log(v), v)[1])
    f.defjvp(lambda p, t: ((log(p[0]), p[0])[1], t[0]))
    return f


def _custom_vjp(log, where, optimize_remat=False):
    def primal(v):
        if where == "primal":
            log(v)
        return v * 2

    def fwd(v):
        if where == "fwd":
            log(v)
        return v * 2, None

    def bwd(_, ct):
        if where == "bwd":
            log(ct)
        return (ct * 2,)

    f = jax.custom_vjp(primal)
    f.defvjp(fwd, bwd, optimize_remat=optimize_remat)
    return f


def _custom_vmap(log):
    f = jax.custom_batching.custom_vmap(lambda v: (log(v), v)[1])
    f.def_vmap(lambda size, batched, v: ((log(v[0]), v)[1], True))
    return f


def _disabled(log, v):
    with jax.disable_jit():
        return jax.jit(lambda u: (log(u), u)[1])(v)


def _linearized(log, v):
    out, tangent = jax.linearize(lambda u: (log(u), u * u)[1], v)
    return out, tangent(v)


def _scanned(body):
    return lambda v: jax.lax.scan(lambda c, _: (body(c), None), v, None, length=3)[0]


# What is done with a function that has no result, and how often it is to run.
EFFECTFUL = {
    "eager": (lambda log, v: log(v), 1),
    "jit": (lambda log, v: jax.jit(log)(v), 1),
    "jit in jit": (lambda log, v: jax.jit(lambda u: (jax.jit(log)(u), u)[1])(v), 1),
    "disable_jit": (_disabled, 1),
    "eval_shape": (lambda log, v: jax.eval_shape(log, v), 0),
    "scan": (lambda log, v: _scanned(lambda c: (log(c), c)[1])(v), 3),
    "fori_loop": (lambda log, v: jax.lax.fori_loop(0, 3, lambda i, c: (log(c), c)[1], v), 3),
    "while_loop": (
        lambda log, v: jax.lax.while_loop(lambda c: c < 5, lambda c: (log(c), c + 1)[1], v),
        3,
    ),
    "cond": (
        lambda log, v: jax.lax.cond(v > 0, lambda u: (log(u), u)[1], lambda u: u, v),
        1,
    ),
    "switch": (
        lambda log, v: jax.lax.switch(1, [lambda u: u, lambda u: (log(u), u)[1]], v),
        1,
    ),
    "map": (lambda log, v: jax.lax.map(lambda u: (log(u), u)[1], jnp.stack([v] * 3)), 3),
    "vmap": (lambda log, v: jax.vmap(lambda u: (log(u), u)[1])(jnp.stack([v] * 3)), 3),
    "checkpoint": (lambda log, v: jax.checkpoint(lambda u: (log(u), u)[1])(v), 1),
    "grad": (lambda log, v: jax.grad(lambda u: (log(u), u * u)[1])(v), 1),
    "jvp": (lambda log, v: jax.jvp(lambda u: (log(u), u * u)[1], (v,), (v,)), 1),
    "linearize": (_linearized, 1),
    "grad of scan": (
        lambda log, v: jax.grad(_scanned(lambda c: (log(c), c * c)[1]))(v),
        3,
    ),
    "grad of cond": (
        lambda log, v: jax.grad(
            lambda w: jax.lax.cond(w > 0, lambda u: (log(u), u * u)[1], lambda u: u, w)
        )(v),
        1,
    ),
    "custom_jvp": (lambda log, v: _custom_jvp(log)(v), 1),
    "jvp of custom_jvp": (lambda log, v: jax.jvp(_custom_jvp(log), (v,), (v,)), 1),
    "custom_vjp": (lambda log, v: _custom_vjp(log, "primal")(v), 1),
    "grad of custom_vjp, forward": (lambda log, v: jax.grad(_custom_vjp(log, "fwd"))(v), 1),
    "grad of custom_vjp, backward": (lambda log, v: jax.grad(_custom_vjp(log, "bwd"))(v), 1),
    "custom_vmap": (lambda log, v: _custom_vmap(log)(v), 1),
    "vmap of custom_vmap": (lambda log, v: jax.vmap(_custom_vmap(log))(jnp.stack([v] * 3)), 1),
    "shard_map": (
        lambda log, v: mapped(lambda u: (log(u[0]), u)[1], P("i"), P("i"))(jnp.stack([v] * 2)),
        2,
    ),
}


@pytest.mark.parametrize("way", EFFECTFUL)
@pytest.mark.parametrize("jit", [False, True], ids=["", "in jit"])
def test_a_call_without_results_is_kept(way, jit, x):
    program, count = EFFECTFUL[way]
    seen = []
    log = jaxbridge.call(lambda v: seen.append(float(v)), (), vmap_method="sequential")
    program = functools.partial(program, log)
    jax.block_until_ready((jax.jit(program) if jit else program)(x))
    jax.effects_barrier()
    assert len(seen) == count


def test_a_call_with_results_that_is_kept(x):
    seen = []

    def work(v):
        seen.append(1)
        return v

    kept = jaxbridge.call(work, like, has_side_effect=True)
    dropped = jaxbridge.call(work, like)
    jax.jit(lambda v: (kept(v), dropped(v), v)[2])(x).block_until_ready()
    jax.effects_barrier()
    assert len(seen) == 1


def test_the_backward_pass_of_a_checkpoint_runs_it_again_at_most(x):
    seen = []
    log = jaxbridge.call(lambda v: seen.append(1), ())
    jax.jit(jax.grad(jax.checkpoint(lambda v: (log(v), jnp.sin(v))[1])))(x).block_until_ready()
    jax.effects_barrier()
    assert len(seen) in (1, 2)


def test_a_forward_rule_that_jax_may_run_again_or_leave_out(x):
    # Under jit optimize_remat drops JAX's own callbacks too: what counts is that it is allowed.
    log = jaxbridge.call(lambda v: None, ())
    f = jax.grad(_custom_vjp(log, "fwd", optimize_remat=True))
    assert float(f(x)) == float(jax.jit(f)(x)) == 2


# ---- manual axes ---------------------------------------------------------------------------------


def varying(aval):
    return aval.mat.varying if hasattr(aval, "mat") else aval.vma


multiply = jaxbridge.call(lambda a, b: a * b, like)


def test_union_of_the_axes_of_operands():
    def body(v, w):
        both = _compat.union_manual_axes([w, v, w])
        assert [varying(jax.typeof(a)) for a in both] == [{"i"}] * 3
        same = _compat.union_manual_axes([w, w])
        assert [varying(jax.typeof(a)) for a in same] == [set()] * 2
        assert list(_compat.union_manual_axes([])) == []
        return both[0]

    jax.jit(mapped(body, (P("i"), P()), P("i")))(jnp.arange(4.0), jnp.float32([2, 3]))


@pytest.mark.parametrize("jit", [False, True], ids=["", "in jit"])
def test_results_vary_over_the_union_of_the_axes_of_operands(jit):
    seen = []

    def body(v, w):
        y = multiply(v, w)
        seen.append(varying(jax.typeof(y)))
        z = multiply(w, v)
        seen.append(varying(jax.typeof(z)))
        # A constant of the program varies over nothing.
        seen.append(varying(jax.typeof(multiply(v, np.ones(2, np.float32)))))
        seen.append(varying(jax.typeof(multiply(w, w))))
        return y + z

    f = mapped(body, (P("i"), P()), P("i"), check_vma=True)
    v = jnp.arange(4.0)
    y = (jax.jit(f) if jit else f)(v, jnp.float32([2, 3]))
    np.testing.assert_array_equal(y, [0, 6, 8, 18])
    assert seen == [{"i"}, {"i"}, {"i"}, set()]


def test_axes_of_two_operands_on_two_axes():
    mesh = Mesh(np.array(jax.devices()[:2]).reshape(2, 1), ("i", "j"))
    seen = []

    def body(v, w):
        y = multiply(v, w)
        seen.append(varying(jax.typeof(y)))
        return y

    f = jax.shard_map(body, mesh=mesh, in_specs=(P("i"), P("j")), out_specs=P(("i", "j")))
    y = jax.jit(f)(jnp.arange(4.0), jnp.float32([2, 3]))
    np.testing.assert_array_equal(y, [0, 3, 4, 9])
    # Some versions leave out of the type an axis of size 1.
    assert seen[0] in ({"i", "j"}, {"i"})


def test_axes_of_some_alone_are_manual():
    mesh = Mesh(np.array(jax.devices()[:2]).reshape(2, 1), ("i", "j"))
    f = jax.shard_map(
        multiply, mesh=mesh, in_specs=(P("i"), P()), out_specs=P("i"), axis_names={"i"}
    )
    y = jax.jit(f)(jnp.arange(4.0), jnp.float32([2, 3]))
    np.testing.assert_array_equal(y, [0, 3, 4, 9])


def test_without_the_check_of_axes():
    f = mapped(multiply, (P("i"), P()), P("i"), check_vma=False)
    y = jax.jit(f)(jnp.arange(4.0), jnp.float32([2, 3]))
    np.testing.assert_array_equal(y, [0, 3, 4, 9])


def test_without_operands():
    ones = jaxbridge.call(lambda: np.ones(2, np.float32), jax.ShapeDtypeStruct((2,), jnp.float32))
    f = mapped(lambda v: v + ones(), P("i"), P("i"))
    np.testing.assert_array_equal(jax.jit(f)(jnp.arange(4.0)), [1, 2, 3, 4])


def test_refs_inside_shard_map():
    add = jaxbridge.call(lambda r, v: r.__iadd__(v), ())

    def body(v, w):
        ref = jax.new_ref(v)
        add(ref, w)
        return ref[...]

    y = jax.jit(mapped(body, (P("i"), P()), P("i")))(jnp.arange(4.0), jnp.float32([2, 3]))
    np.testing.assert_array_equal(y, [2, 4, 4, 6])


def _vary(x):
    """As an operand that differs between the devices: a custom_vjp needs that said before it."""
    if hasattr(jax.lax, "pcast"):
        return jax.lax.pcast(x, "i", to="varying")
    return jax.lax.pvary(x, "i")


def _product(kind, check):
    """v * w, by way of an external function with a rule for the derivative."""
    if kind == "JAX's own":
        return lambda v, w: v * w
    if kind == "custom_jvp":
        f = jax.custom_jvp(lambda v, w: multiply(v, w))

        @f.defjvp
        def _(primals, tangents):
            (v, w), out = primals, multiply(*primals)
            return out, out * (tangents[0] / v + tangents[1] / w)

        return f
    f = jax.custom_vjp(lambda v, w: multiply(v, w))

    def fwd(v, w):
        out = multiply(v, w)
        return out, (out / v, out / w)

    f.defvjp(fwd, lambda r, ct: (multiply(ct, r[0]), multiply(ct, r[1])))
    return lambda v, w: f(v, _vary(w) if check else w)


# w is the same on both devices: its cotangent is a sum over them.
@pytest.mark.parametrize("kind", ["JAX's own", "custom_jvp", "custom_vjp"])
@pytest.mark.parametrize("where, check", [("outside", False), ("outside", True), ("inside", True)])
def test_gradient_through_shard_map(kind, where, check):
    v, w = jnp.arange(1.0, 5), jnp.float32([2, 3])
    product = _product(kind, check)

    def total(v, w):
        return jax.lax.psum(jnp.sum(product(v, w) ** 2), "i")

    if where == "outside":
        f = jax.grad(mapped(total, (P("i"), P()), P(), check_vma=check), (0, 1))
    else:
        f = mapped(jax.grad(total, (0, 1)), (P("i"), P()), (P("i"), P()), check_vma=check)
    dv, dw = jax.jit(f)(v, w)
    np.testing.assert_allclose(dv, [2 * 4 * 1, 2 * 9 * 2, 2 * 4 * 3, 2 * 9 * 4], rtol=1e-6)
    np.testing.assert_allclose(dw, [2 * 2 * (1 + 9), 2 * 3 * (4 + 16)], rtol=1e-6)


def test_a_sum_that_is_yet_to_be_made_is_refused_inside_shard_map():
    mesh = mesh_of(AxisType.Explicit)
    v = jnp.arange(8.0).reshape(4, 2)

    def partial_sums(v):
        return jnp.einsum("ij,ik->jk", v, v, out_sharding=P(unreduced={"i"}))

    with jax.set_mesh(mesh):
        sums = jax.jit(partial_sums)(jax.device_put(v, P("i")))
        square = jaxbridge.call(lambda a: a * a, like)
        # Outside, XLA makes the sum.
        np.testing.assert_array_equal(jax.jit(square)(sums), (v.T @ v) ** 2)
        f = jax.shard_map(
            square, in_specs=P(unreduced={"i"}), out_specs=P(unreduced={"i"}), check_vma=True
        )
        if _compat.jax_version < (0, 8, 3):
            return  # its types do not tell it from a value that varies
        with pytest.raises(TypeError, match="yet to be summed over i"):
            jax.jit(f)(sums)


# ---- the abstract value of a result --------------------------------------------------------------


def test_results_with_an_explicit_mesh():
    v = jnp.arange(8.0).reshape(4, 2)
    f = jaxbridge.call(lambda a: a + 1, like, elementwise=True)

    def add(r, a):
        r += a

    with jax.set_mesh(mesh_of(AxisType.Explicit)):
        w = jax.device_put(v, P("i"))
        ref = jax.new_ref(w)
        assert jax.typeof(w).sharding.spec == P("i", None)
        seen = []

        def program(a):
            b = f(a)
            seen.append(jax.typeof(b).sharding)
            jaxbridge.call(add, (), elementwise=True)(ref, a)
            return b, a * b, jax.vmap(f)(a)

        for y, z, u in (jax.jit(program)(w), program(w)):
            np.testing.assert_array_equal(y, v + 1)
            np.testing.assert_array_equal(z, v * (v + 1))
            np.testing.assert_array_equal(u, v + 1)
        assert [s.spec for s in seen] == [P("i", None)] * 2
        assert all(s.mesh.axis_names == ("i",) for s in seen)
        np.testing.assert_array_equal(ref[...], 3 * v)


def test_results_on_two_meshes_that_are_not_explicit():
    devices = np.array(jax.devices()[:2])
    v = jnp.arange(4.0)
    a = jax.device_put(v, NamedSharding(Mesh(devices, "i"), P("i")))
    b = jax.device_put(v, NamedSharding(Mesh(devices, "j"), P()))
    np.testing.assert_array_equal(jax.jit(multiply)(a, b), v * v)


def test_results_have_nothing_else_of_an_operand(x):
    seen = []

    def program(v):
        on_host = jax.device_put(v, jax.memory.Space.Host)
        assert jax.typeof(on_host).memory_space == jax.memory.Space.Host
        seen.append(jax.typeof(multiply(on_host, v)))
        weak = jnp.asarray(2.0)
        seen.append(jax.typeof(multiply(weak, v)))

    jax.jit(program)(x)
    assert [a.memory_space for a in seen] == [jax.memory.Space.Device] * 2
    assert [a.weak_type for a in seen] == [False, False]


# ---- Refs ----------------------------------------------------------------------------------------


def test_refs_are_told_from_arrays(x):
    ref = jax.new_ref(jnp.zeros((2, 3), jnp.int32))
    seen = []

    def look(r, v):
        for a in (r, ref, v):
            seen.append((_compat.is_ref(a), _compat.is_concrete_ref(a)))
        aval = _compat.ref_value_aval(r)
        assert (aval.shape, aval.dtype) == ((2, 3), jnp.int32)
        return v

    look(ref, x)
    assert seen == [(True, True), (True, True), (False, False)]
    seen.clear()
    # `ref` itself is closed over: still the Ref that exists.
    jax.jit(look)(jax.new_ref(ref[...]), x)
    assert seen == [(True, False), (True, True), (False, False)]

    seen.clear()
    jax.jit(lambda: jax.lax.scan(lambda c, v: (look(jax.new_ref(v), c), None), x, ref[...][None]))()
    assert (True, False) in seen

    for other in (None, 1, "text", np.zeros(2), F32, jax.random.key(0), ref[...]):
        assert not _compat.is_ref(other)
        assert not _compat.is_concrete_ref(other)


def test_a_ref_is_waited_for():
    big = jnp.ones((1000, 1000))
    y = big @ big @ big
    ref = jax.new_ref(y)  # after y
    _compat.wait_until_ready(ref)
    assert y.is_ready()


def run_apart(program, timeout=120):
    """Runs a program that could hang in a process of its own; returns what it prints."""
    head = "import time, jax, jax.numpy as jnp, numpy as np, jaxbridge\n"
    done = subprocess.run(
        [sys.executable, "-c", head + textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


# jaxlib before 0.9 waits for the run while it holds the GIL: where a run goes on after its dispatch.
@pytest.mark.parametrize("why", ["long", "on two devices"])
def test_a_ref_in_a_run_that_goes_on_does_not_hang(why):
    out = run_apart(f"""
        P = jax.sharding.PartitionSpec

        def slow(a):
            time.sleep(0.002)
            a += 1

        add = jaxbridge.call(slow, lambda a: a, inout={{0: 0}})
        zero, big = jnp.zeros((4, 2)), jnp.ones((600, 600))
        if {why == "on two devices"}:
            mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), "i")
            zero = jax.device_put(zero, jax.sharding.NamedSharding(mesh, P("i")))
        ref = jax.new_ref(zero)

        @jax.jit
        def step(big):
            value = ref[...]
            if {why == "long"}:
                for _ in range(3):
                    big = big @ big * 0
                value += big[0, 0]
            ref[...] = add(value)

        for _ in range(40):
            step(big)
        print(float(ref[0, 0]))
    """)
    assert out == ["40.0"]


# ---- lowering ------------------------------------------------------------------------------------


def test_a_function_lives_as_long_as_a_run(collected):
    started = threading.Event()
    go_on = threading.Event()

    def wait(v):
        started.set()
        assert go_on.wait(30)
        return v

    def run():
        # On two devices, so that dispatch does not wait.
        first, second = (jaxbridge.call(f, like) for f in (wait, lambda v: v + 1))
        f = jax.jit(mapped(lambda v: second(first(v)), P("i"), P("i")))
        return f(jnp.arange(4.0))

    y = run()
    assert started.wait(30)
    collected()
    go_on.set()
    np.testing.assert_array_equal(y, [1, 2, 3, 4])


def test_programs_are_waited_for_as_long_as_was_said():
    go_on = threading.Event()

    def wait(v):
        assert go_on.wait(30)
        return v

    y = jax.jit(mapped(jaxbridge.call(wait, like), P("i"), P("i")))(jnp.arange(4.0))
    deleted = jnp.arange(3.0)
    deleted.delete()
    _compat.wait_for_programs(seconds=0.01)
    assert not y.is_ready()
    go_on.set()
    _compat.wait_for_programs(seconds=30)
    assert y.is_ready()


def test_a_function_ends_with_its_executables(x, collected):
    class Thing:
        pass

    def run():
        thing = Thing()
        f = jaxbridge.call(lambda v: (v, thing)[0], like)
        jax.jit(lambda v: f(v))(x).block_until_ready()
        return weakref.ref(thing)

    end = run()
    collected()
    assert end() is None


def test_an_executable_with_an_anonymous_function_cannot_be_serialized(x):
    from jax.experimental import serialize_executable

    f = jaxbridge.call(lambda v: v + 1, like)
    compiled = jax.jit(f).lower(x).compile()
    with pytest.raises(pickle.PicklingError, match="anonymous function cannot be serialized"):
        serialize_executable.serialize(compiled)
    serialize_executable.serialize(jax.jit(jaxbridge.call(double, like)).lower(x).compile())


def test_beside_callbacks_of_jax(x):
    # Both put themselves into the list of an executable's host callbacks.
    add = jaxbridge.call(lambda v: v + 1, like)

    def theirs(v):
        return jax.pure_callback(lambda a: np.asarray(a) * 3, F32, v)

    y = jax.jit(lambda v: add(theirs(add(theirs(v)))))(x)
    assert float(y) == (2 * 3 + 1) * 3 + 1


def export(f, *args, **options):
    return jax.export.export(f, disabled_checks=jaxbridge.export_checks(), **options)(*args)


def test_export_is_known_where_it_is_lowered_for(x):
    named = jax.jit(jaxbridge.call(double, like))
    assert float(export(named, x).call(x)) == 4
    anonymous = jax.jit(jaxbridge.call(lambda v: v * 2, like))
    with pytest.raises(NotImplementedError, match="anonymous function cannot be exported"):
        export(anonymous, x)
    assert float(anonymous(x)) == 4


def test_platforms_of_a_lowering(x):
    def lower(f, *platforms):
        return jax.jit(f).trace(x).lower(lowering_platforms=platforms)

    on_cpu = jaxbridge.call({"cpu": double}, like)
    on_cuda = jaxbridge.call({"cuda": double}, like, framework="numpy")
    lower(on_cpu, "cpu")
    lower(on_cuda, "cuda")
    for f, missing in ((on_cpu, "cuda"), (on_cuda, "cpu")):
        with pytest.raises(jaxbridge.errors.PlatformError, match=f"none for {missing}"):
            lower(f, "cpu", "cuda")

    def either(v):
        return jax.lax.platform_dependent(v, cpu=on_cpu, cuda=on_cuda)

    # For one platform its branch alone is lowered; for several JAX lowers each branch for all.
    assert float(jax.jit(either)(x)) == 4
    assert lower(either, "cuda").as_text().count("@jaxbridge.call") == 1
    with pytest.raises(jaxbridge.errors.PlatformError, match="none for"):
        lower(either, "cpu", "cuda")

    on_both = jaxbridge.call({"cpu": double, "cuda": double}, like, framework="numpy")
    exported = export(jax.jit(on_both), x, platforms=("cpu", "cuda"))
    assert exported.platforms == ("cpu", "cuda")
    assert float(exported.call(x)) == 4


def test_platforms_of_this_process():
    here = {d.platform for d in jax.devices()}
    assert "cpu" in _compat.local_platforms()
    assert {"cuda" if p == "gpu" else p for p in here} <= _compat.local_platforms()


def test_whole_arrays_of_a_lowering():
    seen = []
    devices = _compat.devices_of_whole_arrays

    def look(ctx):
        seen.append(devices(ctx))
        return seen[-1]

    log = jaxbridge.call(lambda v: None, ())
    mesh = mesh_of(AxisType.Auto)
    v = jax.device_put(jnp.arange(4.0), NamedSharding(mesh, P("i")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_compat, "devices_of_whole_arrays", look)
        jax.jit(log)(jnp.arange(4.0))
        assert seen == [1]
        jax.jit(log)(v)
        assert seen == [1, 2, 1]  # inside, each device is alone
        jax.jit(mapped(lambda v: (log(v), v)[1], P("i"), P("i")))(v)
        assert seen == [1, 2, 1, 1]


def test_bounded_cache():
    made = []

    @_compat.bounded_cache(2)
    def make(x):
        made.append(x)
        return [x]

    first = make(1)
    assert make(1) is first and made == [1]
    make(2), make(3)
    assert make(1) == [1] and made == [1, 2, 3, 1]
    jax.clear_caches()
    assert make(1) is not first and made == [1, 2, 3, 1, 1]


def test_keys_are_told_from_arrays():
    key = jax.random.key(0)
    seen = []
    jax.jit(lambda k: seen.append(_compat.is_key_array(k)))(key)
    assert seen == [True]
    assert _compat.is_key_array(key)
    for other in (jax.random.key_data(key), np.zeros(2), np.zeros(1, "O"), "text", None, 1):
        assert not _compat.is_key_array(other)


# ---- memory of others ----------------------------------------------------------------------------


def test_import_dlpack_shares_memory_or_refuses():
    source = jaxbridge.empty(16, np.float32)
    source[...] = 3
    device = jax.devices("cpu")[0]
    array = _compat.import_dlpack(source.__dlpack__(), device, None, 1, writable=False)
    assert isinstance(array, jax.Array)
    assert array.unsafe_buffer_pointer() == source.ctypes.data
    assert array.sharding.device_set == {device}
    np.testing.assert_array_equal(jax.jit(lambda v: v + 1)(array), np.full(16, 4))
    # On every device of the CPU, and with the axes in any order.
    second = jax.devices("cpu")[1]
    turned = _compat.import_dlpack(
        source.reshape(2, 8).T.__dlpack__(), second, None, 1, writable=False
    )
    assert turned.unsafe_buffer_pointer() == source.ctypes.data
    assert (turned.shape, turned.sharding.device_set) == ((8, 2), {second})


def test_what_is_imported_is_not_written_on_the_cpu():
    """Not by donation either, so that read-only memory may be shared."""
    source = jaxbridge.empty(16, np.float32)
    source[...] = 3
    array = _compat.import_dlpack(
        source.__dlpack__(), jax.devices("cpu")[0], None, 1, writable=False
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = jax.jit(lambda v: v + 1, donate_argnums=0)(array)
    np.testing.assert_array_equal(result, np.full(16, 4))
    np.testing.assert_array_equal(source, np.full(16, 3))


def test_what_is_imported_as_writable_is_written_in_place():
    source = jaxbridge.empty(16, np.float32)
    source[...] = 3
    device = jax.devices("cpu")[0]
    array = _compat.import_dlpack(source.__dlpack__(), device, None, 1, writable=True)
    assert array.unsafe_buffer_pointer() == source.ctypes.data
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = jax.jit(lambda v: v + 1, donate_argnums=0)(array)
    np.testing.assert_array_equal(result, np.full(16, 4))
    in_place = _compat.jax_version >= (0, 8, 3)
    assert (result.unsafe_buffer_pointer() == source.ctypes.data) is in_place
    np.testing.assert_array_equal(source, np.full(16, 4 if in_place else 3))


def test_a_ref_of_an_array_shares_it_and_has_a_type_of_its_own():
    array = jax.device_put(jnp.arange(4.0), jax.devices("cpu")[0])
    seen = []

    class Storage(_compat.ref_storage_type):
        def __init__(self, kind):
            self._aval = kind

        @property
        def _buf(self):
            seen.append(1)
            return array

    ref = _compat.make_external_ref(array, Storage)
    address = array.unsafe_buffer_pointer()
    assert isinstance(ref, jax.ref.Ref) and _compat.ref_array(ref) is array
    assert type(_compat.ref_storage(ref)) is Storage
    told = []

    @jax.jit
    def program(r):
        told.append((_compat.is_external_ref(r), jax.typeof(r).shape))
        jax.lax.fori_loop(0, 2, lambda i, c: (told.append(_compat.is_external_ref(r)), c)[1], 0)
        jax.grad(lambda w: (w * r[...]).sum())(1.0)
        r[...] += 1

    seen.clear()
    program(ref)
    program(ref)
    assert told[0] == (True, (4,)) and told[1] is True
    assert seen, "JAX asks for the array at each use"
    np.testing.assert_array_equal(array, np.arange(4) + 2)
    assert array.unsafe_buffer_pointer() == address
    own = jax.new_ref(jnp.arange(4.0))
    assert not _compat.is_external_ref(own) and not _compat.is_external_ref(array)
    program(own)
    assert told.count((False, (4,))) == 1


def test_shards_of():
    (device,) = jax.devices("cpu")[:1]
    x = jnp.arange(4.0, device=device)
    (shard,) = _compat.shards_of(x)
    assert shard.unsafe_buffer_pointer() == x.unsafe_buffer_pointer()
    ref = jax.new_ref(x)
    for i in range(2):  # what it is now
        jax.jit(lambda r: r.__setitem__(..., r[...] + 1))(ref)
        (shard,) = _compat.shards_of(_compat.ref_array(ref))
        np.testing.assert_array_equal(shard, np.arange(4) + i + 1)


def test_is_debugging():
    assert not _compat.is_debugging()
    for mode in (jax.disable_jit, jax.debug_nans, jax.debug_infs):
        with mode(True):
            assert _compat.is_debugging()
    assert not _compat.is_debugging()


def test_whether_something_is_traced():
    assert not _compat.is_tracing()
    seen = []
    jax.jit(lambda: seen.append(_compat.is_tracing()))()
    jax.grad(lambda v: (seen.append(_compat.is_tracing()), v)[1])(1.0)
    jax.vmap(lambda v: (seen.append(_compat.is_tracing()), v)[1])(jnp.ones(2))
    assert seen == [True, True, True] and not _compat.is_tracing()


def test_export_dlpack_holds_the_memory():
    x = jnp.arange(4.0)
    capsule = _compat.export_dlpack(x.addressable_data(0), stream=None)
    address = x.unsafe_buffer_pointer()
    x.delete()
    v = _core.view_of_capsule(capsule, None, True, None)
    assert v.pointer == address
    np.testing.assert_array_equal(np.asarray(v), np.arange(4.0))


def test_stream_waits_for_an_array(monkeypatch):
    told = []

    class Jaxlib:
        def buffer_to_dlpack_managed_tensor(self, array, stream):
            told.append((array, stream))

    x = jnp.arange(4.0)
    _compat._jaxlib.buffer_to_dlpack_managed_tensor(x, stream=None)  # as it is called
    monkeypatch.setattr(_compat, "_jaxlib", Jaxlib())
    _compat.stream_waits(0, x)  # the legacy stream has another number in DLPack
    _compat.stream_waits(64, x)
    assert [stream for _, stream in told] == [1, 64] and all(a is x for a, _ in told)


def test_ref_array_is_what_the_ref_holds():
    ref = jax.new_ref(jnp.arange(4.0))
    ref[...] = ref[...] + 1
    np.testing.assert_array_equal(_compat.ref_array(ref), np.arange(4.0) + 1)


def test_rules_of_an_eager_transformation_get_arrays():
    """On JAX 0.8 NumPy's arrays come to them as another type."""
    seen = []

    def double(v):
        seen.append(type(v))
        return np.asarray(v) * 2

    f = jaxbridge.call(double, lambda v: v)
    g = jaxbridge.call(double, lambda v: v)
    f.deflinear(lambda ct: g(ct))
    g.deflinear(lambda ct: jaxbridge.from_ufunc(np.add)(ct, ct))
    x = np.arange(3, dtype=np.float32)
    transposed = lambda y: jax.linear_transpose(f, x)(y)[0]
    (back,) = jax.vjp(transposed, x)[1](x)
    np.testing.assert_array_equal(back, 2 * x)
    (back,) = jax.vjp(lambda y: jax.linear_transpose(g, x)(y)[0], x)[1](x)
    np.testing.assert_array_equal(back, 2 * x)
    assert set(seen) == {np.ndarray}


def test_shards_of_many_devices():
    run(
        """
        import jax, jax.numpy as jnp, numpy as np
        from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
        from jaxbridge import _compat
        mesh = Mesh(np.array(jax.devices()), ("d",))
        for spec in (P("d"), P()):
            a = jax.device_put(jnp.arange(6), NamedSharding(mesh, spec))
            arrays = _compat.shards_of(a)
            assert {d for x in arrays for d in x.devices()} == set(jax.devices())
            assert len({x.unsafe_buffer_pointer() for x in arrays}) == 3
        one = jnp.arange(3)
        assert [x.unsafe_buffer_pointer() for x in _compat.shards_of(one)] == [
            one.unsafe_buffer_pointer()
        ]
        """,
        devices=3,
    )


def test_a_large_uint64_as_an_attribute_of_ffi():
    assert _compat.ffi_attribute(3) == 3 and _compat.ffi_attribute("text") == "text"
    with mlir.make_ir_context():
        big = _compat.ffi_attribute({"n": np.uint64(2**64 - 1)})["n"]
        assert str(mlir.ir_attribute(big)) == "18446744073709551615 : ui64"
        small = _compat.ffi_attribute(np.uint64(2**63 - 1))
        assert str(mlir.ir_attribute(small)) == "9223372036854775807 : ui64"


def test_the_type_of_arrays_with_memory():
    seen = []
    x = jax.jit(lambda v: (seen.append(type(v)), v + 1)[1])(jnp.ones(3))
    assert type(x) is type(x[1:]) is _compat.array_type is not seen[0]

# SPDX-License-Identifier: Apache-2.0
"""`call`: arguments, results, methods, inside JAX's transformations, in place."""

import inspect
import pydoc
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbridge
from jaxbridge import errors
from owned_memory import Exchanged

F32 = jax.ShapeDtypeStruct((4,), jnp.float32)


def like(x, *rest, **kw):
    return x


def add_one(x):
    return x + 1


@pytest.fixture
def x():
    return jnp.arange(4, dtype=jnp.float32)


@pytest.mark.parametrize("make", [Exchanged, lambda a: jaxbridge.view(jnp.asarray(a))])
def test_an_array_of_another_library_is_no_static_argument(make):
    seen = []
    f = jaxbridge.call(lambda v, w: (seen.append(1), v)[1], lambda v, w: v)
    v, other = jnp.ones(3), make(np.ones(3, np.float32))
    for call in (f, jax.jit(lambda v: f(v, other)), lambda v: f(v, w=[other])):
        with pytest.raises(TypeError, match=r"argument (1|w).*another library.*from_external"):
            call(*((v, other) if call is f else (v,)))
    assert seen == []
    np.testing.assert_array_equal(f(v, jaxbridge.from_external(other)), v)


@pytest.mark.parametrize("jit", [False, True])
def test_values_eager_and_jit(x, jit):
    f = jaxbridge.call(add_one, F32)
    g = jax.jit(lambda v: f(v) * 2) if jit else (lambda v: f(v) * 2)
    np.testing.assert_array_equal(g(x), (np.arange(4) + 1) * 2)


def test_callee_gets_numpy_arrays_of_the_operand(x):
    seen = []

    def look(v):
        seen.append((type(v), v.dtype, v.shape, v.flags.writeable, v.flags.c_contiguous))
        return v.copy()

    jaxbridge.call(look, F32)(x)
    assert seen == [(np.ndarray, np.dtype("float32"), (4,), False, True)]


def test_operand_is_not_copied(x):
    seen = []

    def look(v):
        seen.append(v.__array_interface__["data"][0])
        return v.copy()

    jaxbridge.call(look, F32)(x)
    assert seen == [x.unsafe_buffer_pointer()]


def test_out_is_xlas_buffer():
    seen = []

    def fill(out):
        seen.append(out.__array_interface__["data"][0])
        out[...] = 7

    y = jaxbridge.call(fill, F32, out=0)()
    assert seen == [y.unsafe_buffer_pointer()]
    np.testing.assert_array_equal(y, [7, 7, 7, 7])


@pytest.mark.parametrize("out", ["output", 0, -1])
def test_out_ways(x, out):
    def by_name(v, k, *, output):
        np.multiply(v, k, out=output)

    def first(output, v, k):
        np.multiply(v, k, out=output)

    def last(v, k, output):
        np.multiply(v, k, out=output)

    fn = {"output": by_name, 0: first, -1: last}[out]
    y = jaxbridge.call(fn, F32, out=out)(x, 3)
    np.testing.assert_array_equal(y, np.arange(4) * 3)


def test_out_mirrors_the_tree(x):
    def both(v, *, out):
        assert sorted(out) == ["a", "b"]
        out["a"][...] = v
        out["b"][0][...] = v.sum()

    spec = {"a": F32, "b": (jax.ShapeDtypeStruct((), jnp.float32),)}
    r = jaxbridge.call(both, spec, out="out")(x)
    np.testing.assert_array_equal(r["a"], x)
    assert r["b"][0] == 6


def test_out_keyword_is_not_the_callers(x):
    f = jaxbridge.call(lambda v, *, out: None, F32, out="out")
    with pytest.raises(TypeError, match="'out' takes the results"):
        f(x, out=1)


def test_pytrees_and_statics_anywhere(x):
    seen = {}

    def fn(tree, n, flag, *, options, extra):
        seen.update(n=n, flag=flag, mode=options["mode"], none=options["none"], extra=type(extra))
        return {"s": tree["a"] + tree["b"][1] * n}

    f = jax.jit(
        lambda v: jaxbridge.call(fn, {"s": F32})(
            {"a": v, "b": ["text", v]}, 3, True, options={"mode": "m", "none": None}, extra=v
        )
    )
    np.testing.assert_array_equal(f(x)["s"], np.arange(4) * 4)
    assert seen == {"n": 3, "flag": True, "mode": "m", "none": None, "extra": np.ndarray}


def test_any_object_is_a_static(x):
    class Thing:
        pass

    thing = Thing()
    seen = []

    def fn(v, t):
        seen.append(t)
        return v.copy()

    jax.jit(lambda v: jaxbridge.call(fn, F32)(v, thing))(x)
    assert seen == [thing]


def test_statics_of_other_type_are_other_calls(x):
    def fn(v, s):
        return v + (10 if s is True else 20 if isinstance(s, int) else 30)

    f = jaxbridge.call(fn, F32)
    assert [float(f(x, s)[0]) for s in (True, 1, 1.0)] == [10, 20, 30]


def test_result_spec_is_a_function_of_the_arguments(x):
    def spec(v, n):
        assert isinstance(v, jax.ShapeDtypeStruct) and n == 2
        return jax.ShapeDtypeStruct((n, *v.shape), v.dtype)

    y = jaxbridge.call(lambda v, n: np.stack([v] * n), spec)(x, 2)
    assert y.shape == (2, 4)


def test_no_operands_and_no_results():
    calls = []
    f = jaxbridge.call(lambda: calls.append(1), ())
    assert jax.jit(f)() == ()
    assert calls == [1]


@pytest.mark.parametrize("rank", [0, 1, 2, 5, 16, 32])
def test_ranks(rank):
    v = jnp.full((1,) * rank, 3.0)
    y = jaxbridge.call(lambda a: a * 2, like)(v)
    assert y.shape == v.shape and float(y.sum()) == 6


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 2, 5)])
def test_no_elements(shape):
    v = jnp.zeros(shape)
    y = jaxbridge.call(lambda a: a + 1, like)(v)
    assert y.shape == shape


@pytest.mark.parametrize("count", [1, 16, 64, 256])
def test_many_operands(count):
    vs = [jnp.float32(i) for i in range(count)]
    y = jaxbridge.call(
        lambda *a: np.float32(sum(map(float, a))), jax.ShapeDtypeStruct((), "float32")
    )(*vs)
    assert float(y) == count * (count - 1) / 2


DTYPES = [
    "bool",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex64",
    "complex128",
    "float8_e3m4",
    "float8_e4m3",
    "float8_e4m3b11fnuz",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(dtype, x64):
    v = jnp.asarray([0, 1, 1, 2], jnp.dtype(dtype))
    seen = []

    def same(a):
        seen.append(a.dtype)
        return a.copy()

    y = jax.jit(jaxbridge.call(same, like))(v)
    assert seen == [jnp.dtype(dtype)] and y.dtype == v.dtype
    np.testing.assert_array_equal(np.asarray(y).view(np.uint8), np.asarray(v).view(np.uint8))


@pytest.mark.parametrize("dtype", ["int4", "uint4", "int2"])
def test_packed_dtypes_are_refused(dtype):
    v = jnp.asarray([0, 1], jnp.dtype(dtype))
    with pytest.raises(TypeError, match=dtype):
        jaxbridge.call(lambda a: a.copy(), like)(v)


def test_numpy_operands_are_operands():
    y = jaxbridge.call(lambda a, b: a + b, like)(np.float32(1), np.float32(2))
    assert float(y) == 3


def test_prng_keys_are_refused():
    with pytest.raises(TypeError, match="key_data"):
        jaxbridge.call(lambda k: k, F32)(jax.random.key(0))


def test_object_arrays_are_refused():
    with pytest.raises(TypeError, match="argument 1 is an array of dtype object"):
        jaxbridge.call(lambda a, b: a, F32)(1, np.array([None]))


# ---- methods -------------------------------------------------------------------------------------


class Filter:
    def __init__(self, k):
        self.k = k

    @jaxbridge.function(result=lambda self, v, *, twice=False: v)
    def scale(self, v, *, twice=False):
        """Scales."""
        return v * np.float32(self.k * (2 if twice else 1))

    of_class = jaxbridge.call(np.negative, like)


def test_a_method_gets_self(x):
    two, three = Filter(2), Filter(3)
    for jit in (lambda f: f, jax.jit):
        np.testing.assert_array_equal(jit(two.scale)(x), np.arange(4) * 2)
        np.testing.assert_array_equal(jit(three.scale)(x), np.arange(4) * 3)
        np.testing.assert_array_equal(jit(lambda v: two.scale(v, twice=True))(x), np.arange(4) * 4)
        np.testing.assert_array_equal(jit(lambda v: Filter.scale(three, v))(x), np.arange(4) * 3)
    assert Filter.scale is Filter.__dict__["scale"] and two.scale.stats()["calls"] == 8


def test_a_method_is_not_wrapped_again():
    with pytest.raises(TypeError, match="Function already"):
        jaxbridge.call(Filter(1).scale, like)


def test_self_is_static(x):
    traced = []

    class Model:
        @jaxbridge.function(result=lambda self, v: (traced.append(self), v)[1])
        def same(self, v):
            return v

    one, other = Model(), Model()
    f = jax.jit(lambda m, v: m.same(v), static_argnums=0)
    for m in (one, one, other, one):
        f(m, x)
    assert traced == [one, other]


def test_what_is_no_method_stays_none(x):
    """NumPy's ufuncs and builtins in a class get no instance either."""
    np.testing.assert_array_equal(Filter(1).of_class(x), -np.arange(4))


def test_a_keyword_named_self(x):
    def fn(v, self):
        return v * self

    f = jaxbridge.call(fn, lambda v, self: v)
    np.testing.assert_array_equal(f(x, self=np.float32(3)), np.arange(4) * 3)


@pytest.mark.parametrize("of", [lambda: Filter.scale, lambda: Filter(1).scale])
def test_help_shows_the_wrapped_function(of):
    f = of()
    text = pydoc.render_doc(f, renderer=pydoc.plaintext)
    assert "v, *, twice=False)" in text and "Scales." in text
    assert str(inspect.signature(f)).endswith("v, *, twice=False)")


# ---- inside JAX ----------------------------------------------------------------------------------


def test_scan_cond_while(x):
    f = jaxbridge.call(add_one, F32)

    @jax.jit
    def program(v):
        v, _ = jax.lax.scan(lambda c, _: (f(c), None), v, None, length=5)
        v = jax.lax.cond(v[0] > 0, f, lambda u: u, v)
        return jax.lax.while_loop(lambda c: c[0] < 10, f, v)

    np.testing.assert_array_equal(program(x), np.arange(4) + 10)


def test_nested_jit_eval_shape_checkpoint_disable_jit(x):
    f = jaxbridge.call(add_one, F32)
    np.testing.assert_array_equal(jax.jit(jax.jit(f))(x), np.arange(4) + 1)
    assert jax.eval_shape(f, x) == F32
    np.testing.assert_array_equal(jax.jit(jax.checkpoint(f))(x), np.arange(4) + 1)
    with jax.disable_jit():
        np.testing.assert_array_equal(jax.jit(f)(x), np.arange(4) + 1)


def test_gradient_of_what_does_not_need_it(x):
    f = jaxbridge.call(add_one, F32)
    g = jax.grad(lambda v: (v * jax.lax.stop_gradient(f(jax.lax.stop_gradient(v)))).sum())
    np.testing.assert_array_equal(g(x), np.arange(4) + 1)
    with pytest.raises(errors.DerivativeError, match=r"\.defjvp\(rule\), \.defvjp"):
        jax.grad(lambda v: f(v).sum())(x)


def test_custom_vjp_around(x):
    @jax.custom_vjp
    def square(v):
        return jaxbridge.call(np.square, F32)(v)

    square.defvjp(lambda v: (square(v), v), lambda v, ct: (2 * v * ct,))
    np.testing.assert_array_equal(jax.jit(jax.grad(lambda v: square(v).sum()))(x), 2 * np.arange(4))


def test_shard_map_values_and_gradient_types(x):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), "i")
    spec = jax.sharding.PartitionSpec("i")
    shapes = []

    def fn(v, w):
        shapes.append(v.shape)
        return v * w

    f = jaxbridge.call(fn, like)

    @jax.custom_jvp
    def g(v, w):
        return f(v, w)

    @g.defjvp
    def _(primals, tangents):
        (v, w), (tv, tw) = primals, tangents
        return f(v, w), v * tw + w * tv

    w = jnp.float32(3)
    h = jax.jit(
        jax.shard_map(
            lambda v, w: jax.lax.psum(g(v, w).sum(), "i"),
            mesh=mesh,
            in_specs=(spec, jax.sharding.PartitionSpec()),
            out_specs=jax.sharding.PartitionSpec(),
        )
    )
    assert float(h(x, w)) == 18
    assert set(shapes) == {(2,)}
    np.testing.assert_array_equal(jax.grad(h)(x, w), [3, 3, 3, 3])
    assert float(jax.grad(h, 1)(x, w)) == 6


def test_lowering_for_cuda_on_a_machine_without_one(x):
    f = jaxbridge.call(add_one, F32)
    text = jax.jit(f).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    assert "jaxbridge.call" in text


def test_threads_call_at_once():
    barrier = threading.Barrier(2, timeout=30)

    def meet(v):
        barrier.wait()
        return v + 1

    f = jax.jit(jaxbridge.call(meet, like))
    outs = [None, None]

    def run(i):
        outs[i] = np.asarray(f(jax.device_put(jnp.full(3, i, jnp.float32), jax.devices()[i])))

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    np.testing.assert_array_equal(outs, [[1, 1, 1], [2, 2, 2]])


def test_reentered():
    inner = jax.jit(jaxbridge.call(lambda v: v + 1, like))
    one = jnp.ones(3)

    def outer(v):
        return v + np.asarray(inner(one))

    np.testing.assert_array_equal(jaxbridge.call(outer, like)(one), [3, 3, 3])


# ---- in place ------------------------------------------------------------------------------------


def test_inout_is_one_memory(x):
    seen = []

    def scale(v, k):
        assert v.flags.writeable and not k.flags.writeable
        seen.append(v.__array_interface__["data"][0])
        v *= k

    f = jax.jit(jaxbridge.call(scale, like, inout={0: 0}), donate_argnums=0)
    v = jnp.arange(4.0) + 0
    y = f(v, jnp.float32(2))
    np.testing.assert_array_equal(y, np.arange(4) * 2)
    assert seen == [y.unsafe_buffer_pointer()]


def test_inout_does_not_change_a_value_that_lives_on(x):
    def scale(v):
        v *= 2

    y = jax.jit(jaxbridge.call(scale, like, inout={0: 0}))(x)
    np.testing.assert_array_equal(x, np.arange(4))
    np.testing.assert_array_equal(y, np.arange(4) * 2)


def test_inout_with_other_results(x):
    def fn(state, v):
        state += v
        return v.sum()

    spec = lambda s, v: (jax.ShapeDtypeStruct((), v.dtype), s)
    total, state = jaxbridge.call(fn, spec, inout={0: 1})(x, x)
    assert float(total) == 6
    np.testing.assert_array_equal(state, np.arange(4) * 2)


def test_inout_mismatch(x):
    with pytest.raises(TypeError, match="one memory"):
        jaxbridge.call(lambda v: None, jax.ShapeDtypeStruct((3,), "float32"), inout={0: 0})(x)
    with pytest.raises(TypeError, match="does not have"):
        jaxbridge.call(lambda v: None, F32, inout={1: 0})(x)
    two = lambda v: (v, v)
    for named in ({0: 0, "v": 1}, {"v": 0}):
        with pytest.raises(
            TypeError, match="'v'.*1 by position and none by keyword.*as it is passed"
        ):
            jaxbridge.call(lambda v: None, two, inout=named)(x)
    with pytest.raises(TypeError, match="argument 0.*0 by position and \\['v'\\] by keyword"):
        jaxbridge.call(lambda v: None, F32, inout={0: 0})(v=x)
    with pytest.raises(TypeError, match="names one argument twice"):
        jaxbridge.call(lambda v: None, two, inout={0: 0, -1: 1})(x)
    with pytest.raises(TypeError, match="jax.Ref, which is in place anyway"):
        jaxbridge.call(lambda v: None, F32, inout={0: 0})(jax.new_ref(x))
    with pytest.raises(ValueError, match="names result 1, of 1 in all"):
        jaxbridge.call(lambda v: None, F32, inout={0: 1})(x)


@pytest.mark.parametrize("jit", [False, True])
def test_ref_is_updated_in_order(x, jit):
    ref = jax.new_ref(jnp.zeros(4))

    def accumulate(r, v):
        r += v

    f = jaxbridge.call(accumulate, ())

    def program(v):
        f(ref, v)
        before = ref[...]
        f(ref, v)
        return before

    before = (jax.jit(program) if jit else program)(x)
    np.testing.assert_array_equal(before, np.arange(4))
    np.testing.assert_array_equal(ref[...], np.arange(4) * 2)


def test_ref_in_loops(x):
    def count(r):
        r += 1

    f = jaxbridge.call(count, ())

    @jax.jit
    def program(ref, n):
        jax.lax.fori_loop(0, n, lambda i, c: (f(ref), c)[1], 0)
        jax.lax.scan(lambda c, _: (c, f(ref)), None, None, length=3)
        jax.lax.cond(n > 0, lambda: f(ref), lambda: ())

    ref = jax.new_ref(jnp.zeros(()))
    program(ref, 5)
    assert float(ref[...]) == 9


def test_ref_twice_is_refused():
    ref = jax.new_ref(jnp.zeros(4))
    with pytest.raises(TypeError, match="two arguments"):
        jaxbridge.call(lambda a, b: None, ())(ref, ref)


# ---- side effects --------------------------------------------------------------------------------


def test_pure_calls_are_dropped_and_loggers_run(x):
    calls = []
    f = jaxbridge.call(lambda v: (calls.append("pure"), v)[1], F32)
    log = jaxbridge.call(lambda v: calls.append("log"), ())
    kept = jaxbridge.call(lambda v: (calls.append("kept"), v)[1], F32, has_side_effect=True)

    @jax.jit
    def program(v):
        f(v)
        log(v)
        kept(v)
        return v

    program(x).block_until_ready()
    jax.effects_barrier()
    assert sorted(calls) == ["kept", "log"]


def test_a_static_container_is_new_in_each_call(x):
    """What the function does to it is gone with the call."""

    def fn(v, a, b=()):
        a.append(1)
        b[0]["n"] = b[0].get("n", 0) + 1
        return v * np.float32(len(a) + b[0]["n"])

    f = jaxbridge.call(fn, like)
    program = jax.jit(lambda v: f(v, [], b=({},)))
    for _ in range(3):
        np.testing.assert_array_equal(f(x, [], b=({},)), 2 * np.asarray(x))
        np.testing.assert_array_equal(program(x), 2 * np.asarray(x))


def test_function_without_its_options():
    for use in (lambda: jaxbridge.function(np.sin), jaxbridge.function):
        with pytest.raises(TypeError, match=r"@jaxbridge.function\(result="):
            use()


def test_read_only_arguments_are_explained(x):
    def fn(v):
        v.sort()

    with pytest.raises(ValueError, match="read-only") as raised:
        jaxbridge.call(fn, like)(x)
    assert any("arguments are read-only; pass a copy" in n for n in raised.value.__notes__)


@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize("out", [0, -1, "out"])
def test_results_in_a_list_or_tuple_are_written(kind, out):
    seen = []

    def fn(*args, **kwargs):
        results = {0: lambda: args[0], -1: lambda: args[-1], "out": lambda: kwargs["out"]}[out]()
        seen.append((type(results), len(results), [type(r) for r in results]))
        results[0][...], results[1][...] = 3, 4
        if kind is list:
            results.clear()  # it is the function's own

    f = jaxbridge.call(fn, kind([F32, jax.ShapeDtypeStruct((), jnp.int32)]), out=out)
    for _ in range(3):
        a, b = f(jnp.zeros(()))
        np.testing.assert_array_equal(a, np.full(F32.shape, 3))
        assert b == 4
    assert seen == [(kind, 2, [np.ndarray] * 2)] * 3


def test_a_static_tuple_is_passed_as_it_is():
    seen = []

    def fn(x, axes, options, *, names):
        seen.append((axes, options, names))
        options.append(1)
        return x

    f = jaxbridge.call(fn, lambda x, *_, **__: x)
    for _ in range(2):
        f(jnp.ones(2), (0, (1, None)), [], names=("a", ()))
    assert seen == [((0, (1, None)), [1], ("a", ()))] * 2

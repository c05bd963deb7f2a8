# SPDX-License-Identifier: Apache-2.0
"""`lazy_apply`: array-api-extra's semantics, on JAX arrays through `call`."""

import functools
import gc
import os
import subprocess
import sys
import textwrap
import types
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.cluster.hierarchy as hierarchy
import scipy.ndimage
from jax import export

import jaxbridge
from jaxbridge import errors, lazy_apply

_events = []
jax.monitoring.register_event_duration_secs_listener(lambda name, _, **kw: _events.append(name))


@pytest.fixture
def compiled():
    """Counts the programs that were compiled since it was last asked."""

    def count():
        found = sum(name == "/jax/core/compile/backend_compile_duration" for name in _events)
        _events.clear()
        return found

    count()
    return count


@pytest.fixture
def x():
    return jnp.arange(6, dtype=jnp.float32).reshape(2, 3)


both = pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])


def doubled(a):
    """Fails on JAX's arrays."""
    assert type(a) is np.ndarray
    return a * 2


# ---- defaults, several results, what is passed on --------------------------------------------------


@both
def test_shape_and_dtype_default_to_the_inputs(x, wrap):
    y = wrap(lambda v: lazy_apply(doubled, v))(x)
    assert isinstance(y, jax.Array)
    assert y.dtype == x.dtype
    np.testing.assert_array_equal(y, x * 2)


@both
def test_default_shape_is_broadcast(x, wrap):
    y = wrap(lambda a, b: lazy_apply(np.add, a, b))(x[:, :1], x[0])
    np.testing.assert_array_equal(y, x[:, :1] + x[0])


@both
def test_default_dtype_is_the_result_type(wrap):
    n = jnp.arange(3)
    y = wrap(lambda v: lazy_apply(np.multiply, v, 2.5))(n)
    assert y.dtype == jnp.float32
    np.testing.assert_array_equal(y, [0, 2.5, 5])
    z = wrap(lambda v, w: lazy_apply(np.add, v, w))(n.astype(jnp.int8), n.astype(jnp.int16))
    assert z.dtype == jnp.int16


@both
def test_several_results_are_a_tuple(x, wrap):
    def fn(a):
        return [a.sum(0), a.astype(np.int32)]

    y = wrap(
        lambda v: lazy_apply(fn, v, shape=[(3,), v.shape], dtype=(v.dtype, jnp.int32)),
    )(x)
    assert type(y) is tuple
    assert [(r.shape, r.dtype) for r in y] == [((3,), jnp.float32), ((2, 3), jnp.int32)]
    np.testing.assert_array_equal(y[0], x.sum(0))


@both
def test_a_sequence_of_one_is_a_tuple_of_one(x, wrap):
    (y,) = wrap(lambda v: lazy_apply(lambda a: (a,), v, shape=[v.shape]))(x)
    np.testing.assert_array_equal(y, x)


@both
def test_none_numbers_strings_and_keywords_are_passed_as_they_are(x, wrap):
    seen = []

    def fn(a, nothing, number, *, axis, mode):
        seen.append((type(a), nothing, number, axis, mode))
        return a

    wrap(lambda v: lazy_apply(fn, v, None, 2.5, axis=1, mode="m"))(x)
    assert seen == [(np.ndarray, None, 2.5, 1, "m")]


@both
def test_arrays_by_keyword_and_in_trees(x, wrap):
    def fn(pair, *, w):
        assert type(pair[1]) is type(w) is np.ndarray
        return pair[0] + pair[1] * w

    y = wrap(lambda v: lazy_apply(fn, [v, v], w=v))(x)
    np.testing.assert_array_equal(y, x + x * x)


def test_a_ref_is_passed_writable():
    ref = jax.new_ref(jnp.zeros(3))

    def fn(a):
        a += 1
        return a.sum()

    assert lazy_apply(fn, ref, shape=()) == 3
    np.testing.assert_array_equal(ref[...], [1, 1, 1])


@both
def test_array_likes_are_results(x, wrap):
    np.testing.assert_array_equal(wrap(lambda v: lazy_apply(lambda a: a.tolist(), v))(x), x)
    assert wrap(lambda v: lazy_apply(lambda a: float(a.sum()), v, shape=()))(x) == 15


@both
def test_64_bit_results_are_narrowed_without_x64(x, wrap):
    def fn(a):
        return a.astype(np.float64), a.astype(np.int64), a.astype(np.complex128)

    y = wrap(
        lambda v: lazy_apply(
            fn, v, shape=[v.shape] * 3, dtype=[jnp.float32, jnp.int32, jnp.complex64]
        )
    )(x)
    assert [r.dtype for r in y] == [jnp.float32, jnp.int32, jnp.complex64]
    np.testing.assert_array_equal(y[2], x)


@both
def test_64_bit_results_are_not_narrowed_with_x64(x64, x, wrap):
    y = wrap(lambda v: lazy_apply(np.float64, v, dtype=np.float64))(x)
    assert y.dtype == jnp.float64
    with pytest.raises((TypeError, jax.errors.JaxRuntimeError), match=r"float32.*got float64"):
        wrap(lambda v: lazy_apply(lambda a: a.astype(np.float64), v))(x)


def test_as_numpy_and_framework(x):
    assert lazy_apply(doubled, x, as_numpy=True)[1, 2] == 10
    seen = []

    def fn(a):
        seen.append(type(a).__module__)
        return np.from_dlpack(a).copy()

    with pytest.raises(TypeError, match="buffer"):
        lazy_apply(fn, x, as_numpy=True, framework="buffer")
    assert seen == ["jaxbridge._core"]  # what is given counts
    assert lazy_apply(doubled, x, framework={"cpu": "numpy", "cuda": "torch"})[1, 2] == 10
    with pytest.raises(ValueError, match="framework is 'tensorflow'"):
        lazy_apply(doubled, x, framework="tensorflow")


def test_framework_torch(x, needs):
    needs("torch")
    import torch

    def fn(a):
        assert isinstance(a, torch.Tensor)
        return torch.flip(a, (0,))

    y = jax.jit(lambda v: lazy_apply(fn, v, framework="torch"))(x)
    np.testing.assert_array_equal(y, x[::-1])


def test_xp_says_that_it_is_jax():
    def fn(a):
        assert type(a) is np.ndarray and not a.flags.writeable  # JAX's memory
        return a

    y = lazy_apply(fn, np.arange(3, dtype=np.float32), xp=jnp)
    assert isinstance(y, jax.Array)
    z = lazy_apply(lambda n: np.full(n, 1.5, np.float32), 2, shape=(2,), dtype=jnp.float32, xp=jnp)
    assert isinstance(z, jax.Array) and z.tolist() == [1.5, 1.5]


# ---- refused ---------------------------------------------------------------------------------------


def test_shape_and_dtype_must_fit(x):
    for kw in (
        {"dtype": [x.dtype] * 2},
        {"shape": (2, 3), "dtype": [x.dtype]},
        {"shape": [(2, 3)] * 2, "dtype": x.dtype},
        {"shape": [(2, 3)] * 2, "dtype": [x.dtype] * 3},
    ):
        for value in (x, np.asarray(x)):
            with pytest.raises(ValueError, match="one of each, or sequences of one length"):
                lazy_apply(doubled, value, **kw)


def test_no_array():
    with pytest.raises(ValueError, match=r"lazy_apply\(numpy.add\): no argument is an array"):
        lazy_apply(np.add, 1, 2)


def test_wrong_results_are_named(x):
    with pytest.raises(errors.ResultError, match=r"expected float32\[2,3\], got float32\[3\]"):
        lazy_apply(lambda a: a[0], x)
    with pytest.raises(errors.ResultError, match=r"expected float32\[2,3\], got int32\[2,3\]"):
        lazy_apply(lambda a: a.astype(np.int32), x)
    with pytest.raises(errors.ResultError, match="a sequence of 2 results, got 1"):
        lazy_apply(lambda a: (a,), x, shape=[(2, 3)] * 2)
    with pytest.raises(errors.ResultError, match="a sequence of 1 results, got ndarray"):
        lazy_apply(lambda a: a, x, shape=[(2, 3)])


def test_an_argument_that_is_written_to_is_an_error(x):
    def fn(a):
        a += 1
        return a

    with pytest.raises(ValueError, match="read-only"):
        lazy_apply(fn, x)


# ---- arguments that are not JAX's ------------------------------------------------------------------


def test_numpy_arguments_are_called_directly():
    a = np.arange(3.0)
    seen = []

    def fn(v, w, k=0):
        seen.append((v is a, w, k))
        return v.tolist()

    y = lazy_apply(fn, a, None, k=1, shape=(None,), dtype="anything")
    assert type(y) is np.ndarray and y.tolist() == [0, 1, 2]
    assert seen == [(True, None, 1)]
    z = lazy_apply(lambda v: [v, 1.5], a, shape=[(3,), ()])
    assert type(z) is tuple and [type(r) for r in z] == [np.ndarray, np.ndarray]
    with pytest.raises(ZeroDivisionError):
        lazy_apply(lambda v: 1 / 0, a)


def test_another_namespace_gets_its_own_arrays_back():
    class Other:
        shape, dtype = (2,), np.dtype("float32")

        def __array_namespace__(self):
            return types.SimpleNamespace(asarray=lambda v: ("other", v))

        def __array__(self, dtype=None, copy=None):
            return np.zeros(2, np.float32)

    def fn(v):
        assert type(v) is np.ndarray
        return v + 1

    found = lazy_apply(fn, Other(), as_numpy=True)
    assert found[0] == "other" and found[1].tolist() == [1, 1]
    mine = types.SimpleNamespace(asarray=lambda v: ("mine", v))
    assert lazy_apply(fn, Other(), as_numpy=True, xp=mine)[0] == "mine"


def test_torch_arguments_are_called_directly(needs):
    needs("torch")
    import torch

    assert isinstance(lazy_apply(lambda v: v + 1, torch.zeros(2)), torch.Tensor)
    assert isinstance(lazy_apply(doubled, torch.zeros(2), as_numpy=True), torch.Tensor)


# ---- shapes that are not known ---------------------------------------------------------------------


def test_unknown_lengths_eagerly(x):
    y = lazy_apply(np.unique, x % 2, shape=(None,))
    assert isinstance(y, jax.Array) and y.tolist() == [0, 1]
    values, counts = lazy_apply(
        functools.partial(np.unique, return_counts=True),
        x % 2,
        shape=[(None,), (None,)],
        dtype=[x.dtype, jnp.int32],
    )
    assert values.tolist() == [0, 1] and counts.tolist() == [3, 3]
    # A view of the argument is kept by nobody.
    np.testing.assert_array_equal(lazy_apply(lambda a: a[1:], x, shape=(None, 3)), x[1:])


def test_unknown_lengths_are_checked_where_they_are_known(x):
    with pytest.raises(
        errors.ResultError, match=r"expected .*float32\[None, 2\], got float32\[2, 3\]"
    ):
        lazy_apply(lambda a: a, x, shape=(None, 2))
    with pytest.raises(
        errors.ResultError, match=r"expected .*float32\[None\], got float32\[2, 3\]"
    ):
        lazy_apply(lambda a: a, x, shape=(None,))
    with pytest.raises(ZeroDivisionError):
        lazy_apply(lambda a: 1 / 0, x, shape=(None,))


def test_unknown_lengths_are_not_compiled_again(x, compiled):
    def of(v):
        return lazy_apply(lambda a: np.unique(a)[::-1], v, shape=(None,)).tolist()

    assert of(x % 2) == [1, 0]
    assert compiled() > 0
    assert of(x % 3) == [2, 1, 0]
    compiled()
    assert of(x) == [5, 4, 3, 2, 1, 0]
    assert compiled() == 0


def test_unknown_lengths_are_on_the_inputs_device(x):
    second = jax.devices()[1]
    y = lazy_apply(np.unique, jax.device_put(x, second), shape=(None,))
    assert y.devices() == {second}


@pytest.mark.parametrize("wrap", [jax.jit, jax.vmap], ids=["jit", "vmap"])
def test_unknown_lengths_cannot_be_traced(x, wrap):
    with pytest.raises(ValueError, match="every length must be known"):
        wrap(lambda v: lazy_apply(np.unique, v, shape=(None,)))(x)


# ---- traces and programs ---------------------------------------------------------------------------


def test_eager_calls_of_an_equal_function_are_compiled_once(x, compiled):
    def call(k):
        return lazy_apply(lambda a: a + k, x)

    call(1)
    assert compiled() > 0
    call(1)  # another function object, equal by content
    assert compiled() == 0
    np.testing.assert_array_equal(call(2), x + 2)
    assert compiled() > 0


class Filter:
    """Its content can change, so only the object itself tells it."""

    def __init__(self, sigma):
        self.sigma = sigma

    def apply(self, a):
        return scipy.ndimage.gaussian_filter(a, self.sigma)

    __call__ = apply


def test_eager_calls_of_one_object_are_compiled_once(x, compiled):
    f = Filter(1.0)
    lazy_apply(f.apply, x)
    assert compiled() > 0
    lazy_apply(f.apply, x)
    assert compiled() == 0
    f.sigma = 2.0
    found = lazy_apply(f.apply, x)
    np.testing.assert_array_equal(found, scipy.ndimage.gaussian_filter(np.asarray(x), 2.0))
    assert compiled() == 0
    lazy_apply(f, x)
    assert compiled() > 0
    lazy_apply(f, x)
    assert compiled() == 0
    g = Filter(3.0)
    np.testing.assert_array_equal(lazy_apply(g.apply, x), g(np.asarray(x)))


def test_a_function_ends_with_its_programs(x, collected):
    f = Filter(1.0)
    end = weakref.ref(f)
    jax.jit(lambda v, fn: lazy_apply(fn, v), static_argnums=1)(x, f)
    jax.jit(functools.partial(lazy_apply, f.apply))(x)
    del f
    gc.collect()
    assert end() is not None
    collected()
    assert end() is None


def test_a_function_ends_with_its_eager_calls(x, collected):
    f = Filter(1.0)
    end = weakref.ref(f)
    lazy_apply(f, x)
    lazy_apply(f.apply, x, shape=(None, None))
    del f
    collected()
    assert end() is None


def test_x64_is_part_of_the_program(x):
    def fn(a):
        return a.astype(np.float64)

    assert lazy_apply(fn, x).dtype == jnp.float32
    with jax.experimental.enable_x64() if not hasattr(jax, "enable_x64") else jax.enable_x64(True):
        with pytest.raises(errors.ResultError, match="got float64"):
            lazy_apply(fn, x)
        assert lazy_apply(fn, x, dtype=jnp.float64).dtype == jnp.float64
    assert lazy_apply(fn, x).dtype == jnp.float32


def test_modules_of_one_name_keep_their_globals(x, monkeypatch):
    def load(k):
        module = types.ModuleType("lazy_of_a_notebook")
        exec(f"K = {k}\ndef fn(a):\n    return a + K", module.__dict__)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        return module

    first, second = load(1), load(2)
    monkeypatch.setitem(sys.modules, first.__name__, first)
    np.testing.assert_array_equal(lazy_apply(first.fn, x), x + 1)
    monkeypatch.setitem(sys.modules, first.__name__, second)
    np.testing.assert_array_equal(lazy_apply(second.fn, x), x + 2)
    np.testing.assert_array_equal(lazy_apply(first.fn, x), x + 1)


@both
def test_inside_control_flow(x, wrap):
    def step(carry, _):
        return lazy_apply(doubled, carry), None

    y, _ = wrap(lambda v: jax.lax.scan(step, v, None, length=3))(x)
    np.testing.assert_array_equal(y, x * 8)


def test_vmap_calls_once_for_each_element(x):
    seen = []

    def fn(a):
        seen.append(a.shape)
        return a - a.max()

    y = jax.vmap(lambda v: lazy_apply(fn, v))(x)
    np.testing.assert_array_equal(y, x - x.max(1, keepdims=True))
    assert seen == [(3,), (3,)]


def test_a_derivative_needs_a_rule(x):
    with pytest.raises(errors.DerivativeError, match="doubled"):
        jax.grad(lambda v: lazy_apply(doubled, v).sum())(x)


def flipped(a, axis):
    return np.flip(a, axis).tolist()  # a list: the conversion is exported too


def test_a_program_with_a_module_level_function_is_exported(x, tmp_path, needs):
    needs("flatbuffers")
    exported = export.export(
        jax.jit(lambda v: lazy_apply(flipped, v, axis=1)),
        disabled_checks=jaxbridge.export_checks(),
    )(x)
    (tmp_path / "program").write_bytes(exported.serialize())
    code = """
        import sys, jax.numpy as jnp
        from jax import export
        import jaxbridge, {module}
        program = export.deserialize(bytearray(open({path!r}, "rb").read()))
        print(program.call(jnp.arange(6, dtype=jnp.float32).reshape(2, 3)).tolist())
    """.format(module=__name__, path=str(tmp_path / "program"))
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == f"{x[:, ::-1].tolist()}\n", done.stderr


def test_a_program_with_a_closure_is_not_exported(x):
    with pytest.raises(NotImplementedError, match="cannot be exported"):
        export.export(
            jax.jit(lambda v: lazy_apply(lambda a: a, v)),
            disabled_checks=jaxbridge.export_checks(),
        )(x)


# ---- beside array-api-extra ------------------------------------------------------------------------


def two(a):
    return [a.sum(0), np.float64(a.max())]


_same = {
    "defaults": (doubled, lambda v: ((v,), {})),
    "numbers": (np.clip, lambda v: ((v, 1, 3), {})),
    "promotion": (np.multiply, lambda v: ((v.astype(int), 2.5), {})),
    "broadcast": (np.hypot, lambda v: ((v, v[0]), {})),
    "keywords": (np.flip, lambda v: ((v,), {"axis": 1})),
    "list": (np.ndarray.tolist, lambda v: ((v,), {})),
    "two": (two, lambda v: ((v,), {"shape": [(3,), ()]})),
    "reduced": (np.sum, lambda v: ((v,), {"shape": ()})),
    "dtype": (np.isfinite, lambda v: ((v,), {"dtype": bool})),
    "narrowed": (np.float64, lambda v: ((v,), {})),
}


@pytest.mark.parametrize("case", _same)
@both
def test_same_as_array_api_extra(x, needs, case, wrap):
    needs("array_api_extra")
    import array_api_extra

    fn, arguments = _same[case]

    def run(apply):
        def program(v):
            args, kwargs = arguments(v)
            return apply(fn, *args, as_numpy=True, **kwargs)

        return wrap(program)(x)

    expected, found = run(array_api_extra.lazy_apply), run(lazy_apply)
    assert jax.tree.structure(expected) == jax.tree.structure(found)
    for e, f in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        assert (e.shape, e.dtype) == (f.shape, f.dtype)
        np.testing.assert_array_equal(e, f)


# ---- cases -----------------------------------------------------------------------------------------


@both
def test_N01_the_result_is_on_the_inputs_device_without_a_transfer(x, wrap):
    second = jax.devices()[1]
    y = jax.device_put(x, second)
    f = wrap(lambda v: lazy_apply(scipy.ndimage.gaussian_filter, v, 1.0))
    with jax.transfer_guard("disallow"):
        found = f(y)
    assert found.devices() == {second}
    np.testing.assert_array_equal(found, scipy.ndimage.gaussian_filter(np.asarray(x), 1.0))


def checked_sqrt(a):
    if (a < 0).any():
        raise ValueError(f"negative at {np.flatnonzero(a < 0).tolist()}")
    return np.sqrt(a)


def test_N02_an_error_of_a_check_reaches_the_user(x):
    bad = x.ravel().at[2].set(-1)
    with pytest.raises(ValueError, match=r"negative at \[2\]") as raised:
        lazy_apply(checked_sqrt, bad)
    assert not isinstance(raised.value, jax.errors.JaxRuntimeError)
    f = jax.jit(lambda v: lazy_apply(checked_sqrt, v) + 1)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"ValueError: negative at \[2\]") as text:
        f(bad).block_until_ready()
    assert "test_lazy.checked_sqrt" in str(text.value)
    with pytest.raises(ValueError, match=r"negative at \[2\]"), jaxbridge.reraise():
        f(bad).block_until_ready()
    # The process is usable, and so is the program.
    np.testing.assert_array_equal(f(x), np.sqrt(np.asarray(x)) + 1)


def jitted_linkage(**kw):
    return jax.jit(
        lambda v: lazy_apply(
            hierarchy.linkage, v, shape=(v.shape[0] - 1, 4), dtype=np.float64, **kw
        )
    )


@pytest.mark.parametrize("method", ["single", "average", "ward", "centroid"])
def test_N03_linkage_under_jit(x64, rng, method):
    points = rng.random((300, 2))
    found = jitted_linkage(method=method)(jnp.asarray(points))
    np.testing.assert_array_equal(found, hierarchy.linkage(points, method))


@pytest.mark.slow
def test_N03_linkage_under_jit_of_6162_points(x64, rng):
    points = rng.random((6162, 2))
    found = jitted_linkage(method="single")(jnp.asarray(points))
    np.testing.assert_array_equal(found, hierarchy.linkage(points, "single"))


def test_N03_shape_and_dtype_are_found_without_running(x64):
    points = jax.ShapeDtypeStruct((6162, 2), jnp.float64)
    found = jax.eval_shape(
        lambda v: lazy_apply(lambda a: 1 / 0, v, shape=(v.shape[0] - 1, 4)), points
    )
    assert (found.shape, found.dtype) == ((6161, 4), jnp.float64)
    assert "jaxbridge.call" in jitted_linkage().lower(points).as_text()


def test_N03_the_argument_is_not_copied(x):
    seen = []

    def look(a):
        seen.append(a.__array_interface__["data"][0])
        return a

    lazy_apply(look, x)
    jax.jit(lambda v: lazy_apply(look, v))(x)
    assert seen == [x.unsafe_buffer_pointer()] * 2


def test_N03_scipy_calls_it_in_place_of_its_own():
    """SciPy's array API functions are written for array-api-extra's: ours has the same signature."""
    code = """
        import inspect, jax, numpy as np
        jax.config.update("jax_enable_x64", True)
        import jax.numpy as jnp, jaxbridge
        import scipy.cluster.hierarchy as h
        from scipy.spatial.distance import pdist

        def lazy_apply(*args, **kw):
            calls.append(args[0].__name__)
            return jaxbridge.lazy_apply(*args, **kw)

        calls = []
        y = pdist(np.random.default_rng(0).random((50, 2)))
        expected = h.linkage(y, "average")
        inspect.unwrap(h.linkage).__globals__["xpx"].lazy_apply = lazy_apply
        for wrap in (lambda f: f, jax.jit):
            found = wrap(lambda y: h.linkage(y, "average"))(jnp.asarray(y))
            assert isinstance(found, jax.Array)
            np.testing.assert_array_equal(found, expected)
        assert calls == ["cy_linkage"] * 2, calls
        try:
            with jaxbridge.reraise():
                jax.jit(lambda y: h.linkage(y, "average"))(jnp.asarray(y) * np.nan)
        except ValueError as error:
            print(error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "SCIPY_ARRAY_API": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "The condensed distance matrix must contain only finite values.\n", done


def test_cached_functions_differ_in_every_part(x):
    """One function, and what differs in one thing alone is not mixed up."""
    fn = Filter(1.0)
    expected = fn(np.asarray(x))
    for framework in (None, "numpy", {"cpu": "numpy"}):
        np.testing.assert_array_equal(lazy_apply(fn, x, framework=framework), expected)
    with pytest.raises(errors.ResultError, match="got float32"):
        lazy_apply(fn, x, dtype=jnp.float16)
    with pytest.raises(errors.ResultError, match=r"expected float32\[3\]"):
        lazy_apply(fn, x, shape=(3,))
    with pytest.raises(errors.ResultError, match="a sequence of 1"):
        lazy_apply(fn, x, shape=[x.shape])
    np.testing.assert_array_equal(lazy_apply(fn, x, shape=(None, 3)), expected)
    np.testing.assert_array_equal(lazy_apply(fn, x), expected)

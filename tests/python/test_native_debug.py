# SPDX-License-Identifier: Apache-2.0
"""JAXBRIDGE_DEBUG=1 and native functions: what it finds, and that right calls stay right."""

import ctypes

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbridge
from jaxbridge import _config
from native_libraries import built
from owned_memory import needs_updates, owned

X = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.fixture(autouse=True)
def debug(monkeypatch):
    """Programs that are lowered from now on are those of the debug mode."""
    monkeypatch.setattr(_config, "debug", True)
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def careless():
    return jaxbridge.load(built("careless.cpp", "libcareless"))


@pytest.fixture(scope="module")
def ops():
    return jaxbridge.load(built("ops.cpp", "libops"))


def bytes_of(x):
    return np.asarray(x).view(np.uint32).tolist()


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_what_a_library_does_not_write_shows(careless, jit):
    f = jax.jit(careless.forgets) if jit else careless.forgets
    assert bytes_of(f(jnp.ones(3))) == [0x3F800000, 0xA5A5A5A5, 0xA5A5A5A5]


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_an_argument_that_a_library_writes_to_is_named(careless, jit):
    f = jax.jit(careless.spoils, static_argnames="at") if jit else careless.spoils
    text = r"careless.spoils: argument 'x' was written to.*only reads it.*in_place<T>"
    with pytest.raises(jax.errors.JaxRuntimeError, match=text):
        jax.block_until_ready(f(jnp.ones(3), jnp.ones(3), at=2))
    # with what was there it has not changed
    np.testing.assert_array_equal(f(jnp.full(3, 7.0), jnp.ones(3), at=2), [8, 1, 1])


def test_c_functions():
    lib = ctypes.CDLL(str(built("plain.c", "plain")))
    f = jaxbridge.bind(lib.bump, "x: float32[n], n: int32")
    with pytest.raises(jax.errors.JaxRuntimeError, match="bump: argument 'x' was written to"):
        jax.block_until_ready(f(jnp.ones(3)))
    half = jaxbridge.bind(lib.pairs, "x: int[n], n: int, out y: int[n, 3]")
    out = np.asarray(half(np.arange(2, dtype=np.int32))).ravel()
    assert out[:4].tolist() == [0, 0, 1, -1] and set(out[4:].view(np.uint32)) == {0xA5A5A5A5}
    right = jaxbridge.bind(lib.bump, "inout x: float32[n], n: int32")
    np.testing.assert_array_equal(jax.jit(lambda x: right(x) + x)(jnp.ones(3)), [3, 3, 3])


def test_right_calls_of_a_library(ops, x64):
    before = ops.scale.stats()["calls"]
    np.testing.assert_array_equal(jax.jit(lambda x: ops.scale(x, -1.0) + 1)(X), 1 - X)
    assert ops.scale.stats()["calls"] == before + 1
    np.testing.assert_array_equal(ops.sums(X), X.sum(1))  # scratch, threads, a workspace
    np.testing.assert_array_equal(jax.vmap(ops.scale)(np.stack([X, X + 1])), [2 * X, 2 * X + 2])
    for dtype in ("float32", "complex64"):  # overloads
        y = np.ones(3, dtype)
        np.testing.assert_array_equal(ops.axpy(y, y, 2), 3 * y)
    a, b = ops.split(np.arange(5.0), 2)
    assert (a.tolist(), b.tolist()) == ([0, 1], [2, 3, 4])
    first, again = (np.asarray(ops.count(np.zeros(1, np.float32)))[0] for _ in range(2))
    assert again == first + 1
    d = {"n": 7, "in": {"x": 2.5}, "s": "text", "l": [1, 2]}
    got = ops.attributes(X, True, -3, 2**64 - 1, 0.5, 1 - 2j, "héé", [1, 2.5], [True, False], d)
    expected = [1, -3, float(2**64 - 1), 0.5, 1, -2, 5, 3.5, 1, 7, 2.5, -1, 2, 11]
    np.testing.assert_array_equal(got, expected)
    spec = jax.ShapeDtypeStruct((0, 2), np.float32)  # no elements
    assert ops.fill(1.5, result_shape_dtypes=spec).shape == (0, 2)
    for how, text in (("throw", "fails: thrown"), ("int", "no std::exception")):
        with pytest.raises(jax.errors.JaxRuntimeError, match=text):
            jax.block_until_ready(ops.fails(np.zeros(1, np.float32), how))


@needs_updates
def test_memory_of_others(ops, x64):
    block = owned()
    r = jaxbridge.ref(block)
    assert ops.bump(r) == block.ctypes.data
    assert jax.jit(ops.bump)(r) == block.ctypes.data
    np.testing.assert_array_equal(block, np.arange(8) + 2)


def test_exported_programs_are_without_checks(careless):
    pytest.importorskip("flatbuffers")
    exported = jax.export.export(
        jax.jit(careless.spoils), disabled_checks=jaxbridge.export_checks()
    )(jnp.ones(3), jnp.ones(3))
    assert "jaxbridge.native.careless" in exported.mlir_module()
    assert "jaxbridge.call" not in exported.mlir_module()
    again = jax.export.deserialize(exported.serialize())
    np.testing.assert_array_equal(again.call(jnp.ones(3), jnp.ones(3)), [2, 1, 1])


def test_without_debug_mode_nothing_is_between(careless, debug, monkeypatch):
    monkeypatch.setattr(_config, "debug", False)
    text = jax.jit(careless.forgets).lower(jnp.ones(3)).as_text()
    assert "@jaxbridge.native.careless" in text and "jaxbridge.call" not in text
    monkeypatch.setattr(_config, "debug", True)
    jax.clear_caches()
    text = jax.jit(careless.forgets).lower(jnp.ones(3)).as_text()
    assert "@jaxbridge.native.careless" not in text and "@jaxbridge.call(" in text


def test_functions_of_others_cannot_be_looked_into(careless):
    """XLA knows where they are, and we do not."""
    f = jaxbridge.ffi(careless.forgets.callee.target, lambda x: x)
    assert "jaxbridge.call" not in jax.jit(f).lower(jnp.ones(3)).as_text()
    assert float(f(jnp.ones(3))[0]) == 1


@pytest.mark.parametrize("option", ["graph", "scratch", "state"])
def test_options_of_python_functions_are_refused(careless, option):
    lib = ctypes.CDLL(str(built("plain.c", "plain")))
    kernel = {"signature": "x: float32[n]", "grid": 1, "block": 1}
    for make in (
        lambda **o: jaxbridge.load(careless.path, **o),
        lambda **o: jaxbridge.bind(lib.bump, "inout x: float32[n], n: int32", **o),
        lambda **o: jaxbridge.cuda_kernel(".version 8.0", "f", **kernel, **o),
        lambda **o: jaxbridge.ffi("target", lambda x: x, **o),
    ):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{option}'"):
            make(**{option: "replay"})


def test_several_devices(careless, ops):
    if len(jax.devices()) < 2:
        pytest.skip("needs two devices")
    mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jax.device_put(jnp.ones(4), jax.NamedSharding(mesh, jax.P("i")))
    out = jax.jit(careless.forgets)(x)  # elementwise: each device with its part
    assert bytes_of(out) == [0x3F800000, 0xA5A5A5A5] * 2

# SPDX-License-Identifier: Apache-2.0
"""Native functions under JAX's transformations: rules for derivatives, parts on several devices."""

import ctypes

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbridge
from native_libraries import built
from processes import run

X = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def test_a_linear_function_of_a_library():
    ops = jaxbridge.load(built("ops.cpp", "libops"))
    ops.scale.deflinear(lambda ct, a: ops.scale(ct, a))
    loss = jax.jit(lambda x: (ops.scale(x, a=3.0) ** 2).sum())
    np.testing.assert_allclose(jax.grad(loss)(X), 18 * X)
    np.testing.assert_allclose(jax.jvp(lambda x: ops.scale(x, 3.0), (X,), (X,))[1], 3 * X)
    batch = np.stack([X, -X])
    np.testing.assert_allclose(jax.vmap(jax.grad(loss))(batch), 18 * batch)


def test_a_bilinear_function_of_a_library():
    ops = jaxbridge.load(built("ops.cpp", "libops"))
    f = ops.matmul
    f.deflinear({0: lambda ct, y: f(ct, y.T), 1: lambda ct, x: f(x.T, ct)})
    y = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    for k in (0, 1):
        mine = jax.grad(lambda x, y: jnp.sin(f(x, y)).sum(), k)(X, y)
        theirs = jax.grad(lambda x, y: jnp.sin(x @ y).sum(), k)(X, y)
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)


def test_c_functions_and_targets_of_others():
    ops = jaxbridge.load(built("ops.cpp", "libops"))
    plain = ctypes.CDLL(str(built("plain.c", "plain")))
    axpy = jaxbridge.bind(plain.axpy, "x: f64[n], n: i64, a: f64 = 2.0, inout y: f64[n]")
    handler = ctypes.CDLL(ops.path).jaxbridge_ffi_scale_cpu
    jax.ffi.register_ffi_target("test_native_transforms.scale", jax.ffi.pycapsule(handler), "cpu")
    scale = jaxbridge.ffi("test_native_transforms.scale", lambda x, a: x)

    def rule(primals, tangents, a):
        return axpy(*primals, a=a), a * tangents[0] + tangents[1]

    axpy.defjvp(rule)
    scale.defvjp(lambda x, a: (scale(x, a=a), None), lambda _, ct, a: (a * ct,))
    x = np.arange(4.0)
    got = jax.grad(lambda x, y: (axpy(x, y, a=3.0) ** 2).sum(), (0, 1))(x, x)
    np.testing.assert_allclose(got, ([24 * x, 8 * x]))
    np.testing.assert_allclose(jax.grad(lambda x: scale(x, a=4.0).sum())(X), 4 * np.ones_like(X))


def test_over_devices():
    """Each device calls with its parts: in plain jit of an elementwise function, and in shard_map."""
    code = """
import sys, jax, jax.numpy as jnp, numpy as np, jaxbridge
from jax.sharding import NamedSharding, PartitionSpec as P
ops = jaxbridge.load(sys.argv[1])
mesh = jax.sharding.Mesh(jax.devices(), ("d",))
x = jax.device_put(np.arange(8, dtype=np.float32), NamedSharding(mesh, P("d")))
f = jax.jit(lambda x: ops.axpy(x, x + 1, 2.0))
np.testing.assert_array_equal(f(x), 3 * np.arange(8) + 1)
assert f(x).sharding.is_equivalent_to(x.sharding, 1)
assert "all-gather" not in f.lower(x).compile().as_text()
g = jax.shard_map(lambda x: ops.place(x)[None], mesh=mesh, in_specs=P("d"), out_specs=P("d"))
jax.config.update("jax_enable_x64", True)
before = ops.place.stats()["calls"]
assert len(set(np.asarray(jax.jit(g)(x)).tolist())) == 4
assert ops.place.stats()["calls"] == before + 4
"""
    run(code, str(built("ops.cpp", "libops")), devices=4)

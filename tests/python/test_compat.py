# SPDX-License-Identifier: Apache-2.0
"""Each private need of `_compat.py`, run on every supported JAX: here a new JAX breaks first."""

import functools
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jaxbridge
from jaxbridge import _compat, _core

P = PartitionSpec
F32 = jax.ShapeDtypeStruct((), jnp.float32)


def like(x, *rest):
    return x


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


def test_an_older_jax_is_refused(monkeypatch):
    monkeypatch.setattr(_compat, "jax_version", (0, 7, 2))
    with pytest.raises(ImportError, match=r"needs JAX 0\.8\.0 or later"):
        _compat.check_version()


# ---- the effect ----------------------------------------------------------------------------------


def _custom_jvp(log):
    f = jax.custom_jvp(lambda v: (log(v), v)[1])
    f.defjvp(lambda p, t: ((log(p[0]), p[0])[1], t[0]))
    return f


def _custom_vjp(log, where):
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
    f.defvjp(fwd, bwd)
    return f


def _custom_vmap(log):
    f = jax.custom_batching.custom_vmap(lambda v: (log(v), v)[1])
    f.def_vmap(lambda size, batched, v: ((log(v[0]), v)[1], True))
    return f


def _on_two_devices(fn):
    mesh = jax.make_mesh((2,), ("i",), axis_types=(AxisType.Auto,))
    return jax.shard_map(fn, mesh=mesh, in_specs=P("i"), out_specs=P("i"))


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
        lambda log, v: _on_two_devices(lambda u: (log(u[0]), u)[1])(jnp.stack([v] * 2)),
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

# SPDX-License-Identifier: Apache-2.0
"""Calls of functions that need whole arrays where these are spread over devices: how often, and where."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbridge
from jaxbridge import errors


@pytest.fixture(params=["Auto", "Explicit"])
def spread(request):
    """An array that is spread over two devices."""
    kind = getattr(jax.sharding.AxisType, request.param)
    mesh = jax.make_mesh((2,), ("i",), axis_types=(kind,))
    v = np.array([-0.0, 1, 2, 3], np.float32)
    with jax.set_mesh(mesh) if request.param == "Explicit" else contextlib.nullcontext():
        yield jax.device_put(v, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("i")))


def on_each_device(array):
    return [np.asarray(s.data) for s in array.addressable_shards]


@pytest.mark.parametrize("jit", [False, True], ids=["", "jit"])
def test_a_call_with_a_side_effect_is_made_once_for_all_devices(spread, jit):
    seen = []

    def work(v):
        seen.append(v.copy())
        return v, v > 1, v.sum()

    def spec(v):
        like = jax.ShapeDtypeStruct(v.shape, v.dtype)
        return like, jax.ShapeDtypeStruct(v.shape, bool), jax.ShapeDtypeStruct((), v.dtype)

    f = jaxbridge.call(work, spec, has_side_effect=True)
    same, more, total = (jax.jit(f) if jit else f)(spread)
    for array, want in ((same, [-0.0, 1, 2, 3]), (more, [0, 0, 1, 1]), (total, 6)):
        for part in on_each_device(array):
            np.testing.assert_array_equal(part, want)
    assert all(np.signbit(part[0]) for part in on_each_device(same))
    assert len(seen) == 1
    np.testing.assert_array_equal(seen[0], [0, 1, 2, 3])


def test_a_call_without_results_is_made_once_for_all_devices(spread):
    seen = []
    log = jaxbridge.call(lambda v: seen.append(v.tolist()), ())
    mark = jaxbridge.call(lambda: seen.append("called"), ())

    def program(v):
        mark()
        log(v)
        return jax.lax.fori_loop(0, 3, lambda i, c: (log(c), c + 1)[1], v)

    log(spread)
    jax.effects_barrier()
    assert seen == [[0, 1, 2, 3]]
    jax.jit(program)(spread).block_until_ready()
    jax.effects_barrier()
    rows = [row for row in seen[1:] if row != "called"]
    assert sorted(rows) == [[i + 0, i + 1, i + 2, i + 3] for i in (0, 0, 1, 2)]
    assert len(seen) == 6


def test_a_call_without_results_may_fail_on_several_devices(spread):
    def fail(v):
        raise ZeroDivisionError

    log = jaxbridge.call(fail, ())
    with pytest.raises((ZeroDivisionError, jax.errors.JaxRuntimeError), match="ZeroDivision|^$"):
        log(spread)
        jax.effects_barrier()
    jaxbridge._compat.forget_failed_effects()


def test_an_argument_in_place_and_a_ref_of_a_call_with_a_side_effect(spread):
    seen = []

    def add(v):
        seen.append(v.tolist())
        v += 1

    f = jaxbridge.call(
        add, lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype), inout={0: 0}, has_side_effect=True
    )
    for part in on_each_device(jax.jit(f)(spread)):
        np.testing.assert_array_equal(part, [1, 2, 3, 4])
    ref = jax.new_ref(spread)
    jaxbridge.call(add, (), has_side_effect=True)(ref)
    np.testing.assert_array_equal(ref[...], [1, 2, 3, 4])
    assert seen == [[0, 1, 2, 3]] * 2


def test_a_pure_call_is_made_on_each_device(spread):
    seen = []

    def double(v):
        seen.append(v.shape)
        return v * 2

    f = jaxbridge.call(double, lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype))
    if any(jax.typeof(spread).sharding.spec):
        with pytest.raises(errors.ShardingError, match=r"axis 0 of argument 0 is sharded over 'i'"):
            jax.jit(f)(spread)
        spread = jax.sharding.reshard(spread, jax.sharding.PartitionSpec())
    for part in on_each_device(jax.jit(f)(spread)):
        np.testing.assert_array_equal(part, [0, 2, 4, 6])
    assert seen == [(4,)] * 2


def test_a_call_with_a_side_effect_wants_all_axes_manual():
    mesh = jax.make_mesh((1, 2), ("i", "j"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    log = jaxbridge.call(lambda v: None, ())
    spec = jax.sharding.PartitionSpec("i")
    f = jax.shard_map(
        lambda v: (log(v), v)[1], mesh=mesh, in_specs=spec, out_specs=spec, axis_names={"i"}
    )
    with pytest.raises(NotImplementedError, match="all axes of the mesh to be manual"):
        jax.jit(f)(jnp.arange(4.0))

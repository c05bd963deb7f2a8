# SPDX-License-Identifier: Apache-2.0
"""Acceptance cases of letter I: several devices and sharding."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxbridge
from jaxbridge import errors
from split_calls import Watched, X, broadcast, check, explicit, like, put, row_sums

P = PartitionSpec
__all__ = ["explicit"]  # a fixture


@pytest.mark.parametrize("how", ["elementwise", "rule", "batch axis"])
def test_I02_declared_axes_are_split(how):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jax.device_put(
        np.arange(128, dtype=np.float32).reshape(16, 8), NamedSharding(mesh, P("data"))
    )
    watched = Watched(lambda v: v * 2)
    if how == "batch axis":
        f = jax.vmap(jaxbridge.call(watched, like, vmap_method="broadcast_all"))
    else:
        f = g = jaxbridge.call(watched, like, elementwise=how == "elementwise")
        if how == "rule":
            g.defsharding("batch features -> batch features")
    y = check(f, watched, [x], np.asarray(x) * 2, ((2, 8),))
    assert y.sharding.is_equivalent_to(x.sharding, 2)


def test_I02_what_is_not_declared_is_gathered():
    """The documented rule: the function sees the whole array, and the program says so by its all-gather."""
    watched = Watched(lambda v: v - v.mean())
    f = jaxbridge.call(watched, like)
    check(f, watched, [put(X, "a")], X - X.mean(), ((8, 8),), {"all-gather"})


def test_I03_explicit_axes_are_split(explicit):
    watched = Watched(lambda x, y: x * y)
    f = jaxbridge.call(watched, broadcast, elementwise=True)
    x, y = put(X, "a", "b", mesh=explicit), put(X[0], "b", mesh=explicit)
    out = check(f, watched, [x, y], X * X[0], ((2, 4), (4,)))
    assert jax.typeof(out).sharding.spec == P("a", "b")


def test_I03_explicit_axes_that_cannot_be_split_are_refused(explicit):
    f = jaxbridge.call(lambda x: x.sum(-1), row_sums)
    x = put(X, "a", "b", mesh=explicit)
    refused = r"axis 0 of argument 0 is sharded over 'a'.*defsharding.*shard_map.*reshard"
    for program in (f, jax.jit(f)):
        with pytest.raises(errors.ShardingError, match=refused):
            program(x)
    f.defsharding("i j -> i")
    with pytest.raises(errors.ShardingError, match="axis 1 of argument 0 is sharded over 'b'"):
        f(x)
    y = f(jax.sharding.reshard(x, P("a")))
    assert jax.typeof(y).sharding.spec == P("a")
    np.testing.assert_array_equal(y, X.sum(-1))


@pytest.mark.parametrize("replicated", [False, True])
def test_I08_views_of_arrays_on_several_devices(replicated):
    a = put(X, *(() if replicated else ("a", "b")))
    one = "one replica" if replicated else "one shard"
    for whole in (
        lambda: jaxbridge.view(a),
        lambda: jaxbridge.to_external(a, "numpy"),
        lambda: np.from_dlpack(jaxbridge.view(a)),
    ):
        with pytest.raises(BufferError, match=rf"on 8 devices.*addressable_shards.*{one}"):
            whole()
    for shard in a.addressable_shards:
        part = np.from_dlpack(jaxbridge.view(shard.data))
        assert part.ctypes.data == shard.data.unsafe_buffer_pointer()
        np.testing.assert_array_equal(part, X[shard.index])
    assert len(a.addressable_shards) == 8
    assert a.addressable_shards[0].data.shape == ((8, 8) if replicated else (2, 4))

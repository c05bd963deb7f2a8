# SPDX-License-Identifier: Apache-2.0
"""What the tests of calls on several devices share: meshes, arrays on them, who saw which part."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

P = PartitionSpec
_collectives = re.compile(
    r"\b(all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)


def mesh_of(kind="Auto"):
    """Eight devices, four by two."""
    types = (getattr(AxisType, kind),) * 2
    return jax.make_mesh((4, 2), ("a", "b"), axis_types=types, devices=jax.devices()[:8])


@pytest.fixture
def mesh():
    return mesh_of()


@pytest.fixture
def explicit():
    mesh = mesh_of("Explicit")
    with jax.set_mesh(mesh):
        yield mesh


def put(x, *spec, mesh=None):
    """An array on a mesh, one of `mesh_of`'s where none is given."""
    return jax.device_put(x, NamedSharding(mesh or mesh_of(), P(*spec)))


def collectives(program, *args):
    """The kinds of collectives in the compiled program: what XLA moves between devices."""
    return collectives_in(jax.jit(program).lower(*args).compile())


def collectives_in(compiled):
    return set(_collectives.findall(compiled.as_text()))


class Watched:
    """A function that keeps the shapes it sees."""

    def __init__(self, fn):
        self.fn = fn
        self.shapes = []

    def __call__(self, *args, **kwargs):
        self.shapes.append(tuple(np.shape(x) for x in jax.tree.leaves((args, kwargs))))
        return self.fn(*args, **kwargs)

    def during(self, program, *args):
        """The result of a program, and the shapes, those of all devices, that were seen."""
        self.shapes.clear()
        out = jax.block_until_ready(program(*args))
        jax.effects_barrier()
        return out, sorted(self.shapes)


def like(x, *rest):
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def broadcast(*args):
    shape = jnp.broadcast_shapes(*(x.shape for x in args))
    return jax.ShapeDtypeStruct(shape, args[0].dtype)


def row_sums(x, *rest):
    return jax.ShapeDtypeStruct(x.shape[:-1], x.dtype)


def check(f, watched, args, want, part, moves=()):
    """Eagerly and in jit: the values, the shapes that each of the eight devices saw, and what XLA moves."""
    for program in (f, jax.jit(f)):
        out, shapes = watched.during(program, *args)
        jax.tree.map(np.testing.assert_array_equal, out, want)
        assert shapes == [part] * 8
    assert collectives(f, *args) == set(moves)
    return out


X = np.arange(64, dtype=np.float32).reshape(8, 8)

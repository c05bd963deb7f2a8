# SPDX-License-Identifier: Apache-2.0
"""What stands between the arguments of a program and their first use: on CUDA, a wait for their owner."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec

from . import _compat, _lowering

fence_p = Primitive("jaxbridge_fence")
fence_p.multiple_results = True


def _abstract_eval(*operands: Any) -> list[Any]:
    return [*operands, _compat.result_aval((1,), np.dtype("uint8"), operands)]


fence_p.def_abstract_eval(_abstract_eval)


@fence_p.def_impl
def _impl(*operands: Any) -> list[Any]:
    raise RuntimeError(
        "inplace: jax_disable_jit is on, and what is not compiled is not updated in place; call it in "
        "`with jax.disable_jit(False):`"
    )


def fence(operands: list[Any], shardings: list[Any]) -> tuple[list[Any], Any]:
    """The operands, which nothing else may use, in the same memory; and what `keep` needs.

    Args:
        operands: arguments of the program that are donated.
        shardings: of each.
    """
    if all(len(s.device_set) == 1 for s in shardings):
        *outs, token = fence_p.bind(*operands)
        return outs, token
    named = [s for s in shardings if isinstance(s, NamedSharding)]
    if len(named) < len(shardings):
        raise TypeError(
            "inplace: arrays on several devices need a jax.sharding.NamedSharding, each of them"
        )
    specs = tuple(s.spec for s in named)
    *outs, token = jax.shard_map(
        lambda *shards: tuple(fence_p.bind(*shards)),
        mesh=named[0].mesh,
        in_specs=specs,
        out_specs=(*specs, PartitionSpec(named[0].mesh.axis_names)),
        check_vma=False,
    )(*operands)
    return outs, token


# Keeps the fence in the program, where JAX would drop what no result depends on.
keep_p = Primitive("jaxbridge_keep")
keep_p.multiple_results = True
keep_p.def_abstract_eval(lambda *operands: [*operands[:-1]])


def keep(results: list[Any], token: Any) -> list[Any]:
    """The results, which are there when the fence has been passed."""
    return list(keep_p.bind(*results, token))


def _on_cpu(*operands: Any) -> list[Any]:
    # Its memory has no streams, and who uses it waits.
    return [*operands, jnp.zeros(1, jnp.uint8)]


def _barrier(*operands: Any) -> list[Any]:
    return [*jax.lax.optimization_barrier(operands)[:-1]]


mlir.register_lowering(fence_p, mlir.lower_fun(_on_cpu, multiple_results=True))
mlir.register_lowering(keep_p, lambda ctx, *operands: operands[:-1])
mlir.register_lowering(keep_p, mlir.lower_fun(_barrier, multiple_results=True), platform="cuda")
mlir.register_lowering(fence_p, _lowering.lower_fence, platform="cuda")

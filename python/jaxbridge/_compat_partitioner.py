# SPDX-License-Identifier: Apache-2.0
"""XLA's partitioner and Shardy as JAX reaches them; beside `_compat` the reader of private modules."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import custom_partitioning_sharding_rule as _sharding_rules
from jax._src import xla_bridge as _xla_bridge
from jax._src.interpreters import mlir as _mlir
from jax._src.lib import xla_client as _xla_client
from jax.experimental.custom_partitioning import ArrayMapping, SdyShardingRule

# The devices that have each tile of an array: an axis for each of the array's, and one of those that have
# the same tile. None: each device has the whole array.
Tiles = np.ndarray[Any, np.dtype[np.int64]]


def register_partitioner(
    target: str,
    partition: Callable[
        [Sequence[Sequence[int]], Sequence[Tiles | None], str],
        tuple[str, Sequence[Tiles | None]],
    ],
) -> None:
    """Lets XLA's partitioner ask `partition` what stands in the place of a call to `target`.

    It is what JAX's custom_partitioning is made of (0.8.0 to 0.12), which writes an address into the
    program where this has the call's own text.
    """

    def split(
        operands: Any, operand_shardings: Any, result: Any, result_sharding: Any, text: bytes
    ) -> Any:
        is_tuple = result.is_tuple()
        results = result.tuple_shapes() if is_tuple else [result]
        of_results = result_sharding.tuple_elements() if is_tuple else [result_sharding]
        shapes = [x.dimensions() for x in (*operands, *results)]
        shardings = [*operand_shardings, *of_results]
        tiles = [_tiles(x, len(shape)) for x, shape in zip(shardings, shapes, strict=True)]
        program, tiles_after = partition(shapes, tiles, text.decode())
        after = [_hlo_sharding(x) for x in tiles_after]
        of_results = after[len(operands) :]
        return (
            program.encode(),
            after[: len(operands)],
            _xla_client.HloSharding.tuple_sharding(result, of_results)
            if is_tuple
            else of_results[0],
        )

    def not_asked(*_: Any) -> Any:
        # Shardy propagates shardings, by the rule that the call has.
        raise NotImplementedError("jaxbridge has rules for Shardy alone")

    register = functools.partial(
        _xla_client.register_custom_call_partitioner,
        name=target,
        prop_user_sharding=not_asked,
        partition=split,
        infer_sharding_from_operands=not_asked,
        can_side_effecting_have_replicated_sharding=True,
    )
    register()
    _xla_bridge.register_plugin_callbacks(register)


def _tiles(sharding: Any, rank: int) -> Tiles | None:
    if sharding is None or not sharding.tile_assignment_dimensions() or sharding.is_replicated():
        return None
    counts = sharding.tile_assignment_dimensions()[:rank]
    return np.array(sharding.tile_assignment_devices(), np.int64).reshape(*counts, -1)


def _hlo_sharding(tiles: Tiles | None) -> Any:
    if tiles is None:
        return _xla_client.HloSharding.replicate()
    described = _xla_client.OpSharding()
    described.type = _xla_client.OpSharding.Type.OTHER
    described.tile_assignment_dimensions = list(tiles.shape)
    described.tile_assignment_devices = tiles.flatten().tolist()
    described.replicate_on_last_tile_dim = True
    return _xla_client.HloSharding.from_proto(described)


def sharding_rule(
    operands: Sequence[Sequence[str | None]],
    results: Sequence[Sequence[str | None]],
    operand_types: Sequence[Any],
    result_types: Sequence[Any],
) -> Any:
    """Shardy's attribute for a call whose axes have these names; None: the axis stays whole.

    JAX has no public way to make one for an operation (0.8.0 to 0.12).
    """
    # Names that Shardy takes, by ours, and by a number where there is none.
    factors: dict[str | int, str] = {}

    def mapping(names: Sequence[str | None]) -> Any:
        return ArrayMapping(
            *(
                factors.setdefault(len(factors) if name is None else name, f"f{len(factors)}")
                for name in names
            )
        )

    rule = SdyShardingRule(
        tuple(map(mapping, operands)),
        tuple(map(mapping, results)),
        need_replication_factors=tuple(f for k, f in factors.items() if isinstance(k, int)),
    )
    return _sharding_rules.sdy_sharding_rule_to_mlir(rule, list(operand_types), list(result_types))


def on_explicit_axes(ctx: Any, value: Any, aval: Any) -> Any:
    """A value of a lowering that lies on the mesh's explicit axes as its type says.

    JAX's own operations say it of each of their results (0.8.0 to 0.12).
    """
    return _mlir.lower_with_sharding_in_types(ctx, value, aval)


def has_shardy() -> bool:
    """Whether Shardy partitions programs; XLA's older partitioner knows no rules of ours."""
    return bool(getattr(jax.config, "jax_use_shardy_partitioner", True))

# SPDX-License-Identifier: Apache-2.0
"""Memory of others on several devices as one array: `sharded`."""

import dataclasses
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.sharding import Sharding


@dataclasses.dataclass(frozen=True, eq=False)
class Sharded:
    """Made by `sharded`; `from_external`, `ref` and `inplace` take it as one array."""

    parts: tuple[Any, ...]
    shape: tuple[int, ...]
    sharding: Sharding

    def placed(self) -> list[tuple[Any, jax.Device]]:
        """Each part, and the device of its shard."""
        return list(zip(self.parts, _devices(self.sharding, self.shape), strict=True))

    def join(self, arrays: Sequence[jax.Array]) -> jax.Array:
        """The array of those of its parts."""
        part = self.sharding.shard_shape(self.shape)
        for i, a in enumerate(arrays):
            if a.shape != part or a.dtype != arrays[0].dtype:
                raise ValueError(
                    f"sharded: part {i} is {a.dtype}{list(a.shape)}; an array of shape "
                    f"{list(self.shape)} has parts of {arrays[0].dtype}{list(part)} with {self.sharding}"
                )
        return jax.make_array_from_single_device_arrays(self.shape, self.sharding, list(arrays))


def sharded(parts: Iterable[Any], shape: int | Sequence[int], sharding: Sharding) -> Sharded:
    """Memory of others on several devices, one array to JAX: for `from_external`, `ref` and `inplace`.

    Args:
        parts: an array of another library for each device of this process, in the order of
            `sharding.addressable_devices_indices_map(shape)`; of shape `sharding.shard_shape(shape)`.
            Where the sharding replicates, each device has a part of its own with the same content.
        shape: of the whole array.
        sharding: how it lies on the devices.

    Raises:
        ValueError: there are more or fewer parts than devices, or the shape cannot be sharded so.
        TypeError: no sequence of parts, no shape of whole numbers, or no sharding.
    """
    if not isinstance(sharding, Sharding):
        raise TypeError(
            f"sharded: sharding={sharding!r}: expected a jax.sharding.Sharding, as "
            f"NamedSharding(mesh, PartitionSpec(...))"
        )
    try:
        # Whole numbers: JAX keeps what it finds for a shape, and finds it again for an equal one.
        extents = tuple(map(operator.index, shape if isinstance(shape, Iterable) else (shape,)))
        given = tuple(parts)
    except TypeError as error:
        raise TypeError(
            f"sharded: expected a sequence of parts, and a shape of whole numbers: {error}"
        ) from None
    if any(n < 0 for n in extents):
        raise ValueError(f"sharded: shape={extents} is not that of an array")
    devices = _devices(sharding, extents)
    if len(given) != len(devices):
        raise ValueError(
            f"sharded: {len(given)} parts for {len(devices)} devices of this process; give one for each, "
            f"in the order {devices}"
        )
    return Sharded(given, extents, sharding)


def _devices(sharding: Sharding, shape: tuple[int, ...]) -> list[jax.Device]:
    return list(sharding.addressable_devices_indices_map(shape))

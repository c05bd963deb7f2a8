# SPDX-License-Identifier: Apache-2.0
"""Calls on arrays that XLA spreads over devices: how its partitioner makes calls on their parts of one.

Such a program has a call to `target`, which no handler has: its text is the call that each device is to
make and which axes go together, and nothing of this process. XLA asks `_partition`, once in a compilation,
what stands in its place.
"""

import dataclasses
import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from . import _compat, _compat_partitioner, _spec
from ._sharding import Axes, Names

target = "jaxbridge.split_call"

# What only the call of each device has.
_of_parts = ("mhlo.backend_config", "output_operand_aliases", "operand_layouts", "result_layouts")


def make_splittable(call: Any, axes: Axes, has_types: bool = False) -> None:
    """Turns an operation, a call of one device, into one that XLA may split along `axes`.

    `has_types`: its text and key are those of a call with arrays of these types alone, and each device's
    will be those of its parts.
    """
    # By position: what a walk over them gives differs between versions.
    attributes = [call.attributes[i] for i in range(len(call.attributes))]
    described: dict[str, Any] = {
        "call": ", ".join(f'"{a.name}" = {a.attr}' for a in attributes),
        "operands": _described(call.operands, axes.operands),
        "results": _described(call.results, axes.results),
    }
    if has_types:
        config = _compat.ir.DictAttr(call.attributes["mhlo.backend_config"])
        key, spec = config["key"], config["spec"]
        described["whole"] = [
            _compat.ir.IntegerAttr(key).value,
            _compat.ir.StringAttr(spec).value,
        ]
        described["call"] = (
            described["call"]
            .replace(f"key = {key}", f"key = {_key_of_part}")
            .replace(f"spec = {spec}", f"spec = {_spec_of_part}")
        )
    text = json.dumps(described)
    for name in _of_parts:
        if name in call.attributes:
            del call.attributes[name]
    call.attributes["call_target_name"] = _compat.ir.StringAttr.get(target)
    call.attributes["backend_config"] = _compat.ir.StringAttr.get(text)
    # A status, and the text as it stands.
    call.attributes["api_version"] = _compat.ir.IntegerAttr.get(
        _compat.ir.IntegerType.get_signless(32), 2
    )
    call.attributes["sdy.sharding_rule"] = _compat_partitioner.sharding_rule(
        axes.operands,
        axes.results,
        [x.type for x in call.operands],
        [x.type for x in call.results],
    )


def _described(values: Any, names: Names) -> list[Any]:
    return [
        {"type": str(_compat.ir.RankedTensorType(v.type).element_type), "axes": n}
        for v, n in zip(values, names, strict=True)
    ]


def _partition(
    shapes: Sequence[Sequence[int]], tiles: Sequence[_compat_partitioner.Tiles | None], text: str
) -> tuple[str, list[_compat_partitioner.Tiles | None]]:
    """What XLA's partitioner is to put in the place of a call.

    Args:
        shapes: of the operands, then of the results.
        tiles: how XLA would have each of them.
        text: what `make_splittable` wrote.

    Returns:
        A program for one device, on its parts; and how the arrays have to lie for it.
    """
    call = json.loads(text)
    arrays = [*call["operands"], *call["results"]]
    names = [array["axes"] for array in arrays]
    # Every axis that may be split is one of each result, and those of one array are split together: the
    # one that is split most, a result before an operand, decides.
    mesh = max(
        (_Mesh.of(*array) for array in reversed(list(zip(names, shapes, tiles, strict=True)))),
        key=lambda m: math.prod(m.parts.values()),
    )
    parts = [
        [n // mesh.parts.get(name, 1) for n, name in zip(s, of, strict=True)]
        for of, s in zip(names, shapes, strict=True)
    ]
    types = [
        f"tensor<{''.join(f'{n}x' for n in part)}{array['type']}>"
        for array, part in zip(arrays, parts, strict=True)
    ]
    count = len(call["operands"])
    program = _program(call["call"], types[:count], types[count:])
    if "whole" in call:
        key, spec = call["whole"]
        program = _with_parts(program, key, spec, parts[:count], parts[count:])
    return program, [mesh.tiles_of(n) for n in names]


# What stands for them in a call's attributes, of which nothing else is the user's.
_key_of_part, _spec_of_part = "\\key", "\\spec"


def _with_parts(
    program: str, key: int, spec: str, operands: Sequence[Any], results: Sequence[Any]
) -> str:
    """The call on parts of these shapes, for that on whole arrays, whose key and text are given."""
    of = [
        [[dtype, shape] for (dtype, _), shape in zip(whole, shapes, strict=True)]
        for whole, shapes in zip(json.loads(spec)["types"], (operands, results), strict=True)
    ]
    text = _spec.of_part(spec, key, (of[0], of[1]))
    return program.replace(_key_of_part, f"{_spec.key_of(text)} : i64").replace(
        _spec_of_part, _quoted(text)
    )


def _quoted(text: str) -> str:
    """A string as MLIR reads it."""
    plain = (
        chr(b) if 0x20 <= b < 0x7F and b not in b'"\\' else f"\\{b:02X}" for b in text.encode()
    )
    return f'"{"".join(plain)}"'


@dataclasses.dataclass(frozen=True)
class _Mesh:
    """Devices, in an axis for each name that is split, and a last one for those that have equal parts."""

    parts: dict[str, int]
    devices: np.ndarray[Any, Any] | None  # None where nothing is split

    @classmethod
    def of(
        cls,
        names: Sequence[str | None],
        shape: Sequence[int],
        tiles: _compat_partitioner.Tiles | None,
    ) -> "_Mesh":
        """What the tiles of one array say. XLA would pad what does not divide: that stays whole."""
        if tiles is None:
            return cls({}, None)
        split = [
            i
            for i, (name, n, count) in enumerate(zip(names, shape, tiles.shape[:-1], strict=True))
            if name is not None and count > 1 and n % count == 0
        ]
        if not split:
            return cls({}, None)
        others = [i for i in range(tiles.ndim) if i not in split]
        counts = [tiles.shape[i] for i in split]
        devices = tiles.transpose(split + others).reshape(*counts, -1)
        return cls(dict(zip([names[i] or "" for i in split], counts, strict=True)), devices)

    def tiles_of(self, names: Sequence[str | None]) -> _compat_partitioner.Tiles | None:
        """How an array with axes of these names lies."""
        if self.devices is None:
            return None
        order = list(self.parts)
        own = [order.index(name) for name in names if name in self.parts]
        others = [i for i in range(self.devices.ndim) if i not in own]
        counts = [self.parts.get(name or "", 1) for name in names]
        return self.devices.transpose(own + others).reshape(*counts, -1)


def _program(attributes: str, operands: Sequence[str], results: Sequence[str]) -> str:
    arguments = [f"%arg{i}" for i in range(len(operands))]
    outs = [f"%call#{i}" for i in range(len(results))]
    signature = ", ".join(f"{a}: {t}" for a, t in zip(arguments, operands, strict=True))
    return f"""
module {{
  func.func public @main({signature}) -> ({", ".join(results)}) {{
    %call:{len(results)} = "stablehlo.custom_call"({", ".join(arguments)}) {{{attributes}}}
        : ({", ".join(operands)}) -> ({", ".join(results)})
    return {", ".join(outs)} : {", ".join(results)}
  }}
}}
"""


_compat_partitioner.register_partitioner(target, _partition)

# SPDX-License-Identifier: Apache-2.0
"""For tests of programs that call external functions: what they call on a platform that is not here.

`<jaxbridge/testing.hpp>` is the other half: it calls an exported C++ function without XLA.
"""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax

from ._options import platforms


class ExternalCall(NamedTuple):
    """One custom call of a program.

    Attributes:
        name: of the Function; for a target that is not jaxbridge's the target.
        target: the name that XLA knows what it calls by.
        operands: the types of the arrays it gets, such as "float32[2,3]".
        results: those of its results, hidden ones (workspaces) last.
        aliases: (operand, result) pairs that are one memory.
        attributes: the static values of a native function, as MLIR has them: a text for each name.
    """

    name: str
    target: str
    operands: tuple[str, ...]
    results: tuple[str, ...]
    aliases: tuple[tuple[int, int], ...]
    attributes: dict[str, str]


def external_calls(
    fun: Callable[..., Any], *args: Any, platform: str = "cuda", **kwargs: Any
) -> list[ExternalCall]:
    """The external calls of `fun`, lowered for a platform: no GPU is needed for "cuda".

    All that is checked while a program is traced and lowered is checked for that platform: dtypes, ranks
    and static values, shapes of results, whether there is a function for it.

    Args:
        fun: a function, or one that is jitted.
        args: its arguments; `jax.ShapeDtypeStruct` will do for an array.
        platform: "cpu" or "cuda".
        kwargs: its arguments by keyword.

    Returns:
        In the order of the program. XLA has not seen it yet: what it drops or merges is still there.
    """
    if platform not in platforms:
        raise ValueError(f"external_calls: platform is {platform!r}; expected 'cpu' or 'cuda'")
    jitted: Any = fun if hasattr(fun, "trace") else jax.jit(fun)
    lowered = jitted.trace(*args, **kwargs).lower(lowering_platforms=(platform,))
    module = lowered.compiler_ir("stablehlo")
    return [_call_of(op) for op in _operations(module.operation) if _is_call(op)]


def _operations(op: Any) -> Iterator[Any]:
    for region in op.regions:
        for block in region:
            for inner in block:
                yield inner.operation
                yield from _operations(inner.operation)


# What the partitioners leave in programs.
_marks = ("Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape", "xla.sdy.")


def _is_call(op: Any) -> bool:
    return op.name == "stablehlo.custom_call" and not _target_of(op).startswith(_marks)


def _target_of(op: Any) -> str:
    return str(op.attributes["call_target_name"].value)


def _call_of(op: Any) -> ExternalCall:
    target = _target_of(op)
    attributes = {}
    if "mhlo.backend_config" in op.attributes:
        config = op.attributes["mhlo.backend_config"]
        attributes = {entry.name: entry.attr for entry in config}
    name = target
    if target.startswith("jaxbridge.call"):
        name = json.loads(attributes["spec"].value)["name"]
        attributes = {}
    elif target.startswith("jaxbridge.native."):
        library, _, function = target.removeprefix("jaxbridge.native.").rsplit(".", 2)
        name = f"{library}.{function}"
    aliases = ""
    if "output_operand_aliases" in op.attributes:
        aliases = str(op.attributes["output_operand_aliases"])
    return ExternalCall(
        name,
        target,
        tuple(_type_of(x) for x in op.operands),
        tuple(_type_of(x) for x in op.results),
        tuple(
            (int(operand), int(result or 0))
            for result, operand in re.findall(
                r"output_tuple_indices = \[(\d*)\], operand_index = (\d+)", aliases
            )
        ),
        {key: str(value) for key, value in attributes.items()},
    )


_names = {
    "i1": "bool",
    **{f"i{n}": f"int{n}" for n in (2, 4, 8, 16, 32, 64)},
    **{f"ui{n}": f"uint{n}" for n in (2, 4, 8, 16, 32, 64)},
    **{f"f{n}": f"float{n}" for n in (16, 32, 64)},
    "bf16": "bfloat16",
    "complex<f32>": "complex64",
    "complex<f64>": "complex128",
}


def _type_of(value: Any) -> str:
    found = re.fullmatch(r"tensor<((?:[\d?]+x)*)([^,]+)(,.*)?>", str(value.type))
    if found is None:
        return str(value.type)
    return f"{_names.get(found[2], found[2])}[{found[1].rstrip('x').replace('x', ',')}]"

# SPDX-License-Identifier: Apache-2.0
"""The end of a program that updates memory of others: on CUDA, the news that it is enqueued."""

from typing import Any

from jax.interpreters import mlir

from . import _compat, _lowering

enqueued_p = _compat.Primitive("jaxbridge_enqueued")
enqueued_p.multiple_results = True
enqueued_p.def_abstract_eval(lambda *operands, count: [*operands[:count]])

mlir.register_lowering(enqueued_p, lambda ctx, *operands, count: operands[:count])
mlir.register_lowering(enqueued_p, _lowering.lower_enqueued, platform="cuda")


def enqueued(updated: list[Any], others: list[Any]) -> list[Any]:
    """The new values of memory, where they are, whose end is told to `_core.end_update`.

    Args:
        updated: the new values.
        others: what else is to be enqueued, and not to have failed, before that is told.
    """
    return list(enqueued_p.bind(*updated, *others, count=len(updated)))

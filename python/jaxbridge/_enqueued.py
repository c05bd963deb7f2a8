# SPDX-License-Identifier: Apache-2.0
"""The end of a program that updates memory of others: on CUDA, the news that it is enqueued."""

from typing import Any

from jax.extend.core import Primitive
from jax.interpreters import mlir

from . import _lowering

enqueued_p = Primitive("jaxbridge_enqueued")
enqueued_p.multiple_results = True
enqueued_p.def_abstract_eval(lambda *results: [*results])

mlir.register_lowering(enqueued_p, lambda ctx, *results: results)
mlir.register_lowering(enqueued_p, _lowering.lower_enqueued, platform="cuda")


def enqueued(results: list[Any]) -> list[Any]:
    """The results of a program, in the same memory, whose end is told to `_core.end_update`."""
    return list(enqueued_p.bind(*results))

# SPDX-License-Identifier: Apache-2.0
"""The only reader of JAX's version and of its private modules.

Each private need stands here with the versions it was seen on; tests/python/test_compat.py has a test
for each, run on the oldest and the newest JAX.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax._src import core as _core
from jax._src import dispatch as _dispatch
from jax._src import effects as _effects

jax_version: tuple[int, ...] = tuple(
    int(part) for part in jax.__version__.split("+")[0].split(".")[:3] if part.isdigit()
)
oldest_jax: tuple[int, ...] = (0, 8, 0)


def check_version() -> None:
    """Raises ImportError where JAX is older than what is supported."""
    if jax_version < oldest_jax:
        need = ".".join(map(str, oldest_jax))
        raise ImportError(
            f"jaxbridge needs JAX {need} or later, this is {jax.__version__}; "
            f'run: pip install -U "jax>={need}"'
        )


class CallEffect(_effects.Effect):  # type: ignore[misc]
    """An external function does something that its results don't show. Unordered, as JAX's FFI has it.

    JAX has no public registration of effects (0.8.0 to 0.12).
    """

    def __str__(self) -> str:
        return "jaxbridge.call"


call_effect = CallEffect()
for _allowed in (
    "lowerable_effects",
    "control_flow_allowed_effects",
    "remat_allowed_effects",
    "custom_derivatives_allowed_effects",
    "partial_eval_kept_effects",
):
    getattr(_effects, _allowed).add_type(CallEffect)


def union_manual_axes(operands: Sequence[Any]) -> Sequence[Any]:
    """Brings all operands to the union of their varying manual axes, as JAX's own operations do.

    `standard_insert_pvary` became `auto_insert_reshard` in 0.9. There is no public form.
    """
    private: Any = _core
    insert = getattr(private, "auto_insert_reshard", None) or private.standard_insert_pvary
    return insert(*operands)


def result_aval(shape: tuple[int, ...], dtype: Any, operands: Sequence[Any]) -> Any:
    """The abstract value of a result that depends on `operands` (abstract values).

    It is made from an operand's, so that it carries its manual axis type (`.vma`, later `.mat`):
    without it shard_map gives wrong gradients, silently on 0.8.0.
    """
    base = next((a for a in operands if isinstance(a, _core.ShapedArray)), None)
    if base is None:
        aval = _core.ShapedArray(shape, dtype)
        return aval.update(sharding=_core.get_cur_mesh_sharding())
    return base.update(
        shape=shape, dtype=dtype, weak_type=False, sharding=_core.get_cur_mesh_sharding()
    )


def is_concrete_ref(x: Any) -> bool:
    """Whether `x` is a Ref that exists, rather than one that is being traced."""
    return isinstance(x, jax.ref.Ref) and not isinstance(x, jax.core.Tracer)


def is_ref(x: Any) -> bool:
    """Whether `x` is a `jax.Ref`, traced or not."""
    if isinstance(x, jax.ref.Ref):
        return True
    return isinstance(x, jax.core.Tracer) and isinstance(jax.typeof(x), jax.ref.AbstractRef)


def ref_value_aval(x: Any) -> Any:
    """The abstract value of what a Ref holds."""
    return jax.typeof(x).inner_aval


def is_key_array(x: Any) -> bool:
    """Whether `x` is an array of typed PRNG keys, which have no plain memory."""
    dtype: Any = getattr(x, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.extended)


@functools.cache
def local_platforms() -> frozenset[str]:
    """The platforms that this process has devices of: "cpu", "cuda"."""
    from jax.extend import backend

    return frozenset(backend.backends())


def lowering_platforms(ctx: Any) -> tuple[str, ...]:
    """The platforms that a lowering rule is asked for."""
    return tuple(getattr(ctx, "platforms", None) or ctx.module_context.platforms)


def lowering_for_export(ctx: Any) -> bool:
    """Whether a lowering is on the way to `jax.export`."""
    return bool(ctx.module_context.lowering_parameters.for_export)


def forget_failed_effects() -> None:
    """Waits for calls with side effects, and forgets those that failed: they were reported.

    JAX would raise their errors again at the next barrier and at exit. It has no public way to clear
    its tokens (0.8.0 to 0.12).
    """
    try:
        jax.effects_barrier()
    except (jax.errors.JaxRuntimeError, ExceptionGroup):
        _dispatch.runtime_tokens.clear()


def dtype_table(names: Sequence[str]) -> dict[str, Any]:
    """From the names of XLA's element types to dtype objects, where NumPy and ml_dtypes have them."""
    table: dict[str, Any] = {}
    for name in names:
        if (scalar := getattr(np, name, None) or getattr(ml_dtypes, name, None)) is not None:
            table[name] = np.dtype(scalar)
    return table

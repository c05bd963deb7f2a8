# SPDX-License-Identifier: Apache-2.0
"""From primitives to custom calls: the only user of jax.ffi."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from . import _adapters, _compat, _core, _plan
from ._errors import PlatformError

if TYPE_CHECKING:
    from ._call_site import CallSite

# Two targets, since whether XLA may capture a call is a property of the handler.
_target = "jaxbridge.call"
_target_capturable = "jaxbridge.call_capturable"
_target_fence = "jaxbridge.fence"


def register_handlers() -> None:
    """Gives XLA our handlers, for each platform. They wait until its backend is there."""
    for name, platform, capsule in _core.handlers():
        jax.ffi.register_ffi_target(name, capsule, platform=platform, api_version=1)


def _check_handlers() -> None:
    # A runtime asks what a handler is when it takes it. One that did not ask speaks another protocol,
    # and on CUDA it says nothing about that.
    if _core.ffi_versions()[1] < 0:
        raise RuntimeError(
            f"this jaxlib (JAX {jax.__version__}) did not accept jaxbridge's FFI handlers; "
            f"python -m jaxbridge shows the versions"
        )


def export_checks() -> list[jax.export.DisabledSafetyCheck]:
    """What `jax.export.export(..., disabled_checks=...)` needs to let external calls through."""
    return [
        jax.export.DisabledSafetyCheck.custom_call(name) for name in (_target, _target_capturable)
    ]


def lower_call(ctx: Any, *operands: Any, site: "CallSite", results: tuple[Any, ...]) -> Any:
    """The lowering rule, on every platform."""
    _check_handlers()
    for platform in _compat.lowering_platforms(ctx):
        _check_platform(site, platform, ctx)
    if site.external and _devices(site, ctx) > 1:
        raise NotImplementedError(
            f"{site.name}: an argument is a Ref of another library's memory, and this program is of "
            f"several devices: call it inside jax.shard_map, where each device has its own part"
        )
    is_export = _compat.lowering_for_export(ctx)
    if not site.durable and is_export:
        raise NotImplementedError(
            f"{site.name}: a static argument (`self` of a method is one) has no text that another "
            f"process could read: pass numbers, strings and tuples of them, or arrays"
            if site.callee.is_durable
            else f"{site.name}: an anonymous function cannot be exported, since no other process could "
            f'find it; give it a name: call(fn, ..., name="..."), or define it at the top level of a '
            f"module"
        )
    if site.has_side_effect and (devices := _devices(site, ctx)) > 1:
        bind = functools.partial(ctx.primitive.bind, site=site, results=results)
        return _compat.lower_traced(ctx, _once(bind, results, devices), operands)
    hold = site.hold()
    # Graphs that XLA captures work on memory of the registration's, also after clear().
    if (not hold.is_durable or site.options.graph == "xla") and not is_export:
        _compat.keep_alive(ctx, hold, site.name)
    key = hold.registration.key
    if is_export and key != site.key:
        # Who runs an exported program looks the function up by what it is.
        raise NotImplementedError(
            f"{site.name}: a function that is told by the same name and content is in use in this "
            f"process (a module was loaded again, or a class defined again), and an exported program "
            f'could not tell them apart; give this one a name of its own: call(fn, ..., name="...")'
        )
    rule = jax.ffi.ffi_lowering(
        _target_capturable if site.options.graph == "xla" else _target,
        operand_output_aliases=dict(site.in_place),
        has_side_effect=site.has_side_effect,
    )
    return rule(ctx, *operands, key=np.int64(key), spec=site.text)


def lower_fence(ctx: Any, *operands: Any) -> Any:
    """The lowering rule of fences, on CUDA."""
    _check_handlers()
    rule = jax.ffi.ffi_lowering(
        _target_fence,
        operand_output_aliases={i: i for i in range(len(operands))},
        # For XLA alone: JAX's own effects would cost its fast dispatch.
        has_side_effect=True,
    )
    return rule(ctx, *operands)


def _devices(site: "CallSite", ctx: Any) -> int:
    try:
        return _compat.devices_of_whole_arrays(ctx)
    except NotImplementedError as error:
        raise NotImplementedError(
            f"{site.name}: a call with a side effect, or on a Ref of another library's memory, needs all "
            f"axes of the mesh to be manual inside shard_map: leave out axis_names="
        ) from error


def _once(
    bind: Callable[..., Any], results: tuple[Any, ...], devices: int
) -> Callable[..., list[Any]]:
    """The call of `bind`, made by the first of several devices for all of them.

    XLA has no other form for a call with a side effect: for JAX's own callbacks it knows one, by name.
    """
    # The mesh of the program where it has one of its own: JAX allows no other then.
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.size != devices or mesh.empty:
        mesh = jax.sharding.AbstractMesh((devices,), ("devices",))
    axes = mesh.axis_names

    def on_each(*operands: Any) -> tuple[list[Any], Any]:
        def nothing(*_: Any) -> list[Any]:
            return [jnp.zeros(shape, dtype) for shape, dtype in results]

        is_first = jax.lax.axis_index(axes) == 0
        outs = jax.lax.cond(is_first, bind, nothing, *operands)
        # Not a sum: that would change a negative zero, and booleans. XLA loses what has no result.
        return [jax.lax.all_gather(out, axes)[0] for out in outs], is_first

    mapped = jax.shard_map(
        on_each,
        mesh=mesh,
        in_specs=jax.sharding.PartitionSpec(),
        out_specs=jax.sharding.PartitionSpec(),
        check_vma=False,
    )
    return lambda *operands: mapped(*operands)[0]


def _check_platform(site: "CallSite", platform: str, ctx: Any) -> None:
    if platform not in ("cpu", "cuda"):
        raise PlatformError(
            f"{site.name}: jaxbridge runs on cpu and cuda, not on {platform}; put the call on the CPU "
            f'with jax.default_device(jax.devices("cpu")[0])'
        )
    site.function_on(platform)
    framework = site.framework_on(platform)
    if platform not in _compat.local_platforms():
        return  # another machine runs it: what is installed here does not count
    at = "cpu" if platform == "cuda" and framework == "numpy" else platform
    adapter = _adapters.get(framework)
    for aval in (*ctx.avals_in, *ctx.avals_out):
        _plan.check_array(site.name, adapter, aval.dtype, len(aval.shape), at)

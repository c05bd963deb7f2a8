# SPDX-License-Identifier: Apache-2.0
"""From primitives to custom calls: the only user of jax.ffi."""

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from . import _compat, _compat_partitioner, _config, _core, _partitioning, _sharding
from ._errors import PlatformError

if TYPE_CHECKING:
    from ._call_site import CallSite

# Two targets, since whether XLA may capture a call is a property of the handler.
_target = "jaxbridge.call"
_target_capturable = "jaxbridge.call_capturable"
_target_enqueued = "jaxbridge.enqueued"
_target_check = "jaxbridge.check_external"


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
    """What `jax.export.export(..., disabled_checks=...)` needs to let external calls through.

    Native functions have targets of their own: call it when their libraries are loaded.
    """
    return [
        jax.export.DisabledSafetyCheck.custom_call(name)
        for name in (_target, _target_capturable, _partitioning.target, *sorted(_own_targets))
    ]


def lower_call(ctx: Any, *operands: Any, site: "CallSite", results: tuple[Any, ...]) -> Any:
    """The lowering rule, on every platform."""
    _check_handlers()
    for platform in _compat.lowering_platforms(ctx):
        _check_platform(site, platform, ctx)
    devices = _compat.devices_of_whole_arrays(ctx)
    axes = _axes_to_split(ctx, site) if devices > 1 else None
    if site.external and devices > 1 and axes is None:
        # A whole array would be a copy.
        raise NotImplementedError(
            f"{site.name}: an argument is a Ref of another library's memory, and this program is of "
            f"several devices: say how the call is split (elementwise=True, defsharding), or call it "
            f"inside jax.shard_map, where each device has its own part"
        )
    is_export = _compat.lowering_for_export(ctx)
    if not site.durable and is_export:
        raise NotImplementedError(
            f"{site.name}: a static argument (`self` of a method is one) has no text that another "
            f"process could read: pass numbers, strings and tuples of them, or arrays"
            if site.callee.is_durable
            else f"{site.name}: an anonymous function cannot be exported, since no other process could "
            f"find it; give it a name: {site.callee.how_named}"
        )
    if site.has_side_effect and devices > 1:
        if _compat.in_shard_map(ctx):
            raise NotImplementedError(
                f"{site.name}: a call with a side effect needs all axes of the mesh to be manual inside "
                f"shard_map: leave out axis_names="
            )
        bind = functools.partial(ctx.primitive.bind, site=site, results=results)
        return _compat.lower_traced(ctx, _once(bind, results, devices), operands)
    own = site.callee.ffi_target(site, ctx.avals_in, ctx.avals_out)
    if own is None:
        served = site.callee.site_for(site, ctx.avals_in, ctx.avals_out)
        outs = _lower_to_ours(ctx, operands, served, is_export)
        takes_parts, has_types = True, served.types is not None
    else:
        # An exported program has no checks: it is not of this process alone.
        inspects = _config.debug and own.is_inspectable and not is_export
        outs = (
            _lower_to_ours(ctx, operands, site, is_export, own)
            if inspects
            else _lower_to(own, ctx, operands, site)
        )
        # The size of a workspace is that of the whole arrays' call.
        takes_parts, has_types = not own.hidden, False
    if axes is None:
        return outs
    if takes_parts:
        _partitioning.make_splittable(outs[0].owner, axes, has_types)
    return [
        _compat_partitioner.on_explicit_axes(ctx, out, aval)
        for out, aval in zip(outs, ctx.avals_out, strict=True)
    ]


def _axes_to_split(ctx: Any, site: "CallSite") -> _sharding.Axes | None:
    """Along which axes a call on arrays over devices may be split; None: it is on whole arrays."""
    if not _compat_partitioner.has_shardy():
        return None
    shapes = [[aval.shape for aval in avals] for avals in (ctx.avals_in, ctx.avals_out)]
    return _sharding.splittable(site, *shapes)


def _lower_to_ours(
    ctx: Any, operands: Any, site: "CallSite", is_export: bool, own: "FfiTarget | None" = None
) -> Any:
    """The call of the target that a key stands for, which may call a handler of the function's own."""
    hold = site.hold()
    if not is_export:
        # The process may give up what it holds of a durable call: the program still means this function,
        # and graphs that XLA has captured work on memory of the registration's.
        _compat.keep_alive(ctx, hold, in_runs=not hold.is_durable)
    key = hold.registration.key
    if is_export and key != site.key:
        # Who runs an exported program looks the function up by what it is.
        raise NotImplementedError(
            f"{site.name}: a function that is told by the same name and content is in use in this "
            f"process (a module was loaded again, or a class defined again), and an exported program "
            f'could not tell them apart; give this one a name of its own: call(fn, ..., name="...")'
        )
    # What is captured once cannot be checked at each call.
    is_capturable = site.callee.is_capturable(site) and not _config.debug
    attributes: dict[str, Any] = {"key": np.int64(key), "spec": site.text}
    if own is not None:
        attributes["attributes"] = own.ffi_attributes()
    return _call(
        _target_capturable if is_capturable else _target,
        ctx,
        operands,
        site,
        attributes,
        () if own is None else own.hidden,
    )


def _call(
    target: str,
    ctx: Any,
    operands: Any,
    site: "CallSite",
    attributes: dict[str, Any],
    hidden: "Hidden",
) -> Any:
    """The custom call, and of its results those that the caller gets."""
    rule = jax.ffi.ffi_lowering(
        target,
        operand_output_aliases=dict(site.in_place),
        has_side_effect=site.has_side_effect,
    )
    behind = [_compat.result_aval(shape, dtype, ctx.avals_in) for shape, dtype in hidden]
    own = ctx.replace(avals_out=[*ctx.avals_out, *behind])
    return rule(own, *operands, **attributes)[: len(ctx.avals_out)]


Hidden = tuple[tuple[tuple[int, ...], Any], ...]


class FfiTarget(NamedTuple):
    """A handler that XLA calls for a Function by itself.

    Attributes:
        name: under which it is registered.
        attributes: as `jax.ffi` takes them.
        hidden: the types (shape, dtype) of results behind those that the caller gets.
        is_inspectable: whether the callee makes a target, too, which calls it and inspects the call: for
            debug mode.
    """

    name: str
    attributes: dict[str, Any]
    hidden: Hidden = ()
    is_inspectable: bool = False

    def ffi_attributes(self) -> dict[str, Any]:
        return {k: _compat.ffi_attribute(v) for k, v in self.attributes.items()}


def register_target(name: str, platform: str, handlers: dict[str, Any]) -> None:
    """Gives XLA a handler of somebody else's: a capsule for each stage ("execute", "initialize")."""
    handler = handlers["execute"] if len(handlers) == 1 else handlers
    where = {"cpu": "cpu", "cuda": "CUDA"}[platform]
    jax.ffi.register_ffi_target(name, handler, platform=where, api_version=1)
    _own_targets.add(name)


_own_targets: set[str] = set()


def _lower_to(target: FfiTarget, ctx: Any, operands: Any, site: "CallSite") -> Any:
    """The call of a handler of the function's own: nothing of ours is between XLA and it."""
    _own_targets.add(target.name)
    if site.external:
        operands = _check_external(ctx, operands, site)
    return _call(target.name, ctx, operands, site, target.ffi_attributes(), target.hidden)


def _check_external(ctx: Any, operands: Sequence[Any], site: "CallSite") -> list[Any]:
    """The operands, those that are memory of others behind a call that checks it.

    A function of ours is checked in its own call (core/dispatch/in_place).
    """
    updated = {operand for operand, _ in site.in_place}
    # The others that are read can be the same memory, imported once more.
    checked = [*site.external, *(i for i in range(len(operands)) if i not in updated)]
    rule = jax.ffi.ffi_lowering(
        _target_check, operand_output_aliases={k: k for k in range(len(site.external))}
    )
    avals = [ctx.avals_in[i] for i in checked]
    own = ctx.replace(avals_in=avals, avals_out=avals[: len(site.external)])
    names = site.callee.operand_names(site)
    same = rule(
        own,
        *(operands[i] for i in checked),
        key=np.int64(0),
        spec="\n".join(names[i] for i in checked),
    )
    out = list(operands)
    for i, operand in zip(site.external, same, strict=True):
        out[i] = operand
    return out


def lower_enqueued(ctx: Any, *operands: Any, count: int) -> Any:
    """The lowering rule, on CUDA, of the end of programs that update memory of others."""
    _check_handlers()
    in_place = {i: i for i in range(count)}
    return jax.ffi.ffi_lowering(_target_enqueued, operand_output_aliases=in_place)(ctx, *operands)


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
    site.callee.check_arrays(platform, ctx.avals_in, ctx.avals_out)

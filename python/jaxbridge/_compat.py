# SPDX-License-Identifier: Apache-2.0
"""The only reader of JAX's version and, with `_compat_partitioner`, of its private modules.

Each private need stands here with the versions it was seen on; tests/python/test_compat.py has a test
for each, run on the oldest and the newest JAX.
"""

import contextlib
import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import ad_util as _ad_util
from jax._src import array as _array
from jax._src import callback as _callback
from jax._src import config as _jax_config
from jax._src import core as _jax_core
from jax._src import dispatch as _dispatch
from jax._src import effects as _effects
from jax._src import sharding_impls as _sharding_impls
from jax._src import util as _util
from jax._src import xla_bridge as _xla_bridge
from jax._src.interpreters import mlir as _mlir
from jax._src.lib import _jax as _jax_lib
from jax._src.lib.mlir import ir as _ir
from jax._src.state import types as _state_types

T = TypeVar("T")

# Untyped: each JAX has other names in it.
_config: Any = _jax_config
_core: Any = _jax_core
_jaxlib: Any = _jax_lib

jax_version: tuple[int, ...] = tuple(
    int(part) for part in jax.__version__.split("+")[0].split(".")[:3] if part.isdigit()
)
oldest_jax: tuple[int, ...] = (0, 8, 0)
# Of all arrays that have memory: `isinstance(x, jax.Array)`, true of tracers too, takes five times as long.
array_type: Any = _array.ArrayImpl
# Public in jax.extend, whose import brings Pallas and takes as long as the rest of ours (0.11, 0.12); and
# with Pallas come settings that are part of what JAX knows traced programs by: all are traced again.
Primitive: Any = _core.Primitive
ir: Any = _ir


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

    JAX has no public registration of effects (0.8.0 to 0.12). It compares equal to the effect of
    JAX's own unordered callbacks, for which the rules of vmap look by name: a loop or a branch whose
    predicate is batched would make the call for elements that have left it, and is an error.
    """

    def __str__(self) -> str:
        return "jaxbridge.call"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (CallEffect, _callback.IOEffect))

    def __hash__(self) -> int:
        return hash(_callback._IOEffect)


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

    `standard_insert_pvary` (0.8, 0.9) became `auto_insert_reshard` (0.10). There is no public form.
    """
    insert = getattr(_core, "auto_insert_reshard", None) or _core.standard_insert_pvary
    return insert(*operands)


def explicit_spec(aval: Any) -> tuple[Any, ...]:
    """For each axis of an array the explicit axes of the mesh over which it is split, or None."""
    if aval.sharding is None:
        return ()
    spec = aval.sharding.spec
    # Later ones refuse to be a tuple where sums are yet to be made (0.12).
    return tuple(getattr(spec, "partitions", None) or spec)


def as_on_explicit_axes(x: Any, aval: Any) -> Any:
    """`x` as `aval` lies on explicit axes, if each device has the whole of it: nothing is moved."""
    spec = explicit_spec(aval)
    if not any(spec) or any(explicit_spec(jax.typeof(x))):
        return x
    return jax.sharding.reshard(x, jax.sharding.PartitionSpec(*spec))


def result_aval(
    shape: tuple[int, ...], dtype: Any, operands: Sequence[Any], spec: Sequence[Any] = ()
) -> Any:
    """The abstract value of a result that depends on `operands` (abstract values).

    It varies over the manual axes that they vary over: without that shard_map gives wrong gradients,
    silently on 0.8.0. On explicit axes it lies as `spec` says: without it, whole. Nothing else of theirs
    is the result's: not their memory space or layout (0.12).

    Raises:
        TypeError: an operand is a sum that is yet to be made over devices.
    """
    arrays = [a for a in operands if isinstance(a, _core.ShapedArray)]
    for a in arrays:
        if axes := _unreduced_manual_axes(a):
            raise TypeError(
                f"an external function cannot take {a}, which is yet to be summed over "
                f"{', '.join(sorted(map(str, axes)))}; sum it first with jax.lax.psum"
            )
    sharding = _core.get_cur_mesh_sharding()
    if any(spec):  # on the operands' mesh, where none is set
        meshes = [sharding.mesh, *(a.sharding.mesh for a in arrays)]
        mesh = next(m for m in meshes if not m.empty)
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
    if not hasattr(_core, "ManualAxisType"):  # 0.8, 0.9
        varying = frozenset[Any]().union(*(a.vma for a in arrays))
        return _core.ShapedArray(shape, dtype, sharding=sharding, vma=varying)
    varying = frozenset[Any]().union(*(a.mat.varying for a in arrays))
    manual_axis_type = _core.ManualAxisType(varying=varying)
    return _core.ShapedArray(shape, dtype, sharding=sharding, manual_axis_type=manual_axis_type)


def _unreduced_manual_axes(aval: Any) -> frozenset[Any]:
    # Outside shard_map XLA makes the sum: the call's operands are whole arrays there.
    if hasattr(aval, "mat"):
        return frozenset(aval.mat.unreduced)
    sharding = aval.sharding
    return frozenset(sharding.spec.unreduced if sharding.mesh.are_all_axes_manual else ())


def is_concrete_ref(x: Any) -> bool:
    """Whether `x` is a Ref that exists, rather than one that is being traced."""
    return isinstance(x, jax.ref.Ref) and not isinstance(x, jax.core.Tracer)


def is_ref(x: Any) -> bool:
    """Whether `x` is a `jax.Ref`, traced or not."""
    return isinstance(x, jax.ref.Ref)  # true of a tracer of one


class ExternalRefType(_state_types.AbstractRef):  # type: ignore[misc]
    """The type of Refs of memory of others: what a program knows of a Ref that is its argument.

    JAX looks types of Refs up by class (0.8.0 to 0.12).
    """

    __slots__ = ()

    def update(self, *args: Any, **kwargs: Any) -> Any:
        new = super().update(*args, **kwargs)
        return ExternalRefType(*(getattr(new, name) for name in _state_types.AbstractRef.__slots__))


for _table in (
    _core.aval_mapping_handlers,
    _core.shard_aval_handlers,
    _core.unshard_aval_handlers,
    _ad_util.aval_zeros_likers,
):
    _table[ExternalRefType] = _table[_state_types.AbstractRef]


def make_external_ref(array: jax.Array, storage: Callable[[Any], Any]) -> Any:
    """A Ref without a copy of `array`, which `storage(type)` holds in `_buf`.

    No public constructor does that (0.8.0 to 0.12). JAX reads `_buf` at each use, and puts the new
    content into the array object that it finds there.
    """
    ref_type = ExternalRefType(jax.typeof(array))
    return jax.ref.Ref(ref_type, storage(ref_type))


def is_external_ref(x: Any) -> bool:
    """Whether `x` is a Ref of memory of others, traced or not."""
    return is_ref(x) and isinstance(jax.typeof(x), ExternalRefType)


def ref_storage(ref: Any) -> Any:
    """What a Ref that exists has its array in."""
    return ref._refs


ref_storage_type: Any = _core.ArrayRefImpl


def is_tracing() -> bool:
    """Whether this thread is inside a transformation of JAX (0.8.0 to 0.12).

    `trace_state_clean` takes three times as long.
    """
    trace = _core.trace_ctx.trace
    return trace is not _core.eval_trace and trace is not None


def is_debugging() -> bool:
    """Whether JAX runs programs op by op, or looks for NaNs or infinities in what they compute.

    The public `jax.config` takes three times as long (0.8.0 to 0.12).
    """
    return bool(_config.disable_jit.value or _config.debug_nans.value or _config.debug_infs.value)


def wait_until_ready(x: Any) -> None:
    """Waits for an array, or for the value of a Ref that exists.

    `jax.block_until_ready` leaves Refs out, and to read one is a program (0.8.0 to 0.12).
    """
    (x if type(x) is array_type else x._refs._buf).block_until_ready()


def ref_value_aval(x: Any) -> Any:
    """The abstract value of what a Ref holds."""
    return jax.typeof(x).inner_aval


def is_typed_literal(x: Any) -> bool:
    """Whether `x` is JAX's form of a Python number, or of a NumPy array, inside a transformation."""
    number = isinstance(x, (int, float, complex)) and hasattr(x, "dtype")
    return number or isinstance(x, _typed_arrays)


def _typed_array_types() -> tuple[Any, ...]:
    try:
        from jax._src.literals import TypedNdArray  # no jax.Array (0.8.0 and later)
    except ImportError:
        return ()
    return (TypedNdArray,)


_typed_arrays = _typed_array_types()


def is_key_array(x: Any) -> bool:
    """Whether `x` is an array of typed PRNG keys, which have no plain memory."""
    dtype: Any = getattr(x, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.extended)


def wait_where_refs_deadlock() -> None:
    """On JAX 0.8: a Ref on the CPU gets its new buffer when that is ready, not before.

    There jaxlib frees the old buffer, which waits for the program that updates it, while it holds the
    GIL. A function that the program calls then waits for the GIL, for ever. jaxlib 0.9.0 mended it.
    """
    if jax_version >= (0, 9):
        return
    array: Any = array_type
    replace = array._replace_with

    def replace_when_ready(self: Any, new: Any) -> None:
        if next(iter(new.devices())).platform == "cpu":
            # The program's own error comes where the value is read, as ever.
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                new.block_until_ready()
        replace(self, new)

    array._replace_with = replace_when_ready


wait_where_refs_deadlock()


@functools.cache
def local_platforms() -> frozenset[str]:
    """The platforms that this process has devices of: "cpu", "cuda"."""
    return frozenset(_xla_bridge.backends())


def has_begun_with_cuda() -> bool:
    """Whether JAX has devices of CUDA by now; starts nothing."""
    return _xla_bridge.backends_are_initialized() and "cuda" in local_platforms()


def lowering_platforms(ctx: Any) -> tuple[str, ...]:
    """The platforms that a lowering rule is asked for."""
    return tuple(ctx.module_context.platforms)


def lowering_for_export(ctx: Any) -> bool:
    """Whether a lowering is on the way to `jax.export`."""
    return bool(ctx.module_context.lowering_parameters.for_export)


def devices_of_whole_arrays(ctx: Any) -> int:
    """Over how many devices XLA spreads arrays: inside shard_map, along the axes that are not manual."""
    axis_context = ctx.module_context.axis_context
    if isinstance(axis_context, _sharding_impls.SPMDAxisContext):
        mesh = axis_context.mesh
        return math.prod(
            n for axis, n in mesh.shape.items() if axis not in axis_context.manual_axes
        )
    # The context of pmap on 0.8, which has one device for each array, has none.
    return getattr(axis_context, "num_devices", 1) or 1


def in_shard_map(ctx: Any) -> bool:
    """Whether a lowering is inside shard_map: some axes of its mesh are manual."""
    axis_context = ctx.module_context.axis_context
    return isinstance(axis_context, _sharding_impls.SPMDAxisContext) and bool(
        axis_context.manual_axes
    )


def lower_traced(ctx: Any, fun: Any, operands: Sequence[Any]) -> Any:
    """Lowers what `fun` does with operands of a lowering, taken for arrays of no mesh."""
    avals = [_core.ShapedArray(a.shape, a.dtype) for a in ctx.avals_in]
    return _mlir.lower_fun(fun, multiple_results=True)(ctx.replace(avals_in=avals), *operands)


def forget_failed_effects() -> None:
    """Waits for calls with side effects, and forgets those that failed: they were reported.

    JAX would raise their errors again at the next barrier and at exit. It has no public way to clear
    its tokens (0.8.0 to 0.12).
    """
    try:
        jax.effects_barrier()
    except (jax.errors.JaxRuntimeError, ExceptionGroup):
        _dispatch.runtime_tokens.clear()


def is_computing() -> bool:
    """Whether an array of this process is not computed yet."""
    for array in (a for p in local_platforms() for a in jax.live_arrays(p)):
        with contextlib.suppress(RuntimeError):  # a deleted array has nothing to wait for
            if not array.is_ready():  # not in the public type (0.8.0 to 0.12)
                return True
    return False


def wait_for_programs(seconds: float) -> None:
    """Waits until the arrays of this process are computed, `seconds` at the most.

    Threads of XLA must be in no program when the process ends: their code goes first (a crash on 0.8.0).
    """
    end = time.monotonic() + seconds  # no wait of JAX's own has a limit, or ends with an interrupt
    while is_computing() and time.monotonic() < end:
        time.sleep(0.001)


class _KeptAlive:
    """A host callback that is never called, for what it holds."""

    def __init__(self, thing: Any) -> None:
        self._thing = thing

    def __call__(self, *_: Any) -> None: ...


def keep_alive(ctx: Any, thing: Any, *, in_runs: bool) -> None:
    """Keeps `thing` as long as the executable that a lowering is for; `in_runs`: as long as that runs.

    An executable that is serialized takes it along.

    A keepalive of JAX's lives as long as the executable's Python object. On the CPU a run can outlive
    that: `jax.jit(lambda x: ...)(x)` gives it up with the lambda, when a long program has just begun.
    A host callback belongs to the executable that XLA runs. This one is never called, but on 0.8
    it keeps the executable out of JAX's compile cache. On CUDA a run has called us before it is
    dispatched, and a host callback would slow dispatch down.
    """
    if in_runs and "cpu" in lowering_platforms(ctx):
        ctx.module_context.add_host_callback(_KeptAlive(thing))
    else:
        ctx.module_context.add_keepalive(thing)


def hold_weakly(kind: type) -> None:
    """Lets JAX's cache of abstract evaluation hold parameters of this type weakly.

    It would keep the last 2048 functions, with all that they captured. A private set (0.8.0 to 0.12).
    """
    _util.weakref_cache_key_types.add(kind)


def bounded_cache(size: int) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """A decorator: the last `size` results are kept, until `jax.clear_caches()`.

    JAX has no public way to take part in that (0.8.0 to 0.12).
    """

    def decorate(function: Callable[..., T]) -> Callable[..., T]:
        cached = functools.lru_cache(size)(function)
        _util.register_cache(cached, str(function))
        return cached

    return decorate


# ---- memory of others, and JAX's for others ------------------------------------------------------


def ffi_attribute(value: Any) -> Any:
    """An attribute for `jax.ffi`, which takes no uint64 that is above what an int64 holds."""
    if isinstance(value, dict):
        return {k: ffi_attribute(v) for k, v in value.items()}
    if isinstance(value, np.uint64) and value > np.iinfo(np.int64).max:
        return _ir.Attribute.parse(f"{value} : ui64")
    return value


_import_parameters: str = _jaxlib.dlpack_managed_tensor_to_buffer.__doc__ or ""
_import_takes_copy = "copy" in _import_parameters  # 0.8.3 and later
_import_takes_kind = "dl_device_type" in _import_parameters  # 0.10 and later
# Pinned memory becomes an array in JAX's pinned_host memory where JAX is told the kind of device.
imports_pinned_memory = _import_takes_kind
_dlpack_pinned = 3


def import_dlpack(
    capsule: Any, device: jax.Device, stream: int | None, kind: int, *, writable: bool
) -> jax.Array:
    """The array of JAX in the memory of a DLPack capsule, which it consumes: never a copy.

    On the CPU only what is imported as `writable` is updated in place where it is donated (0.8.3 and
    later): there jaxlib takes a request for a copy for the owner's leave, and makes none of aligned
    memory. On CUDA all is writable.

    `jax.dlpack.from_dlpack` would call the producer itself, which has no place for checks, and turn
    64-bit data into 32-bit copies; it also takes six times as long. jaxlib 0.8.0 copies on the CPU what
    is not aligned to 64 bytes; later ones refuse it.
    """
    args: tuple[Any, ...] = (capsule, device, stream)
    if _import_takes_kind:
        args += (writable, kind)
    elif _import_takes_copy:
        args += (writable,)
    return _jaxlib.dlpack_managed_tensor_to_buffer(*args)


# Called with an array on one device and `stream=`: a DLPack capsule that keeps the memory, also against
# donation, and for which that stream (1: the legacy default one) waits, or the host (None). The public form
# does the same at three times the cost.
export_dlpack: Any = _jaxlib.buffer_to_dlpack_managed_tensor
# Called with an array on one device that is not deleted: what its `addressable_data(0)` returns, which asks
# first, in Python, whether the array is such a one. None where there is no such method.
data_on_one_device: Any = getattr(array_type, "_fully_replicated_shard", None)


def stream_waits(stream: int, array: jax.Array) -> None:
    """A CUstream waits for an array on one device, as in `export_dlpack`; the host does not."""
    # Here the capsule ends before anything can delete the array.
    _jaxlib.buffer_to_dlpack_managed_tensor(array, stream=1 if stream == 0 else stream)


def import_stream(device: jax.Device) -> int:
    """A CUstream of JAX's: an array that is imported with it waits for what the stream has then."""
    return device.get_stream_for_external_ready_events()


def cuda_device(ordinal: int) -> jax.Device:
    """JAX's device for a CUDA ordinal; in a process of several these are not its ids.

    Raises:
        RuntimeError: JAX has no CUDA backend here, or not that device.
    """
    for device in jax.local_devices(backend="cuda"):
        if device.local_hardware_id == ordinal:
            return device
    raise RuntimeError(f"JAX has no CUDA device {ordinal} in this process")


def ref_array(ref: Any) -> jax.Array:
    """The array that a Ref holds now; the next update replaces what it refers to."""
    return ref._refs._buf


def shards_of(array: jax.Array) -> list[jax.Array]:
    """The arrays on the devices of this process that an array consists of now.

    `addressable_shards` stays what it was, where a Ref's array gets new content, and
    `addressable_data(i)` gives the first one of a replicated array (0.8.0 to 0.12).
    """
    of: Any = array
    return list(of._arrays)

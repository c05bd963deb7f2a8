# SPDX-License-Identifier: Apache-2.0
"""What is measured: named candidates, each with what it needs and how its runs are made.

A feature that comes is measured once a candidate with the name that targets.py uses is here.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental.buffer_callback import buffer_callback

import jaxbridge
import noops
from measuring import SPEC, Counter, Subject, adding, adding_on, eager, empty

PLATFORM = "cuda" if jax.default_backend() in ("gpu", "cuda") else "cpu"

HOW_TO_GET = {
    "g++": "apt-get install g++",
    "cupy": "pip install cupy-cuda13x (or cupy-cuda12x)",
    "torch": "pip install torch",
    "warp": "pip install warp-lang",
    "jax_tvm_ffi": "pip install jax-tvm-ffi",
    "jaxbind": "pip install jaxbind",
}


class Candidate(NamedTuple):
    make: Callable[[], Subject]
    needs: tuple[str, ...]
    platform: str | None

    def missing(self) -> str | None:
        """What is not installed, and how to get it."""
        for need in self.needs:
            if need == "two devices":
                if jax.device_count() < 2:
                    return "there is one device, and it needs two"
                continue
            found = shutil.which(need) if need == "g++" else importlib.util.find_spec(need)
            if not found:
                return f"{need} is missing: {HOW_TO_GET[need]}"
        return None


CANDIDATES: dict[str, Candidate] = {}


def candidate(name: str, *needs: str, on: str | None = None) -> Callable[[Any], Any]:
    """Registers what makes the runs; `on` names the one platform where there are any."""

    def register(make: Callable[[], Subject]) -> Callable[[], Subject]:
        CANDIDATES[name] = Candidate(make, needs, on)
        return make

    return register


def nothing(*args: Any) -> None:
    pass


def counted(call_of: Callable[[Any], Callable[[Any], Any]]) -> Subject:
    """An empty Python function; `call_of(fn)` is the call of it."""
    counter = Counter()
    return empty(call_of(nothing), call_of(counter), lambda: counter.calls)


# ---- the floor ---------------------------------------------------------------------------------


@candidate("native add")
def _() -> Subject:
    return adding(lambda v: jax.lax.optimization_barrier(v + 1))


@candidate("XLA FFI, C++ no-op", "g++")
def _() -> Subject:
    library = noops.xla("CUDA" if PLATFORM == "cuda" else "cpu")
    call = jax.ffi.ffi_call("bench.one_operand", SPEC)
    return empty(call, call, library.calls_made)


@candidate("eager np.add(out=)")
def _() -> Subject:
    a = np.arange(SPEC.size, dtype=np.float32)
    out = np.empty_like(a)
    return eager(lambda: np.add(a, 1, out=out))


@candidate("eager cp.add(out=), host", "cupy", on="cuda")
def _() -> Subject:
    import cupy

    a = cupy.arange(SPEC.size, dtype=np.float32)
    out = cupy.empty_like(a)
    return eager(lambda: cupy.add(a, 1, out=out), cupy.cuda.get_current_stream().synchronize)


@candidate("eager torch.add(out=), host", "torch", on="cuda")
def _() -> Subject:
    import torch

    a = torch.arange(SPEC.size, dtype=torch.float32, device="cuda")
    out = torch.empty_like(a)
    return eager(lambda: torch.add(a, 1, out=out), torch.cuda.synchronize)


# ---- jaxbridge ---------------------------------------------------------------------------------


@candidate("jaxbridge, empty Python")
def _() -> Subject:
    return counted(lambda fn: jaxbridge.call(fn, SPEC, out=-1, framework="buffer"))


@candidate("jaxbridge, empty Python, NumPy views", on="cpu")
def _() -> Subject:
    return counted(lambda fn: jaxbridge.call(fn, SPEC, out=-1))


@candidate("jaxbridge, empty Python, CuPy views", "cupy", on="cuda")
def _() -> Subject:
    return counted(lambda fn: jaxbridge.call(fn, SPEC, out=-1))


@candidate("jaxbridge, np.add(out=)", on="cpu")
def _() -> Subject:
    return adding(jaxbridge.call(lambda v, out: np.add(v, 1, out=out), SPEC, out=-1))


@candidate("jaxbridge, np.add(out=), eager", on="cpu")
def _() -> Subject:
    call = jaxbridge.call(lambda v, out: np.add(v, 1, out=out), SPEC, out=-1)
    x = jax.numpy.arange(SPEC.size, dtype=np.float32)
    np.testing.assert_array_equal(call(x), np.arange(SPEC.size) + 1)
    return eager(lambda: call(x))


def cupy_adds(times: int) -> Callable[[Any, Any], None]:
    import cupy

    def add(v: Any, out: Any) -> None:
        cupy.add(v, 1, out=out)
        for _ in range(times - 1):
            cupy.add(out, 1, out=out)

    return add


def cupy_call(times: int, **options: Any) -> Subject:
    return adding(jaxbridge.call(cupy_adds(times), SPEC, out=-1, **options), times)


def torch_call(**options: Any) -> Subject:
    import torch

    def add(v: Any, out: Any) -> None:
        torch.add(v, 1, out=out)

    return adding(jaxbridge.call(add, SPEC, out=-1, framework="torch", **options))


candidate("jaxbridge, cp.add(out=)", "cupy", on="cuda")(lambda: cupy_call(1))
candidate("jaxbridge, 20 CuPy operations", "cupy", on="cuda")(lambda: cupy_call(20))
candidate("jaxbridge, torch.add(out=)", "torch", on="cuda")(torch_call)

for _name, _need, _call in (
    ("cp.add(out=)", "cupy", lambda: cupy_call(1, graph="replay")),
    ("20 CuPy operations", "cupy", lambda: cupy_call(20, graph="replay")),
    ("torch.add(out=)", "torch", lambda: torch_call(graph="replay")),
):
    candidate(f"jaxbridge, {_name}, replay", _need, on="cuda")(_call)


@candidate("jaxbridge, cp.add in place, replay", "cupy", on="cuda")
def _() -> Subject:
    import cupy

    def add(v: Any) -> None:
        cupy.add(v, 1, out=v)

    return adding(jaxbridge.call(add, SPEC, inout={0: 0}, graph="replay"))


candidate("jaxbridge, cp.add(out=), xla", "cupy", on="cuda")(lambda: cupy_call(1, graph="xla"))


@candidate("jaxbridge, 20 Warp kernels, replay", "warp", on="cuda")
def _() -> Subject:
    work = warp_work(20)
    call = jaxbridge.call(work, SPEC, out=-1, framework="warp", graph="replay")
    return adding(call, 20)


@candidate("jaxbridge, C++ no-op", "g++")
def _() -> Subject:
    call = noops.native().noop
    return empty(call, call, lambda: call.stats()["calls"])


@candidate("jaxbridge, C no-op, bind", "g++", on="cpu")
def _() -> Subject:
    call = jaxbridge.bind(noops.plain().noop, "x: float[n], out y: float[n]")
    return empty(call, call, lambda: call.stats()["calls"])


def add_kernel(
    name: str = "add_one", signature: str = "x: float[n], out y: float[n], n: int", **options: Any
) -> Callable[[Any], Any]:
    blocks = "(n + 255) // 256"
    return jaxbridge.cuda_kernel(
        noops.ADD_PTX, name, signature=signature, grid=blocks, block=256, **options
    )


candidate("jaxbridge, CUDA add kernel", on="cuda")(lambda: adding(add_kernel()))
candidate("jaxbridge, CUDA add kernel, in place", on="cuda")(
    lambda: adding(add_kernel("add_one_in_place", "inout x: float[n], n: int"))
)
candidate("jaxbridge, CUDA add kernel, not capturable", on="cuda")(
    lambda: adding(add_kernel(capturable=False))
)


@candidate("jaxbridge, load of 100 functions", "g++")
def _() -> Subject:
    library = str(noops.many(100))
    code = """
import sys, time
import jax, jaxbridge
start = time.perf_counter()
library = jaxbridge.load(sys.argv[1])
seconds = time.perf_counter() - start
assert len(library) == 100
print(seconds)
"""
    return {"import": lambda: in_a_new_process(code, library)}


def in_a_new_process(code: str, *arguments: str) -> float:
    """The seconds that a program prints."""
    # Compiled by the run before, as an installed package is.
    variables = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, env=variables, stdout=subprocess.PIPE, check=True)
    return float(done.stdout)


@candidate("jaxbridge, import")
def _() -> Subject:
    code = """
import sys, time
import jax
start = time.perf_counter()
import jaxbridge
seconds = time.perf_counter() - start
assert not {"cupy", "torch", "numba", "warp"} & set(sys.modules), "a framework was imported"
print(seconds)
"""
    return {"import": lambda: in_a_new_process(code)}


# ---- several devices ---------------------------------------------------------------------------


def cupy_add(graph: str) -> Callable[[Any], Any]:
    return jaxbridge.call(cupy_adds(1), SPEC, out=-1, graph=graph)


for _name, _needs, _make in (
    ("XLA's add", (), lambda: lambda v: jax.lax.optimization_barrier(v + 1)),
    ("native", (), add_kernel),
    ("replay", ("cupy",), lambda: cupy_add("replay")),
    ("Python", ("cupy",), lambda: cupy_add("off")),
):
    _ours = _name if _name == "XLA's add" else f"jaxbridge, {_name}"
    candidate(f"{_ours}, shard_map over one device", *_needs, on="cuda")(
        lambda make=_make: adding_on(1, make())
    )
    candidate(f"{_ours}, two devices", "two devices", *_needs, on="cuda")(
        lambda make=_make: adding_on(2, make())
    )


# ---- arrays in and out -------------------------------------------------------------------------


def on_the_device() -> tuple[Any, Any]:
    """An array of CuPy's and one of JAX's."""
    import cupy

    cupy.cuda.Device(0).use()  # JAX leaves that of its last program current
    array = jax.device_put(np.arange(SPEC.size, dtype=np.float32), jax.devices("cuda")[0])
    return cupy.arange(SPEC.size, dtype=np.float32), jax.block_until_ready(array)


@candidate("jaxbridge, from_external", "cupy", on="cuda")
def _() -> Subject:
    theirs, _ = on_the_device()
    return eager(lambda: jaxbridge.from_external(theirs))


@candidate("jax.dlpack.from_dlpack", "cupy", on="cuda")
def _() -> Subject:
    theirs, _ = on_the_device()
    return eager(lambda: jax.dlpack.from_dlpack(theirs))


def wait_for_the_device() -> None:
    import cupy

    cupy.cuda.Device(0).synchronize()


def run_a_kernel() -> None:
    """The driver's answers take longer from then on, until the host has waited for the whole device."""
    import cupy

    cupy.arange(4)
    cupy.cuda.get_current_stream().synchronize()


for _state, _begin in (("", wait_for_the_device), (", after a kernel", run_a_kernel)):

    @candidate(f"jaxbridge, to_external{_state}", "cupy", on="cuda")
    def _(begin: Any = _begin) -> Subject:
        _, ours = on_the_device()
        return eager(lambda: jaxbridge.to_external(ours, "cupy"), begin=begin)

    @candidate(f"cupy.asarray{_state}", "cupy", on="cuda")
    def _(begin: Any = _begin) -> Subject:
        import cupy

        _, ours = on_the_device()
        return eager(lambda: cupy.asarray(ours), begin=begin)


@candidate("jaxbridge, to_external, torch", "cupy", "torch", on="cuda")
def _() -> Subject:
    _, ours = on_the_device()
    return eager(lambda: jaxbridge.to_external(ours, "torch"))


@candidate("torch.from_dlpack", "cupy", "torch", on="cuda")
def _() -> Subject:
    import torch

    _, ours = on_the_device()
    return eager(lambda: torch.from_dlpack(ours))


@candidate("jaxbridge, from_external, NumPy", on="cpu")
def _() -> Subject:
    theirs = jaxbridge.empty(SPEC.size, np.float32)
    return eager(lambda: jaxbridge.from_external(theirs))


@candidate("jax.dlpack.from_dlpack, NumPy", on="cpu")
def _() -> Subject:
    theirs = jaxbridge.empty(SPEC.size, np.float32)
    return eager(lambda: jax.dlpack.from_dlpack(theirs))


@candidate("jaxbridge, to_external, NumPy", on="cpu")
def _() -> Subject:
    ours = jax.block_until_ready(jax.numpy.ones(SPEC.size, np.float32))
    return eager(lambda: jaxbridge.to_external(ours, "numpy"))


@candidate("np.from_dlpack", on="cpu")
def _() -> Subject:
    ours = jax.block_until_ready(jax.numpy.ones(SPEC.size, np.float32))
    return eager(lambda: np.from_dlpack(ours))


# ---- memory that is updated in place -----------------------------------------------------------


def state() -> tuple[Any, Callable[[], float], Callable[[], None]]:
    """An array of another library, its first element, and a wait until the device is done."""
    if PLATFORM == "cpu":
        array: Any = jaxbridge.empty(SPEC.size, np.float32)
        array[...] = 0
        return array, lambda: float(array[0]), lambda: None
    import cupy

    array = cupy.zeros(SPEC.size, np.float32)
    wait = cupy.cuda.Device().synchronize
    wait()
    return array, lambda: float(array[0]), wait


def steps(step: Callable[[], Any], value: Callable[[], float], wait: Callable[[], Any]) -> Subject:
    """A step that adds one: until it returns, and until it is done."""

    def run(waits: bool) -> float:
        start = time.perf_counter()
        step()
        if waits:
            wait()
        seconds = time.perf_counter() - start
        wait()
        return seconds

    for _ in range(3):
        step()
    wait()
    if value() != 3:
        raise AssertionError(f"{value()} after 3 steps")
    return {"one": lambda: run(True), "dispatch": lambda: run(False)}


@candidate("donating jit")
def _() -> Subject:
    program = jax.jit(lambda v: v + 1, donate_argnums=0)
    held = [jax.numpy.zeros(SPEC.shape, SPEC.dtype)]

    def step() -> None:
        held[0] = program(held[0])

    return steps(step, lambda: float(held[0][0]), lambda: held[0].block_until_ready())


def ref_steps(ref: Any) -> Subject:
    program = jax.jit(lambda r: r.__setitem__(..., r[...] + 1))
    wait = jaxbridge._compat.wait_until_ready
    return steps(lambda: program(ref), lambda: float(ref[0]), lambda: wait(ref))


@candidate("jit with a Ref")
def _() -> Subject:
    return ref_steps(jax.new_ref(jax.numpy.zeros(SPEC.shape, SPEC.dtype)))


_owner = () if PLATFORM == "cpu" else ("cupy",)


@candidate("jaxbridge, inplace", *_owner)
def _() -> Subject:
    array, value, wait = state()
    step = jaxbridge.inplace(lambda v: v + 1)
    return steps(lambda: step(array), value, wait)


@candidate("jaxbridge, ref", *_owner)
def _() -> Subject:
    return ref_steps(jaxbridge.ref(state()[0]))


# ---- JAX's own ways ----------------------------------------------------------------------------


@candidate("buffer_callback, empty Python")
def _() -> Subject:
    return counted(lambda fn: buffer_callback(fn, SPEC))


@candidate("buffer_callback, np.add(out=)", on="cpu")
def _() -> Subject:
    def add(ctx: Any, out: Any, v: Any) -> None:
        np.add(np.asarray(v), 1, out=np.asarray(out))

    return adding(buffer_callback(add, SPEC))


def on_cupy(times: int) -> Callable[..., None]:
    import cupy

    adds = cupy_adds(times)

    def add(ctx: Any, out: Any, v: Any) -> None:
        with cupy.cuda.ExternalStream(ctx.stream):
            adds(cupy.asarray(v), cupy.asarray(out))

    return add


@candidate("buffer_callback, cp.add(out=)", "cupy", on="cuda")
def _() -> Subject:
    return adding(buffer_callback(on_cupy(1), SPEC))


@candidate("buffer_callback, cp.add(out=), command buffer", "cupy", on="cuda")
def _() -> Subject:
    return adding(buffer_callback(on_cupy(1), SPEC, command_buffer_compatible=True))


@candidate("buffer_callback, 20 CuPy operations", "cupy", on="cuda")
def _() -> Subject:
    return adding(buffer_callback(on_cupy(20), SPEC), 20)


@candidate("buffer_callback, torch.add(out=)", "torch", on="cuda")
def _() -> Subject:
    import torch

    def add(ctx: Any, out: Any, v: Any) -> None:
        with torch.cuda.stream(torch.cuda.ExternalStream(ctx.stream)):
            torch.add(torch.from_dlpack(v), 1, out=torch.from_dlpack(out))

    return adding(buffer_callback(add, SPEC))


@candidate("pure_callback, np.add")
def _() -> Subject:
    def add(v: Any) -> Any:
        return np.asarray(v) + np.float32(1)

    return adding(lambda v: jax.pure_callback(add, SPEC, v))


# ---- peers -------------------------------------------------------------------------------------


def tvm_call(
    function: Any, call: dict[str, Any] | None = None, **target: Any
) -> Callable[..., Any]:
    """The call of a function, with options for the call and for the target."""
    import jax_tvm_ffi
    import tvm_ffi

    if not isinstance(function, tvm_ffi.Function):
        function = tvm_ffi.convert(function)
    name = f"bench.tvm_{jax_tvm_ffi.registered_count()}"
    platform = "gpu" if PLATFORM == "cuda" else "cpu"
    jax_tvm_ffi.register_ffi_target(name, function, ["args", "rets"], platform=platform, **target)
    return jax.ffi.ffi_call(name, SPEC, **(call or {}))


@candidate("jax-tvm-ffi, C++ no-op", "jax_tvm_ffi", "g++")
def _() -> Subject:
    import ctypes

    import tvm_ffi

    path = str(noops.tvm())
    call = tvm_call(tvm_ffi.load_module(path).noop)
    return empty(call, call, ctypes.CDLL(path).calls_made)


def tvm_kernel(**call: Any) -> Subject:
    import tvm_ffi

    jax.block_until_ready(jax.numpy.zeros(1))  # makes the context current on this thread
    module = tvm_ffi.load_module(str(noops.tvm("tvm_add")))
    module.load(noops.ADD_PTX)
    return adding(tvm_call(module.add, call))


candidate("jax-tvm-ffi, CUDA add kernel", "jax_tvm_ffi", "g++", on="cuda")(tvm_kernel)
candidate("jax-tvm-ffi, CUDA add kernel, in place", "jax_tvm_ffi", "g++", on="cuda")(
    lambda: tvm_kernel(input_output_aliases={0: 0})
)


@candidate("jax-tvm-ffi, empty Python", "jax_tvm_ffi")
def _() -> Subject:
    return counted(tvm_call)


@candidate("jax-tvm-ffi, np.add(out=)", "jax_tvm_ffi", on="cpu")
def _() -> Subject:
    def add(v: Any, out: Any) -> None:
        np.add(np.from_dlpack(v), 1, out=np.from_dlpack(out))

    return adding(tvm_call(add, pass_owned_tensor=True))


def in_jaxbinds_convention(module: Any, keyword: bool = False) -> Subject:
    def add(out: Any, args: Any, kwargs_dump: Any) -> None:
        np.add(args[0], 1, out=out[0])

    def add_keyword(out: Any, args: Any, kwargs_dump: Any) -> None:
        np.add(args[0], module.load_kwargs(kwargs_dump)["by"], out=out[0])

    def same(*args: Any, **kwargs: Any) -> Any:
        return ((SPEC.shape, SPEC.dtype),)

    given = {"by": 1} if keyword else {}
    function = add_keyword if keyword else add
    call = module.get_nonlinear_call(function, (None, None), same, same)
    return adding(lambda v: call(v, **given)[0])


for _name, _keyword in (("np.add(out=)", False), ("np.add(out=), a keyword", True)):

    @candidate(f"JAXbind, {_name}", "jaxbind", on="cpu")
    def _(keyword: bool = _keyword) -> Subject:
        import jaxbind

        return in_jaxbinds_convention(jaxbind, keyword)

    @candidate(f"jaxbridge.compat.jaxbind, {_name}", on="cpu")
    def _(keyword: bool = _keyword) -> Subject:
        from jaxbridge.compat import jaxbind

        return in_jaxbinds_convention(jaxbind, keyword)


def warp_work(kernels: int) -> Callable[[Any, Any], None]:
    import warp as wp

    @wp.kernel
    def add(v: wp.array(dtype=float), out: wp.array(dtype=float)):
        i = wp.tid()
        out[i] = v[i] + 1.0

    def work(v: wp.array(dtype=float), out: wp.array(dtype=float)):
        wp.launch(add, dim=v.shape[0], inputs=[v], outputs=[out])
        for _ in range(kernels - 1):
            wp.launch(add, dim=v.shape[0], inputs=[out], outputs=[out])

    return work


def warp_callable(mode: str, kernels: int) -> Subject:
    import warp as wp

    graph_mode = wp.JaxCallableGraphMode[mode]
    call = wp.jax_callable(warp_work(kernels), num_outputs=1, graph_mode=graph_mode)
    return adding(lambda v: call(v)[0], kernels)


for _mode in ("NONE", "JAX", "WARP", "WARP_STAGED"):
    for _kernels in (1, 20):
        _name = f"Warp, {_kernels} kernel{'s' * (_kernels > 1)}, {_mode}"
        candidate(_name, "warp", on="cuda")(
            lambda mode=_mode, kernels=_kernels: warp_callable(mode, kernels)
        )


# ---- all of them -------------------------------------------------------------------------------


def make(names: list[str]) -> tuple[dict[str, Subject], dict[str, str]]:
    """The subjects of these candidates on this platform, and why others are not there."""
    subjects, missing = {}, {}
    for name in names:
        one = CANDIDATES[name]
        if one.platform not in (None, PLATFORM):
            continue
        if reason := one.missing():
            missing[name] = reason
            continue
        try:
            subjects[name] = one.make()
        except Exception as error:
            missing[name] = f"failed: {type(error).__name__}: {str(error).strip()[:500]}"
    return subjects, missing

# SPDX-License-Identifier: Apache-2.0
"""How the cost of a call grows with its operands, and with the lists of addresses that come.

    python benchmarks/growth.py [--quick] [--output DIRECTORY]

A list of addresses is what one call gets. Programs give the same few again and again, and what views are
made of is kept for as many as JAXBRIDGE_CACHE_LIMIT says. Memory of that is the C library's heap in use
(mallinfo2, with Python's objects on it: PYTHONMALLOC=malloc) before Function.clear() less after. Each
question has a process of its own. Writes growth_DEVICE.json and .png.
"""

import argparse
import ctypes
import gc
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.buffer_callback import buffer_callback

import jaxbridge
import noops
from candidates import PLATFORM, tvm_call
from measuring import SPEC, Way, measure, medians, timed
from plots import plot_growth
from results import RESULTS, where, write

OPERANDS = (1, 4, 16, 64, 256)
LISTS = (1, 10, 100, 1000, 10000)
LIMITS = (256, 16384)
TURNS = 3  # of the processes with one limit each
LOOP = Way("in a fori_loop of 300", 300, 9)
CYCLE = Way("one call that is waited for, on arrays in turn", 1, 1)

Call = Callable[..., Any]
Line = dict[int, float]


def empty_function(n: int) -> Callable[..., None]:
    """Another one for each `n`: what is kept belongs to the function."""
    return lambda *args, n=n: None


def calls(n: int, in_place: bool) -> dict[str, Call]:
    """Calls of an empty function with any number of operands; in place: the second is the result."""
    nothing = empty_function(n)
    views = "NumPy" if PLATFORM == "cpu" else "CuPy"
    ours: dict[str, Any] = {"inout": {1: 0}} if in_place else {"out": -1}
    alias: dict[str, Any] = {"input_output_aliases": {1: 0}} if in_place else {}
    made: dict[str, Call] = {
        "jaxbridge": jaxbridge.call(nothing, SPEC, framework="buffer", **ours),
        f"jaxbridge, {views} views": jaxbridge.call(nothing, SPEC, **ours),
        "buffer_callback": buffer_callback(nothing, SPEC, **alias),
    }
    if shutil.which("g++"):
        noops.xla("CUDA" if PLATFORM == "cuda" else "cpu")
        made["XLA FFI, C++ no-op"] = jax.ffi.ffi_call("bench.any_operands", SPEC, **alias)
    if importlib.util.find_spec("jax_tvm_ffi"):
        made["jax-tvm-ffi"] = tvm_call(nothing, alias)
    return made


def arrays(n: int) -> list[jax.Array]:
    return [jnp.full(SPEC.shape, i, SPEC.dtype) for i in range(n)]


def in_a_loop(call: Call, n: int) -> Callable[[], Any]:
    first, *others = arrays(n)
    program = jax.jit(lambda v, *o: jax.lax.fori_loop(0, LOOP.calls, lambda i, c: call(c, *o), v))
    return lambda: program(first, *others)


def in_turn(call: Call, inputs: list[jax.Array]) -> Callable[[], float]:
    """A run that calls on each array, and returns the median of the seconds of one call.

    The result is one donated array throughout, so that there are as many lists of addresses as arrays.
    """
    program = jax.jit(call, donate_argnums=1)
    turns = max(1, 1000 // len(inputs))
    (result,) = arrays(1)

    def run() -> float:
        nonlocal result
        times = []
        for _ in range(turns):
            for x in inputs:
                start = time.perf_counter()
                result = program(x, result)
                result.block_until_ready()
                times.append(time.perf_counter() - start)
        return statistics.median(times)

    return run


def lines_of(found: dict[str, dict[str, float]]) -> dict[str, Line]:
    """Of names that end with a number."""
    lines: dict[str, Line] = {}
    for name, row in found.items():
        line, n = name.rsplit(":", 1)
        lines.setdefault(line, {})[int(n)] = next(iter(row.values()))
    return lines


def operands(quick: bool) -> dict[str, Line]:
    subjects = {
        f"{name}:{n}": {"loop": timed(in_a_loop(call, n))}
        for n in OPERANDS[: 2 if quick else None]
        for name, call in calls(n, in_place=False).items()
    }
    return lines_of(medians(measure(subjects, quick, {"loop": LOOP})))


def lists(quick: bool) -> dict[str, Line]:
    return cycles(quick, lambda name: True)


def our_lists(quick: bool) -> dict[str, Line]:
    """Those that keep lists: the limit is nothing to the others."""
    return cycles(quick, is_ours)


def is_ours(name: str) -> bool:
    return name.startswith("jaxbridge")


def cycles(quick: bool, measured: Callable[[str], bool]) -> dict[str, Line]:
    sizes = LISTS[: 2 if quick else None]
    inputs = arrays(sizes[-1])
    subjects = {
        f"{name}:{n}": {"cycle": in_turn(call, inputs[:n])}
        for n in sizes
        for name, call in calls(n, in_place=True).items()
        if measured(name)
    }
    return lines_of(medians(measure(subjects, quick, {"cycle": CYCLE}, rounds=3)))


FIELDS = (
    "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"  # of mallinfo2
)


def heap() -> int:
    """Bytes in use on the C library's heap."""
    libc = ctypes.CDLL(None)

    class Info(ctypes.Structure):
        _fields_ = [(name, ctypes.c_size_t) for name in FIELDS.split()]

    libc.mallinfo2.restype = Info
    gc.collect()
    info = libc.mallinfo2()
    return info.uordblks + info.hblkhd


def kept_by(call: Any, run: Callable[[], Any]) -> int:
    """Bytes that are kept for the calls of `run`, the median of three times."""
    found = []
    for _ in range(3):
        run()
        kept = heap()
        call.clear()
        found.append(kept - heap())
    return statistics.median(found)


VIEWS = (("buffers", "buffer"), ("views", None))


def memory_of_lists(quick: bool) -> dict[str, Line]:
    sizes = LISTS[: 2 if quick else None]
    inputs = arrays(sizes[-1])
    lines: dict[str, Line] = {name: {} for name, _ in VIEWS}
    for name, framework in VIEWS:
        for n in sizes:
            call = jaxbridge.call(empty_function(n), SPEC, inout={1: 0}, framework=framework)
            lines[name][n] = kept_by(call, in_turn(call, inputs[:n]))
    return lines


def memory_of_operands(quick: bool) -> dict[str, Line]:
    lines: dict[str, Line] = {name: {} for name, _ in VIEWS}
    for name, framework in VIEWS:
        for n in OPERANDS[: 2 if quick else None]:
            call = jaxbridge.call(empty_function(n), SPEC, out=-1, framework=framework)
            program, inputs = jax.jit(call), arrays(n)
            lines[name][n] = kept_by(call, lambda p=program, i=inputs: p(*i).block_until_ready())
    return lines


def asked(
    question: Callable[[bool], dict[str, Line]], quick: bool, **environment: str
) -> dict[str, Line]:
    """The answer of another process."""
    with_limit = f", limit {limit}" if (limit := environment.get("JAXBRIDGE_CACHE_LIMIT")) else ""
    print(f"measuring {question.__name__}{with_limit}", file=sys.stderr, flush=True)
    command = [sys.executable, __file__, "--answer", question.__name__] + ["--quick"] * quick
    done = subprocess.run(
        command, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def in_the_middle(turns: dict[str, list[Line]]) -> dict[str, Line]:
    return {
        name: {n: statistics.median(line[n] for line in lines) for n in lines[0]}
        for name, lines in turns.items()
    }


def panels(quick: bool) -> list[dict[str, Any]]:
    lines_of_turns: dict[str, list[Line]] = {}
    heaps: dict[str, Line] = {}
    on_heap = {"PYTHONMALLOC": "malloc"}
    for turn in range(1 if quick else TURNS):
        for limit in LIMITS:
            variables = {"JAXBRIDGE_CACHE_LIMIT": str(limit)}
            question = lists if limit == LIMITS[0] else our_lists
            for name, line in asked(question, quick, **variables).items():
                full_name = f"{name}, limit {limit}" if is_ours(name) else name
                lines_of_turns.setdefault(full_name, []).append(line)
            if turn == 0:
                for name, line in asked(memory_of_lists, quick, **variables, **on_heap).items():
                    heaps[f"jaxbridge, {name}, limit {limit}"] = line
    kept = asked(memory_of_operands, quick, **on_heap)
    lines = {f"jaxbridge, {name}": line for name, line in kept.items()}
    return [
        {"x": "operands", "y": "us per call, in a loop", "lines": asked(operands, quick)},
        {
            "x": "lists of addresses",
            "y": "us per call, one by one",
            "lines": in_the_middle(lines_of_turns),
        },
        {"x": "operands", "y": "bytes kept for one list", "lines": lines},
        {"x": "lists of addresses", "y": "bytes kept", "lines": heaps},
    ]


def show(report: dict[str, Any]) -> None:
    for panel in report["panels"]:
        sizes = next(iter(panel["lines"].values()))
        print(f"\n{panel['y']:40s}" + "".join(f"{n!s:>12s}" for n in sizes) + f"  {panel['x']}")
        for name, line in panel["lines"].items():
            cells = (f"{v:12,d}" if isinstance(v, int) else f"{v:12.2f}" for v in line.values())
            print(f"{name:40s}" + "".join(cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two sizes, few repeats")
    parser.add_argument("--output", type=Path, default=RESULTS, help="directory of the results")
    parser.add_argument("--answer", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.answer:
        print(json.dumps(globals()[options.answer](options.quick)))
        return
    report = {**where(), "panels": panels(options.quick)}
    show(report)
    plot_growth(report, write(report, options.output, "growth"))


if __name__ == "__main__":
    main()

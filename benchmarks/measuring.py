# SPDX-License-Identifier: Apache-2.0
"""How things are measured: the ways of calling, checked programs, and rounds in which all take turns.

A *run* is a function without arguments that does a number of calls and returns the seconds they took.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

SIZE = 1024
SPEC = jax.ShapeDtypeStruct((SIZE,), jnp.float32)

Run = Callable[[], float]
Subject = dict[str, Run]  # way -> run


class Way(NamedTuple):
    """A way of calling, and how often."""

    about: str
    calls: int  # in one run
    runs: int  # in a row; their median is one sample


WAYS = {
    "loop": Way("in a fori_loop of 1000", 1000, 3),
    "unrolled": Way("unrolled 50 times", 50, 15),
    "one": Way("one call that is waited for", 1, 51),
    "dispatch": Way("one call until it returns", 1, 51),
    "eager": Way("the function itself, without JAX; of a bridge a call outside of jit", 1000, 3),
    "import": Way("import in a new process", 1, 1),
}
ROUNDS = 15  # samples of each
WARM_UP_S = 0.005


class Counter:
    """Counts calls of the functions that write nothing."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, *args: Any) -> None:
        self.calls += 1


def timed(f: Callable[[], Any]) -> Run:
    """A run that waits for its result."""

    def run() -> float:
        start = time.perf_counter()
        jax.block_until_ready(f())
        return time.perf_counter() - start

    return run


def dispatched(f: Callable[[], Any]) -> Run:
    """A run until it returns, with the device idle before."""

    def run() -> float:
        start = time.perf_counter()
        out = f()
        seconds = time.perf_counter() - start
        jax.block_until_ready(out)
        return seconds

    return run


def eager(
    f: Callable[[], Any],
    wait: Callable[[], Any] = lambda: None,
    begin: Callable[[], Any] = lambda: None,
) -> Subject:
    """Calls in a row outside of programs: the time of the host, between `begin` and `wait`."""
    calls = WAYS["eager"].calls

    def run() -> float:
        begin()
        start = time.perf_counter()
        for _ in range(calls):
            f()
        seconds = time.perf_counter() - start
        wait()
        return seconds

    return {"eager": run}


def programs(f: Callable[[Any], Any]) -> dict[str, tuple[Callable[[Any], Any], int]]:
    """The jitted programs that call `f`, and how often they do."""
    loops, times = WAYS["loop"].calls, WAYS["unrolled"].calls

    def unrolled(v: Any) -> Any:
        for _ in range(times):
            v = f(v)
        return v

    return {
        "loop": (jax.jit(lambda v: jax.lax.fori_loop(0, loops, lambda i, c: f(c), v)), loops),
        "unrolled": (jax.jit(unrolled), times),
        "one": (jax.jit(f), 1),
    }


def ways_of(made: dict[str, tuple[Callable[[Any], Any], int]]) -> Subject:
    x = jnp.arange(SIZE, dtype=jnp.float32)
    runs = {way: timed(lambda p=program: p(x)) for way, (program, _) in made.items()}
    return {**runs, "dispatch": dispatched(lambda: made["one"][0](x))}


def adding(f: Callable[[Any], Any], amount: int = 1) -> Subject:
    """The four ways of calling `f(x) = x + amount`, values checked."""
    made = programs(f)
    x = jnp.arange(SIZE, dtype=jnp.float32)
    for program, n in made.values():
        np.testing.assert_array_equal(program(x), np.arange(SIZE) + n * amount)
    return ways_of(made)


def adding_on(devices: int, f: Callable[[Any], Any]) -> Subject:
    """A loop on each of some devices at once that calls `f(x) = x + 1`, values checked.

    The time of a call is that of one on each device.
    """
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("d",))
    spec = jax.sharding.PartitionSpec("d")
    content = np.arange(devices * SIZE, dtype=np.float32)
    x = jax.device_put(content, jax.sharding.NamedSharding(mesh, spec))
    loop, calls = programs(f)["loop"]
    program = jax.jit(
        jax.shard_map(loop, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    )
    np.testing.assert_array_equal(program(x), content + calls)
    return {"loop": timed(lambda: program(x))}


def empty(
    f: Callable[[Any], Any], counting: Callable[[Any], Any], calls: Callable[[], int]
) -> Subject:
    """The four ways of calling an `f` that does nothing.

    There are no values to check. In their place `counting`, which is `f` or its like, has to be called as
    often as the programs say.
    """
    x = jnp.arange(SIZE, dtype=jnp.float32)
    for way, (program, n) in programs(counting).items():
        jax.block_until_ready(program(x))
        before = calls()
        jax.block_until_ready(program(x))
        if calls() - before != n:
            raise AssertionError(f"{way}: {calls() - before} calls, expected {n}")
    return ways_of(programs(f))


def sample(run: Run, way: Way, runs: int) -> float:
    """Microseconds per call, the median of some runs.

    Before it is run uncounted, so that what was measured last leaves no trace in caches and clocks.
    """
    end = time.perf_counter() + WARM_UP_S
    run()
    while time.perf_counter() < end:
        run()
    return statistics.median(run() for _ in range(runs)) / way.calls * 1e6


def measure(
    subjects: dict[str, Subject],
    quick: bool = False,
    ways: dict[str, Way] = WAYS,
    rounds: int = ROUNDS,
) -> dict[str, dict[str, list[float]]]:
    """Samples of every subject in every way, one in each round.

    All take turns, so that a noisy machine hits all, and samples of one round can be compared.
    """
    samples: dict[str, dict[str, list[float]]] = {
        name: {way: [] for way in ways if way in subject} for name, subject in subjects.items()
    }
    for _ in range(2 if quick else rounds):
        for name, way in ways.items():
            for subject, runs in subjects.items():
                if name in runs:
                    taken = sample(runs[name], way, min(way.runs, 3) if quick else way.runs)
                    samples[subject][name].append(taken)
    return samples


def medians(samples: dict[str, dict[str, list[float]]]) -> dict[str, dict[str, float]]:
    return {
        name: {way: statistics.median(values) for way, values in ways.items()}
        for name, ways in samples.items()
    }

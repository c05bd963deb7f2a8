# SPDX-License-Identifier: Apache-2.0
"""What one external call costs, beside JAX's own ways, in one run.

    python benchmarks/call_cost.py [--json FILE]

Each row is measured four ways: in a fori_loop, unrolled 50 times, as one call that is waited for, and
as dispatch alone. Times are medians in microseconds per call, float32[1024]. Values are checked.
Peers that are not installed are named as missing.
"""

import argparse
import datetime
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.buffer_callback import buffer_callback

import jaxbridge

SPEC = jax.ShapeDtypeStruct((1024,), jnp.float32)
LOOP, UNROLLED = 1000, 50


def median_us(f: Callable[[], Any], per: int, repeats: int) -> float:
    """Median of repeated runs, in microseconds per call."""
    for _ in range(3):
        jax.block_until_ready(f())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(f())
        times.append((time.perf_counter() - start) / per)
    return statistics.median(times) * 1e6


def dispatch_us(f: Callable[[], Any], repeats: int = 300) -> float:
    """Median time until the call returns, with the device idle before each."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        out = f()
        times.append(time.perf_counter() - start)
        jax.block_until_ready(out)
    return statistics.median(times) * 1e6


def measure(f: Callable[[Any], Any], adds: bool) -> dict[str, float]:
    """The four ways; `adds` says that f(x) = x + 1 is to be checked."""
    x = jnp.arange(1024, dtype=jnp.float32)
    loop = jax.jit(lambda v: jax.lax.fori_loop(0, LOOP, lambda i, c: f(c), v))

    @jax.jit
    def unrolled(v: Any) -> Any:
        for _ in range(UNROLLED):
            v = f(v)
        return v

    one = jax.jit(f)
    if adds:
        for program, n in ((loop, LOOP), (unrolled, UNROLLED), (one, 1)):
            np.testing.assert_array_equal(program(x), np.arange(1024) + n)
    return {
        "loop": median_us(lambda: loop(x), LOOP, 9),
        "unrolled": median_us(lambda: unrolled(x), UNROLLED, 101),
        "one": median_us(lambda: one(x), 1, 301),
        "dispatch": dispatch_us(lambda: one(x)),
    }


def eager_us(f: Callable[[], Any]) -> float:
    """Host time of one eager call of the callee itself."""
    for _ in range(100):
        f()
    n = 5000
    start = time.perf_counter()
    for _ in range(n):
        f()
    return (time.perf_counter() - start) / n * 1e6


def rows(cuda: bool) -> dict[str, tuple[Callable[[Any], Any], bool]]:
    """Name of each row, the function, and whether it adds one."""

    def empty(v: Any, out: Any) -> None:
        pass

    def nothing(ctx: Any, out: Any, v: Any) -> None:
        pass

    made: dict[str, tuple[Callable[[Any], Any], bool]] = {
        "native add": (lambda v: jax.lax.optimization_barrier(v + 1), True),
        "jaxbridge, empty Python": (jaxbridge.call(empty, SPEC, out=-1, framework="buffer"), False),
        "buffer_callback, empty Python": (buffer_callback(nothing, SPEC), False),
    }
    if cuda:
        import cupy

        def add(v: Any, out: Any) -> None:
            cupy.add(v, 1, out=out)

        def callback(ctx: Any, out: Any, v: Any) -> None:
            with cupy.cuda.ExternalStream(ctx.stream):
                cupy.add(cupy.asarray(v), 1, out=cupy.asarray(out))

        made["jaxbridge, empty Python, CuPy views"] = (jaxbridge.call(empty, SPEC, out=-1), False)
        made["jaxbridge, cp.add(out=)"] = (jaxbridge.call(add, SPEC, out=-1), True)
        made["buffer_callback, cp.add(out=)"] = (buffer_callback(callback, SPEC), True)
    else:

        def add(v: Any, out: Any) -> None:
            np.add(v, 1, out=out)

        def callback(ctx: Any, out: Any, v: Any) -> None:
            np.add(np.asarray(v), 1, out=np.asarray(out))

        made["jaxbridge, empty Python, NumPy views"] = (jaxbridge.call(empty, SPEC, out=-1), False)
        made["jaxbridge, np.add(out=)"] = (jaxbridge.call(add, SPEC, out=-1), True)
        made["buffer_callback, np.add(out=)"] = (buffer_callback(callback, SPEC), True)
        made["pure_callback, np.add"] = (
            lambda v: jax.pure_callback(lambda a: np.asarray(a) + np.float32(1), SPEC, v),
            True,
        )
    return made


def main() -> None:
    """Prints the table, and writes it where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="write versions, device, date and all rows to this file")
    options = parser.parse_args()
    device = jax.devices()[0]
    cuda = device.platform in ("gpu", "cuda")
    report: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "device": device.device_kind,
        "python": platform.python_version(),
        "jax": jax.__version__,
        "numpy": np.__version__,
        "jaxbridge": jaxbridge.__version__,
        "unit": "microseconds per call",
        "rows": {},
    }
    a = np.arange(1024, dtype=np.float32)
    o = np.empty_like(a)
    report["eager np.add(out=)"] = eager_us(lambda: np.add(a, 1, out=o))
    if cuda:
        import cupy

        ca, co = cupy.asarray(a), cupy.asarray(o)
        report["cupy"] = cupy.__version__
        report["eager cp.add(out=), host"] = eager_us(lambda: cupy.add(ca, 1, out=co))
    print(f"{device.device_kind}, JAX {jax.__version__}, float32[1024], us per call (medians)")
    for key in ("eager np.add(out=)", "eager cp.add(out=), host"):
        if key in report:
            print(f"{key:38s}{report[key]:9.2f}")
    print(f"{'':38s}{'loop':>9s}{'unrolled':>9s}{'one':>9s}{'dispatch':>9s}")
    for name, (f, adds) in rows(cuda).items():
        row = report["rows"][name] = measure(f, adds)
        print(f"{name:38s}" + "".join(f"{v:9.2f}" for v in row.values()))
        sys.stdout.flush()
    if options.json:
        with open(options.json, "w") as file:
            json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()

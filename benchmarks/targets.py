# SPDX-License-Identifier: Apache-2.0
"""What is to be reached, as data: each row a candidate, a way of calling and the limit it is held to."""

import statistics
from typing import NamedTuple

from candidates import CANDIDATES, PLATFORM

Samples = dict[str, dict[str, list[float]]]


class Limit(NamedTuple):
    """At most `factor` times what `of` takes (called the same way, but for `way`), plus `plus` us."""

    factor: float
    of: str | None = None
    plus: float = 0.0
    way: str | None = None

    def __str__(self) -> str:
        if self.of is None:
            return f"{self.plus / 1000:g} ms"
        factor = "" if self.factor == 1 else f"{self.factor:g} x "
        return f"{factor}{self.of}" + (f" + {self.plus:g} us" if self.plus else "")


class Target(NamedTuple):
    case: str
    ours: str
    way: str
    limit: Limit
    platform: str | None = None


class Verdict(NamedTuple):
    case: str
    way: str
    limit: str
    status: str  # PASS, SHORT, not built, not measured, needs PLATFORM
    ours_us: float | None = None
    allowed_us: float | None = None
    of_allowed: float | None = None  # at most 1 passes
    ratio: float | None = None  # ours, to what it is compared with


_native_function, _empty = "native C++ function", "empty Python function"
_np, _cp = "np.add(x, 1, out=out)", "cp.add(x, 1, out=out)"
_20 = "20 CuPy operations, replay"
_replays = [
    Target(
        f"{f}.add, replay",
        f"jaxbridge, {f}.add(out=), replay",
        way,
        Limit(factor, "native add"),
        "cuda",
    )
    for f in ("cp", "torch")
    for way, factor in (("loop", 1.2), ("unrolled", 1.5))
]

TARGETS = [
    *(
        Target(_native_function, "jaxbridge, C++ no-op", way, Limit(1.1, "XLA FFI, C++ no-op"))
        for way in ("loop", "unrolled")
    ),
    *(
        Target(
            kernel,
            f"jaxbridge, {kernel}",
            "loop",
            Limit(0.7, f"jax-tvm-ffi, {kernel}"),
            "cuda",
        )
        for kernel in ("CUDA add kernel", "CUDA add kernel, in place")
    ),
    Target(_empty, "jaxbridge, empty Python", "unrolled", Limit(1.05, "jax-tvm-ffi, empty Python")),
    Target(
        _np, "jaxbridge, np.add(out=)", "loop", Limit(1, "eager np.add(out=)", 1.5, "eager"), "cpu"
    ),
    Target(
        _np, "jaxbridge, np.add(out=)", "loop", Limit(0.45, "buffer_callback, np.add(out=)"), "cpu"
    ),
    *(
        Target(
            "np.add in JAXbind's convention",
            f"jaxbridge.compat.jaxbind, {what}",
            way,
            Limit(0.5, f"JAXbind, {what}"),
            "cpu",
        )
        for what in ("np.add(out=)", "np.add(out=), a keyword")
        for way in ("loop", "unrolled")
    ),
    Target(
        _cp,
        "jaxbridge, cp.add(out=)",
        "unrolled",
        Limit(1, "eager cp.add(out=), host", 10, "eager"),
        "cuda",
    ),
    Target(
        _cp,
        "jaxbridge, cp.add(out=)",
        "unrolled",
        Limit(0.35, "buffer_callback, cp.add(out=)"),
        "cuda",
    ),
    *_replays,
    Target(
        _20,
        "jaxbridge, 20 CuPy operations, replay",
        "loop",
        Limit(0.75, "Warp, 20 kernels, WARP"),
        "cuda",
    ),
    Target(
        _20,
        "jaxbridge, 20 CuPy operations, replay",
        "loop",
        Limit(0.15, "buffer_callback, 20 CuPy operations"),
        "cuda",
    ),
    Target(
        "replay with 50 recurring pointer sets",
        "jaxbridge, cp.add(out=), replay",
        "unrolled",
        Limit(1.5, "native add"),
        "cuda",
    ),
    *(
        Target(
            f"two devices, {what}, shard_map",
            f"jaxbridge, {what}, two devices",
            "loop",
            Limit(1.2, f"jaxbridge, {what}, shard_map over one device"),
            "cuda",
        )
        for what in ("replay", "native")
    ),
    Target(
        "inplace step of external memory",
        "jaxbridge, inplace",
        "dispatch",
        Limit(1.2, "donating jit"),
        "cuda",
    ),
    Target(
        "from_external, CuPy",
        "jaxbridge, from_external",
        "eager",
        Limit(1.1, "jax.dlpack.from_dlpack"),
        "cuda",
    ),
    *(
        Target(
            f"to_external, CuPy{state}",
            f"jaxbridge, to_external{state}",
            "eager",
            Limit(1.1, f"cupy.asarray{state}"),
            "cuda",
        )
        for state in ("", ", after a kernel")
    ),
    Target(
        "to_external, torch",
        "jaxbridge, to_external, torch",
        "eager",
        Limit(1, "torch.from_dlpack"),
        "cuda",
    ),
    Target(
        "import without frameworks, over import jax",
        "jaxbridge, import",
        "import",
        Limit(0, None, 50_000),
    ),
    Target(
        "a library of 100 functions",
        "jaxbridge, load of 100 functions",
        "import",
        Limit(0, None, 20_000),
    ),
]


def judge(target: Target, samples: Samples) -> Verdict:
    """Round by round, since what is compared had its turn in the same round; the medians of that."""
    limit = target.limit
    verdict = Verdict(target.case, target.way, str(limit), "not measured")
    if target.ours not in CANDIDATES:
        return verdict._replace(status="not built")
    if target.platform not in (None, PLATFORM):
        return verdict._replace(status=f"needs {target.platform}")
    ours = samples.get(target.ours, {}).get(target.way)
    if not ours:
        return verdict
    allowed = [limit.plus] * len(ours)
    ratio = None
    if limit.of is not None:
        theirs = samples.get(limit.of, {}).get(limit.way or target.way)
        if not theirs:
            return verdict._replace(ours_us=statistics.median(ours))
        allowed = [limit.factor * t + limit.plus for t in theirs]
        ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    of_allowed = statistics.median(a / b for a, b in zip(ours, allowed, strict=True))
    return verdict._replace(
        status="PASS" if of_allowed <= 1 else "SHORT",
        ours_us=statistics.median(ours),
        allowed_us=statistics.median(allowed),
        of_allowed=of_allowed,
        ratio=ratio,
    )

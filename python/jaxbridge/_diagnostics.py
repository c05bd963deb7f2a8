# SPDX-License-Identifier: Apache-2.0
"""What `python -m jaxbridge` shows: what is here, and whether a call works.

Every probe is wrapped: one that raises is reported in its place, and the others go on.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jaxlib
import numpy as np

from . import _compat, _core, _function, _options

# The distributions that bring a framework, under any of their names.
_distributions: dict[str, tuple[str, ...]] = {
    "cupy": ("cupy", "cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x"),
    "torch": ("torch",),
    "numba": ("numba", "numba-cuda"),
    "warp": ("warp-lang",),
}
_plugins = tuple(f"jax-cuda{major}-{part}" for major in (12, 13) for part in ("plugin", "pjrt"))
_cuda_library = re.compile(
    r"/lib(cuda|cudart|cublas\w*|cudnn\w*|cufft\w*|cusolver\w*|cusparse\w*|curand|cupti|nvrtc|nvJitLink|nccl)"
    r"(-\w+)?\.so[.\d]*$"
)
_variables = re.compile(r"(JAXBRIDGE|XLA|JAX)_\w+|CUDA_VISIBLE_DEVICES")


def _installed(names: tuple[str, ...]) -> dict[str, str]:
    """Versions by distribution; nothing is imported."""
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _versions() -> dict[str, Any]:
    gil = getattr(sys, "_is_gil_enabled", lambda: True)()
    return {
        "jaxbridge": importlib.metadata.version("jaxbridge"),
        "python": f"{platform.python_version()}, {'with' if gil else 'without'} the GIL",
        "system": f"{platform.system()} {platform.machine()}, {' '.join(platform.libc_ver())}",
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        **_installed(_plugins),
        "numpy": np.__version__,
        **_installed(("ml_dtypes", "scipy")),
    }


def _ffi() -> dict[str, Any]:
    """The versions of XLA's FFI: 0.N. The runtime says its own when it takes our handlers."""
    jax.devices()
    runtime, answered = _core.ffi_versions()
    header = Path(str(jaxlib.__file__)).parent / "include/xla/ffi/api/c_api.h"
    defined = re.search(r"#define\s+XLA_FFI_API_MINOR\s+(\d+)", header.read_text())
    return {
        "jaxlib's header": f"0.{defined[1]}" if defined else f"not found in {header.name}",
        "runtime": f"0.{runtime}" if runtime >= 0 else "it did not say (as up to jaxlib 0.8)",
        "answered by jaxbridge": f"0.{answered}" if answered >= 0 else "nothing: it did not ask",
    }


def _driver() -> dict[str, Any]:
    info = dict(_core.driver_info())
    version = info.pop("version")
    if isinstance(version, int) and version:
        info["version"] = f"CUDA {version // 1000}.{version % 1000 // 10}"
    return {name: value for name, value in info.items() if value not in (None, "", [])}


def _devices() -> dict[str, Any]:
    return {
        name: [f"{d.id}: {d.device_kind}" for d in jax.local_devices(backend=name)]
        for name in sorted(_compat.local_platforms())
    }


def _frameworks() -> dict[str, Any]:
    return {
        name: _installed(distributions) or "not installed"
        for name, distributions in _distributions.items()
    }


def _environment() -> dict[str, Any]:
    return {name: os.environ[name] for name in sorted(os.environ) if _variables.fullmatch(name)}


def _loaded() -> dict[str, Any]:
    """JAX's default backend, and the CUDA libraries in this process, whoever has loaded them."""
    mapped = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    paths = {line.split(maxsplit=5)[-1] for line in mapped}
    return {
        "default backend": jax.default_backend(),
        "CUDA libraries": sorted(path for path in paths if _cuda_library.search(path)),
    }


def _plus_one(x: Any) -> Any:
    return x + 1


def _same(x: Any) -> Any:
    return x


def _call(platform_name: str, framework: str) -> None:
    """One call on the first device of a platform.

    Raises:
        Exception: it failed.
    """
    has_arithmetic = framework in ("numpy", "cupy", "torch")
    f = _function.call(
        _plus_one if has_arithmetic else _same,
        lambda x: x,
        framework=framework,
        vmap_method="sequential",
    )
    x = np.arange(5, dtype=np.float32)
    device = jax.local_devices(backend=platform_name)[0]
    got = np.asarray(jax.jit(f)(jax.device_put(x, device)))
    expected = _plus_one(x) if has_arithmetic else x
    if not np.array_equal(got, expected):
        raise AssertionError(f"expected {expected}, got {got}")


def _attempt(probe: Callable[[], Any]) -> tuple[Any, str | None]:
    """What the probe returns, or why it failed."""
    try:
        return probe(), None
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


def _calls_to_make() -> list[tuple[str, str]]:
    """(platform, framework) of all that is here."""
    local = _compat.local_platforms()
    pairs: list[tuple[str, str]] = []
    for platform_name in (p for p in _options.platforms if p in local):
        for framework, where in _options.frameworks.items():
            needed = _distributions.get(framework, ())
            if (platform_name, framework) == ("cuda", "numba"):
                needed = ("numba-cuda",)
            if platform_name in where and (framework == "numpy" or _installed(needed)):
                pairs.append((platform_name, framework))
    return pairs


def _calls() -> list[dict[str, Any]]:
    """Makes a real call for each; a failed one stands among the others."""
    made = []
    for platform_name, framework in _calls_to_make():
        began = time.perf_counter()
        _, error = _attempt(lambda p=platform_name, f=framework: _call(p, f))  # type: ignore[misc]
        entry = {"platform": platform_name, "framework": framework, "ok": error is None}
        entry |= {"seconds": round(time.perf_counter() - began, 3)} if error is None else {}
        made.append(entry | ({"error": error} if error is not None else {}))
    return made


def _hints() -> list[str]:
    """What is likely to be wrong here, and what to do."""
    hints = []
    cupy = list(_installed(_distributions["cupy"]))
    if len(cupy) > 1:
        hints.append(
            f"{' and '.join(cupy)} are installed together, and overwrite each other's files: "
            f"pip uninstall {' '.join(cupy)}, then install the one that fits the driver"
        )
    driver = _core.driver_info()
    has_cuda = "cuda" in _compat.local_platforms()
    if driver["devices"] and not has_cuda:
        hints.append(
            "the driver has CUDA devices, JAX has none: pip install jax[cuda13] or jax[cuda12], and "
            "see whether JAX_PLATFORMS or CUDA_VISIBLE_DEVICES hides them"
        )
    if not driver["devices"] and not has_cuda:
        hints.append("no CUDA here: calls run on the CPU")
    if has_cuda and not cupy:
        hints.append(
            "CuPy, the default framework on CUDA, is not installed: pip install cupy-cuda13x "
            "(cupy-cuda12x for CUDA 12), or give framework="
        )
    if driver["missing"]:
        hints.append("the driver lacks functions that jaxbridge uses: update the NVIDIA driver")
    return hints


_probes: dict[str, Callable[[], Any]] = {
    "versions": _versions,
    "driver": _driver,
    "devices": _devices,
    "ffi": _ffi,
    "frameworks": _frameworks,
    "environment": _environment,
    "calls": _calls,
    "loaded": _loaded,
    "hints": _hints,
}


def report(show: Callable[[str, Any], None] = lambda section, found: None) -> dict[str, Any]:
    """All sections of the report; `show(section, found)` is called as each is there.

    A probe that failed gives {"error": text}. Initialises JAX's backends.
    """
    found: dict[str, Any] = {}
    for section, probe in _probes.items():
        value, error = _attempt(probe)
        found[section] = value if error is None else {"error": error}
        show(section, found[section])
    return found


def is_working(found: dict[str, Any]) -> bool:
    """Whether calls were made, and all succeeded."""
    calls = found["calls"]
    return isinstance(calls, list) and bool(calls) and all(call["ok"] for call in calls)


def _text(value: Any) -> str:
    # The lines of a long message stay together.
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text.strip().replace("\n", "\n    ")


def _print_section(section: str, found: Any) -> None:
    print(f"{section}:")
    if section == "calls" and isinstance(found, list):
        for call in found:
            outcome = (
                f"ok, {call['seconds']} s" if call["ok"] else f"FAILED: {_text(call['error'])}"
            )
            print(f"  {call['framework']} on {call['platform']}: {outcome}")
    elif isinstance(found, dict):
        for name, value in found.items():
            if isinstance(value, dict):
                value = ", ".join(f"{n} {v}" for n, v in value.items())
            print(f"  {name}: {_text(value)}")
    else:
        for value in found:
            print(f"  {_text(value)}")
    if not found:
        print("  nothing")
    sys.stdout.flush()


def main(arguments: list[str] | None = None) -> int:
    """Prints the report; 1 where a call failed."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxbridge",
        description="Shows what jaxbridge finds here, and makes a call on each platform.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    found = report() if options.json else report(_print_section)
    if options.json:
        print(json.dumps(found, indent=2, default=str))
    return 0 if is_working(found) else 1

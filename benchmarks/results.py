# SPDX-License-Identifier: Apache-2.0
"""Where results were measured, and where they are written."""

import datetime
import importlib.metadata
import json
import platform
import re
from pathlib import Path
from typing import Any

import jax

RESULTS = Path(__file__).with_name("results")
PACKAGES = [
    *("jax", "jaxlib", "numpy", "jaxbridge", "cupy-cuda12x", "cupy-cuda13x", "torch", "warp-lang"),
    *("jax-tvm-ffi", "apache-tvm-ffi", "jaxbind"),
]


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def slug(device: str) -> str:
    """h200 of NVIDIA H200: part of a file's name."""
    return re.sub(r"\W+", "_", device.lower().removeprefix("nvidia ")).strip("_")


def where() -> dict[str, Any]:
    return {
        "date": datetime.date.today().isoformat(),
        "device": jax.devices()[0].device_kind,
        "versions": versions(),
    }


def rounded(x: Any) -> Any:
    """With as many digits as a measurement has."""
    if isinstance(x, float):
        return float(f"{x:.4g}")
    if isinstance(x, dict):
        return {key: rounded(value) for key, value in x.items()}
    return [rounded(value) for value in x] if isinstance(x, list) else x


def write(report: dict[str, Any], directory: Path, name: str) -> Path:
    """NAME_DEVICE.json in the directory; its path."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}_{slug(report['device'])}.json"
    path.write_text(json.dumps(rounded(report), indent=1) + "\n")
    print(f"\nwritten: {path}")
    return path

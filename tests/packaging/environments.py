# SPDX-License-Identifier: Apache-2.0
"""How the packaging tests run another interpreter and tell what a distribution consists of."""

import importlib.metadata
import os
import pathlib
import subprocess

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = pathlib.Path(__file__).parents[2]


def clean_environ() -> dict[str, str]:
    """The environment without what would bring another package into a fresh interpreter."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    environ["JAX_PLATFORMS"] = "cpu"
    return environ


def run_python(python: pathlib.Path, *args: str) -> str:
    done = subprocess.run(
        [python, *args],
        capture_output=True,
        text=True,
        env=clean_environ(),
        cwd=python.parent,
        timeout=300,
    )
    assert done.returncode == 0, f"{python} {args}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def distributions_for(*names: str) -> list[importlib.metadata.Distribution]:
    """These distributions of the running environment and all that they require, without extras."""
    found: dict[str, importlib.metadata.Distribution] = {}
    todo = list(names)
    while todo:
        name = canonicalize_name(todo.pop())
        if name in found:
            continue
        found[name] = importlib.metadata.distribution(name)
        for line in found[name].requires or []:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                todo.append(requirement.name)
    return list(found.values())

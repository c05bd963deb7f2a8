# SPDX-License-Identifier: Apache-2.0
"""The libraries of tests/native, compiled at their first use, once for a run."""

import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

import jaxbridge

sources = Path(__file__).parents[1] / "native"
_directory = tempfile.TemporaryDirectory(prefix="jaxbridge-native-")
_strict = ("-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Wshadow", "-Werror", "-Wno-restrict")


def compiler(name: str = "g++") -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"needs {name}, which is not installed")
    return found


@functools.cache
def built(source: str, name: str, *options: str, directory: str = "", by: str = "") -> Path:
    """`source` of tests/native as the library `name`.so, compiled by gcc unless another is named."""
    out = Path(directory or _directory.name) / f"{name}.so"
    of_c = source.endswith(".c")
    chosen = by or compiler("gcc" if of_c else "g++")
    command = [chosen, "-shared", "-fPIC", "-fvisibility=hidden", "-O1"]
    if not of_c:
        command += ["-std=c++20", *(() if by else _strict), f"-I{jaxbridge.get_include()}"]
    command += [*options, str(sources / source), "-o", str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out

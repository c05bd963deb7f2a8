# SPDX-License-Identifier: Apache-2.0
"""The libraries of tests/native, compiled at their first use and kept in build/, by their content."""

import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

import jaxbridge

sources = Path(__file__).parents[1] / "native"
_built = Path(__file__).parents[2] / "build/native-tests"
_strict = ("-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Wshadow", "-Werror", "-Wno-restrict")


def compiler(name: str = "g++") -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"needs {name}, which is not installed")
    return found


@functools.cache
def _digest_of_headers() -> bytes:
    digest = hashlib.sha256()
    for header in sorted(Path(jaxbridge.get_include()).rglob("*.hpp")):
        digest.update(header.read_bytes())
    return digest.digest()


@functools.cache
def built(source: str, name: str, *options: str, by: str = "") -> Path:
    """`source` of tests/native as the library `name`.so, compiled by gcc unless another is named."""
    of_c = source.endswith(".c")
    chosen = by or compiler("gcc" if of_c else "g++")
    command = [chosen, "-shared", "-fPIC", "-fvisibility=hidden", "-O1"]
    if not of_c:
        command += ["-std=c++20", *(() if by else _strict), f"-I{jaxbridge.get_include()}"]
    command += [*options, str(sources / source)]
    digest = hashlib.sha256("\0".join(command).encode() + (sources / source).read_bytes())
    digest.update(_digest_of_headers())
    library = _built / digest.hexdigest()[:16] / f"{name}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as own:  # others may do the same now
            done = subprocess.run([*command, "-o", f"{own}/made"], capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            os.replace(f"{own}/made", library)
    return library

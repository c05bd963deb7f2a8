# SPDX-License-Identifier: Apache-2.0
"""The C++ functions that do nothing, compiled when they are first asked for."""

import ctypes
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

import jax


@functools.cache
def directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="jaxbridge-benchmarks-")


def compiled(name: str, includes: list[str], *options: str) -> Path:
    """`name`.cpp of this directory as a shared library."""
    library = Path(directory().name) / f"{name}.so"
    compiler = shutil.which("g++") or "g++"
    command = [compiler, "-std=c++17", "-O2", "-shared", "-fPIC", "-o", str(library)]
    command += [f"-I{include}" for include in includes]
    command += [str(Path(__file__).with_name(f"{name}.cpp")), *options]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}:\n{done.stderr[-2000:]}")
    return library


@functools.cache
def xla(platform: str) -> ctypes.CDLL:
    """XLA's no-ops, registered as `bench.one_operand` and `bench.any_operands`."""
    library = ctypes.CDLL(str(compiled("xla", [jax.ffi.include_dir()])))
    for handler in ("one_operand", "any_operands"):
        jax.ffi.register_ffi_target(
            f"bench.{handler}", jax.ffi.pycapsule(getattr(library, handler)), platform
        )
    return library


@functools.cache
def tvm() -> Path:
    """jax-tvm-ffi's no-op; the path of the library."""
    from tvm_ffi import libinfo

    return compiled("tvm", libinfo.include_paths(), libinfo.find_libtvm_ffi())

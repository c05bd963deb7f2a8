# SPDX-License-Identifier: Apache-2.0
"""The C++ functions that do nothing, or next to nothing, compiled when they are first asked for."""

import ctypes
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

import jax

import jaxbridge

ADD_PTX = Path(__file__).with_name("add.ptx").read_text()


@functools.cache
def directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="jaxbridge-benchmarks-")


def compiled(source: str | Path, includes: list[str], *options: str) -> Path:
    """A source file, or one of this directory by its name, as a shared library."""
    path = Path(__file__).with_name(f"{source}.cpp") if isinstance(source, str) else source
    library = Path(directory().name) / f"{path.stem}.so"
    compiler = shutil.which("g++") or "g++"
    command = [compiler, "-std=c++20", "-O2", "-shared", "-fPIC", "-o", str(library)]
    command += [f"-I{include}" for include in includes]
    command += [str(path), *options]
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
def native() -> jaxbridge.Library:
    """The no-op of `jaxbridge.load`."""
    return jaxbridge.load(compiled("native", [jaxbridge.get_include()], "-fvisibility=hidden"))


@functools.cache
def plain() -> ctypes.CDLL:
    """The no-op of `jaxbridge.bind`."""
    return ctypes.CDLL(str(compiled("plain", [])))


@functools.cache
def many(functions: int) -> Path:
    """A library of so many functions for `jaxbridge.load`; its path."""
    source = Path(directory().name) / "many.cpp"
    text = Path(__file__).with_name("native.cpp").read_text()
    for i in range(functions - 1):
        text += f'JAXBRIDGE_EXPORT_AS(f{i}, cpu, noop).parameters("x").result(jb::same_as<0>);\n'
    source.write_text(text)
    return compiled(source, [jaxbridge.get_include()], "-O0")


@functools.cache
def tvm(name: str = "tvm") -> Path:
    """jax-tvm-ffi's no-op, or its launch of a kernel (`tvm_add`); the path of the library."""
    from tvm_ffi import libinfo

    return compiled(name, libinfo.include_paths(), libinfo.find_libtvm_ffi(), "-ldl")

# SPDX-License-Identifier: Apache-2.0
"""Code for CUDA devices, from all that people have it in: what a module is loaded from."""

import dataclasses
import functools
import hashlib
import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import _config, _core
from ._adapters import compilers
from ._errors import PlatformError
from ._signature import Signature

# Of the devices that CUDA 13 supports.
_oldest = (7, 5)


@dataclasses.dataclass
class DeviceCode:
    """One kernel.

    Args:
        name: of the kernel in the module.
        identity: what tells it: equal for equal code.
        image: PTX (with a final zero) or a cubin; made when it is first needed.
        convention: how arrays are passed: "pointer", or "numba" (as its arrays).
        shown: what the Function is called.
    """

    name: str
    identity: str
    image: Callable[[], bytes]
    convention: str = "pointer"
    shown: str = ""

    def __post_init__(self) -> None:
        # Kept as long as this is, by the Function and its programs; a target keeps its own.
        self._kernels: dict[int, Any] = {}
        self._lock = threading.Lock()

    def kernel(self, shared: int) -> Any:
        """What launches it with so many bytes of shared memory: one for all calls, loaded once."""
        with self._lock:
            if shared not in self._kernels:
                try:
                    image = self.image()
                except NoDeviceError:
                    image = b""  # the program is lowered for another machine: here it never runs
                self._kernels[shared] = _core.Kernel(image=image, name=self.name, shared=shared)
            return self._kernels[shared]


def of(code: Any, name: str | None, signature: Signature, options: tuple[str, ...]) -> DeviceCode:
    """The kernel in `code`; TypeError where it is none."""
    if hasattr(code, "py_func") and type(code).__module__.startswith("numba"):
        if name is not None or options:
            raise TypeError(
                f"cuda_kernel: name={name!r} and options={list(options)} are for code that is a text; a "
                f"kernel of numba.cuda has a name, and Numba compiles it: leave them out, and take "
                f"export_name= for a name of the Function's own"
            )
        return _of_numba(code, signature)
    if type(code).__name__ == "RawKernel" and type(code).__module__.startswith("cupy"):
        return of(code.code, name or code.name, signature, (*code.options, *options))
    if not name:
        raise TypeError("cuda_kernel: name the kernel in the code: cuda_kernel(code, 'name', ...)")
    if isinstance(code, os.PathLike):
        code = Path(code).read_bytes()
    if isinstance(code, (bytes, bytearray)):
        image = bytes(code)
        if not image:
            raise TypeError("cuda_kernel: the code is empty")
        code = _text_of(image)
        if code is None:
            _check_no_options(options)
            return DeviceCode(name, _digest(image), lambda: image)
    if not isinstance(code, str) or not code.strip():
        raise TypeError(
            f"cuda_kernel: the code is {type(code).__name__}; expected PTX or CUDA C++ (text), a cubin "
            f"(bytes), a kernel of numba.cuda, or a cupy.RawKernel"
        )
    if "\0" in code:
        raise TypeError("cuda_kernel: the code has a zero in it, where its text would end")
    if "\n" not in code and Path(code).suffix in (".ptx", ".cubin", ".fatbin", ".cu"):
        raise TypeError(
            f"cuda_kernel: the code is {code!r}, the name of a file; pass pathlib.Path({code!r})"
        )
    if _is_ptx(code):
        _check_no_options(options)
        image = code.encode() + b"\0"
        return DeviceCode(name, _digest(image), lambda: image)
    source = code
    identity = _digest(source.encode(), repr(options).encode())
    return DeviceCode(name, identity, functools.partial(_compiled, source, name, options))


def _text_of(image: bytes) -> str | None:
    """PTX or source that came as bytes; None: it is a cubin, or a fatbin."""
    if image.startswith((b"\x7fELF", b"\x50\xed\x55\xba")):
        return None
    try:
        return image.removesuffix(b"\0").decode()
    except UnicodeDecodeError:
        return None


def _check_no_options(options: tuple[str, ...]) -> None:
    if options:
        raise TypeError(
            f"cuda_kernel: options={list(options)} are for the compiler of CUDA source, and this code is "
            f"compiled already: leave them out"
        )


def _digest(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def _is_ptx(text: str) -> bool:
    for line in text.splitlines():
        bare = line.strip()
        if bare and not bare.startswith("//"):
            return bare.startswith((".version", ".target"))
    return False


# ---- compilers -----------------------------------------------------------------------------------


class NoDeviceError(PlatformError):
    """Code would have to be compiled for a device, and there is none."""


def _capability() -> tuple[int, int]:
    try:
        major, minor = _core.compute_capability(0)
    except RuntimeError as error:
        raise NoDeviceError(
            f"cuda_kernel: this code is compiled for the device that is there, and there is none "
            f"({error})"
        ) from error
    return major, minor


def _compiled(source: str, name: str, options: tuple[str, ...]) -> bytes:
    """A cubin of CUDA source for the first device, from the disk where it is known there."""
    architecture = "sm_{}{}".format(*_capability())
    compiler, version, compile_with = _compiler()
    key = _digest(source.encode(), repr((options, architecture, compiler, version)).encode())
    file = Path(_config.cache_directory) / f"{key}.cubin"
    try:
        return file.read_bytes()
    except OSError:
        pass
    image = compile_with(source, name, options, architecture)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        # A name of its own first: other processes may look meanwhile.
        with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as out:
            out.write(image)
        os.replace(out.name, file)
    except OSError:
        pass  # a cache that can't be written is none
    return image


def _compiler() -> tuple[str, str, Callable[..., bytes]]:
    try:
        import cuda.core

        return "cuda.core", cuda.core.__version__, _with_cuda_core
    except ImportError:
        pass
    try:
        version = compilers.cupy_version()
    except ImportError as error:
        raise PlatformError(
            "cuda_kernel: CUDA source is compiled by cuda.core (pip install cuda-core) or by CuPy, and "
            "neither is installed; pass PTX instead"
        ) from error
    return "cupy", version, compilers.cupy_cubin


def _with_cuda_core(source: str, name: str, options: tuple[str, ...], architecture: str) -> bytes:
    try:
        from cuda.core import Program, ProgramOptions
    except ImportError:  # before 1.0
        from cuda.core.experimental import Program, ProgramOptions

    chosen: dict[str, Any] = {"std": "c++17", "arch": architecture}
    include = [o[2:] for o in options if o.startswith("-I")]
    defined = [o[2:] for o in options if o.startswith("-D")]
    if unknown := [o for o in options if not o.startswith(("-I", "-D", "-std=", "--std="))]:
        raise ValueError(
            f"cuda_kernel: the options {unknown} are not known; expected -I, -D, -std="
        )
    if include:
        chosen["include_path"] = include
    if defined:
        chosen["define_macro"] = [tuple(d.split("=", 1)) if "=" in d else d for d in defined]
    for o in options:
        if "-std=" in o:
            chosen["std"] = o.partition("=")[2]
    program = Program(source, "c++", ProgramOptions(**chosen))
    return bytes(program.compile("cubin").code)


def _of_numba(kernel: Any, signature: Signature) -> DeviceCode:
    """A kernel of numba.cuda, compiled for the signature's types."""
    try:
        capability = _capability()
    except NoDeviceError:
        capability = _oldest  # PTX for it runs on all newer ones
    ptx, name = compilers.numba_ptx(kernel.py_func, signature, capability)
    image = ptx.encode() + b"\0"
    return DeviceCode(name, _digest(image), lambda: image, "numba", kernel.py_func.__name__)

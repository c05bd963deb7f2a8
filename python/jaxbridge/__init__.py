# SPDX-License-Identifier: Apache-2.0
"""A zero-copy bridge between JAX and the rest of the CUDA world."""

from . import _compat as _compat

_compat.check_version()

import atexit as _atexit
import os as _os
import sys as _sys
from importlib import metadata as _metadata

import jax

from . import _core as _core
from . import _derivatives as _derivatives
from . import _errors as _errors
from . import _lowering as _lowering
from . import _programs as _programs
from . import _views as _views
from . import errors as errors
from ._bind import bind as bind
from ._context import Context as Context
from ._context import current as current
from ._errors import reraise as reraise
from ._ffi import ffi as ffi
from ._from_external import from_external as from_external
from ._function import Function as Function
from ._function import call as call
from ._function import function as function
from ._inplace import inplace as inplace
from ._kernel import cuda_kernel as cuda_kernel
from ._lazy import lazy_apply as lazy_apply
from ._load import Library as Library
from ._load import load as load
from ._lowering import export_checks as export_checks
from ._native_author import get_cmake_dir as get_cmake_dir
from ._native_author import get_include as get_include
from ._ref import borrow as borrow
from ._ref import ref as ref
from ._release import release as release
from ._sharded import sharded as sharded
from ._signature import Parameter as Parameter
from ._signature import Signature as Signature
from ._to_external import to_external as to_external
from ._to_external import view as view
from ._torch import torch_function as torch_function
from ._torch import torch_module as torch_module
from ._ufunc import from_ufunc as from_ufunc
from ._views import buffer as buffer
from ._views import empty as empty
from ._views import pointer as pointer
from ._views import shares_memory as shares_memory

__version__ = _metadata.version("jaxbridge")

__all__ = [
    "Context",
    "Function",
    "Library",
    "Parameter",
    "Signature",
    "bind",
    "borrow",
    "buffer",
    "call",
    "cuda_kernel",
    "current",
    "empty",
    "errors",
    "export_checks",
    "ffi",
    "from_external",
    "from_ufunc",
    "function",
    "get_cmake_dir",
    "get_include",
    "inplace",
    "lazy_apply",
    "load",
    "pointer",
    "ref",
    "release",
    "reraise",
    "sharded",
    "shares_memory",
    "to_external",
    "torch_function",
    "torch_module",
    "view",
]

_core.set_dtypes(_views.dtype_table(_core.dtype_names()))


def _at_exit() -> None:
    # Calls that were made for their side effect are waited for; after that nothing calls Python, and
    # programs that still had to make a call end there.
    try:
        jax.effects_barrier()
    except (jax.errors.JaxRuntimeError, ExceptionGroup) as error:
        # Once, here: JAX would print it at each of its own steps.
        _compat.forget_failed_effects()
        for failure in _errors.unseen(error)[:1]:
            print(f"jaxbridge: a call made for its side effect failed: {failure}", file=_sys.stderr)
    finally:
        if _core.begin_exit() and _core.registry_size():
            _compat.wait_for_programs(seconds=10)


def _after_fork_in_child() -> None:
    # The threads that made calls and ran programs are the parent's: there is nothing to wait for.
    _core.after_fork_in_child()
    _atexit.unregister(_at_exit)
    _atexit.register(_core.begin_exit)


_atexit.register(_at_exit)
_os.register_at_fork(after_in_child=_after_fork_in_child)
_lowering.register_handlers()

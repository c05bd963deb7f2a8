# SPDX-License-Identifier: Apache-2.0
"""Each layering rule fires where it is broken, on small trees made for it, and not where it is kept."""

import inspect
from pathlib import Path

import pytest

import test_layering as layering

GOOD = {
    "include/jaxbridge/abi/xla_ffi.hpp": "#include <cstdint>\n",
    "include/jaxbridge/status.hpp": '#include <string>\n#include "abi/xla_ffi.hpp"\n',
    "src/core/exit.hpp": "bool exiting();\n",
    "src/core/dispatch/call.cpp": (
        '#include "jaxbridge/status.hpp"\n#include <jaxbridge/status.hpp>\n#include "core/exit.hpp"\n'
        "// not #include <Python.h>, nor Py_DECREF, cuInit or xla::ffi\n/* cuMemAlloc\n   nb::object */\n"
        "int currency, cucumber;\n"
    ),
    "src/core/cuda/driver.cpp": '#include "core/exit.hpp"\nauto name = "cuInit";\nint r = cuInit(0);\n',
    "src/python/py.hpp": "#include <nanobind/nanobind.h>\n#include <Python.h>\n",
    "src/python/module.cpp": (
        '#include "core/exit.hpp"\n#include "jaxbridge/status.hpp"\n#include "python/py.hpp"\n'
        'nb::object o = nb::module_::import_("numpy"); Py_INCREF(o.ptr());\n'
    ),
    "python/jaxbridge/__init__.py": (
        '"""Speaks of jax.ffi and jax._src and cuInit."""\nfrom ._function import call\n'
    ),
    "python/jaxbridge/_function.py": (
        "import jax\nimport numpy as np\n\nfrom . import _core  # not jax.ffi, not cuInit\n"
        "call = jax.jit\nffi = jax.custom_jvp\n"
    ),
    "python/jaxbridge/_compat.py": "from jax._src import core\nimport jaxlib\n",
    "python/jaxbridge/_lowering.py": "import jax\nimport jax.ffi\nrule = jax.ffi.ffi_lowering\n",
    "python/jaxbridge/_adapters/torch.py": "import torch\nfrom cupy import ndarray\n",
    "python/jaxbridge/compat/jaxbind.py": "import warp as wp\n",
}

# rule, file, content to append to it, part of the message, line within the appended text
BROKEN = [
    (
        "include_direction",
        "include/jaxbridge/status.hpp",
        '#include "core/exit.hpp"\n',
        "include includes core/exit.hpp",
    ),
    (
        "include_direction",
        "include/jaxbridge/status.hpp",
        "#include <core/exit.hpp>\n",
        "of src/core",
    ),
    (
        "include_direction",
        "include/jaxbridge/status.hpp",
        '#include "../../src/core/exit.hpp"\n',
        "of src/core",
    ),
    (
        "include_direction",
        "include/jaxbridge/status.hpp",
        '#include "../no/such/file.hpp"\n',
        "of outside",
    ),
    (
        "include_direction",
        "src/core/exit.hpp",
        '#include "python/py.hpp"\n',
        "src/core includes python/py.hpp",
    ),
    (
        "include_direction",
        "src/core/exit.hpp",
        '  #  include "../python/py.hpp"\n',
        "of src/python",
    ),
    (
        "include_direction",
        "src/core/exit.hpp",
        '#include "fakes/frame_builder.hpp"\n',
        "of tests/cpp",
    ),
    (
        "include_direction",
        "src/python/module.cpp",
        '#include "fakes/frame_builder.hpp"\n',
        "of tests/cpp",
    ),
    ("include_direction", "src/other/new.cpp", "int x;\n", "belongs to no layer"),
    (
        "foreign_headers",
        "include/jaxbridge/status.hpp",
        "#include <xla/ffi/api/c_api.h>\n",
        "xla/ffi/api/c_api.h",
    ),
    ("foreign_headers", "src/core/cuda/driver.cpp", "#include <cuda.h>\n", "cuda.h"),
    ("foreign_headers", "src/core/exit.hpp", "#include <dlpack/dlpack.h>\n", "dlpack/dlpack.h"),
    (
        "python_and_nanobind_headers",
        "src/core/exit.hpp",
        "#include <Python.h>\n",
        "only src/python/py.hpp",
    ),
    (
        "python_and_nanobind_headers",
        "src/python/module.cpp",
        '#include "Python.h"\n',
        "only src/python/py.hpp",
    ),
    (
        "python_and_nanobind_headers",
        "src/python/module.cpp",
        "#include <nanobind/stl/map.h>\n",
        "nanobind/stl/map.h",
    ),
    (
        "python_and_nanobind_headers",
        "include/jaxbridge/status.hpp",
        "#include <nanobind/nanobind.h>\n",
        "nanobind",
    ),
    ("python_names", "src/core/exit.hpp", "\nvoid f() { Py_DECREF(p); }\n", "Py_DECREF"),
    ("python_names", "include/jaxbridge/status.hpp", "extern PyObject* p;\n", "PyObject"),
    (
        "python_names",
        "src/core/dispatch/call.cpp",
        "int x; /* */ void g() { PyErr_Clear(); }\n",
        "PyErr_Clear",
    ),
    ("python_names", "src/core/dispatch/call.cpp", "nb::object o;\n", "nb::object"),
    (
        "cuda_names",
        "src/core/dispatch/call.cpp",
        "int r = cuStreamSynchronize(s);\n",
        "cuStreamSynchronize",
    ),
    ("cuda_names", "src/core/dispatch/call.cpp", 'auto f = dlsym(h, "cuInit");\n', "cuInit"),
    ("cuda_names", "src/python/module.cpp", "auto f = &cu.cuCtxGetCurrent;\n", "cuCtxGetCurrent"),
    ("cuda_names", "include/jaxbridge/status.hpp", "int cuInit(unsigned);\n", "cuInit"),
    ("cuda_names", "python/jaxbridge/_function.py", 'lib["cuMemAlloc_v2"]\n', "cuMemAlloc_v2"),
    (
        "jax_internals",
        "python/jaxbridge/_function.py",
        "from jax._src import core\n",
        "only python/jaxbridge/_compat.py",
    ),
    ("jax_internals", "python/jaxbridge/_function.py", "from jax import _src\n", "jax._src"),
    ("jax_internals", "python/jaxbridge/_function.py", "import jax._src.core as c\n", "jax._src"),
    (
        "jax_internals",
        "python/jaxbridge/_function.py",
        "def f():\n    return jax._src.core\n",
        "jax._src",
    ),
    (
        "jax_internals",
        "python/jaxbridge/_function.py",
        'm = importlib.import_module("jax._src.core")\n',
        "jax._src",
    ),
    ("jax_internals", "python/jaxbridge/_lowering.py", "import jax as j\nx = j._src\n", "jax._src"),
    ("jax_internals", "python/jaxbridge/_adapters/torch.py", "import jaxlib.version\n", "jaxlib"),
    (
        "jax_ffi",
        "python/jaxbridge/_compat.py",
        "import jax.ffi\n",
        "only python/jaxbridge/_lowering.py",
    ),
    ("jax_ffi", "python/jaxbridge/_function.py", "from jax import ffi\n", "jax.ffi"),
    ("jax_ffi", "python/jaxbridge/_function.py", "from jax.ffi import ffi_call\n", "jax.ffi"),
    ("jax_ffi", "python/jaxbridge/_function.py", "f = lambda: jax.ffi.ffi_call\n", "jax.ffi"),
    (
        "jax_ffi",
        "python/jaxbridge/compat/jaxbind.py",
        "import jax as j\nx = j.ffi.ffi_call\n",
        "jax.ffi",
    ),
    ("jax_ffi", "python/jaxbridge/_function.py", "from jax.extend import ffi\n", "jax.extend.ffi"),
    ("frameworks", "python/jaxbridge/_function.py", "import cupy\n", "import of cupy"),
    (
        "frameworks",
        "python/jaxbridge/_function.py",
        "def f():\n    import torch.utils\n",
        "import of torch.utils",
    ),
    ("frameworks", "python/jaxbridge/_lowering.py", "from numba import cuda\n", "import of numba"),
    ("frameworks", "python/jaxbridge/__init__.py", "import numpy, warp as wp\n", "import of warp"),
    (
        "frameworks",
        "python/jaxbridge/_function.py",
        'm = import_module("cupyx.scipy")\n',
        "import of cupyx.scipy",
    ),
    ("frameworks", "python/jaxbridge/_function.py", '__import__("torch")\n', "import of torch"),
    (
        "frameworks",
        "src/python/module.cpp",
        'auto t = nb::module_::import_("torch");\n',
        "import of torch",
    ),
    (
        "frameworks",
        "src/python/module.cpp",
        'auto t = PyImport_ImportModule("cupy.cuda");\n',
        "import of cupy.cuda",
    ),
    (
        "upward_imports",
        "src/python/module.cpp",
        'nb::module_::import_("jaxbridge._errors");\n',
        "jaxbridge._errors",
    ),
    ("lengths", "python/jaxbridge/_function.py", "x = 1\n" * 500, "more than 500"),
    ("lengths", "src/core/exit.hpp", "int x;\n" * 500, "more than 500"),
]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for path, text in GOOD.items():
        write(tmp_path / path, text)
    return tmp_path


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def violations(root: Path) -> dict[str, list[str]]:
    found = {c.__name__.removeprefix("check_"): list(c(root)) for c in layering.CHECKS}
    return {rule: messages for rule, messages in found.items() if messages}


def test_a_good_tree_passes(tree: Path) -> None:
    assert violations(tree) == {}


@pytest.mark.parametrize("rule, path, text, message", BROKEN)
def test_a_broken_rule_fires(tree: Path, rule: str, path: str, text: str, message: str) -> None:
    before = GOOD.get(path, "")
    write(tree / path, before + text)
    found = violations(tree)
    assert rule in found, found
    (first, *_) = found[rule]
    file, line, said = first.split(":", 2)
    assert file == path
    assert message in said
    assert before.count("\n") < int(line) <= (before + text).count("\n") or path not in GOOD
    # `#include "Python.h"` breaks one rule, not three: messages that repeat one another teach nothing.
    assert set(found) == {rule}


def test_every_rule_is_shown_to_fail() -> None:
    rules = {c.__name__.removeprefix("check_") for c in layering.CHECKS}
    assert {rule for rule, *_ in BROKEN} == rules
    defined = {
        name.removeprefix("check_")
        for name, value in inspect.getmembers(layering, inspect.isfunction)
        if name.startswith("check_")
    }
    assert defined == rules, "a check that is not in CHECKS never runs"

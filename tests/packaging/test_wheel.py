# SPDX-License-Identifier: Apache-2.0
"""The wheel: its name, what it holds and needs, and that it works where little else is."""

import json
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import zipfile

import pytest

from environments import ROOT, run_python

SMOKE = pathlib.Path(__file__).with_name("smoke.py")

# None of these may be in sys.modules after `import jaxbridge`: adapters come at their first use.
FRAMEWORKS = ("cupy", "cupyx", "torch", "numba", "warp", "array_api_extra", "sklearn", "skimage")

# What any Linux has, or gets with a C++ compiler's runtime. libdl and libpthread are names of libc.
NEEDED = re.compile(
    r"(libc|libm|libdl|libpthread|libstdc\+\+|libgcc_s|ld-linux-[a-z0-9-]+)\.so(\.\d+)?"
)


def environment(name: str) -> pathlib.Path:
    python = ROOT / "build" / name / "bin" / "python"
    if not python.exists():
        pytest.skip(f"build/{name} is missing; run: make test")
    return python


def loaded_frameworks(python: pathlib.Path, statement: str) -> list[str]:
    """The frameworks in sys.modules of a fresh interpreter after `statement`."""
    program = f"{statement}\nimport json, sys; print(json.dumps(sorted(sys.modules)))"
    modules = json.loads(run_python(python, "-c", program))
    return [name for name in modules if name in FRAMEWORKS]


def tool_output(*command: str | pathlib.Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_tag(wheel: pathlib.Path) -> None:
    version = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.M)[1]
    assert wheel.name == f"jaxbridge-{version}-cp312-abi3-linux_{platform.machine()}.whl"


def test_size(wheel: pathlib.Path) -> None:
    assert wheel.stat().st_size < 2 * 1024**2


def test_contents(wheel: pathlib.Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    headers = (path.relative_to(ROOT) for path in (ROOT / "include").rglob("*.hpp"))
    sources = (path.relative_to(ROOT / "python") for path in (ROOT / "python").rglob("*.py*"))
    expected = {
        "jaxbridge/_core.abi3.so",
        "jaxbridge/py.typed",
        "jaxbridge/cmake/jaxbridgeConfig.cmake",
        *(f"jaxbridge/{path}" for path in headers),
        *(str(path) for path in sources if path.suffix in (".py", ".pyi")),
    }
    assert expected <= names
    # One extension module, nothing beside the package, nothing of the machine's caches.
    assert [name for name in names if name.endswith(".so")] == ["jaxbridge/_core.abi3.so"]
    assert {name.split("/")[0].split("-")[0] for name in names} == {"jaxbridge"}
    assert not [name for name in names if "__pycache__" in name]


def test_exported_symbols(unpacked: pathlib.Path) -> None:
    module = unpacked / "jaxbridge" / "_core.abi3.so"
    lines = tool_output("nm", "-D", "--defined-only", module).splitlines()
    assert {line.split()[-1] for line in lines} == {"PyInit__core"}


def test_needed_libraries(unpacked: pathlib.Path) -> None:
    dynamic = tool_output("readelf", "-dW", unpacked / "jaxbridge" / "_core.abi3.so")
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic)
    assert needed
    assert [name for name in needed if not NEEDED.fullmatch(name)] == []
    assert "RPATH" not in dynamic
    assert "RUNPATH" not in dynamic


def test_names_no_path_of_the_build(unpacked: pathlib.Path) -> None:
    for path in unpacked.rglob("*"):
        if path.is_file():
            assert str(ROOT).encode() not in path.read_bytes(), path


def test_works_with_jax_and_numpy_alone(bare_python: pathlib.Path) -> None:
    assert "called" in run_python(bare_python, str(SMOKE))


def test_import_brings_no_framework(bare_python: pathlib.Path) -> None:
    assert loaded_frameworks(bare_python, "import jaxbridge") == []


def test_import_brings_no_framework_that_is_installed() -> None:
    """Here all that `make frameworks` installed could be imported."""
    assert loaded_frameworks(pathlib.Path(sys.executable), "import jaxbridge") == []


def test_the_check_for_frameworks_can_fail(bare_python: pathlib.Path) -> None:
    """With a stand-in for an adapter that is imported too early."""
    statement = "import sys, types; sys.modules['torch'] = types.ModuleType('torch')"
    assert loaded_frameworks(bare_python, statement) == ["torch"]


def test_headers_are_found_by_cmake(unpacked: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A native author's project: find_package, include, compile."""
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.25)\n"
        "project(author LANGUAGES CXX)\n"
        "find_package(jaxbridge 0.1 CONFIG REQUIRED)\n"
        "add_library(author OBJECT author.cpp)\n"
        "target_link_libraries(author PRIVATE jaxbridge::headers)\n"
    )
    (tmp_path / "author.cpp").write_text("#include <jaxbridge/jaxbridge.hpp>\n")
    package = unpacked / "jaxbridge" / "cmake"
    tool_output("cmake", "-S", tmp_path, "-B", tmp_path / "b", f"-Djaxbridge_DIR={package}")
    tool_output("cmake", "--build", tmp_path / "b")


def test_a_package_that_ships_a_library(unpacked: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """The template of examples/native, as a wheel: its library is inside, and is loaded."""
    pytest.importorskip("scikit_build_core")
    shutil.copytree(ROOT / "examples/native", tmp_path / "project")
    command = ["-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--no-index"]
    done = subprocess.run(
        [sys.executable, *command, "-w", str(tmp_path), str(tmp_path / "project")],
        capture_output=True,
        text=True,
        env={**os.environ, "JAXBRIDGE_CMAKE_DIR": str(unpacked / "jaxbridge/cmake")},
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    (theirs,) = tmp_path.glob("jb_ops-*.whl")
    assert theirs.name.endswith(f"-py3-none-linux_{platform.machine()}.whl")
    with zipfile.ZipFile(theirs) as archive:
        archive.extractall(tmp_path / "site")
    code = (
        "import jb_ops, jax, numpy as np\n"
        "x = np.ones((2, 3), np.float32)\n"
        "np.testing.assert_allclose(jax.jit(lambda x: jb_ops.filter(x, 0.5))(x)[:, 2], 1.75)\n"
    )
    path = os.pathsep.join([str(tmp_path / "site"), str(unpacked)])
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.env
def test_same_wheel_on_the_oldest_jax() -> None:
    python = environment("venv-oldest")
    assert "jax 0.8.0 called" in run_python(python, str(SMOKE))


@pytest.mark.env
def test_same_wheel_on_another_python() -> None:
    others = sorted(path.name for path in (ROOT / "build").glob("venv-py3.*"))
    if not others:
        pytest.skip("no second Python version (3.12, 3.13 or 3.14) on this machine")
    for name in others:
        version = name.removeprefix("venv-py").replace(".", " ")
        assert f"python {version} " in run_python(environment(name), str(SMOKE))

# SPDX-License-Identifier: Apache-2.0
"""Dependencies point one way: python/jaxbridge -> src/python -> src/core -> include.

Reads includes and imports; nothing is built. `test_layering_can_fail.py` shows that each rule can fail.
"""

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]

PACKAGE = "python/jaxbridge"
BINDINGS = "src/python"
CORE = "src/core"
PUBLIC = "include"

PY_HPP = f"{BINDINGS}/py.hpp"
CUDA = f"{CORE}/cuda"
ADAPTERS = (f"{PACKAGE}/_adapters/", f"{PACKAGE}/compat/")
FRAMEWORKS = frozenset({"cupy", "cupyx", "torch", "numba", "warp"})
LONGEST = 500

# What each C++ layer may include of ours.
MAY_INCLUDE = {
    PUBLIC: {PUBLIC},
    CORE: {CORE, PUBLIC},
    BINDINGS: {BINDINGS, CORE, PUBLIC},
}
# The first part of an include path names the layer.
LAYER_OF_INCLUDE = {"jaxbridge": PUBLIC, "core": CORE, "python": BINDINGS, "fakes": "tests/cpp"}
# Others' headers that nothing of ours may need.
FOREIGN = re.compile(r"xla/|dlpack/|cuda\.h$|cuda_runtime|nvrtc|cudnn|thrust/|cub/")

Violation = str


class Source(NamedTuple):
    path: str  # below the root, with slashes
    text: str

    def at(self, line: int, message: str) -> Violation:
        return f"{self.path}:{line}: {message}"


def sources(root: Path, *suffixes: str) -> Iterator[Source]:
    for top in (PACKAGE, "src", PUBLIC):
        for file in sorted((root / top).rglob("*")):
            if file.suffix in suffixes and file.is_file():
                yield Source(file.relative_to(root).as_posix(), file.read_text(encoding="utf-8"))


def layer_of(path: str) -> str | None:
    return next((layer for layer in MAY_INCLUDE if path.startswith(layer + "/")), None)


_COMMENT_OR_STRING = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)


def without_comments(text: str) -> str:
    """C++ without its comments; every line keeps its number."""

    def blank(found: re.Match[str]) -> str:
        return found[0] if found[0][0] == '"' else "\n" * found[0].count("\n")

    return _COMMENT_OR_STRING.sub(blank, text)


class Include(NamedTuple):
    line: int
    target: str
    quoted: bool


def includes(source: Source) -> Iterator[Include]:
    pattern = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')
    for number, line in enumerate(without_comments(source.text).splitlines(), 1):
        if found := pattern.match(line):
            yield Include(number, found[2], found[1] == '"')


def included_layer(root: Path, source: Source, include: Include) -> str | None:
    """The layer an include belongs to; None for what is not ours."""
    if include.quoted:
        beside = (root / source.path).parent / include.target
        if beside.exists():
            resolved = beside.resolve()
            if resolved.is_relative_to(root.resolve()):
                inside = resolved.relative_to(root.resolve()).as_posix()
                return layer_of(inside) or inside.split("/")[0]
    if include.target.startswith(".."):
        return "outside"
    return LAYER_OF_INCLUDE.get(include.target.split("/")[0])


def check_include_direction(root: Path) -> Iterator[Violation]:
    for source in sources(root, ".hpp", ".cpp", ".h"):
        layer = layer_of(source.path)
        if layer is None:
            yield source.at(1, f"belongs to no layer: expected one of {', '.join(MAY_INCLUDE)}")
            continue
        for include in includes(source):
            target = included_layer(root, source, include)
            if target is not None and target not in MAY_INCLUDE[layer]:
                yield source.at(include.line, f"{layer} includes {include.target} of {target}")


def check_foreign_headers(root: Path) -> Iterator[Violation]:
    for source in sources(root, ".hpp", ".cpp", ".h"):
        for include in includes(source):
            if FOREIGN.match(include.target) and not include.quoted:
                yield source.at(
                    include.line, f"<{include.target}>: declare what is used in abi/ or cuda/"
                )


def check_python_and_nanobind_headers(root: Path) -> Iterator[Violation]:
    for source in sources(root, ".hpp", ".cpp", ".h"):
        if source.path == PY_HPP:
            continue
        for include in includes(source):
            if re.match(r"(Python|structmember|pyerrors)\.h$|nanobind/|pybind11/", include.target):
                yield source.at(include.line, f"{include.target}: only {PY_HPP} includes it")


def check_python_names(root: Path) -> Iterator[Violation]:
    for source in sources(root, ".hpp", ".cpp", ".h"):
        if source.path.startswith(BINDINGS + "/"):
            continue
        for number, line in enumerate(without_comments(source.text).splitlines(), 1):
            for name in re.findall(r"\b(?:Py[A-Z]?\w*_\w+|PyObject|nb::\w+)", line):
                yield source.at(number, f"{name}: Python belongs to {BINDINGS}")


def check_cuda_names(root: Path) -> Iterator[Violation]:
    """Also within strings: dlsym finds a function by its name. Comments may speak of them."""
    for source in sources(root, ".hpp", ".cpp", ".h", ".py"):
        if source.path.startswith(CUDA + "/"):
            continue
        code = without_comments(source.text) if source.path[-3:] != ".py" else python_code(source)
        for number, line in enumerate(code.splitlines(), 1):
            for name in re.findall(r"\bcu[A-Z]\w+", line):
                yield source.at(number, f"{name}: driver symbols belong to {CUDA}")


def python_code(source: Source) -> str:
    """Python without comments and docstrings; every line keeps its number."""
    lines = source.text.splitlines()
    for node in ast.walk(ast.parse(source.text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            for number in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                lines[number - 1] = ""
    return "\n".join(re.sub(r"(^|\s)#.*", "", line) for line in lines)


class Import(NamedTuple):
    line: int
    module: str


def imports(source: Source) -> Iterator[Import]:
    """What a file imports, at any depth and by any means: dotted names, with the names taken from them.

    `jax.ffi.ffi_call` is named like an import of it, also where `jax` has another name.
    """
    tree = ast.parse(source.text)
    names = {"jax": "jax"}  # local name -> module, for attribute access
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(node.lineno, alias.name)
                if alias.asname:
                    names[alias.asname] = alias.name
        elif isinstance(node, ast.ImportFrom):
            package = "." * node.level + (node.module or "")
            for alias in node.names:
                separator = "" if package.endswith(".") else "."
                yield Import(node.lineno, f"{package}{separator}{alias.name}")
                names[alias.asname or alias.name] = f"{package}{separator}{alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (dotted := dotted_name(node, names)):
            yield Import(node.lineno, dotted)
        elif isinstance(node, ast.Call):
            function = ast.unparse(node.func).split(".")[-1]
            first = node.args[0] if node.args else None
            if (
                function in ("import_module", "__import__")
                and isinstance(first, ast.Constant)
                and isinstance(first.value, str)
            ):
                yield Import(node.lineno, first.value)


def dotted_name(node: ast.expr, names: dict[str, str]) -> str | None:
    if isinstance(node, ast.Name):
        module = names.get(node.id)
        return module if module is not None and module.split(".")[0] == "jax" else None
    if isinstance(node, ast.Attribute) and (owner := dotted_name(node.value, names)):
        return f"{owner}.{node.attr}"
    return None


def is_of(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def check_jax_internals(root: Path) -> Iterator[Violation]:
    compat = (f"{PACKAGE}/_compat.py", f"{PACKAGE}/_compat_partitioner.py")
    yield from _only_in(root, "jax._src", *compat)
    yield from _only_in(root, "jaxlib", *compat, f"{PACKAGE}/_diagnostics.py")


def check_jax_ffi(root: Path) -> Iterator[Violation]:
    yield from _only_in(root, "jax.ffi", f"{PACKAGE}/_lowering.py")
    yield from _only_in(root, "jax.extend.ffi", f"{PACKAGE}/_lowering.py")


def _only_in(root: Path, module: str, *files: str) -> Iterator[Violation]:
    for source in sources(root, ".py"):
        if source.path not in files:
            for line in sorted({i.line for i in imports(source) if is_of(i.module, module)}):
                yield source.at(line, f"{module}: only {' and '.join(files)} may use it")


def check_frameworks(root: Path) -> Iterator[Violation]:
    for source in sources(root, ".py"):
        if not source.path.startswith(ADAPTERS):
            for line, module in imports(source):
                if module.split(".")[0] in FRAMEWORKS:
                    yield source.at(
                        line, f"import of {module}: frameworks belong to _adapters/ and compat/"
                    )
    for source in sources(root, ".hpp", ".cpp"):
        for number, line in enumerate(without_comments(source.text).splitlines(), 1):
            for module in re.findall(r'[Ii]mport\w*\(\s*"([\w.]+)"', line):
                if module.split(".")[0] in FRAMEWORKS:
                    yield source.at(number, f"import of {module}: frameworks belong to _adapters/")


def check_upward_imports(root: Path) -> Iterator[Violation]:
    """C++ that imports our own package would know its users."""
    for source in sources(root, ".hpp", ".cpp"):
        for number, line in enumerate(without_comments(source.text).splitlines(), 1):
            for module in re.findall(r'[Ii]mport\w*\(\s*"([\w.]+)"', line):
                if module.split(".")[0] == "jaxbridge":
                    yield source.at(
                        number,
                        f"import of {module}: {PACKAGE} depends on this, not it on {PACKAGE}",
                    )


def check_lengths(root: Path) -> Iterator[Violation]:
    for source in sources(root, ".hpp", ".cpp", ".h", ".py"):
        count = source.text.count("\n")
        if count > LONGEST:
            yield source.at(
                count,
                f"{count} lines, more than {LONGEST}: usually that is two nouns, so two files",
            )


CHECKS: tuple[Callable[[Path], Iterator[Violation]], ...] = (
    check_include_direction,
    check_foreign_headers,
    check_python_and_nanobind_headers,
    check_python_names,
    check_cuda_names,
    check_jax_internals,
    check_jax_ffi,
    check_frameworks,
    check_upward_imports,
    check_lengths,
)


def pytest_generate_tests(metafunc) -> None:
    if "check" in metafunc.fixturenames:
        metafunc.parametrize(
            "check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_")
        )


def test_layering(check) -> None:
    found = list(check(ROOT))
    assert not found, "\n" + "\n".join(found)


def test_every_layer_is_read() -> None:
    """A moved directory would make every rule pass."""
    paths = [s.path for s in sources(ROOT, ".py", ".cpp", ".hpp")]
    for expected in (PY_HPP, f"{PACKAGE}/_compat.py", f"{PACKAGE}/_lowering.py"):
        assert expected in paths
    for layer in (CUDA, f"{CORE}/dispatch", f"{PUBLIC}/jaxbridge", f"{PACKAGE}/_adapters"):
        assert any(path.startswith(layer + "/") for path in paths), layer

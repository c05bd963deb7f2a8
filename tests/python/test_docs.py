# SPDX-License-Identifier: Apache-2.0
"""The documentation: its examples run, its links lead somewhere, and it names what there is.

The Python blocks of a page run one after the other in one namespace, as a reader would run them. A
comment before a block, `<!-- needs: cuda, torch -->`, names what it cannot run without, and
`<!-- file: NAME -->` says that it is a file: the page then runs in a directory where it is. On a GPU
machine JAX_PLATFORMS=cpu,cuda runs all: the blocks that need cuda there, the others on the CPU.
"""

import contextlib
import functools
import importlib.util
import inspect
import re
import shutil
import sys
import tempfile
import types
from pathlib import Path
from typing import NamedTuple

import jax
import pytest

import jaxbridge

root = Path(__file__).parents[2]
pages = sorted([*root.glob("*.md"), *root.glob("docs/**/*.md")])


class Block(NamedTuple):
    page: Path
    line: int
    needs: tuple[str, ...]
    code: str
    file: str = ""


_needs_comment = re.compile(r"<!-- needs: ([\w+, ]+) -->")
_file_comment = re.compile(r"<!-- file: ([\w./]+) -->")


def blocks_of(page: Path) -> list[Block]:
    """The Python blocks of a page, and those that are files."""
    blocks = []
    needs: tuple[str, ...] = ()
    fence, start, code, file = "", 0, [], ""
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if fence:
            if line.strip() == "```":
                if fence == "python" or file:
                    blocks.append(Block(page, start, needs, "\n".join(code) + "\n", file))
                fence, needs, code, file = "", (), [], ""
            else:
                code.append(line)
        elif line.startswith("```"):
            fence, start = line[3:].strip() or "text", number
        elif line.strip():
            found = _needs_comment.fullmatch(line.strip())
            needs = tuple(re.split(r",\s*", found[1])) if found else ()
            file = found[1] if (found := _file_comment.fullmatch(line.strip())) else ""
    assert not fence, f"{page}:{start}: the block has no end"
    return blocks


def missing(need: str) -> str | None:
    """Why a block that needs this cannot run here."""
    if need == "cuda":
        try:
            jax.devices("cuda")
        except RuntimeError:
            return "needs a CUDA device"
        return None
    if need in ("g++", "cmake"):
        return None if shutil.which(need) else f"needs {need}, which is not installed"
    if need == "in place":
        try:
            jaxbridge.ref(jaxbridge.empty((1,), "float32"))
        except RuntimeError as error:
            return f"needs a JAX that updates memory of others ({error})"
        return None
    if importlib.util.find_spec(need) is None:
        return f"needs {need}, which is not installed"
    return None


class Page:
    """A page's blocks, run in order, each once."""

    def __init__(self, path: Path) -> None:
        self.blocks = blocks_of(path)
        # A module, so that functions defined there have a place.
        self.module = types.ModuleType(f"docs_{path.stem.lower()}")
        sys.modules[self.module.__name__] = self.module
        self.done = 0
        has_files = any(b.file for b in self.blocks)
        self.directory = tempfile.TemporaryDirectory() if has_files else None

    def run_until(self, index: int) -> None:
        while self.done <= index:
            block = self.blocks[self.done]
            self.done += 1
            if block.file and self.directory:
                Path(self.directory.name, block.file).write_text(block.code)
            elif not any(map(missing, block.needs)):
                # The lines of the page, in tracebacks.
                code = compile("\n" * block.line + block.code, str(block.page), "exec")
                device = jax.devices("cuda")[0] if "cuda" in block.needs else None
                here = contextlib.chdir(self.directory.name) if self.directory else None
                with (
                    jax.default_device(device) if device else contextlib.nullcontext(),
                    here or contextlib.nullcontext(),
                ):
                    exec(code, self.module.__dict__)


@functools.cache
def page_of(path: Path) -> Page:
    return Page(path)


_examples = [(page, i) for page in pages for i in range(len(blocks_of(page)))]


@pytest.mark.parametrize(
    ("page", "index"),
    _examples,
    ids=[f"{p.relative_to(root)}:{blocks_of(p)[i].line}" for p, i in _examples],
)
def test_example_runs(page: Path, index: int) -> None:
    found = page_of(page)
    if reasons := list(filter(None, map(missing, found.blocks[index].needs))):
        pytest.skip("; ".join(reasons))
    found.run_until(index)


def test_readme_has_an_example_of_15_lines() -> None:
    first, *_ = blocks_of(root / "README.md")
    lines = [line for line in first.code.splitlines() if line.strip()]
    assert len(lines) <= 15
    assert "jaxbridge.call" in first.code


# ---- links and names -----------------------------------------------------------------------------


def anchors_of(page: Path) -> set[str]:
    """What a link can name in a page, as GitHub makes it of headings."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


_links = [
    (page, target)
    for page in pages
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    if not target.startswith(("http://", "https://"))
]


@pytest.mark.parametrize(
    ("page", "target"), _links, ids=[f"{p.relative_to(root)}->{t}" for p, t in _links]
)
def test_link_leads_somewhere(page: Path, target: str) -> None:
    name, _, anchor = target.partition("#")
    file = page if not name else page.parent / name
    assert file.exists()
    if anchor:
        assert anchor in anchors_of(file)


def test_every_page_is_reached_from_the_index() -> None:
    index = (root / "docs/index.md").read_text()
    unreached = [p.name for p in root.glob("docs/*.md") if f"({p.name}" not in index]
    assert unreached == ["index.md"]


@pytest.mark.parametrize("name", sorted(jaxbridge.__all__))
def test_public_name_is_documented(name: str) -> None:
    everything = "".join(p.read_text() for p in root.glob("docs/*.md"))
    assert re.search(rf"\b{name}\b", everything)


_options = sorted(
    name
    for name, p in inspect.signature(jaxbridge.call).parameters.items()
    if p.kind is inspect.Parameter.KEYWORD_ONLY
)


@pytest.mark.parametrize("option", _options)
def test_option_has_an_example(option: str) -> None:
    examples = "".join(b.code for b in blocks_of(root / "docs/functions.md"))
    assert re.search(rf"\b{option}=", examples)


def error_classes() -> list[str]:
    return sorted(
        name
        for name, x in vars(jaxbridge.errors).items()
        if isinstance(x, type) and issubclass(x, jaxbridge.errors.JaxbridgeError)
    )


@pytest.mark.parametrize("name", error_classes())
def test_error_class_is_documented(name: str) -> None:
    assert f"`{name}`" in (root / "docs/errors.md").read_text()


def test_environment_variables_are_documented() -> None:
    read = (root / "python/jaxbridge/_config.py").read_text()
    text = "".join(
        (root / f"docs/{p}.md").read_text() for p in ("errors", "functions", "native", "streams")
    )
    for name in set(re.findall(r"JAXBRIDGE_[A-Z]+(?:_[A-Z]+)*", read)):
        assert name in text


def test_download_sizes_are_those_that_setup_prints() -> None:
    printed = set(
        re.findall(r"the first time ([\d.]+ [MG]B)", (root / "scripts/setup.sh").read_text())
    )
    text = (root / "README.md").read_text()
    assert printed
    assert set(re.findall(r"[\d.]+ [MG]B", text)) == printed


# ---- the test itself -----------------------------------------------------------------------------


def test_a_wrong_example_fails(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("text\n\n```python\nx = 1\n```\n\n```python\n\nassert x == 2\n```\n")
    found = Page(page)
    found.run_until(0)
    with pytest.raises(AssertionError) as raised:
        found.run_until(1)
    assert raised.traceback[-1].lineno + 1 == 9


def test_needs_are_read_and_hold_for_one_block(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- needs: cuda, torch -->\n\n```python\n1/0\n```\n\n```python\ny = 1\n```\n"
        "```sh\nls\n```\n"
    )
    first, second = blocks_of(page)
    assert first.needs == ("cuda", "torch")
    assert second.needs == ()


def test_what_is_not_installed_is_named() -> None:
    assert missing("no_such_module") == "needs no_such_module, which is not installed"
    assert missing("numpy") is None


def test_function_takes_the_options_of_call() -> None:
    ours = list(inspect.signature(jaxbridge.call).parameters)[2:]
    theirs = list(inspect.signature(jaxbridge.function).parameters)
    assert theirs == ["given", "result", *ours]

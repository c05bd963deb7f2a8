# SPDX-License-Identifier: Apache-2.0
"""Runs JAXbind's tests against jaxbridge.compat.jaxbind: see README.md beside this file.

python tests/peers/run_jaxbind_tests.py PATH_TO_THEIR_test_FOLDER [pytest arguments]
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import jaxbridge.compat.jaxbind
import jaxbridge.compat.jaxbind.contrib
from jaxbridge.compat.jaxbind import _operator

runs = 0


def install() -> None:
    """Puts ours where `import jaxbind` finds it, and counts what runs through it."""
    ours = jaxbridge.compat.jaxbind
    sys.modules["jaxbind"] = ours
    sys.modules["jaxbind.contrib"] = ours.contrib
    make = _operator.Operator.function

    def counted(self: Any, count: int) -> Callable[..., Any]:
        global runs
        runs += 1
        return make(self, count)

    _operator.Operator.function = counted  # type: ignore[method-assign]


class _Report:
    """Says what was tested, and fails a run in which nothing of it was."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus == 0 and runs == 0:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.write_line(
            f"{runs} calls were made of jaxbridge" + ("" if runs else ": NOTHING WAS TESTED")
        )


def main(arguments: list[str]) -> int:
    if not arguments or not Path(arguments[0]).is_dir():
        print(__doc__, file=sys.stderr)
        return 2
    path = Path(arguments[0]).resolve()
    install()
    sys.dont_write_bytecode = True  # the tests may lie where nothing is to be written
    # This repository's own pytest settings and fixtures are not for another project's tests.
    options = ["-c", "/dev/null", f"--rootdir={path}", "--noconftest"]
    options += ["-p", "no:cacheprovider", "-rs", str(path)]
    return int(pytest.main([*options, *arguments[1:]], plugins=[_Report()]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

# SPDX-License-Identifier: Apache-2.0
"""Runs JAX's tests/buffer_callback_test.py against jaxbridge: see README.md beside this file.

python tests/peers/run_buffer_callback_test.py PATH_TO_TEST_FILE [pytest arguments]
"""

import sys
from pathlib import Path

import pytest

import buffer_callback_adapter as adapter


class _Report:
    """Says what was tested, and fails a run in which nothing of it was."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus == 0 and adapter.runs == 0:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.write_line(
            f"{adapter.runs} runs of a callback through jaxbridge"
            + ("" if adapter.runs else ": NOTHING WAS TESTED")
        )


def main(arguments: list[str]) -> int:
    if not arguments or not Path(arguments[0]).is_file():
        print(__doc__, file=sys.stderr)
        return 2
    path = Path(arguments[0]).resolve()
    adapter.install()
    sys.dont_write_bytecode = True  # the test file may lie where nothing is to be written
    # This repository's own pytest settings and fixtures are not for another project's tests.
    options = ["-c", "/dev/null", f"--rootdir={path.parent}", "--noconftest"]
    options += ["-p", "no:cacheprovider", "-rs", str(path)]
    return int(pytest.main([*options, *arguments[1:]], plugins=[_Report()]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

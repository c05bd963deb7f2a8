# SPDX-License-Identifier: Apache-2.0
"""Each acceptance case whose part is there has a test that is named after it, or a reason why not."""

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]

# Of the letters that are dealt with; the others come with their parts.
NUMBERS = {
    "A": "02 06 07 08 09 10 11 14 15 16 17 18 19 20 21 22 23",
    "B": "02 03 04 05 06 07 08 09 10 11 12",
    "C": "03 07 08 09 10 11 12 13 14 15 16 17",
    "D": "03 04 06 07 08 09 12 13",
    "E": "02 03 04 05 06 07 09 10 11 12",
    "F": "03 06 07 08 09 10 11 12 13 14 15 16 17 18 19",
    "G": "02 03 04 05 07 08 09 10 11 12 13 14 15 16 17 18 19",
    "H": "02 03 04 05 06 07 08",
    "I": "02 03 05 06 07 08",
    "J": "02 03 04 05 06 07 08",
    "K": "02 03 04 05 06 07 08 09 10 11 12 13",
    "L": "01 02 03 04 05 06",
    "M": "01 02 03",
    "N": "01 02 03",
}
CASES = {letter + number for letter, numbers in NUMBERS.items() for number in numbers.split()}


def cases_in(folder: str) -> set[str]:
    text = "".join(path.read_text() for path in (TESTS / folder).rglob("*.py"))
    return set(re.findall(r"^def test_([A-Z]\d\d)_", text, re.MULTILINE))


def ids_in(text: str) -> set[str]:
    """The cases that a text names; "A16 to A18" are three, as far as there are such."""
    named = set(re.findall(r"[A-Z]\d\d", text))
    for first, last in re.findall(r"([A-Z]\d\d) to ([A-Z]\d\d)", text):
        named |= {case for case in CASES if first <= case <= last}
    return named


def rows(page: str) -> list[set[str]]:
    """The ids in the first column of each table of a page."""
    return [
        {case for row in table.splitlines() for case in ids_in(row.split("|")[1])}
        for table in re.findall(r"(?:^\|.*\n)+", (TESTS / page).read_text(), re.MULTILINE)
    ]


def test_every_case_has_a_test_or_a_reason():
    not_applicable, _ = rows("NOT_APPLICABLE.md")
    (not_run,) = rows("NOT_RUN.md")
    here, on_gpu = cases_in("python"), cases_in("gpu") | cases_in("gpu_multi")
    assert CASES - here - on_gpu - not_applicable - not_run == set(), "without test or reason"
    assert (here | on_gpu) & not_applicable == set(), "tested, and said not to apply"
    assert on_gpu - not_run == set(), "tests/NOT_RUN.md does not say how these are run"
    assert (here | on_gpu | not_applicable | not_run) - CASES == set(), "unknown here"

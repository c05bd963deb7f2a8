# SPDX-License-Identifier: Apache-2.0
"""Which Functions share counts, graphs and what else is kept."""

from fake_gpu import N, Program, X, array, fake, like

import jaxbridge
from jaxbridge import _core


def test_functions_with_other_options_have_counts_and_graphs_of_their_own():

    def fn(v, out):  # told by its content
        _core.copy(v, out)

    plain, fast, named = (
        jaxbridge.call(fn, like, framework="buffer", out="out", **options)
        for options in ({}, {"graph": "replay"}, {"graph": "replay", "name": "test.counted"})
    )
    stream = fake.stream()
    calls = [(f, Program(f, X), array(N), array(N)) for f in (plain, fast, named)]
    for n, (_, program, a, b) in zip((7, 5, 3), calls, strict=True):
        for _ in range(n):
            program([a], [b], stream)
    assert [f.stats()["calls"] for f, *_ in calls] == [7, 5, 3]
    assert [f.stats()["captures"] for f, *_ in calls] == [0, 1, 1]
    plain.clear()
    for _, program, a, b in calls[1:]:
        program([a], [b], stream)
    assert [f.stats()["replays"] for f, *_ in calls] == [0, 4, 2]


def test_the_order_of_what_was_given_makes_no_other_function():
    def fn(v, out):
        _core.copy(v, out)

    both = [("cpu", "buffer"), ("cuda", "buffer")]
    first, second = (
        jaxbridge.call({"cuda": fn, "cpu": fn}, like, framework=dict(order), out="out")
        for order in (both, both[::-1])
    )
    program, stream = Program(second, X), fake.stream()
    program([array(N)], [array(N)], stream)
    assert first.stats()["calls"] == second.stats()["calls"] == 1

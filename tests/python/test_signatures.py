# SPDX-License-Identifier: Apache-2.0
"""Texts of signatures: what they say, and that nothing but a SignatureError comes of others."""

import contextlib
import random

import jax
import numpy as np
import pytest

from jaxbridge import Parameter, Signature
from jaxbridge._lengths import evaluate
from jaxbridge._native_function import result_types
from jaxbridge.errors import SignatureError

GOOD = [
    "x: float32[n, k], y: float32[k, m], out z: float32[n, m], n: int32, k: int32, a: float32 = 1.0",
    "float32[*,*], inout any[...], optional list int8, string, dict, complex64",
    'x: f64[3 * n + 1], s: string = "a, [b", workspace w: u8[max(n, 2) // 3], stream -> int',
    "const double x[n]",
    "lambda: int32, x: float32[n]",
]


@pytest.mark.parametrize("text", GOOD[:3])
def test_a_signature_is_told_by_its_text(text):
    parsed = Signature.parse(text)
    assert Signature.parse(str(parsed)) == parsed


@pytest.mark.parametrize(
    "text, reason",
    [
        (GOOD[3], "is no parameter"),
        (GOOD[4], "cannot be called 'lambda'"),
        ("x: float33[n]", "'float33' is no dtype"),
        ("x: float32[n", "without its other half"),
        ("x: float32[n.real]", "is no expression of lengths"),
        ("x: float32[__import__('os')]", "is no expression of lengths"),
        ("x: float32[n], x: float32[n]", "two parameters are called 'x'"),
        ("x: float32[n] = 3", "an array has no default"),
        ("out x: float32", "out is for arrays"),
        ("x: int32 = open", "is no Python literal"),
        ("x: float32[n],, y: int32", "an empty entry"),
        ("x: float32[n] -> float", "expected void, or int32"),
        (3, "is a string or a Signature"),
    ],
)
def test_no_signature(text, reason):
    with pytest.raises(SignatureError, match=reason):
        Signature.parse(text)


X = Parameter("x", "operand", "float32", ("n",))


@pytest.mark.parametrize(
    "make, reason",
    [
        (
            lambda: Parameter("x", "operandd", "float32", ("n",)),
            "the role 'operandd'; expected one of",
        ),
        (lambda: Parameter("x", "out"), "the role 'out'; expected one of operand, result"),
        (
            lambda: Parameter("x y", "operand", "float32", ("n",)),
            "'x y'; expected a Python identifier",
        ),
        (lambda: Parameter(3, "operand"), "is called 3; expected a Python identifier"),
        (lambda: Parameter("x", "operand", "float33", ("n",)), "'float33' is no dtype"),
        (lambda: Parameter("x", "operand", object(), ("n",)), "object object at .* is no dtype"),
        (lambda: Parameter("x", "operand", "float32", "nm"), "the shape 'nm'; expected one name"),
        (lambda: Parameter("x", "operand", "float32", (1.5,)), r"the shape \(1.5,\); expected one"),
        (lambda: Parameter("x", "operand", "float32", ("n+",)), "'n\\+' is no expression"),
        (lambda: Parameter("x", "operand", "float32", (), default=1), "it has no default"),
        (
            lambda: Parameter("x", "operand", "float32", (), "list"),
            "it has no default, and no form",
        ),
        (lambda: Parameter("x", "attribute", "float32", ("n",)), "has a shape, and is no array"),
        (lambda: Parameter("x", "attribute"), "'x' has no dtype; expected one"),
        (
            lambda: Parameter("x", "attribute", "int32", form="set"),
            "the form 'set'; expected one of",
        ),
        (
            lambda: Parameter("n", "size", "float32"),
            "a length, of float32; expected an integer type",
        ),
        (
            lambda: Signature((X, Parameter("m", "size", "int32"))),
            "no argument has one of that name",
        ),
        (lambda: Signature((X, "n: int32")), "is made of Parameters, and has 'n: int32'"),
        (lambda: Signature((X, X)), "two parameters are called 'x'"),
    ],
)
def test_objects_that_are_no_signature(make, reason):
    with pytest.raises(SignatureError, match=reason):
        make()


def test_objects_as_people_write_them():
    made = Signature(
        [
            Parameter("x", "operand", np.float32, ["n", 3]),
            Parameter("y", "result", np.dtype("int64"), (" 2 * n ",)),
            Parameter("z", "result", "double", ()),
            Parameter("n", "size", "int"),
        ]
    )
    assert made == Signature.parse(
        "x: float32[n, 3], out y: int64[2 * n], out z: float64[], n: int32"
    )


def test_any_text():
    """Mutations of good texts: a signature, or an error that says what is wrong."""
    rng = random.Random(0)
    pieces = [
        *"[](){},:=*/%+-.\"'\\\n\0é0",
        " out ",
        " inout ",
        "->",
        "**",
        "stream",
        "9" * 400,
        "(((((",
    ]
    parsed = 0
    for _ in range(4000):
        text = rng.choice(GOOD)
        for _ in range(rng.randrange(1, 3)):
            at = rng.randrange(len(text) + 1)
            end = rng.choice([at, at, min(at + rng.randrange(1, 9), len(text))])
            text = (
                text[:at] + rng.choice([*pieces, text[rng.randrange(len(text)) :][:6]]) + text[end:]
            )
            text = text or "x"
        try:
            signature = Signature.parse(text)
        except SignatureError:
            continue
        parsed += 1
        for p in signature.parameters:
            for axis in p.shape or ():
                if axis == "*":
                    continue
                with contextlib.suppress(SignatureError):
                    assert isinstance(evaluate(axis, {"n": 4, "k": 0, "m": -1}), int)
    assert parsed > 30


def test_expressions_that_grow_are_refused():
    deep = "(" * 300 + "n" + ")" * 300
    for text in ("*".join(["n"] * 600), deep, "n" * 1001):
        try:
            evaluate(text, {"n": 10**6})
        except SignatureError:
            continue
        assert len(text) <= 1200


def test_a_rule_that_names_no_operand():
    signature = Signature.parse("x: float32[n], out float32[n]")
    operand = jax.ShapeDtypeStruct((3,), np.float32)
    assert result_types("f", signature, ["same_as 0"], [operand], {}) == [((3,), np.float32)]
    with pytest.raises(TypeError, match=r"f: .* its rule is same_as<3>, and there are 1 operands"):
        result_types("f", signature, ["same_as 3"], [operand], {})

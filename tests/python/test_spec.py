# SPDX-License-Identifier: Apache-2.0
"""The canonical text of a call: what it holds comes back, and equal things give equal texts."""

import collections
import dataclasses
import decimal
import enum
import gc
import itertools
import json
import math
import re
import sys
import types
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxbridge
from identity_values import Bits, Letter, Level
from jaxbridge import _identity, _spec
from jaxbridge._spec import Slot, Template


class Color(enum.Enum):
    RED = 1
    CRIMSON = 1  # noqa: PIE796 (another name of RED)
    BLUE = 2


class Point(NamedTuple):
    x: object
    y: object = None


@dataclasses.dataclass(frozen=True)
class Settings:
    n: object
    cache: object = dataclasses.field(default=None, compare=False)


@dataclasses.dataclass(unsafe_hash=True)
class Changing:
    n: object


@dataclasses.dataclass(frozen=True, eq=False)
class Uncompared:
    n: object


@jax.tree_util.register_pytree_node_class
class Pair:
    def __init__(self, a, b, kind):
        self.a, self.b, self.kind = a, b, kind

    def tree_flatten(self):
        return (self.a, self.b), self.kind

    @classmethod
    def tree_unflatten(cls, kind, children):
        return cls(*children, kind)


def module_level(v):
    return v


class Tokens:
    """What a Function gives to values without a text: one token for equal ones."""

    def __init__(self):
        self.seen = {}

    def __call__(self, x):
        try:
            return self.seen.setdefault((type(x), x), self.token())
        except TypeError:
            return self.seen.setdefault(id(x), self.token())

    def token(self):
        return types.SimpleNamespace(text=f"token {len(self.seen)}")


def encode(tree, tokens=None):
    return _spec.encode(tree, tokens or Tokens(), _identity.Witness())


PORTABLE = [
    None, True, False, 0, 1, -1, 2**70, 0.0, -0.0, 1.5, 1e-310, math.inf, -math.inf, 0j,
    complex(0, -0.0), complex(-0.0, 0), 1.5 - 2j, "", "text", "☃", 'quote " \\ \n', "\ud800", b"",
    b"\x00\xff", (), [], {}, (1,), [1], (None,), ((), []), {"a": 1}, {"b": {"a": [1, (2.0, None)]}},
    {1: "a"}, {1: "a", 2: "b"}, {(1, 2): None}, {None: 1}, {1.5: {2: 3}}, {"": 1}, {b"k": 1},
    {Color.RED: 1}, ..., slice(None), slice(1, 2.5, "x"), slice(1, (2,)), range(3), range(5, 0, -2),
    frozenset(), frozenset({1, 2}), frozenset({"a", (1, 2)}), Color.RED, Color.BLUE, Color.CRIMSON,
    Level.LOW, Letter.A, Bits.A, Bits.A | Bits.B, Bits(0), re.IGNORECASE, re.IGNORECASE | re.DOTALL,
    Point(1), Point([1], {"a": 2}), int, float, dict, Color, Point, np.float32, jnp.float32,
    jnp.bfloat16, ml_dtypes.bfloat16, np.dtype("f4"), np.dtype(">f4"), np.dtype("c16"), np.dtype("?"),
    np.dtype("S3"), np.dtype("U2"), np.dtype("M8[ns]"), np.dtype(ml_dtypes.bfloat16),
    np.dtype(ml_dtypes.float8_e4m3fn), np.dtype("O"), len, math.sin, np.add, np.linalg.eigh,
    module_level, Slot(0), (Slot(1), [Slot(0), {"k": Slot(2)}]), {1: Slot(0)}, Point(Slot(0), 3),
]  # fmt: skip


def _id(value):
    """What it is, the same in every process."""
    if isinstance(value, frozenset) or " at 0x" in repr(value):
        return f"{type(value).__name__} {getattr(value, '__name__', len(str(value)))}"
    return f"{value!r:.40}".replace("\ud800", "?")


@pytest.mark.parametrize("value", PORTABLE, ids=_id)
def test_round_trip(value):
    encoded, portable = encode(value)
    assert portable
    text = _spec.to_text({"value": encoded})
    text.encode("ascii")
    decoded = _spec.decode(json.loads(text)["value"])
    assert type(decoded) is type(value) and repr(decoded) == repr(value)
    assert encode(decoded)[0] == encoded


def test_nan_round_trip():
    for value in (math.nan, complex(math.nan, 1), (math.nan,)):
        encoded, portable = encode(value)
        assert portable and repr(_spec.decode(json.loads(json.dumps(encoded)))) == repr(value)


def test_integers_of_any_length():
    """Python writes more than 4300 decimals only where that is allowed."""
    for value in (10**5000, -(10**5000)):
        encoded, portable = encode((value,))
        assert portable and _spec.decode(json.loads(json.dumps(encoded))) == (value,)


def test_different_things_have_different_texts():
    texts = collections.defaultdict(list)
    for value in PORTABLE:
        texts[json.dumps(encode(value)[0])].append(value)
    # Two names of one member are one value; jnp.bfloat16 and ml_dtypes' are two classes.
    assert all(len(v) == 1 or v == [Color.RED, Color.CRIMSON] for v in texts.values())


@pytest.mark.parametrize(
    "value",
    [
        object(), set(), bytearray(b"a"), lambda v: v, Settings(1), decimal.Decimal("1.0"),
        np.dtype([("a", "f4")]), (lambda v: v,), {"a": object()}, {1: object()}, Pair(1, 2, "kind"),
        collections.OrderedDict(a=1), collections.defaultdict(list), types.SimpleNamespace(),
    ],
    ids=lambda v: type(v).__name__,
)  # fmt: skip
def test_what_has_no_text_stays_in_this_process(value):
    tokens = Tokens()
    encoded, portable = encode(value, tokens)
    assert not portable
    assert encode(value, tokens)[0] == encoded
    with pytest.raises(LookupError, match="exists in one process only"):
        _spec.decode(json.loads(json.dumps(encoded)))


def test_nodes_of_registered_classes():
    tokens = Tokens()
    base = encode(Pair(1, [2], "kind"), tokens)[0]
    assert encode(Pair(1, [2], "kind"), tokens)[0] == base
    for other in (
        Pair(1, [2], "other"), Pair(1, [3], "kind"), Pair(True, [2], "kind"), Pair(1.0, [2], "kind"),
        Pair(1, (2,), "kind"), Pair(Slot(0), [2], "kind"), (1, [2]),
    ):  # fmt: skip
        assert encode(other, tokens)[0] != base, other


def test_class_of_a_function_has_no_text():
    class Local(NamedTuple):
        x: int

    class LocalColor(enum.Enum):
        RED = 1

    for value in (Local(1), LocalColor.RED, Local):
        assert not encode(value)[1]


def test_text_does_not_depend_on_order_or_hash_seed():
    a = encode({"x": frozenset({"p", "q", "r"}), "y": {3: 1, 1: 2}})[0]
    b = encode({"y": {1: 2, 3: 1}, "x": frozenset({"r", "q", "p"})})[0]
    assert a == b
    assert _spec.to_text({"b": 1, "a": 2}) == _spec.to_text({"a": 2, "b": 1}) == '{"a":2,"b":1}'


def test_keys_are_signed_and_stable():
    assert (
        _spec.key_of("")
        == 1449310910991872227
        == int.from_bytes(bytes.fromhex("e3b0c44298fc1c14"), "little")
    )
    keys = [_spec.key_of(str(i)) for i in range(100)]
    assert all(-(2**63) <= k < 2**63 for k in keys) and any(k < 0 for k in keys)
    assert len(set(keys)) == 100


# ---- decoding in another process -----------------------------------------------------------------


@pytest.fixture
def library():
    """A module that can change."""
    module = types.ModuleType("a_library_of_values")

    def define(source):
        for name in [n for n in vars(module) if not n.startswith("__")]:
            delattr(module, name)
        exec(source, module.__dict__)
        return module

    sys.modules[module.__name__] = module
    yield define
    sys.modules.pop(module.__name__, None)


BEFORE = """
import enum, typing
class Color(enum.Enum):
    RED = 1
class Point(typing.NamedTuple):
    x: int
def f(v): return v + 1
"""


@pytest.mark.parametrize(
    "what, after, text",
    [
        ("Color.RED", None, "'a_library_of_values' is not imported"),
        ("Color.RED", "", "has no 'Color.RED'"),
        ("Color.RED", "import enum\nclass Color(enum.Enum):\n    BLUE = 1", "has no 'Color.RED'"),
        ("Point(1)", "", "has no 'Point'"),
        ("Point", "", "has no 'Point'"),
        ("f", "", "has no 'f'"),
        ("f", "def f(v): return v + 2", "'a_library_of_values:f'.*other code"),
        ("f", "def f(v, k=1): return v + 1", "other code"),
        ("f", None, "not imported in this process; import it first"),
    ],
)
def test_what_is_not_there_or_another(library, what, after, text):
    encoded, portable = encode(eval(what, library(BEFORE).__dict__))
    assert portable
    library(BEFORE)
    _spec.decode(json.loads(json.dumps(encoded)))
    if after is None:
        del sys.modules["a_library_of_values"]
    else:
        library(after)
    with pytest.raises(LookupError, match=text):
        _spec.decode(json.loads(json.dumps(encoded)))


# ---- tokens of a Function ------------------------------------------------------------------------


def token_pairs():
    yield Settings(1), Settings(1), True
    for a, b in itertools.combinations([1, 1.0, True, 1 + 0j], 2):
        yield Settings(a), Settings(b), False
    yield Settings(0.0), Settings(-0.0), False
    yield Settings((0.0, 1)), Settings((0.0, True)), False
    yield Settings((1, 2)), Settings((1, 2)), True
    yield Settings(Settings(1)), Settings(Settings(True)), False
    yield Settings(math.nan), Settings(float("nan")), True
    yield Settings(1, cache="a"), Settings(1, cache="b"), True
    yield Settings([]), Settings([]), False  # what can change is itself only
    yield Changing(1), Changing(1), False
    yield Settings(Changing(1)), Settings(Changing(1)), False
    yield Uncompared(1), Uncompared(1), False
    yield {1}, {1}, False
    yield object(), object(), False
    yield decimal.Decimal(1), decimal.Decimal(1), True
    yield decimal.Decimal(1), 1, False


@pytest.mark.parametrize("a, b, equal", list(token_pairs()))
def test_tokens(a, b, equal):
    f = jaxbridge.call(module_level, module_level)
    first = f.callee.token(a)
    assert (f.callee.token(b) is first) == equal
    assert f.callee.token(a) is first
    other = jaxbridge.call(module_level, module_level).callee.token(a)
    assert other.text != first.text and not _identity.is_told(first.text)


def test_tokens_live_as_long_as_the_calls_that_have_them():
    f = jaxbridge.call(module_level, module_level)
    texts = {
        f.callee.token(set()).text for _ in range(50)
    }  # an id() can come back, a token must not
    assert len(texts) == 50 and len(f.callee._tokens) == 0
    witness = _identity.Witness()
    _spec.encode([{1}], f.callee.token, witness)
    gc.collect()
    assert len(f.callee._tokens) == 1
    del witness
    gc.collect()
    assert len(f.callee._tokens) == 0


# ---- templates -----------------------------------------------------------------------------------


def test_templates():
    tree = ((Slot(1), {"a": Slot(0), "b": 3, "n": None}), {"k": [Slot(2), "text"]})
    template = Template(tree)
    assert template.fill("xyz") == (("y", {"a": "x", "b": 3, "n": None}), {"k": ["z", "text"]})
    assert template.fill([[1], (2,), {}]) == (
        ((2,), {"a": [1], "b": 3, "n": None}),
        {"k": [{}, "text"]},
    )
    assert template.paths() == {1: "[0][0]", 0: "[0][1]['a']", 2: "[1]['k'][0]"}
    assert Template(Slot(0)).fill(["v"]) == "v" and Template(Slot(0)).paths() == {0: ""}
    assert Template((1, None)).fill([]) == (1, None) and Template(()).paths() == {}


def test_a_static_is_the_object_itself():
    thing = object()
    filled = Template(((Slot(0), [thing]), {})).fill([1])
    assert filled[0][1][0] is thing

# SPDX-License-Identifier: Apache-2.0
"""What the tests of identity and of keys tell apart."""

import enum


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Level(enum.IntEnum):
    LOW = 1


class Letter(enum.StrEnum):
    A = "a"


class Bits(enum.Flag):
    A = 1
    B = 2


class TaggedText(str):
    pass


class Callable:
    def __call__(self, v):
        return v

    def method(self, v):
        return v

    @classmethod
    def of_class(cls, v):
        return v

    @staticmethod
    def static(v):
        return v


class Special(Callable):
    pass


def closure(value):
    def f(v):
        return v, value

    return f

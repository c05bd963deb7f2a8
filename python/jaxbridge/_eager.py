# SPDX-License-Identifier: Apache-2.0
"""Eager calls that come again: what is kept of one, and what tells that another is the same.

To write out the text of a call and to look for its program takes many times as long as to run that.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from . import _compat, _identity, _primitive, _spec
from ._callee import Callee
from ._operands import Types

# What is written alike where it is equal and of one type.
_plain = (bool, int, str, bytes)

_most = 128


class Kept(NamedTuple):
    """What is the same for eager calls that are told alike: nothing of their arrays."""

    program: Callable[..., Any]
    # Of the call site, by which the exception of a call is found.
    key: int
    types: Types
    # The leaves and the tree of the declared results.
    results: Sequence[Any]
    tree: Any

    def declares(self, declared: Any, results: Sequence[Any], tree: Any) -> bool:
        """Whether the results of a call, and their leaves and tree, are these."""
        return (
            self.tree == tree
            and _spec.has_plain_keys(declared)
            and all(map(_are_same_type, self.results, results))
        )


def _are_same_type(x: Any, y: Any) -> bool:
    # Others that have a shape and a dtype can change them.
    if type(x) is not jax.ShapeDtypeStruct or type(y) is not jax.ShapeDtypeStruct:
        return False
    return x is y or (x.dtype == y.dtype and x.shape == y.shape)


class EagerCalls:
    """What is kept of the eager calls of one Function. It is bounded, and goes with the programs' cache."""

    def __init__(self) -> None:
        self._kept: weakref.WeakKeyDictionary[Any, dict[Any, Kept]] = weakref.WeakKeyDictionary()

    def find(self, callee: Callee, key: Any) -> Kept | None:
        """What is kept of a call with this key."""
        calls = self._kept.get(_primitive.programs_of(callee).of)
        return None if calls is None else calls.get(key)

    def add(self, key: Any, call: _primitive.BoundCall, types: Types, declared: Any) -> Kept:
        """Makes it of a call, and keeps it where there is a key.

        Args:
            key: of `key_of`.
            call: the call.
            types: of its operands.
            declared: its results.
        """
        program_of = _primitive.programs_of(call.site.callee).of
        results, tree = jax.tree.flatten(declared)
        kept = Kept(program_of(call), call.site.key, types, results, tree)
        if key is not None and kept.declares(declared, results, tree):
            calls = self._kept.setdefault(program_of, {})
            # All go, rather than the oldest: a call has no order to keep, and takes no lock.
            if len(calls) >= _most:
                calls.clear()
            calls[key] = kept
        return kept


def key_of(callee: Callee, arguments: Any, leaves: Sequence[Any], treedef: Any) -> Any:
    """What tells an eager call quickly: equal keys are of calls that are written alike.

    None where nothing does.

    Args:
        callee: what is called, as it is told now.
        arguments: (args, kwargs).
        leaves: of these; operands are arrays of JAX, or Refs that exist.
        treedef: of these.
    """
    key: list[Any] = [treedef, jax.config.jax_enable_x64, *callee.identities.values()]
    refs: set[int] = set()
    for leaf in leaves:
        kind = type(leaf)
        if kind is _compat.array_type:
            key += leaf.shape, leaf.dtype
        elif kind in _plain:
            key += kind, leaf
        elif kind is float:
            key += kind, _identity.float_text(leaf)
        elif _compat.is_ref(leaf):
            if id(leaf) in refs:  # an error
                return None
            refs.add(id(leaf))
            ref_type = jax.typeof(leaf)
            key += (type(ref_type), ref_type.inner_aval.shape), ref_type.inner_aval.dtype
        elif _is_told_by_the_object(leaf):
            key += object, _spec.ById(leaf)
        else:
            return None
    return tuple(key) if _spec.has_plain_keys(arguments) else None


def _is_told_by_the_object(x: Any) -> bool:
    """Whether a static value equals itself alone, and how it is written does not follow its content."""
    equal: Any = type(x).__eq__
    if equal is not object.__eq__:
        return False
    return not callable(x) or isinstance(x, (type, np.ufunc))

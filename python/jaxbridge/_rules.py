# SPDX-License-Identifier: Apache-2.0
"""What a user says of a Function's derivatives and of batches. Rules are JAX code."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple


class LinearIn(NamedTuple):
    """A function is linear in these arguments together."""

    argnums: tuple[int, ...]
    # Whether the transpose returns one cotangent rather than a tuple.
    is_single: bool
    transpose: Callable[..., Any]
    pass_avals: bool


class Jvp(NamedTuple):
    rule: Callable[..., Any]
    symbolic_zeros: bool


class Vjp(NamedTuple):
    fwd: Callable[..., Any]
    bwd: Callable[..., Any]


class Rules:
    """The rules of a Function.

    A rule that was missing is added in place, so that a program that was traced before has it, too.
    One that replaces another makes new rules: what was traced before keeps the old ones.
    """

    def __init__(self) -> None:
        self.linear: tuple[LinearIn, ...] | None = None
        self.jvp: Jvp | None = None
        self.vjp: Vjp | None = None
        self.vmap: Callable[..., Any] | None = None

    def with_rule(self, kind: Literal["linear", "jvp", "vjp", "vmap"], rule: Any) -> "Rules":
        """These rules and another one."""
        rules = self
        if getattr(self, kind) is not None:
            rules = Rules()
            rules.__dict__.update(self.__dict__)
        setattr(rules, kind, rule)
        return rules

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Rules) and self.__dict__ == other.__dict__)

    def __hash__(self) -> int:
        return hash(Rules)  # what it is equal to can change

    def __repr__(self) -> str:
        given = [kind for kind, rule in self.__dict__.items() if rule is not None]
        return f"<rules: {', '.join(given) or 'none'}>"


no_rules = Rules()


def linear_rules(name: str, transpose: Any, argnums: Any, pass_avals: bool) -> tuple[LinearIn, ...]:
    """What `Function.deflinear` was given, checked."""
    if isinstance(transpose, Mapping):
        if argnums != 0:
            raise TypeError(
                f"{name}: deflinear: argnums={argnums!r} beside a mapping, whose keys say which arguments "
                f"each transpose is of; leave it out"
            )
        given = dict(transpose)
    else:
        given = {tuple(argnums) if isinstance(argnums, list) else argnums: transpose}
    groups = []
    for positions, rule in given.items():
        is_single = _is_position(positions)
        together = (positions,) if is_single else positions
        if not (isinstance(together, tuple) and together and all(map(_is_position, together))):
            raise TypeError(
                f"{name}: deflinear: an argument is named by {positions!r}; expected its position, 0 or "
                f"more, or a tuple of positions for arguments in which it is linear together"
            )
        _check_callable(name, "deflinear", "the transpose", rule)
        groups.append(LinearIn(tuple(together), is_single, rule, pass_avals))
    every = [position for group in groups for position in group.argnums]
    if not groups or len(set(every)) != len(every):
        raise TypeError(f"{name}: deflinear: expected each argument once, got {sorted(every)}")
    return tuple(groups)


def _is_position(x: Any) -> bool:
    return type(x) is int and x >= 0


def _check_callable(name: str, method: str, what: str, rule: Any) -> None:
    if not callable(rule):
        raise TypeError(f"{name}: {method}: {what} is {rule!r}; expected a function")


def check(name: str, method: str, **rules: Any) -> None:
    """Raises TypeError where a rule is no function."""
    for what, rule in rules.items():
        _check_callable(name, method, what, rule)


class WithRules:
    """The part of a Function that takes rules."""

    @property
    def name(self) -> str:
        raise NotImplementedError

    def __init__(self) -> None:
        self._rules = Rules()

    def deflinear(
        self,
        transpose: Callable[..., Any] | Mapping[int | tuple[int, ...], Callable[..., Any]],
        argnums: int | tuple[int, ...] = 0,
        *,
        pass_avals: bool = False,
    ) -> Any:
        """Says that the function is linear in some arguments: its derivatives of any order are known.

        Args:
            transpose: `transpose(ct, *others, **keywords)` gets the cotangent of the results, a tree as
                they are, then the arguments by position that are not in `argnums`, and those by
                keyword; it returns the cotangent of the argument (None for zero), or a tuple for a tuple
                of them. It is the transpose, not the adjoint: nothing is conjugated. A mapping from
                `argnums` to transposes where the function is linear in each of them by itself.
            argnums: position of the argument, or a tuple of those in which it is linear together.
            pass_avals: `transpose` also gets `avals=`: the arguments in `argnums` as
                `jax.ShapeDtypeStruct`, for a result that does not tell their shapes.

        Returns:
            `transpose`, so that this can be a decorator.

        Raises:
            TypeError: what is given is no function, or names no arguments.
        """
        rule = linear_rules(self.name, transpose, argnums, pass_avals)
        self._rules = self._rules.with_rule("linear", rule)
        return transpose

    def defjvp(self, rule: Callable[..., Any], *, symbolic_zeros: bool = False) -> Any:
        """Gives the derivative as a rule of forward mode, as `jax.custom_jvp` has it.

        Where there is no rule of `defvjp`, reverse mode transposes what this one does to the tangents.

        Args:
            rule: `rule(primals, tangents, **keywords)` gets the arguments by position as a tuple, their
                tangents likewise (None for what is no array, dtype float0 for integers), and those by
                keyword; it returns the results and their tangents (None for a zero). It is JAX code, and
                may call this Function and others.
            symbolic_zeros: tangents that are zero are `jax.custom_derivatives.SymbolicZero`.

        Returns:
            `rule`, so that this can be a decorator.
        """
        check(self.name, "defjvp", rule=rule)
        self._rules = self._rules.with_rule("jvp", Jvp(rule, symbolic_zeros))
        return rule

    def defvjp(self, fwd: Callable[..., Any], bwd: Callable[..., Any]) -> None:
        """Gives the derivative as rules of reverse mode, as `jax.custom_vjp` has it.

        Forward mode needs a rule of `defjvp` as well. With both, the arguments are kept for the backward
        pass beside the residuals.

        Args:
            fwd: `fwd(*args, **keywords)` returns the results, and residuals: a tree of arrays.
            bwd: `bwd(residuals, ct, **keywords)` gets the cotangent of the results and returns a tuple of
                cotangents, one for each argument by position (None for a zero, or what is no array).
        """
        check(self.name, "defvjp", fwd=fwd, bwd=bwd)
        self._rules = self._rules.with_rule("vjp", Vjp(fwd, bwd))

    def defvmap(self, rule: Callable[..., Any]) -> Any:
        """Says how to call the function for a whole batch; it goes before `vmap_method`.

        Args:
            rule: `rule(axis_size, in_batched, *args, **keywords)` gets the arguments with a batch axis in
                front where `in_batched`, a tuple of trees as the arguments by position are, has True; it
                returns the results, and a tree of bools (or one) that says which have a batch axis.

        Returns:
            `rule`, so that this can be a decorator.
        """
        check(self.name, "defvmap", rule=rule)
        self._rules = self._rules.with_rule("vmap", rule)
        return rule

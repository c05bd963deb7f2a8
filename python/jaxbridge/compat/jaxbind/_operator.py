# SPDX-License-Identifier: Apache-2.0
"""A function in JAXbind's convention as a jaxbridge Function."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

import jaxbridge
from jaxbridge._errors import DerivativeError

from ._keywords import load_kwargs, static

# On every platform with NumPy's arrays, or one for each platform.
External = Callable[..., None] | Mapping[str, Callable[..., None]]
Abstract = Callable[..., Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Operator:
    """What a call was made of, and what its derivatives and batches are made of.

    Those are operators too, kept here, so that JAX meets the same functions again.
    """

    f: External
    abstract: Abstract
    # Of a nonlinear one, its transposed Jacobian.
    transpose: External | tuple[External | None, ...] | None
    abstract_transpose: Abstract | tuple[Abstract | None, ...] | None
    jvp: External | None = None
    kind: Literal["linear", "multilinear", "nonlinear"] = "linear"
    first_n_args_fixed: int = 0
    can_batch: bool = False
    batch_axes: tuple[tuple[int, ...], ...] | None = None
    _made: dict[Any, Any] = dataclasses.field(default_factory=dict, init=False, repr=False)

    def _replace(self, **changes: Any) -> Self:
        return dataclasses.replace(self, **changes)

    @property
    def name(self) -> str:
        f = next(iter(self.f.values())) if isinstance(self.f, Mapping) else self.f
        return getattr(f, "__name__", None) or type(f).__name__

    def _once(self, key: Any, make: Callable[[], Any]) -> Any:
        found = self._made.get(key)
        return self._made.setdefault(key, make()) if found is None else found

    def function(self, count: int) -> "jaxbridge.Function[..., Any]":
        """The Function for so many arguments."""
        return self._once(("function", count), lambda: self._function(count))  # type: ignore[no-any-return]

    def _function(self, count: int) -> "jaxbridge.Function[..., Any]":
        is_mapping = isinstance(self.f, Mapping)
        function = jaxbridge.call(
            {p: self._adapted(f) for p, f in self.f.items()}  # type: ignore[union-attr]
            if is_mapping
            else self._adapted(self.f),
            self.results,
            framework=None if is_mapping else "numpy",
            out=0,
            has_side_effect=False,
            vmap_method=None if self.can_batch else "sequential",
        )
        moving = tuple(range(self.first_n_args_fixed, count))
        if self.kind == "linear":
            function.deflinear(self._joint_transpose, moving)
        elif self.kind == "multilinear":
            function.deflinear({i: self._transpose_in(i) for i in moving})
        else:
            function.defjvp(self._jvp, symbolic_zeros=True)
        if self.can_batch:
            function.defvmap(self._batch)
        return function

    def _adapted(self, f: Any) -> Callable[..., Any]:
        """A function in JAXbind's convention in that of jaxbridge, with `out=0`."""
        axes = self.batch_axes
        work: Callable[..., Any]
        if self.can_batch:

            def work(out: Any, *args: Any, **kwargs: Any) -> Any:
                return f(out, args, {**kwargs, "batch_axes": axes})

        else:

            def work(out: Any, *args: Any, **kwargs: Any) -> Any:
                return f(out, args, kwargs)

        work.__name__ = work.__qualname__ = self.name
        return work

    def described(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Any]:
        """Shape and dtype of each result, and what else `abstract` says."""
        own = load_kwargs(kwargs)
        if self.can_batch:
            own["batch_axes"] = self.batch_axes
        avals = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in args)
        got = self.abstract(*avals, **own)
        try:
            described = tuple(got)
            for shape, dtype, *_ in described:
                jax.ShapeDtypeStruct(shape, dtype)
        except (TypeError, ValueError):
            raise TypeError(
                f"{self.name}: abstract returned {got!r}; expected a tuple with (shape, dtype) for each "
                f"result, as ((x.shape, x.dtype),)"
            ) from None
        return described

    def results(self, *args: Any, **kwargs: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        return tuple(jax.ShapeDtypeStruct(d[0], d[1]) for d in self.described(args, kwargs))

    # ---- derivatives -------------------------------------------------------------------------

    def _joint_transpose(
        self, cotangents: Sequence[Any], *fixed: Any, **kwargs: Any
    ) -> tuple[Any, ...]:
        def make() -> Operator:
            if self.transpose is None or self.abstract_transpose is None:
                raise NotImplementedError(f"{self.name}: its transpose was not given")
            return self._replace(
                f=self.transpose,
                transpose=self.f,
                abstract=self.abstract_transpose,
                abstract_transpose=self.abstract,
                first_n_args_fixed=len(fixed),
            )

        transposed = self._once(("transpose", len(fixed)), make)
        return tuple(
            transposed.function(len(fixed) + len(cotangents))(*fixed, *cotangents, **kwargs)
        )

    def _transpose_in(self, argument: int) -> Callable[..., Any]:
        def make() -> Operator:
            try:
                f, abstract = self.transpose[argument], self.abstract_transpose[argument]  # type: ignore[index]
            except (TypeError, IndexError):
                f = abstract = None
            if f is None or abstract is None:
                raise NotImplementedError(
                    f"{self.name}: its transpose in argument {argument} was not given"
                )
            return self._replace(f=f, transpose=None, abstract=abstract, abstract_transpose=None)

        def transpose(cotangents: Sequence[Any], *others: Any, **kwargs: Any) -> Any:
            transposed = self._once(("transpose in", argument), make)
            (out,) = transposed.function(len(others) + len(cotangents))(
                *others, *cotangents, **kwargs
            )
            return out

        return transpose

    def _jvp(
        self, primals: Sequence[Any], tangents: Sequence[Any], **kwargs: Any
    ) -> tuple[Any, Any]:
        count, fixed = len(primals), self.first_n_args_fixed
        for i, tangent in enumerate(tangents[:fixed]):
            if not isinstance(tangent, SymbolicZero):
                raise DerivativeError(
                    f"{self.name}: a derivative in argument {i} was asked for, and the first {fixed} "
                    f"arguments have none (first_n_args_fixed={fixed})"
                )

        def make() -> Operator:
            # Reverse mode only transposes it, and needs no function for that.
            jvp = self._without_jvp if self.jvp is None else self.jvp
            return self._replace(f=jvp, jvp=None, kind="linear", first_n_args_fixed=count)

        jacobian = self._once(("jacobian", count), make)
        moving = [
            jnp.zeros_like(x) if isinstance(t, SymbolicZero) else t
            for x, t in zip(primals[fixed:], tangents[fixed:], strict=True)
        ]
        outs = self.function(count)(*primals, **kwargs)
        return outs, jacobian.function(count + len(moving))(*primals, *moving, **kwargs)

    def _without_jvp(self, *_: Any) -> None:
        raise NotImplementedError(
            f"{self.name}: forward mode needs the first of f_derivative, the Jacobian times tangents, "
            f"and it was not given"
        )

    # ---- batches -----------------------------------------------------------------------------

    def _batch(
        self, size: int, in_batched: Sequence[bool], *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], tuple[bool, ...]]:
        before = self.batch_axes or ((),) * len(args)
        # The new axis is in front.
        axes = tuple(
            (*(axis + 1 for axis in old), 0) if is_batched else old
            for old, is_batched in zip(before, in_batched, strict=True)
        )
        batched: Operator = self._once(("batch", axes), lambda: self._replace(batch_axes=axes))
        outs = batched.function(len(args))(*args, **kwargs)
        where: list[Any] = [d[2] if len(d) > 2 else None for d in batched.described(args, kwargs)]
        front = (
            jnp.moveaxis(o, a, 0) if _is_axis(a) else o for o, a in zip(outs, where, strict=True)
        )
        return tuple(front), tuple(map(_is_axis, where))


def _is_axis(x: Any) -> bool:
    return isinstance(x, (int, np.integer))


def call(*args: Any, _func: Operator, **kwargs: Any) -> list[Any]:
    """Calls an operator with arrays by position and static values by keyword."""
    if len(args) <= _func.first_n_args_fixed:
        raise TypeError(
            f"{_func.name}: {len(args)} arguments by position, of which the first "
            f"{_func.first_n_args_fixed} are fixed; expected more"
        )
    arrays = [x if hasattr(x, "dtype") else jnp.asarray(x) for x in args]
    return list(_func.function(len(args))(*arrays, **static(kwargs)))

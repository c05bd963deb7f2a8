# SPDX-License-Identifier: Apache-2.0
"""Filters along the last axis, with derivatives."""

import functools
from importlib import resources

import jax

import jaxbridge

with resources.as_file(resources.files(__package__).joinpath("libops.so")) as _path:
    _ops = jaxbridge.load(_path)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def filter(x, decay):
    """y[t] = x[t] + decay * y[t - 1], along the last axis of a matrix."""
    return _ops.filter(x, decay)


def _forward(x, decay):
    return _ops.filter(x, decay), None


def _backward(decay, _, ct):
    return (_ops.filter_transposed(ct, decay),)


filter.defvjp(_forward, _backward)

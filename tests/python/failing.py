# SPDX-License-Identifier: Apache-2.0
"""What the tests of exceptions share."""

import jax
import pytest


class Stubborn(Exception):
    """Can't be made again from its `args`."""

    def __init__(self, code, *, reason):
        super().__init__(f"{reason} ({code})")
        self.code = code


def jax_error(f, *args):
    """The text of the error that JAX raises."""
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        jax.block_until_ready(f(*args))
    return str(caught.value)

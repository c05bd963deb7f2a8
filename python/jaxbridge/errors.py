# SPDX-License-Identifier: Apache-2.0
"""The errors that jaxbridge itself finds."""


class JaxbridgeError(Exception):
    """Base of the errors that jaxbridge itself finds."""


class ResultError(JaxbridgeError, TypeError):
    """A function returned other results than were declared."""


class ViewKeptError(JaxbridgeError, RuntimeError):
    """A function kept a view of its arguments or results after it returned."""


class InputChangedError(JaxbridgeError, RuntimeError):
    """A function wrote to an argument that is not declared in place."""


class ReplayError(JaxbridgeError, RuntimeError):
    """A replay of a CUDA graph gave other results than the function that was captured into it."""


class NotRegisteredError(JaxbridgeError, LookupError):
    """A program calls a function that this process does not know."""


class PlatformError(JaxbridgeError, ValueError):
    """A function is not there for the platform that it is to run on."""


class DerivativeError(JaxbridgeError, TypeError):
    """A derivative was asked of a function that has no rule for it."""


class BatchingError(JaxbridgeError, ValueError):
    """vmap was asked of a function that says nothing about it."""


class ShardingError(JaxbridgeError, ValueError):
    """A sharding rule does not fit, or arrays are sharded where a call cannot be split."""


class SignatureError(JaxbridgeError, ValueError):
    """A text is no signature of a native function, or the function can have no such parameter."""

# SPDX-License-Identifier: Apache-2.0
"""The names of other projects, on top of jaxbridge."""

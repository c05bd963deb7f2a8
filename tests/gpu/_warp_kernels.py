# SPDX-License-Identifier: Apache-2.0
"""Warp compiles a kernel from its source file, so it stands in a module."""

import warp as wp


@wp.kernel
def slow_add(v: wp.array(dtype=wp.float32), n: wp.int32, out: wp.array(dtype=wp.float32)):
    """out = v + 1, after n rounds of arithmetic that depends on v."""
    i = wp.tid()
    s = wp.float32(0.0)
    for _k in range(n):
        s = s * wp.float32(0.999) + v[0] * wp.float32(0.0)
    out[i] = v[i] + wp.float32(1.0) + s


@wp.kernel
def add_one(v: wp.array(dtype=wp.float32), out: wp.array(dtype=wp.float32)):
    i = wp.tid()
    out[i] = v[i] + wp.float32(1.0)

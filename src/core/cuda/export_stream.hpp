// SPDX-License-Identifier: Apache-2.0
// A stream of ours on which arrays become ready for others.
#pragma once

#include <jaxbridge/status.hpp>
#include <jaxbridge/stream.hpp>

namespace jaxbridge::cuda {

/// A stream of a device that carries no work, only waits: JAX makes it wait for an array, and
/// whoever takes the array waits for it. Named as the stream of an array interface, it makes nobody
/// wait for anything but arrays of JAX. Made at the first call for that device and then kept until
/// the process ends. Any thread.
[[nodiscard]] result<stream_ref> export_stream(int ordinal);

/// Gives every one back. No other thread may use CUDA meanwhile.
void release_export_streams_for_testing();

}  // namespace jaxbridge::cuda

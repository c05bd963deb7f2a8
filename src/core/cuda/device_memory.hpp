// SPDX-License-Identifier: Apache-2.0
// Devices and their memory: how many there are, what is done to memory on a stream.
#pragma once

#include <cstddef>
#include <jaxbridge/status.hpp>
#include <jaxbridge/stream.hpp>

namespace jaxbridge::cuda {

/// Enqueues a copy within a device; the stream's context is current. Nothing for 0 bytes.
[[nodiscard]] jaxbridge::status copy(void* to, const void* from, std::size_t bytes,
                                     stream_ref stream);

/// Enqueues setting every byte to `value`. Nothing for 0 bytes.
[[nodiscard]] jaxbridge::status fill(void* to, unsigned char value, std::size_t bytes,
                                     stream_ref stream);

/// The host waits for all that was enqueued on `stream`: call it without the GIL and without a
/// lock.
[[nodiscard]] jaxbridge::status synchronize(stream_ref stream);

/// The host waits for all that the current context was given: call it without the GIL and without a
/// lock. An error, and the end of it, for a capture that is under way.
[[nodiscard]] jaxbridge::status synchronize_context();

/// How many devices the driver shows this process; 0 without a driver.
[[nodiscard]] int device_count() noexcept;

}  // namespace jaxbridge::cuda

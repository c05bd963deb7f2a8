// SPDX-License-Identifier: Apache-2.0
// Devices and their memory: how many there are, what is done to memory on a stream.
#pragma once

#include <cstddef>
#include <jaxbridge/status.hpp>
#include <jaxbridge/stream.hpp>
#include <utility>

namespace jaxbridge::cuda {

/// Enqueues a copy within a device; the stream's context is current. Nothing for 0 bytes.
[[nodiscard]] jaxbridge::status copy(void* to, const void* from, std::size_t bytes,
                                     stream_ref stream);

/// Enqueues setting every byte to `value`. Nothing for 0 bytes.
[[nodiscard]] jaxbridge::status fill(void* to, unsigned char value, std::size_t bytes,
                                     stream_ref stream);

/// Device memory of our own.
class [[nodiscard]] device_block {
 public:
  /// At least 1 byte, aligned to 256. Blocks, and not in a capture of this thread.
  [[nodiscard]] static result<device_block> allocate(int ordinal, std::size_t bytes);

  device_block(device_block&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), ordinal_(other.ordinal_) {}
  device_block(const device_block&) = delete;
  device_block& operator=(const device_block&) = delete;
  device_block& operator=(device_block&&) = delete;
  /// Waits for the device.
  ~device_block();

  [[nodiscard]] std::byte* at(std::size_t offset) const noexcept { return data_ + offset; }

 private:
  device_block(std::byte* data, int ordinal) noexcept : data_(data), ordinal_(ordinal) {}

  std::byte* data_;  // null: moved from
  int ordinal_;
};

/// The host waits for all that was enqueued on `stream`: call it without the GIL and without a
/// lock.
[[nodiscard]] jaxbridge::status synchronize(stream_ref stream);

/// The host waits for all that the current context was given: call it without the GIL and without a
/// lock. An error, and the end of it, for a capture that is under way.
[[nodiscard]] jaxbridge::status synchronize_context();

/// How many devices the driver shows this process; 0 without a driver.
[[nodiscard]] int device_count() noexcept;

}  // namespace jaxbridge::cuda

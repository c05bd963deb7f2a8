// SPDX-License-Identifier: Apache-2.0
// An event that marks a point in a stream, leased from a pool per device.
#pragma once

#include <cstddef>
#include <jaxbridge/status.hpp>
#include <jaxbridge/stream.hpp>
#include <utility>

#include "core/cuda/driver_types.hpp"

namespace jaxbridge::cuda {

/// A point in a stream: everything enqueued there before record(). Has no timing. At its end the
/// event goes back to the pool of its device, at once: waits made with block() keep their point.
/// One thread at a time. No member holds a lock while it calls the driver.
class [[nodiscard]] event {
 public:
  /// Marks the present end of `stream`, which may be of any context of any device; a default stream
  /// is that of the current context.
  [[nodiscard]] static result<event> record(stream_ref stream);

  event(event&& other) noexcept
      : handle_(std::exchange(other.handle_, nullptr)), pool_(other.pool_) {}
  event(const event&) = delete;
  event& operator=(const event&) = delete;
  event& operator=(event&& other) noexcept {
    std::swap(handle_, other.handle_);
    std::swap(pool_, other.pool_);
    return *this;
  }
  ~event();

  /// Later work on `stream` waits for the point; the host does not. The stream may be of another
  /// device.
  [[nodiscard]] jaxbridge::status block(stream_ref stream) const;

  /// Whether the point has been passed. Never blocks.
  [[nodiscard]] result<bool> done() const;

  /// The host waits for the point: call it without the GIL and without a lock.
  [[nodiscard]] jaxbridge::status synchronize() const;

 private:
  event(CUevent handle, int pool) noexcept : handle_(handle), pool_(pool) {}

  CUevent handle_;  // owned; null once moved from
  int pool_;        // the device whose pool it goes back to, -1: none, it is destroyed
};

/// Destroys the events that lie in the pools, and says how many there were.
std::size_t trim_events();

}  // namespace jaxbridge::cuda

// SPDX-License-Identifier: Apache-2.0
// XLA's own memory, for what a function allocates during one call.
#pragma once

#include <cstddef>
#include <jaxbridge/status.hpp>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "core/dispatch/call.hpp"

namespace jaxbridge::dispatch {

/// Blocks of XLA's device memory. Any thread may allocate and free; XLA has all of them back when
/// the call ends, and whoever frees one later is not listened to.
class scratch {
 public:
  /// For the time of `c`, until end().
  explicit scratch(const call& c) noexcept : api_(c.api), context_(c.context) {}
  scratch(const scratch&) = delete;
  scratch& operator=(const scratch&) = delete;
  ~scratch() { end(); }

  /// At least `bytes` on the device of the call, for work on its stream; null for 0.
  [[nodiscard]] result<void*> allocate(std::size_t bytes);

  /// Gives a block back, for work that is enqueued on the stream from now on. False where it is
  /// none of this call, or the call has ended.
  bool free(void* block);

  /// The blocks that were not given back, with their sizes.
  [[nodiscard]] std::vector<std::pair<void*, std::size_t>> live() const;

  /// Gives everything back. The call must still be running.
  void end() noexcept;

 private:
  void give_back(void* block, std::size_t bytes) noexcept;

  mutable std::mutex mutex_;
  const abi::xla_ffi::api* api_;  // null: the call has ended
  abi::xla_ffi::invoke_context* context_;
  std::map<void*, std::size_t> blocks_;
};

}  // namespace jaxbridge::dispatch

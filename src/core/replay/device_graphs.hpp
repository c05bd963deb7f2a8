// SPDX-License-Identifier: Apache-2.0
// The graphs of one function on all devices.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "core/cuda/context.hpp"
#include "core/replay/graphs.hpp"

namespace jaxbridge::replay {

/// A table for each device. Calls on different devices wait for no lock of one another, and write
/// to no memory that the other reads.
class device_graphs {
 public:
  /// At most `limit` graphs are kept for each device.
  explicit device_graphs(std::size_t limit) noexcept : limit_(limit) {}
  device_graphs(const device_graphs&) = delete;
  device_graphs& operator=(const device_graphs&) = delete;
  ~device_graphs();

  /// Those of a device. Keys tell devices, and so more than cuda::max_devices may share tables. Any
  /// thread.
  [[nodiscard]] graphs& on(int ordinal);

  /// Sums over the devices, of what `graphs` has by these names.
  [[nodiscard]] std::size_t replays() const noexcept;
  [[nodiscard]] std::size_t staged() const noexcept;
  [[nodiscard]] std::size_t captures() const noexcept;
  [[nodiscard]] std::size_t size() const;

  /// Begins anew, for calls of `generation`. What it returns is to be destroyed without any lock.
  [[nodiscard]] std::vector<std::shared_ptr<void>> clear(std::uint64_t generation = 0);

 private:
  const std::size_t limit_;
  std::mutex mutex_;              // held to make a table, and to clear
  std::uint64_t generation_ = 0;  // guarded by mutex_
  // Owned; null: the device was not used yet.
  std::array<std::atomic<graphs*>, cuda::max_devices> tables_{};
};

}  // namespace jaxbridge::replay

// SPDX-License-Identifier: Apache-2.0
// Counts what several devices do at once.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace jaxbridge {

/// Threads of different devices count in different cache lines: one that each of them writes takes
/// them longer to get than all else that a call does with memory. Any thread.
class device_counter {
 public:
  void add(int ordinal) noexcept {
    lines_[static_cast<std::size_t>(ordinal) % lines_.size()].n.fetch_add(
        1, std::memory_order_relaxed);
  }

  [[nodiscard]] std::uint64_t total() const noexcept {
    std::uint64_t sum = 0;
    for (const line& each : lines_) sum += each.n.load(std::memory_order_relaxed);
    return sum;
  }

 private:
  struct alignas(64) line {
    std::atomic<std::uint64_t> n{0};
  };
  std::array<line, 8> lines_;
};

}  // namespace jaxbridge

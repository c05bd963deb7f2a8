// SPDX-License-Identifier: Apache-2.0
// The graphs of one function, by the memory that they work on.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>

#include "core/cuda/graph.hpp"
#include "core/lru_cache.hpp"

namespace jaxbridge::replay {

/// Which lists of addresses have a graph, and which are to get one. Any thread. The lock is held
/// for table accesses only, never over a driver call.
///
/// A list is captured when it comes for the second time. So the function has run once on arrays of
/// that kind, with all that libraries load and tune there; and lists that never recur cost a table
/// access, and no capture.
class graphs {
 public:
  using key_view = std::span<const std::uintptr_t>;

  /// At most `limit` graphs are kept; the least recently used go first.
  explicit graphs(std::size_t limit) : graphs_(limit), seen_(4 * limit) {}

  /// The graph of `key`; null where there is none.
  [[nodiscard]] std::shared_ptr<const cuda::graph> find(key_view key);

  /// Whether to capture the call, of whose memory there is no graph yet. Counts it as seen.
  [[nodiscard]] bool should_capture(key_view key);

  /// Keeps a graph. Returns what had to go for it, to be destroyed without any lock.
  [[nodiscard]] std::shared_ptr<void> keep(key_view key, std::shared_ptr<const cuda::graph> made);

  /// Nothing is captured any more. True for the first who says so.
  bool give_up() noexcept { return !given_up_.exchange(true); }

  /// Takes all graphs out, to be destroyed without any lock.
  [[nodiscard]] std::shared_ptr<void> clear();

  [[nodiscard]] std::size_t replays() const noexcept { return replays_; }
  [[nodiscard]] std::size_t captures() const noexcept { return captures_; }
  [[nodiscard]] std::size_t size() const;

 private:
  using table = lru_cache<std::shared_ptr<const cuda::graph>>;

  mutable std::mutex mutex_;
  table graphs_;
  lru_cache<bool> seen_;
  std::atomic<bool> given_up_{false};
  std::atomic<std::size_t> replays_{0};
  std::atomic<std::size_t> captures_{0};
};

}  // namespace jaxbridge::replay

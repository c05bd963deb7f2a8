// SPDX-License-Identifier: Apache-2.0
// The graphs of one function on one device, by the memory that they work on.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>

#include "core/cuda/graph.hpp"
#include "core/lru_cache.hpp"
#include "core/replay/staged_graph.hpp"

namespace jaxbridge::replay {

/// What a call is told by. `memory`: device, stream, dtypes, shapes and all addresses. `kind`: the
/// front part of it without the addresses. `generation`: how often all was forgotten before the
/// call took what it works with.
struct call_key {
  std::span<const std::uintptr_t> memory;
  std::span<const std::uintptr_t> kind;
  std::uint64_t generation = 0;
};

/// What to do with a call of whose memory there is no graph.
enum class step : std::uint8_t {
  run,      ///< Run the function.
  capture,  ///< Capture it on the call's own memory.
  stage,    ///< Capture it on memory of ours, for this call and all others of its kind.
};

/// Which calls have a graph, and which are to get one. Any thread. The lock is held for table
/// accesses only, never over a driver call.
///
/// A list of addresses is captured when it comes for the second time. So the function has run once
/// on arrays of that kind, with all that libraries load and tune there; and lists that never recur
/// cost no capture of their own. After `patience` of them, calls on new memory get one graph that
/// works on copies, where that costs less than running the function.
///
/// A call that began before clear() leaves nothing: its graph would work with what is forgotten.
class alignas(64) graphs {  // two share no cache line
 public:
  /// How many lists of one kind come for the first time before it is decided what to do with them.
  static constexpr int patience = 8;
  /// The memory of ours that calls of one kind may take.
  static constexpr std::size_t most_staged_bytes = std::size_t{64} << 20;

  /// At most `limit` graphs are kept. The least recently used goes for a new one, but not as long
  /// as it is in use: where more lists come in turn than that, those without a graph stay without.
  explicit graphs(std::size_t limit, std::uint64_t generation = 0)
      : graphs_(limit),
        seen_(4 * limit),
        kinds_(limit == 0 ? 0 : max_kinds),
        given_up_(max_kinds + 1),
        generation_(generation) {}

  /// The graph of the call's memory; null where there is none.
  [[nodiscard]] std::shared_ptr<const cuda::graph> find(const call_key& key);

  /// The graph of calls of this kind on new memory; null where there is none, or where this memory
  /// has come before and deserves a graph of its own. Counts it as seen.
  [[nodiscard]] std::shared_ptr<const staged_graph> find_staged(const call_key& key);

  /// What to do where both found nothing; `bytes` and `buffers` are what would have to be copied.
  /// `gone` had to go for it, to be destroyed without any lock.
  [[nodiscard]] step next(const call_key& key, std::size_t bytes, std::size_t buffers,
                          std::shared_ptr<void>& gone);

  /// A call has run without an error, and kept the host for that long. Counts its memory as seen.
  void ran(const call_key& key, std::chrono::nanoseconds duration);

  /// Keeps a graph. Returns what had to go for it, perhaps `made` itself, to be destroyed without
  /// any lock.
  [[nodiscard]] std::shared_ptr<void> keep(const call_key& key,
                                           std::shared_ptr<const cuda::graph> made);
  [[nodiscard]] std::shared_ptr<void> keep(const call_key& key,
                                           std::shared_ptr<const staged_graph> made);

  /// Calls of this kind are not captured any more. True for the first who says so.
  [[nodiscard]] bool give_up(const call_key& key);

  /// Begins anew, for calls of `generation`: of a number of its own, where a call takes what can be
  /// forgotten. Takes all graphs out, to be destroyed without any lock.
  [[nodiscard]] std::shared_ptr<void> clear(std::uint64_t generation = 0);

  /// Calls that replayed a graph, also those of `staged`.
  [[nodiscard]] std::size_t replays() const noexcept { return replays_; }
  /// Calls that replayed a graph on copies.
  [[nodiscard]] std::size_t staged() const noexcept { return staged_; }
  [[nodiscard]] std::size_t captures() const noexcept { return captures_; }
  [[nodiscard]] std::size_t size() const;

 private:
  struct entry {
    std::shared_ptr<const cuda::graph> graph;
    std::uint64_t last_used = 0;  // of clock_
  };
  static constexpr std::chrono::nanoseconds not_known = std::chrono::nanoseconds::max();
  struct kind {
    int misses = 0;
    std::chrono::nanoseconds fastest_run = not_known;
    bool is_decided = false;
    std::shared_ptr<const staged_graph> staged;
  };
  using table = lru_cache<entry>;
  using kind_table = lru_cache<kind>;

  // A program exported with symbolic shapes can bring any number.
  static constexpr std::size_t max_kinds = 16;

  [[nodiscard]] bool has_room() const;
  [[nodiscard]] kind* kind_of(const call_key& key, std::shared_ptr<void>& gone);

  mutable std::mutex mutex_;
  table graphs_;
  lru_cache<bool> seen_;
  kind_table kinds_;
  lru_cache<bool> given_up_;  // kinds; once it is full, all are
  std::uint64_t clock_ = 0;   // calls
  std::uint64_t generation_;
  std::atomic<std::size_t> replays_{0};
  std::atomic<std::size_t> staged_{0};
  std::atomic<std::size_t> captures_{0};
};

/// What a call costs that is replayed on copies, on a GPU of today: the launch, an update for each
/// copy, and the copies themselves. Measured on an H200.
[[nodiscard]] std::chrono::nanoseconds cost_of_staging(std::size_t bytes, std::size_t buffers);

}  // namespace jaxbridge::replay

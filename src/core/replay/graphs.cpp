// SPDX-License-Identifier: Apache-2.0
#include "core/replay/graphs.hpp"

#include <algorithm>
#include <utility>

namespace jaxbridge::replay {
namespace {

template <class T>
std::shared_ptr<void> to_be_destroyed(T gone) {
  return std::make_shared<T>(std::move(gone));
}

}  // namespace

std::chrono::nanoseconds cost_of_staging(std::size_t bytes, std::size_t buffers) {
  constexpr std::size_t launch_ns = 3000;
  constexpr std::size_t copy_ns = 700;
  constexpr std::size_t bytes_per_ns = 2000;  // 2 TB/s
  return std::chrono::nanoseconds(launch_ns + copy_ns * buffers + bytes / bytes_per_ns);
}

std::shared_ptr<const cuda::graph> graphs::find(const call_key& key) {
  const std::lock_guard lock(mutex_);
  ++clock_;
  entry* const found = graphs_.find(key.memory);
  if (found == nullptr) return nullptr;
  found->last_used = clock_;
  ++replays_;
  return found->graph;
}

std::shared_ptr<const staged_graph> graphs::find_staged(const call_key& key) {
  const std::lock_guard lock(mutex_);
  const kind* const found = kinds_.find(key.kind);
  if (found == nullptr || found->staged == nullptr) return nullptr;
  if (seen_.find(key.memory) != nullptr) {
    if (has_room()) return nullptr;
  } else {
    (void)seen_.insert(key.memory, true);
  }
  ++replays_;
  ++staged_;
  return found->staged;
}

// The lock is held.
bool graphs::has_room() const {
  if (graphs_.size() < graphs_.limit()) return true;
  // An entry that was used not long ago is one of a round that is longer than the table.
  return clock_ - graphs_.oldest().last_used > 4 * graphs_.limit();
}

// The lock is held.
graphs::kind* graphs::kind_of(const call_key& key, std::shared_ptr<void>& gone) {
  if (kind* const found = kinds_.find(key.kind); found != nullptr) return found;
  gone = to_be_destroyed(kinds_.insert(key.kind, kind{}));
  return kinds_.find(key.kind);
}

step graphs::next(const call_key& key, std::size_t bytes, std::size_t buffers,
                  std::shared_ptr<void>& gone) {
  const std::lock_guard lock(mutex_);
  if (graphs_.limit() == 0 || key.generation != generation_) return step::run;
  if (given_up_.size() == given_up_.limit() || given_up_.find(key.kind) != nullptr)
    return step::run;
  kind& k = *kind_of(key, gone);
  if (seen_.find(key.memory) != nullptr && has_room()) return step::capture;
  if (k.is_decided || ++k.misses <= patience) return step::run;
  k.is_decided = true;
  const bool is_cheaper =
      k.fastest_run != not_known && cost_of_staging(bytes, buffers) < k.fastest_run;
  return is_cheaper && bytes <= most_staged_bytes ? step::stage : step::run;
}

void graphs::ran(const call_key& key, std::chrono::nanoseconds duration) {
  const std::lock_guard lock(mutex_);
  if (graphs_.limit() == 0 || key.generation != generation_) return;
  if (seen_.find(key.memory) == nullptr) (void)seen_.insert(key.memory, true);
  if (kind* const found = kinds_.find(key.kind); found != nullptr) {
    found->fastest_run = std::min(found->fastest_run, duration);
  }
}

bool graphs::give_up(const call_key& key) {
  const std::lock_guard lock(mutex_);
  if (key.generation != generation_ || given_up_.find(key.kind) != nullptr) return false;
  (void)given_up_.insert(key.kind, true);
  return true;
}

std::shared_ptr<void> graphs::keep(const call_key& key, std::shared_ptr<const cuda::graph> made) {
  ++captures_;
  const std::lock_guard lock(mutex_);
  if (key.generation != generation_) return to_be_destroyed(std::move(made));
  (void)seen_.erase(key.memory);
  if (graphs_.find(key.memory) != nullptr) return to_be_destroyed(std::move(made));
  return to_be_destroyed(graphs_.insert(key.memory, entry{std::move(made), clock_}));
}

std::shared_ptr<void> graphs::keep(const call_key& key, std::shared_ptr<const staged_graph> made) {
  ++captures_;
  std::shared_ptr<void> gone;
  const std::lock_guard lock(mutex_);
  if (key.generation != generation_) return to_be_destroyed(std::move(made));
  kind& k = *kind_of(key, gone);
  k.is_decided = true;
  if (k.staged == nullptr) {
    k.staged = std::move(made);
    return gone;
  }
  return to_be_destroyed(std::pair(std::move(gone), std::move(made)));
}

std::shared_ptr<void> graphs::clear(std::uint64_t generation) {
  const std::lock_guard lock(mutex_);
  generation_ = generation;
  seen_ = lru_cache<bool>(seen_.limit());
  given_up_ = lru_cache<bool>(given_up_.limit());
  return to_be_destroyed(std::pair(std::exchange(graphs_, table(graphs_.limit())),
                                   std::exchange(kinds_, kind_table(kinds_.limit()))));
}

std::size_t graphs::size() const {
  const std::lock_guard lock(mutex_);
  return graphs_.size();
}

}  // namespace jaxbridge::replay

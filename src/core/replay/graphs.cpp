// SPDX-License-Identifier: Apache-2.0
#include "core/replay/graphs.hpp"

#include <utility>

namespace jaxbridge::replay {

std::shared_ptr<const cuda::graph> graphs::find(key_view key) {
  const std::lock_guard lock(mutex_);
  const std::shared_ptr<const cuda::graph>* const found = graphs_.find(key);
  if (found == nullptr) return nullptr;
  ++replays_;
  return *found;
}

bool graphs::should_capture(key_view key) {
  if (given_up_) return false;
  const std::lock_guard lock(mutex_);
  if (graphs_.limit() == 0) return false;
  if (seen_.find(key) != nullptr) return true;
  (void)seen_.insert(key, true);
  return false;
}

std::shared_ptr<void> graphs::keep(key_view key, std::shared_ptr<const cuda::graph> made) {
  ++captures_;
  const std::lock_guard lock(mutex_);
  (void)seen_.erase(key);
  if (graphs_.find(key) != nullptr) return std::make_shared<decltype(made)>(std::move(made));
  auto gone = graphs_.insert(key, std::move(made));
  return std::make_shared<decltype(gone)>(std::move(gone));
}

std::shared_ptr<void> graphs::clear() {
  const std::lock_guard lock(mutex_);
  seen_ = lru_cache<bool>(4 * graphs_.limit());
  return std::make_shared<table>(std::exchange(graphs_, table(graphs_.limit())));
}

std::size_t graphs::size() const {
  const std::lock_guard lock(mutex_);
  return graphs_.size();
}

}  // namespace jaxbridge::replay

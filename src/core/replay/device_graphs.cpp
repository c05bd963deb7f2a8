// SPDX-License-Identifier: Apache-2.0
#include "core/replay/device_graphs.hpp"

namespace jaxbridge::replay {
namespace {

template <class Tables>
std::size_t sum(const Tables& tables, std::size_t (graphs::*count)() const) {
  std::size_t total = 0;
  for (const auto& table : tables) {
    const graphs* const found = table.load(std::memory_order_acquire);
    if (found != nullptr) total += (found->*count)();
  }
  return total;
}

}  // namespace

device_graphs::~device_graphs() {
  for (const auto& table : tables_) delete table.load(std::memory_order_acquire);
}

graphs& device_graphs::on(int ordinal) {
  std::atomic<graphs*>& table = tables_[static_cast<std::size_t>(ordinal) % tables_.size()];
  if (graphs* const found = table.load(std::memory_order_acquire); found != nullptr) return *found;
  const std::lock_guard lock(mutex_);
  graphs* found = table.load(std::memory_order_relaxed);
  if (found == nullptr) {
    found = new graphs(limit_, generation_);
    table.store(found, std::memory_order_release);
  }
  return *found;
}

std::size_t device_graphs::replays() const noexcept { return sum(tables_, &graphs::replays); }
std::size_t device_graphs::staged() const noexcept { return sum(tables_, &graphs::staged); }
std::size_t device_graphs::captures() const noexcept { return sum(tables_, &graphs::captures); }
std::size_t device_graphs::size() const { return sum(tables_, &graphs::size); }

std::vector<std::shared_ptr<void>> device_graphs::clear(std::uint64_t generation) {
  const std::lock_guard lock(mutex_);
  generation_ = generation;
  std::vector<std::shared_ptr<void>> gone;
  for (const auto& table : tables_) {
    graphs* const found = table.load(std::memory_order_relaxed);
    if (found != nullptr) gone.push_back(found->clear(generation));
  }
  return gone;
}

}  // namespace jaxbridge::replay

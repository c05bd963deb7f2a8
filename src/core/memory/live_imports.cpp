// SPDX-License-Identifier: Apache-2.0
#include "core/memory/live_imports.hpp"

#include <mutex>
#include <unordered_map>

namespace jaxbridge::memory {
namespace {

struct table {
  // Held for a look into the map, never over a call of anybody's.
  std::mutex lock;
  std::unordered_map<std::uintptr_t, std::size_t> counts;  // guarded by lock; no count is 0
};

// Never destroyed: memory is let go until the process ends.
table& imports() {
  static auto* const all = new table;
  return *all;
}

}  // namespace

void add_import(std::uintptr_t address) {
  const std::lock_guard<std::mutex> hold(imports().lock);
  ++imports().counts[address];
}

void remove_import(std::uintptr_t address) noexcept {
  const std::lock_guard<std::mutex> hold(imports().lock);
  const auto found = imports().counts.find(address);
  if (found == imports().counts.end() || --found->second > 0) return;
  imports().counts.erase(found);
}

std::size_t live_imports(std::uintptr_t address) {
  const std::lock_guard<std::mutex> hold(imports().lock);
  const auto found = imports().counts.find(address);
  return found == imports().counts.end() ? 0 : found->second;
}

}  // namespace jaxbridge::memory

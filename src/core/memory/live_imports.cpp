// SPDX-License-Identifier: Apache-2.0
#include "core/memory/live_imports.hpp"

#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <unordered_map>
#include <utility>

#include "core/cuda/event.hpp"
#include "core/cuda/stream_order.hpp"

namespace jaxbridge::memory {
namespace {

// Where JAX's last use of memory began.
struct use {
  std::thread::id thread;
  stream_ref stream;
};

struct entry {
  std::size_t count = 0;
  // The end of the owner's work that JAX has not waited for yet, or null.
  std::shared_ptr<const cuda::event> written;
  // Since the owner's last work; none: JAX has not come to it.
  std::optional<use> used;
};

struct table {
  // Held for a look into the map, never over a call of anybody's.
  std::mutex lock;
  std::unordered_map<std::uintptr_t, entry> entries;  // guarded by lock; no count is 0
};

// Never destroyed: memory is let go until the process ends.
table& imports() {
  static auto* const all = new table;
  return *all;
}

status not_imported() {
  return {status_code::failed_precondition,
          "memory of another library that is to be updated in place is not imported any more"};
}

}  // namespace

void add_import(std::uintptr_t address) {
  const std::lock_guard<std::mutex> hold(imports().lock);
  ++imports().entries[address].count;
}

void remove_import(std::uintptr_t address) noexcept {
  std::shared_ptr<const cuda::event> unused;  // ends without the lock
  const std::lock_guard<std::mutex> hold(imports().lock);
  const auto found = imports().entries.find(address);
  if (found == imports().entries.end() || --found->second.count > 0) return;
  unused = std::move(found->second.written);
  imports().entries.erase(found);
}

std::size_t live_imports(std::uintptr_t address) {
  const std::lock_guard<std::mutex> hold(imports().lock);
  const auto found = imports().entries.find(address);
  return found == imports().entries.end() ? 0 : found->second.count;
}

status owner_wrote(std::uintptr_t address, stream_ref stream) {
  result<cuda::event> marked = cuda::event::record(stream);
  if (!marked.ok()) return marked.error();
  auto written = std::make_shared<const cuda::event>(std::move(marked).value());
  const std::lock_guard<std::mutex> hold(imports().lock);
  const auto found = imports().entries.find(address);
  if (found == imports().entries.end()) return not_imported();
  found->second.written.swap(written);
  found->second.used.reset();
  return {};
}

status wait_for_owner(std::uintptr_t address, stream_ref stream) {
  std::shared_ptr<const cuda::event> written;
  {
    const std::lock_guard<std::mutex> hold(imports().lock);
    const auto found = imports().entries.find(address);
    if (found == imports().entries.end()) return not_imported();
    written = std::move(found->second.written);
    found->second.used = use{std::this_thread::get_id(), stream};
  }
  return written == nullptr ? status() : written->block(stream);
}

result<bool> owner_follows(std::uintptr_t address, stream_ref stream) {
  std::optional<use> used;
  {
    const std::lock_guard<std::mutex> hold(imports().lock);
    const auto found = imports().entries.find(address);
    if (found != imports().entries.end()) used = found->second.used;
  }
  if (!used || used->thread != std::this_thread::get_id()) return false;
  if (status s = cuda::order(used->stream, stream); !s.ok()) return s;
  return true;
}

}  // namespace jaxbridge::memory

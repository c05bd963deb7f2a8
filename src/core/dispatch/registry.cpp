// SPDX-License-Identifier: Apache-2.0
#include "core/dispatch/registry.hpp"

#include <mutex>
#include <string>
#include <utility>

namespace jaxbridge::dispatch {

result<std::shared_ptr<target>> registry::find(std::int64_t key, std::string_view spec) {
  resolver resolve;
  {
    const std::shared_lock lock(mutex_);
    if (const auto found = table_.find(key); found != table_.end()) return found->second.value;
    resolve = resolver_;
  }
  if (!resolve) {
    return status(
        status_code::not_found,
        "no function is registered under key " + std::to_string(key) +
            " in this process; import the module that defines it before the program runs");
  }
  return resolve(key, spec);
}

void registry::add(std::int64_t key, std::shared_ptr<target> t) {
  // `t` is destroyed after the lock is given back, where it was not needed.
  const std::unique_lock lock(mutex_);
  entry& e = table_[key];
  if (e.value == nullptr) e.value.swap(t);
  ++e.users;
}

void registry::remove(std::int64_t key) {
  std::shared_ptr<target> last;
  const std::unique_lock lock(mutex_);
  const auto found = table_.find(key);
  if (found == table_.end() || --found->second.users > 0) return;
  last.swap(found->second.value);
  table_.erase(found);
}

bool registry::contains(std::int64_t key) const {
  const std::shared_lock lock(mutex_);
  return table_.contains(key);
}

std::size_t registry::size() const {
  const std::shared_lock lock(mutex_);
  return table_.size();
}

void registry::set_resolver(resolver r) {
  const std::unique_lock lock(mutex_);
  resolver_.swap(r);
}

registry& process_registry() noexcept {
  static registry& instance = *new registry;
  return instance;
}

}  // namespace jaxbridge::dispatch

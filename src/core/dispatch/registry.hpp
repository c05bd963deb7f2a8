// SPDX-License-Identifier: Apache-2.0
// Which function a key stands for, in this process.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <shared_mutex>
#include <string_view>
#include <unordered_map>

#include "core/dispatch/call.hpp"
#include "jaxbridge/status.hpp"

namespace jaxbridge::dispatch {

/// Something that can be called. Several devices call the same target at once.
class target {
 public:
  target() = default;
  target(const target&) = delete;
  target& operator=(const target&) = delete;
  virtual ~target() = default;

  /// Does the work of one call, or reports why not. Must not throw.
  virtual status invoke(const call& c) noexcept = 0;
};

/// Finds a target that is not registered by the spec which the program carries: a program from a
/// compile cache or an export. Called without any lock held.
using resolver = std::function<result<std::shared_ptr<target>>(std::int64_t, std::string_view)>;

/// Keys and their targets. One lock, held for a table access only: never while a target runs, is
/// made or is destroyed, since both can want the GIL.
class registry {
 public:
  /// The target of `key`, from the table or from the resolver.
  [[nodiscard]] result<std::shared_ptr<target>> find(std::int64_t key, std::string_view spec);

  /// Counts one more user of `key`; the first user's target is kept, and later ones, equal by
  /// content, are dropped.
  void add(std::int64_t key, std::shared_ptr<target> t);

  /// Counts one user less; the target goes with the last one. Calls that are under way keep theirs.
  void remove(std::int64_t key);

  [[nodiscard]] bool contains(std::int64_t key) const;
  [[nodiscard]] std::size_t size() const;

  void set_resolver(resolver r);

 private:
  struct entry {
    std::shared_ptr<target> value;
    std::size_t users = 0;
  };

  mutable std::shared_mutex mutex_;
  std::unordered_map<std::int64_t, entry> table_;
  resolver resolver_;
};

/// The registry of this process. It is never destroyed: XLA's threads may call during exit.
[[nodiscard]] registry& process_registry() noexcept;

}  // namespace jaxbridge::dispatch

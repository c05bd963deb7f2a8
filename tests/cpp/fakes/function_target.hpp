// SPDX-License-Identifier: Apache-2.0
// A target that is a function of the test, and a key that stays registered for a scope.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include "core/dispatch/registry.hpp"

namespace fake_xla {

class function_target final : public jaxbridge::dispatch::target {
 public:
  using function = std::function<jaxbridge::status(const jaxbridge::dispatch::call&)>;

  explicit function_target(function f, std::function<void()> at_end = {})
      : function_(std::move(f)), at_end_(std::move(at_end)) {}
  ~function_target() override {
    if (at_end_) at_end_();
  }

  jaxbridge::status invoke(const jaxbridge::dispatch::call& c) noexcept override {
    return function_(c);
  }

 private:
  function function_;
  std::function<void()> at_end_;
};

[[nodiscard]] inline std::shared_ptr<jaxbridge::dispatch::target> make_target(
    function_target::function f = [](const auto&) { return jaxbridge::status(); },
    std::function<void()> at_end = {}) {
  return std::make_shared<function_target>(std::move(f), std::move(at_end));
}

/// One user of `key` in the registry of the process, as long as the object lives.
class registration {
 public:
  registration(std::int64_t key, function_target::function f) : key_(key) {
    jaxbridge::dispatch::process_registry().add(key, make_target(std::move(f)));
  }
  ~registration() { jaxbridge::dispatch::process_registry().remove(key_); }
  registration(const registration&) = delete;
  registration& operator=(const registration&) = delete;

 private:
  std::int64_t key_;
};

}  // namespace fake_xla

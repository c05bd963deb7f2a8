// SPDX-License-Identifier: Apache-2.0
// A call through the entry point to a target that does nothing, as XLA makes it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/dispatch/entry_points.hpp"
#include "core/dispatch/registry.hpp"
#include "fakes/frame_builder.hpp"
#include "fakes/function_target.hpp"

namespace bench {

class empty_target final : public jaxbridge::dispatch::target {
 public:
  jaxbridge::status invoke(const jaxbridge::dispatch::call&) noexcept override { return {}; }
};

/// A frame with `operands` arrays and one result, and the target that it is for.
class empty_call {
 public:
  explicit empty_call(std::size_t operands) : builder_(key) {
    jaxbridge::dispatch::process_registry().add(key, std::make_shared<empty_target>());
    for (std::size_t i = 0; i < operands; ++i) builder_.operand(jaxbridge::dtype::float32, {1024});
    builder_.result(jaxbridge::dtype::float32, {1024});
    frame_ = &builder_.frame();
  }
  ~empty_call() { jaxbridge::dispatch::process_registry().remove(key); }
  empty_call(const empty_call&) = delete;
  empty_call& operator=(const empty_call&) = delete;

  [[nodiscard]] jaxbridge::abi::xla_ffi::call_frame& frame() { return *frame_; }
  /// False where the call failed.
  [[nodiscard]] bool run() { return jaxbridge::dispatch::call_cpu(frame_) == nullptr; }

 private:
  static constexpr std::int64_t key = 1;

  fake_xla::frame_builder builder_;
  jaxbridge::abi::xla_ffi::call_frame* frame_ = nullptr;
};

/// Lists of addresses as an allocator gives them.
[[nodiscard]] inline std::vector<std::vector<std::uintptr_t>> address_lists(std::size_t count,
                                                                            std::size_t words) {
  std::vector<std::vector<std::uintptr_t>> lists(count);
  std::uintptr_t address = 0x7f0000000000;
  for (auto& list : lists) {
    for (std::size_t i = 0; i < words; ++i) list.push_back(address += 4096);
  }
  return lists;
}

}  // namespace bench

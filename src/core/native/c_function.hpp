// SPDX-License-Identifier: Apache-2.0
// A C function at an address, called with arguments that are put together from a call.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/native/native_target.hpp"

namespace jaxbridge::native {

/// What the C function returns.
enum class returned : std::uint8_t { nothing, error_code };

class c_function final : public native_target {
 public:
  c_function(std::string name, void* address, std::vector<argument> arguments,
             std::vector<std::string> texts, returned returns, dispatch::in_place in_place,
             bool inspects = false);

 protected:
  [[nodiscard]] status run(const dispatch::call& c) override;

 private:
  void* address_;
  std::vector<std::string> texts_;
  returned returns_;
};

/// The most parameters that a C function may have.
inline constexpr std::size_t max_arguments = 64;

}  // namespace jaxbridge::native

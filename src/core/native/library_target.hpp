// SPDX-License-Identifier: Apache-2.0
// A function of a library as a target: where XLA is not to call its handler by itself.
#pragma once

#include <string>

#include "core/native/library.hpp"
#include "core/native/native_target.hpp"

namespace jaxbridge::native {

/// Hands XLA's frame on to the function's handler. Its attributes are those in the dictionary
/// `attributes` of the call. In debug mode alone: each call is inspected.
class library_target final : public native_target {
 public:
  /// `functions`: one for each platform.
  library_target(std::string name, const std::vector<function>& functions,
                 dispatch::in_place in_place);

 protected:
  [[nodiscard]] status run(const dispatch::call& c) override;

 private:
  abi::xla_ffi::handler* on_cpu_ = nullptr;
  abi::xla_ffi::handler* on_cuda_ = nullptr;
};

}  // namespace jaxbridge::native

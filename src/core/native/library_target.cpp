// SPDX-License-Identifier: Apache-2.0
#include "core/native/library_target.hpp"

#include <algorithm>
#include <cstring>
#include <jaxbridge/attributes.hpp>
#include <utility>

namespace jaxbridge::native {

library_target::library_target(std::string name, const std::vector<function>& functions,
                               dispatch::in_place in_place)
    : native_target(std::move(name), {}, std::move(in_place), true) {
  for (const function& f : functions) {
    (f.platform == platform::cuda ? on_cuda_ : on_cpu_) = f.execute;
  }
}

status library_target::run(const dispatch::call& c) {
  abi::xla_ffi::handler* const handler = c.device.platform == platform::cuda ? on_cuda_ : on_cpu_;
  const auto attributes = attributes_view(c.frame->attrs).dictionary("attributes");
  if (handler == nullptr || !attributes) {
    return {status_code::internal, name() + ": the program is not the one of this function"};
  }
  // What a newer runtime's frame has behind the part that we know is left out.
  abi::xla_ffi::call_frame frame{};
  std::memcpy(&frame, c.frame, std::min(c.frame->struct_size, sizeof(frame)));
  frame.struct_size = std::min(c.frame->struct_size, sizeof(frame));
  frame.attrs = *attributes->raw();
  abi::xla_ffi::error* const error = handler(&frame);
  if (error == nullptr) return {};
  return {status_code::internal, dispatch::consume(*c.api, error)};
}

}  // namespace jaxbridge::native

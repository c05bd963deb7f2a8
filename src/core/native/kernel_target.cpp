// SPDX-License-Identifier: Apache-2.0
#include "core/native/kernel_target.hpp"

#include <array>
#include <cstdint>
#include <utility>

namespace jaxbridge::native {

kernel_target::kernel_target(std::string name, std::shared_ptr<cuda::kernel> kernel,
                             std::vector<argument> arguments, cuda::launch_shape shape,
                             std::vector<index_pair> in_place)
    : name_(std::move(name)),
      kernel_(std::move(kernel)),
      arguments_(std::move(arguments)),
      shape_(shape),
      in_place_(std::move(in_place)) {}

status kernel_target::invoke(const dispatch::call& c) noexcept {
  count();
  status s = check_call(c, arguments_, in_place_);
  if (s.ok() && arguments_.size() > max_arguments) {
    s = {status_code::invalid_argument, "too many parameters"};
  }
  if (s.ok()) {
    static const std::vector<std::string> no_texts;
    std::array<std::uint64_t, max_arguments> words;
    std::array<void*, max_arguments> parameters;
    for (std::size_t i = 0; i < arguments_.size(); ++i) {
      words[i] = word_of(arguments_[i], c, no_texts);
      parameters[i] = &words[i];
    }
    s = kernel_->launch(c.device.ordinal, c.stream, shape_, parameters.data());
  }
  if (s.ok()) return s;
  return {s.code(), name_ + ": " + s.message()};
}

}  // namespace jaxbridge::native

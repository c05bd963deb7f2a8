// SPDX-License-Identifier: Apache-2.0
#include "core/native/kernel_target.hpp"

#include <array>
#include <cstdint>
#include <utility>

namespace jaxbridge::native {

kernel_target::kernel_target(std::string name, std::shared_ptr<cuda::kernel> kernel,
                             std::vector<argument> arguments, cuda::launch_shape shape,
                             dispatch::in_place in_place)
    : native_target(std::move(name), std::move(arguments), std::move(in_place)),
      kernel_(std::move(kernel)),
      shape_(shape) {}

status kernel_target::invoke(const dispatch::call& c) noexcept {
  if (status s = begin(c); !s.ok()) return s;
  if (arguments().size() > max_arguments) {
    return {status_code::invalid_argument, name() + ": too many parameters"};
  }
  static const std::vector<std::string> no_texts;
  std::array<std::uint64_t, max_arguments> words;
  std::array<void*, max_arguments> parameters;
  for (std::size_t i = 0; i < arguments().size(); ++i) {
    words[i] = word_of(arguments()[i], c, no_texts);
    parameters[i] = &words[i];
  }
  status s = kernel_->launch(c.device.ordinal, c.stream, shape_, parameters.data());
  if (s.ok()) return s;
  return {s.code(), name() + ": " + s.message()};
}

}  // namespace jaxbridge::native

// SPDX-License-Identifier: Apache-2.0
#include "core/native/kernel_target.hpp"

#include <array>
#include <chrono>
#include <cstdint>
#include <span>
#include <utility>

#include "core/cuda/graph.hpp"
#include "core/cuda/stream_order.hpp"

namespace jaxbridge::native {

kernel_target::kernel_target(std::string name, std::shared_ptr<cuda::kernel> kernel,
                             std::vector<argument> arguments, cuda::launch_shape shape,
                             dispatch::in_place in_place, std::size_t limit, bool inspects)
    : native_target(std::move(name), std::move(arguments), std::move(in_place), inspects),
      kernel_(std::move(kernel)),
      shape_(shape),
      graphs_(limit) {}

status kernel_target::run(const dispatch::call& c) {
  if (arguments().size() > max_kernel_arguments) {
    return {status_code::invalid_argument, name() + ": too many parameters"};
  }
  static const std::vector<std::string> no_texts;
  // Device and stream, and behind them what the kernel gets.
  std::array<std::uintptr_t, 2 + max_kernel_arguments> words;
  words[0] = static_cast<std::uintptr_t>(c.device.ordinal);
  words[1] = c.stream.address();
  std::array<void*, max_kernel_arguments> parameters;
  const std::size_t count = arguments().size();
  for (std::size_t i = 0; i < count; ++i) {
    words[2 + i] = word_of(arguments()[i], c, no_texts);
    parameters[i] = &words[2 + i];
  }
  const std::span<const std::uintptr_t> all = std::span(words).first(2 + count);
  const replay::call_key key{all, all.first(2)};

  // XLA's own capture gets the kernel itself.
  if (shape_.is_empty() || cuda::is_capturing(c.stream)) return launch(c, parameters.data());
  replay::graphs& here = graphs_.on(c.device.ordinal);
  if (const auto graph = here.find(key); graph != nullptr) return named(graph->launch());
  std::shared_ptr<void> gone;
  // No run is known to be slow, and so nothing is staged.
  if (here.next(key, 0, 0, gone) == replay::step::capture) {
    return launch_captured(c, parameters.data(), key);
  }
  status s = launch(c, parameters.data());
  if (s.ok()) here.ran(key, std::chrono::nanoseconds::max());
  return s;
}

status kernel_target::named(status s) const {
  if (s.ok()) return s;
  return {s.code(), name() + ": " + s.message()};
}

status kernel_target::launch(const dispatch::call& c, void** parameters) {
  return named(kernel_->launch(c.device.ordinal, c.stream, shape_, parameters));
}

status kernel_target::launch_captured(const dispatch::call& c, void** parameters,
                                      const replay::call_key& key) {
  const auto record = [&]() -> result<std::shared_ptr<cuda::graph>> {
    result<cuda::capture> recording = cuda::capture::begin(c.device.ordinal);
    if (!recording.ok()) return recording.error();
    dispatch::call recorded = c;
    recorded.stream = recording.value().stream();
    if (status s = launch(recorded, parameters); !s.ok()) return s;
    return recording.value().end(c.stream, kernel_);
  };
  result<std::shared_ptr<cuda::graph>> made = record();
  if (!made.ok()) {
    (void)graphs_.on(c.device.ordinal).give_up(key);
    return launch(c, parameters);
  }
  status s = named(made.value()->launch());
  if (s.ok()) const auto gone = graphs_.on(c.device.ordinal).keep(key, std::move(made).value());
  return s;
}

}  // namespace jaxbridge::native

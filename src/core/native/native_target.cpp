// SPDX-License-Identifier: Apache-2.0
#include "core/native/native_target.hpp"

#include <utility>

#include "core/exit.hpp"
#include "core/native/inspection.hpp"

namespace jaxbridge::native {

std::uint64_t word_of(const argument& a, const dispatch::call& c,
                      const std::vector<std::string>& texts) noexcept {
  switch (a.from) {
    case argument::source::operand:
      return reinterpret_cast<std::uint64_t>(c.operands[a.index].data);
    case argument::source::result:
      return reinterpret_cast<std::uint64_t>(c.results[a.index].data);
    case argument::source::text:
      return reinterpret_cast<std::uint64_t>(texts[a.index].c_str());
    case argument::source::stream:
      return c.stream.address();
    case argument::source::value:
      break;
  }
  return a.bits;
}

native_target::native_target(std::string name, std::vector<argument> arguments,
                             dispatch::in_place in_place, bool inspects)
    : name_(std::move(name)),
      arguments_(std::move(arguments)),
      in_place_(std::move(in_place)),
      inspects_(inspects) {}

status native_target::invoke(const dispatch::call& c) noexcept {
  calls_.add(c.device.ordinal);
  // Before anything that uses CUDA, or calls code that may: a graph, a kernel, a C function.
  if (exiting()) return {status_code::failed_precondition, name_ + ": the process is ending"};
  for (const argument& a : arguments_) {
    if ((a.from == argument::source::operand && a.index >= c.operands.size()) ||
        (a.from == argument::source::result && a.index >= c.results.size())) {
      return {status_code::invalid_argument,
              name_ + ": the program has fewer arrays than the function's signature"};
    }
  }
  if (status s = in_place_.check(c); !s.ok()) return s;
  if (!inspects_) return run(c);
  return inspected(name_, c, in_place_, [&] { return run(c); });
}

}  // namespace jaxbridge::native

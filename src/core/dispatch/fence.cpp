// SPDX-License-Identifier: Apache-2.0
#include "core/dispatch/fence.hpp"

#include <cstddef>
#include <cstdint>
#include <string>

#include "core/memory/live_imports.hpp"

namespace jaxbridge::dispatch {

status fence(const call& c) noexcept {
  if (c.results.size() < c.operands.size()) {
    return {status_code::invalid_argument,
            "a fence has a result for each of its " + std::to_string(c.operands.size()) +
                " operands, and this one has " + std::to_string(c.results.size())};
  }
  for (std::size_t i = 0; i < c.operands.size(); ++i) {
    if (c.operands[i].size() == 0) continue;
    const auto address = reinterpret_cast<std::uintptr_t>(c.operands[i].data);
    if (c.operands[i].data != c.results[i].data || memory::live_imports(address) == 0) {
      return {status_code::internal,
              "inplace: XLA made a copy of external array " + std::to_string(i) +
                  ", and the update would be lost. Please report this with the program."};
    }
    if (status s = memory::wait_for_owner(address, c.stream); !s.ok()) return s;
  }
  return {};
}

}  // namespace jaxbridge::dispatch

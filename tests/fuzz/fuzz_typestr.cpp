// SPDX-License-Identifier: Apache-2.0
// Arbitrary texts as typestr: an element type whose own text names it too, or an error with a text
// that can be shown.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "core/memory/array_interface.hpp"
#include "fuzz/array_properties.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const auto got = jaxbridge::memory::parse_typestr(text);
  if (!got.ok()) {
    const std::string& why = got.error().message();
    fuzzing::require(why.size() < 300 && std::all_of(why.begin(), why.end(),
                                                     [](char c) { return c >= ' ' && c <= '~'; }),
                     "a text that cannot be shown");
    return 0;
  }
  const std::string_view ours = jaxbridge::memory::typestr_of(got.value());
  fuzzing::require(text.size() > 2 && ours.substr(1) == text.substr(1), "another element type");
  return 0;
}

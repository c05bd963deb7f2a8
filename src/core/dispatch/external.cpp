// SPDX-License-Identifier: Apache-2.0
#include "core/dispatch/external.hpp"

#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/dispatch/in_place.hpp"

namespace jaxbridge::dispatch {

status check_external(const call& c) noexcept {
  std::vector<std::string> names;
  for (std::string_view rest = c.spec; !rest.empty();) {
    const std::size_t end = rest.find('\n');
    names.emplace_back(rest.substr(0, end));
    rest.remove_prefix(end == std::string_view::npos ? rest.size() : end + 1);
  }
  std::vector<in_place::index_pair> pairs;
  std::vector<std::size_t> external;
  for (std::size_t i = 0; i < c.results.size(); ++i) {
    pairs.emplace_back(i, i);
    external.push_back(i);
  }
  return in_place(std::move(names), std::move(pairs), std::move(external)).check(c);
}

}  // namespace jaxbridge::dispatch

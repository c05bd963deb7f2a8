// SPDX-License-Identifier: Apache-2.0
// Does one thing a number of times, for a profiler that counts instructions (instructions.py).
//
//     instructions call OPERANDS TIMES
//     instructions cache ADDRESSES TIMES
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string_view>
#include <vector>

#include "core/lru_cache.hpp"
#include "empty_call.hpp"

namespace jaxbridge {

// A symbol for what the templates become.
[[gnu::noinline]] static bool hit(lru_cache<int>& cache, const std::vector<std::uintptr_t>& list) {
  return cache.find(list) != nullptr;
}

}  // namespace jaxbridge

namespace {

bool call(std::size_t operands, std::size_t times) {
  bench::empty_call empty(operands);
  for (std::size_t i = 0; i < times; ++i) {
    if (!empty.run()) return false;
  }
  return true;
}

// Four lists in turn, as a loop gives them.
bool cache(std::size_t addresses, std::size_t times) {
  const auto lists = bench::address_lists(4, addresses);
  jaxbridge::lru_cache<int> kept(256);
  for (const auto& list : lists) static_cast<void>(kept.insert(list, 1));
  for (std::size_t i = 0; i < times; ++i) {
    if (!jaxbridge::hit(kept, lists[i % lists.size()])) return false;
  }
  return true;
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 4) {
    std::fprintf(stderr, "usage: instructions call|cache SIZE TIMES\n");
    return 2;
  }
  const std::string_view what = arguments[1];
  const std::size_t size = std::strtoul(arguments[2], nullptr, 10);
  const std::size_t times = std::strtoul(arguments[3], nullptr, 10);
  return (what == "call" ? call(size, times) : cache(size, times)) ? 0 : 1;
}

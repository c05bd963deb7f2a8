// SPDX-License-Identifier: Apache-2.0
#include "core/dispatch/in_place.hpp"

#include <cstdint>
#include <stdexcept>

#include "core/memory/live_imports.hpp"

namespace jaxbridge::dispatch {
namespace {

std::uintptr_t address_of(const any_buffer& b) { return reinterpret_cast<std::uintptr_t>(b.data); }

bool overlap(const any_buffer& a, const any_buffer& b) {
  // What has no elements can have an address inside the other.
  return a.size() > 0 && b.size() > 0 && address_of(a) < address_of(b) + b.size_bytes() &&
         address_of(b) < address_of(a) + a.size_bytes();
}

}  // namespace

in_place::in_place(std::vector<std::string> names, std::vector<index_pair> pairs,
                   std::vector<std::size_t> external)
    : names_(std::move(names)), pairs_(std::move(pairs)), external_(std::move(external)) {
  for (const auto& [operand, result] : pairs_) {
    if (operand >= max_buffers || result >= max_buffers) {
      throw std::invalid_argument("in_place names buffers that no call has");
    }
    if (written_.size() <= operand) written_.resize(operand + 1);
    written_[operand] = true;
  }
  for (const std::size_t operand : external_) {
    if (!writes(operand)) {
      throw std::invalid_argument("external names an operand that is not in place");
    }
  }
}

std::string in_place::name(std::size_t operand) const {
  return operand < names_.size() ? names_[operand] : "operand " + std::to_string(operand);
}

status in_place::check(const call& c) const {
  for (const auto& [operand, result] : pairs_) {
    if (operand >= c.operands.size() || result >= c.results.size()) {
      return {status_code::internal, "in-place operand " + std::to_string(operand) + " or result " +
                                         std::to_string(result) + " is not in the call"};
    }
    const any_buffer& in = c.operands[operand];
    if (in.data != c.results[result].data && in.size() > 0) {
      return {status_code::internal, name(operand) +
                                         " is in place, but XLA gave its result other memory; the "
                                         "update would be lost. Please report this with the "
                                         "program."};
    }
    // XLA gives each operand its own memory; that of others can have been imported twice.
    for (std::size_t i = 0; i < c.operands.size(); ++i) {
      if (i != operand && overlap(in, c.operands[i])) {
        return {status_code::invalid_argument,
                name(operand) + " and " + name(i) +
                    " are in the same memory, and the function writes to one of them; pass one of "
                    "the two, or a copy"};
      }
    }
  }
  for (const std::size_t operand : external_) {
    const any_buffer& in = c.operands[operand];
    if (in.size() > 0 && memory::live_imports(address_of(in)) == 0) {
      return {
          status_code::internal,
          name(operand) +
              " is a Ref of another library's memory, but XLA gave the function a copy of it. "
              "Where the memory is spread over devices, say how the call is split "
              "(elementwise=True, defsharding, jax.shard_map); otherwise please report this with "
              "the program."};
    }
  }
  return {};
}

}  // namespace jaxbridge::dispatch

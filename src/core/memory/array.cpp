// SPDX-License-Identifier: Apache-2.0
#include "core/memory/array.hpp"

#include <algorithm>
#include <limits>
#include <optional>

namespace jaxbridge::memory {
namespace {

status invalid(const array& a, const std::string& why) {
  return {status_code::invalid_argument, "the array " + describe(a) + " " + why};
}

// Whether address + offset stays within the address space; both ends count.
bool reaches(std::uintptr_t address, std::int64_t offset) noexcept {
  std::uintptr_t ignored = 0;
  return offset >= 0
             ? !__builtin_add_overflow(address, static_cast<std::uintptr_t>(offset), &ignored)
             : !__builtin_sub_overflow(
                   address, std::uintptr_t{0} - static_cast<std::uintptr_t>(offset), &ignored);
}

}  // namespace

std::string describe(const array& a) {
  constexpr std::size_t shown = 8;
  std::string out(name(a.dtype));
  out += '[';
  for (std::size_t axis = 0; axis < std::min(a.shape.size(), shown); ++axis) {
    if (axis > 0) out += ',';
    out += std::to_string(a.shape[axis]);
  }
  return out + (a.shape.size() > shown ? ",...]" : "]");
}

status check(const array& a) {
  if (a.shape.size() > max_rank) {
    return {status_code::invalid_argument, "an array of " + std::to_string(a.shape.size()) +
                                               " axes; at most " + std::to_string(max_rank) +
                                               " are supported"};
  }
  if (a.strides.size() != a.shape.size()) {
    return invalid(
        a, "has " + std::to_string(a.strides.size()) + " strides; expected one for each axis");
  }
  if (item_size(a.dtype) == 0) {
    return {status_code::unimplemented,
            "elements of type " + std::string(name(a.dtype)) +
                " are smaller than a byte, and libraries do not agree on how they are packed; "
                "convert them to a wider type first"};
  }
  for (const std::int64_t extent : a.shape) {
    if (extent < 0) return invalid(a, "has a negative extent");
  }
  const std::optional<std::int64_t> count = element_count(a.shape);
  if (!count || *count > std::numeric_limits<std::int64_t>::max() / a.item_size()) {
    return invalid(a, "has more bytes than an address can count");
  }
  if (*count == 0) return {};
  if (a.data == nullptr) return invalid(a, "has elements, but its address is null");
  const std::optional<byte_range> reached = bounds(a.layout());
  if (!reached || !reaches(a.address(), reached->low) || !reaches(a.address(), reached->high)) {
    return invalid(a, "reaches beyond the address space; its strides or its offset are wrong");
  }
  return {};
}

bool set_compact(array& a) {
  a.strides.resize(a.shape.size());
  return fill_compact_strides(a.shape, a.item_size(), a.strides);
}

void settle_strides(array& a) {
  const layout_kind kind = classify(a.layout());
  if (kind == layout_kind::compact) {
    // An array of no elements may have extents whose product does not fit: all 0 is as true.
    if (!set_compact(a)) a.strides.assign(a.shape.size(), 0);
  } else if (kind == layout_kind::transposed) {
    // They fit: check() has counted the bytes.
    const std::vector<std::size_t> order = axis_order(a.layout());
    static_cast<void>(fill_dense_strides(a.shape, order, a.item_size(), a.strides));
  }
}

}  // namespace jaxbridge::memory

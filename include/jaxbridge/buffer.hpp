// SPDX-License-Identifier: Apache-2.0
// A piece of XLA's memory for the time of one call: pointer, element type, shape.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "dtype.hpp"

namespace jaxbridge {
inline namespace v1 {

/// A dense row-major array that XLA owns. Neither the memory nor `shape` outlives the call. `data`
/// may be null where the array has no elements.
struct any_buffer {
  void* data = nullptr;
  jaxbridge::dtype dtype = jaxbridge::dtype::invalid;
  std::span<const std::int64_t> shape;

  [[nodiscard]] std::size_t rank() const noexcept { return shape.size(); }

  /// The number of elements: 1 for rank 0.
  [[nodiscard]] std::size_t size() const noexcept {
    std::size_t n = 1;
    for (const std::int64_t extent : shape) n *= static_cast<std::size_t>(extent);
    return n;
  }

  /// The bytes in use; elements smaller than a byte are packed.
  [[nodiscard]] std::size_t size_bytes() const noexcept {
    return (size() * bit_width(dtype) + 7) / 8;
  }
};

}  // namespace v1
}  // namespace jaxbridge

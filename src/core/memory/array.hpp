// SPDX-License-Identifier: Apache-2.0
// An array in memory that somebody else owns: what every way of describing one is turned into.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "jaxbridge/dtype.hpp"
#include "jaxbridge/layout.hpp"
#include "jaxbridge/status.hpp"

namespace jaxbridge::memory {

/// Who reaches the memory, and how.
enum class memory_kind : std::uint8_t {
  host,     ///< the CPU alone
  device,   ///< a CUDA device
  pinned,   ///< of the host, page-locked: devices can reach it too
  managed,  ///< moves between host and device by itself
};

[[nodiscard]] constexpr std::string_view name(memory_kind k) noexcept {
  switch (k) {
    case memory_kind::host:
      return "host";
    case memory_kind::device:
      return "device";
    case memory_kind::pinned:
      return "pinned";
    case memory_kind::managed:
      return "managed";
  }
  return "host";
}

/// Whether work on a CUDA stream may be writing the memory: it is on the side of a device.
[[nodiscard]] constexpr bool is_on_device(memory_kind k) noexcept {
  return k == memory_kind::device || k == memory_kind::managed;
}

/// An array that somebody else owns; it keeps nothing alive.
struct array {
  void* data = nullptr;  ///< the first element, [0, 0, ...]; may be null where there are none
  jaxbridge::dtype dtype = jaxbridge::dtype::invalid;
  memory_kind kind = memory_kind::host;
  int ordinal = 0;  ///< of the device; 0 for memory of the host
  bool readonly = true;
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> strides;  ///< in bytes, one for each extent

  [[nodiscard]] std::int64_t item_size() const noexcept {
    return static_cast<std::int64_t>(jaxbridge::item_size(dtype));
  }
  [[nodiscard]] layout_view layout() const noexcept { return {shape, strides, item_size()}; }
  [[nodiscard]] std::uintptr_t address() const noexcept {
    return reinterpret_cast<std::uintptr_t>(data);
  }
  /// Only of an array that check() has accepted.
  [[nodiscard]] std::int64_t size() const noexcept { return *element_count(shape); }
  [[nodiscard]] std::int64_t size_bytes() const noexcept { return size() * item_size(); }
};

/// Most axes of an array: NumPy's limit.
inline constexpr std::size_t max_rank = 64;

/// Whether `a` is an array at all: an element type of whole bytes, extents that are not negative,
/// bytes that can be counted and lie within the address space, an address where there are elements.
[[nodiscard]] status check(const array& a);

/// Gives `a` the strides of a dense row-major array. False where they do not fit.
[[nodiscard]] bool set_compact(array& a);

/// Makes the strides of a dense `a` (compact or transposed) true for axes of length 0 and 1, too.
/// Consumers that compare strides want them so. Only of an array that check() has accepted.
void settle_strides(array& a);

/// Such as "float32[2,3]", for messages.
[[nodiscard]] std::string describe(const array& a);

}  // namespace jaxbridge::memory

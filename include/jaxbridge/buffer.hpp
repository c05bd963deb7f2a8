// SPDX-License-Identifier: Apache-2.0
// A piece of XLA's memory for the time of one call: pointer, element type, shape.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

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

/// The rank of a buffer_view that takes any.
inline constexpr int dynamic_rank = -1;

/// An array of XLA's memory with element type T: an operand where T is const, a result otherwise. T
/// is void (const void) where any element type will do. Valid for the time of the call. On CUDA the
/// memory is the device's: the host must not touch it.
template <class T, int Rank = dynamic_rank>
class buffer_view {
  static_assert(Rank >= dynamic_rank && Rank <= 64,
                "jaxbridge: a rank is 0 to 64, or dynamic_rank");
  static_assert(!std::is_reference_v<T>, "jaxbridge: the element type is T, not a reference to T");

 public:
  using element_type = T;

  buffer_view() noexcept = default;
  explicit buffer_view(const any_buffer& of) noexcept : of_(of) {}

  [[nodiscard]] T* data() const noexcept { return static_cast<T*>(of_.data); }
  [[nodiscard]] jaxbridge::dtype dtype() const noexcept { return of_.dtype; }
  [[nodiscard]] std::span<const std::int64_t> shape() const noexcept { return of_.shape; }
  [[nodiscard]] std::int64_t extent(std::size_t axis) const noexcept { return of_.shape[axis]; }
  [[nodiscard]] std::size_t rank() const noexcept {
    if constexpr (Rank >= 0) {
      return static_cast<std::size_t>(Rank);
    } else {
      return of_.rank();
    }
  }
  /// The number of elements: 1 for rank 0.
  [[nodiscard]] std::size_t size() const noexcept { return of_.size(); }
  [[nodiscard]] std::size_t size_bytes() const noexcept { return of_.size_bytes(); }
  [[nodiscard]] const any_buffer& untyped() const noexcept { return of_; }

  /// All elements, row by row.
  [[nodiscard]] auto elements() const noexcept requires(!std::is_void_v<T>) {
    return std::span<T>(data(), size());
  }
  /// The element at `i` of elements(). Nothing checks it.
  [[nodiscard]] auto& operator[](std::size_t i) const noexcept requires(!std::is_void_v<T>) {
    return data()[i];
  }
  /// The element at these indices, one for each axis. Nothing checks them.
  template <std::convertible_to<std::int64_t>... Index>
  [[nodiscard]] auto& operator()(Index... index) const noexcept
      requires(!std::is_void_v<T> && sizeof...(Index) == static_cast<std::size_t>(Rank)) {
    std::int64_t at = 0;
    std::size_t axis = 0;
    ((at = at * of_.shape[axis++] + static_cast<std::int64_t>(index)), ...);
    return data()[at];
  }

 private:
  any_buffer of_;
};

/// An operand that is a result as well: one piece of memory, which the function updates.
template <class T, int Rank = dynamic_rank>
class in_place : public buffer_view<T, Rank> {
  static_assert(!std::is_const_v<T>, "jaxbridge: what is updated in place cannot be const");

 public:
  using buffer_view<T, Rank>::buffer_view;
};

/// Memory that the function needs for the time of the call, and nobody else sees: a hidden result.
/// Unlike what `scratch` gives it may be used in a captured graph.
template <class T>
class workspace : public buffer_view<T, 1> {
  static_assert(!std::is_const_v<T>, "jaxbridge: a workspace is written: its type cannot be const");

 public:
  using buffer_view<T, 1>::buffer_view;
};

}  // namespace v1
}  // namespace jaxbridge

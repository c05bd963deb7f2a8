// SPDX-License-Identifier: Apache-2.0
// How the elements of an array lie in memory: strides, their kinds, the bytes that are reached.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

namespace jaxbridge {
inline namespace v1 {

/// Extents and strides of an array; owns neither. Strides are in bytes, one for each extent, and
/// say how far the next element along the axis is. No extent is negative.
struct layout_view {
  std::span<const std::int64_t> shape;
  std::span<const std::int64_t> strides;
  std::int64_t item_size = 1;  ///< bytes per element
};

/// What stands between an array and a dense one. An array without elements is `compact`, and axes
/// of length 1 are not looked at: their strides say nothing.
enum class layout_kind : std::uint8_t {
  compact,     ///< dense, the last axis the fastest (row-major)
  transposed,  ///< dense, the axes in another order
  strided,     ///< gaps, or elements that overlap
  broadcast,   ///< an axis along which nothing moves (stride 0)
  negative,    ///< an axis that runs backwards
};

[[nodiscard]] constexpr std::string_view name(layout_kind k) noexcept {
  switch (k) {
    case layout_kind::compact:
      return "compact";
    case layout_kind::transposed:
      return "transposed";
    case layout_kind::strided:
      return "strided";
    case layout_kind::broadcast:
      return "broadcast";
    case layout_kind::negative:
      return "negative";
  }
  return "strided";
}

/// Bytes from the first element: all that an array reaches is in [low, high).
struct byte_range {
  std::int64_t low = 0;
  std::int64_t high = 0;

  friend constexpr bool operator==(const byte_range&, const byte_range&) = default;
};

[[nodiscard]] constexpr bool is_empty(std::span<const std::int64_t> shape) noexcept {
  return std::any_of(shape.begin(), shape.end(), [](std::int64_t n) { return n == 0; });
}

/// The number of elements, 1 for rank 0; nothing where it is more than fits, or an extent is
/// negative.
[[nodiscard]] constexpr std::optional<std::int64_t> element_count(
    std::span<const std::int64_t> shape) noexcept {
  if (std::any_of(shape.begin(), shape.end(), [](std::int64_t n) { return n < 0; })) return {};
  if (is_empty(shape)) return 0;
  std::int64_t count = 1;
  for (const std::int64_t extent : shape) {
    if (__builtin_mul_overflow(count, extent, &count)) return {};
  }
  return count;
}

/// The bytes that are reached, nothing where they cannot be counted. An array without elements
/// reaches none.
[[nodiscard]] constexpr std::optional<byte_range> bounds(const layout_view& l) noexcept {
  if (is_empty(l.shape)) return byte_range{};
  byte_range out{0, l.item_size};
  for (std::size_t axis = 0; axis < l.shape.size(); ++axis) {
    std::int64_t span = 0;
    if (l.shape[axis] < 1 || __builtin_mul_overflow(l.shape[axis] - 1, l.strides[axis], &span)) {
      return {};
    }
    std::int64_t& end = span < 0 ? out.low : out.high;
    if (__builtin_add_overflow(end, span, &end)) return {};
  }
  return out;
}

/// Whether the array is dense and row-major.
[[nodiscard]] constexpr bool is_compact(const layout_view& l) noexcept {
  if (is_empty(l.shape)) return true;
  std::int64_t expected = l.item_size;
  for (std::size_t axis = l.shape.size(); axis-- > 0;) {
    if (l.shape[axis] == 1) continue;
    if (l.strides[axis] != expected) return false;
    if (__builtin_mul_overflow(expected, l.shape[axis], &expected)) return false;
  }
  return true;
}

/// Writes the strides, in bytes, of a dense row-major array. An axis of length 0 counts as 1. False
/// where they do not fit.
[[nodiscard]] constexpr bool fill_compact_strides(std::span<const std::int64_t> shape,
                                                  std::int64_t item_size,
                                                  std::span<std::int64_t> strides) noexcept {
  std::int64_t stride = item_size;
  for (std::size_t axis = shape.size(); axis-- > 0;) {
    strides[axis] = stride;
    if (__builtin_mul_overflow(stride, std::max<std::int64_t>(shape[axis], 1), &stride)) {
      return false;
    }
  }
  return true;
}

/// Writes the strides, in bytes, of a dense array whose axes are, slowest first, those that `order`
/// names. An axis of length 0 counts as 1. False where they do not fit.
[[nodiscard]] constexpr bool fill_dense_strides(std::span<const std::int64_t> shape,
                                                std::span<const std::size_t> order,
                                                std::int64_t item_size,
                                                std::span<std::int64_t> strides) noexcept {
  std::int64_t stride = item_size;
  for (std::size_t i = order.size(); i-- > 0;) {
    strides[order[i]] = stride;
    const std::int64_t extent = std::max<std::int64_t>(shape[order[i]], 1);
    if (__builtin_mul_overflow(stride, extent, &stride)) return false;
  }
  return true;
}

/// The axes from the slowest to the fastest, as far as strides tell; row-major where they do not:
/// for axes of length 1, and for equal strides.
[[nodiscard]] inline std::vector<std::size_t> axis_order(const layout_view& l) {
  std::vector<std::size_t> order(l.shape.size());
  for (std::size_t axis = 0; axis < order.size(); ++axis) order[axis] = axis;
  if (is_empty(l.shape)) return order;
  // Axes of length 1 keep their places: the others are sorted among themselves.
  std::vector<std::size_t> moving;
  for (const std::size_t axis : order) {
    if (l.shape[axis] != 1) moving.push_back(axis);
  }
  std::stable_sort(moving.begin(), moving.end(),
                   [&l](std::size_t a, std::size_t b) { return l.strides[a] > l.strides[b]; });
  std::size_t next = 0;
  for (std::size_t& axis : order) {
    if (l.shape[axis] != 1) axis = moving[next++];
  }
  return order;
}

/// The kind of a layout whose bounds() can be counted.
[[nodiscard]] inline layout_kind classify(const layout_view& l) {
  if (is_compact(l)) return layout_kind::compact;
  const auto any_stride = [&l](auto is) {
    for (std::size_t axis = 0; axis < l.shape.size(); ++axis) {
      if (l.shape[axis] != 1 && is(l.strides[axis])) return true;
    }
    return false;
  };
  if (any_stride([](std::int64_t s) { return s < 0; })) return layout_kind::negative;
  if (any_stride([](std::int64_t s) { return s == 0; })) return layout_kind::broadcast;
  const std::vector<std::size_t> order = axis_order(l);
  std::int64_t expected = l.item_size;
  for (std::size_t i = order.size(); i-- > 0;) {
    const std::size_t axis = order[i];
    if (l.shape[axis] == 1) continue;
    if (l.strides[axis] != expected) return layout_kind::strided;
    if (__builtin_mul_overflow(expected, l.shape[axis], &expected)) return layout_kind::strided;
  }
  return layout_kind::transposed;
}

}  // namespace v1
}  // namespace jaxbridge

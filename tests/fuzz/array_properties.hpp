// SPDX-License-Identifier: Apache-2.0
// What the fuzzers of descriptions of arrays share: input, and what must hold of every outcome.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <optional>
#include <vector>

#include "core/memory/array.hpp"
#include "jaxbridge/layout.hpp"

namespace fuzzing {

inline void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "fuzzing: %s\n", what);
  std::abort();
}

/// Bytes as choices; at the end of the input 0, again and again.
class reader {
 public:
  reader(const std::uint8_t* data, std::size_t size) : next_(data), end_(data + size) {}

  std::uint8_t byte() { return next_ == end_ ? std::uint8_t{0} : *next_++; }

  std::int64_t wide() {
    std::uint64_t out = 0;
    for (int i = 0; i < 8; ++i) out = out << 8 | byte();
    return static_cast<std::int64_t>(out);
  }

  /// Small mostly, and else one of those at which arithmetic ends.
  std::int64_t extent() {
    const std::uint8_t b = byte();
    return b < 0xd0 ? b % 8 : odd(b);
  }
  std::int64_t stride() {
    const std::uint8_t b = byte();
    return b < 0xd0 ? b % 32 - 8 : odd(b);
  }

 private:
  std::int64_t odd(std::uint8_t b) {
    constexpr std::int64_t most = std::numeric_limits<std::int64_t>::max();
    constexpr std::array<std::int64_t, 7> all = {
        most, -most, most / 2, most / 8, -most - 1, -1, std::int64_t{1} << 32};
    return b < 0xf8 ? all[b % all.size()] : wide();
  }

  const std::uint8_t* next_;
  const std::uint8_t* end_;
};

/// An error with a text, or an array whose promises hold.
inline void check(const jaxbridge::result<jaxbridge::memory::array>& got) {
  using jaxbridge::layout_kind;
  if (!got.ok()) {
    require(!got.error().message().empty() && got.error().message().size() < 1000, "a bad text");
    return;
  }
  const jaxbridge::memory::array& a = got.value();
  require(jaxbridge::memory::check(a).ok(), "an array that is none");
  require(a.ordinal >= 0, "a negative ordinal");
  const std::int64_t bytes = a.size_bytes();
  require(bytes >= 0, "a negative size");
  const std::optional<jaxbridge::byte_range> reached = bounds(a.layout());
  require(reached.has_value() && reached->low <= 0 && reached->high >= 0, "no bounds");
  const layout_kind kind = classify(a.layout());
  require((kind == layout_kind::compact) == is_compact(a.layout()), "compact or not");
  if (kind == layout_kind::compact || kind == layout_kind::transposed) {
    require(reached->high - reached->low == bytes, "a dense array with gaps");
  }
  jaxbridge::memory::array settled = a;
  settle_strides(settled);
  require(classify(settled.layout()) == kind, "another layout");
  for (std::size_t axis = 0; axis < a.shape.size() && bytes > 0; ++axis) {
    require(a.shape[axis] == 1 || settled.strides[axis] == a.strides[axis], "other strides");
  }
  require((kind == layout_kind::negative) == (reached->low < 0), "negative or not");
  require(!describe(a).empty(), "no text");
}

}  // namespace fuzzing

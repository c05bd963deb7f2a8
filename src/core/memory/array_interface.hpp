// SPDX-License-Identifier: Apache-2.0
// NumPy's and the CUDA array interface: the fields of their dictionaries, turned into an array.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "core/memory/array.hpp"
#include "jaxbridge/dtype.hpp"
#include "jaxbridge/status.hpp"

namespace jaxbridge::memory {

/// The fields of one dictionary, as they stand there; owns nothing.
struct array_interface {
  std::uintptr_t address = 0;  ///< data[0]
  bool readonly = false;       ///< data[1]
  std::string_view typestr;
  std::span<const std::int64_t> shape;
  /// In bytes; nothing where the field is missing or None: dense, row-major.
  std::optional<std::span<const std::int64_t>> strides;
  std::int64_t offset = 0;  ///< of the data, NumPy's interface alone
  bool has_mask = false;
  bool is_structured = false;  ///< `descr` names more than one field
};

/// The element type that a typestr such as "<f4" names. Only the machine's own byte order; no
/// structures, texts, dates or objects.
[[nodiscard]] result<dtype> parse_typestr(std::string_view text);

/// The array that an interface describes. The protocol says neither device nor kind of memory: the
/// caller does.
[[nodiscard]] result<array> describe(const array_interface& fields, memory_kind kind, int ordinal);

/// How an array interface writes that element type; empty where it has no text for it: bfloat16 and
/// smaller floats.
[[nodiscard]] std::string_view typestr_of(dtype t) noexcept;

}  // namespace jaxbridge::memory

// SPDX-License-Identifier: Apache-2.0
// Static values of a call, read from XLA's dictionary by name.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string_view>

#include "abi/xla_ffi.hpp"
#include "dtype.hpp"

namespace jaxbridge {
inline namespace v1 {

/// A view of one dictionary of attributes. It owns nothing and ends with the call.
class attributes_view {
 public:
  attributes_view() noexcept = default;
  explicit attributes_view(const abi::xla_ffi::attributes& raw) noexcept : raw_(&raw) {}

  [[nodiscard]] std::size_t size() const noexcept {
    return raw_ == nullptr ? 0 : static_cast<std::size_t>(raw_->size);
  }

  /// The scalar of exactly the type T; nothing where there is none by that name, or another type.
  template <class T>
  requires(dtype_of<T> != dtype::invalid)
      [[nodiscard]] std::optional<T> scalar(std::string_view name) const noexcept {
    const void* found = find(name, abi::xla_ffi::attribute_scalar);
    if (found == nullptr) return std::nullopt;
    const auto* value = static_cast<const abi::xla_ffi::scalar*>(found);
    if (dtype_from_xla(value->dtype) != dtype_of<T> || value->value == nullptr) return std::nullopt;
    T out;
    std::memcpy(&out, value->value, sizeof(T));
    return out;
  }

  /// The string by that name, as long as the call.
  [[nodiscard]] std::optional<std::string_view> string(std::string_view name) const noexcept {
    const void* found = find(name, abi::xla_ffi::attribute_string);
    if (found == nullptr) return std::nullopt;
    return text(static_cast<const abi::xla_ffi::byte_span*>(found));
  }

 private:
  // Nothing where there is no text; the empty one may have no address.
  [[nodiscard]] static std::optional<std::string_view> text(
      const abi::xla_ffi::byte_span* span) noexcept {
    if (span == nullptr || (span->ptr == nullptr && span->len != 0)) return std::nullopt;
    return std::string_view(span->ptr, span->len);
  }

  [[nodiscard]] const void* find(std::string_view name,
                                 abi::xla_ffi::attribute_type type) const noexcept {
    for (std::size_t i = 0; i < size(); ++i) {
      if (text(raw_->names[i]) == name) return raw_->types[i] == type ? raw_->attrs[i] : nullptr;
    }
    return nullptr;
  }

  const abi::xla_ffi::attributes* raw_ = nullptr;
};

}  // namespace v1
}  // namespace jaxbridge

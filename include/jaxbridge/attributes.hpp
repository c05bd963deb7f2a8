// SPDX-License-Identifier: Apache-2.0
// Static values of a call, read from XLA's dictionary by name.
#pragma once

#include <complex>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string_view>

#include "abi/xla_ffi.hpp"
#include "dtype.hpp"

namespace jaxbridge {
inline namespace v1 {

namespace detail {
template <class T>
struct real_of {};
template <class T>
struct real_of<std::complex<T>> {
  using type = T;
};
}  // namespace detail

/// A view of one dictionary of attributes. It owns nothing and ends with the call. Every lookup
/// gives nothing where there is no attribute by that name, or one of another type.
class attributes_view {
 public:
  attributes_view() noexcept = default;
  explicit attributes_view(const abi::xla_ffi::attributes& raw) noexcept : raw_(&raw) {}

  [[nodiscard]] std::size_t size() const noexcept {
    return raw_ == nullptr ? 0 : static_cast<std::size_t>(raw_->size);
  }

  /// XLA's own dictionary; null where this is none.
  [[nodiscard]] const abi::xla_ffi::attributes* raw() const noexcept { return raw_; }

  /// The name of the attribute at `i`, less than size(); empty where it has no text.
  [[nodiscard]] std::string_view name_at(std::size_t i) const noexcept {
    return text(raw_->names[i]).value_or(std::string_view());
  }

  /// The scalar of exactly the type T. A complex one may also come as the array of its two parts,
  /// as JAX has no scalar attribute for it.
  template <class T>
  requires(dtype_of<T> != dtype::invalid)
      [[nodiscard]] std::optional<T> scalar(std::string_view name) const noexcept {
    const auto* value =
        static_cast<const abi::xla_ffi::scalar*>(find(name, abi::xla_ffi::attribute_scalar));
    if (value == nullptr) {
      if constexpr (requires { typename detail::real_of<T>::type; }) {
        if (const auto parts = array<T>(name); parts && parts->size() == 1) return parts->front();
      }
      return std::nullopt;
    }
    if (dtype_from_xla(value->dtype) != dtype_of<T> || value->value == nullptr) return std::nullopt;
    T out;
    std::memcpy(&out, value->value, sizeof(T));
    return out;
  }

  /// The 1-D array of exactly the element type T, as long as the call. One of complex numbers may
  /// also come as that of their parts.
  template <class T>
  requires(dtype_of<T> != dtype::invalid)
      [[nodiscard]] std::optional<std::span<const T>> array(std::string_view name) const noexcept {
    const auto* found =
        static_cast<const abi::xla_ffi::array*>(find(name, abi::xla_ffi::attribute_array));
    if (found == nullptr || (found->data == nullptr && found->size != 0) ||
        found->size > max_array_size ||
        reinterpret_cast<std::uintptr_t>(found->data) % alignof(T) != 0) {
      return std::nullopt;
    }
    std::size_t size = found->size;
    dtype type = dtype_from_xla(found->dtype);
    // Truth values are bytes in the attributes of JAX 0.8.
    if (dtype_of<T> == dtype::bool_ && type == dtype::uint8) type = dtype::bool_;
    if constexpr (requires { typename detail::real_of<T>::type; }) {
      if (type == dtype_of<typename detail::real_of<T>::type> && size % 2 == 0) {
        type = dtype_of<T>;
        size /= 2;
      }
    }
    if (type != dtype_of<T>) return std::nullopt;
    return std::span<const T>(static_cast<const T*>(found->data), size);
  }

  /// The string by that name, as long as the call.
  [[nodiscard]] std::optional<std::string_view> string(std::string_view name) const noexcept {
    const void* found = find(name, abi::xla_ffi::attribute_string);
    if (found == nullptr) return std::nullopt;
    return text(static_cast<const abi::xla_ffi::byte_span*>(found));
  }

  /// The dictionary by that name, as long as the call.
  [[nodiscard]] std::optional<attributes_view> dictionary(std::string_view name) const noexcept {
    const auto* found = static_cast<const abi::xla_ffi::attributes*>(
        find(name, abi::xla_ffi::attribute_dictionary));
    if (found == nullptr || found->struct_size < sizeof(*found) || found->size < 0 ||
        (found->size > 0 &&
         (found->names == nullptr || found->types == nullptr || found->attrs == nullptr))) {
      return std::nullopt;
    }
    return attributes_view(*found);
  }

  [[nodiscard]] bool contains(std::string_view name) const noexcept {
    for (std::size_t i = 0; i < size(); ++i) {
      if (text(raw_->names[i]) == name) return true;
    }
    return false;
  }

 private:
  static constexpr std::size_t max_array_size = std::size_t{1} << 40;

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

// SPDX-License-Identifier: Apache-2.0
// How the shapes of results follow from operands and attributes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string_view>

#include "abi/native_library.hpp"
#include "attributes.hpp"
#include "buffer.hpp"
#include "signature.hpp"
#include "status.hpp"

namespace jaxbridge {
inline namespace v1 {

/// The type of one result, written by a shape function.
class result_shape {
 public:
  explicit result_shape(abi::native::shape& to) noexcept : to_(&to) {}

  /// At most 64 extents.
  void set(jaxbridge::dtype type, std::span<const std::int64_t> extents) noexcept {
    to_->dtype = static_cast<std::int32_t>(type);
    to_->rank = static_cast<std::int32_t>(extents.size());
    for (std::size_t i = 0; i < extents.size() && i < abi::native::max_rank; ++i) {
      to_->extents[i] = extents[i];
    }
  }
  void set(jaxbridge::dtype type, std::initializer_list<std::int64_t> extents) noexcept {
    set(type, std::span<const std::int64_t>(extents.begin(), extents.size()));
  }

 private:
  abi::native::shape* to_;
};

/// What a shape function is: it gets operands without memory, the attributes, and writes the type
/// of every result, hidden ones last. It runs while a program is traced.
using shape_rule = status(std::span<const any_buffer> operands, const attributes_view& attributes,
                          std::span<result_shape> results);

namespace detail {

struct same_as_rule {
  std::size_t operand;
  std::string_view text;
};
template <std::size_t K>
struct same_as_text {
  static constexpr auto make() {
    fixed_text<32> out;
    out.append("same_as ");
    char digits[8]{};
    std::size_t n = 0;
    for (std::size_t k = K; n == 0 || k > 0; k /= 10) digits[n++] = static_cast<char>('0' + k % 10);
    while (n > 0) out.append(std::string_view(&digits[--n], 1));
    return out;
  }
  static constexpr auto value = make();
};

// Not constexpr: a call at compile time is an error, which shows the name. (There may be no throw.)
inline void write_a_shape_with_brackets_as_in(const char* /*example*/) {}

}  // namespace detail

/// The result has the shape of operand K (and its element type, where that is not fixed).
template <std::size_t K>
inline constexpr detail::same_as_rule same_as{K, detail::same_as_text<K>::value.view()};

/// The result has these extents, in names that `.parameters()` gives to those of operands, and
/// integer attributes: shape("[n, 2 * m]").
struct shape {
  std::string_view text;
  consteval shape(const char* extents) : text(extents) {  // NOLINT(google-explicit-constructor)
    if (text.size() < 2 || text.front() != '[' || text.back() != ']') {
      detail::write_a_shape_with_brackets_as_in("[n, 2 * m]");
    }
  }
};

}  // namespace v1
}  // namespace jaxbridge

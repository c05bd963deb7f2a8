// SPDX-License-Identifier: Apache-2.0
// What a C++ function takes from XLA, read from its type at compile time.
#pragma once

#include <array>
#include <complex>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>

#include "attributes.hpp"
#include "buffer.hpp"
#include "device.hpp"
#include "dtype.hpp"
#include "scratch.hpp"
#include "state.hpp"
#include "status.hpp"
#include "stream.hpp"
#include "thread_pool.hpp"

namespace jaxbridge {
inline namespace v1 {
namespace detail {

/// Where the value of a parameter comes from.
enum class role : std::uint8_t { operand, result, in_place, workspace, attribute, context };

/// Text that is put together at compile time.
template <std::size_t N>
struct fixed_text {
  char data[N]{};
  std::size_t size = 0;

  constexpr void append(std::string_view text) {
    for (const char c : text) data[size++] = c;
  }
  [[nodiscard]] constexpr std::string_view view() const { return {data, size}; }
};

inline constexpr std::size_t longest_parameter_text = 192;
using parameter_text = fixed_text<longest_parameter_text>;

constexpr std::string_view dtype_text(dtype t) { return t == dtype::invalid ? "any" : name(t); }

template <class T>
constexpr parameter_text buffer_text(std::string_view prefix, int rank) {
  parameter_text out;
  out.append(prefix);
  out.append(dtype_text(std::is_void_v<T> ? dtype::invalid : dtype_of<T>));
  out.append("[");
  if (rank == dynamic_rank) out.append("...");
  for (int i = 0; i < rank; ++i) out.append(i == 0 ? "*" : ",*");
  out.append("]");
  return out;
}

// What an exported function can take. The value of a slot is read from the frame, and passed on.
template <class T>
struct parameter {
  static constexpr bool known = false;
  static constexpr role kind = role::context;
  static constexpr bool optional = false;
  using slot = int;
  static constexpr parameter_text text() { return {}; }
};

template <class T, int Rank, role Role>
struct buffer_parameter {
  static constexpr bool known = true;
  static constexpr role kind = Role;
  static constexpr bool optional = false;
  static constexpr dtype type = std::is_void_v<T> ? dtype::invalid : dtype_of<T>;
  static constexpr int rank = Rank;
  static_assert(
      std::is_void_v<T> || type != dtype::invalid,
      "jaxbridge: the element type of a buffer_view is none that XLA has: expected bool, one of "
      "std::int8_t to std::uint64_t (no char, and no long long where that is none of them), float, "
      "double or std::complex of these, void for any, or a type of yours for which "
      "jaxbridge::dtype_of is specialized");

  static constexpr bool matches(const any_buffer& b) noexcept {
    return (type == dtype::invalid || b.dtype == type) &&
           (rank == dynamic_rank || b.rank() == static_cast<std::size_t>(rank));
  }
  static constexpr parameter_text text() {
    return buffer_text<T>(Role == role::operand     ? ""
                          : Role == role::result    ? "out "
                          : Role == role::workspace ? "workspace "
                                                    : "inout ",
                          Rank);
  }
};

template <class T, int Rank>
struct parameter<buffer_view<T, Rank>>
    : buffer_parameter<std::remove_const_t<T>, Rank,
                       std::is_const_v<T> ? role::operand : role::result> {
  using slot = buffer_view<T, Rank>;
};
template <class T, int Rank>
struct parameter<in_place<T, Rank>> : buffer_parameter<T, Rank, role::in_place> {
  using slot = in_place<T, Rank>;
};
template <class T>
struct parameter<workspace<T>> : buffer_parameter<T, 1, role::workspace> {
  using slot = workspace<T>;
};

struct attribute_parameter {
  static constexpr bool known = true;
  static constexpr role kind = role::attribute;
  static constexpr bool optional = false;
};

template <class T>
requires(dtype_of<T> != dtype::invalid) struct parameter<T> : attribute_parameter {
  using slot = T;
  static constexpr parameter_text text() {
    parameter_text out;
    out.append(name(dtype_of<T>));
    return out;
  }
  static bool read(const attributes_view& from, std::string_view name, slot& out) noexcept {
    const std::optional<T> found = from.scalar<T>(name);
    if (found) out = *found;
    return found.has_value();
  }
};

template <>
struct parameter<std::string_view> : attribute_parameter {
  using slot = std::string_view;
  static constexpr parameter_text text() {
    parameter_text out;
    out.append("string");
    return out;
  }
  static bool read(const attributes_view& from, std::string_view name, slot& out) noexcept {
    const std::optional<std::string_view> found = from.string(name);
    if (found) out = *found;
    return found.has_value();
  }
};

template <class T>
struct parameter<std::span<const T>> : attribute_parameter {
  static_assert(dtype_of<T> != dtype::invalid,
                "jaxbridge: an array attribute is a std::span<const T> of bool, an integer, float, "
                "double or std::complex of these");
  using slot = std::span<const T>;
  static constexpr parameter_text text() {
    parameter_text out;
    out.append("list ");
    out.append(name(dtype_of<T>));
    return out;
  }
  static bool read(const attributes_view& from, std::string_view name, slot& out) noexcept {
    const std::optional<std::span<const T>> found = from.array<T>(name);
    if (found) out = *found;
    return found.has_value();
  }
};

template <>
struct parameter<attributes_view> : attribute_parameter {
  using slot = attributes_view;
  static constexpr parameter_text text() {
    parameter_text out;
    out.append("dict");
    return out;
  }
  static bool read(const attributes_view& from, std::string_view name, slot& out) noexcept {
    const std::optional<attributes_view> found = from.dictionary(name);
    if (found) out = *found;
    return found.has_value();
  }
};

template <class T>
struct parameter<std::optional<T>> : attribute_parameter {
  static_assert(parameter<T>::known && parameter<T>::kind == role::attribute,
                "jaxbridge: std::optional is for attributes: a number, std::string_view, "
                "std::span<const T> or attributes_view");
  static constexpr bool optional = true;
  using slot = std::optional<T>;
  static constexpr parameter_text text() {
    parameter_text out;
    out.append("optional ");
    out.append(parameter<T>::text().view());
    return out;
  }
  static bool read(const attributes_view& from, std::string_view name, slot& out) noexcept {
    out.reset();
    if (!from.contains(name)) return true;
    typename parameter<T>::slot value{};
    if (!parameter<T>::read(from, name, value)) return false;
    out = value;
    return true;
  }
};

/// What a parameter may take that is no array and no attribute.
struct surroundings {
  const abi::xla_ffi::call_frame* frame;
  device on;
  stream_ref stream;
};

struct context_parameter {
  static constexpr bool known = true;
  static constexpr role kind = role::context;
  static constexpr bool optional = false;
  static constexpr parameter_text text() { return {}; }
};

template <>
struct parameter<stream_ref> : context_parameter {
  using slot = stream_ref;
  static slot make(const surroundings& s) noexcept { return s.stream; }
};
template <>
struct parameter<device> : context_parameter {
  using slot = device;
  static slot make(const surroundings& s) noexcept { return s.on; }
};
template <>
struct parameter<thread_pool> : context_parameter {
  using slot = thread_pool;
  static slot make(const surroundings& s) noexcept { return {*s.frame, s.on.platform}; }
};
template <>
struct parameter<scratch> : context_parameter {
  using slot = scratch;
  static slot make(const surroundings& s) noexcept { return {*s.frame, s.on.platform}; }
};
template <class T>
struct parameter<state<T>> : context_parameter {
  using slot = state<T>;
  static slot make(const surroundings& s) { return slot(state_on<T>(s.on)); }
};

template <class T>
struct is_state : std::false_type {};
template <class T>
struct is_state<state<T>> : std::true_type {
  using value_type = T;
};

template <std::size_t N>
constexpr std::size_t count_of(const std::array<role, N>& roles, role r, std::size_t end) {
  std::size_t n = 0;
  for (std::size_t i = 0; i < end; ++i) n += roles[i] == r ? 1 : 0;
  return n;
}

/// The parameters of a function and what each is.
template <class F>
struct signature_of {
  static_assert(std::is_void_v<F>,
                "jaxbridge: what is exported is one function: of a lambda or an object, export a "
                "function that calls it");
};

template <class R, class... Args>
struct signature_of<R (*)(Args...)> {
  using result = R;
  static constexpr std::size_t count = sizeof...(Args);

  template <std::size_t I>
  using argument = std::tuple_element_t<I, std::tuple<Args...>>;
  template <std::size_t I>
  using parameter_at = parameter<std::remove_cvref_t<argument<I>>>;

  static constexpr std::array<role, count + 1> roles{parameter<std::remove_cvref_t<Args>>::kind...,
                                                     role::context};

  static constexpr bool all_known = (parameter<std::remove_cvref_t<Args>>::known && ...);
  static constexpr bool has_state = (is_state<std::remove_cvref_t<Args>>::value || ...);
  template <class T>
  static constexpr bool takes = (std::is_same_v<std::remove_cvref_t<Args>, T> || ...);
  /// Whether it takes what is no array and no attribute.
  static constexpr bool has_surroundings =
      ((parameter<std::remove_cvref_t<Args>>::kind == role::context) || ...);

  static constexpr std::size_t operands =
      count_of(roles, role::operand, count) + count_of(roles, role::in_place, count);
  static constexpr std::size_t visible_results =
      count_of(roles, role::result, count) + count_of(roles, role::in_place, count);
  static constexpr std::size_t workspaces = count_of(roles, role::workspace, count);
  static constexpr std::size_t results = visible_results + workspaces;
  static constexpr std::size_t attributes = count_of(roles, role::attribute, count);
  static constexpr std::size_t named = operands + attributes;

  /// Which operand, result or attribute parameter `i` is. Hidden results come last.
  static constexpr std::size_t operand_index(std::size_t i) {
    return count_of(roles, role::operand, i) + count_of(roles, role::in_place, i);
  }
  static constexpr std::size_t result_index(std::size_t i) {
    return roles[i] == role::workspace
               ? visible_results + count_of(roles, role::workspace, i)
               : count_of(roles, role::result, i) + count_of(roles, role::in_place, i);
  }
  /// Its place among the named ones.
  static constexpr std::size_t name_index(std::size_t i) {
    return operand_index(i) + count_of(roles, role::attribute, i);
  }

  static constexpr fixed_text<(count + 1) * (longest_parameter_text + 2)> make_text() {
    fixed_text<(count + 1) * (longest_parameter_text + 2)> out;
    const auto add = [&out](std::string_view text) {
      if (text.empty()) return;
      if (out.size > 0) out.append(", ");
      out.append(text);
    };
    (add(parameter<std::remove_cvref_t<Args>>::text().view()), ...);
    return out;
  }
};

template <class R, class... Args>
struct signature_of<R (*)(Args...) noexcept> : signature_of<R (*)(Args...)> {};

}  // namespace detail
}  // namespace v1
}  // namespace jaxbridge

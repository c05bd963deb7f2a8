// SPDX-License-Identifier: Apache-2.0
// JAXBRIDGE_EXPORT: a C++ function becomes a handler of XLA's that says of itself what it takes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string_view>
#include <type_traits>

#include "abi/native_library.hpp"
#include "abi/xla_ffi.hpp"
#include "handler.hpp"
#include "shape_rules.hpp"
#include "signature.hpp"

namespace jaxbridge {
inline namespace v1 {
namespace detail {

/// All exports of this library. Hidden: each library has its own.
struct __attribute__((visibility("hidden"))) library_exports {
  static inline abi::native::library all{sizeof(abi::native::library), abi::native::major_version,
                                         nullptr};
};

inline abi::native::text to_text(std::string_view s) noexcept { return {s.data(), s.size()}; }

// Names of parameters that the author did not give.
inline constexpr std::string_view default_names[] = {
    "p0",  "p1",  "p2",  "p3",  "p4",  "p5",  "p6",  "p7",  "p8",  "p9",  "p10", "p11", "p12",
    "p13", "p14", "p15", "p16", "p17", "p18", "p19", "p20", "p21", "p22", "p23", "p24", "p25",
    "p26", "p27", "p28", "p29", "p30", "p31", "p32", "p33", "p34", "p35", "p36", "p37", "p38",
    "p39", "p40", "p41", "p42", "p43", "p44", "p45", "p46", "p47", "p48", "p49", "p50", "p51",
    "p52", "p53", "p54", "p55", "p56", "p57", "p58", "p59", "p60", "p61", "p62", "p63"};
static_assert(std::size(default_names) == max_named);

/// Calls `see(name)` for each entry of "x[n, k], a = 2.0". False where one has no name.
template <class See>
constexpr bool each_name(std::string_view list, const See& see) {
  int depth = 0;
  char quote = 0;
  std::size_t begin = 0;
  for (std::size_t i = 0; i <= list.size(); ++i) {
    const char c = i < list.size() ? list[i] : ',';
    if (i < list.size()) {
      const bool quoted = quote != 0;
      if (quoted ? c == quote : c == '"' || c == '\'') quote = quoted ? '\0' : c;
      if (!quoted && (c == '[' || c == '(' || c == '{')) ++depth;
      if (!quoted && (c == ']' || c == ')' || c == '}')) --depth;
      if (c != ',' || depth > 0 || quote != 0) continue;
    }
    std::string_view entry = list.substr(begin, i - begin);
    begin = i + 1;
    while (!entry.empty() && entry.front() == ' ') entry.remove_prefix(1);
    std::size_t length = 0;
    while (length < entry.size() &&
           (entry[length] == '_' || (entry[length] >= 'a' && entry[length] <= 'z') ||
            (entry[length] >= 'A' && entry[length] <= 'Z') ||
            (length > 0 && entry[length] >= '0' && entry[length] <= '9'))) {
      ++length;
    }
    if (length == 0) return false;
    see(entry.substr(0, length));
  }
  return true;
}

// Not constexpr: a call at compile time is an error, which shows the name. (There may be no throw.)
inline void parameters_is_a_list_of_names_as_in(const char* /*example*/) {}
inline void parameters_names_each_operand_and_each_attribute_and_no_result(
    std::size_t /*given*/, std::size_t /*expected*/) {}

/// The names of `Count` operands and attributes, checked at compile time.
template <std::size_t Count>
struct parameter_names {
  std::string_view text;
  consteval parameter_names(const char* list) : text(list) {  // NOLINT
    std::size_t count = 0;
    if (!each_name(text, [&count](std::string_view) { ++count; })) {
      parameters_is_a_list_of_names_as_in("x, a = 2.0");
    }
    if (count != Count) {
      parameters_names_each_operand_and_each_attribute_and_no_result(count, Count);
    }
  }
};

/// What stands behind JAXBRIDGE_EXPORT(...): options of one export, or of one for each platform.
template <auto... Functions>
class exporter {
  using first = signature<first_of<Functions...>::value>;

 public:
  exporter(std::string_view name, exported* one, exported* other = nullptr) noexcept
      : exports_{one, other} {
    (check_function<Functions>(), ...);
    static_assert((same_kind<first_of<Functions...>::value, Functions>() && ...),
                  "jaxbridge: the overloads of one name differ in element types and ranks alone");
    for (exported* e : exports_) {
      if (e == nullptr) continue;
      e->about.name = to_text(name);
      e->about.signatures = to_text(signatures<Functions...>::value.view());
      for (std::size_t i = 0; i < first::named; ++i) {
        e->names[i] = default_names[i];
      }
      e->about.next = library_exports::all.first;
      library_exports::all.first = &e->about;
    }
  }

  /// Names of operands and attributes, in the order of the function's parameters, with extents and
  /// defaults where wanted: "x[n, k], y[k, m], a = 2.0". XLA's attributes have these names.
  const exporter& parameters(parameter_names<first::named> list) const noexcept {
    for_each([&list](exported& e) {
      e.about.parameters = to_text(list.text);
      std::size_t i = 0;
      each_name(list.text, [&e, &i](std::string_view name) { e.names[i++] = name; });
    });
    return *this;
  }

  /// What the shape of each result follows from: same_as<k>, shape("[n, m]"). Hidden results last.
  template <class... Rules>
  const exporter& result(const Rules&... rules) const noexcept {
    static_assert(sizeof...(Rules) == first::results,
                  "jaxbridge: result() takes one rule for each result, workspaces last");
    static_assert(((std::is_same_v<Rules, same_as_rule> || std::is_same_v<Rules, shape>)&&...),
                  "jaxbridge: a rule is jaxbridge::same_as<k> or jaxbridge::shape(\"[n, m]\")");
    for_each([&](exported& e) {
      std::size_t i = 0;
      ((e.rules[i++] = to_text(rules.text)), ...);
      e.about.results = e.rules;
      e.about.result_count = i;
    });
    return *this;
  }

  /// A function that computes the shapes: `shape_rule`.
  template <auto Rule>
  const exporter& shapes() const noexcept {
    for_each([](exported& e) { e.about.shapes = &infer<Rule, first>; });
    return *this;
  }

  const exporter& doc(const char* text) const noexcept {
    for_each([text](exported& e) { e.about.doc = to_text(text); });
    return *this;
  }

  /// Each element of the results depends on the elements of operands at the same place alone.
  const exporter& elementwise() const noexcept { return flag(abi::native::flag_elementwise); }

  /// The function does something that its results don't show: XLA must not drop it.
  const exporter& side_effect() const noexcept { return flag(abi::native::flag_side_effect); }

  /// All that the function does on CUDA is to enqueue work on its stream, and it is the same each
  /// time, and never nothing: XLA may capture it into a command buffer, and replay that.
  const exporter& capturable() const noexcept {
    static_assert((!signature<Functions>::template takes<scratch> && ...),
                  "jaxbridge: memory of scratch& ends with the call, and a captured one comes "
                  "again: take a workspace<T>");
    return flag(abi::native::flag_capturable);
  }

  /// How jax.vmap calls it: "sequential", "sequential_unrolled", "expand_dims", "broadcast_all",
  /// "batched".
  const exporter& vmap(const char* method) const noexcept {
    for_each([method](exported& e) { e.about.vmap_method = to_text(method); });
    return *this;
  }

 private:
  template <class Do>
  void for_each(const Do& what) const noexcept {
    for (exported* e : exports_) {
      if (e != nullptr) what(*e);
    }
  }
  const exporter& flag(std::uint32_t bit) const noexcept {
    for_each([bit](exported& e) { e.about.flags |= bit; });
    return *this;
  }

  exported* exports_[2];
};

template <exported& Export, platform Where, auto... Functions>
exported* fill() noexcept {
  Export.about.struct_size = sizeof(Export.about);
  Export.about.platform =
      Where == platform::cpu ? abi::native::platform_cpu : abi::native::platform_cuda;
  Export.about.execute = &handle<Export, Where, Functions...>;
  if constexpr ((signature<Functions>::has_state || ...)) {
    Export.about.initialize = &prepare<Export, Where, Functions...>;
  }
  Export.about.calls = &Export.calls;
  return &Export;
}

}  // namespace detail
}  // namespace v1
}  // namespace jaxbridge

/// The descriptor of this library, which jaxbridge.load reads.
extern "C"
    __attribute__((visibility("default"), used)) inline const jaxbridge::abi::native::library*
    jaxbridge_library_v1() noexcept {
  return &jaxbridge::detail::library_exports::all;
}

// The handler as a symbol of its own, for jax.ffi without jaxbridge: jaxbridge_ffi_NAME_PLATFORM.
#define JAXBRIDGE_DETAIL_HANDLER(name, where, ...)                                            \
  static ::jaxbridge::detail::exported jaxbridge_exported_##name##_##where;                   \
  extern "C" __attribute__((visibility("default"), used)) ::jaxbridge::abi::xla_ffi::error*   \
      jaxbridge_ffi_##name##_##where(::jaxbridge::abi::xla_ffi::call_frame* frame) noexcept { \
    return ::jaxbridge::detail::handle<jaxbridge_exported_##name##_##where,                   \
                                       ::jaxbridge::platform::where, __VA_ARGS__>(frame);     \
  }
#define JAXBRIDGE_DETAIL_FILL(name, where, ...)                                                \
  ::jaxbridge::detail::fill<jaxbridge_exported_##name##_##where, ::jaxbridge::platform::where, \
                            __VA_ARGS__>()

/// JAXBRIDGE_EXPORT_AS(name, platform, function...): exports a function, or overloads that differ
/// in element types and ranks, under `name` for `platform` (cpu or cuda).
#define JAXBRIDGE_EXPORT_AS(name, where, ...)                            \
  JAXBRIDGE_DETAIL_HANDLER(name, where, __VA_ARGS__)                     \
  [[maybe_unused]] static const auto jaxbridge_export_##name##_##where = \
      ::jaxbridge::detail::exporter<__VA_ARGS__>(#name,                  \
                                                 JAXBRIDGE_DETAIL_FILL(name, where, __VA_ARGS__))

/// JAXBRIDGE_EXPORT(function, cpu), (function, cuda) or (function, cpu, cuda): exports a function
/// under its own name. Options follow: JAXBRIDGE_EXPORT(scale, cpu).parameters("x,
/// a").result(same_as<0>);
#define JAXBRIDGE_EXPORT(function, ...)                                                    \
  JAXBRIDGE_DETAIL_PICK(__VA_ARGS__, JAXBRIDGE_DETAIL_EXPORT_2, JAXBRIDGE_DETAIL_EXPORT_1, \
                        JAXBRIDGE_DETAIL_END)                                              \
  (function, __VA_ARGS__)
#define JAXBRIDGE_DETAIL_PICK(first, second, macro, ...) macro
#define JAXBRIDGE_DETAIL_EXPORT_1(function, where) JAXBRIDGE_EXPORT_AS(function, where, function)
#define JAXBRIDGE_DETAIL_EXPORT_2(function, where, other)                                       \
  JAXBRIDGE_DETAIL_HANDLER(function, where, function)                                           \
  JAXBRIDGE_DETAIL_HANDLER(function, other, function)                                           \
  [[maybe_unused]] static const auto jaxbridge_export_##function =                              \
      ::jaxbridge::detail::exporter<function>(#function,                                        \
                                              JAXBRIDGE_DETAIL_FILL(function, where, function), \
                                              JAXBRIDGE_DETAIL_FILL(function, other, function))

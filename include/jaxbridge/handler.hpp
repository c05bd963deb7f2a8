// SPDX-License-Identifier: Apache-2.0
// From XLA's frame to a call of a C++ function.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <new>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>

#include "abi/native_library.hpp"
#include "abi/xla_ffi.hpp"
#include "attributes.hpp"
#include "buffer.hpp"
#include "frame.hpp"
#include "shape_rules.hpp"
#include "signature.hpp"
#include "status.hpp"

namespace jaxbridge {
inline namespace v1 {
namespace detail {

inline constexpr std::size_t max_named = 64;
inline constexpr std::size_t max_results = 32;

/// One exported function on one platform.
struct exported {
  abi::native::function about{};
  abi::native::text rules[max_results]{};
  std::string_view names[max_named]{};
  std::atomic<std::uint64_t> calls{0};
};

template <auto... Functions>
struct first_of;
template <auto F, auto... Rest>
struct first_of<F, Rest...> {
  static constexpr auto value = F;
};

template <auto F>
using signature = signature_of<std::remove_cvref_t<decltype(F)>>;

// Whether F can be exported: what is wrong with it is said once, by check_function.
template <auto F>
constexpr bool is_exportable() {
  using s = signature<F>;
  return s::all_known && s::named <= max_named && s::results <= max_results &&
         (std::is_same_v<typename s::result, status> || std::is_same_v<typename s::result, void>);
}

template <class T>
constexpr void check_parameter() {
  static_assert(parameter<std::remove_cvref_t<T>>::known,
                "jaxbridge: a parameter of an exported function is of a type that XLA cannot give: "
                "expected buffer_view<const T, rank>, buffer_view<T, rank>, in_place<T, rank>, "
                "workspace<T>; an attribute (bool, std::int8_t to std::uint64_t, float, double, "
                "std::complex of these, std::string_view, "
                "std::span<const T>, attributes_view, std::optional of one); stream_ref, device, "
                "thread_pool, scratch& or state<T>");
  static_assert(!std::is_same_v<T, scratch>, "jaxbridge: take scratch by reference: scratch&");
}

template <class R, class... Args>
constexpr void check_parameters(R (* /*function*/)(Args...)) {
  (check_parameter<Args>(), ...);
}

template <auto F>
constexpr void check_function() {
  using s = signature<F>;
  static_assert(
      std::is_same_v<typename s::result, status> || std::is_same_v<typename s::result, void>,
      "jaxbridge: an exported function returns jaxbridge::status, or void");
  static_assert(s::named <= max_named && s::results <= max_results,
                "jaxbridge: an exported function has at most 64 operands and attributes, and 32 "
                "results");
  check_parameters(F);
}

template <auto F, auto G>
constexpr bool same_kind() {
  using a = signature<F>;
  using b = signature<G>;
  if constexpr (a::count != b::count) {
    return false;
  } else {
    for (std::size_t i = 0; i < a::count; ++i) {
      if (a::roles[i] != b::roles[i]) return false;
    }
    return true;
  }
}

/// The signatures of the overloads, one a line.
template <auto... Functions>
struct signatures {
  static constexpr auto make() {
    fixed_text<((sizeof(signature<Functions>::make_text().data) + 1) + ...)> out;
    const auto add = [&out](std::string_view text) {
      if (out.size > 0) out.append("\n");
      out.append(text);
    };
    (add(signature<Functions>::make_text().view()), ...);
    return out;
  }
  static constexpr auto value = make();
};

/// The lists of one frame, decoded.
template <class S>
struct buffers_of {
  std::array<any_buffer, S::operands + 1> operands;
  std::array<any_buffer, S::results + 1> results;
};

inline status wrong_count(std::int64_t given, std::size_t expected, const char* kind) {
  return {status_code::invalid_argument,
          "got " + std::to_string(given) + " " + kind + ", expected " + std::to_string(expected)};
}

/// Why decode() failed.
template <class S>
status explain(const abi::xla_ffi::call_frame& frame, buffers_of<S>& out, memory with) {
  if (status s = check_lists(frame); !s.ok()) return s;
  if (frame.args.size != static_cast<std::int64_t>(S::operands)) {
    return wrong_count(frame.args.size, S::operands, "operands");
  }
  for (std::size_t i = 0; i < S::operands; ++i) {
    status s = decode_buffer(frame.args.args[i], frame.args.types[i], "operand",
                             static_cast<std::int64_t>(i), out.operands[i], with);
    if (!s.ok()) return s;
  }
  if (with == memory::absent) return {};
  if (frame.rets.size != static_cast<std::int64_t>(S::results)) {
    return wrong_count(frame.rets.size, S::results, "results (workspaces are among them)");
  }
  for (std::size_t i = 0; i < S::results; ++i) {
    status s = decode_buffer(frame.rets.rets[i], frame.rets.types[i], "result",
                             static_cast<std::int64_t>(i), out.results[i]);
    if (!s.ok()) return s;
  }
  return {};
}

/// Reads the arrays of a frame; where they are to have no memory, the operands alone.
template <class S>
status decode(const abi::xla_ffi::call_frame& frame, buffers_of<S>& out,
              memory with = memory::needed) {
  const bool needs_results = with == memory::needed;
  bool good = has_lists(frame) && frame.args.size == static_cast<std::int64_t>(S::operands) &&
              (!needs_results || frame.rets.size == static_cast<std::int64_t>(S::results));
  for (std::size_t i = 0; good && i < S::operands; ++i) {
    good = read_buffer(frame.args.args[i], frame.args.types[i], out.operands[i], with);
  }
  for (std::size_t i = 0; good && needs_results && i < S::results; ++i) {
    good = read_buffer(frame.rets.rets[i], frame.rets.types[i], out.results[i], with);
  }
  if (good) return {};
  return explain<S>(frame, out, with);
}

inline std::string type_text(const any_buffer& b) {
  std::string out(name(b.dtype));
  out += '[';
  for (std::size_t i = 0; i < b.rank(); ++i) {
    if (i > 0) out += ',';
    out += std::to_string(b.shape[i]);
  }
  return out + ']';
}

/// Reads parameter I into its slot, or says in `error` why not.
template <class S, std::size_t I>
bool read(const exported& e, const buffers_of<S>& buffers, const attributes_view& attributes,
          typename S::template parameter_at<I>::slot& out, status& error) {
  using p = typename S::template parameter_at<I>;
  using slot = typename p::slot;
  if constexpr (p::kind == role::attribute) {
    const std::string_view called = e.names[S::name_index(I)];
    if (p::read(attributes, called, out)) return true;
    error = {status_code::invalid_argument, "attribute '" + std::string(called) +
                                                "' is missing, or not " +
                                                std::string(p::text().view())};
    return false;
  } else if constexpr (p::kind != role::context) {
    const bool is_operand = p::kind == role::operand || p::kind == role::in_place;
    const any_buffer& b =
        is_operand ? buffers.operands[S::operand_index(I)] : buffers.results[S::result_index(I)];
    if (!p::matches(b)) {
      error = {status_code::invalid_argument,
               (is_operand ? "operand '" + std::string(e.names[S::name_index(I)]) + "'"
                           : "result " + std::to_string(S::result_index(I))) +
                   " is " + type_text(b) + ", expected " + std::string(p::text().view())};
      return false;
    }
    if constexpr (p::kind == role::in_place) {
      const any_buffer& r = buffers.results[S::result_index(I)];
      if (!p::matches(r) || r.size_bytes() != b.size_bytes() ||
          (r.data != b.data && b.size_bytes() > 0)) {
        error = {status_code::failed_precondition,
                 "operand '" + std::string(e.names[S::name_index(I)]) +
                     "' is updated in place, and its result is other memory; alias the two in the "
                     "call (jaxbridge.load does, jax.ffi takes input_output_aliases=)"};
        return false;
      }
    }
    out = slot(b);
    return true;
  } else {
    return true;
  }
}

/// The value of one parameter, made in place: not all of them can be moved.
template <class P>
struct holder {
  typename P::slot value;
  explicit holder(const surroundings& around) : value(make(around)) {}

 private:
  static typename P::slot make(const surroundings& around) {
    if constexpr (P::kind == role::context) {
      return P::make(around);
    } else {
      return typename P::slot{};
    }
  }
};

template <auto F, std::size_t... I>
status call(std::index_sequence<I...> /*unused*/, const exported& e,
            const buffers_of<signature<F>>& buffers, const attributes_view& attributes,
            const surroundings& around) {
  using s = signature<F>;
  std::tuple<holder<typename s::template parameter_at<I>>...> values{((void)I, around)...};
  status error;
  if (!(read<s, I>(e, buffers, attributes, std::get<I>(values).value, error) && ...)) return error;
  if constexpr (std::is_void_v<typename s::result>) {
    F(static_cast<typename s::template argument<I>&&>(std::get<I>(values).value)...);
    return {};
  } else {
    return F(static_cast<typename s::template argument<I>&&>(std::get<I>(values).value)...);
  }
}

/// Asks XLA for what the function takes, and for nothing else: each question costs time.
template <class S>
status surround(const abi::xla_ffi::call_frame& frame, surroundings& out) {
  if constexpr (!S::has_surroundings) return {};
  if (status s = check_api(frame); !s.ok()) return s;
  const platform where = out.on.platform;
  if constexpr (S::template takes<device> || S::has_state) {
    if (status s = locate_device(frame, where, out.on); !s.ok()) return s;
  }
  if constexpr (S::template takes<stream_ref>) return locate_stream(frame, where, out.stream);
  return {};
}

template <auto F>
status decode_and_call(const exported& e, const abi::xla_ffi::call_frame& frame, platform where) {
  using s = signature<F>;
  buffers_of<s> buffers;
  if (status bad = decode<s>(frame, buffers); !bad.ok()) return bad;
  surroundings around{&frame, {where, 0}, {}};
  if (status bad = surround<s>(frame, around); !bad.ok()) return bad;
  return call<F>(std::make_index_sequence<s::count>(), e, buffers, attributes_view(frame.attrs),
                 around);
}

/// Whether the arrays of a frame are those that F takes.
template <auto F, std::size_t... I>
bool matches(std::index_sequence<I...> /*unused*/, const buffers_of<signature<F>>& buffers) {
  using s = signature<F>;
  const auto one = [&buffers]<std::size_t K>(std::integral_constant<std::size_t, K> /*unused*/) {
    using p = typename s::template parameter_at<K>;
    if constexpr (p::kind == role::operand || p::kind == role::in_place) {
      return p::matches(buffers.operands[s::operand_index(K)]);
    } else if constexpr (p::kind == role::result) {
      return p::matches(buffers.results[s::result_index(K)]);
    } else {
      return true;
    }
  };
  return (one(std::integral_constant<std::size_t, I>()) && ...);
}

template <auto F>
bool try_overload(const exported& e, const abi::xla_ffi::call_frame& frame, platform where,
                  status& outcome) {
  using s = signature<F>;
  buffers_of<s> buffers;
  if (outcome = decode<s>(frame, buffers); !outcome.ok()) return true;
  if (!matches<F>(std::make_index_sequence<s::count>(), buffers)) return false;
  outcome = decode_and_call<F>(e, frame, where);
  return true;
}

template <auto... Functions>
status dispatch_call(const exported& e, const abi::xla_ffi::call_frame& frame, platform where) {
  if constexpr (!(is_exportable<Functions>() && ...)) {
    return {};
  } else if constexpr (sizeof...(Functions) == 1) {
    return decode_and_call<Functions...>(e, frame, where);
  } else {
    status outcome;
    if ((try_overload<Functions>(e, frame, where, outcome) || ...)) return outcome;
    return {status_code::invalid_argument, "no overload takes these arrays; there are:\n" +
                                               std::string(signatures<Functions...>::value.view())};
  }
}

/// Runs `work`, and makes a status of what it throws.
template <class Work>
status guarded(const exported& e, const Work& work) noexcept {
  status s;
#if defined(__cpp_exceptions)
  try {
    s = work();
  } catch (const std::bad_alloc&) {
    s = {status_code::resource_exhausted, "out of memory"};
  } catch (const std::exception& error) {
    const char* const what = error.what();
    s = {status_code::internal, what != nullptr ? what : "an exception without a text"};
  } catch (...) {
    s = {status_code::unknown, "an exception that is no std::exception"};
  }
#else
  s = work();
#endif
  if (s.ok() || e.about.name.size == 0) return s;
  return {s.code(), std::string(e.about.name.data, e.about.name.size) + ": " + s.message()};
}

/// The handler that XLA calls.
template <exported& Export, platform Where, auto... Functions>
abi::xla_ffi::error* handle(abi::xla_ffi::call_frame* frame) noexcept {
  namespace ffi = abi::xla_ffi;
  if (ffi::metadata* out = metadata_query(*frame); out != nullptr) {
    const bool capturable = (Export.about.flags & abi::native::flag_capturable) != 0;
    answer_metadata(*frame, *out, capturable ? ffi::trait_command_buffer_compatible : 0);
    return nullptr;
  }
  if (frame->stage != ffi::stage_execute) return nullptr;
  Export.calls.fetch_add(1, std::memory_order_relaxed);
  return to_error(*frame, guarded(Export, [frame] {
    return dispatch_call<Functions...>(Export, *frame, Where);
  }));
}

template <class S, std::size_t... I>
void make_states(std::index_sequence<I...> /*unused*/, const device& on) {
  const auto one = [&on]<class T>(std::type_identity<T> /*unused*/) {
    if constexpr (is_state<T>::value) state_on<typename is_state<T>::value_type>(on);
  };
  (one(std::type_identity<std::remove_cvref_t<typename S::template argument<I>>>()), ...);
}

/// What XLA calls before it runs or captures a program: the states are made here.
template <exported& Export, platform Where, auto... Functions>
abi::xla_ffi::error* prepare(abi::xla_ffi::call_frame* frame) noexcept {
  namespace ffi = abi::xla_ffi;
  if (ffi::metadata* out = metadata_query(*frame); out != nullptr) {
    const bool capturable = (Export.about.flags & abi::native::flag_capturable) != 0;
    answer_metadata(*frame, *out, capturable ? ffi::trait_command_buffer_compatible : 0);
    return nullptr;
  }
  if (frame->stage != ffi::stage_initialize) return nullptr;
  return to_error(*frame, guarded(Export, [frame]() -> status {
    device on;
    stream_ref stream;
    // Where XLA does not say the device yet, the first call makes the states.
    if (const status s = locate(*frame, Where, on, stream); !s.ok()) return {};
    (make_states<signature<Functions>>(std::make_index_sequence<signature<Functions>::count>(), on),
     ...);
    return {};
  }));
}

/// Calls a shape function with what is in `frame`.
template <auto Rule, class S>
std::int32_t infer(const abi::xla_ffi::call_frame* frame, abi::native::shape* results,
                   std::size_t result_count, char* message, std::size_t message_size) {
  static_assert(std::is_convertible_v<decltype(Rule), shape_rule*>,
                "jaxbridge: a shape function is status(std::span<const any_buffer> operands, const "
                "attributes_view& attributes, std::span<result_shape> results)");
  exported none;
  const status s = guarded(none, [&]() -> status {
    buffers_of<S> buffers;
    if (status bad = decode<S>(*frame, buffers, memory::absent); !bad.ok()) return bad;
    if (result_count != S::results) {
      return wrong_count(static_cast<std::int64_t>(result_count), S::results, "results");
    }
    std::array<result_shape, S::results + 1> to = [&]<std::size_t... I>(std::index_sequence<I...>) {
      return std::array<result_shape, S::results + 1>{
          result_shape(results[I < S::results ? I : 0])...};
    }
    (std::make_index_sequence<S::results + 1>());
    return Rule(std::span(buffers.operands.data(), S::operands), attributes_view(frame->attrs),
                std::span(to.data(), S::results));
  });
  if (s.ok()) return 0;
  std::snprintf(message, message_size, "%s", s.message().c_str());
  return static_cast<std::int32_t>(s.code());
}

}  // namespace detail
}  // namespace v1
}  // namespace jaxbridge

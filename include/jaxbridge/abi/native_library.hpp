// SPDX-License-Identifier: Apache-2.0
// What a shared library of native functions says of itself: a C ABI of our own.
//
// A library is compiled once and met by older and newer jaxbridges. What is here never changes; new
// fields are appended to a struct, and are read behind a check of its struct_size. Another major
// version is refused. Everything a descriptor points to lies in the library itself, and stays.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "xla_ffi.hpp"

namespace jaxbridge {
inline namespace v1 {
namespace abi::native {

inline constexpr std::uint32_t major_version = 1;

/// The function that every library exports; it returns a `library`.
inline constexpr const char* library_symbol = "jaxbridge_library_v1";

struct text {
  const char* data;
  std::size_t size;
};

inline constexpr std::size_t max_rank = 64;

/// The type of one result, as a shape function says it.
struct shape {
  std::int32_t dtype;  // XLA's number
  std::int32_t rank;
  std::int64_t extents[max_rank];
};

/// Writes the types of all results, hidden ones last, of a call with the operands and attributes of
/// `frame`, whose arrays have no memory. 0, or an error with a text of at most `message_size` bytes
/// with its final zero.
using shape_function = std::int32_t(const xla_ffi::call_frame* frame, shape* results,
                                    std::size_t result_count, char* message,
                                    std::size_t message_size);

inline constexpr std::uint32_t platform_cpu = 0;
inline constexpr std::uint32_t platform_cuda = 1;

enum function_flags : std::uint32_t {
  flag_elementwise = 1U << 0,
  flag_side_effect = 1U << 1,
  flag_capturable = 1U << 2,  // XLA may capture its work into a command buffer
};

struct function {
  std::size_t struct_size;
  const function* next;  // null: the last one
  text name;
  text doc;
  /// One signature for each overload, each on a line: types of operands, results and attributes.
  text signatures;
  /// Names of operands and attributes, with defaults: "x[n, k], a = 2.0". Empty: they have none.
  text parameters;
  /// How the shape of each result follows from the operands; hidden ones last. None, or one for
  /// each.
  const text* results;
  std::size_t result_count;
  text vmap_method;  // empty: none
  std::uint32_t platform;
  std::uint32_t flags;
  xla_ffi::handler* execute;
  xla_ffi::handler* initialize;    // null: there is nothing to prepare
  native::shape_function* shapes;  // null: `results` says it, or the caller
  /// How often it was called.
  const std::atomic<std::uint64_t>* calls;
};

struct library {
  std::size_t struct_size;
  std::uint32_t major;
  const function* first;
};

using library_function = const library*();

}  // namespace abi::native
}  // namespace v1
}  // namespace jaxbridge

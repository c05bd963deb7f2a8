// SPDX-License-Identifier: Apache-2.0
// One decoded call frame, and the reusable memory it is decoded into.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "jaxbridge/abi/xla_ffi.hpp"
#include "jaxbridge/attributes.hpp"
#include "jaxbridge/buffer.hpp"
#include "jaxbridge/device.hpp"
#include "jaxbridge/status.hpp"
#include "jaxbridge/stream.hpp"

namespace jaxbridge::dispatch {

/// More operands, or results, no call has.
inline constexpr std::size_t max_buffers = std::size_t{1} << 20;

/// What XLA asks for: which function, on what memory, where. Valid until the handler returns.
struct call {
  std::int64_t key = 0;
  std::string_view spec;
  jaxbridge::device device;
  /// XLA's stream for this call; null on the CPU.
  stream_ref stream;
  std::span<const any_buffer> operands;
  std::span<const any_buffer> results;
  /// The runtime's functions and what they want to know the call by.
  const abi::xla_ffi::api* api = nullptr;
  abi::xla_ffi::invoke_context* context = nullptr;
  /// What this was read from.
  const abi::xla_ffi::call_frame* frame = nullptr;
};

/// The text of an error that a function of `api` returned; destroys the error.
[[nodiscard]] std::string consume(const abi::xla_ffi::api& api,
                                  abi::xla_ffi::error* error) noexcept;

/// Memory that a thread uses again for each call's list of buffers. A call within a call (a callee
/// that runs another program) takes the next block, so that the outer call's lists stay as they
/// are.
class call_memory {
 public:
  /// A list of `count` buffers from this thread's memory; it lives until the object dies.
  explicit call_memory(std::size_t count) noexcept;
  ~call_memory();
  call_memory(const call_memory&) = delete;
  call_memory& operator=(const call_memory&) = delete;

  /// Null where there was no memory.
  [[nodiscard]] any_buffer* data() const noexcept { return data_; }

 private:
  any_buffer* data_ = nullptr;
};

/// Reads `frame` into `out`, whose lists lie in `memory`, made for `buffer_count(frame)` buffers.
/// Every field that is read is checked first: struct sizes, counts, argument types, element types.
[[nodiscard]] status decode(const abi::xla_ffi::call_frame& frame, platform where,
                            any_buffer* memory, call& out) noexcept;

/// The same without the function: on what memory, and where.
[[nodiscard]] status decode_memory(const abi::xla_ffi::call_frame& frame, platform where,
                                   any_buffer* memory, call& out) noexcept;

/// The same without the memory, whose elements may be of any type: only where.
[[nodiscard]] status decode_place(const abi::xla_ffi::call_frame& frame, platform where,
                                  any_buffer* memory, call& out) noexcept;

/// How many operands and results `frame` has; an error for counts that no frame can have.
[[nodiscard]] result<std::size_t> buffer_count(const abi::xla_ffi::call_frame& frame) noexcept;

}  // namespace jaxbridge::dispatch

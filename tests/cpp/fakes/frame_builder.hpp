// SPDX-License-Identifier: Apache-2.0
// XLA's side of a call: frames as a runtime makes them, and the table of functions behind them.
//
// For tests, fuzzers and benchmarks alike: no GoogleTest here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "jaxbridge/abi/xla_ffi.hpp"
#include "jaxbridge/attribute_set.hpp"
#include "jaxbridge/dtype.hpp"

namespace fake_xla {

namespace ffi = jaxbridge::abi::xla_ffi;

/// What the runtime knows of one call. A frame's `ctx` points to one.
struct context {
  void* stream = nullptr;
  std::int32_t ordinal = 0;
  /// Not null: the function fails with this text.
  const char* stream_error = nullptr;
  const char* ordinal_error = nullptr;
  int stream_calls = 0;
  int ordinal_calls = 0;
};

/// The table of a runtime that speaks FFI version 0.`minor`. Its functions check the struct_size of
/// what they are given, as XLA does. Every slot that the core must not call is null.
[[nodiscard]] ffi::api make_api(int minor = ffi::api_minor_newest_checked);

/// The size of a table that ends before a slot: what an older runtime has.
inline constexpr std::size_t size_before_device_ordinal = offsetof(ffi::api, device_ordinal_get);
inline constexpr std::size_t size_before_stream = offsetof(ffi::api, stream_get);
inline constexpr std::size_t size_before_version = offsetof(ffi::api, api_version);

/// What a handler returned; code 0 and no text for success.
struct outcome {
  int code = 0;
  std::string message;
};

/// Reads and destroys an error that was made by a fake table.
outcome take(ffi::error* error);

/// How many errors of fake tables exist.
[[nodiscard]] std::int64_t live_errors();
/// How many blocks of device memory handlers have.
[[nodiscard]] std::int64_t live_blocks();

using jaxbridge::attribute_set;

/// Makes one call frame. `frame()` lays everything out anew; after that a test may spoil what it
/// points to. The builder owns all of it, memory of the arrays included.
class frame_builder {
 public:
  /// A frame for the execute stage, without buffers, with `key` and `spec`.
  explicit frame_builder(std::int64_t key = 1, std::string spec = "spec");
  frame_builder(const frame_builder&) = delete;
  frame_builder& operator=(const frame_builder&) = delete;

  /// Adds a buffer with zeroed memory of its own; null memory where there are no elements.
  frame_builder& operand(jaxbridge::dtype type, std::vector<std::int64_t> shape);
  frame_builder& result(jaxbridge::dtype type, std::vector<std::int64_t> shape);
  /// Adds a buffer at `data`, not owned, with any element type and shape.
  frame_builder& raw_operand(int type, std::vector<std::int64_t> shape, void* data);
  frame_builder& raw_result(int type, std::vector<std::int64_t> shape, void* data);

  [[nodiscard]] attribute_set& attributes() { return attributes_; }
  [[nodiscard]] fake_xla::context& context() { return context_; }
  /// The table of this frame. Without a call of `without_api()`, the frame points to it.
  [[nodiscard]] ffi::api& api() { return api_; }
  frame_builder& without_api();
  frame_builder& stage(ffi::execution_stage stage);

  ffi::call_frame& frame();

  /// XLA's description of the operand (result), after `frame()`.
  [[nodiscard]] ffi::buffer& raw_operand_at(std::size_t i) { return operands_[i].raw; }
  [[nodiscard]] ffi::buffer& raw_result_at(std::size_t i) { return results_[i].raw; }
  [[nodiscard]] std::vector<ffi::argument_type>& operand_types() { return operand_types_; }
  [[nodiscard]] std::vector<void*>& operand_entries() { return operand_entries_; }
  [[nodiscard]] std::vector<ffi::return_type>& result_types() { return result_types_; }
  [[nodiscard]] std::vector<void*>& result_entries() { return result_entries_; }

 private:
  struct buffer {
    ffi::buffer raw{};
    std::vector<std::int64_t> dims;
    std::vector<std::max_align_t> memory;
  };

  static void add(std::deque<buffer>& list, int type, std::vector<std::int64_t> shape, void* data);
  static void add_owned(std::deque<buffer>& list, jaxbridge::dtype type,
                        std::vector<std::int64_t> shape);

  std::deque<buffer> operands_;
  std::deque<buffer> results_;
  std::vector<ffi::argument_type> operand_types_;
  std::vector<void*> operand_entries_;
  std::vector<ffi::return_type> result_types_;
  std::vector<void*> result_entries_;
  attribute_set attributes_;
  fake_xla::context context_;
  ffi::api api_;
  ffi::call_frame frame_{};
};

/// The question that a runtime asks at registration. Not copyable: the frame points into it.
class metadata_query {
 public:
  /// As newer runtimes ask: with a table.
  explicit metadata_query(int runtime_minor);
  /// As jaxlib 0.8.0 asks: without one.
  metadata_query();
  metadata_query(const metadata_query&) = delete;
  metadata_query& operator=(const metadata_query&) = delete;

  ffi::call_frame& frame() { return frame_; }
  ffi::api& api() { return api_; }
  ffi::metadata_extension& extension() { return extension_; }
  ffi::metadata& answer() { return metadata_.used; }
  /// What comes after the fields that we declare must stay as it was.
  [[nodiscard]] bool rest_is_untouched() const { return metadata_.state_type_id == untouched; }

 private:
  static constexpr std::int64_t untouched = 0x5ca1ab1e;

  // XLA's struct: ours and what was added to it.
  struct {
    ffi::metadata used{};
    std::int64_t state_type_id = untouched;
  } metadata_;
  ffi::metadata_extension extension_{};
  ffi::api api_;
  ffi::call_frame frame_{};
};

}  // namespace fake_xla

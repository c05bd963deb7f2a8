// SPDX-License-Identifier: Apache-2.0
// XLA's FFI C ABI: the part that is used, as at API version 0.1, the oldest one that runtimes
// accept.
//
// These are our own declarations. tests/compile/abi_xla_ffi.cpp holds them against the headers of
// the oldest and the newest supported jaxlib. Whatever came after 0.1 may be touched only behind a
// `struct_size` check.
#pragma once

#include <cstddef>
#include <cstdint>

namespace jaxbridge {
inline namespace v1 {
namespace abi::xla_ffi {

inline constexpr int api_major = 0;
/// The oldest API version that every supported runtime accepts.
inline constexpr int api_minor_oldest = 1;
/// The newest API version whose headers these declarations were held against.
inline constexpr int api_minor_newest_checked = 5;

struct error;           // owned by whoever receives it
struct invoke_context;  // "ExecutionContext" before 0.4
struct future;
struct internal_api;
struct api;

enum extension_type : int { extension_metadata = 1 };

struct extension_base {
  std::size_t struct_size;
  extension_type type;
  extension_base* next;
};

struct api_version {
  std::size_t struct_size;
  extension_base* extension_start;
  int major_version;
  int minor_version;
};

struct error_create_args {
  std::size_t struct_size;
  extension_base* extension_start;
  const char* message;
  int code;
};

struct error_get_message_args {  // "GetDetails", with a code appended, from 0.4
  std::size_t struct_size;
  extension_base* extension_start;
  error* error_;
  const char* message;
};

struct error_destroy_args {
  std::size_t struct_size;
  extension_base* extension_start;
  error* error_;
};

struct buffer {
  std::size_t struct_size;
  extension_base* extension_start;
  int dtype;
  void* data;
  std::int64_t rank;
  std::int64_t* dims;
};

enum argument_type : int { argument_buffer = 1 };
enum return_type : int { return_buffer = 1 };
enum attribute_type : int {
  attribute_array = 1,
  attribute_dictionary = 2,
  attribute_scalar = 3,
  attribute_string = 4,
};

struct byte_span {
  const char* ptr;
  std::size_t len;
};

struct scalar {
  int dtype;
  void* value;
};

struct array {
  int dtype;
  std::size_t size;
  void* data;
};

enum execution_stage : int {
  stage_instantiate = 0,
  stage_prepare = 1,
  stage_initialize = 2,
  stage_execute = 3,
};

struct arguments {
  std::size_t struct_size;
  extension_base* extension_start;
  std::int64_t size;
  argument_type* types;
  void** args;
};

struct returns {
  std::size_t struct_size;
  extension_base* extension_start;
  std::int64_t size;
  return_type* types;
  void** rets;
};

struct attributes {
  std::size_t struct_size;
  extension_base* extension_start;
  std::int64_t size;
  attribute_type* types;
  byte_span** names;
  void** attrs;
};

struct call_frame {
  std::size_t struct_size;
  extension_base* extension_start;
  const xla_ffi::api* api;
  invoke_context* ctx;
  execution_stage stage;
  arguments args;
  returns rets;
  attributes attrs;
  xla_ffi::future* future;
};

using handler = error*(call_frame*);

inline constexpr std::uint32_t trait_command_buffer_compatible = 1U << 0;

struct stream_get_args {
  std::size_t struct_size;
  extension_base* extension_start;
  invoke_context* ctx;
  void* stream;
};

struct device_memory_allocate_args {
  std::size_t struct_size;
  extension_base* extension_start;
  invoke_context* ctx;
  std::size_t size;
  std::size_t alignment;
  void* data;
};

struct device_memory_free_args {
  std::size_t struct_size;
  extension_base* extension_start;
  invoke_context* ctx;
  std::size_t size;
  void* data;
};

using task = void(void* data);

struct thread_pool_schedule_args {
  std::size_t struct_size;
  extension_base* extension_start;
  invoke_context* ctx;
  xla_ffi::task* task;
  void* data;
};

struct thread_pool_num_threads_args {
  std::size_t struct_size;
  extension_base* extension_start;
  invoke_context* ctx;
  std::int64_t* num_threads;
};

struct device_ordinal_get_args {
  std::size_t struct_size;
  extension_base* extension_start;
  invoke_context* ctx;
  std::int32_t device_ordinal;
};

struct metadata {
  std::size_t struct_size;
  xla_ffi::api_version api_version;
  std::uint32_t traits;
};

struct metadata_extension {
  extension_base base;
  xla_ffi::metadata* metadata;
};

/// The runtime's table of functions. Slots that we do not call have no type: only their place
/// counts.
struct api {
  using slot = void*;

  std::size_t struct_size;
  extension_base* extension_start;
  xla_ffi::api_version api_version;
  internal_api* internal;

  error* (*error_create)(error_create_args*);
  void (*error_get_message)(error_get_message_args*);
  void (*error_destroy)(error_destroy_args*);
  slot handler_register;
  error* (*stream_get)(stream_get_args*);
  slot type_register;
  slot context_get;
  slot state_set;
  slot state_get;
  error* (*device_memory_allocate)(device_memory_allocate_args*);
  error* (*device_memory_free)(device_memory_free_args*);
  error* (*thread_pool_schedule)(thread_pool_schedule_args*);
  error* (*thread_pool_num_threads)(thread_pool_num_threads_args*);
  slot future_create;
  slot future_set_available;
  slot future_set_error;
  slot run_id_get;
  error* (*device_ordinal_get)(device_ordinal_get_args*);
};

/// Whether a table of `struct_size` bytes reaches past the slot at `offset`.
[[nodiscard]] constexpr bool has_slot(std::size_t struct_size, std::size_t offset) noexcept {
  return struct_size >= offset + sizeof(void*);
}

}  // namespace abi::xla_ffi
}  // namespace v1
}  // namespace jaxbridge

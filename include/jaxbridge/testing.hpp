// SPDX-License-Identifier: Apache-2.0
// XLA's side of a call, for tests of native functions without XLA and without a GPU: frames as a
// runtime makes them, and the table of functions behind them.
//
//   jaxbridge::testing::frame_builder call;
//   call.operand<float>({2, 3}, {1, 2, 3, 4, 5, 6}).result<float>({2, 3});
//   call.attributes().scalar("a", 2.0);
//   call.context().stream = stream;
//   auto outcome = call.run(&jaxbridge_ffi_scale_cuda);
//   assert(outcome.ok() && call.result_values<float>(0)[5] == 12);
//
// Nothing here is on the way of a real call.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <initializer_list>
#include <map>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "abi/xla_ffi.hpp"
#include "attribute_set.hpp"
#include "dtype.hpp"

namespace jaxbridge {
inline namespace v1 {
namespace testing {

namespace ffi = abi::xla_ffi;

/// What the runtime knows of one call. A frame's `ctx` points to one.
struct context {
  void* stream = nullptr;
  std::int32_t ordinal = 0;
  std::int64_t threads = 1;
  /// Not null: the function fails with this text.
  const char* stream_error = nullptr;
  const char* ordinal_error = nullptr;
  int stream_calls = 0;
  int ordinal_calls = 0;
};

/// What a handler returned; code 0 and no text for success.
struct outcome {
  int code = 0;
  std::string message;

  [[nodiscard]] bool ok() const noexcept { return code == 0; }
};

namespace detail {

// What stands behind the opaque ffi::error.
struct error_object {
  int code;
  std::string message;
};

inline std::atomic<std::int64_t> error_count{0};

inline error_object* object_of(ffi::error* error) { return reinterpret_cast<error_object*>(error); }

inline ffi::error* make_error(int code, std::string message) {
  ++error_count;
  return reinterpret_cast<ffi::error*>(new error_object{code, std::move(message)});
}

inline constexpr int invalid_argument = 3;
inline constexpr int resource_exhausted = 8;
inline constexpr int internal = 13;

// XLA refuses a struct that is shorter than the oldest form of it.
template <class Args>
bool too_short(const Args* args) {
  return args->struct_size < sizeof(Args);
}

inline ffi::error* create(ffi::error_create_args* args) {
  if (too_short(args)) return make_error(invalid_argument, "Unexpected Error_Create_Args size");
  return make_error(args->code, args->message);
}

inline void get_message(ffi::error_get_message_args* args) {
  if (!too_short(args)) args->message = object_of(args->error_)->message.c_str();
}

inline void destroy(ffi::error_destroy_args* args) {
  if (too_short(args)) return;  // seen as a live error
  delete object_of(args->error_);
  --error_count;
}

inline ffi::error* stream_get(ffi::stream_get_args* args) {
  if (too_short(args)) return make_error(invalid_argument, "Unexpected Stream_Get_Args size");
  auto& ctx = *reinterpret_cast<context*>(args->ctx);
  ++ctx.stream_calls;
  if (ctx.stream_error != nullptr) return make_error(internal, ctx.stream_error);
  args->stream = ctx.stream;
  return nullptr;
}

inline ffi::error* device_ordinal_get(ffi::device_ordinal_get_args* args) {
  if (too_short(args))
    return make_error(invalid_argument, "Unexpected DeviceOrdinal_Get_Args size");
  auto& ctx = *reinterpret_cast<context*>(args->ctx);
  ++ctx.ordinal_calls;
  if (ctx.ordinal_error != nullptr) return make_error(internal, ctx.ordinal_error);
  args->device_ordinal = ctx.ordinal;
  return nullptr;
}

inline std::atomic<std::int64_t> block_count{0};
// Memory of the fake runtime is one arena that is never touched: a block lies where the first gap
// is.
inline std::mutex arena_lock;
inline std::map<std::uintptr_t, std::size_t> arena;

inline ffi::error* thread_pool_num_threads(ffi::thread_pool_num_threads_args* args) {
  if (too_short(args)) return make_error(invalid_argument, "Unexpected NumThreads_Args size");
  *args->num_threads = reinterpret_cast<context*>(args->ctx)->threads;
  return nullptr;
}

// On the calling thread: a test is to say the same each time.
inline ffi::error* thread_pool_schedule(ffi::thread_pool_schedule_args* args) {
  if (too_short(args)) return make_error(invalid_argument, "Unexpected Schedule_Args size");
  args->task(args->data);
  return nullptr;
}

inline ffi::error* device_memory_allocate(ffi::device_memory_allocate_args* args) {
  if (too_short(args)) return make_error(invalid_argument, "Unexpected Allocate_Args size");
  if (args->alignment > 16) return make_error(invalid_argument, "Unsupported alignment");
  if (args->size > (std::size_t{1} << 40)) return make_error(resource_exhausted, "Out of memory");
  const std::lock_guard lock(arena_lock);
  std::uintptr_t at = std::uintptr_t{1} << 44;
  for (const auto& [begin, bytes] : arena) {
    if (begin - at >= args->size) break;
    at = (begin + bytes + 255) / 256 * 256;
  }
  arena.emplace(at, args->size);
  args->data = reinterpret_cast<void*>(at);
  ++block_count;
  return nullptr;
}

inline ffi::error* device_memory_free(ffi::device_memory_free_args* args) {
  if (too_short(args)) return make_error(invalid_argument, "Unexpected Free_Args size");
  const std::lock_guard lock(arena_lock);
  if (arena.erase(reinterpret_cast<std::uintptr_t>(args->data)) == 0) {
    return make_error(invalid_argument, "not a block of this allocator");
  }
  --block_count;
  return nullptr;
}

}  // namespace detail

/// The table of a runtime that speaks FFI version 0.`minor`. Its functions check the struct_size of
/// what they are given, as XLA does; device memory is addresses that nobody can read. Every slot
/// that a native function must not call is null.
[[nodiscard]] inline ffi::api make_api(int minor = ffi::api_minor_newest_checked) {
  ffi::api out{};
  out.struct_size = sizeof(out);
  out.api_version = {sizeof(ffi::api_version), nullptr, ffi::api_major, minor};
  out.error_create = &detail::create;
  out.error_get_message = &detail::get_message;
  out.error_destroy = &detail::destroy;
  out.stream_get = &detail::stream_get;
  out.device_memory_allocate = &detail::device_memory_allocate;
  out.device_memory_free = &detail::device_memory_free;
  out.device_ordinal_get = &detail::device_ordinal_get;
  out.thread_pool_num_threads = &detail::thread_pool_num_threads;
  out.thread_pool_schedule = &detail::thread_pool_schedule;
  return out;
}

/// The size of a table that ends before a slot: what an older runtime has.
inline constexpr std::size_t size_before_device_ordinal = offsetof(ffi::api, device_ordinal_get);
inline constexpr std::size_t size_before_stream = offsetof(ffi::api, stream_get);
inline constexpr std::size_t size_before_version = offsetof(ffi::api, api_version);

/// Reads and destroys an error that was made by a table of make_api().
inline outcome take(ffi::error* error) {
  if (error == nullptr) return {};
  outcome out{detail::object_of(error)->code, detail::object_of(error)->message};
  ffi::error_destroy_args args{sizeof(args), nullptr, error};
  detail::destroy(&args);
  return out;
}

/// How many errors of these tables exist.
[[nodiscard]] inline std::int64_t live_errors() { return detail::error_count; }
/// How many blocks of device memory handlers have.
[[nodiscard]] inline std::int64_t live_blocks() { return detail::block_count; }

/// Makes one call frame. `frame()` lays everything out anew; after that a test may spoil what it
/// points to. The builder owns all of it, memory of the arrays included.
class frame_builder {
 public:
  /// A frame for the execute stage, without buffers and attributes.
  frame_builder() : api_(make_api()) {
    frame_.api = &api_;
    frame_.stage = ffi::stage_execute;
  }
  frame_builder(const frame_builder&) = delete;
  frame_builder& operator=(const frame_builder&) = delete;

  /// Adds a buffer with zeroed memory of its own; null memory where there are no elements.
  frame_builder& operand(dtype type, std::vector<std::int64_t> shape) {
    add_owned(operands_, type, std::move(shape));
    return *this;
  }
  /// The same with these elements.
  template <class T>
  frame_builder& operand(std::vector<std::int64_t> shape, std::initializer_list<T> values) {
    operand(dtype_of<T>, std::move(shape));
    const std::span<T> to = values_of<T>(operands_.back());
    for (std::size_t i = 0; i < to.size() && i < values.size(); ++i) to[i] = values.begin()[i];
    return *this;
  }
  frame_builder& result(dtype type, std::vector<std::int64_t> shape) {
    add_owned(results_, type, std::move(shape));
    return *this;
  }
  template <class T>
  frame_builder& result(std::vector<std::int64_t> shape) {
    return result(dtype_of<T>, std::move(shape));
  }
  /// Adds a buffer at `data`, not owned, with any element type and shape.
  frame_builder& raw_operand(int type, std::vector<std::int64_t> shape, void* data) {
    add(operands_, type, std::move(shape), data);
    return *this;
  }
  frame_builder& raw_result(int type, std::vector<std::int64_t> shape, void* data) {
    add(results_, type, std::move(shape), data);
    return *this;
  }

  [[nodiscard]] attribute_set& attributes() { return attributes_; }
  [[nodiscard]] testing::context& context() { return context_; }
  /// The table of this frame. Without a call of `without_api()`, the frame points to it.
  [[nodiscard]] ffi::api& api() { return api_; }
  frame_builder& without_api() {
    frame_.api = nullptr;
    return *this;
  }
  frame_builder& stage(ffi::execution_stage stage) {
    frame_.stage = stage;
    return *this;
  }

  /// XLA's form of it, laid out anew.
  ffi::call_frame& frame() {
    const auto lay_out = [](std::deque<buffer>& list, auto& types, auto type, auto& entries) {
      types.assign(list.size(), type);
      entries.clear();
      for (buffer& b : list) {
        b.raw.struct_size = sizeof(b.raw);
        b.raw.rank = static_cast<std::int64_t>(b.dims.size());
        b.raw.dims = b.dims.data();
        entries.push_back(&b.raw);
      }
    };
    lay_out(operands_, operand_types_, ffi::argument_buffer, operand_entries_);
    lay_out(results_, result_types_, ffi::return_buffer, result_entries_);
    // XLA's struct_size ends with `attrs`: `future` is an output.
    frame_.struct_size = offsetof(ffi::call_frame, future);
    frame_.ctx = reinterpret_cast<ffi::invoke_context*>(&context_);
    frame_.args = {sizeof(frame_.args), nullptr, static_cast<std::int64_t>(operands_.size()),
                   operand_types_.data(), operand_entries_.data()};
    frame_.rets = {sizeof(frame_.rets), nullptr, static_cast<std::int64_t>(results_.size()),
                   result_types_.data(), result_entries_.data()};
    frame_.attrs = attributes_.build();
    return frame_;
  }

  /// Calls a handler: jaxbridge_ffi_NAME_PLATFORM.
  outcome run(ffi::handler* handler) { return take(handler(&frame())); }

  /// The elements of a result that has memory of its own.
  template <class T>
  [[nodiscard]] std::span<T> result_values(std::size_t i) {
    return values_of<T>(results_[i]);
  }

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

  static void add(std::deque<buffer>& list, int type, std::vector<std::int64_t> shape, void* data) {
    buffer& b = list.emplace_back();
    b.dims = std::move(shape);
    b.raw.dtype = type;
    b.raw.data = data;
  }

  static void add_owned(std::deque<buffer>& list, dtype type, std::vector<std::int64_t> shape) {
    std::size_t size = 1;
    for (const std::int64_t extent : shape) size *= static_cast<std::size_t>(extent);
    const std::size_t bytes = (size * bit_width(type) + 7) / 8;
    add(list, static_cast<int>(type), std::move(shape), nullptr);
    buffer& b = list.back();
    b.memory.resize((bytes + sizeof(std::max_align_t) - 1) / sizeof(std::max_align_t));
    if (bytes > 0) b.raw.data = b.memory.data();
  }

  template <class T>
  static std::span<T> values_of(buffer& b) {
    std::size_t count = 1;
    for (const std::int64_t extent : b.dims) count *= static_cast<std::size_t>(extent);
    return {static_cast<T*>(b.raw.data), count};
  }

  std::deque<buffer> operands_;
  std::deque<buffer> results_;
  std::vector<ffi::argument_type> operand_types_;
  std::vector<void*> operand_entries_;
  std::vector<ffi::return_type> result_types_;
  std::vector<void*> result_entries_;
  attribute_set attributes_;
  testing::context context_;
  ffi::api api_;
  ffi::call_frame frame_{};
};

/// The question that a runtime asks at registration. Not copyable: the frame points into it.
class metadata_query {
 public:
  /// As newer runtimes ask: with a table.
  explicit metadata_query(int runtime_minor) : metadata_query() {
    api_ = make_api(runtime_minor);
    frame_.api = &api_;
  }
  /// As jaxlib 0.8.0 asks: without one.
  metadata_query() : api_(make_api(ffi::api_minor_oldest)) {
    // XLA's struct_size ends with `traits`, in every version so far.
    metadata_.used.struct_size = offsetof(ffi::metadata, traits) + sizeof(std::uint32_t);
    metadata_.used.api_version.struct_size = sizeof(ffi::api_version);
    extension_.base = {sizeof(extension_), ffi::extension_metadata, nullptr};
    extension_.metadata = &metadata_.used;
    frame_.struct_size = offsetof(ffi::call_frame, future);
    frame_.extension_start = &extension_.base;
    frame_.stage = ffi::stage_execute;
  }
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

}  // namespace testing
}  // namespace v1
}  // namespace jaxbridge

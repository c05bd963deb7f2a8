// SPDX-License-Identifier: Apache-2.0
#include "fakes/frame_builder.hpp"

#include <atomic>
#include <map>
#include <mutex>
#include <utility>

namespace fake_xla {
namespace {

// What stands behind the opaque ffi::error.
struct error_object {
  int code;
  std::string message;
};

std::atomic<std::int64_t> error_count{0};

error_object* object_of(ffi::error* error) { return reinterpret_cast<error_object*>(error); }

ffi::error* make_error(int code, std::string message) {
  ++error_count;
  return reinterpret_cast<ffi::error*>(new error_object{code, std::move(message)});
}

constexpr int invalid_argument = 3;
constexpr int resource_exhausted = 8;
constexpr int internal = 13;

// XLA refuses a struct that is shorter than the oldest form of it.
template <class Args>
bool too_short(const Args* args) {
  return args->struct_size < sizeof(Args);
}

ffi::error* create(ffi::error_create_args* args) {
  if (too_short(args)) return make_error(invalid_argument, "Unexpected Error_Create_Args size");
  return make_error(args->code, args->message);
}

void get_message(ffi::error_get_message_args* args) {
  if (!too_short(args)) args->message = object_of(args->error_)->message.c_str();
}

void destroy(ffi::error_destroy_args* args) {
  if (too_short(args)) return;  // seen as a live error
  delete object_of(args->error_);
  --error_count;
}

ffi::error* stream_get(ffi::stream_get_args* args) {
  if (too_short(args)) return make_error(invalid_argument, "Unexpected Stream_Get_Args size");
  auto& ctx = *reinterpret_cast<context*>(args->ctx);
  ++ctx.stream_calls;
  if (ctx.stream_error != nullptr) return make_error(internal, ctx.stream_error);
  args->stream = ctx.stream;
  return nullptr;
}

ffi::error* device_ordinal_get(ffi::device_ordinal_get_args* args) {
  if (too_short(args))
    return make_error(invalid_argument, "Unexpected DeviceOrdinal_Get_Args size");
  auto& ctx = *reinterpret_cast<context*>(args->ctx);
  ++ctx.ordinal_calls;
  if (ctx.ordinal_error != nullptr) return make_error(internal, ctx.ordinal_error);
  args->device_ordinal = ctx.ordinal;
  return nullptr;
}

std::atomic<std::int64_t> block_count{0};
// Memory of the fake runtime is one arena that is never touched: a block lies where the first gap
// is.
std::mutex arena_lock;
std::map<std::uintptr_t, std::size_t> arena;

ffi::error* device_memory_allocate(ffi::device_memory_allocate_args* args) {
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

ffi::error* device_memory_free(ffi::device_memory_free_args* args) {
  if (too_short(args)) return make_error(invalid_argument, "Unexpected Free_Args size");
  const std::lock_guard lock(arena_lock);
  if (arena.erase(reinterpret_cast<std::uintptr_t>(args->data)) == 0) {
    return make_error(invalid_argument, "not a block of this allocator");
  }
  --block_count;
  return nullptr;
}

}  // namespace

ffi::api make_api(int minor) {
  ffi::api out{};
  out.struct_size = sizeof(out);
  out.api_version = {sizeof(ffi::api_version), nullptr, ffi::api_major, minor};
  out.error_create = &create;
  out.error_get_message = &get_message;
  out.error_destroy = &destroy;
  out.stream_get = &stream_get;
  out.device_memory_allocate = &device_memory_allocate;
  out.device_memory_free = &device_memory_free;
  out.device_ordinal_get = &device_ordinal_get;
  return out;
}

outcome take(ffi::error* error) {
  if (error == nullptr) return {};
  outcome out{object_of(error)->code, object_of(error)->message};
  ffi::error_destroy_args args{sizeof(args), nullptr, error};
  destroy(&args);
  return out;
}

std::int64_t live_errors() { return error_count; }
std::int64_t live_blocks() { return block_count; }

frame_builder::frame_builder(std::int64_t key, std::string spec) : api_(make_api()) {
  attributes_.scalar("key", key).string("spec", std::move(spec));
  frame_.api = &api_;
  frame_.stage = ffi::stage_execute;
}

void frame_builder::add(std::deque<buffer>& list, int type, std::vector<std::int64_t> shape,
                        void* data) {
  buffer& b = list.emplace_back();
  b.dims = std::move(shape);
  b.raw.dtype = type;
  b.raw.data = data;
}

void frame_builder::add_owned(std::deque<buffer>& list, jaxbridge::dtype type,
                              std::vector<std::int64_t> shape) {
  std::size_t size = 1;
  for (const std::int64_t extent : shape) size *= static_cast<std::size_t>(extent);
  const std::size_t bytes = (size * jaxbridge::bit_width(type) + 7) / 8;
  add(list, static_cast<int>(type), std::move(shape), nullptr);
  buffer& b = list.back();
  b.memory.resize((bytes + sizeof(std::max_align_t) - 1) / sizeof(std::max_align_t));
  if (bytes > 0) b.raw.data = b.memory.data();
}

frame_builder& frame_builder::operand(jaxbridge::dtype type, std::vector<std::int64_t> shape) {
  add_owned(operands_, type, std::move(shape));
  return *this;
}

frame_builder& frame_builder::result(jaxbridge::dtype type, std::vector<std::int64_t> shape) {
  add_owned(results_, type, std::move(shape));
  return *this;
}

frame_builder& frame_builder::raw_operand(int type, std::vector<std::int64_t> shape, void* data) {
  add(operands_, type, std::move(shape), data);
  return *this;
}

frame_builder& frame_builder::raw_result(int type, std::vector<std::int64_t> shape, void* data) {
  add(results_, type, std::move(shape), data);
  return *this;
}

frame_builder& frame_builder::without_api() {
  frame_.api = nullptr;
  return *this;
}

frame_builder& frame_builder::stage(ffi::execution_stage stage) {
  frame_.stage = stage;
  return *this;
}

ffi::call_frame& frame_builder::frame() {
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

metadata_query::metadata_query(int runtime_minor) : metadata_query() {
  api_ = make_api(runtime_minor);
  frame_.api = &api_;
}

metadata_query::metadata_query() : api_(make_api(ffi::api_minor_oldest)) {
  // XLA's struct_size ends with `traits`, in every version so far.
  metadata_.used.struct_size = offsetof(ffi::metadata, traits) + sizeof(std::uint32_t);
  metadata_.used.api_version.struct_size = sizeof(ffi::api_version);
  extension_.base = {sizeof(extension_), ffi::extension_metadata, nullptr};
  extension_.metadata = &metadata_.used;
  frame_.struct_size = offsetof(ffi::call_frame, future);
  frame_.extension_start = &extension_.base;
  frame_.stage = ffi::stage_execute;
}

}  // namespace fake_xla

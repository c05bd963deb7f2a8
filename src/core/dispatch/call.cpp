// SPDX-License-Identifier: Apache-2.0
#include "core/dispatch/call.hpp"

#include <cstddef>
#include <exception>
#include <limits>
#include <string>
#include <utility>
#include <vector>

namespace jaxbridge::dispatch {
namespace {

namespace ffi = abi::xla_ffi;

status malformed(std::string what) noexcept {
  return {status_code::invalid_argument,
          "malformed XLA call frame: " + std::move(what) +
              "; this jaxlib does not speak the FFI version that jaxbridge was built for "
              "(run python -m jaxbridge)"};
}

// No program has as many: a larger count is not one.
constexpr auto max_entries = static_cast<std::int64_t>(max_buffers);

// Blocks of one thread, by depth of nested calls. They only grow, and end with the thread.
struct thread_blocks {
  std::vector<std::vector<any_buffer>> by_depth;
  std::size_t depth = 0;
};
thread_local thread_blocks blocks;

status decode_buffer(const void* raw, int type, const char* kind, std::int64_t index,
                     any_buffer& out) noexcept {
  const auto where = [&] { return std::string(kind) + " " + std::to_string(index); };
  if (type != ffi::argument_buffer || raw == nullptr) {
    return malformed(where() + " is not a buffer (type " + std::to_string(type) + ")");
  }
  const auto& buffer = *static_cast<const ffi::buffer*>(raw);
  if (buffer.struct_size < sizeof(ffi::buffer)) {
    return malformed(where() + " has struct_size " + std::to_string(buffer.struct_size) +
                     ", expected at least " + std::to_string(sizeof(ffi::buffer)));
  }
  out.dtype = dtype_from_xla(buffer.dtype);
  if (out.dtype == dtype::invalid) {
    return {status_code::unimplemented,
            where() + " has an element type that jaxbridge does not know (XLA's number " +
                std::to_string(buffer.dtype) + "); cast it before the call"};
  }
  if (buffer.rank < 0 || (buffer.rank > 0 && buffer.dims == nullptr)) {
    return malformed(where() + " has rank " + std::to_string(buffer.rank) +
                     (buffer.rank < 0 ? "" : " but no extents"));
  }
  out.shape = {buffer.dims, static_cast<std::size_t>(buffer.rank)};
  bool empty = false;
  for (const std::int64_t extent : out.shape) {
    if (extent < 0) return malformed(where() + " has extent " + std::to_string(extent));
    empty = empty || extent == 0;
  }
  if (!empty) {
    std::size_t bits = bit_width(out.dtype);
    for (const std::int64_t extent : out.shape) {
      if (__builtin_mul_overflow(bits, static_cast<std::size_t>(extent), &bits)) {
        bits = std::numeric_limits<std::size_t>::max();
        break;
      }
    }
    if (bits > std::numeric_limits<std::size_t>::max() / 2) {
      return malformed(where() + " is larger than the address space");
    }
    if (buffer.data == nullptr) return malformed(where() + " has elements but no memory");
  }
  out.data = buffer.data;
  return {};
}

template <class Args>
status check_list(const Args& list, void** entries, const char* kind) noexcept {
  if (list.struct_size < sizeof(Args)) {
    return malformed(std::string(kind) + " have struct_size " + std::to_string(list.struct_size) +
                     ", expected at least " + std::to_string(sizeof(Args)));
  }
  if (list.size < 0 || list.size > max_entries) {
    return malformed(std::string(kind) + " have size " + std::to_string(list.size));
  }
  if (list.size > 0 && (entries == nullptr || list.types == nullptr)) {
    return malformed(std::string(kind) + " have size " + std::to_string(list.size) +
                     " but no entries");
  }
  return {};
}

}  // namespace

std::string consume(const ffi::api& api, ffi::error* error) noexcept {
  ffi::error_get_message_args get{sizeof(get), nullptr, error, nullptr};
  api.error_get_message(&get);
  std::string text = get.message == nullptr ? "no message" : get.message;
  ffi::error_destroy_args destroy{sizeof(destroy), nullptr, error};
  api.error_destroy(&destroy);
  return text;
}

call_memory::call_memory(std::size_t count) noexcept {
  const std::size_t depth = blocks.depth++;
  try {
    if (blocks.by_depth.size() <= depth) blocks.by_depth.resize(depth + 1);
    std::vector<any_buffer>& block = blocks.by_depth[depth];
    if (block.size() < count || block.empty()) block.resize(count + 16);
    data_ = block.data();
  } catch (const std::exception&) {
    // No memory: data() says so.
  }
}

call_memory::~call_memory() { --blocks.depth; }

result<std::size_t> buffer_count(const ffi::call_frame& frame) noexcept {
  if (frame.struct_size < offsetof(ffi::call_frame, future)) {
    return malformed("struct_size " + std::to_string(frame.struct_size) + ", expected at least " +
                     std::to_string(offsetof(ffi::call_frame, future)));
  }
  if (status s = check_list(frame.args, frame.args.args, "operands"); !s.ok()) return s;
  if (status s = check_list(frame.rets, frame.rets.rets, "results"); !s.ok()) return s;
  return static_cast<std::size_t>(frame.args.size) + static_cast<std::size_t>(frame.rets.size);
}

status decode_memory(const ffi::call_frame& frame, platform where, any_buffer* memory,
                     call& out) noexcept {
  any_buffer* next = memory;
  for (std::int64_t i = 0; i < frame.args.size; ++i) {
    if (status s = decode_buffer(frame.args.args[i], frame.args.types[i], "operand", i, *next++);
        !s.ok()) {
      return s;
    }
  }
  out.operands = {memory, static_cast<std::size_t>(frame.args.size)};
  any_buffer* const first_result = next;
  for (std::int64_t i = 0; i < frame.rets.size; ++i) {
    if (status s = decode_buffer(frame.rets.rets[i], frame.rets.types[i], "result", i, *next++);
        !s.ok()) {
      return s;
    }
  }
  out.results = {first_result, static_cast<std::size_t>(frame.rets.size)};

  if (frame.api == nullptr ||
      !ffi::has_slot(frame.api->struct_size, offsetof(ffi::api, stream_get))) {
    return malformed("no table of functions");
  }
  const ffi::api& api = *frame.api;
  out.api = frame.api;
  out.context = frame.ctx;
  out.device = {where, 0};
  if (ffi::has_slot(api.struct_size, offsetof(ffi::api, device_ordinal_get))) {
    ffi::device_ordinal_get_args get{sizeof(get), nullptr, frame.ctx, 0};
    if (ffi::error* error = api.device_ordinal_get(&get); error != nullptr) {
      return {status_code::internal, "XLA names no device for this call: " + consume(api, error)};
    }
    out.device.ordinal = get.device_ordinal;
  }
  out.stream = {};
  if (where == platform::cuda) {
    ffi::stream_get_args get{sizeof(get), nullptr, frame.ctx, nullptr};
    if (ffi::error* error = api.stream_get(&get); error != nullptr) {
      return {status_code::internal, "XLA gives no stream for this call: " + consume(api, error)};
    }
    out.stream = stream_ref(get.stream);
  }
  return {};
}

status decode(const ffi::call_frame& frame, platform where, any_buffer* memory,
              call& out) noexcept {
  if (status s = decode_memory(frame, where, memory, out); !s.ok()) return s;
  if (status s = check_list(frame.attrs, frame.attrs.attrs, "attributes"); !s.ok()) return s;
  if (frame.attrs.size > 0 && frame.attrs.names == nullptr) {
    return malformed("attributes have no names");
  }
  const attributes_view attributes(frame.attrs);
  const std::optional<std::int64_t> key = attributes.scalar<std::int64_t>("key");
  const std::optional<std::string_view> spec = attributes.string("spec");
  if (!key || !spec) {
    return {status_code::invalid_argument,
            "this custom call has no attribute 'key' (int64) or no 'spec' (string); the target "
            "jaxbridge.call serves what jaxbridge lowers, and nothing else"};
  }
  out.key = *key;
  out.spec = *spec;
  return {};
}

}  // namespace jaxbridge::dispatch

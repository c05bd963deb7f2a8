// SPDX-License-Identifier: Apache-2.0
#include "core/dispatch/call.hpp"

#include <cstddef>
#include <exception>
#include <string>
#include <vector>

#include "jaxbridge/frame.hpp"

namespace jaxbridge::dispatch {
namespace {

namespace ffi = abi::xla_ffi;

// Blocks of one thread, by depth of nested calls. They only grow, and end with the thread.
struct thread_blocks {
  std::vector<std::vector<any_buffer>> by_depth;
  std::size_t depth = 0;
};
thread_local thread_blocks blocks;

}  // namespace

std::string consume(const ffi::api& api, ffi::error* error) noexcept {
  return detail::consume(api, error);
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
  if (status s = detail::check_lists(frame); !s.ok()) return s;
  return static_cast<std::size_t>(frame.args.size) + static_cast<std::size_t>(frame.rets.size);
}

status decode_memory(const ffi::call_frame& frame, platform where, any_buffer* memory,
                     call& out) noexcept {
  any_buffer* next = memory;
  for (std::int64_t i = 0; i < frame.args.size; ++i) {
    if (status s =
            detail::decode_buffer(frame.args.args[i], frame.args.types[i], "operand", i, *next++);
        !s.ok()) {
      return s;
    }
  }
  out.operands = {memory, static_cast<std::size_t>(frame.args.size)};
  any_buffer* const first_result = next;
  for (std::int64_t i = 0; i < frame.rets.size; ++i) {
    if (status s =
            detail::decode_buffer(frame.rets.rets[i], frame.rets.types[i], "result", i, *next++);
        !s.ok()) {
      return s;
    }
  }
  out.results = {first_result, static_cast<std::size_t>(frame.rets.size)};

  out.api = frame.api;
  out.context = frame.ctx;
  return detail::locate(frame, where, out.device, out.stream);
}

status decode(const ffi::call_frame& frame, platform where, any_buffer* memory,
              call& out) noexcept {
  if (status s = decode_memory(frame, where, memory, out); !s.ok()) return s;
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

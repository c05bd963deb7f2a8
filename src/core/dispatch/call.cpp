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

status decode_place(const ffi::call_frame& frame, platform where, any_buffer* /*memory*/,
                    call& out) noexcept {
  out.api = frame.api;
  out.context = frame.ctx;
  out.frame = &frame;
  return detail::locate(frame, where, out.device, out.stream);
}

status decode_memory(const ffi::call_frame& frame, platform where, any_buffer* memory,
                     call& out) noexcept {
  const auto read = [](const auto& list, void** entries, const char* kind,
                       any_buffer* to) noexcept -> status {
    for (std::int64_t i = 0; i < list.size; ++i) {
      if (detail::read_buffer(entries[i], list.types[i], to[i])) continue;
      if (status s = detail::decode_buffer(entries[i], list.types[i], kind, i, to[i]); !s.ok()) {
        return s;
      }
    }
    return {};
  };
  out.operands = {memory, static_cast<std::size_t>(frame.args.size)};
  if (status s = read(frame.args, frame.args.args, "operand", memory); !s.ok()) return s;
  any_buffer* const results = memory + frame.args.size;
  out.results = {results, static_cast<std::size_t>(frame.rets.size)};
  if (status s = read(frame.rets, frame.rets.rets, "result", results); !s.ok()) return s;
  return decode_place(frame, where, memory, out);
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

// SPDX-License-Identifier: Apache-2.0
#include "core/native/inspection.hpp"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "core/cuda/context.hpp"
#include "core/cuda/device_memory.hpp"
#include "core/cuda/staging.hpp"
#include "core/cuda/stream_order.hpp"

namespace jaxbridge::native {
namespace {

// As in calls of Python functions.
constexpr unsigned char pattern = 0xA5;

// The bytes of arrays, one after the other, as they are behind all that the stream has.
using content = std::vector<std::byte>;

result<content> read(const dispatch::call& c, const std::vector<const any_buffer*>& arrays) {
  std::size_t size = 0;
  for (const any_buffer* a : arrays) size += a->size_bytes();
  content out(size);
  std::byte* to = out.data();
  if (c.device.platform == platform::cpu) {
    for (const any_buffer* a : arrays) {
      if (a->size_bytes() == 0) continue;
      std::memcpy(to, a->data, a->size_bytes());
      to += a->size_bytes();
    }
    return out;
  }
  result<cuda::staging_block> block = cuda::staging_block::lease(c.device.ordinal, c.stream, size);
  if (!block.ok()) return block.error();
  std::size_t offset = 0;
  for (const any_buffer* a : arrays) {
    status s = block.value().to_host(offset, a->data, a->size_bytes());
    if (!s.ok()) return s;
    offset += a->size_bytes();
  }
  if (status s = block.value().wait(); !s.ok()) return s;
  if (size > 0) std::memcpy(to, block.value().at(0), size);
  return out;
}

status fill(const dispatch::call& c, const any_buffer& b) {
  if (c.device.platform == platform::cuda) {
    return cuda::fill(b.data, pattern, b.size_bytes(), c.stream);
  }
  if (b.size_bytes() > 0) std::memset(b.data, pattern, b.size_bytes());
  return {};
}

}  // namespace

status inspected(const std::string& name, const dispatch::call& c,
                 const dispatch::in_place& in_place, const std::function<status()>& run) {
  const bool on_device = c.device.platform == platform::cuda;
  if (on_device && cuda::is_capturing(c.stream)) return run();
  const auto of_ours = [&name](const status& s, const char* what) -> status {
    return {s.code(), name + ": debug mode: " + what + ": " + s.message()};
  };

  std::vector<const any_buffer*> inputs;
  std::vector<std::size_t> positions;
  for (std::size_t i = 0; i < c.operands.size(); ++i) {
    if (in_place.writes(i)) continue;
    inputs.push_back(&c.operands[i]);
    positions.push_back(i);
  }
  const result<content> before = read(c, inputs);
  if (!before.ok()) return of_ours(before.error(), "the arguments cannot be copied");
  {
    std::optional<result<cuda::context_scope>> current;
    if (on_device) current.emplace(cuda::context_scope::enter(c.device.ordinal));
    if (current && !current->ok()) return current->error();
    for (std::size_t i = 0; i < c.results.size(); ++i) {
      const auto& pairs = in_place.pairs();
      if (std::any_of(pairs.begin(), pairs.end(), [i](const auto& p) { return p.second == i; })) {
        continue;
      }
      if (status s = fill(c, c.results[i]); !s.ok()) {
        return of_ours(s, "the results cannot be filled");
      }
    }
  }
  if (status s = run(); !s.ok()) return s;
  if (on_device) {
    const result<cuda::context_scope> current = cuda::context_scope::enter(c.device.ordinal);
    if (!current.ok()) return current.error();
    if (status s = cuda::synchronize(c.stream); !s.ok()) {
      return {s.code(), name + ": the work that it enqueued failed: " + s.message()};
    }
  }
  const result<content> after = read(c, inputs);
  if (!after.ok()) return of_ours(after.error(), "the arguments cannot be copied");
  std::size_t offset = 0;
  for (std::size_t k = 0; k < inputs.size(); ++k) {
    const std::size_t size = inputs[k]->size_bytes();
    if (size > 0 && std::memcmp(&before.value()[offset], &after.value()[offset], size) != 0) {
      return {status_code::failed_precondition,
              in_place.name(positions[k]) +
                  " was written to, and the function's signature says that it only reads it: "
                  "declare it as updated (inout, in C++ in_place<T>), or write to a copy"};
    }
    offset += size;
  }
  return {};
}

}  // namespace jaxbridge::native

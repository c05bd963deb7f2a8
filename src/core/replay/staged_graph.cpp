// SPDX-License-Identifier: Apache-2.0
#include "core/replay/staged_graph.hpp"

namespace jaxbridge::replay {
namespace {

constexpr std::size_t alignment = 256;

std::size_t rounded(std::size_t bytes) { return (bytes + alignment - 1) / alignment * alignment; }

}  // namespace

std::size_t staged_bytes(const dispatch::call& c) noexcept {
  std::size_t bytes = 0;
  for (const any_buffer& b : c.operands) bytes += b.size_bytes();
  for (const any_buffer& b : c.results) bytes += b.size_bytes();
  return bytes;
}

std::size_t staged_buffers(const dispatch::call& c) noexcept {
  return c.operands.size() + c.results.size();
}

result<std::shared_ptr<const staging_area>> staging_area::make(
    const dispatch::call& c, std::span<const index_pair> in_place) {
  std::vector<std::size_t> offsets;
  offsets.reserve(staged_buffers(c));
  std::size_t size = 0;
  for (const std::span<const any_buffer> list : {c.operands, c.results}) {
    for (const any_buffer& b : list) {
      offsets.push_back(size);
      size += rounded(b.size_bytes());
    }
  }
  for (const auto& [operand, result] : in_place) {
    offsets[c.operands.size() + result] = offsets[operand];
  }
  result<cuda::device_block> block = cuda::device_block::allocate(c.device.ordinal, size);
  if (!block.ok()) return block.error();
  return std::shared_ptr<const staging_area>(
      new staging_area(std::move(block.value()), std::move(offsets)));
}

dispatch::call staging_area::call_on_it(const dispatch::call& c,
                                        std::vector<any_buffer>& buffers) const {
  buffers.assign(c.operands.begin(), c.operands.end());
  buffers.insert(buffers.end(), c.results.begin(), c.results.end());
  for (std::size_t i = 0; i < buffers.size(); ++i) {
    if (buffers[i].data != nullptr) buffers[i].data = block_.at(offsets_[i]);
  }
  dispatch::call moved = c;
  moved.operands = std::span(buffers).first(c.operands.size());
  moved.results = std::span(buffers).subspan(c.operands.size());
  return moved;
}

cuda::copies_around staging_area::copies(const dispatch::call& c,
                                         std::vector<cuda::memory_copy>& list) const {
  list.clear();
  for (std::size_t i = 0; i < c.operands.size(); ++i) {
    const any_buffer& b = c.operands[i];
    list.push_back({block_.at(offsets_[i]), b.data, b.size_bytes()});
  }
  for (std::size_t i = 0; i < c.results.size(); ++i) {
    const any_buffer& b = c.results[i];
    list.push_back({b.data, block_.at(offsets_[c.operands.size() + i]), b.size_bytes()});
  }
  const std::span<const cuda::memory_copy> all(list);
  return {all.first(c.operands.size()), all.subspan(c.operands.size())};
}

status staged_graph::launch(const dispatch::call& c) const {
  thread_local std::vector<cuda::memory_copy> list;  // nothing of ours runs inside
  return graph_->launch(area_->copies(c, list));
}

}  // namespace jaxbridge::replay

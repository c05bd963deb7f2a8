// SPDX-License-Identifier: Apache-2.0
// A graph that works on memory of its own, for calls whose memory does not come again.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "core/cuda/device_memory.hpp"
#include "core/cuda/graph.hpp"
#include "core/dispatch/call.hpp"

namespace jaxbridge::replay {

/// Copies of a call's buffers. An operand in place and its result are one copy.
class staging_area {
 public:
  using index_pair = std::pair<std::size_t, std::size_t>;

  /// Memory for the buffers of `c`. Blocks.
  [[nodiscard]] static result<std::shared_ptr<const staging_area>> make(
      const dispatch::call& c, std::span<const index_pair> in_place);

  /// `c` with this memory, its lists in `buffers`.
  [[nodiscard]] dispatch::call call_on_it(const dispatch::call& c,
                                          std::vector<any_buffer>& buffers) const;

  /// The copies of a call's operands to here, and of its results from here, in `list`.
  [[nodiscard]] cuda::copies_around copies(const dispatch::call& c,
                                           std::vector<cuda::memory_copy>& list) const;

 private:
  staging_area(cuda::device_block block, std::vector<std::size_t> offsets) noexcept
      : block_(std::move(block)), offsets_(std::move(offsets)) {}

  cuda::device_block block_;
  std::vector<std::size_t> offsets_;  // of the operands, then the results
};

/// What was captured on a staging area, with copies before and after it.
class staged_graph {
 public:
  staged_graph(std::shared_ptr<const staging_area> area, std::shared_ptr<const cuda::graph> made)
      : area_(std::move(area)), graph_(std::move(made)) {}

  /// Enqueues the work for the memory of `c`, a call of the kind it was made for. Any thread.
  [[nodiscard]] status launch(const dispatch::call& c) const;

  /// `c` on the copies, its lists in `buffers`.
  [[nodiscard]] dispatch::call on_copies(const dispatch::call& c,
                                         std::vector<any_buffer>& buffers) const {
    return area_->call_on_it(c, buffers);
  }

 private:
  std::shared_ptr<const staging_area> area_;
  std::shared_ptr<const cuda::graph> graph_;  // ends first
};

/// The bytes and the number of the buffers that are copied for a call.
[[nodiscard]] std::size_t staged_bytes(const dispatch::call& c) noexcept;
[[nodiscard]] std::size_t staged_buffers(const dispatch::call& c) noexcept;

}  // namespace jaxbridge::replay

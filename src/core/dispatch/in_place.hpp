// SPDX-License-Identifier: Apache-2.0
// Operands that are updated: each is a result too, in one memory.
#pragma once

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "core/dispatch/call.hpp"
#include "jaxbridge/status.hpp"

namespace jaxbridge::dispatch {

/// What holds of each call of a function: which operands are which results. Immutable.
class in_place {
 public:
  using index_pair = std::pair<std::size_t, std::size_t>;

  /// Nothing is updated.
  in_place() noexcept = default;

  /// `names`: what messages call the operands. `pairs`: operands, and the results that they are.
  /// `external`: those of these operands that have to be imported memory. Throws
  /// std::invalid_argument where the three do not fit, or name buffers that no call has.
  in_place(std::vector<std::string> names, std::vector<index_pair> pairs,
           std::vector<std::size_t> external);

  [[nodiscard]] const std::vector<index_pair>& pairs() const noexcept { return pairs_; }
  /// Whether a function may write to an operand.
  [[nodiscard]] bool writes(std::size_t operand) const noexcept {
    return operand < written_.size() && written_[operand];
  }

  /// What messages call an operand.
  [[nodiscard]] std::string name(std::size_t operand) const;

  /// An error where XLA has given a call other memory than this says, or memory of others that was
  /// imported twice is two operands.
  [[nodiscard]] status check(const call& c) const;

 private:
  std::vector<std::string> names_;
  std::vector<index_pair> pairs_;
  std::vector<std::size_t> external_;
  std::vector<bool> written_;
};

}  // namespace jaxbridge::dispatch

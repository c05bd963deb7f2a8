// SPDX-License-Identifier: Apache-2.0
// What stands before a handler of others' that updates memory of others.
#pragma once

#include "core/dispatch/call.hpp"
#include "jaxbridge/status.hpp"

namespace jaxbridge::dispatch {

/// The first operands are the results, unchanged: memory that is imported and is to be updated in
/// place. The other operands are what the handler reads besides. `spec` says what messages call the
/// operands, one a line. An error where XLA made a copy, or one memory is two operands.
[[nodiscard]] status check_external(const call& c) noexcept;

}  // namespace jaxbridge::dispatch

// SPDX-License-Identifier: Apache-2.0
// The first use that a program makes of memory of others which it updates in place.
#pragma once

#include "core/dispatch/call.hpp"
#include "jaxbridge/status.hpp"

namespace jaxbridge::dispatch {

/// Each operand is its result, unchanged: memory that is imported and is to be updated in place.
/// XLA's stream waits for what its owner has enqueued; the host does not. An error where XLA made a
/// copy.
[[nodiscard]] status fence(const call& c) noexcept;

}  // namespace jaxbridge::dispatch

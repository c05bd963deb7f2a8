// SPDX-License-Identifier: Apache-2.0
// What debug mode looks at around a call of native code. Slow.
#pragma once

#include <functional>
#include <jaxbridge/status.hpp>
#include <string>

#include "core/dispatch/in_place.hpp"

namespace jaxbridge::native {

/// Makes one call of the function `name`, which is `run`: results that are no operands are filled
/// with a pattern before it, so that one that is not written shows; after it the device is waited
/// for, so that a fault of what was enqueued is this call's; and an operand that has changed and is
/// not in place is an error. Under a capture it is `run` alone: there is no content to look at yet.
[[nodiscard]] status inspected(const std::string& name, const dispatch::call& c,
                               const dispatch::in_place& in_place,
                               const std::function<status()>& run);

}  // namespace jaxbridge::native

// SPDX-License-Identifier: Apache-2.0
// What the driver knows about an address.
#pragma once

#include <jaxbridge/status.hpp>

namespace jaxbridge::cuda {

/// Where memory is. `ordinal` is that of the device that owns it or, for memory of the host, of the
/// device under which it was registered.
struct pointer_info {
  enum class place { unknown, device, host, managed };
  place where = place::unknown;  ///< unknown: ordinary memory, or none at all
  int ordinal = 0;
  /// Device memory of a context that is not the device's primary one: nobody else reaches it.
  bool is_foreign = false;
};

/// Asks the driver about one address; waits for nothing. An address that it doesn't know is no
/// error.
[[nodiscard]] result<pointer_info> inspect(const void* address);

}  // namespace jaxbridge::cuda

// SPDX-License-Identifier: Apache-2.0
// Where memory lives and where a call runs.
#pragma once

#include <cstdint>

namespace jaxbridge {
inline namespace v1 {

enum class platform : std::uint8_t { cpu = 0, cuda = 1 };

[[nodiscard]] constexpr const char* name(platform p) noexcept {
  return p == platform::cuda ? "cuda" : "cpu";
}

/// A device of this process. `ordinal` is XLA's local device ordinal: for CUDA the ordinal within
/// CUDA_VISIBLE_DEVICES, for the CPU the index of the virtual device.
struct device {
  jaxbridge::platform platform = jaxbridge::platform::cpu;
  std::int32_t ordinal = 0;

  friend bool operator==(const device&, const device&) = default;
};

}  // namespace v1
}  // namespace jaxbridge

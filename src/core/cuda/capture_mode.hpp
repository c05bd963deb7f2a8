// SPDX-License-Identifier: Apache-2.0
// What a capture forbids the thread that makes it.
#pragma once

#include <jaxbridge/status.hpp>

#include "core/cuda/driver_types.hpp"

namespace jaxbridge::cuda {

/// Sets what captures forbid this thread (`relaxed`: nothing, not even to allocate); returns what
/// was set before.
[[nodiscard]] result<CUstreamCaptureMode> exchange_capture_mode(CUstreamCaptureMode mode);

/// Inside, this thread may wait, allocate and free while it captures: for what has nothing to do
/// with the capture, like the end of another graph, which a garbage collection can bring at any
/// time.
class [[nodiscard]] relaxed_capture_scope {
 public:
  relaxed_capture_scope() noexcept
      : before_(exchange_capture_mode(CU_STREAM_CAPTURE_MODE_RELAXED)) {}
  relaxed_capture_scope(const relaxed_capture_scope&) = delete;
  relaxed_capture_scope& operator=(const relaxed_capture_scope&) = delete;
  ~relaxed_capture_scope() {
    // Nobody can be told; without a driver nothing was set.
    if (before_.ok()) (void)exchange_capture_mode(before_.value());
  }

 private:
  result<CUstreamCaptureMode> before_;
};

}  // namespace jaxbridge::cuda

// SPDX-License-Identifier: Apache-2.0
#include "core/cuda/capture_mode.hpp"

#include "core/cuda/driver.hpp"

namespace jaxbridge::cuda {

result<CUstreamCaptureMode> exchange_capture_mode(CUstreamCaptureMode mode) {
  if (status s = check(driver::get().cuThreadExchangeStreamCaptureMode(&mode),
                       "cuThreadExchangeStreamCaptureMode");
      !s.ok()) {
    return s;
  }
  return mode;
}

}  // namespace jaxbridge::cuda

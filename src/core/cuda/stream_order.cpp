// SPDX-License-Identifier: Apache-2.0
// Order between streams that others own.
#include "core/cuda/stream_order.hpp"

#include <cstdint>

#include "core/cuda/driver.hpp"
#include "core/cuda/event.hpp"

namespace jaxbridge::cuda {
namespace {

// The legacy default stream has two handles.
std::uintptr_t identity(stream_ref stream) noexcept {
  return stream.address() == 0 ? CU_STREAM_LEGACY : stream.address();
}

}  // namespace

jaxbridge::status order(stream_ref from, stream_ref to) {
  if (identity(from) == identity(to)) return {};
  const result<event> point = event::record(from);
  if (!point.ok()) return point.error();
  return point.value().block(to);
}

bool is_capturing(stream_ref stream) noexcept {
  CUstreamCaptureStatus state = CU_STREAM_CAPTURE_STATUS_NONE;
  const CUresult code =
      driver::get().cuStreamIsCapturing(static_cast<CUstream>(stream.handle()), &state);
  if (code == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT) return true;
  return code == CUDA_SUCCESS && state != CU_STREAM_CAPTURE_STATUS_NONE;
}

result<bool> is_idle(stream_ref stream) {
  const CUresult code = driver::get().cuStreamQuery(static_cast<CUstream>(stream.handle()));
  if (code == CUDA_ERROR_NOT_READY) return false;
  if (status s = check(code, "cuStreamQuery"); !s.ok()) return s;
  return true;
}

}  // namespace jaxbridge::cuda

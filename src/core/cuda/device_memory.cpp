// SPDX-License-Identifier: Apache-2.0
#include "core/cuda/device_memory.hpp"

#include <cstdint>

#include "core/cuda/driver.hpp"

namespace jaxbridge::cuda {
namespace {

CUdeviceptr pointer(const void* p) noexcept {
  return static_cast<CUdeviceptr>(reinterpret_cast<std::uintptr_t>(p));
}

CUstream handle(stream_ref stream) noexcept { return static_cast<CUstream>(stream.handle()); }

}  // namespace

jaxbridge::status copy(void* to, const void* from, std::size_t bytes, stream_ref stream) {
  if (bytes == 0) return {};
  return check(driver::get().cuMemcpyDtoDAsync(pointer(to), pointer(from), bytes, handle(stream)),
               "cuMemcpyDtoDAsync");
}

jaxbridge::status fill(void* to, unsigned char value, std::size_t bytes, stream_ref stream) {
  if (bytes == 0) return {};
  return check(driver::get().cuMemsetD8Async(pointer(to), value, bytes, handle(stream)),
               "cuMemsetD8Async");
}

jaxbridge::status synchronize(stream_ref stream) {
  return check(driver::get().cuStreamSynchronize(handle(stream)), "cuStreamSynchronize");
}

jaxbridge::status synchronize_context() {
  return check(driver::get().cuCtxSynchronize(), "cuCtxSynchronize");
}

int device_count() noexcept {
  int count = 0;
  return driver::get().cuDeviceGetCount(&count) == CUDA_SUCCESS ? count : 0;
}

}  // namespace jaxbridge::cuda

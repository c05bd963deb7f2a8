// SPDX-License-Identifier: Apache-2.0
#include "core/cuda/device_memory.hpp"

#include <algorithm>
#include <cstdint>

#include "core/cuda/capture_mode.hpp"
#include "core/cuda/context.hpp"
#include "core/cuda/driver.hpp"
#include "core/exit.hpp"

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

result<device_block> device_block::allocate(int ordinal, std::size_t bytes) {
  const result<context_scope> current = context_scope::enter(ordinal);
  if (!current.ok()) return current.error();
  CUdeviceptr made = 0;
  if (jaxbridge::status s =
          check(driver::get().cuMemAlloc(&made, std::max<std::size_t>(bytes, 1)), "cuMemAlloc");
      !s.ok()) {
    return s;
  }
  // NOLINTNEXTLINE(performance-no-int-to-ptr): the driver's addresses are integers.
  return device_block(reinterpret_cast<std::byte*>(made), ordinal);
}

device_block::~device_block() {
  if (data_ == nullptr || exiting()) return;
  const relaxed_capture_scope relaxed;
  const auto current = context_scope::enter(ordinal_);
  // Nobody can be told, and the memory is lost then.
  (void)driver::get().cuMemFree(pointer(data_));
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

// SPDX-License-Identifier: Apache-2.0
// The primary context of a device.
#include "core/cuda/context.hpp"

#include <array>
#include <atomic>
#include <cstddef>
#include <string>

#include "core/cuda/driver.hpp"
#include "core/exit.hpp"

namespace jaxbridge::cuda {
namespace {

// One retained primary context per ordinal; null: not asked for yet. No lock: retaining can block
// for as long as creating a context takes.
constinit std::array<std::atomic<CUcontext>, max_devices> contexts{};

std::atomic<CUcontext>& slot(int ordinal) noexcept {
  return contexts[static_cast<std::size_t>(ordinal)];
}

// The context is not in the table yet. The device it belongs to can only be asked of the current
// context, so it is made current for the question.
result<int> ask_device_of(CUcontext context) {
  const driver& cu = driver::get();
  CUdevice device = 0;
  {
    result<context_scope> scope = context_scope::enter(context);
    if (!scope.ok()) return scope.error();
    if (auto s = check(cu.cuCtxGetDevice(&device), "cuCtxGetDevice"); !s.ok()) return s;
  }
  if (device < 0 || device >= max_devices) return -1;
  // A CUdevice is the ordinal it was got by.
  const result<CUcontext> primary = primary_context(device);
  if (!primary.ok()) return primary.error();
  return primary.value() == context ? device : -1;
}

}  // namespace

jaxbridge::status check_ordinal(int ordinal) {
  if (ordinal >= 0 && ordinal < max_devices) return {};
  return {status_code::invalid_argument, "CUDA device ordinal " + std::to_string(ordinal) +
                                             ": expected 0 to " + std::to_string(max_devices - 1)};
}

result<CUcontext> primary_context(int ordinal) {
  if (auto s = check_ordinal(ordinal); !s.ok()) return s;
  if (CUcontext known = slot(ordinal).load(std::memory_order_acquire); known != nullptr) {
    return known;
  }
  const driver& cu = driver::get();
  CUdevice device = 0;
  if (auto s = check(cu.cuDeviceGet(&device, ordinal), "cuDeviceGet"); !s.ok()) return s;
  CUcontext context = nullptr;
  if (auto s = check(cu.cuDevicePrimaryCtxRetain(&context, device), "cuDevicePrimaryCtxRetain");
      !s.ok()) {
    return s;
  }
  CUcontext expected = nullptr;
  if (!slot(ordinal).compare_exchange_strong(expected, context, std::memory_order_acq_rel)) {
    // Another thread was first; its reference is the one that is kept.
    static_cast<void>(cu.cuDevicePrimaryCtxRelease(device));
    return expected;
  }
  return context;
}

result<int> device_of(CUcontext context) {
  // Null would be found in every slot that is still empty.
  if (context == nullptr) return check(CUDA_ERROR_INVALID_CONTEXT, "cuCtxGetDevice");
  for (int ordinal = 0; ordinal < max_devices; ++ordinal) {
    if (slot(ordinal).load(std::memory_order_acquire) == context) return ordinal;
  }
  return ask_device_of(context);
}

result<context_scope> context_scope::enter(int ordinal) {
  const result<CUcontext> context = primary_context(ordinal);
  if (!context.ok()) return context.error();
  return enter(context.value());
}

result<context_scope> context_scope::enter(CUcontext context) {
  const result<CUcontext> previous = current_context();
  if (!previous.ok()) return previous.error();
  const bool push = previous.value() != context;
  if (push) {
    if (auto s = check(driver::get().cuCtxPushCurrent(context), "cuCtxPushCurrent"); !s.ok()) {
      return s;
    }
  }
  return context_scope(previous.value(), push);
}

context_scope::~context_scope() {
  if (!active_ || exiting()) return;
  // Nobody can be told of a failure here. What is tried last is what matters: that the thread goes
  // on with the context it had, even if a callee replaced or pushed one (cudaSetDevice does).
  CUcontext popped = nullptr;
  if (pushed_) static_cast<void>(driver::get().cuCtxPopCurrent(&popped));
  static_cast<void>(make_current(previous_));
}

result<CUcontext> current_context() {
  CUcontext current = nullptr;
  if (auto s = check(driver::get().cuCtxGetCurrent(&current), "cuCtxGetCurrent"); !s.ok()) return s;
  return current;
}

jaxbridge::status make_current(CUcontext context) {
  const result<CUcontext> current = current_context();
  if (current.ok() && current.value() == context) return {};
  return check(driver::get().cuCtxSetCurrent(context), "cuCtxSetCurrent");
}

void release_primary_contexts_for_testing() {
  const driver& cu = driver::get();
  for (int ordinal = 0; ordinal < max_devices; ++ordinal) {
    if (slot(ordinal).exchange(nullptr, std::memory_order_acq_rel) != nullptr) {
      static_cast<void>(cu.cuDevicePrimaryCtxRelease(ordinal));
    }
  }
}

}  // namespace jaxbridge::cuda

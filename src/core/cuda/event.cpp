// SPDX-License-Identifier: Apache-2.0
// Events and their pools.
#include "core/cuda/event.hpp"

#include <array>
#include <mutex>

#include "core/cuda/context.hpp"
#include "core/cuda/driver.hpp"
#include "core/exit.hpp"

namespace jaxbridge::cuda {
namespace {

CUstream native(stream_ref stream) noexcept { return static_cast<CUstream>(stream.handle()); }

// Idle events of one device's primary context. Bounded, and giving back allocates nothing: an event
// too many is destroyed. The lock is held for a few instructions, never over a driver call.
class event_pool {
 public:
  // An idle event, or null.
  CUevent take() noexcept {
    const std::lock_guard<std::mutex> hold(lock_);
    return count_ == 0 ? nullptr : idle_[--count_];
  }

  // False if the pool is full; the event is still the caller's then.
  bool put(CUevent e) noexcept {
    const std::lock_guard<std::mutex> hold(lock_);
    if (count_ == idle_.size()) return false;
    idle_[count_++] = e;
    return true;
  }

 private:
  std::mutex lock_;
  std::array<CUevent, 64> idle_{};  // guarded by lock_
  std::size_t count_ = 0;           // guarded by lock_
};

// Never destroyed: an event may come back while static destructors run.
event_pool& pool_of(int device) noexcept {
  static auto* pools = new std::array<event_pool, max_devices>;
  return (*pools)[static_cast<std::size_t>(device)];
}

void destroy(CUevent e) noexcept { static_cast<void>(driver::get().cuEventDestroy(e)); }

}  // namespace

result<event> event::record(stream_ref stream) {
  const driver& cu = driver::get();
  CUcontext context = nullptr;
  if (auto s = check(cu.cuStreamGetCtx(native(stream), &context), "cuStreamGetCtx"); !s.ok()) {
    return s;
  }
  const result<int> device = device_of(context);
  if (!device.ok()) return device.error();

  const int pool = device.value();
  CUevent handle = pool < 0 ? nullptr : pool_of(pool).take();
  if (handle == nullptr) {
    result<context_scope> scope = context_scope::enter(context);
    if (!scope.ok()) return scope.error();
    if (auto s = check(cu.cuEventCreate(&handle, CU_EVENT_DISABLE_TIMING), "cuEventCreate");
        !s.ok()) {
      return s;
    }
  }
  if (auto s = check(cu.cuEventRecord(handle, native(stream)), "cuEventRecord"); !s.ok()) {
    // Not back to the pool: what is wrong may be wrong with the event.
    destroy(handle);
    return s;
  }
  return event(handle, pool);
}

event::~event() {
  if (handle_ == nullptr) return;
  if (pool_ >= 0 && pool_of(pool_).put(handle_)) return;
  if (!exiting()) destroy(handle_);
}

jaxbridge::status event::block(stream_ref stream) const {
  return check(driver::get().cuStreamWaitEvent(native(stream), handle_, 0), "cuStreamWaitEvent");
}

result<bool> event::done() const {
  const CUresult code = driver::get().cuEventQuery(handle_);
  if (code == CUDA_ERROR_NOT_READY) return false;
  if (auto s = check(code, "cuEventQuery"); !s.ok()) return s;
  return true;
}

jaxbridge::status event::synchronize() const {
  return check(driver::get().cuEventSynchronize(handle_), "cuEventSynchronize");
}

std::size_t trim_events() {
  std::size_t count = 0;
  for (int device = 0; device < max_devices; ++device) {
    while (CUevent e = pool_of(device).take()) {
      destroy(e);
      ++count;
    }
  }
  return count;
}

}  // namespace jaxbridge::cuda

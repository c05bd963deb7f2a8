// SPDX-License-Identifier: Apache-2.0
// XLA's threads on the CPU.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <utility>

#include "abi/xla_ffi.hpp"
#include "frame.hpp"

namespace jaxbridge {
inline namespace v1 {

/// The threads on which XLA runs its own work on the CPU; on CUDA, and where XLA has none, the
/// calling thread alone.
class thread_pool {
 public:
  thread_pool() noexcept = default;
  thread_pool(const abi::xla_ffi::call_frame& frame, platform where) noexcept
      : frame_(where == platform::cpu ? &frame : nullptr) {}

  /// How many threads there are, at least 1.
  [[nodiscard]] std::int64_t size() const {
    namespace ffi = abi::xla_ffi;
    if (frame_ == nullptr ||
        !ffi::has_slot(frame_->api->struct_size, offsetof(ffi::api, thread_pool_num_threads))) {
      return 1;
    }
    std::int64_t threads = 1;
    ffi::thread_pool_num_threads_args args{sizeof(args), nullptr, frame_->ctx, &threads};
    if (ffi::error* error = frame_->api->thread_pool_num_threads(&args); error != nullptr) {
      (void)detail::consume(*frame_->api, error);
      return 1;
    }
    return std::max<std::int64_t>(threads, 1);
  }

  /// Calls `body(begin, end)` for pieces of [0, count), each of at least `grain` (but the last), at
  /// once on several threads, and returns when all have ended. The calling thread works too, so
  /// that threads which are busy elsewhere are not waited for. What `body` throws ends the others'
  /// work with the pieces that have begun, and is thrown here.
  template <class Body>
  void parallel_for(std::int64_t count, std::int64_t grain, const Body& body) const {
    if (count <= 0) return;
    grain = std::max<std::int64_t>(grain, 1);
    const std::int64_t most = std::min(size(), count / grain + (count % grain != 0 ? 1 : 0));
    if (most <= 1) {
      body(std::int64_t{0}, count);
      return;
    }
    // Some pieces for each thread, as not all of them come at once.
    const std::int64_t step = std::max(grain, count / (most * 4));
    auto shared = std::make_shared<work>();
    shared->count = count;
    shared->step = step;
    shared->body = &body;
    shared->run = [](const void* f, std::int64_t begin, std::int64_t end) {
      (*static_cast<const Body*>(f))(begin, end);
    };
    for (std::int64_t i = 1; i < most && schedule(shared); ++i) {
    }
    shared->help();
    // Pieces that others have begun. One whose task comes later finds nothing to do.
    for (std::int64_t done = shared->done.load(std::memory_order_acquire); done < count;
         done = shared->done.load(std::memory_order_acquire)) {
      shared->done.wait(done, std::memory_order_acquire);
    }
#if defined(__cpp_exceptions)
    // Taken from it, as a task that comes later may be the last to have `shared`.
    if (shared->failed) std::rethrow_exception(std::exchange(shared->error, nullptr));
#endif
  }

 private:
  struct work {
    std::atomic<std::int64_t> next{0};
    std::atomic<std::int64_t> done{0};  // elements
    std::int64_t count = 0;
    std::int64_t step = 1;
    const void* body = nullptr;  // touched only for a piece that is not done
    void (*run)(const void*, std::int64_t, std::int64_t) = nullptr;
    std::atomic<bool> failed{false};
    std::exception_ptr error;  // of the first piece that threw: read when all are done

    void piece(std::int64_t begin, std::int64_t end) noexcept {
#if defined(__cpp_exceptions)
      if (failed) return;
      try {
        run(body, begin, end);
      } catch (...) {
        if (!failed.exchange(true)) error = std::current_exception();
      }
#else
      run(body, begin, end);
#endif
    }

    void help() noexcept {
      // What is added to the end of the numbers is below 0.
      for (std::int64_t begin = next.fetch_add(step); begin >= 0 && begin < count;
           begin = next.fetch_add(step)) {
        const std::int64_t end = begin + std::min(step, count - begin);
        piece(begin, end);
        if (done.fetch_add(end - begin, std::memory_order_acq_rel) + (end - begin) == count) {
          done.notify_all();
        }
      }
    }
  };

  [[nodiscard]] bool schedule(const std::shared_ptr<work>& shared) const {
    namespace ffi = abi::xla_ffi;
    auto* const held = new std::shared_ptr<work>(shared);
    ffi::thread_pool_schedule_args args{sizeof(args), nullptr, frame_->ctx,
                                        [](void* data) {
                                          auto* mine = static_cast<std::shared_ptr<work>*>(data);
                                          (*mine)->help();
                                          delete mine;
                                        },
                                        held};
    if (ffi::error* error = frame_->api->thread_pool_schedule(&args); error != nullptr) {
      (void)detail::consume(*frame_->api, error);
      delete held;
      return false;
    }
    return true;
  }

  const abi::xla_ffi::call_frame* frame_ = nullptr;  // null: no threads but the caller's
};

}  // namespace v1
}  // namespace jaxbridge

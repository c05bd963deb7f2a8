// SPDX-License-Identifier: Apache-2.0
// Pools of pinned host memory.
#include "core/cuda/staging.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstdint>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "core/cuda/context.hpp"
#include "core/cuda/driver.hpp"
#include "core/cuda/stream_order.hpp"
#include "core/exit.hpp"

namespace jaxbridge::cuda {

// A block as its pool knows it. The pool owns the object. What is not marked otherwise belongs to
// whoever has the block leased, or to the lock of the pool while nobody has.
struct detail::staging_memory {
  enum class condition : std::uint8_t { idle, leased, lost };

  std::size_t capacity = 0;             // const once reserved
  condition state = condition::leased;  // guarded by the pool's lock
  std::uint64_t ticket = 0;             // order of being given back; guarded by the pool's lock
  void* memory = nullptr;               // pinned
  CUevent done = nullptr;               // owned; behind the last copy of the last lease
  bool pending = false;                 // `done` was recorded and is not known to have passed
  bool enqueued = false;                // copies were enqueued that nobody waited for
};

namespace {

using detail::staging_memory;
using condition = staging_memory::condition;

constexpr std::size_t kib = 1024;
constexpr std::size_t smallest_block = 64 * kib;
constexpr std::size_t largest_doubling = 64 * kib * kib;
constexpr std::size_t no_size = std::numeric_limits<std::size_t>::max();

constinit std::atomic<std::size_t> limit{512 * kib * kib};

constexpr std::size_t round_up(std::size_t bytes, std::size_t unit) noexcept {
  return bytes > no_size - unit ? no_size : (bytes + unit - 1) / unit * unit;
}

// Powers of two, and multiples of 64 MiB beyond: few sizes, so that a block fits the next call.
constexpr std::size_t block_size(std::size_t bytes) noexcept {
  if (bytes <= smallest_block) return smallest_block;
  if (bytes <= largest_doubling) return std::bit_ceil(bytes);
  return round_up(bytes, largest_doubling);
}

CUstream native(stream_ref stream) noexcept { return static_cast<CUstream>(stream.handle()); }

// The host waits for the last copy of the last lease.
jaxbridge::status await_copies(staging_memory& m) {
  if (!m.pending) return {};
  auto s = check(driver::get().cuEventSynchronize(m.done), "cuEventSynchronize");
  if (s.ok()) m.pending = false;
  return s;
}

// Whether the last copy of the last lease is complete.
result<bool> copies_done(staging_memory& m) {
  if (!m.pending) return true;
  const CUresult code = driver::get().cuEventQuery(m.done);
  if (code == CUDA_ERROR_NOT_READY) return false;
  if (auto s = check(code, "cuEventQuery"); !s.ok()) return s;
  m.pending = false;
  return true;
}

// The blocks of one device. A block is claimed under the lock, then looked at or waited for without
// it. The lock is held for a walk over a few entries, never over a driver call. Every caller has
// the device's context current.
class staging_pool {
 public:
  // A block that nothing uses: one that was given back if one is complete; else a new one while the
  // limit allows; else the oldest, after waiting for it.
  result<staging_memory*> get(std::size_t capacity) {
    std::uint64_t after = 0;
    while (staging_memory* m = claim(after, capacity)) {
      const result<bool> done = copies_done(*m);
      if (done.ok() && done.value()) return m;
      after = put_back(m);
      if (!done.ok()) return done.error();
    }
    for (;;) {
      auto [m, is_new] = reserve(capacity);
      if (is_new) return allocate(m);
      if (auto s = await_copies(*m); !s.ok()) {
        put_back(m);
        return s;
      }
      if (m->capacity == capacity) return m;
      if (auto s = destroy(m); !s.ok()) return s;
    }
  }

  // The end of a lease. Allocates nothing and cannot fail.
  void give_back(staging_memory* m, condition state) noexcept {
    const std::lock_guard<std::mutex> hold(lock_);
    m->state = state;
    m->ticket = ++last_ticket_;
  }

  // Frees all that is idle now; goes on after a failure and returns the first.
  jaxbridge::status trim() {
    jaxbridge::status first;
    if (count(condition::lost) != 0) {
      first = check(driver::get().cuCtxSynchronize(), "cuCtxSynchronize");
      if (first.ok()) recover();
    }
    std::uint64_t after = 0;
    const std::uint64_t until = last_ticket();
    while (staging_memory* m = claim(after, 0)) {
      after = m->ticket;
      if (after > until) {
        put_back(m);
        break;
      }
      auto s = await_copies(*m);
      if (s.ok()) {
        s = destroy(m);
      } else {
        put_back(m);
      }
      if (first.ok()) first = std::move(s);
    }
    return first;
  }

  staging_statistics usage() {
    const std::lock_guard<std::mutex> hold(lock_);
    staging_statistics sum;
    sum.blocks = blocks_.size();
    sum.size_bytes = total_;
    for (const auto& m : blocks_) {
      if (m->state == condition::leased) ++sum.leased;
      if (m->state == condition::lost) ++sum.lost;
    }
    return sum;
  }

 private:
  // The idle block given back first after the ticket `after`, of that capacity (0: any); null if
  // there is none. It is the caller's until it is put or given back.
  staging_memory* claim(std::uint64_t after, std::size_t capacity) noexcept {
    const std::lock_guard<std::mutex> hold(lock_);
    return claim_locked(after, capacity);
  }

  staging_memory* claim_locked(std::uint64_t after, std::size_t capacity) noexcept {
    staging_memory* oldest = nullptr;
    for (const auto& m : blocks_) {
      if (m->state == condition::idle && m->ticket > after &&
          (capacity == 0 || m->capacity == capacity) &&
          (oldest == nullptr || m->ticket < oldest->ticket)) {
        oldest = m.get();
      }
    }
    if (oldest != nullptr) oldest->state = condition::leased;
    return oldest;
  }

  // Undoes a claim; the block keeps its place. Returns its ticket.
  std::uint64_t put_back(staging_memory* m) noexcept {
    const std::lock_guard<std::mutex> hold(lock_);
    m->state = condition::idle;
    return m->ticket;
  }

  // An entry without memory (true) if the limit allows one more, or if nothing is idle that could
  // make room; else the oldest idle block (false).
  std::pair<staging_memory*, bool> reserve(std::size_t capacity) {
    auto fresh = std::make_unique<staging_memory>();
    fresh->capacity = capacity;
    const std::size_t most = limit.load(std::memory_order_relaxed);
    const std::lock_guard<std::mutex> hold(lock_);
    if (capacity > most || total_ > most - capacity) {
      if (staging_memory* oldest = claim_locked(0, 0); oldest != nullptr) return {oldest, false};
    }
    blocks_.push_back(std::move(fresh));
    total_ += capacity;
    return {blocks_.back().get(), true};
  }

  result<staging_memory*> allocate(staging_memory* m) {
    const driver& cu = driver::get();
    CUresult code = cu.cuMemHostAlloc(&m->memory, m->capacity, CU_MEMHOSTALLOC_PORTABLE);
    if (code == CUDA_ERROR_OUT_OF_MEMORY) {
      static_cast<void>(trim());  // what it cannot free shows in the second try
      code = cu.cuMemHostAlloc(&m->memory, m->capacity, CU_MEMHOSTALLOC_PORTABLE);
    }
    if (code != CUDA_SUCCESS) {
      const std::string what =
          "cuMemHostAlloc of " + std::to_string(m->capacity) + " bytes of pinned host memory";
      erase(m);
      return check(code, what.c_str());
    }
    if (auto s = check(cu.cuEventCreate(&m->done, CU_EVENT_DISABLE_TIMING), "cuEventCreate");
        !s.ok()) {
      static_cast<void>(cu.cuMemFreeHost(m->memory));
      erase(m);
      return s;
    }
    return m;
  }

  // Frees a claimed block. On failure it stays, idle.
  jaxbridge::status destroy(staging_memory* m) {
    const driver& cu = driver::get();
    if (auto s = check(cu.cuMemFreeHost(m->memory), "cuMemFreeHost"); !s.ok()) {
      put_back(m);
      return s;
    }
    const CUevent done = m->done;
    erase(m);
    return check(cu.cuEventDestroy(done), "cuEventDestroy");
  }

  void erase(staging_memory* m) noexcept {
    const std::lock_guard<std::mutex> hold(lock_);
    total_ -= m->capacity;
    blocks_.erase(std::find_if(blocks_.begin(), blocks_.end(),
                               [m](const auto& entry) { return entry.get() == m; }));
  }

  std::uint64_t last_ticket() noexcept {
    const std::lock_guard<std::mutex> hold(lock_);
    return last_ticket_;
  }

  std::size_t count(condition state) noexcept {
    const std::lock_guard<std::mutex> hold(lock_);
    return static_cast<std::size_t>(std::count_if(
        blocks_.begin(), blocks_.end(), [state](const auto& m) { return m->state == state; }));
  }

  // The device has finished all its work: the lost are idle.
  void recover() noexcept {
    const std::lock_guard<std::mutex> hold(lock_);
    for (const auto& m : blocks_) {
      if (m->state == condition::lost) m->state = condition::idle;
    }
  }

  std::mutex lock_;
  std::vector<std::unique_ptr<staging_memory>> blocks_;  // guarded by lock_
  std::size_t total_ = 0;                                // bytes of blocks_; guarded by lock_
  std::uint64_t last_ticket_ = 0;                        // guarded by lock_
};

// Never destroyed: blocks may come back while static destructors run.
staging_pool& pool_of(int ordinal) {
  static auto* pools = new std::array<staging_pool, max_devices>;
  return (*pools)[static_cast<std::size_t>(ordinal)];
}

}  // namespace

std::size_t staging_layout::add(std::size_t bytes) noexcept {
  const std::size_t offset = size_;
  const std::size_t room = round_up(std::max<std::size_t>(bytes, 1), staging_alignment);
  size_ = room > no_size - offset ? no_size : offset + room;
  return offset;
}

result<staging_block> staging_block::lease(int ordinal, stream_ref stream, std::size_t bytes) {
  if (auto s = check_ordinal(ordinal); !s.ok()) return s;
  const std::size_t capacity = block_size(bytes);
  if (capacity == no_size) {
    return jaxbridge::status(status_code::resource_exhausted,
                             "arguments and results of a call on host memory exceed the address "
                             "space");
  }
  if (is_capturing(stream)) {
    return jaxbridge::status(status_code::failed_precondition,
                             "a call on host memory cannot be part of a CUDA graph: it waits for "
                             "the stream; do not capture it (graph=\"off\")");
  }
  const result<context_scope> scope = context_scope::enter(ordinal);
  if (!scope.ok()) return scope.error();
  const result<staging_memory*> m = pool_of(ordinal).get(capacity);
  if (!m.ok()) return m.error();
  return staging_block(m.value(), stream, bytes, ordinal);
}

staging_block::~staging_block() {
  if (memory_ == nullptr) return;
  staging_pool& pool = pool_of(ordinal_);
  if (exiting()) {
    pool.give_back(memory_, condition::lost);
    return;
  }
  condition state = condition::idle;
  if (memory_->enqueued) {
    // A failure to enter is not yet one of the record: the caller has the context current as a
    // rule.
    const result<context_scope> scope = context_scope::enter(ordinal_);
    const driver& cu = driver::get();
    memory_->enqueued = false;
    memory_->pending = cu.cuEventRecord(memory_->done, native(stream_)) == CUDA_SUCCESS;
    // Without the event only the stream itself can tell, and if it cannot, nobody may have the
    // memory: the device might still write to it.
    if (!memory_->pending && cu.cuStreamSynchronize(native(stream_)) != CUDA_SUCCESS) {
      state = condition::lost;
    }
  }
  pool.give_back(memory_, state);
}

std::byte* staging_block::at(std::size_t offset) const noexcept {
  return static_cast<std::byte*>(memory_->memory) + offset;
}

jaxbridge::status staging_block::check_piece(std::size_t offset, std::size_t bytes) const {
  if (offset <= size_ && bytes <= size_ - offset) return {};
  return {status_code::out_of_range, "staging: " + std::to_string(bytes) + " bytes at " +
                                         std::to_string(offset) + " of a block of " +
                                         std::to_string(size_)};
}

jaxbridge::status staging_block::to_host(std::size_t offset, const void* device,
                                         std::size_t bytes) {
  if (auto s = check_piece(offset, bytes); !s.ok()) return s;
  if (bytes == 0) return {};
  const result<context_scope> scope = context_scope::enter(ordinal_);
  if (!scope.ok()) return scope.error();
  memory_->enqueued = true;
  return check(driver::get().cuMemcpyDtoHAsync(at(offset), reinterpret_cast<CUdeviceptr>(device),
                                               bytes, native(stream_)),
               "cuMemcpyDtoHAsync");
}

jaxbridge::status staging_block::wait() {
  const result<context_scope> scope = context_scope::enter(ordinal_);
  if (!scope.ok()) return scope.error();
  auto s = check(driver::get().cuStreamSynchronize(native(stream_)), "cuStreamSynchronize");
  if (s.ok()) memory_->enqueued = false;
  return s;
}

jaxbridge::status staging_block::to_device(void* device, std::size_t offset, std::size_t bytes) {
  if (auto s = check_piece(offset, bytes); !s.ok()) return s;
  if (bytes == 0) return {};
  const result<context_scope> scope = context_scope::enter(ordinal_);
  if (!scope.ok()) return scope.error();
  memory_->enqueued = true;
  return check(driver::get().cuMemcpyHtoDAsync(reinterpret_cast<CUdeviceptr>(device), at(offset),
                                               bytes, native(stream_)),
               "cuMemcpyHtoDAsync");
}

staging_statistics staging_usage(int ordinal) {
  return check_ordinal(ordinal).ok() ? pool_of(ordinal).usage() : staging_statistics{};
}

void set_staging_limit(std::size_t bytes) noexcept {
  limit.store(bytes, std::memory_order_relaxed);
}

jaxbridge::status trim_staging(int ordinal) {
  if (auto s = check_ordinal(ordinal); !s.ok()) return s;
  const result<context_scope> scope = context_scope::enter(ordinal);
  if (!scope.ok()) return scope.error();
  return pool_of(ordinal).trim();
}

}  // namespace jaxbridge::cuda

// SPDX-License-Identifier: Apache-2.0
#include "core/memory/last_use.hpp"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <new>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "core/cuda/capture_mode.hpp"
#include "core/cuda/context.hpp"
#include "core/cuda/driver_types.hpp"
#include "core/cuda/event.hpp"
#include "core/cuda/stream_order.hpp"
#include "core/exit.hpp"

namespace jaxbridge::memory {
namespace {

struct use {
  stream_ref stream;
  int ordinal = 0;
  void* owner = nullptr;
  void (*release)(void* owner) noexcept = nullptr;
  std::optional<cuda::event> end;  // nothing: a capture forbade to record it
};

// Whoever asks may be another thread, and has another default stream of its own: the legacy stream
// waits for those of all threads.
stream_ref for_any_thread(stream_ref stream) noexcept {
  return stream.address() <= cuda::CU_STREAM_PER_THREAD ? stream_ref::legacy_default() : stream;
}

enum class state { done, running, lost };

// One step of a use, without any lock: marks its end where that was not possible before, and looks
// whether the device is past it.
state advance(use& u) {
  // A capture of another thread that forbids questions to all threads is not to fail for this one.
  const cuda::relaxed_capture_scope relaxed;
  if (!u.end) {
    const auto scope = cuda::context_scope::enter(u.ordinal);
    if (!scope.ok()) return state::lost;
    if (cuda::is_capturing(u.stream)) return state::running;
    // What ends on an idle stream needs no event. The legacy stream is idle where those are that it
    // waits for.
    const result<bool> idle = cuda::is_idle(u.stream);
    if (!idle.ok()) return state::lost;
    if (idle.value()) return state::done;
    result<cuda::event> marked = cuda::event::record(u.stream);
    if (!marked.ok()) return state::lost;
    u.end = std::move(marked).value();
  }
  const result<bool> done = u.end->done();
  if (!done.ok()) return state::lost;
  return done.value() ? state::done : state::running;
}

struct kept_uses {
  std::mutex lock;
  std::condition_variable more;
  std::vector<use> uses;    // guarded by lock
  std::size_t asked = 0;    // those that settle() has taken out; guarded by lock
  bool has_thread = false;  // guarded by lock
};

// Never destroyed: its thread waits in it until the process ends.
kept_uses& kept() {
  static auto* const all = new kept_uses;
  return *all;
}

// Uses are taken out for the question and put back: neither the driver nor `release` is called
// under the lock.
std::size_t settle() {
  kept_uses& all = kept();
  std::vector<use> mine;
  {
    const std::lock_guard<std::mutex> hold(all.lock);
    mine.swap(all.uses);
    all.asked += mine.size();
  }
  std::vector<use> running;
  for (use& u : mine) {
    switch (advance(u)) {
      case state::done:
        u.release(u.owner);
        break;
      case state::running:
        running.push_back(std::move(u));
        break;
      case state::lost:
        break;
    }
  }
  const std::lock_guard<std::mutex> hold(all.lock);
  for (use& u : running) all.uses.push_back(std::move(u));
  all.asked -= mine.size();
  return all.uses.size() + all.asked;
}

// Nothing tells when an event is done without a thread that waits in the driver, and such a wait
// spins. So the thread looks, less and less often, and only while there is something to look for.
void watch() {
  using std::chrono::microseconds;
  constexpr microseconds shortest{200};
  constexpr microseconds longest{5000};
  kept_uses& all = kept();
  microseconds pause = shortest;
  for (;;) {
    {
      std::unique_lock<std::mutex> hold(all.lock);
      if (all.uses.empty()) {
        all.more.wait(hold, [&all] { return !all.uses.empty(); });
        pause = shortest;
      }
    }
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, longest);
    const python_use permit;
    if (!permit.granted()) return;
    settle();
  }
}

void keep(use u) {
  kept_uses& all = kept();
  bool start = false;
  {
    const std::lock_guard<std::mutex> hold(all.lock);
    all.uses.push_back(std::move(u));
    start = !std::exchange(all.has_thread, true);
  }
  if (start) {
    try {
      std::thread(watch).detach();
    } catch (const std::system_error&) {
      // No thread to be had: later calls release what is due.
      const std::lock_guard<std::mutex> hold(all.lock);
      all.has_thread = false;
    }
  }
  all.more.notify_one();
}

}  // namespace

void release_after_last_use(stream_ref stream, int ordinal, void* owner,
                            void (*release)(void* owner) noexcept) noexcept {
  // Releasing may need Python, and asking the device needs the driver: both end with the process.
  const python_use permit;
  if (!permit.granted()) return;
  use u{for_any_thread(stream), ordinal, owner, release, std::nullopt};
  switch (advance(u)) {
    case state::done:
      release(owner);
      break;
    case state::running:
      keep(std::move(u));
      break;
    case state::lost:
      break;
  }
}

std::size_t release_unused() noexcept {
  const python_use permit;
  return permit.granted() ? settle() : 0;
}

void forget_uses_in_child() noexcept {
  // The lock may have been held by a thread that is not there any more: a new object in its place.
  new (&kept()) kept_uses;
}

}  // namespace jaxbridge::memory

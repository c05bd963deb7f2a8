// SPDX-License-Identifier: Apache-2.0
#include "core/turn.hpp"

namespace jaxbridge {
namespace {

using clock = std::chrono::steady_clock;

// A function that is longer than the patience gains nothing by turns, and would cost each of its
// calls that much. So after some waits in vain a thread does not wait for a while. One alone may
// have been of a call that was slow by chance; who then goes on beside others makes them slow.
constexpr int waits_in_vain = 3;
constexpr int calls_without_waiting = 32;

constinit thread_local int depth = 0;
constinit thread_local bool has_turn = false;
constinit thread_local int in_vain = 0;  // in a row
constinit thread_local int impatient_calls = 0;

void pause() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

turns& turns::for_gil() noexcept {
  // Longer than most functions that only start work on a device.
  static constinit turns those{std::chrono::microseconds(100)};
  return those;
}

void turns::forget_other_threads() noexcept {
  if (!has_turn) taken_.store(false);
}

bool turns::take() noexcept {
  return !taken_.load(std::memory_order_relaxed) &&
         !taken_.exchange(true, std::memory_order_acquire);
}

bool turns::wait() noexcept {
  if (take()) {
    in_vain = 0;
    return true;
  }
  if (impatient_calls > 0) {
    --impatient_calls;
    return false;
  }
  const clock::time_point end = clock::now() + patience_;
  do {
    for (int i = 0; i < 8; ++i) pause();
    if (take()) {
      in_vain = 0;
      return true;
    }
  } while (clock::now() < end);
  if (++in_vain == waits_in_vain) {
    in_vain = 0;
    impatient_calls = calls_without_waiting;
  }
  return false;
}

turn::turn(turns& of) noexcept : of_(of), is_ours_(depth++ == 0 && of.wait()) {
  if (is_ours_) has_turn = true;
}

turn::~turn() {
  --depth;
  if (!is_ours_) return;
  has_turn = false;
  of_.taken_.store(false, std::memory_order_release);
}

}  // namespace jaxbridge

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
constinit thread_local int in_vain = 0;  // in a row
constinit thread_local int impatient_calls = 0;

bool is_free(std::uint64_t seen) noexcept { return seen % 2 == 0; }

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
  if (depth == 0 && !is_free(changes_.load())) changes_.fetch_add(1);
}

// `seen` is what was read last; where this fails, what is there now.
bool turns::take(std::uint64_t& seen) noexcept {
  return is_free(seen) && changes_.compare_exchange_strong(
                              seen, seen + 1, std::memory_order_acquire, std::memory_order_relaxed);
}

bool turns::take() noexcept {
  std::uint64_t seen = changes_.load(std::memory_order_relaxed);
  if (take(seen)) return true;
  if (impatient_calls > 0) {
    --impatient_calls;
    return false;
  }
  std::uint64_t at_work = seen;
  clock::time_point end = clock::now() + patience_;
  for (;;) {
    for (int i = 0; i < 8; ++i) pause();
    seen = changes_.load(std::memory_order_relaxed);
    if (take(seen)) {
      in_vain = 0;
      return true;
    }
    const clock::time_point now = clock::now();
    if (seen != at_work) {
      at_work = seen;
      end = now + patience_;
    } else if (now >= end) {
      if (++in_vain == waits_in_vain) {
        in_vain = 0;
        impatient_calls = calls_without_waiting;
      }
      return false;
    }
  }
}

turn::turn(turns& of) noexcept : of_(of), is_ours_(depth++ == 0 && of.take()) {}

turn::~turn() {
  --depth;
  if (is_ours_) of_.changes_.fetch_add(1, std::memory_order_release);
}

}  // namespace jaxbridge

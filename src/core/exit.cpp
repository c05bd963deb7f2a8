// SPDX-License-Identifier: Apache-2.0
#include "core/exit.hpp"

#include <atomic>
#include <thread>

namespace jaxbridge {
namespace {
// Constant-initialised and trivially destroyed: readable before main and after every destructor.
constinit std::atomic<bool> closing{false};
constinit std::atomic<bool> exit_begun{false};
constinit std::atomic<int> uses{0};
// Those of this thread: what a child of fork() has of them.
constinit thread_local int own_uses = 0;
}  // namespace

bool begin_exit(std::chrono::milliseconds patience) noexcept {
  closing.store(true);
  // Polled: an atomic wait has no limit in C++20, and this happens once.
  const auto end = std::chrono::steady_clock::now() + patience;
  while (uses.load() > 0 && std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  exit_begun.store(true);
  return uses.load() == 0;
}

bool exiting() noexcept { return exit_begun.load(std::memory_order_relaxed); }

// Sequentially consistent on both sides: either the use is seen by begin_exit() or closing by the
// use.
python_use::python_use() noexcept {
  uses.fetch_add(1);
  if (closing.load()) {
    granted_ = false;
    uses.fetch_sub(1);
  } else {
    ++own_uses;
  }
}

python_use::~python_use() {
  if (!granted_) return;
  --own_uses;
  uses.fetch_sub(1);
}

void after_fork_in_child() noexcept { uses.store(own_uses); }

void cancel_exit_for_testing() noexcept {
  closing.store(false);
  exit_begun.store(false);
}

}  // namespace jaxbridge

// SPDX-License-Identifier: Apache-2.0
// Whether the process is ending.
#include "core/exit.hpp"

#include <atomic>

namespace jaxbridge {
namespace {
// Constant-initialised and trivially destroyed: readable before main and after every destructor.
constinit std::atomic<bool> exit_begun{false};
}  // namespace

void begin_exit() noexcept { exit_begun.store(true, std::memory_order_relaxed); }

bool exiting() noexcept { return exit_begun.load(std::memory_order_relaxed); }

void cancel_exit_for_testing() noexcept { exit_begun.store(false, std::memory_order_relaxed); }

}  // namespace jaxbridge

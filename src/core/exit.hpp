// SPDX-License-Identifier: Apache-2.0
// Whether the process is ending: from then on nothing of ours calls Python or CUDA.
#pragma once

namespace jaxbridge {

/// Says that the process is ending. Called once, from Python's atexit, before anything that we call
/// into is torn down; there is no way back. Any thread.
void begin_exit() noexcept;

/// One relaxed load. Destructors ask before they touch CUDA and then leave their object where it
/// is: the driver may be gone already, and a leak is better than a crash.
[[nodiscard]] bool exiting() noexcept;

/// Takes begin_exit() back, so that a test can go on.
void cancel_exit_for_testing() noexcept;

}  // namespace jaxbridge

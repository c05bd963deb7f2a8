// SPDX-License-Identifier: Apache-2.0
// Whether the process is ending: from then on nothing of ours calls Python or CUDA.
#pragma once

#include <chrono>

namespace jaxbridge {

/// Ends the process's use of Python and CUDA, in two steps: from now on python_use is refused, then
/// what was granted before is waited for, `patience` at the most, and then exiting() is true.
/// Called once, from Python's atexit, before anything that we call into is torn down, without the
/// GIL; there is no way back. Returns whether all of them have ended.
bool begin_exit(std::chrono::milliseconds patience = {}) noexcept;

/// One relaxed load. Destructors ask before they touch CUDA and then leave their object where it
/// is: the driver may be gone already, and a leak is better than a crash.
[[nodiscard]] bool exiting() noexcept;

/// The right of this thread to use Python, from before it asks for the GIL until it has given it
/// back. A thread that asked for the GIL without it could still wait when the interpreter ends, and
/// Python ends such threads in the middle of our code.
class [[nodiscard]] python_use {
 public:
  python_use() noexcept;
  ~python_use();
  python_use(const python_use&) = delete;
  python_use& operator=(const python_use&) = delete;

  /// False where the process is ending: then Python must not be called.
  [[nodiscard]] bool granted() const noexcept { return granted_; }

 private:
  bool granted_ = true;
};

/// In the child of a fork(): the other threads are not there, and their uses never end.
void after_fork_in_child() noexcept;

/// Takes begin_exit() back, so that a test can go on.
void cancel_exit_for_testing() noexcept;

}  // namespace jaxbridge

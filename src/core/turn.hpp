// SPDX-License-Identifier: Apache-2.0
// Calls on several devices take turns for the GIL awake.
#pragma once

#include <atomic>
#include <chrono>

namespace jaxbridge {

/// What one call at a time has.
class turns {
 public:
  constexpr explicit turns(std::chrono::microseconds patience) noexcept : patience_(patience) {}

  /// Those of this process, for the GIL.
  static turns& for_gil() noexcept;

  /// In the child of a fork(), where no other thread is there to end its own.
  void forget_other_threads() noexcept;

 private:
  friend class turn;

  bool take() noexcept;
  bool wait() noexcept;

  const std::chrono::microseconds patience_;
  std::atomic<bool> taken_{false};
};

/// Asked for before the GIL, and given up after it, by calls of functions that hardly do more than
/// start work on a device. A thread that waits for the GIL itself sleeps, at each of the function's
/// steps that lets another thread have it, and to wake it takes longer than such functions do; here
/// it waits awake.
///
/// It is advice and no lock. Who has waited for as long as the patience (a function computes for
/// long, or waits for this very call; or many wait) goes on without a turn; where that happens
/// again and again, the thread's next calls take a free turn or none. A call inside a call of the
/// same thread has the outer one's.
class [[nodiscard]] turn {
 public:
  explicit turn(turns& of = turns::for_gil()) noexcept;
  ~turn();
  turn(const turn&) = delete;
  turn& operator=(const turn&) = delete;

  [[nodiscard]] bool is_ours() const noexcept { return is_ours_; }

 private:
  turns& of_;
  bool is_ours_;
};

}  // namespace jaxbridge

// SPDX-License-Identifier: Apache-2.0
// The primary context of a device: found once, made current for a scope.
#pragma once

#include <jaxbridge/status.hpp>
#include <utility>

#include "core/cuda/driver_types.hpp"

namespace jaxbridge::cuda {

/// Ordinals 0 to max_devices - 1 are served: what is kept per device stands in arrays of that size.
inline constexpr int max_devices = 64;

/// Whether `ordinal` is in the range served; else an error that says so.
[[nodiscard]] jaxbridge::status check_ordinal(int ordinal);

/// The primary context of a device, the one that XLA and the CUDA runtime use. Retained at the
/// first call for that device and then kept until the process ends; later calls are one atomic
/// load. Any thread.
[[nodiscard]] result<CUcontext> primary_context(int ordinal);

/// The device whose primary context this is, or -1: another library made this context. Any thread.
/// A context met before is found by reading atomics alone.
[[nodiscard]] result<int> device_of(CUcontext context);

/// Makes a context current for this thread, as long as the object lives, and restores what was
/// current before: also where that was the context of another library or none, and where the code
/// in between has left a third one. It ends in the thread that made it, innermost first.
class [[nodiscard]] context_scope {
 public:
  [[nodiscard]] static result<context_scope> enter(int ordinal);
  [[nodiscard]] static result<context_scope> enter(CUcontext context);

  context_scope(context_scope&& other) noexcept
      : previous_(other.previous_),
        pushed_(other.pushed_),
        active_(std::exchange(other.active_, false)) {}
  context_scope(const context_scope&) = delete;
  context_scope& operator=(const context_scope&) = delete;
  context_scope& operator=(context_scope&&) = delete;
  ~context_scope();

 private:
  context_scope(CUcontext previous, bool pushed) noexcept : previous_(previous), pushed_(pushed) {}

  CUcontext previous_;  // not owned
  bool pushed_;         // whether an entry of ours lies on the thread's context stack
  bool active_ = true;  // false once moved from
};

/// The context that is current for this thread; null: none.
[[nodiscard]] result<CUcontext> current_context();

/// Makes a context, or none, current for this thread, where it is not.
[[nodiscard]] jaxbridge::status make_current(CUcontext context);

/// Gives every primary context back. No other thread may use CUDA meanwhile.
void release_primary_contexts_for_testing();

}  // namespace jaxbridge::cuda

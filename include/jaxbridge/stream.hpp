// SPDX-License-Identifier: Apache-2.0
// A CUDA stream that somebody else owns.
#pragma once

#include <cstddef>
#include <cstdint>

namespace jaxbridge {
inline namespace v1 {

/// A CUstream or cudaStream_t; never owns it. Null is CUDA's legacy default stream, and what a call
/// on the CPU carries. Not constructible from the literals 0 and nullptr: a default stream is asked
/// for by name.
class stream_ref {
 public:
  constexpr stream_ref() noexcept = default;
  constexpr explicit stream_ref(void* handle) noexcept : handle_(handle) {}
  stream_ref(std::nullptr_t) = delete;
  stream_ref(int) = delete;

  [[nodiscard]] static constexpr stream_ref legacy_default() noexcept { return {}; }

  [[nodiscard]] constexpr void* handle() const noexcept { return handle_; }
  [[nodiscard]] std::uintptr_t address() const noexcept {
    return reinterpret_cast<std::uintptr_t>(handle_);
  }

  friend constexpr bool operator==(const stream_ref&, const stream_ref&) = default;

 private:
  void* handle_ = nullptr;
};

}  // namespace v1
}  // namespace jaxbridge

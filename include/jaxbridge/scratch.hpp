// SPDX-License-Identifier: Apache-2.0
// XLA's memory for the time of one call.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <string>
#include <vector>

#include "abi/xla_ffi.hpp"
#include "device.hpp"
#include "frame.hpp"
#include "status.hpp"

namespace jaxbridge {
inline namespace v1 {

/// Blocks of memory that end with the call: on CUDA of XLA's allocator, for work on the call's
/// stream, on the CPU of the host's. Not for functions that are captured: XLA may give the memory
/// to others before a replay (take a `workspace`).
class scratch {
 public:
  scratch(const abi::xla_ffi::call_frame& frame, platform where) noexcept
      : frame_(&frame), where_(where) {}
  scratch(const scratch&) = delete;
  scratch& operator=(const scratch&) = delete;
  ~scratch() {
    for (const block& b : blocks_) give_back(b);
  }

  /// At least `bytes`, aligned to 64; null for 0.
  [[nodiscard]] result<void*> allocate(std::size_t bytes) {
    namespace ffi = abi::xla_ffi;
    if (bytes == 0) return nullptr;
    void* data = nullptr;
    std::string why;
    if (where_ == platform::cpu) {
      data = bytes < max_bytes ? std::aligned_alloc(alignment, rounded(bytes)) : nullptr;
    } else if (!ffi::has_slot(frame_->api->struct_size, offsetof(ffi::api, device_memory_free))) {
      return status(status_code::unimplemented, "this jaxlib gives external calls no memory");
    } else {
      // 16 is the most that XLA lets one ask for; what its allocator gives has more.
      ffi::device_memory_allocate_args args{sizeof(args), nullptr, frame_->ctx, bytes, 16, nullptr};
      ffi::error* const error = frame_->api->device_memory_allocate(&args);
      if (error != nullptr) why = ": " + detail::consume(*frame_->api, error);
      data = error == nullptr ? args.data : nullptr;
    }
    if (data == nullptr) {
      return status(status_code::resource_exhausted,
                    "no " + std::to_string(bytes) + " bytes of scratch memory for this call" + why);
    }
    blocks_.push_back({data, bytes});
    return data;
  }

 private:
  struct block {
    void* data;
    std::size_t bytes;
  };

  static constexpr std::size_t alignment = 64;
  static constexpr std::size_t max_bytes = static_cast<std::size_t>(-1) / 2;
  static constexpr std::size_t rounded(std::size_t bytes) noexcept {
    return (bytes + alignment - 1) / alignment * alignment;
  }

  void give_back(const block& b) noexcept {
    namespace ffi = abi::xla_ffi;
    if (where_ == platform::cpu) {
      std::free(b.data);
      return;
    }
    ffi::device_memory_free_args args{sizeof(args), nullptr, frame_->ctx, b.bytes, b.data};
    // Nobody can be told that XLA did not take its memory.
    if (ffi::error* error = frame_->api->device_memory_free(&args); error != nullptr) {
      (void)detail::consume(*frame_->api, error);
    }
  }

  const abi::xla_ffi::call_frame* frame_;
  platform where_;
  std::vector<block> blocks_;
};

}  // namespace v1
}  // namespace jaxbridge

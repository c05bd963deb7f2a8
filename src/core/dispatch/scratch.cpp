// SPDX-License-Identifier: Apache-2.0
#include "core/dispatch/scratch.hpp"

#include <string>

namespace jaxbridge::dispatch {
namespace {

namespace ffi = abi::xla_ffi;

// The most that XLA lets one ask for; what its allocator gives has more.
constexpr std::size_t alignment = 16;

}  // namespace

result<void*> scratch::allocate(std::size_t bytes) {
  if (bytes == 0) return nullptr;
  const std::lock_guard lock(mutex_);
  if (api_ == nullptr) {
    return status(status_code::failed_precondition,
                  "scratch memory is there while the call runs, and it has ended");
  }
  if (!ffi::has_slot(api_->struct_size, offsetof(ffi::api, device_memory_free))) {
    return status(status_code::unimplemented, "this jaxlib gives external calls no memory");
  }
  ffi::device_memory_allocate_args args{sizeof(args), nullptr, context_, bytes, alignment, nullptr};
  if (ffi::error* error = api_->device_memory_allocate(&args); error != nullptr) {
    return status(
        status_code::resource_exhausted,
        "XLA has no " + std::to_string(bytes) + " bytes for this call: " + consume(*api_, error));
  }
  if (args.data == nullptr) {
    return status(status_code::resource_exhausted,
                  "XLA has no " + std::to_string(bytes) + " bytes for this call");
  }
  blocks_.emplace(args.data, bytes);
  return args.data;
}

bool scratch::free(void* block) {
  const std::lock_guard lock(mutex_);
  const auto found = blocks_.find(block);
  if (api_ == nullptr || found == blocks_.end()) return false;
  give_back(block, found->second);
  blocks_.erase(found);
  return true;
}

std::vector<std::pair<void*, std::size_t>> scratch::live() const {
  const std::lock_guard lock(mutex_);
  return {blocks_.begin(), blocks_.end()};
}

void scratch::end() noexcept {
  const std::lock_guard lock(mutex_);
  if (api_ == nullptr) return;
  for (const auto& [block, bytes] : blocks_) give_back(block, bytes);
  blocks_.clear();
  api_ = nullptr;
}

// The lock is held.
void scratch::give_back(void* block, std::size_t bytes) noexcept {
  ffi::device_memory_free_args args{sizeof(args), nullptr, context_, bytes, block};
  // Nobody can be told that XLA did not take its memory.
  if (ffi::error* error = api_->device_memory_free(&args); error != nullptr) {
    (void)consume(*api_, error);
  }
}

}  // namespace jaxbridge::dispatch

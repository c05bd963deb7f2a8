// SPDX-License-Identifier: Apache-2.0
// A DLPack tensor of another library: owned, and turned into an array.
#pragma once

#include <utility>

#include "core/memory/array.hpp"
#include "jaxbridge/abi/dlpack.hpp"
#include "jaxbridge/status.hpp"

namespace jaxbridge::memory {

/// Owns a managed tensor of either form, or nothing, and calls its deleter once, at its end. That
/// is the producer's code: it may take the GIL, and runs on the thread on which this object ends.
class dlpack_tensor {
 public:
  dlpack_tensor() noexcept = default;
  explicit dlpack_tensor(abi::dlpack::managed_tensor* owned) noexcept : unversioned_(owned) {}
  explicit dlpack_tensor(abi::dlpack::managed_tensor_versioned* owned) noexcept
      : versioned_(owned) {}
  dlpack_tensor(dlpack_tensor&& other) noexcept
      : unversioned_(std::exchange(other.unversioned_, nullptr)),
        versioned_(std::exchange(other.versioned_, nullptr)) {}
  dlpack_tensor& operator=(dlpack_tensor&& other) noexcept {
    std::swap(unversioned_, other.unversioned_);
    std::swap(versioned_, other.versioned_);
    return *this;
  }
  dlpack_tensor(const dlpack_tensor&) = delete;
  dlpack_tensor& operator=(const dlpack_tensor&) = delete;
  ~dlpack_tensor();

  /// What the tensor says, checked; of a major version that is not ours nothing is read. An
  /// unversioned tensor cannot say that it is read-only, and counts as writable.
  [[nodiscard]] result<array> describe() const;

 private:
  abi::dlpack::managed_tensor* unversioned_ = nullptr;
  abi::dlpack::managed_tensor_versioned* versioned_ = nullptr;
};

/// The array that a tensor describes: `byte_offset` added to its address, null strides taken for
/// those of a dense row-major array. An error names what cannot be taken over: a device or element
/// type that we don't know (with its code), vectors of lanes, packed elements, an impossible shape.
[[nodiscard]] result<array> describe(const abi::dlpack::tensor& t, bool readonly);

}  // namespace jaxbridge::memory

// SPDX-License-Identifier: Apache-2.0
// Memory of ours as a DLPack tensor that another library keeps as long as it likes.
#pragma once

#include <cstdint>
#include <span>

#include "core/memory/array.hpp"
#include "jaxbridge/abi/dlpack.hpp"
#include "jaxbridge/device.hpp"
#include "jaxbridge/dtype.hpp"
#include "jaxbridge/status.hpp"

namespace jaxbridge::memory {

/// Memory, and who is told when nobody uses the tensor any more.
struct dlpack_source {
  void* data = nullptr;
  jaxbridge::dtype dtype = jaxbridge::dtype::invalid;
  std::span<const std::int64_t> shape;  // copied
  abi::dlpack::device device{abi::dlpack::device_cpu, 0};
  bool readonly = false;
  void* owner = nullptr;
  /// Called once with `owner`, by the tensor's deleter: on any thread, at any time, also at exit.
  /// Null: nobody is told. Not called where the export fails.
  void (*release)(void* owner) noexcept = nullptr;
  /// In bytes, one for each extent; copied. Empty: those of a dense row-major array.
  std::span<const std::int64_t> strides;
  /// The consumer gets memory that nobody else has.
  bool is_copied = false;
};

/// Where DLPack says that memory of `d` is. Its CPU has no ordinals: XLA's virtual devices share
/// one.
[[nodiscard]] constexpr abi::dlpack::device dlpack_device(const jaxbridge::device& d) noexcept {
  if (d.platform == platform::cuda) return {abi::dlpack::device_cuda, d.ordinal};
  return {abi::dlpack::device_cpu, 0};
}

/// The same for memory that somebody else owns.
[[nodiscard]] constexpr abi::dlpack::device dlpack_device(memory_kind kind, int ordinal) noexcept {
  switch (kind) {
    case memory_kind::device:
      return {abi::dlpack::device_cuda, ordinal};
    case memory_kind::pinned:
      return {abi::dlpack::device_cuda_host, 0};
    case memory_kind::managed:
      return {abi::dlpack::device_cuda_managed, ordinal};
    case memory_kind::host:
      break;
  }
  return {abi::dlpack::device_cpu, 0};
}

/// A tensor with the flag for read-only memory. It belongs to the caller, who gives it to a
/// consumer or calls its deleter. An error for element types that DLPack has no code for, and for
/// strides that are no whole number of elements.
[[nodiscard]] result<abi::dlpack::managed_tensor_versioned*> export_versioned(
    const dlpack_source& source) noexcept;

/// The same for consumers from before DLPack 1.0, which cannot be told that memory is read-only.
[[nodiscard]] result<abi::dlpack::managed_tensor*> export_unversioned(
    const dlpack_source& source) noexcept;

}  // namespace jaxbridge::memory

// SPDX-License-Identifier: Apache-2.0
// The handlers that XLA calls: one for each platform, one that may be captured, the end of an
// update, and the check before handlers of others.
#pragma once

#include "jaxbridge/abi/xla_ffi.hpp"

namespace jaxbridge::dispatch {

/// Registered for platform "cpu".
abi::xla_ffi::error* call_cpu(abi::xla_ffi::call_frame* frame) noexcept;
/// Registered for platform "CUDA".
abi::xla_ffi::error* call_cuda(abi::xla_ffi::call_frame* frame) noexcept;
/// The same with the command-buffer trait. Its own symbol, since a trait can only come from the
/// handler's own metadata.
abi::xla_ffi::error* call_cuda_capturable(abi::xla_ffi::call_frame* frame) noexcept;

/// Registered for platform "CUDA": the end of programs that update memory of others in place.
abi::xla_ffi::error* enqueued_cuda(abi::xla_ffi::call_frame* frame) noexcept;

/// Registered for the platforms that they name: the check of memory that a handler of others' is to
/// update in place.
abi::xla_ffi::error* check_external_cpu(abi::xla_ffi::call_frame* frame) noexcept;
abi::xla_ffi::error* check_external_cuda(abi::xla_ffi::call_frame* frame) noexcept;

/// The FFI version (minor) of the runtime that asked for our metadata last; -1 before any did, and
/// where the runtime does not say (0.1).
[[nodiscard]] int runtime_api_minor() noexcept;
/// The FFI version (minor) that we answered last; -1 before any runtime asked.
[[nodiscard]] int answered_api_minor() noexcept;

}  // namespace jaxbridge::dispatch

// SPDX-License-Identifier: Apache-2.0
// Owners of memory that a device may still be using when the host has let go of it.
#pragma once

#include <cstddef>
#include <jaxbridge/stream.hpp>

namespace jaxbridge::memory {

/// Calls `release(owner)` once, as soon as the device `ordinal` has done all that `stream` has now.
/// Where that is done already, it is called at once, on this thread; else on the thread of a later
/// call, or on one of ours. Never waits, and never fails: where the driver gives no answer, or the
/// process is ending, the owner is kept for good, since a leak is better than memory that is used
/// after it was freed.
///
/// Any thread, with or without the GIL. No lock is held over `release`.
void release_after_last_use(stream_ref stream, int ordinal, void* owner,
                            void (*release)(void* owner) noexcept) noexcept;

/// Releases what is due now; how many owners are still kept.
std::size_t release_unused() noexcept;

/// A child of fork() has no thread of ours; what its parent keeps is not the child's to release.
void forget_uses_in_child() noexcept;

}  // namespace jaxbridge::memory

// SPDX-License-Identifier: Apache-2.0
// Which memory of others JAX has now, and what its owner does first.
#pragma once

#include <cstddef>
#include <cstdint>
#include <jaxbridge/status.hpp>
#include <jaxbridge/stream.hpp>

namespace jaxbridge::memory {

/// Counts one more import of the memory at `address`. Any thread.
void add_import(std::uintptr_t address);

/// One import has ended, and its owner is let go. Any thread.
void remove_import(std::uintptr_t address) noexcept;

/// How many imports of the memory at `address` there are. Any thread.
[[nodiscard]] std::size_t live_imports(std::uintptr_t address);

/// What the owner of imported memory has enqueued on `stream` so far comes before JAX's next use of
/// it that goes through wait_for_owner(). Memory that is not imported is an error. A default stream
/// is that of the current context. Any thread.
[[nodiscard]] status owner_wrote(std::uintptr_t address, stream_ref stream);

/// Later work on `stream` waits for what owner_wrote() marked last, once; where it marked nothing,
/// for nothing. The host does not wait. Memory that is not imported is an error. Any thread, and it
/// is remembered which for owner_follows().
[[nodiscard]] status wait_for_owner(std::uintptr_t address, stream_ref stream);

/// Later work of the owner on `stream` waits for the programs that this thread has given to the
/// stream of the last wait_for_owner(). False where that was on another thread, or before the last
/// owner_wrote(): then what the program does after its fence may not have been enqueued. XLA
/// enqueues a program of one device whole, on the thread that calls it. The host does not wait.
[[nodiscard]] result<bool> owner_follows(std::uintptr_t address, stream_ref stream);

}  // namespace jaxbridge::memory

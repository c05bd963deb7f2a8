// SPDX-License-Identifier: Apache-2.0
// The order of JAX and the owner of memory around a program that updates it, without a look at the
// program's results.
#pragma once

#include <cstdint>
#include <jaxbridge/status.hpp>
#include <jaxbridge/stream.hpp>
#include <optional>

namespace jaxbridge::memory {

/// Begins an update by the program that this thread dispatches next: what JAX's stream gets from
/// now on comes after what the owner's has. The host does not wait. An error where the owner's
/// stream is being captured (failed_precondition). A default stream is that of the current context.
///
/// `owner`: nothing where no stream is known. Such an update has a number too: its program ends
/// like others, and must not pass for one around it. `number`: 0, or what this has returned for
/// other memory that the same program updates.
[[nodiscard]] result<std::uint64_t> begin_update(std::optional<stream_ref> owner, stream_ref jax,
                                                 std::uint64_t number);

/// This thread has enqueued a program as far as its end, on `stream`. What XLA adds after that are
/// copies, which do not fail.
void update_enqueued(stream_ref stream) noexcept;

/// Ends an update, after its program was dispatched: what the owner's stream gets from now on comes
/// after what JAX's has. The host does not wait. False, and nothing is done, where it is not known
/// that the whole program is enqueued: another thread may be at it, or it failed. An error where
/// that is on another stream than begin_update() was told.
[[nodiscard]] result<bool> end_update(std::uint64_t number, stream_ref owner);

}  // namespace jaxbridge::memory

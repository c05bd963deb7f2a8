// SPDX-License-Identifier: Apache-2.0
// Order between streams that others own.
#pragma once

#include <jaxbridge/status.hpp>
#include <jaxbridge/stream.hpp>

namespace jaxbridge::cuda {

/// Work enqueued on `to` from now on runs after what is on `from` now. The host does not wait. The
/// streams may be of different devices; a default stream is that of the current context, and the
/// same stream twice needs nothing. Any thread.
///
/// Under a capture this is part of it: from a captured stream it takes `to` into the capture. From
/// another one into a captured stream, or with a default stream for which is_capturing() holds, it
/// is an error that spoils the capture: ask before.
[[nodiscard]] jaxbridge::status order(stream_ref from, stream_ref to);

/// Whether a capture forbids to wait for `stream` or to query it: it is being captured (also where
/// that capture has failed), or it is the legacy stream while a stream that it would wait for is.
/// Asking harms no capture. False without a driver.
[[nodiscard]] bool is_capturing(stream_ref stream) noexcept;

/// Whether the device is past all that `stream` has. Not for a stream that is being captured: that
/// ends the capture.
[[nodiscard]] result<bool> is_idle(stream_ref stream);

}  // namespace jaxbridge::cuda

// SPDX-License-Identifier: Apache-2.0
// Work that was captured into a CUDA graph, and is launched again and again.
#pragma once

#include <jaxbridge/status.hpp>
#include <jaxbridge/stream.hpp>
#include <memory>
#include <utility>

#include "core/cuda/driver_types.hpp"

namespace jaxbridge::cuda {

/// An instantiated graph. Launched on one stream only, so that its launches are in order.
class graph {
 public:
  /// `resources` is what the work uses: it ends after the last launch.
  graph(int ordinal, stream_ref stream, CUgraphExec executable,
        std::shared_ptr<void> resources) noexcept
      : resources_(std::move(resources)),
        ordinal_(ordinal),
        stream_(stream),
        executable_(executable) {}
  graph(const graph&) = delete;
  graph& operator=(const graph&) = delete;
  /// Waits until the stream has run the launches.
  ~graph();

  /// Enqueues the work. Any thread.
  [[nodiscard]] status launch() const;

 private:
  std::shared_ptr<void> resources_;
  int ordinal_;
  stream_ref stream_;
  CUgraphExec executable_;  // owned
};

/// A capture in progress, on a stream of its own: what is enqueued there is recorded, and does not
/// run. Not on the stream that it is for, since other threads enqueue work of theirs there.
///
/// Calls of this thread that cannot be recorded fail; those of other threads are not affected.
class [[nodiscard]] capture {
 public:
  /// An error where no stream can be had; then nothing has begun.
  [[nodiscard]] static result<capture> begin(int ordinal);

  capture(capture&& other) noexcept
      : ordinal_(other.ordinal_), stream_(std::exchange(other.stream_, nullptr)) {}
  capture(const capture&) = delete;
  capture& operator=(const capture&) = delete;
  capture& operator=(capture&&) = delete;
  /// Ends the capture and drops what was recorded.
  ~capture();

  [[nodiscard]] stream_ref stream() const noexcept { return stream_ref(stream_); }

  /// Ends the capture. On an error, also of what was enqueued meanwhile, nothing of the work has
  /// run nor will. A capture without any work is an error: a function that does something does it
  /// elsewhere, where a replay would not.
  [[nodiscard]] result<std::shared_ptr<graph>> end(stream_ref launched_on,
                                                   std::shared_ptr<void> resources);

 private:
  capture(int ordinal, CUstream stream) noexcept : ordinal_(ordinal), stream_(stream) {}

  [[nodiscard]] result<CUgraph> stop() noexcept;

  int ordinal_;
  CUstream stream_;  // leased; null once it has ended
};

/// Sets what captures forbid this thread (`relaxed`: nothing, not even to allocate); returns what
/// was set before.
[[nodiscard]] result<CUstreamCaptureMode> exchange_capture_mode(CUstreamCaptureMode mode);

/// Destroys the streams that captures were made on, and that are kept for the next ones.
void trim_capture_streams();

}  // namespace jaxbridge::cuda

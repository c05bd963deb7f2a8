// SPDX-License-Identifier: Apache-2.0
// Work that was captured into a CUDA graph, and is launched again and again.
#pragma once

#include <cstddef>
#include <jaxbridge/status.hpp>
#include <jaxbridge/stream.hpp>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "core/cuda/driver_types.hpp"

namespace jaxbridge::cuda {

/// A copy within the memory of a device.
struct memory_copy {
  void* to = nullptr;
  const void* from = nullptr;
  std::size_t bytes = 0;
};

/// Copies that a graph makes before its work and after it. Those of 0 bytes are none.
struct copies_around {
  std::span<const memory_copy> before;
  std::span<const memory_copy> after;
};

/// An instantiated graph. Launched on one stream only, so that its launches are in order.
class graph {
 public:
  /// `resources` is what the work uses: it ends after the last launch. `copies` are the nodes of
  /// copies, in order, null for those of 0 bytes; they are of `source`.
  graph(int ordinal, stream_ref stream, CUgraphExec executable, CUgraph source,
        std::vector<CUgraphNode> copies, std::shared_ptr<void> resources) noexcept
      : resources_(std::move(resources)),
        ordinal_(ordinal),
        stream_(stream),
        executable_(executable),
        source_(source),
        copies_(std::move(copies)) {}
  graph(const graph&) = delete;
  graph& operator=(const graph&) = delete;
  /// Waits until the stream has run the launches.
  ~graph();

  /// Enqueues the work. Any thread.
  [[nodiscard]] status launch() const;

  /// The same with other memory copied, as many bytes each as when it was made. Any thread.
  [[nodiscard]] status launch(const copies_around& copies) const;

 private:
  std::shared_ptr<void> resources_;
  int ordinal_;
  stream_ref stream_;
  CUgraphExec executable_;  // owned
  CUgraph source_;          // owned; null where there are no copies
  std::vector<CUgraphNode> copies_;
  // From an update to its launch. Who waits for it would wait for the stream anyway.
  mutable std::mutex updating_;
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
                                                   std::shared_ptr<void> resources,
                                                   const copies_around& copies = {});

 private:
  capture(int ordinal, CUstream stream) noexcept : ordinal_(ordinal), stream_(stream) {}

  [[nodiscard]] result<CUgraph> stop() noexcept;

  int ordinal_;
  CUstream stream_;  // leased; null once it has ended
};

/// Destroys the streams that captures were made on, and that are kept for the next ones.
void trim_capture_streams();

}  // namespace jaxbridge::cuda

// SPDX-License-Identifier: Apache-2.0
// Pinned host memory through which a call on the CPU reads and writes device memory.
#pragma once

#include <cstddef>
#include <jaxbridge/status.hpp>
#include <jaxbridge/stream.hpp>
#include <utility>

namespace jaxbridge::cuda {

/// The alignment of every piece of a staging block.
inline constexpr std::size_t staging_alignment = 64;

/// Where the pieces of a block lie: add() each of them, then lease size_bytes().
class staging_layout {
 public:
  /// Room for `bytes`, which may be 0; the offset of it. Pieces never share an address.
  std::size_t add(std::size_t bytes) noexcept;

  /// The size of the block; the largest std::size_t after an overflow, which no lease() grants.
  [[nodiscard]] std::size_t size_bytes() const noexcept { return size_; }

 private:
  std::size_t size_ = 0;
};

namespace detail {
struct staging_memory;
}

/// A piece of pinned host memory, leased for one call on one stream. A block belongs to one thread
/// at a time. Its memory goes back to the pool of the device at its end, at once: the pool gives it
/// out again only after the copies enqueued here are complete. What can block (all but at()) runs
/// without the GIL and without a lock of the caller's; no lock of ours is held over a driver call.
class [[nodiscard]] staging_block {
 public:
  /// At least `bytes` (0 is fine) of pinned memory for copies on `stream`, a stream of that device.
  /// Refused while the stream is captured: a capture can neither wait nor allocate.
  [[nodiscard]] static result<staging_block> lease(int ordinal, stream_ref stream,
                                                   std::size_t bytes);

  staging_block(staging_block&& other) noexcept
      : memory_(std::exchange(other.memory_, nullptr)),
        stream_(other.stream_),
        size_(other.size_),
        ordinal_(other.ordinal_) {}
  staging_block(const staging_block&) = delete;
  staging_block& operator=(const staging_block&) = delete;
  staging_block& operator=(staging_block&&) = delete;
  ~staging_block();

  /// The host address of the piece at `offset`.
  [[nodiscard]] std::byte* at(std::size_t offset) const noexcept;

  /// Enqueues a copy of `bytes` of device memory to the piece at `offset`. There after wait().
  [[nodiscard]] jaxbridge::status to_host(std::size_t offset, const void* device,
                                          std::size_t bytes);

  /// The host waits for the stream: for every to_host() and for what was enqueued before.
  [[nodiscard]] jaxbridge::status wait();

  /// Enqueues a copy of `bytes` of the piece at `offset` to device memory. The piece must not be
  /// written any more.
  [[nodiscard]] jaxbridge::status to_device(void* device, std::size_t offset, std::size_t bytes);

 private:
  staging_block(detail::staging_memory* memory, stream_ref stream, std::size_t size,
                int ordinal) noexcept
      : memory_(memory), stream_(stream), size_(size), ordinal_(ordinal) {}

  [[nodiscard]] jaxbridge::status check_piece(std::size_t offset, std::size_t bytes) const;

  detail::staging_memory* memory_;  // owned by the pool, ours until given back; null: moved from
  stream_ref stream_;
  std::size_t size_;
  int ordinal_;
};

/// What the pool of one device holds.
struct staging_statistics {
  std::size_t blocks = 0;      ///< All blocks there are.
  std::size_t leased = 0;      ///< Those that a call has.
  std::size_t lost = 0;        ///< Those whose copies could not be told complete; never reused.
  std::size_t size_bytes = 0;  ///< Bytes of all blocks.
};
[[nodiscard]] staging_statistics staging_usage(int ordinal);

/// The bytes of pinned memory that a device's pool keeps; 512 MiB at first. What running calls have
/// leased may exceed it: then nothing else is kept. For all devices, any thread.
void set_staging_limit(std::size_t bytes) noexcept;

/// Frees what no call has leased, after waiting for its copies. Blocks.
[[nodiscard]] jaxbridge::status trim_staging(int ordinal);

}  // namespace jaxbridge::cuda

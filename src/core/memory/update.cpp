// SPDX-License-Identifier: Apache-2.0
#include "core/memory/update.hpp"

#include "core/cuda/stream_order.hpp"

namespace jaxbridge::memory {
namespace {

// Of this thread. Numbers are never used again: a function that a program calls may dispatch an
// update of its own, and the program around it is then not known to be enqueued.
struct updates {
  std::uint64_t begun = 0;
  std::uint64_t enqueued = 0;
  stream_ref jax;  // of the one that was begun last
  stream_ref enqueued_on;
};

thread_local updates mine;

}  // namespace

result<std::uint64_t> begin_update(std::optional<stream_ref> owner, stream_ref jax,
                                   std::uint64_t number) {
  if (owner && cuda::is_capturing(*owner)) {
    return status(
        status_code::failed_precondition,
        "the stream on which the owner of the memory uses it is being captured into a CUDA graph: "
        "its work has not run, and what JAX does cannot be part of it; update the memory outside "
        "of the capture");
  }
  if (owner) {
    if (status s = cuda::order(*owner, jax); !s.ok()) return s;
  }
  mine.jax = jax;
  if (number == 0) number = ++mine.begun;
  return number;
}

void update_enqueued(stream_ref stream) noexcept {
  mine.enqueued = mine.begun;
  mine.enqueued_on = stream;
}

result<bool> end_update(std::uint64_t number, stream_ref owner) {
  if (mine.enqueued != number) return false;
  if (mine.enqueued_on.address() != mine.jax.address()) {
    return status(
        status_code::internal,
        "XLA has run a program on another stream than those before, and not in order with "
        "the owner of memory that it updates. Please report this with the versions of JAX "
        "and jaxlib.");
  }
  if (status s = cuda::order(mine.jax, owner); !s.ok()) return s;
  return true;
}

}  // namespace jaxbridge::memory

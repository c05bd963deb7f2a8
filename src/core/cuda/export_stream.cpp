// SPDX-License-Identifier: Apache-2.0
#include "core/cuda/export_stream.hpp"

#include <array>
#include <atomic>
#include <cstddef>

#include "core/cuda/context.hpp"
#include "core/cuda/driver.hpp"

namespace jaxbridge::cuda {
namespace {

constinit std::array<std::atomic<CUstream>, max_devices> streams{};

}  // namespace

result<stream_ref> export_stream(int ordinal) {
  if (auto s = check_ordinal(ordinal); !s.ok()) return s;
  std::atomic<CUstream>& slot = streams[static_cast<std::size_t>(ordinal)];
  if (CUstream known = slot.load(std::memory_order_acquire); known != nullptr) {
    return stream_ref(known);
  }
  const result<context_scope> scope = context_scope::enter(ordinal);
  if (!scope.ok()) return scope.error();
  const driver& cu = driver::get();
  CUstream made = nullptr;
  if (auto s = check(cu.cuStreamCreate(&made, CU_STREAM_NON_BLOCKING), "cuStreamCreate"); !s.ok()) {
    return s;
  }
  CUstream expected = nullptr;
  if (!slot.compare_exchange_strong(expected, made, std::memory_order_acq_rel)) {
    // Another thread was first.
    static_cast<void>(cu.cuStreamDestroy(made));
    return stream_ref(expected);
  }
  return stream_ref(made);
}

void release_export_streams_for_testing() {
  for (std::atomic<CUstream>& slot : streams) {
    if (CUstream made = slot.exchange(nullptr, std::memory_order_acq_rel); made != nullptr) {
      static_cast<void>(driver::get().cuStreamDestroy(made));
    }
  }
}

}  // namespace jaxbridge::cuda

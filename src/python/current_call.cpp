// SPDX-License-Identifier: Apache-2.0
#include "python/current_call.hpp"

#include "core/cuda/stream_order.hpp"

namespace jaxbridge::python {
namespace {
thread_local const dispatch::call* current = nullptr;
thread_local int depth = 0;
}  // namespace

current_call_scope::current_call_scope(const dispatch::call& c) noexcept : previous_(current) {
  current = &c;
  ++depth;
}

current_call_scope::~current_call_scope() {
  current = previous_;
  --depth;
}

void bind_current_call(nb::module_& m) {
  m.def(
      "current_call",
      []() -> nb::object {
        if (current == nullptr) return nb::none();
        const bool is_cuda = current->device.platform == platform::cuda;
        const bool capturing = is_cuda && cuda::is_capturing(current->stream);
        return nb::make_tuple(name(current->device.platform), current->device.ordinal,
                              current->stream.address(), capturing);
      },
      nb::sig("def current_call() -> tuple[str, int, int, bool] | None"),
      "(platform, device ordinal, stream, capturing) of the call that this thread is in.");
  m.def(
      "call_depth", [] { return depth; },
      "How many calls, one inside the other, this thread is in.");
}

}  // namespace jaxbridge::python

// SPDX-License-Identifier: Apache-2.0
// The call that this thread is in.
#pragma once

#include "core/dispatch/call.hpp"
#include "python/py.hpp"

namespace jaxbridge::python {

/// Makes `c` this thread's current call, and the one before current again when it ends.
class [[nodiscard]] current_call_scope {
 public:
  explicit current_call_scope(const dispatch::call& c) noexcept;
  ~current_call_scope();
  current_call_scope(const current_call_scope&) = delete;
  current_call_scope& operator=(const current_call_scope&) = delete;

 private:
  const dispatch::call* previous_;
};

void bind_current_call(nb::module_& m);

}  // namespace jaxbridge::python

// SPDX-License-Identifier: Apache-2.0
// XLA's memory as a framework's allocator takes it.
#pragma once

#include <memory>

#include "core/dispatch/scratch.hpp"
#include "python/py.hpp"

namespace jaxbridge::python {

/// Ends the scratch memory of a call with the call.
class [[nodiscard]] scratch_scope {
 public:
  explicit scratch_scope(const dispatch::call& c)
      : scratch_(std::make_shared<dispatch::scratch>(c)) {}
  scratch_scope(const scratch_scope&) = delete;
  scratch_scope& operator=(const scratch_scope&) = delete;
  ~scratch_scope() { scratch_->end(); }

  [[nodiscard]] const std::shared_ptr<dispatch::scratch>& get() const noexcept { return scratch_; }

 private:
  std::shared_ptr<dispatch::scratch> scratch_;
};

void bind_scratch(nb::module_& m);

}  // namespace jaxbridge::python

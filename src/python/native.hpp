// SPDX-License-Identifier: Apache-2.0
// Native functions: libraries of them, C functions, kernels.
#pragma once

#include <memory>

#include "core/native/native_target.hpp"
#include "python/py.hpp"

namespace jaxbridge::python {

/// Python's hold of a target that calls no Python: XLA's threads never touch a Python object for
/// it.
struct native_handle {
  std::shared_ptr<native::native_target> target;
};

void bind_native(nb::module_& m);

}  // namespace jaxbridge::python

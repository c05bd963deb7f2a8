// SPDX-License-Identifier: Apache-2.0
// The CUDA driver as Python sees it.
#pragma once

#include "python/py.hpp"

namespace jaxbridge::python {
void bind_driver(nb::module_& m);
}  // namespace jaxbridge::python

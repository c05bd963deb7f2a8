// SPDX-License-Identifier: Apache-2.0
// What Python does with the registry of targets, and the handlers that look there.
#pragma once

#include "python/py.hpp"

namespace jaxbridge::python {

void bind_registry(nb::module_& m);

}  // namespace jaxbridge::python

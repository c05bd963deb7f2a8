// expect: an exported function returns jaxbridge::status, or void
// SPDX-License-Identifier: Apache-2.0
// An int that is returned would be ignored.
#include "jaxbridge/jaxbridge.hpp"

int f(jaxbridge::buffer_view<const float>, jaxbridge::buffer_view<float>);
JAXBRIDGE_EXPORT(f, cpu);

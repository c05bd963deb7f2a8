// expect: a parameter of an exported function is of a type that XLA cannot give
// SPDX-License-Identifier: Apache-2.0
// The signature is read from the type: what XLA cannot give is named.
#include "jaxbridge/jaxbridge.hpp"

jaxbridge::status f(jaxbridge::buffer_view<const float>, const char*,
                    jaxbridge::buffer_view<float>);
JAXBRIDGE_EXPORT(f, cpu);

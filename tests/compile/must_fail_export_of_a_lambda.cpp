// expect: what is exported is one function
// SPDX-License-Identifier: Apache-2.0
// A lambda is an object.
#include "jaxbridge/jaxbridge.hpp"

constexpr auto f = [](jaxbridge::buffer_view<const float>, jaxbridge::buffer_view<float>) {};
JAXBRIDGE_EXPORT(f, cpu);

// expect: takes one rule for each result
// SPDX-License-Identifier: Apache-2.0
// Two rules for one result.
#include "jaxbridge/jaxbridge.hpp"

jaxbridge::status f(jaxbridge::buffer_view<const float>, jaxbridge::buffer_view<float>);
JAXBRIDGE_EXPORT(f, cpu).result(jaxbridge::same_as<0>, jaxbridge::same_as<0>);

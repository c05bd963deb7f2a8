// expect: parameters_names_each_operand|call to consteval function [^ ]*parameter_names
// SPDX-License-Identifier: Apache-2.0
// One name too many: the result has none.
#include "jaxbridge/jaxbridge.hpp"

jaxbridge::status f(jaxbridge::buffer_view<const float>, jaxbridge::buffer_view<float>);
JAXBRIDGE_EXPORT(f, cpu).parameters("x, y");

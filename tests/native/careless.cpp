// SPDX-License-Identifier: Apache-2.0
// Functions with the mistakes that debug mode is for.
#include <jaxbridge/jaxbridge.hpp>

namespace jb = jaxbridge;

// Writes the first element alone.
void forgets(jb::buffer_view<const float, 1> x, jb::buffer_view<float, 1> y) { y[0] = x[0]; }
JAXBRIDGE_EXPORT(forgets, cpu).parameters("x").result(jb::same_as<0>).elementwise();

// Writes to what it said it reads.
void spoils(jb::buffer_view<const float, 1> x, jb::in_place<float, 1> y, std::int64_t at) {
  y[0] += x[0];
  const_cast<float*>(x.data())[at] = 7;
}
JAXBRIDGE_EXPORT(spoils, cpu).parameters("x, y, at = 0").result(jb::same_as<1>);

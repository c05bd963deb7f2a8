// SPDX-License-Identifier: Apache-2.0
// A linear recurrence (a first-order IIR filter) with its transpose, for float and double.
#include <jaxbridge/jaxbridge.hpp>

namespace jb = jaxbridge;

// y[t] = x[t] + decay * y[t - 1], along the last axis.
template <class T>
void filter(jb::buffer_view<const T, 2> x, T decay, jb::thread_pool pool, jb::buffer_view<T, 2> y) {
  pool.parallel_for(x.extent(0), 8, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      T last = 0;
      for (std::int64_t t = 0; t < x.extent(1); ++t) y(row, t) = last = x(row, t) + decay * last;
    }
  });
}
JAXBRIDGE_EXPORT_AS(filter, cpu, filter<float>, filter<double>)
    .parameters("x, decay")
    .result(jb::same_as<0>)
    .doc("y[t] = x[t] + decay * y[t - 1], along the last axis of a matrix.");

// The same from the end to the beginning.
template <class T>
void filter_transposed(jb::buffer_view<const T, 2> y, T decay, jb::buffer_view<T, 2> x) {
  for (std::int64_t row = 0; row < y.extent(0); ++row) {
    T last = 0;
    for (std::int64_t t = y.extent(1) - 1; t >= 0; --t) {
      x(row, t) = last = y(row, t) + decay * last;
    }
  }
}
JAXBRIDGE_EXPORT_AS(filter_transposed, cpu, filter_transposed<float>, filter_transposed<double>)
    .parameters("y, decay")
    .result(jb::same_as<0>)
    .doc("The transpose of filter: the same from the end to the beginning.");

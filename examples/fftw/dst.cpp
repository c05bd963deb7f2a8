// SPDX-License-Identifier: Apache-2.0
// FFTW's discrete sine transform of type I, which JAX does not have:
//   g++ -std=c++20 -O2 -shared -fPIC -fvisibility=hidden dst.cpp -lfftw3 -o libdst.so
//     -I"$(python -c 'import jaxbridge; print(jaxbridge.get_include())')"
#include <fftw3.h>

#include <jaxbridge/jaxbridge.hpp>
#include <map>
#include <utility>

namespace jb = jaxbridge;

// Plans are made once for each shape. FFTW makes one at a time, and runs any number at once.
struct plans {
  std::map<std::pair<int, int>, fftw_plan> by_shape;

  fftw_plan of(int n, int m, double* x) {
    fftw_plan& plan = by_shape[{n, m}];
    if (plan == nullptr) {
      const unsigned flags = FFTW_ESTIMATE | FFTW_UNALIGNED;  // ESTIMATE leaves x as it is
      plan = fftw_plan_r2r_2d(n, m, x, x, FFTW_RODFT00, FFTW_RODFT00, flags);
    }
    return plan;
  }
};

jb::status dst(jb::in_place<double, 2> x, jb::state<plans> state) {
  if (x.size() == 0) return {};
  fftw_plan plan = nullptr;
  {
    const auto lock = state.lock();
    plan = state->of(static_cast<int>(x.extent(0)), static_cast<int>(x.extent(1)), x.data());
  }
  if (plan == nullptr) return {jb::status_code::internal, "FFTW makes no plan for this shape"};
  fftw_execute_r2r(plan, x.data(), x.data());
  return {};
}
JAXBRIDGE_EXPORT(dst, cpu)
    .parameters("x[n, m]")
    .result(jb::same_as<0>)
    .vmap("sequential")
    .doc(
        "The sine transform of type I of a matrix, along both axes: its own inverse, but for a "
        "factor of 4 * (n + 1) * (m + 1).");

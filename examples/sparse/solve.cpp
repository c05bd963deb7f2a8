// SPDX-License-Identifier: Apache-2.0
// Sparse linear systems on a GPU, by cuDSS:
//   pip install nvidia-cudss-cu13 nvidia-cuda-runtime nvidia-cuda-crt
//   g++ -std=c++20 -O2 -shared -fPIC -fvisibility=hidden solve.cpp -o libsolve.so -I$CUDA/include
//     -L$CUDA/lib -l:libcudss.so.1 -I"$(python -c 'import jaxbridge;
//     print(jaxbridge.get_include())')"
// with CUDA=.../site-packages/nvidia/cu13.
#include <cudss.h>

#include <jaxbridge/jaxbridge.hpp>
#include <map>
#include <stdexcept>
#include <string>

namespace jb = jaxbridge;

void check(cudssStatus_t code, const char* what) {
  if (code == CUDSS_STATUS_SUCCESS) return;
  throw std::runtime_error(std::string(what) + " failed with cuDSS's status " +
                           std::to_string(static_cast<int>(code)));
}

// What cuDSS keeps on each device: a handle, and what it found out about each pattern.
struct solvers {
  cudssHandle_t handle = nullptr;
  cudssConfig_t config = nullptr;
  std::map<std::int64_t, cudssData_t> by_pattern;
};

// A view of XLA's memory for cuDSS.
struct matrix {
  cudssMatrix_t of = nullptr;
  ~matrix() {
    if (of != nullptr) cudssMatrixDestroy(of);
  }
};

// A x = b, with A in compressed rows. `pattern` tells where the elements are: equal for equal
// indices.
void solve(jb::stream_ref stream, jb::state<solvers> state, jb::buffer_view<const double, 1> values,
           jb::buffer_view<const std::int32_t, 1> starts,
           jb::buffer_view<const std::int32_t, 1> columns, jb::buffer_view<const double, 1> b,
           std::int64_t pattern, jb::buffer_view<double, 1> x) {
  const auto lock = state.lock();  // a handle has one stream
  if (state->handle == nullptr) {
    check(cudssCreate(&state->handle), "cudssCreate");
    check(cudssConfigCreate(&state->config), "cudssConfigCreate");
  }
  check(cudssSetStream(state->handle, static_cast<cudaStream_t>(stream.handle())),
        "cudssSetStream");
  const auto n = static_cast<std::int64_t>(b.size());
  matrix a;
  matrix right;
  matrix left;
  check(cudssMatrixCreateCsr(&a.of, n, n, static_cast<std::int64_t>(values.size()), starts.data(),
                             nullptr, columns.data(), values.data(), CUDA_R_32I, CUDA_R_32I,
                             CUDA_R_64F, CUDSS_MTYPE_GENERAL, CUDSS_MVIEW_FULL, CUDSS_BASE_ZERO),
        "cudssMatrixCreateCsr");
  check(cudssMatrixCreateDn(&right.of, n, 1, n, b.data(), CUDA_R_64F, CUDSS_LAYOUT_COL_MAJOR),
        "cudssMatrixCreateDn");
  check(cudssMatrixCreateDn(&left.of, n, 1, n, x.data(), CUDA_R_64F, CUDSS_LAYOUT_COL_MAJOR),
        "cudssMatrixCreateDn");
  const auto run = [&](int phase, cudssData_t data, const char* what) {
    check(cudssExecute(state->handle, phase, state->config, data, a.of, left.of, right.of), what);
  };
  cudssData_t& data = state->by_pattern[pattern];
  if (data == nullptr) {
    check(cudssDataCreate(state->handle, &data), "cudssDataCreate");
    run(CUDSS_PHASE_ANALYSIS, data, "the analysis");
  }
  run(CUDSS_PHASE_FACTORIZATION, data, "the factorization");
  run(CUDSS_PHASE_SOLVE, data, "the solution");
}
JAXBRIDGE_EXPORT(solve, cuda)
    .parameters("values[k], starts[m], columns[k], b[n], pattern")
    .result(jb::same_as<3>)
    .vmap("sequential");

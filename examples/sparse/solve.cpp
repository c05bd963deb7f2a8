// SPDX-License-Identifier: Apache-2.0
// Sparse linear systems on a GPU, by cuDSS:
//   pip install nvidia-cudss-cu13 nvidia-cuda-runtime nvidia-cuda-crt
//   g++ -std=c++20 -O2 -shared -fPIC -fvisibility=hidden solve.cpp -o libsolve.so -I$CUDA/include
//     -L$CUDA/lib -l:libcudss.so.1 -l:libcudart.so.13 -I"$(python -c 'import jaxbridge;
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

void check(cudaError_t code, const char* what) {
  if (code == cudaSuccess) return;
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(code));
}

// What cuDSS has found out about a pattern. It may go on to read the indices, which are copied,
// since those of a program go with it.
struct analysed {
  cudssData_t data = nullptr;
  void* indices = nullptr;
};

// What cuDSS keeps on each device.
struct solvers {
  cudssHandle_t handle = nullptr;
  cudssConfig_t config = nullptr;
  std::map<std::int64_t, analysed> by_pattern;
};

// A view of memory for cuDSS.
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
  const auto on = static_cast<cudaStream_t>(stream.handle());
  check(cudssSetStream(state->handle, on), "cudssSetStream");
  const auto n = static_cast<std::int64_t>(b.size());
  const auto found = state->by_pattern.find(pattern);
  const bool is_new = found == state->by_pattern.end();
  analysed known = is_new ? analysed() : found->second;
  if (is_new) {
    check(cudaMallocAsync(&known.indices, starts.size_bytes() + columns.size_bytes(), on),
          "cudaMallocAsync");
    check(cudaMemcpyAsync(known.indices, starts.data(), starts.size_bytes(),
                          cudaMemcpyDeviceToDevice, on),
          "cudaMemcpyAsync");
    check(cudaMemcpyAsync(static_cast<char*>(known.indices) + starts.size_bytes(), columns.data(),
                          columns.size_bytes(), cudaMemcpyDeviceToDevice, on),
          "cudaMemcpyAsync");
    check(cudssDataCreate(state->handle, &known.data), "cudssDataCreate");
  }
  auto* const own_starts = static_cast<std::int32_t*>(known.indices);
  matrix a;
  matrix right;
  matrix left;
  check(cudssMatrixCreateCsr(&a.of, n, n, static_cast<std::int64_t>(values.size()), own_starts,
                             nullptr, own_starts + starts.size(), values.data(), CUDA_R_32I,
                             CUDA_R_32I, CUDA_R_64F, CUDSS_MTYPE_GENERAL, CUDSS_MVIEW_FULL,
                             CUDSS_BASE_ZERO),
        "cudssMatrixCreateCsr");
  check(cudssMatrixCreateDn(&right.of, n, 1, n, b.data(), CUDA_R_64F, CUDSS_LAYOUT_COL_MAJOR),
        "cudssMatrixCreateDn");
  check(cudssMatrixCreateDn(&left.of, n, 1, n, x.data(), CUDA_R_64F, CUDSS_LAYOUT_COL_MAJOR),
        "cudssMatrixCreateDn");
  const auto run = [&](int phase, const char* what) {
    check(cudssExecute(state->handle, phase, state->config, known.data, a.of, left.of, right.of),
          what);
  };
  if (is_new) {
    run(CUDSS_PHASE_ANALYSIS, "the analysis");
    state->by_pattern.emplace(pattern, known);
  }
  run(CUDSS_PHASE_FACTORIZATION, "the factorization");
  run(CUDSS_PHASE_SOLVE, "the solution");
}
JAXBRIDGE_EXPORT(solve, cuda)
    .parameters("values[k], starts[m], columns[k], b[n], pattern")
    .result(jb::same_as<3>)
    .vmap("sequential");

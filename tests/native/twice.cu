// SPDX-License-Identifier: Apache-2.0
// A library with a kernel of its own, as nvcc builds it.
#include <jaxbridge/jaxbridge.hpp>

namespace jb = jaxbridge;

__global__ void twice_kernel(const float* x, float* y, std::size_t n) {
  const std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < n) y[i] = 2 * x[i];
}

void twice(jb::buffer_view<const float> x, jb::stream_ref stream, jb::buffer_view<float> y) {
  if (x.size() == 0) return;
  const auto blocks = static_cast<unsigned>((x.size() + 255) / 256);
  twice_kernel<<<blocks, 256, 0, static_cast<cudaStream_t>(stream.handle())>>>(x.data(), y.data(),
                                                                               x.size());
}
JAXBRIDGE_EXPORT(twice, cuda).parameters("x").result(jb::same_as<0>);

void twice_on_cpu(jb::buffer_view<const float> x, jb::buffer_view<float> y) {
  for (std::size_t i = 0; i < x.size(); ++i) y[i] = 2 * x[i];
}
JAXBRIDGE_EXPORT_AS(twice, cpu, twice_on_cpu).parameters("x").result(jb::same_as<0>);

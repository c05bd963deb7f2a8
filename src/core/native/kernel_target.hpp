// SPDX-License-Identifier: Apache-2.0
// A CUDA kernel as a target: launched on the stream of the call.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "core/cuda/module.hpp"
#include "core/native/native_target.hpp"
#include "core/replay/device_graphs.hpp"

namespace jaxbridge::native {

/// The most words that a kernel may get: CUDA has 4 KiB for them. An array of Numba's takes five
/// and two for each axis.
inline constexpr std::size_t max_kernel_arguments = 512;

/// A launch with arguments that come again is a graph of that kernel: it takes the host a third of
/// the time (1.2 us in place of 3.1 us on an H200).
class kernel_target final : public native_target {
 public:
  /// At most `limit` graphs are kept for each device.
  kernel_target(std::string name, std::shared_ptr<cuda::kernel> kernel,
                std::vector<argument> arguments, cuda::launch_shape shape,
                dispatch::in_place in_place, std::size_t limit, bool inspects = false);

  [[nodiscard]] replay::device_graphs* graphs() noexcept override { return &graphs_; }

 protected:
  [[nodiscard]] status run(const dispatch::call& c) override;

 private:
  [[nodiscard]] status named(status s) const;
  [[nodiscard]] status launch(const dispatch::call& c, void** parameters);
  [[nodiscard]] status launch_captured(const dispatch::call& c, void** parameters,
                                       const replay::call_key& key);

  std::shared_ptr<cuda::kernel> kernel_;
  cuda::launch_shape shape_;
  replay::device_graphs graphs_;
};

}  // namespace jaxbridge::native

// SPDX-License-Identifier: Apache-2.0
// A CUDA kernel as a target: launched on the stream of the call.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/cuda/module.hpp"
#include "core/native/c_function.hpp"

namespace jaxbridge::native {

class kernel_target final : public native_target {
 public:
  kernel_target(std::string name, std::shared_ptr<cuda::kernel> kernel,
                std::vector<argument> arguments, cuda::launch_shape shape,
                std::vector<index_pair> in_place);

  status invoke(const dispatch::call& c) noexcept override;

 private:
  std::string name_;
  std::shared_ptr<cuda::kernel> kernel_;
  std::vector<argument> arguments_;
  cuda::launch_shape shape_;
  std::vector<index_pair> in_place_;
};

}  // namespace jaxbridge::native

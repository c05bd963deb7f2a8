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
                dispatch::in_place in_place);

  status invoke(const dispatch::call& c) noexcept override;

 private:
  std::shared_ptr<cuda::kernel> kernel_;
  cuda::launch_shape shape_;
};

}  // namespace jaxbridge::native

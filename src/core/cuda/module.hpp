// SPDX-License-Identifier: Apache-2.0
// Code for the device: loaded on each device that needs it, and launched.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <jaxbridge/status.hpp>
#include <jaxbridge/stream.hpp>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "core/cuda/context.hpp"
#include "core/cuda/driver_types.hpp"

namespace jaxbridge::cuda {

/// The compute capability of a device: major and minor number.
[[nodiscard]] result<std::pair<int, int>> compute_capability(int ordinal);

/// How a kernel is launched.
struct launch_shape {
  std::array<std::uint32_t, 3> grid;
  std::array<std::uint32_t, 3> block;
  std::uint32_t shared_bytes = 0;  // dynamic shared memory of a block

  /// Whether there are no blocks.
  [[nodiscard]] bool is_empty() const noexcept {
    return grid[0] == 0 || grid[1] == 0 || grid[2] == 0;
  }
};

/// One kernel of a module: PTX (with a final zero) or a cubin. Any thread. The module is loaded on
/// a device at the first launch there, and is unloaded with the object: whoever keeps a captured
/// graph that may launch it has to keep the object, too.
class kernel {
 public:
  /// `image` is the module's code, `name` what the kernel is called there.
  kernel(std::string image, std::string name, std::uint32_t shared_bytes) noexcept;
  ~kernel();
  kernel(const kernel&) = delete;
  kernel& operator=(const kernel&) = delete;

  /// Enqueues one launch. `parameters` point to the value of each. A grid without blocks is none.
  /// Not once the process is ending: native_target::invoke() asks.
  [[nodiscard]] status launch(int ordinal, stream_ref stream, const launch_shape& shape,
                              void** parameters);

  /// On how many devices it is loaded.
  [[nodiscard]] int loaded() const noexcept;

 private:
  [[nodiscard]] result<CUfunction> on(int ordinal);
  [[nodiscard]] result<CUfunction> load(int ordinal);

  std::string image_;
  std::string name_;
  std::uint32_t shared_bytes_;
  std::mutex loading_;  // held over the load: whoever comes meanwhile needs its result
  std::array<CUmodule, max_devices> modules_{};  // under loading_
  std::array<std::atomic<CUfunction>, max_devices> functions_{};
};

}  // namespace jaxbridge::cuda

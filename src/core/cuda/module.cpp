// SPDX-License-Identifier: Apache-2.0
#include "core/cuda/module.hpp"

#include <utility>

#include "core/cuda/capture_mode.hpp"
#include "core/cuda/driver.hpp"
#include "core/exit.hpp"

namespace jaxbridge::cuda {
namespace {

// Above this a kernel has to ask for its shared memory.
constexpr std::uint32_t shared_without_asking = 48U << 10;

}  // namespace

result<std::pair<int, int>> compute_capability(int ordinal) {
  if (status s = check_ordinal(ordinal); !s.ok()) return s;
  const driver& d = driver::get();
  CUdevice device = 0;
  if (status s = check(d.cuDeviceGet(&device, ordinal), "cuDeviceGet"); !s.ok()) return s;
  std::pair<int, int> out{};
  for (auto& [number, attribute] :
       {std::pair{&out.first, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR},
        std::pair{&out.second, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR}}) {
    status s = check(d.cuDeviceGetAttribute(number, attribute, device), "cuDeviceGetAttribute");
    if (!s.ok()) return s;
  }
  return out;
}

kernel::kernel(std::string image, std::string name, std::uint32_t shared_bytes) noexcept
    : image_(std::move(image)), name_(std::move(name)), shared_bytes_(shared_bytes) {}

kernel::~kernel() {
  if (exiting()) return;
  // A capture of this thread's has nothing to do with it.
  const relaxed_capture_scope relaxed;
  for (int ordinal = 0; ordinal < max_devices; ++ordinal) {
    const CUmodule module = modules_[static_cast<std::size_t>(ordinal)];
    if (module == nullptr) continue;
    const result<context_scope> current = context_scope::enter(ordinal);
    // Nobody can be told. The driver waits for launches that are under way.
    if (current.ok()) (void)driver::get().cuModuleUnload(module);
  }
}

int kernel::loaded() const noexcept {
  int n = 0;
  for (const auto& f : functions_) n += f.load(std::memory_order_relaxed) != nullptr ? 1 : 0;
  return n;
}

result<CUfunction> kernel::on(int ordinal) {
  if (status s = check_ordinal(ordinal); !s.ok()) return s;
  auto& slot = functions_[static_cast<std::size_t>(ordinal)];
  if (CUfunction found = slot.load(std::memory_order_acquire); found != nullptr) return found;
  const std::lock_guard lock(loading_);
  if (CUfunction found = slot.load(std::memory_order_acquire); found != nullptr) return found;
  result<CUfunction> made = load(ordinal);
  if (made.ok()) slot.store(made.value(), std::memory_order_release);
  return made;
}

// The lock is held, the device's context is current.
result<CUfunction> kernel::load(int ordinal) {
  const driver& d = driver::get();
  // The first call can be a capture of XLA's.
  const relaxed_capture_scope relaxed;
  CUmodule module = nullptr;
  if (status s = check(d.cuModuleLoadData(&module, image_.c_str()), "cuModuleLoadData"); !s.ok()) {
    return status(s.code(), "the code of kernel '" + name_ + "' cannot be loaded on device " +
                                std::to_string(ordinal) + ": " + s.message());
  }
  CUfunction function = nullptr;
  status s = check(d.cuModuleGetFunction(&function, module, name_.c_str()), "cuModuleGetFunction");
  if (!s.ok()) {
    s = {s.code(),
         "the code has no kernel '" + name_ +
             "': declare it extern \"C\", or give the name that the compiler made of it: " +
             s.message()};
  } else if (shared_bytes_ > shared_without_asking) {
    s = check(d.cuFuncSetAttribute(function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                   static_cast<int>(shared_bytes_)),
              "cuFuncSetAttribute");
  }
  if (!s.ok()) {
    (void)d.cuModuleUnload(module);
    return s;
  }
  modules_[static_cast<std::size_t>(ordinal)] = module;
  return function;
}

status kernel::launch(int ordinal, stream_ref stream, const launch_shape& shape,
                      void** parameters) {
  const auto& [grid, block, shared] = shape;
  if (shape.is_empty()) return {};
  const result<context_scope> current = context_scope::enter(ordinal);
  if (!current.ok()) return current.error();
  const result<CUfunction> function = on(ordinal);
  if (!function.ok()) return function.error();
  return check(driver::get().cuLaunchKernel(
                   function.value(), grid[0], grid[1], grid[2], block[0], block[1], block[2],
                   shared, static_cast<CUstream>(stream.handle()), parameters, nullptr),
               "cuLaunchKernel");
}

}  // namespace jaxbridge::cuda

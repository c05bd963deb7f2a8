// SPDX-License-Identifier: Apache-2.0
#include "core/cuda/pointer.hpp"

#include <array>
#include <cstdint>

#include "core/cuda/context.hpp"
#include "core/cuda/driver.hpp"

namespace jaxbridge::cuda {

result<pointer_info> inspect(const void* address) {
  unsigned int type = 0;
  unsigned int managed = 0;
  int ordinal = 0;
  CUcontext context = nullptr;
  std::array<CUpointer_attribute, 4> asked = {
      CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_IS_MANAGED,
      CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, CU_POINTER_ATTRIBUTE_CONTEXT};
  std::array<void*, 4> answers = {&type, &managed, &ordinal, &context};
  const auto pointer = static_cast<CUdeviceptr>(reinterpret_cast<std::uintptr_t>(address));
  // In this form an address that is not known is no error.
  if (auto s = check(driver::get().cuPointerGetAttributes(4, asked.data(), answers.data(), pointer),
                     "cuPointerGetAttributes");
      !s.ok()) {
    return s;
  }
  pointer_info out;
  if (managed != 0) {
    out.where = pointer_info::place::managed;
  } else if (type == CU_MEMORYTYPE_DEVICE) {
    out.where = pointer_info::place::device;
  } else if (type == CU_MEMORYTYPE_HOST) {
    out.where = pointer_info::place::host;
  }
  out.ordinal = ordinal < 0 ? 0 : ordinal;
  // Mapped physical memory and pools have none.
  if (out.where == pointer_info::place::device && context != nullptr) {
    const result<CUcontext> primary = primary_context(out.ordinal);
    if (!primary.ok()) return primary.error();
    out.is_foreign = context != primary.value();
  }
  return out;
}

}  // namespace jaxbridge::cuda

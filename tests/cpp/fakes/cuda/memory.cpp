// SPDX-License-Identifier: Apache-2.0
// Copies, blocks of memory, and what pointers are known to be.
#include <cstdlib>
#include <cstring>

#include "fakes/cuda/world.hpp"

namespace fake_driver {
namespace {

CUresult copy(const char* name, const char* kind, std::uint64_t to, std::uint64_t from,
              std::size_t bytes, CUstream handle) {
  return entry(name, {to, from, bytes, word(handle)}, true, [&](locked&) {
    CUstream s = nullptr;
    if (const CUresult code = resolve(handle, s); code != CUDA_SUCCESS) return code;
    if (bytes == 0) return CUDA_SUCCESS;
    if (to == 0 || (from == 0 && std::strcmp(kind, "memset") != 0)) return CUDA_ERROR_INVALID_VALUE;
    return enqueue(s, work{kind, to, from, bytes, {}});
  });
}

CUresult fake_memcpy_dtoh(void* to, CUdeviceptr from, std::size_t bytes, CUstream s) {
  return copy("cuMemcpyDtoHAsync", "DtoH", word(to), from, bytes, s);
}

CUresult fake_memcpy_htod(CUdeviceptr to, const void* from, std::size_t bytes, CUstream s) {
  return copy("cuMemcpyHtoDAsync", "HtoD", to, word(from), bytes, s);
}

CUresult fake_memcpy_dtod(CUdeviceptr to, CUdeviceptr from, std::size_t bytes, CUstream s) {
  return copy("cuMemcpyDtoDAsync", "DtoD", to, from, bytes, s);
}

CUresult fake_memset(CUdeviceptr to, unsigned char value, std::size_t bytes, CUstream s) {
  return copy("cuMemsetD8Async", "memset", to, value, bytes, s);
}

CUresult fake_alloc(CUdeviceptr* memory, std::size_t bytes) {
  return entry("cuMemAlloc", {bytes}, true, [&](locked&) {
    if (current() == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
    if (bytes == 0) return CUDA_ERROR_INVALID_VALUE;
    if (const CUresult code = forbidden_while_capturing(); code != CUDA_SUCCESS) return code;
    const std::size_t alignment = 256;
    if (bytes > (std::size_t{1} << 36)) return CUDA_ERROR_OUT_OF_MEMORY;
    void* const made =
        std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
    if (made == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
    *memory = word(made);
    now->device_blocks.emplace(made, bytes);
    return CUDA_SUCCESS;
  });
}

CUresult fake_free(CUdeviceptr memory) {
  return entry("cuMemFree", {memory}, true, [&](locked&) {
    if (current() == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
    void* const block = reinterpret_cast<void*>(memory);
    if (now->device_blocks.count(block) == 0) return CUDA_ERROR_INVALID_VALUE;
    if (const CUresult code = forbidden_while_capturing(); code != CUDA_SUCCESS) return code;
    now->device_blocks.erase(block);
    std::free(block);
    return CUDA_SUCCESS;
  });
}

CUresult fake_host_alloc(void** memory, std::size_t bytes, unsigned int flags) {
  return entry("cuMemHostAlloc", {bytes, flags}, true, [&](locked&) {
    if (current() == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
    if (bytes == 0) return CUDA_ERROR_INVALID_VALUE;
    if (const CUresult code = forbidden_while_capturing(); code != CUDA_SUCCESS) return code;
    const std::size_t page = 4096;
    if (bytes > (std::size_t{1} << 36)) return CUDA_ERROR_OUT_OF_MEMORY;
    *memory = std::aligned_alloc(page, (bytes + page - 1) / page * page);
    if (*memory == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
    now->host_blocks.emplace(*memory, bytes);
    return CUDA_SUCCESS;
  });
}

CUresult fake_free_host(void* memory) {
  return entry("cuMemFreeHost", {word(memory)}, true, [&](locked&) {
    if (current() == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
    if (now->host_blocks.count(memory) == 0) return CUDA_ERROR_INVALID_VALUE;
    if (const CUresult code = forbidden_while_capturing(); code != CUDA_SUCCESS) return code;
    // Pending copies go on to use it, as on a device: ASan shows who frees too early.
    now->host_blocks.erase(memory);
    std::free(memory);
    return CUDA_SUCCESS;
  });
}

CUresult attribute_of(void* value, CUpointer_attribute attribute, CUdeviceptr pointer) {
  for (const declared_memory& m : now->declared) {
    if (pointer < m.begin || pointer - m.begin >= m.bytes) continue;
    switch (attribute) {
      case CU_POINTER_ATTRIBUTE_CONTEXT:
        *static_cast<CUcontext*>(value) =
            m.context != nullptr ? m.context
                                 : now->primaries[static_cast<std::size_t>(m.device)].get();
        return CUDA_SUCCESS;
      case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        *static_cast<unsigned int*>(value) = m.on_host ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
        return CUDA_SUCCESS;
      case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
      case CU_POINTER_ATTRIBUTE_HOST_POINTER:
        *static_cast<CUdeviceptr*>(value) = pointer;
        return CUDA_SUCCESS;
      case CU_POINTER_ATTRIBUTE_IS_MANAGED:
        *static_cast<unsigned int*>(value) = m.managed ? 1 : 0;
        return CUDA_SUCCESS;
      case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        *static_cast<int*>(value) = m.device;
        return CUDA_SUCCESS;
    }
  }
  return CUDA_ERROR_INVALID_VALUE;
}

CUresult fake_pointer_attribute(void* value, CUpointer_attribute attribute, CUdeviceptr pointer) {
  return entry("cuPointerGetAttribute", {word(attribute), pointer}, true,
               [&](locked&) { return attribute_of(value, attribute, pointer); });
}

// Unlike the one above: an unknown pointer is no error. Its ordinal is -2, the rest is zero.
CUresult fake_pointer_attributes(unsigned int count, CUpointer_attribute* attributes, void** values,
                                 CUdeviceptr pointer) {
  return entry("cuPointerGetAttributes", {count, pointer}, true, [&](locked&) {
    for (unsigned int i = 0; i < count; ++i) {
      if (attribute_of(values[i], attributes[i], pointer) == CUDA_SUCCESS) continue;
      switch (attributes[i]) {
        case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
          *static_cast<int*>(values[i]) = -2;
          break;
        case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        case CU_POINTER_ATTRIBUTE_IS_MANAGED:
          *static_cast<unsigned int*>(values[i]) = 0;
          break;
        case CU_POINTER_ATTRIBUTE_CONTEXT:
        case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
        case CU_POINTER_ATTRIBUTE_HOST_POINTER:
          *static_cast<void**>(values[i]) = nullptr;
          break;
      }
    }
    return CUDA_SUCCESS;
  });
}

}  // namespace

const symbols& memory_symbols() {
  static const symbols all = {
      {"cuMemcpyDtoHAsync", address(&fake_memcpy_dtoh)},
      {"cuMemcpyHtoDAsync", address(&fake_memcpy_htod)},
      {"cuMemcpyDtoDAsync", address(&fake_memcpy_dtod)},
      {"cuMemsetD8Async", address(&fake_memset)},
      {"cuMemAlloc", address(&fake_alloc)},
      {"cuMemFree", address(&fake_free)},
      {"cuMemHostAlloc", address(&fake_host_alloc)},
      {"cuMemFreeHost", address(&fake_free_host)},
      {"cuPointerGetAttribute", address(&fake_pointer_attribute)},
      {"cuPointerGetAttributes", address(&fake_pointer_attributes)},
  };
  return all;
}

}  // namespace fake_driver

// SPDX-License-Identifier: Apache-2.0
// Devices and their contexts.
#include <algorithm>
#include <cstring>

#include "fakes/cuda/world.hpp"

namespace fake_driver {
namespace {

CUresult fake_init(unsigned int flags) {
  return entry("cuInit", {flags}, false, [&](locked&) {
    if (now->primaries.empty()) return CUDA_ERROR_NO_DEVICE;
    now->initialised = true;
    return CUDA_SUCCESS;
  });
}

CUresult fake_driver_get_version(int* version) {
  return entry("cuDriverGetVersion", {}, false, [&](locked&) {
    *version = now->version;
    return CUDA_SUCCESS;
  });
}

CUresult fake_device_get_count(int* count) {
  return entry("cuDeviceGetCount", {}, true, [&](locked&) {
    *count = static_cast<int>(now->primaries.size());
    return CUDA_SUCCESS;
  });
}

bool is_device(int device) {
  return device >= 0 && static_cast<std::size_t>(device) < now->primaries.size();
}

CUresult fake_device_get(CUdevice* device, int ordinal) {
  return entry("cuDeviceGet", {word(ordinal)}, true, [&](locked&) {
    if (!is_device(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
    *device = ordinal;
    return CUDA_SUCCESS;
  });
}

CUresult fake_device_get_name(char* text, int length, CUdevice device) {
  return entry("cuDeviceGetName", {word(length), word(device)}, true, [&](locked&) {
    if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    if (length <= 0) return CUDA_ERROR_INVALID_VALUE;
    const std::string name = "Fake Device " + std::to_string(device);
    const std::size_t n = std::min(name.size(), static_cast<std::size_t>(length) - 1);
    std::memcpy(text, name.data(), n);
    text[n] = '\0';
    return CUDA_SUCCESS;
  });
}

CUresult fake_device_attribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  return entry("cuDeviceGetAttribute", {word(static_cast<int>(attribute)), word(device)}, true,
               [&](locked&) {
                 *value = attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR ? 9 : 0;
                 return CUDA_SUCCESS;
               });
}

CUresult fake_primary_retain(CUcontext* context, CUdevice device) {
  return entry("cuDevicePrimaryCtxRetain", {word(device)}, true, [&](locked&) {
    if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    *context = now->primaries[static_cast<std::size_t>(device)].get();
    ++(*context)->retains;
    return CUDA_SUCCESS;
  });
}

CUresult fake_primary_release(CUdevice device) {
  return entry("cuDevicePrimaryCtxRelease", {word(device)}, true, [&](locked&) {
    if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    CUcontext c = now->primaries[static_cast<std::size_t>(device)].get();
    if (c->retains == 0) return CUDA_ERROR_INVALID_CONTEXT;
    --c->retains;
    return CUDA_SUCCESS;
  });
}

CUresult fake_get_current(CUcontext* context) {
  return entry("cuCtxGetCurrent", {}, true, [&](locked&) {
    *context = current();
    return CUDA_SUCCESS;
  });
}

CUresult fake_set_current(CUcontext context) {
  return entry("cuCtxSetCurrent", {word(context)}, true, [&](locked&) {
    if (context != nullptr && !is_known(context)) return CUDA_ERROR_INVALID_CONTEXT;
    if (!contexts().empty()) contexts().pop_back();
    if (context != nullptr) contexts().push_back(context);
    return CUDA_SUCCESS;
  });
}

CUresult fake_push(CUcontext context) {
  return entry("cuCtxPushCurrent", {word(context)}, true, [&](locked&) {
    if (!is_known(context)) return CUDA_ERROR_INVALID_CONTEXT;
    contexts().push_back(context);
    return CUDA_SUCCESS;
  });
}

CUresult fake_pop(CUcontext* context) {
  return entry("cuCtxPopCurrent", {}, true, [&](locked&) {
    if (contexts().empty()) return CUDA_ERROR_INVALID_CONTEXT;
    *context = contexts().back();
    contexts().pop_back();
    return CUDA_SUCCESS;
  });
}

CUresult fake_get_device(CUdevice* device) {
  return entry("cuCtxGetDevice", {}, true, [&](locked&) {
    if (current() == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
    *device = current()->device;
    return CUDA_SUCCESS;
  });
}

CUresult fake_ctx_synchronize() {
  return entry("cuCtxSynchronize", {}, true, [&](locked& l) {
    CUcontext c = current();
    if (c == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
    if (const CUresult code = forbidden_while_capturing(); code != CUDA_SUCCESS) return code;
    std::vector<CUstream> all = blocking_streams(c);
    for (const auto& s : now->streams) {
      if (s->context == c && !s->blocking) all.push_back(s.get());
    }
    all.push_back(&c->legacy);
    for (CUstream s : all) {
      if (s->capture != nullptr) {
        return invalidate(*s->capture, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
      }
    }
    for (CUstream s : all) wait_for(l, s, s->enqueued);
    return CUDA_SUCCESS;
  });
}

}  // namespace

const symbols& device_symbols() {
  static const symbols all = {
      {"cuInit", address(&fake_init)},
      {"cuDriverGetVersion", address(&fake_driver_get_version)},
      {"cuDeviceGetCount", address(&fake_device_get_count)},
      {"cuDeviceGet", address(&fake_device_get)},
      {"cuDeviceGetName", address(&fake_device_get_name)},
      {"cuDevicePrimaryCtxRetain", address(&fake_primary_retain)},
      {"cuDevicePrimaryCtxRelease", address(&fake_primary_release)},
      {"cuCtxGetCurrent", address(&fake_get_current)},
      {"cuCtxSetCurrent", address(&fake_set_current)},
      {"cuCtxPushCurrent", address(&fake_push)},
      {"cuCtxPopCurrent", address(&fake_pop)},
      {"cuCtxGetDevice", address(&fake_get_device)},
      {"cuCtxSynchronize", address(&fake_ctx_synchronize)},
      {"cuDeviceGetAttribute", address(&fake_device_attribute)},
  };
  return all;
}

}  // namespace fake_driver

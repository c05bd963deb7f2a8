// SPDX-License-Identifier: Apache-2.0
// The CUDA driver: the one place that names its functions, loaded at first use.
#pragma once

#include <jaxbridge/status.hpp>
#include <string>
#include <vector>

#include "core/cuda/driver_types.hpp"

namespace jaxbridge::cuda {

// X(name, version, parameters): every driver function that is used, one line each; all return a
// CUresult. `version` is the CUDA version asked of cuGetProcAddress. It picks the variant (_v2,
// ...) whose parameters stand here: 12000, the oldest driver supported, unless the function is
// younger. A newer number can mean another signature (cuStreamGetCtx at 12050).
#define JAXBRIDGE_CUDA_DRIVER_FUNCTIONS(X)                                                       \
  X(cuInit, 12000, (unsigned int flags))                                                         \
  X(cuDriverGetVersion, 12000, (int* version))                                                   \
  X(cuDeviceGetCount, 12000, (int* count))                                                       \
  X(cuDeviceGet, 12000, (CUdevice * device, int ordinal))                                        \
  X(cuDeviceGetName, 12000, (char* text, int length, CUdevice device))                           \
  X(cuDeviceGetAttribute, 12000, (int* value, CUdevice_attribute attribute, CUdevice device))    \
  X(cuDevicePrimaryCtxRetain, 12000, (CUcontext * context, CUdevice device))                     \
  X(cuDevicePrimaryCtxRelease, 12000, (CUdevice device))                                         \
  X(cuCtxGetCurrent, 12000, (CUcontext * context))                                               \
  X(cuCtxSetCurrent, 12000, (CUcontext context))                                                 \
  X(cuCtxPushCurrent, 12000, (CUcontext context))                                                \
  X(cuCtxPopCurrent, 12000, (CUcontext * context))                                               \
  X(cuCtxGetDevice, 12000, (CUdevice * device))                                                  \
  X(cuCtxSynchronize, 12000, ())                                                                 \
  X(cuStreamCreate, 12000, (CUstream * stream, unsigned int flags))                              \
  X(cuStreamDestroy, 12000, (CUstream stream))                                                   \
  X(cuStreamSynchronize, 12000, (CUstream stream))                                               \
  X(cuStreamWaitEvent, 12000, (CUstream stream, CUevent event, unsigned int flags))              \
  X(cuStreamIsCapturing, 12000, (CUstream stream, CUstreamCaptureStatus * status))               \
  X(cuStreamBeginCapture, 12000, (CUstream stream, CUstreamCaptureMode mode))                    \
  X(cuThreadExchangeStreamCaptureMode, 12000, (CUstreamCaptureMode * mode))                      \
  X(cuStreamEndCapture, 12000, (CUstream stream, CUgraph * graph))                               \
  X(cuGraphGetNodes, 12000, (CUgraph graph, CUgraphNode * nodes, std::size_t * count))           \
  X(cuGraphInstantiateWithFlags, 12000,                                                          \
    (CUgraphExec * executable, CUgraph graph, unsigned long long flags))                         \
  X(cuGraphLaunch, 12000, (CUgraphExec executable, CUstream stream))                             \
  X(cuGraphCreate, 12000, (CUgraph * graph, unsigned int flags))                                 \
  X(cuGraphAddMemcpyNode, 12000,                                                                 \
    (CUgraphNode * node, CUgraph graph, const CUgraphNode* after, std::size_t count,             \
     const CUDA_MEMCPY3D* what, CUcontext context))                                              \
  X(cuGraphAddChildGraphNode, 12000,                                                             \
    (CUgraphNode * node, CUgraph graph, const CUgraphNode* after, std::size_t count,             \
     CUgraph child))                                                                             \
  X(cuGraphExecMemcpyNodeSetParams, 12000,                                                       \
    (CUgraphExec executable, CUgraphNode node, const CUDA_MEMCPY3D* what, CUcontext context))    \
  X(cuGraphExecDestroy, 12000, (CUgraphExec executable))                                         \
  X(cuGraphDestroy, 12000, (CUgraph graph))                                                      \
  X(cuStreamQuery, 12000, (CUstream stream))                                                     \
  X(cuStreamGetCtx, 12000, (CUstream stream, CUcontext * context))                               \
  X(cuEventCreate, 12000, (CUevent * event, unsigned int flags))                                 \
  X(cuEventDestroy, 12000, (CUevent event))                                                      \
  X(cuEventRecord, 12000, (CUevent event, CUstream stream))                                      \
  X(cuEventSynchronize, 12000, (CUevent event))                                                  \
  X(cuEventQuery, 12000, (CUevent event))                                                        \
  X(cuMemcpyDtoHAsync, 12000, (void* to, CUdeviceptr from, std::size_t bytes, CUstream stream))  \
  X(cuMemcpyHtoDAsync, 12000,                                                                    \
    (CUdeviceptr to, const void* from, std::size_t bytes, CUstream stream))                      \
  X(cuMemcpyDtoDAsync, 12000,                                                                    \
    (CUdeviceptr to, CUdeviceptr from, std::size_t bytes, CUstream stream))                      \
  X(cuMemsetD8Async, 12000,                                                                      \
    (CUdeviceptr to, unsigned char value, std::size_t bytes, CUstream stream))                   \
  X(cuMemAlloc, 12000, (CUdeviceptr * memory, std::size_t bytes))                                \
  X(cuMemFree, 12000, (CUdeviceptr memory))                                                      \
  X(cuMemHostAlloc, 12000, (void** memory, std::size_t bytes, unsigned int flags))               \
  X(cuMemFreeHost, 12000, (void* memory))                                                        \
  X(cuPointerGetAttribute, 12000,                                                                \
    (void* value, CUpointer_attribute attribute, CUdeviceptr pointer))                           \
  X(cuPointerGetAttributes, 12000,                                                               \
    (unsigned int count, CUpointer_attribute* attributes, void** values, CUdeviceptr pointer))   \
  X(cuModuleLoadData, 12000, (CUmodule * module, const void* image))                             \
  X(cuModuleUnload, 12000, (CUmodule module))                                                    \
  X(cuModuleGetFunction, 12000, (CUfunction * function, CUmodule module, const char* name))      \
  X(cuFuncSetAttribute, 12000, (CUfunction function, CUfunction_attribute attribute, int value)) \
  X(cuLaunchKernel, 12000,                                                                       \
    (CUfunction function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z,         \
     unsigned int block_x, unsigned int block_y, unsigned int block_z, unsigned int shared,      \
     CUstream stream, void** parameters, void** extra))                                          \
  X(cuGetErrorName, 12000, (CUresult code, const char** text))                                   \
  X(cuGetErrorString, 12000, (CUresult code, const char** text))

/// The oldest driver that is accepted, as cuDriverGetVersion numbers it.
inline constexpr int oldest_driver_version = 12000;

namespace detail {

// What stands in a slot of the table when there is nothing to call.
template <class Function>
struct unavailable;

template <class... Args>
struct unavailable<CUresult(Args...)> {
  // There is no driver; check() adds why.
  static CUresult no_driver(Args... /*unused*/) noexcept { return CUDA_ERROR_NOT_INITIALIZED; }
  // The driver has no such function; check() says so.
  static CUresult no_entry(Args... /*unused*/) noexcept { return CUDA_ERROR_NOT_SUPPORTED; }
};

}  // namespace detail

/// What loading the driver found; for messages and `python -m jaxbridge`.
struct driver_info {
  std::string path;  ///< The file that was opened; empty if none was.
  int version = 0;   ///< As cuDriverGetVersion numbers it: 12040 is 12.4; 0: unknown.
  std::vector<const char*> missing;  ///< Names in our list that this driver lacks.
};

/// The table of driver functions: `driver::get().cuStreamQuery(s)`. No slot is ever null; without a
/// driver, or where the driver lacks the function, the call returns an error.
struct driver {
#define JAXBRIDGE_ENTRY(name, version, parameters) \
  CUresult(*name) parameters = &detail::unavailable<CUresult parameters>::no_driver;
  JAXBRIDGE_CUDA_DRIVER_FUNCTIONS(JAXBRIDGE_ENTRY)
#undef JAXBRIDGE_ENTRY

  /// The table. The first call opens the library (libcuda.so.1, or the file that the environment
  /// variable JAXBRIDGE_CUDA_DRIVER names) and calls cuInit; later ones are one atomic load. Any
  /// thread, with or without the GIL. The table lives as long as the process.
  [[nodiscard]] static const driver& get() noexcept;

  /// Whether there is a usable driver; if not, what was tried and what to do. The first answer is
  /// the answer for good.
  [[nodiscard]] static jaxbridge::status status();

  [[nodiscard]] static const driver_info& info() noexcept;

  /// The next use loads again, looking entry points up through `lookup` (null: dlsym). Earlier
  /// tables stay valid. No other thread may use the driver meanwhile.
  static void reset_for_testing(void* (*lookup)(void* library, const char* name) = nullptr);
};

namespace detail {
[[nodiscard]] jaxbridge::status failure(CUresult code, const char* what);
}  // namespace detail

/// The outcome of a driver call as a status. `what` starts with the name of the function called,
/// more may follow after a space. CUDA_ERROR_DEINITIALIZED while the process ends is no error.
[[nodiscard]] inline jaxbridge::status check(CUresult code, const char* what) {
  if (code == CUDA_SUCCESS) return {};
  return detail::failure(code, what);
}

}  // namespace jaxbridge::cuda

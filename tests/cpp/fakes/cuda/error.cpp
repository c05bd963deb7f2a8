// SPDX-License-Identifier: Apache-2.0
// The names of errors and what they say.
#include "fakes/cuda/world.hpp"

namespace fake_driver {
namespace {

const std::map<int, std::pair<const char*, const char*>>& error_texts() {
  static const std::map<int, std::pair<const char*, const char*>> texts = {
      {0, {"CUDA_SUCCESS", "no error"}},
      {1, {"CUDA_ERROR_INVALID_VALUE", "invalid argument"}},
      {2, {"CUDA_ERROR_OUT_OF_MEMORY", "out of memory"}},
      {3, {"CUDA_ERROR_NOT_INITIALIZED", "initialization error"}},
      {4, {"CUDA_ERROR_DEINITIALIZED", "driver shutting down"}},
      {100, {"CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"}},
      {101, {"CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"}},
      {201, {"CUDA_ERROR_INVALID_CONTEXT", "invalid device context"}},
      {400, {"CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"}},
      {600, {"CUDA_ERROR_NOT_READY", "device not ready"}},
      {700, {"CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"}},
      {801, {"CUDA_ERROR_NOT_SUPPORTED", "operation not supported"}},
      {900,
       {"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
        "operation not permitted when stream is capturing"}},
      {901,
       {"CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
        "operation failed due to a previous error during capture"}},
      {905,
       {"CUDA_ERROR_STREAM_CAPTURE_ISOLATION",
        "dependency created on uncaptured work in another stream"}},
      {906,
       {"CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
        "operation would make the legacy stream depend on a capturing blocking stream"}},
      {907,
       {"CUDA_ERROR_CAPTURED_EVENT",
        "operation not permitted on an event last recorded in a "
        "capturing stream"}},
  };
  return texts;
}

// The two that describe errors are neither recorded nor failed: they are no part of any path.
CUresult fake_error_name(CUresult code, const char** text) {
  const auto found = error_texts().find(code);
  *text = found != error_texts().end() ? found->second.first : nullptr;
  return *text != nullptr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult fake_error_string(CUresult code, const char** text) {
  const auto found = error_texts().find(code);
  *text = found != error_texts().end() ? found->second.second : nullptr;
  return *text != nullptr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

}  // namespace

const symbols& error_symbols() {
  static const symbols all = {
      {"cuGetErrorName", address(&fake_error_name)},
      {"cuGetErrorString", address(&fake_error_string)},
  };
  return all;
}

}  // namespace fake_driver

// SPDX-License-Identifier: Apache-2.0
// What a capture of a stream forbids, and what it leaves behind: a graph.
#include "fakes/cuda/world.hpp"

namespace fake_driver {

CUresult invalidate(capture& c, CUresult code) {
  c.invalid = true;
  return code;
}

CUresult forbidden_while_capturing() {
  const auto me = std::this_thread::get_id();
  const CUstreamCaptureMode mode = now->capture_modes[me];
  if (mode == CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_SUCCESS;
  for (const auto& c : now->captures) {
    if (!c->active || c->mode == fake_cuda::capture_mode::relaxed) continue;
    const bool is_global =
        c->mode == fake_cuda::capture_mode::global && mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
    if (c->owner == me || is_global) {
      return invalidate(*c, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    }
  }
  return CUDA_SUCCESS;
}

capture* captured_under(CUstream s) {
  if (s != &s->context->legacy) return nullptr;
  for (CUstream other : blocking_streams(s->context)) {
    if (other->capture != nullptr) return other->capture.get();
  }
  return nullptr;
}

CUresult capture_begins(CUstream stream, fake_cuda::capture_mode mode) {
  CUstream s = nullptr;
  if (const CUresult code = resolve(stream, s); code != CUDA_SUCCESS) return code;
  if (s == &s->context->legacy) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  if (s->capture != nullptr) return CUDA_ERROR_INVALID_VALUE;
  s->capture = std::make_shared<capture>();
  s->capture->owner = std::this_thread::get_id();
  s->capture->mode = mode;
  s->capture->origin = s;
  s->captured = 0;
  now->captures.push_back(s->capture);
  return CUDA_SUCCESS;
}

CUresult capture_ends(CUstream stream, std::shared_ptr<capture>& ended) {
  CUstream s = nullptr;
  if (const CUresult code = resolve(stream, s); code != CUDA_SUCCESS) return code;
  const std::shared_ptr<capture> c = s->capture;
  if (c == nullptr) return CUDA_ERROR_ILLEGAL_STATE;
  if (c->origin != s) return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
  // Ends the capture all the same.
  const bool stranger =
      c->mode == fake_cuda::capture_mode::thread_local_ && c->owner != std::this_thread::get_id();
  c->active = false;
  for (const auto& other : now->streams) {
    if (other->capture == c) other->capture = nullptr;
  }
  s->capture = nullptr;
  if (stranger) return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
  if (c->invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  if (!c->unjoined.empty()) return CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
  ended = c;
  return CUDA_SUCCESS;
}

namespace {

CUresult fake_stream_begin_capture(CUstream handle, CUstreamCaptureMode mode) {
  return entry(
      "cuStreamBeginCapture", {word(handle), word(static_cast<int>(mode))}, true,
      [&](locked&) { return capture_begins(handle, static_cast<fake_cuda::capture_mode>(mode)); });
}

CUresult fake_exchange_capture_mode(CUstreamCaptureMode* mode) {
  return entry("cuThreadExchangeStreamCaptureMode", {word(static_cast<int>(*mode))}, true,
               [&](locked&) {
                 std::swap(now->capture_modes[std::this_thread::get_id()], *mode);
                 return CUDA_SUCCESS;
               });
}

CUresult fake_stream_end_capture(CUstream handle, CUgraph* graph) {
  return entry("cuStreamEndCapture", {word(handle)}, true, [&](locked&) {
    *graph = nullptr;
    std::shared_ptr<capture> ended;
    const CUresult code = capture_ends(handle, ended);
    if (code != CUDA_SUCCESS) return code;
    auto made = std::make_unique<CUgraph_st>();
    for (const work& w : ended->recorded) {
      made->nodes.push_back(std::make_shared<CUgraphNode_st>());
      made->nodes.back()->recorded.push_back(w);
    }
    *graph = made.get();
    now->graphs.emplace(*graph, std::move(made));
    return CUDA_SUCCESS;
  });
}

CUresult fake_stream_is_capturing(CUstream handle, CUstreamCaptureStatus* state) {
  return entry("cuStreamIsCapturing", {word(handle)}, true, [&](locked&) {
    CUstream s = nullptr;
    if (const CUresult code = resolve(handle, s); code != CUDA_SUCCESS) return code;
    if (captured_under(s) != nullptr) return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    *state = s->capture == nullptr  ? CU_STREAM_CAPTURE_STATUS_NONE
             : !s->capture->invalid ? CU_STREAM_CAPTURE_STATUS_ACTIVE
                                    : CU_STREAM_CAPTURE_STATUS_INVALIDATED;
    return CUDA_SUCCESS;
  });
}

}  // namespace

const symbols& capture_symbols() {
  static const symbols all = {
      {"cuStreamBeginCapture", address(&fake_stream_begin_capture)},
      {"cuThreadExchangeStreamCaptureMode", address(&fake_exchange_capture_mode)},
      {"cuStreamEndCapture", address(&fake_stream_end_capture)},
      {"cuStreamIsCapturing", address(&fake_stream_is_capturing)},
  };
  return all;
}

}  // namespace fake_driver

// SPDX-License-Identifier: Apache-2.0
// Streams and events.
#include <algorithm>

#include "fakes/cuda/world.hpp"

namespace fake_driver {
namespace {

// For calls that ask or wait for a stream: what a capture says to it.
CUresult look_at(CUstream s) {
  if (s->capture != nullptr) {
    return invalidate(*s->capture, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  }
  if (capture* c = captured_under(s)) {
    return invalidate(*c, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
  }
  return forbidden_while_capturing();
}

CUresult fake_stream_synchronize(CUstream handle) {
  return entry("cuStreamSynchronize", {word(handle)}, true, [&](locked& l) {
    CUstream s = nullptr;
    if (const CUresult code = resolve(handle, s); code != CUDA_SUCCESS) return code;
    if (const CUresult code = look_at(s); code != CUDA_SUCCESS) return code;
    if (s == &s->context->legacy) {
      for (CUstream other : blocking_streams(s->context)) wait_for(l, other, other->enqueued);
    }
    wait_for(l, s, s->enqueued);
    return CUDA_SUCCESS;
  });
}

CUresult fake_stream_query(CUstream handle) {
  return entry("cuStreamQuery", {word(handle)}, true, [&](locked&) {
    CUstream s = nullptr;
    if (const CUresult code = resolve(handle, s); code != CUDA_SUCCESS) return code;
    if (const CUresult code = look_at(s); code != CUDA_SUCCESS) return code;
    if (const CUresult code = forbidden_while_capturing(); code != CUDA_SUCCESS) return code;
    const auto idle = [](CUstream one) { return one->executed >= one->enqueued; };
    bool all_idle = idle(s);
    if (s == &s->context->legacy) {
      for (CUstream other : blocking_streams(s->context)) all_idle = all_idle && idle(other);
    }
    return all_idle ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
  });
}

CUresult fake_stream_wait_event(CUstream handle, CUevent e, unsigned int flags) {
  return entry("cuStreamWaitEvent", {word(handle), word(e), flags}, true, [&](locked&) {
    CUstream s = nullptr;
    if (const CUresult code = resolve(handle, s); code != CUDA_SUCCESS) return code;
    if (now->events.count(e) == 0) return CUDA_ERROR_INVALID_HANDLE;
    if (s->capture != nullptr && s->capture->invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    if (e->capture != nullptr && !e->capture->active) return CUDA_ERROR_INVALID_VALUE;
    if (e->capture != nullptr && s->capture == nullptr) {
      if (s == &s->context->legacy) {
        return invalidate(*e->capture, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
      }
      // The fork: the stream becomes part of the capture.
      s->capture = e->capture;
      s->captured = 0;
      return CUDA_SUCCESS;
    }
    if (s->capture != nullptr) {
      if (e->capture != s->capture) {
        if (e->stream == nullptr) return CUDA_SUCCESS;
        return invalidate(*s->capture, CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
      }
      if (e->stream != s && e->position == e->stream->captured) {
        s->capture->unjoined.erase(e->stream);
      }
      return CUDA_SUCCESS;
    }
    if (e->stream == nullptr) return CUDA_SUCCESS;
    work w;
    w.after.emplace_back(e->stream, e->position);
    return enqueue(s, std::move(w));
  });
}

CUresult fake_stream_create(CUstream* stream, unsigned int flags) {
  return entry("cuStreamCreate", {flags}, true, [&](locked&) {
    if (current() == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
    auto made = std::make_unique<CUstream_st>();
    made->context = current();
    made->blocking = (flags & CU_STREAM_NON_BLOCKING) == 0;
    *stream = made.get();
    now->streams.push_back(std::move(made));
    ++now->created;
    return CUDA_SUCCESS;
  });
}

CUresult fake_stream_destroy(CUstream handle) {
  return entry("cuStreamDestroy", {word(handle)}, true, [&](locked&) {
    CUstream s = nullptr;
    if (const CUresult code = resolve(handle, s); code != CUDA_SUCCESS) return code;
    const auto is = [s](const auto& p) { return p.get() == s; };
    now->streams.erase(std::find_if(now->streams.begin(), now->streams.end(), is));
    --now->created;
    return CUDA_SUCCESS;
  });
}

CUresult fake_stream_get_ctx(CUstream handle, CUcontext* context) {
  return entry("cuStreamGetCtx", {word(handle)}, true, [&](locked&) {
    CUstream s = nullptr;
    if (const CUresult code = resolve(handle, s); code != CUDA_SUCCESS) return code;
    if (capture* c = captured_under(s)) {
      return invalidate(*c, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
    }
    *context = s->context;
    return CUDA_SUCCESS;
  });
}

CUresult fake_event_create(CUevent* e, unsigned int flags) {
  return entry("cuEventCreate", {flags}, true, [&](locked&) {
    if (current() == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
    auto made = std::make_unique<CUevent_st>();
    made->context = current();
    *e = made.get();
    now->events.emplace(*e, std::move(made));
    return CUDA_SUCCESS;
  });
}

CUresult fake_event_destroy(CUevent e) {
  return entry("cuEventDestroy", {word(e)}, true, [&](locked&) {
    return now->events.erase(e) == 0 ? CUDA_ERROR_INVALID_HANDLE : CUDA_SUCCESS;
  });
}

CUresult fake_event_record(CUevent e, CUstream handle) {
  return entry("cuEventRecord", {word(e), word(handle)}, true, [&](locked&) {
    CUstream s = nullptr;
    if (const CUresult code = resolve(handle, s); code != CUDA_SUCCESS) return code;
    if (now->events.count(e) == 0 || e->context != s->context) return CUDA_ERROR_INVALID_HANDLE;
    work w;
    w.kind = "record";
    w.to = word(e);
    if (const CUresult code = enqueue(s, std::move(w)); code != CUDA_SUCCESS) return code;
    e->stream = s;
    e->capture = s->capture;
    e->position = s->capture != nullptr ? s->captured : s->enqueued;
    return CUDA_SUCCESS;
  });
}

// For calls that ask or wait for an event.
CUresult look_at(CUevent e) {
  if (now->events.count(e) == 0) return CUDA_ERROR_INVALID_HANDLE;
  if (e->capture != nullptr) {
    if (!e->capture->active) return CUDA_ERROR_INVALID_VALUE;
    return invalidate(*e->capture, CUDA_ERROR_CAPTURED_EVENT);
  }
  return forbidden_while_capturing();
}

CUresult fake_event_synchronize(CUevent e) {
  return entry("cuEventSynchronize", {word(e)}, true, [&](locked& l) {
    if (const CUresult code = look_at(e); code != CUDA_SUCCESS) return code;
    if (e->stream != nullptr) wait_for(l, e->stream, e->position);
    return CUDA_SUCCESS;
  });
}

CUresult fake_event_query(CUevent e) {
  return entry("cuEventQuery", {word(e)}, true, [&](locked&) {
    if (const CUresult code = look_at(e); code != CUDA_SUCCESS) return code;
    if (const CUresult code = forbidden_while_capturing(); code != CUDA_SUCCESS) return code;
    return e->stream == nullptr || e->stream->executed >= e->position ? CUDA_SUCCESS
                                                                      : CUDA_ERROR_NOT_READY;
  });
}

}  // namespace

const symbols& stream_symbols() {
  static const symbols all = {
      {"cuStreamCreate", address(&fake_stream_create)},
      {"cuStreamDestroy", address(&fake_stream_destroy)},
      {"cuStreamSynchronize", address(&fake_stream_synchronize)},
      {"cuStreamWaitEvent", address(&fake_stream_wait_event)},
      {"cuStreamQuery", address(&fake_stream_query)},
      {"cuStreamGetCtx", address(&fake_stream_get_ctx)},
      {"cuEventCreate", address(&fake_event_create)},
      {"cuEventDestroy", address(&fake_event_destroy)},
      {"cuEventRecord", address(&fake_event_record)},
      {"cuEventSynchronize", address(&fake_event_synchronize)},
      {"cuEventQuery", address(&fake_event_query)},
  };
  return all;
}

}  // namespace fake_driver

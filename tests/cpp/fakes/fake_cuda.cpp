// SPDX-License-Identifier: Apache-2.0
// A CUDA driver without a device: records every call, fails where it is told to, and refuses what a
// stream capture forbids. One lock guards everything; its behaviour was compared with driver 580.
#include "fake_cuda.hpp"

#include <algorithm>
#include <array>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <initializer_list>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>

// The driver's handle types, which our declarations leave open.
namespace jaxbridge::cuda {

struct CUctx_st;

// A piece of work. It may start once every stream in `after` has run that many pieces.
struct work {
  const char* kind = nullptr;  // null: only waits
  std::uint64_t to = 0;
  std::uint64_t from = 0;
  std::size_t bytes = 0;
  std::vector<std::pair<CUstream, std::uint64_t>> after;
  fake_cuda::kernel_body* body = nullptr;  // of a launch
  std::vector<std::uint64_t> words = {};
  std::array<std::uint32_t, 6> shape = {};
};

struct CUfunc_st {
  CUctx_st* context = nullptr;
  std::size_t parameters = 0;
  fake_cuda::kernel_body* body = nullptr;
};

struct CUmod_st {
  CUctx_st* context = nullptr;
  std::string image;
  std::map<std::string, std::unique_ptr<CUfunc_st>> functions;
};

struct capture {
  std::thread::id owner;
  fake_cuda::capture_mode mode = fake_cuda::capture_mode::global;
  CUstream origin = nullptr;
  bool active = true;
  bool invalid = false;
  std::size_t pieces = 0;
  std::vector<work> recorded;
  std::set<CUstream> unjoined;
};

struct CUgraphNode_st {
  std::vector<work> recorded;  // one piece, or those of a child graph
  std::set<CUgraphNode> after;
  bool is_copy = false;
};

// In an order that its edges allow. Shared with the executable, by which nodes are named.
struct CUgraph_st {
  std::vector<std::shared_ptr<CUgraphNode_st>> nodes;
};

struct CUgraphExec_st {
  std::vector<std::pair<CUgraphNode, CUgraphNode_st>> nodes;
};

struct CUstream_st {
  CUctx_st* context = nullptr;
  bool blocking = true;
  fake_cuda::hold held = fake_cuda::hold::none;
  bool draining = false;
  std::deque<work> queue;
  std::uint64_t enqueued = 0;
  std::uint64_t executed = 0;
  std::shared_ptr<jaxbridge::cuda::capture> capture;
  std::uint64_t captured = 0;
};

struct CUctx_st {
  int device = 0;
  bool primary = false;
  std::size_t retains = 0;
  CUstream_st legacy;
  std::map<std::thread::id, CUstream_st> per_thread;
};

struct CUevent_st {
  CUctx_st* context = nullptr;
  CUstream stream = nullptr;  // null: never recorded
  std::uint64_t position = 0;
  std::shared_ptr<jaxbridge::cuda::capture> capture;
};

}  // namespace jaxbridge::cuda

namespace {

using namespace jaxbridge::cuda;  // NOLINT: the names of cuda.h
using fake_cuda::hold;

struct declared_memory {
  std::uintptr_t begin;
  std::size_t bytes;
  int device;
  bool on_host;
  bool managed;
  CUcontext context;  // null: the primary one of the device
};

struct world {
  int version = 12040;
  bool initialised = false;
  std::set<std::string> hidden;
  std::map<std::string, int> asked;
  std::size_t lookups = 0;

  std::string fail_symbol;
  long fail_in = 0;
  CUresult fail_code = CUDA_SUCCESS;
  bool fail_for_good = false;
  const char* failed = nullptr;

  std::string gather_symbol;
  int gather_threads = 0;
  int gathered = 0;

  std::vector<fake_cuda::call> calls;
  std::vector<fake_cuda::execution> executions;

  std::vector<std::unique_ptr<CUctx_st>> primaries;
  std::vector<std::unique_ptr<CUctx_st>> foreign;
  std::vector<std::unique_ptr<CUstream_st>> streams;
  std::map<CUevent, std::unique_ptr<CUevent_st>> events;
  std::map<CUgraph, std::unique_ptr<CUgraph_st>> graphs;
  std::map<CUgraphExec, std::unique_ptr<CUgraphExec_st>> executables;
  std::map<void*, std::size_t> host_blocks;
  std::map<void*, std::size_t> device_blocks;
  std::map<std::thread::id, std::vector<CUcontext>> contexts;
  std::map<std::thread::id, CUstreamCaptureMode> capture_modes;  // 0, the global one, at first
  std::size_t created = 0;                                       // streams, by the code under test
  std::vector<std::shared_ptr<capture>> captures;
  std::vector<declared_memory> declared;
  std::map<CUmodule, std::unique_ptr<CUmod_st>> modules;
  std::map<std::string, CUfunc_st> kernels;
};

std::mutex lock;
std::condition_variable changed;
int blocked = 0;
std::uint64_t generation = 0;
std::unique_ptr<world> now = std::make_unique<world>();

// The context stack of this thread. Not thread_local: LeakSanitizer of clang 14 dies of
// thread-local memory of a library that was opened late.
std::vector<CUcontext>& contexts() { return now->contexts[std::this_thread::get_id()]; }

CUcontext current() { return contexts().empty() ? nullptr : contexts().back(); }

template <class T>
std::uint64_t word(T value) {
  if constexpr (std::is_pointer_v<T>) {
    return reinterpret_cast<std::uintptr_t>(value);
  } else {
    return static_cast<std::uint64_t>(value);
  }
}

// ---- streams ------------------------------------------------------------------------------------

bool is_legacy(CUstream s) { return word(s) == 0 || word(s) == CU_STREAM_LEGACY; }

// Whether a context exists. A stream in a primary one stands for a library that retains it.
bool is_known(CUcontext c) {
  const auto is = [c](const auto& p) { return p.get() == c; };
  for (const auto& s : now->streams) {
    if (s->context == c) return true;
  }
  return std::any_of(now->primaries.begin(), now->primaries.end(),
                     [&](const auto& p) { return is(p) && p->retains > 0; }) ||
         std::any_of(now->foreign.begin(), now->foreign.end(), is);
}

// The stream that a handle means, or an error.
CUresult resolve(CUstream handle, CUstream& to) {
  if (word(handle) <= CU_STREAM_PER_THREAD) {
    const CUcontext c = current();
    if (c == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
    if (is_legacy(handle)) {
      to = &c->legacy;
    } else {
      to = &c->per_thread[std::this_thread::get_id()];
      to->context = c;
    }
    return CUDA_SUCCESS;
  }
  for (const auto& s : now->streams) {
    if (s.get() == handle) {
      to = handle;
      return CUDA_SUCCESS;
    }
  }
  return CUDA_ERROR_INVALID_HANDLE;
}

// All streams of a context that the legacy stream is ordered with.
std::vector<CUstream> blocking_streams(CUcontext c) {
  std::vector<CUstream> all;
  for (const auto& s : now->streams) {
    if (s->context == c && s->blocking) all.push_back(s.get());
  }
  for (auto& [thread, s] : c->per_thread) all.push_back(&s);
  return all;
}

bool may_start(const work& w) {
  return std::all_of(w.after.begin(), w.after.end(),
                     [](const auto& a) { return a.first->executed >= a.second; });
}

void execute(CUstream s, const work& w) {
  if (w.kind != nullptr) {
    if (std::strcmp(w.kind, "memset") == 0) {
      std::memset(reinterpret_cast<void*>(w.to), static_cast<int>(w.from), w.bytes);
    } else if (w.body != nullptr) {
      w.body(w.words.data(), w.shape.data());
    } else if (std::strcmp(w.kind, "record") != 0) {
      std::memcpy(reinterpret_cast<void*>(w.to), reinterpret_cast<const void*>(w.from), w.bytes);
    }
    now->executions.push_back({w.kind, s, w.to, w.from, w.bytes});
  }
  ++s->executed;
}

bool run_front(CUstream s) {
  if (s->queue.empty() || (s->held != hold::none && !s->draining) || !may_start(s->queue.front())) {
    return false;
  }
  const work w = std::move(s->queue.front());
  s->queue.pop_front();
  execute(s, w);
  return true;
}

// Runs all that can run.
void pump() {
  for (bool progress = true; progress;) {
    progress = false;
    for (const auto& s : now->streams) progress = run_front(s.get()) || progress;
    for (auto* list : {&now->primaries, &now->foreign}) {
      for (const auto& c : *list) {
        progress = run_front(&c->legacy) || progress;
        for (auto& [thread, s] : c->per_thread) progress = run_front(&s) || progress;
      }
    }
  }
  changed.notify_all();
}

// The host waits for `s` up to `position`: held streams that it depends on, and only those, run.
void drain(CUstream s, std::uint64_t position) {
  if (s->held == hold::until_released) return;
  s->draining = true;
  while (s->executed < position && !s->queue.empty()) {
    const work& w = s->queue.front();
    for (const auto& [other, needed] : w.after) {
      if (other->executed < needed) drain(other, needed);
    }
    if (!run_front(s)) break;
  }
  s->draining = false;
}

void wait_for(std::unique_lock<std::mutex>& hold_lock, CUstream s, std::uint64_t position) {
  drain(s, position);
  pump();
  ++blocked;
  changed.notify_all();
  changed.wait(hold_lock, [&] {
    if (s->executed >= position) return true;
    drain(s, position);
    return s->executed >= position;
  });
  --blocked;
  pump();
}

// ---- captures -----------------------------------------------------------------------------------

CUresult invalidate(capture& c, CUresult code) {
  c.invalid = true;
  return code;
}

// For calls that a capture in progress forbids: those of the thread, and global ones of others.
// What the thread has exchanged its mode for allows more.
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

// The legacy stream would wait for every blocking stream, which one that is captured cannot be.
capture* captured_under(CUstream s) {
  if (s != &s->context->legacy) return nullptr;
  for (CUstream other : blocking_streams(s->context)) {
    if (other->capture != nullptr) return other->capture.get();
  }
  return nullptr;
}

// Puts work on a stream, or into the capture of it.
CUresult enqueue(CUstream s, work w) {
  if (s->capture != nullptr) {
    if (s->capture->invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    ++s->capture->pieces;
    if (w.kind != nullptr) s->capture->recorded.push_back(std::move(w));
    ++s->captured;
    if (s != s->capture->origin) s->capture->unjoined.insert(s);
    return CUDA_SUCCESS;
  }
  if (capture* c = captured_under(s)) {
    return invalidate(*c, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
  }
  if (s == &s->context->legacy) {
    for (CUstream other : blocking_streams(s->context)) {
      w.after.emplace_back(other, other->enqueued);
    }
  } else if (s->blocking) {
    w.after.emplace_back(&s->context->legacy, s->context->legacy.enqueued);
  }
  s->queue.push_back(std::move(w));
  ++s->enqueued;
  pump();
  return CUDA_SUCCESS;
}

// ---- every entry point --------------------------------------------------------------------------

template <class Body>
CUresult entry(const char* name, std::initializer_list<std::uint64_t> arguments, bool needs_init,
               Body body) {
  std::unique_lock<std::mutex> hold_lock(lock);
  fake_cuda::call record{name, {}, -1};
  std::copy(arguments.begin(), arguments.end(), record.arguments);
  const std::size_t index = now->calls.size();
  const std::uint64_t began = generation;
  now->calls.push_back(record);

  if (now->gather_threads > 0 && now->gather_symbol == name) {
    ++now->gathered;
    changed.notify_all();
    changed.wait(hold_lock, [] { return now->gathered >= now->gather_threads; });
  }

  CUresult code = CUDA_SUCCESS;
  const bool meant = now->fail_symbol.empty() || now->fail_symbol == name;
  if (meant && now->fail_in > 0 && --now->fail_in == 0) {
    if (now->fail_for_good) now->fail_in = 1;
    now->failed = name;
    code = now->fail_code;
  } else if (needs_init && !now->initialised) {
    code = CUDA_ERROR_NOT_INITIALIZED;
  } else {
    code = body(hold_lock);
  }
  if (began == generation && index < now->calls.size()) now->calls[index].result = code;
  return code;
}

using locked = std::unique_lock<std::mutex>;

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
    return s->executed >= s->enqueued ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
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

CUresult fake_graph_get_nodes(CUgraph graph, CUgraphNode* nodes, std::size_t* count) {
  return entry("cuGraphGetNodes", {word(graph)}, true, [&](locked&) {
    const auto found = now->graphs.find(graph);
    if (found == now->graphs.end() || nodes != nullptr) return CUDA_ERROR_INVALID_VALUE;
    *count = found->second->nodes.size();
    return CUDA_SUCCESS;
  });
}

CUresult fake_graph_instantiate(CUgraphExec* executable, CUgraph graph, unsigned long long flags) {
  return entry("cuGraphInstantiateWithFlags", {word(graph), flags}, true, [&](locked&) {
    const auto found = now->graphs.find(graph);
    if (found == now->graphs.end()) return CUDA_ERROR_INVALID_VALUE;
    auto made = std::make_unique<CUgraphExec_st>();
    for (const auto& node : found->second->nodes) made->nodes.emplace_back(node.get(), *node);
    *executable = made.get();
    now->executables.emplace(*executable, std::move(made));
    return CUDA_SUCCESS;
  });
}

CUresult fake_graph_launch(CUgraphExec executable, CUstream handle) {
  return entry("cuGraphLaunch", {word(executable), word(handle)}, true, [&](locked&) {
    CUstream s = nullptr;
    if (const CUresult code = resolve(handle, s); code != CUDA_SUCCESS) return code;
    const auto found = now->executables.find(executable);
    if (found == now->executables.end()) return CUDA_ERROR_INVALID_VALUE;
    for (const auto& [name, node] : found->second->nodes) {
      for (const work& w : node.recorded) {
        if (const CUresult code = enqueue(s, w); code != CUDA_SUCCESS) return code;
      }
    }
    return CUDA_SUCCESS;
  });
}

CUresult fake_graph_create(CUgraph* graph, unsigned int flags) {
  return entry("cuGraphCreate", {flags}, true, [&](locked&) {
    auto made = std::make_unique<CUgraph_st>();
    *graph = made.get();
    now->graphs.emplace(*graph, std::move(made));
    return CUDA_SUCCESS;
  });
}

// A row of device memory, as the code under test copies it.
bool is_row(const CUDA_MEMCPY3D& what) {
  return what.srcMemoryType == CU_MEMORYTYPE_DEVICE && what.dstMemoryType == CU_MEMORYTYPE_DEVICE &&
         what.srcDevice != 0 && what.dstDevice != 0 && what.WidthInBytes > 0 && what.Height == 1 &&
         what.Depth == 1;
}

work copy_of(const CUDA_MEMCPY3D& what) {
  return {"DtoD", what.dstDevice, what.srcDevice, what.WidthInBytes, {}};
}

// Adds a node after others of the same graph.
CUresult add_node(CUgraph graph, const CUgraphNode* after, std::size_t count,
                  std::vector<work> recorded, bool is_copy, CUgraphNode& made) {
  const auto found = now->graphs.find(graph);
  if (found == now->graphs.end()) return CUDA_ERROR_INVALID_VALUE;
  auto& nodes = found->second->nodes;
  auto node = std::make_shared<CUgraphNode_st>();
  node->recorded = std::move(recorded);
  node->is_copy = is_copy;
  for (std::size_t i = 0; i < count; ++i) {
    const auto is = [&](const auto& n) { return n.get() == after[i]; };
    if (std::none_of(nodes.begin(), nodes.end(), is)) return CUDA_ERROR_INVALID_VALUE;
    node->after.insert(after[i]);
  }
  made = node.get();
  nodes.push_back(std::move(node));
  return CUDA_SUCCESS;
}

CUresult fake_graph_add_memcpy_node(CUgraphNode* node, CUgraph graph, const CUgraphNode* after,
                                    std::size_t count, const CUDA_MEMCPY3D* what,
                                    CUcontext context) {
  return entry("cuGraphAddMemcpyNode", {word(graph), count, word(context)}, true, [&](locked&) {
    if (!is_row(*what) || context == nullptr) return CUDA_ERROR_INVALID_VALUE;
    return add_node(graph, after, count, {copy_of(*what)}, true, *node);
  });
}

CUresult fake_graph_add_child_graph_node(CUgraphNode* node, CUgraph graph, const CUgraphNode* after,
                                         std::size_t count, CUgraph child) {
  return entry("cuGraphAddChildGraphNode", {word(graph), count, word(child)}, true, [&](locked&) {
    const auto found = now->graphs.find(child);
    if (found == now->graphs.end()) return CUDA_ERROR_INVALID_VALUE;
    std::vector<work> all;
    for (const auto& n : found->second->nodes) {
      all.insert(all.end(), n->recorded.begin(), n->recorded.end());
    }
    return add_node(graph, after, count, std::move(all), false, *node);
  });
}

CUresult fake_graph_exec_memcpy_node_set_params(CUgraphExec executable, CUgraphNode node,
                                                const CUDA_MEMCPY3D* what, CUcontext context) {
  return entry("cuGraphExecMemcpyNodeSetParams", {word(executable), word(node), word(context)},
               true, [&](locked&) {
                 const auto found = now->executables.find(executable);
                 if (found == now->executables.end() || !is_row(*what))
                   return CUDA_ERROR_INVALID_VALUE;
                 // A node ends with its graph.
                 const auto has = [&](const auto& g) {
                   const auto& nodes = g.second->nodes;
                   const auto is = [&](const auto& n) { return n.get() == node; };
                   return std::any_of(nodes.begin(), nodes.end(), is);
                 };
                 if (std::none_of(now->graphs.begin(), now->graphs.end(), has)) {
                   return CUDA_ERROR_INVALID_HANDLE;
                 }
                 for (auto& [name, copied] : found->second->nodes) {
                   if (name != node) continue;
                   if (!copied.is_copy || copied.recorded[0].bytes != what->WidthInBytes) break;
                   copied.recorded[0] = copy_of(*what);
                   return CUDA_SUCCESS;
                 }
                 return CUDA_ERROR_INVALID_VALUE;
               });
}

CUresult fake_graph_exec_destroy(CUgraphExec executable) {
  return entry("cuGraphExecDestroy", {word(executable)}, true, [&](locked&) {
    return now->executables.erase(executable) == 1 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
  });
}

CUresult fake_graph_destroy(CUgraph graph) {
  return entry("cuGraphDestroy", {word(graph)}, true, [&](locked&) {
    return now->graphs.erase(graph) == 1 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
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

CUresult fake_device_attribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  return entry("cuDeviceGetAttribute", {word(static_cast<int>(attribute)), word(device)}, true,
               [&](locked&) {
                 *value = attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR ? 9 : 0;
                 return CUDA_SUCCESS;
               });
}

CUresult fake_module_load(CUmodule* module, const void* image) {
  return entry("cuModuleLoadData", {}, true, [&](locked&) {
    if (current() == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
    if (const CUresult code = forbidden_while_capturing(); code != CUDA_SUCCESS) return code;
    auto made = std::make_unique<CUmod_st>();
    made->context = current();
    made->image = static_cast<const char*>(image);
    *module = made.get();
    now->modules.emplace(*module, std::move(made));
    return CUDA_SUCCESS;
  });
}

CUresult fake_module_unload(CUmodule module) {
  return entry("cuModuleUnload", {word(module)}, true, [&](locked&) {
    const auto found = now->modules.find(module);
    if (found == now->modules.end()) return CUDA_ERROR_INVALID_HANDLE;
    if (found->second->context != current()) return CUDA_ERROR_INVALID_CONTEXT;
    now->modules.erase(found);
    return CUDA_SUCCESS;
  });
}

CUresult fake_module_get_function(CUfunction* function, CUmodule module, const char* name) {
  return entry("cuModuleGetFunction", {word(module)}, true, [&](locked&) {
    const auto found = now->modules.find(module);
    if (found == now->modules.end()) return CUDA_ERROR_INVALID_HANDLE;
    const auto defined = now->kernels.find(name);
    if (defined == now->kernels.end() || found->second->image.find(name) == std::string::npos) {
      return CUDA_ERROR_NOT_FOUND;
    }
    auto& made = found->second->functions[name];
    if (made == nullptr) made = std::make_unique<CUfunc_st>(defined->second);
    made->context = found->second->context;
    *function = made.get();
    return CUDA_SUCCESS;
  });
}

CUresult fake_func_set_attribute(CUfunction function, CUfunction_attribute attribute, int value) {
  return entry("cuFuncSetAttribute",
               {word(function), word(static_cast<int>(attribute)), word(value)}, true,
               [&](locked&) { return CUDA_SUCCESS; });
}

CUresult fake_launch(CUfunction function, unsigned int grid_x, unsigned int grid_y,
                     unsigned int grid_z, unsigned int block_x, unsigned int block_y,
                     unsigned int block_z, unsigned int shared, CUstream handle, void** parameters,
                     void** /*extra*/) {
  return entry("cuLaunchKernel", {word(function), grid_x, block_x, shared, word(handle)}, true,
               [&](locked&) {
                 CUstream s = nullptr;
                 if (const CUresult code = resolve(handle, s); code != CUDA_SUCCESS) return code;
                 const unsigned int threads = block_x * block_y * block_z;
                 if (grid_x * grid_y * grid_z == 0 || threads == 0 || threads > 1024) {
                   return CUDA_ERROR_INVALID_VALUE;
                 }
                 if (function->context != s->context) return CUDA_ERROR_INVALID_HANDLE;
                 work w;
                 w.kind = "launch";
                 w.to = word(function);
                 w.from = std::uint64_t{grid_x} * grid_y * grid_z * threads;
                 w.body = function->body;
                 w.shape = {grid_x, grid_y, grid_z, block_x, block_y, block_z};
                 for (std::size_t i = 0; i < function->parameters; ++i) {
                   w.words.push_back(*static_cast<const std::uint64_t*>(parameters[i]));
                 }
                 return enqueue(s, std::move(w));
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

template <class F>
void* address(F* function) {
  return reinterpret_cast<void*>(function);
}

const std::map<std::string, void*>& symbols() {
  static const std::map<std::string, void*> all = {
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
      {"cuStreamCreate", address(&fake_stream_create)},
      {"cuStreamDestroy", address(&fake_stream_destroy)},
      {"cuStreamSynchronize", address(&fake_stream_synchronize)},
      {"cuStreamWaitEvent", address(&fake_stream_wait_event)},
      {"cuStreamBeginCapture", address(&fake_stream_begin_capture)},
      {"cuThreadExchangeStreamCaptureMode", address(&fake_exchange_capture_mode)},
      {"cuStreamEndCapture", address(&fake_stream_end_capture)},
      {"cuGraphGetNodes", address(&fake_graph_get_nodes)},
      {"cuGraphInstantiateWithFlags", address(&fake_graph_instantiate)},
      {"cuGraphLaunch", address(&fake_graph_launch)},
      {"cuGraphCreate", address(&fake_graph_create)},
      {"cuGraphAddMemcpyNode", address(&fake_graph_add_memcpy_node)},
      {"cuGraphAddChildGraphNode", address(&fake_graph_add_child_graph_node)},
      {"cuGraphExecMemcpyNodeSetParams", address(&fake_graph_exec_memcpy_node_set_params)},
      {"cuGraphExecDestroy", address(&fake_graph_exec_destroy)},
      {"cuGraphDestroy", address(&fake_graph_destroy)},
      {"cuStreamIsCapturing", address(&fake_stream_is_capturing)},
      {"cuStreamQuery", address(&fake_stream_query)},
      {"cuStreamGetCtx", address(&fake_stream_get_ctx)},
      {"cuEventCreate", address(&fake_event_create)},
      {"cuEventDestroy", address(&fake_event_destroy)},
      {"cuEventRecord", address(&fake_event_record)},
      {"cuEventSynchronize", address(&fake_event_synchronize)},
      {"cuEventQuery", address(&fake_event_query)},
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
      {"cuDeviceGetAttribute", address(&fake_device_attribute)},
      {"cuModuleLoadData", address(&fake_module_load)},
      {"cuModuleUnload", address(&fake_module_unload)},
      {"cuModuleGetFunction", address(&fake_module_get_function)},
      {"cuFuncSetAttribute", address(&fake_func_set_attribute)},
      {"cuLaunchKernel", address(&fake_launch)},
      {"cuGetErrorName", address(&fake_error_name)},
      {"cuGetErrorString", address(&fake_error_string)},
  };
  return all;
}

void* look_up(const char* symbol, int version) {
  const std::lock_guard<std::mutex> hold_lock(lock);
  ++now->lookups;
  now->asked[symbol] = version;
  if (now->hidden.count(symbol) != 0) return nullptr;
  const auto found = symbols().find(symbol);
  return found != symbols().end() ? found->second : nullptr;
}

// ---- control ------------------------------------------------------------------------------------

void reset(int devices) {
  const std::lock_guard<std::mutex> hold_lock(lock);
  for (const auto& [memory, bytes] : now->host_blocks) std::free(memory);
  for (const auto& [memory, bytes] : now->device_blocks) std::free(memory);
  now = std::make_unique<world>();
  ++generation;
  for (int d = 0; d < devices; ++d) {
    auto c = std::make_unique<CUctx_st>();
    c->device = d;
    c->primary = true;
    c->legacy.context = c.get();
    now->primaries.push_back(std::move(c));
  }
}

CUstream make_stream_in(CUcontext context, bool non_blocking) {
  const std::lock_guard<std::mutex> hold_lock(lock);
  auto s = std::make_unique<CUstream_st>();
  s->context = context;
  s->blocking = !non_blocking;
  now->streams.push_back(std::move(s));
  return now->streams.back().get();
}

CUcontext primary(int device) {
  const std::lock_guard<std::mutex> hold_lock(lock);
  return now->primaries.at(static_cast<std::size_t>(device)).get();
}

CUcontext make_context(int device) {
  const std::lock_guard<std::mutex> hold_lock(lock);
  auto c = std::make_unique<CUctx_st>();
  c->device = device;
  c->legacy.context = c.get();
  now->foreign.push_back(std::move(c));
  return now->foreign.back().get();
}

void hold_stream(CUstream stream, hold how) {
  const std::lock_guard<std::mutex> hold_lock(lock);
  CUstream s = nullptr;
  if (resolve(stream, s) != CUDA_SUCCESS) std::abort();
  s->held = how;
  pump();
}

CUresult begin_capture(CUstream stream, fake_cuda::capture_mode mode) {
  const std::lock_guard<std::mutex> hold_lock(lock);
  return capture_begins(stream, mode);
}

CUresult end_capture(CUstream stream, std::size_t* pieces) {
  const std::lock_guard<std::mutex> hold_lock(lock);
  std::shared_ptr<capture> ended;
  const CUresult code = capture_ends(stream, ended);
  if (code == CUDA_SUCCESS && pieces != nullptr) *pieces = ended->pieces;
  return code;
}

const fake_cuda::control the_control = {
    .reset = &reset,
    .set_driver_version =
        [](int version) {
          const std::lock_guard<std::mutex> hold_lock(lock);
          now->version = version;
        },
    .hide =
        [](const char* symbol) {
          const std::lock_guard<std::mutex> hold_lock(lock);
          now->hidden.insert(symbol);
        },
    .asked_version =
        [](const char* symbol) {
          const std::lock_guard<std::mutex> hold_lock(lock);
          const auto found = now->asked.find(symbol);
          return found != now->asked.end() ? found->second : 0;
        },
    .lookups =
        [] {
          const std::lock_guard<std::mutex> hold_lock(lock);
          return now->lookups;
        },
    .fail =
        [](const char* symbol, long nth, CUresult code, bool for_good) {
          const std::lock_guard<std::mutex> hold_lock(lock);
          now->fail_symbol = symbol != nullptr ? symbol : "";
          now->fail_in = nth;
          now->fail_code = code;
          now->fail_for_good = for_good;
          now->failed = nullptr;
        },
    .failed =
        [] {
          const std::lock_guard<std::mutex> hold_lock(lock);
          return now->failed;
        },
    .gather =
        [](const char* symbol, int threads) {
          const std::lock_guard<std::mutex> hold_lock(lock);
          now->gather_symbol = symbol;
          now->gather_threads = threads;
          now->gathered = 0;
          changed.notify_all();
        },
    .calls =
        [] {
          const std::lock_guard<std::mutex> hold_lock(lock);
          return now->calls.size();
        },
    .call_at =
        [](std::size_t index, fake_cuda::call* to) {
          const std::lock_guard<std::mutex> hold_lock(lock);
          if (index >= now->calls.size()) return false;
          *to = now->calls[index];
          return true;
        },
    .clear_calls =
        [] {
          const std::lock_guard<std::mutex> hold_lock(lock);
          now->calls.clear();
          now->executions.clear();
        },
    .executions =
        [] {
          const std::lock_guard<std::mutex> hold_lock(lock);
          return now->executions.size();
        },
    .execution_at =
        [](std::size_t index, fake_cuda::execution* to) {
          const std::lock_guard<std::mutex> hold_lock(lock);
          if (index >= now->executions.size()) return false;
          *to = now->executions[index];
          return true;
        },
    .make_stream = [](int device,
                      bool non_blocking) { return make_stream_in(primary(device), non_blocking); },
    .make_context = &make_context,
    .make_stream_in = &make_stream_in,
    .primary = &primary,
    .hold_stream = &hold_stream,
    .blocked_threads =
        [] {
          const std::lock_guard<std::mutex> hold_lock(lock);
          return blocked;
        },
    .begin_capture = &begin_capture,
    .end_capture = &end_capture,
    .declare_memory =
        [](const void* memory, std::size_t bytes, int device, bool on_host, bool managed) {
          const std::lock_guard<std::mutex> hold_lock(lock);
          now->declared.push_back(
              {reinterpret_cast<std::uintptr_t>(memory), bytes, device, on_host, managed, nullptr});
        },
    .declare_foreign_memory =
        [](const void* memory, std::size_t bytes, int device, CUcontext context) {
          const std::lock_guard<std::mutex> hold_lock(lock);
          now->declared.push_back(
              {reinterpret_cast<std::uintptr_t>(memory), bytes, device, false, false, context});
        },
    .live =
        [] {
          const std::lock_guard<std::mutex> hold_lock(lock);
          fake_cuda::live_objects sum{};
          sum.events = now->events.size();
          sum.host_blocks = now->host_blocks.size();
          sum.device_blocks = now->device_blocks.size();
          sum.streams = now->created;
          sum.graphs = now->graphs.size();
          sum.executables = now->executables.size();
          for (const auto& c : now->captures) sum.captures += c->active ? 1 : 0;
          for (const auto& [memory, bytes] : now->host_blocks) sum.host_bytes += bytes;
          sum.context_depth = contexts().size();
          for (const auto& c : now->primaries) sum.retained += c->retains;
          sum.modules = now->modules.size();
          return sum;
        },
    .define_kernel =
        [](const char* name, std::size_t parameters, fake_cuda::kernel_body* run) {
          const std::lock_guard<std::mutex> hold_lock(lock);
          now->kernels[name] = {nullptr, parameters, run};
        },
};

}  // namespace

#define FAKE_CUDA_EXPORT extern "C" __attribute__((visibility("default")))

FAKE_CUDA_EXPORT CUresult cuGetProcAddress_v2(const char* symbol, void** function, int version,
                                              std::uint64_t /*flags*/, int* found) {
  *function = look_up(symbol, version);
  // As the real one: what is not there is told by the pointer and `found` alone.
  if (found != nullptr) *found = *function != nullptr ? 0 : 1;
  return CUDA_SUCCESS;
}

FAKE_CUDA_EXPORT CUresult cuGetProcAddress(const char* symbol, void** function, int version,
                                           std::uint64_t /*flags*/) {
  *function = look_up(symbol, version);
  return *function != nullptr ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

FAKE_CUDA_EXPORT const fake_cuda::control* fake_cuda_control() { return &the_control; }

// SPDX-License-Identifier: Apache-2.0
// What exists in the fake CUDA driver, and what all of its entry points do. One lock guards
// everything.
#pragma once

#include <algorithm>
#include <array>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <initializer_list>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "fakes/fake_cuda.hpp"

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

namespace fake_driver {

using namespace jaxbridge::cuda;  // NOLINT: the names of cuda.h
using fake_cuda::hold;
using locked = std::unique_lock<std::mutex>;

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

extern std::mutex lock;
extern std::condition_variable changed;
extern int blocked;  // threads in a call that waits
extern std::uint64_t generation;
extern std::unique_ptr<world> now;

// The context stack of this thread.
std::vector<CUcontext>& contexts();
CUcontext current();

// Whether a context exists. A stream in a primary one stands for a library that retains it.
bool is_known(CUcontext c);

template <class T>
std::uint64_t word(T value) {
  if constexpr (std::is_pointer_v<T>) {
    return reinterpret_cast<std::uintptr_t>(value);
  } else {
    return static_cast<std::uint64_t>(value);
  }
}

// ---- streams ------------------------------------------------------------------------------------

// The stream that a handle means, or an error.
CUresult resolve(CUstream handle, CUstream& to);

// All streams of a context that the legacy stream is ordered with.
std::vector<CUstream> blocking_streams(CUcontext c);

// Puts work on a stream, or into the capture of it.
CUresult enqueue(CUstream s, work w);

// Runs all that can run.
void pump();

void wait_for(locked& hold_lock, CUstream s, std::uint64_t position);

// ---- captures -----------------------------------------------------------------------------------

CUresult invalidate(capture& c, CUresult code);

// For calls that a capture in progress forbids: those of the thread, and global ones of others.
// What the thread has exchanged its mode for allows more.
CUresult forbidden_while_capturing();

// The legacy stream would wait for every blocking stream, which one that is captured cannot be.
capture* captured_under(CUstream s);

CUresult capture_begins(CUstream stream, fake_cuda::capture_mode mode);
CUresult capture_ends(CUstream stream, std::shared_ptr<capture>& ended);

// ---- every entry point --------------------------------------------------------------------------

template <class Body>
CUresult entry(const char* name, std::initializer_list<std::uint64_t> arguments, bool needs_init,
               Body body) {
  locked hold_lock(lock);
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

template <class F>
void* address(F* function) {
  return reinterpret_cast<void*>(function);
}

// Entry points by their names, from one file each.
using symbols = std::map<std::string, void*>;
const symbols& device_symbols();
const symbols& stream_symbols();
const symbols& capture_symbols();
const symbols& graph_symbols();
const symbols& memory_symbols();
const symbols& kernel_symbols();
const symbols& error_symbols();

}  // namespace fake_driver

// SPDX-License-Identifier: Apache-2.0
// Control of the fake CUDA driver: what it is told to do, and what it saw.
//
// The fake is a shared library of its own, opened by the code under test through the environment
// variable JAXBRIDGE_CUDA_DRIVER. Tests reach the same instance through fake_cuda::api().
// It models devices, contexts, streams, events, captures and copies; "device memory" is any host
// memory. Work runs when it is enqueued, unless its stream is held (or waits for one that is).
#pragma once

#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "core/cuda/driver_types.hpp"

namespace fake_cuda {

using jaxbridge::cuda::CUcontext;
using jaxbridge::cuda::CUdevice;
using jaxbridge::cuda::CUevent;
using jaxbridge::cuda::CUresult;
using jaxbridge::cuda::CUstream;

/// One driver call, in the order in which they came, from all threads. cuGetProcAddress is not
/// among them.
struct call {
  const char* name;
  std::uint64_t arguments[5];
  int result;  ///< A CUresult; -1 while the call blocks.
};

/// One piece of work that ran on a stream.
struct execution {
  const char* kind;  ///< "DtoH", "HtoD", "DtoD", "memset", "record", "launch"
  CUstream stream;
  std::uint64_t to;    ///< An address; for "record" the event.
  std::uint64_t from;  ///< An address; for "memset" the value; for "launch" its number of threads.
  std::size_t bytes;
};

/// What exists now and is not given back.
struct live_objects {
  std::size_t events;
  std::size_t host_blocks;
  std::size_t device_blocks;
  std::size_t host_bytes;
  std::size_t context_depth;  ///< Of the calling thread's context stack.
  std::size_t retained;       ///< References to primary contexts.
  std::size_t streams;        ///< Made by cuStreamCreate.
  std::size_t graphs;
  std::size_t executables;
  std::size_t captures;  ///< In progress.
  std::size_t modules;
};

enum class hold : int {
  none,
  until_synchronized,  ///< Runs when the host waits for it.
  until_released,      ///< Whoever waits for it blocks until another thread sets `none`.
};

/// What a kernel does, on the host.
using kernel_body = void(const std::uint64_t* words, const std::uint32_t* shape);

enum class capture_mode : int { global = 0, thread_local_ = 1, relaxed = 2 };

struct control {
  /// A new world: `devices` devices, version 12.4, nothing recorded, hidden, failing or made.
  void (*reset)(int devices);
  void (*set_driver_version)(int version);
  /// cuGetProcAddress no longer knows `symbol`.
  void (*hide)(const char* symbol);
  /// The CUDA version that `symbol` was last asked for; 0: it was not.
  int (*asked_version)(const char* symbol);
  /// How often cuGetProcAddress was called, in either form.
  std::size_t (*lookups)();

  /// The `nth` call (1: the next) of `symbol` (null: of any) does nothing but return `code`; with
  /// `for_good` every later one too. One order at a time; nth = 0 takes it back.
  void (*fail)(const char* symbol, long nth, CUresult code, bool for_good);
  /// The name of the function that failed by order, null if none has yet.
  const char* (*failed)();

  /// Every call of `symbol` waits until `threads` threads are in it: all of them then find the same
  /// state. threads = 0 takes it back.
  void (*gather)(const char* symbol, int threads);
  /// How many came since then.
  int (*gathered)();

  std::size_t (*calls)();
  bool (*call_at)(std::size_t index, call* to);
  void (*clear_calls)();
  std::size_t (*executions)();
  bool (*execution_at)(std::size_t index, execution* to);

  CUstream (*make_stream)(int device, bool non_blocking);
  /// A context that is not the primary one, as another library would make it.
  CUcontext (*make_context)(int device);
  CUstream (*make_stream_in)(CUcontext context, bool non_blocking);
  CUcontext (*primary)(int device);
  void (*hold_stream)(CUstream stream, hold how);
  /// How many threads are inside a call that waits.
  int (*blocked_threads)();

  CUresult (*begin_capture)(CUstream stream, capture_mode mode);
  /// Ends the capture that began on `stream`; the number of captured pieces of work.
  CUresult (*end_capture)(CUstream stream, std::size_t* work);

  /// What cuPointerGetAttribute says of [memory, memory + bytes).
  void (*declare_memory)(const void* memory, std::size_t bytes, int device, bool on_host,
                         bool managed);
  /// Device memory of a context that another library made.
  void (*declare_foreign_memory)(const void* memory, std::size_t bytes, int device,
                                 CUcontext context);
  live_objects (*live)();

  /// A module whose image has `name` in it has a kernel of that name, with so many parameters. A
  /// launch calls `run` with their words and the numbers of blocks and threads of a block (x, y,
  /// z).
  void (*define_kernel)(const char* name, std::size_t parameters, kernel_body* run);
};

/// The control of the instance that JAXBRIDGE_CUDA_DRIVER names. Ends the process if there is none:
/// no test could say anything.
inline const control& api() {
  static const control* found = [] {
#ifdef JAXBRIDGE_FAKE_CUDA_PATH
    // A run by hand; ctest sets the variable.
    setenv("JAXBRIDGE_CUDA_DRIVER", JAXBRIDGE_FAKE_CUDA_PATH, 0);  // NOLINT(concurrency-mt-unsafe)
#endif
    const char* path = std::getenv("JAXBRIDGE_CUDA_DRIVER");  // NOLINT(concurrency-mt-unsafe)
    void* library = path != nullptr ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : nullptr;
    void* symbol = library != nullptr ? dlsym(library, "fake_cuda_control") : nullptr;
    if (symbol == nullptr) {
      std::fprintf(stderr, "JAXBRIDGE_CUDA_DRIVER must name the fake CUDA driver; it is '%s'\n",
                   path != nullptr ? path : "");
      std::abort();
    }
    return reinterpret_cast<const control* (*)()>(symbol)();
  }();
  return *found;
}

/// The calls so far.
inline std::vector<call> calls() {
  std::vector<call> all;
  call one{};
  for (std::size_t i = 0; api().call_at(i, &one); ++i) all.push_back(one);
  return all;
}

/// Their names.
inline std::vector<std::string> call_names() {
  std::vector<std::string> names;
  for (const call& c : calls()) names.emplace_back(c.name);
  return names;
}

inline std::size_t count(const std::string& name) {
  std::size_t n = 0;
  for (const call& c : calls()) n += name == c.name ? 1 : 0;
  return n;
}

inline std::vector<execution> executions() {
  std::vector<execution> all;
  execution one{};
  for (std::size_t i = 0; api().execution_at(i, &one); ++i) all.push_back(one);
  return all;
}

}  // namespace fake_cuda

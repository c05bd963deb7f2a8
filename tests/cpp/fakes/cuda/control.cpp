// SPDX-License-Identifier: Apache-2.0
// What tests tell the fake driver and ask of it, and the two symbols by which a program finds the
// rest.
#include <algorithm>
#include <cstdlib>

#include "fakes/cuda/world.hpp"

namespace fake_driver {

namespace {

void* look_up(const char* symbol, int version) {
  const std::lock_guard<std::mutex> hold_lock(lock);
  ++now->lookups;
  now->asked[symbol] = version;
  if (now->hidden.count(symbol) != 0) return nullptr;
  for (auto* part : {&device_symbols, &stream_symbols, &capture_symbols, &graph_symbols,
                     &memory_symbols, &kernel_symbols, &error_symbols}) {
    const auto found = part().find(symbol);
    if (found != part().end()) return found->second;
  }
  return nullptr;
}

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
    .gathered =
        [] {
          const std::lock_guard<std::mutex> hold_lock(lock);
          return now->gathered;
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

}  // namespace fake_driver

using namespace fake_driver;  // NOLINT

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

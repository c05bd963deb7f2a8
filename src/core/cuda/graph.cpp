// SPDX-License-Identifier: Apache-2.0
#include "core/cuda/graph.hpp"

#include <cstddef>
#include <mutex>
#include <vector>

#include "core/cuda/context.hpp"
#include "core/cuda/driver.hpp"
#include "core/exit.hpp"

namespace jaxbridge::cuda {
namespace {

// Streams that no capture uses now. Never destroyed: the driver may be gone before.
struct stream_pool {
  std::mutex mutex;
  std::vector<std::pair<int, CUstream>> free;
};

stream_pool& pool() {
  static stream_pool& all = *new stream_pool;
  return all;
}

// The device's context is current.
result<CUstream> lease_stream(int ordinal) {
  {
    const std::lock_guard lock(pool().mutex);
    auto& free = pool().free;
    for (auto it = free.begin(); it != free.end(); ++it) {
      if (it->first != ordinal) continue;
      CUstream found = it->second;
      free.erase(it);
      return found;
    }
  }
  CUstream made = nullptr;
  if (status s =
          check(driver::get().cuStreamCreate(&made, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
      !s.ok()) {
    return s;
  }
  return made;
}

void give_back(int ordinal, CUstream stream) {
  const std::lock_guard lock(pool().mutex);
  pool().free.emplace_back(ordinal, stream);
}

}  // namespace

graph::~graph() {
  // The driver may be gone.
  if (exiting()) return;
  const auto current = context_scope::enter(ordinal_);
  // What fails here was reported by a launch, or is by the next call.
  (void)driver::get().cuStreamSynchronize(static_cast<CUstream>(stream_.handle()));
  (void)driver::get().cuGraphExecDestroy(executable_);
}

status graph::launch() const {
  const result<context_scope> current = context_scope::enter(ordinal_);
  if (!current.ok()) return current.error();
  return check(driver::get().cuGraphLaunch(executable_, static_cast<CUstream>(stream_.handle())),
               "cuGraphLaunch");
}

result<capture> capture::begin(int ordinal) {
  const result<context_scope> current = context_scope::enter(ordinal);
  if (!current.ok()) return current.error();
  const result<CUstream> stream = lease_stream(ordinal);
  if (!stream.ok()) return stream.error();
  if (status s = check(
          driver::get().cuStreamBeginCapture(stream.value(), CU_STREAM_CAPTURE_MODE_THREAD_LOCAL),
          "cuStreamBeginCapture");
      !s.ok()) {
    give_back(ordinal, stream.value());
    return s;
  }
  return capture(ordinal, stream.value());
}

capture::~capture() {
  if (stream_ == nullptr) return;
  if (const result<CUgraph> recorded = stop(); recorded.ok()) {
    (void)driver::get().cuGraphDestroy(recorded.value());
  }
}

result<CUgraph> capture::stop() noexcept {
  CUstream const stream = std::exchange(stream_, nullptr);
  const result<context_scope> current = context_scope::enter(ordinal_);
  CUgraph recorded = nullptr;
  status s = current.ok()
                 ? check(driver::get().cuStreamEndCapture(stream, &recorded), "cuStreamEndCapture")
                 : current.error();
  if (s.ok()) {
    give_back(ordinal_, stream);
    return recorded;
  }
  // Whatever state it is in, nobody meets it again.
  (void)driver::get().cuStreamDestroy(stream);
  return s;
}

result<std::shared_ptr<graph>> capture::end(stream_ref launched_on,
                                            std::shared_ptr<void> resources) {
  const result<CUgraph> recorded = stop();
  if (!recorded.ok()) return recorded.error();
  const result<context_scope> current = context_scope::enter(ordinal_);
  const auto make = [&]() -> result<std::shared_ptr<graph>> {
    if (!current.ok()) return current.error();
    std::size_t nodes = 0;
    if (status s = check(driver::get().cuGraphGetNodes(recorded.value(), nullptr, &nodes),
                         "cuGraphGetNodes");
        !s.ok()) {
      return s;
    }
    if (nodes == 0) {
      return status(status_code::failed_precondition,
                    "the function enqueued nothing on the stream of the call");
    }
    CUgraphExec executable = nullptr;
    if (status s = check(driver::get().cuGraphInstantiate(&executable, recorded.value(), 0),
                         "cuGraphInstantiate");
        !s.ok()) {
      return s;
    }
    return std::make_shared<graph>(ordinal_, launched_on, executable, std::move(resources));
  };
  result<std::shared_ptr<graph>> made = make();
  (void)driver::get().cuGraphDestroy(recorded.value());
  return made;
}

result<CUstreamCaptureMode> exchange_capture_mode(CUstreamCaptureMode mode) {
  if (status s = check(driver::get().cuThreadExchangeStreamCaptureMode(&mode),
                       "cuThreadExchangeStreamCaptureMode");
      !s.ok()) {
    return s;
  }
  return mode;
}

void trim_capture_streams() {
  const std::lock_guard lock(pool().mutex);
  for (const auto& [ordinal, stream] : pool().free) {
    const auto current = context_scope::enter(ordinal);
    (void)driver::get().cuStreamDestroy(stream);
  }
  pool().free.clear();
}

}  // namespace jaxbridge::cuda

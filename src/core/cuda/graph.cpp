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

// Whether a node is a kernel that cuLaunchKernel launches the same way.
bool is_plain_kernel(CUgraphNode node, CUDA_KERNEL_NODE_PARAMS& to) {
  const driver& cu = driver::get();
  CUgraphNodeType type = CU_GRAPH_NODE_TYPE_MEMCPY;
  if (cu.cuGraphNodeGetType(node, &type) != CUDA_SUCCESS || type != CU_GRAPH_NODE_TYPE_KERNEL) {
    return false;
  }
  if (cu.cuGraphKernelNodeGetParams(node, &to) != CUDA_SUCCESS || to.func == nullptr) return false;
  CUlaunchAttributeValue cooperative{};
  CUlaunchAttributeValue cluster{};
  return cu.cuGraphKernelNodeGetAttribute(node, CU_LAUNCH_ATTRIBUTE_COOPERATIVE, &cooperative) ==
             CUDA_SUCCESS &&
         cu.cuGraphKernelNodeGetAttribute(node, CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, &cluster) ==
             CUDA_SUCCESS &&
         cooperative.cooperative == 0 && cluster.clusterDim.x <= 1 && cluster.clusterDim.y <= 1 &&
         cluster.clusterDim.z <= 1;
}

void give_back(int ordinal, CUstream stream) {
  const std::lock_guard lock(pool().mutex);
  pool().free.emplace_back(ordinal, stream);
}

}  // namespace

result<std::shared_ptr<graph>> graph::make(int ordinal, stream_ref stream, CUgraph recorded,
                                           std::shared_ptr<void> resources) {
  const result<context_scope> current = context_scope::enter(ordinal);
  // Owns what was recorded, also where that fails.
  const std::shared_ptr<graph> made(new graph(ordinal, stream, recorded, std::move(resources)));
  if (!current.ok()) return current.error();
  if (status s = made->prepare(); !s.ok()) return s;
  return made;
}

status graph::prepare() {
  const driver& cu = driver::get();
  std::size_t count = 0;
  if (status s = check(cu.cuGraphGetNodes(recorded_, nullptr, &count), "cuGraphGetNodes");
      !s.ok()) {
    return s;
  }
  if (count == 0) {
    return {status_code::failed_precondition,
            "the function enqueued nothing on the stream of the call"};
  }
  if (count == 1) {
    CUgraphNode node = nullptr;
    if (cu.cuGraphGetNodes(recorded_, &node, &count) == CUDA_SUCCESS &&
        is_plain_kernel(node, kernel_)) {
      return {};
    }
  }
  return check(cu.cuGraphInstantiate(&executable_, recorded_, 0), "cuGraphInstantiate");
}

graph::~graph() {
  // The driver may be gone.
  if (exiting()) return;
  const auto current = context_scope::enter(ordinal_);
  // What fails here was reported by a launch, or is by the next call.
  (void)driver::get().cuStreamSynchronize(static_cast<CUstream>(stream_.handle()));
  if (executable_ != nullptr) (void)driver::get().cuGraphExecDestroy(executable_);
  (void)driver::get().cuGraphDestroy(recorded_);
}

status graph::launch() const {
  const result<context_scope> current = context_scope::enter(ordinal_);
  if (!current.ok()) return current.error();
  CUstream const stream = static_cast<CUstream>(stream_.handle());
  if (executable_ != nullptr) {
    return check(driver::get().cuGraphLaunch(executable_, stream), "cuGraphLaunch");
  }
  const CUDA_KERNEL_NODE_PARAMS& k = kernel_;
  return check(driver::get().cuLaunchKernel(k.func, k.gridDimX, k.gridDimY, k.gridDimZ, k.blockDimX,
                                            k.blockDimY, k.blockDimZ, k.sharedMemBytes, stream,
                                            k.kernelParams, k.extra),
               "cuLaunchKernel");
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
  return graph::make(ordinal_, launched_on, recorded.value(), std::move(resources));
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

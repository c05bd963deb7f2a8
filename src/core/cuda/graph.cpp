// SPDX-License-Identifier: Apache-2.0
#include "core/cuda/graph.hpp"

#include <cstddef>
#include <mutex>
#include <utility>
#include <vector>

#include "core/cuda/capture_mode.hpp"
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

// A graph that is being made, not yet instantiated.
class graph_owner {
 public:
  explicit graph_owner(CUgraph graph) noexcept : graph_(graph) {}
  graph_owner(const graph_owner&) = delete;
  graph_owner& operator=(const graph_owner&) = delete;
  ~graph_owner() {
    if (graph_ != nullptr) (void)driver::get().cuGraphDestroy(graph_);
  }
  [[nodiscard]] CUgraph get() const noexcept { return graph_; }
  [[nodiscard]] CUgraph release() noexcept { return std::exchange(graph_, nullptr); }

 private:
  CUgraph graph_;
};

CUDA_MEMCPY3D row(const memory_copy& c) noexcept {
  CUDA_MEMCPY3D what{};
  what.srcMemoryType = CU_MEMORYTYPE_DEVICE;
  what.srcDevice = reinterpret_cast<CUdeviceptr>(c.from);
  what.dstMemoryType = CU_MEMORYTYPE_DEVICE;
  what.dstDevice = reinterpret_cast<CUdeviceptr>(c.to);
  what.WidthInBytes = c.bytes;
  what.Height = 1;
  what.Depth = 1;
  return what;
}

// Adds the copies to `graph`, each after all of `after`. Appends their nodes, null where there is
// none.
status add_copies(CUgraph graph, std::span<const memory_copy> copies,
                  const std::vector<CUgraphNode>& after, CUcontext context,
                  std::vector<CUgraphNode>& nodes) {
  for (const memory_copy& c : copies) {
    CUgraphNode node = nullptr;
    if (c.bytes > 0) {
      const CUDA_MEMCPY3D what = row(c);
      if (status s = check(driver::get().cuGraphAddMemcpyNode(&node, graph, after.data(),
                                                              after.size(), &what, context),
                           "cuGraphAddMemcpyNode");
          !s.ok()) {
        return s;
      }
    }
    nodes.push_back(node);
  }
  return {};
}

// `work` between copies, in `graph`. The nodes of the copies.
result<std::vector<CUgraphNode>> surround(CUgraph graph, CUgraph work, const copies_around& copies,
                                          CUcontext context) {
  std::vector<CUgraphNode> nodes;
  if (status s = add_copies(graph, copies.before, {}, context, nodes); !s.ok()) return s;
  std::vector<CUgraphNode> first = nodes;
  std::erase(first, nullptr);
  CUgraphNode inner = nullptr;
  if (status s = check(
          driver::get().cuGraphAddChildGraphNode(&inner, graph, first.data(), first.size(), work),
          "cuGraphAddChildGraphNode");
      !s.ok()) {
    return s;
  }
  if (status s = add_copies(graph, copies.after, {inner}, context, nodes); !s.ok()) return s;
  return nodes;
}

result<CUgraphExec> instantiate(CUgraph graph) {
  CUgraphExec made = nullptr;
  if (status s = check(driver::get().cuGraphInstantiateWithFlags(&made, graph, 0),
                       "cuGraphInstantiateWithFlags");
      !s.ok()) {
    return s;
  }
  return made;
}

}  // namespace

graph::~graph() {
  // The driver may be gone.
  if (exiting()) return;
  const relaxed_capture_scope relaxed;
  const auto current = context_scope::enter(ordinal_);
  // What fails here was reported by a launch, or is by the next call.
  (void)driver::get().cuStreamSynchronize(static_cast<CUstream>(stream_.handle()));
  (void)driver::get().cuGraphExecDestroy(executable_);
  if (source_ != nullptr) (void)driver::get().cuGraphDestroy(source_);
}

status graph::launch() const { return launch(copies_around{}); }

status graph::launch(const copies_around& copies) const {
  const result<CUcontext> context = primary_context(ordinal_);
  if (!context.ok()) return context.error();
  const result<context_scope> current = context_scope::enter(context.value());
  if (!current.ok()) return current.error();
  const driver& cu = driver::get();
  std::unique_lock lock(updating_, std::defer_lock);
  if (!copies_.empty()) lock.lock();
  std::size_t i = 0;
  for (const std::span<const memory_copy> list : {copies.before, copies.after}) {
    for (const memory_copy& c : list) {
      CUgraphNode const node = copies_[i++];
      if (node == nullptr) continue;
      const CUDA_MEMCPY3D what = row(c);
      if (status s =
              check(cu.cuGraphExecMemcpyNodeSetParams(executable_, node, &what, context.value()),
                    "cuGraphExecMemcpyNodeSetParams");
          !s.ok()) {
        return s;
      }
    }
  }
  return check(cu.cuGraphLaunch(executable_, static_cast<CUstream>(stream_.handle())),
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
  CUgraph recorded = nullptr;
  status s = check(driver::get().cuStreamEndCapture(stream, &recorded), "cuStreamEndCapture");
  if (s.ok()) {
    give_back(ordinal_, stream);
    return recorded;
  }
  // Whatever state it is in, nobody meets it again.
  const result<context_scope> current = context_scope::enter(ordinal_);
  (void)driver::get().cuStreamDestroy(stream);
  return s;
}

result<std::shared_ptr<graph>> capture::end(stream_ref launched_on, std::shared_ptr<void> resources,
                                            const copies_around& copies) {
  const result<CUgraph> recorded = stop();
  if (!recorded.ok()) return recorded.error();
  const graph_owner work(recorded.value());
  const result<CUcontext> context = primary_context(ordinal_);
  if (!context.ok()) return context.error();
  const result<context_scope> current = context_scope::enter(context.value());
  if (!current.ok()) return current.error();
  std::size_t count = 0;
  if (status s =
          check(driver::get().cuGraphGetNodes(work.get(), nullptr, &count), "cuGraphGetNodes");
      !s.ok()) {
    return s;
  }
  if (count == 0) {
    return status(status_code::failed_precondition,
                  "the function enqueued nothing on the stream of the call");
  }
  if (copies.before.empty() && copies.after.empty()) {
    const result<CUgraphExec> executable = instantiate(work.get());
    if (!executable.ok()) return executable.error();
    return std::make_shared<graph>(ordinal_, launched_on, executable.value(), nullptr,
                                   std::vector<CUgraphNode>(), std::move(resources));
  }
  CUgraph made = nullptr;
  if (status s = check(driver::get().cuGraphCreate(&made, 0), "cuGraphCreate"); !s.ok()) return s;
  graph_owner whole(made);
  result<std::vector<CUgraphNode>> nodes = surround(made, work.get(), copies, context.value());
  if (!nodes.ok()) return nodes.error();
  const result<CUgraphExec> executable = instantiate(made);
  if (!executable.ok()) return executable.error();
  return std::make_shared<graph>(ordinal_, launched_on, executable.value(), whole.release(),
                                 std::move(nodes.value()), std::move(resources));
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

// SPDX-License-Identifier: Apache-2.0
// Graphs, their nodes and their executables.
#include <algorithm>

#include "fakes/cuda/world.hpp"

namespace fake_driver {
namespace {

CUresult fake_graph_create(CUgraph* graph, unsigned int flags) {
  return entry("cuGraphCreate", {flags}, true, [&](locked&) {
    auto made = std::make_unique<CUgraph_st>();
    *graph = made.get();
    now->graphs.emplace(*graph, std::move(made));
    return CUDA_SUCCESS;
  });
}

CUresult fake_graph_destroy(CUgraph graph) {
  return entry("cuGraphDestroy", {word(graph)}, true, [&](locked&) {
    return now->graphs.erase(graph) == 1 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
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

}  // namespace

const symbols& graph_symbols() {
  static const symbols all = {
      {"cuGraphGetNodes", address(&fake_graph_get_nodes)},
      {"cuGraphInstantiateWithFlags", address(&fake_graph_instantiate)},
      {"cuGraphLaunch", address(&fake_graph_launch)},
      {"cuGraphCreate", address(&fake_graph_create)},
      {"cuGraphAddMemcpyNode", address(&fake_graph_add_memcpy_node)},
      {"cuGraphAddChildGraphNode", address(&fake_graph_add_child_graph_node)},
      {"cuGraphExecMemcpyNodeSetParams", address(&fake_graph_exec_memcpy_node_set_params)},
      {"cuGraphExecDestroy", address(&fake_graph_exec_destroy)},
      {"cuGraphDestroy", address(&fake_graph_destroy)},
  };
  return all;
}

}  // namespace fake_driver

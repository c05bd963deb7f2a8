// SPDX-License-Identifier: Apache-2.0
// Modules, functions, launches.
#include "fakes/cuda/world.hpp"

namespace fake_driver {
namespace {

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

}  // namespace

const symbols& kernel_symbols() {
  static const symbols all = {
      {"cuModuleLoadData", address(&fake_module_load)},
      {"cuModuleUnload", address(&fake_module_unload)},
      {"cuModuleGetFunction", address(&fake_module_get_function)},
      {"cuFuncSetAttribute", address(&fake_func_set_attribute)},
      {"cuLaunchKernel", address(&fake_launch)},
  };
  return all;
}

}  // namespace fake_driver

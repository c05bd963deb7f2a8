// SPDX-License-Identifier: Apache-2.0
// The kernel of add.ptx, launched from C++ for jax-tvm-ffi.
#include <dlfcn.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>

namespace {

using function = void*;
using launch = int(function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                   void*, void**, void**);

template <class F>
F* symbol(const char* name) {
  static void* const driver = dlopen("libcuda.so.1", RTLD_NOW);
  return reinterpret_cast<F*>(dlsym(driver, name));
}

function kernel = nullptr;
launch* launch_kernel = nullptr;

// Called with the context of the device current.
void load(const tvm::ffi::String& ptx) {
  void* module = nullptr;
  if (symbol<int(void**, const void*)>("cuModuleLoadData")(&module, ptx.c_str()) != 0 ||
      symbol<int(function*, void*, const char*)>("cuModuleGetFunction")(&kernel, module,
                                                                        "add_one") != 0) {
    TVM_FFI_THROW(RuntimeError) << "the kernel cannot be loaded";
  }
  launch_kernel = symbol<launch>("cuLaunchKernel");
}

void add(tvm::ffi::TensorView x, tvm::ffi::TensorView y) {
  int n = static_cast<int>(x.numel());
  void* px = x.data_ptr();
  void* py = y.data_ptr();
  void* parameters[] = {&px, &py, &n};
  void* const stream = TVMFFIEnvGetStream(x.device().device_type, x.device().device_id);
  const unsigned blocks = (static_cast<unsigned>(n) + 255) / 256;
  launch_kernel(kernel, blocks, 1, 1, 256, 1, 1, 0, stream, parameters, nullptr);
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(load, load);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(add, add);

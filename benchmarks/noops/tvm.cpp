// SPDX-License-Identifier: Apache-2.0
// A function that does nothing, for jax-tvm-ffi.
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>

namespace {

long calls = 0;

void noop(tvm::ffi::TensorView, tvm::ffi::TensorView) { ++calls; }

}  // namespace

extern "C" long calls_made() { return calls; }

TVM_FFI_DLL_EXPORT_TYPED_FUNC(noop, noop);

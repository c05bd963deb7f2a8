// SPDX-License-Identifier: Apache-2.0
// What XLA's own headers make of a function that does nothing: the floor of an external call.
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

// One call at a time, since each needs the result of the one before.
long calls = 0;

ffi::Error noop(ffi::AnyBuffer, ffi::Result<ffi::AnyBuffer>) {
  ++calls;
  return ffi::Error::Success();
}

ffi::Error noop_of_any(ffi::RemainingArgs, ffi::Result<ffi::AnyBuffer>) {
  ++calls;
  return ffi::Error::Success();
}

}  // namespace

extern "C" long calls_made() { return calls; }

XLA_FFI_DEFINE_HANDLER_SYMBOL(one_operand, noop,
                              ffi::Ffi::Bind().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(any_operands, noop_of_any,
                              ffi::Ffi::Bind().RemainingArgs().Ret<ffi::AnyBuffer>());

// SPDX-License-Identifier: Apache-2.0
// A runtime that calls a handler on CUDA, for tests in Python: a library of its own, for ctypes.
// The driver is the fake one, whose "device memory" is host memory.
#include <cstdint>
#include <cstring>
#include <string>

#include "frame_builder.hpp"

namespace {
namespace ffi = jaxbridge::abi::xla_ffi;
}  // namespace

extern "C" {

/// One buffer: XLA's number of the element type, the shape, the memory.
struct fake_xla_buffer {
  std::int32_t type;
  std::int32_t rank;
  const std::int64_t* shape;
  void* data;
};

/// Calls `handler` on device 0. Returns the code of its error, with the text in `message`, or 0.
[[gnu::visibility("default")]] int fake_xla_call(ffi::error* (*handler)(ffi::call_frame*),
                                                 std::int64_t key, const char* spec, void* stream,
                                                 const fake_xla_buffer* operands, int operand_count,
                                                 const fake_xla_buffer* results, int result_count,
                                                 char* message, std::size_t message_size) {
  fake_xla::frame_builder builder(key, spec);
  builder.context().stream = stream;
  const auto shape = [](const fake_xla_buffer& b) {
    return std::vector<std::int64_t>(b.shape, b.shape + b.rank);
  };
  for (int i = 0; i < operand_count; ++i) {
    builder.raw_operand(operands[i].type, shape(operands[i]), operands[i].data);
  }
  for (int i = 0; i < result_count; ++i) {
    builder.raw_result(results[i].type, shape(results[i]), results[i].data);
  }
  const fake_xla::outcome outcome = fake_xla::take(handler(&builder.frame()));
  std::strncpy(message, outcome.message.c_str(), message_size - 1);
  return outcome.code;
}

/// How many blocks of the runtime's memory handlers have.
[[gnu::visibility("default")]] std::int64_t fake_xla_live_blocks() {
  return fake_xla::live_blocks();
}

}  // extern "C"

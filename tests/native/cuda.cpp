// SPDX-License-Identifier: Apache-2.0
// Functions for CUDA that need no toolkit: what they enqueue is the driver's own copies.
#include <dlfcn.h>

#include <atomic>
#include <chrono>
#include <jaxbridge/jaxbridge.hpp>
#include <string>
#include <thread>

namespace jb = jaxbridge;

template <class F>
F* driver(const char* name) {
  static void* const library = dlopen("libcuda.so.1", RTLD_NOW);
  return reinterpret_cast<F*>(dlsym(library, name));
}

std::uint64_t address(const void* data) { return reinterpret_cast<std::uintptr_t>(data); }

jb::status copy_bytes(const void* from, void* to, std::size_t bytes, jb::stream_ref stream) {
  using copy = int(std::uint64_t, std::uint64_t, std::size_t, void*);
  const int code =
      driver<copy>("cuMemcpyDtoDAsync_v2")(address(to), address(from), bytes, stream.handle());
  if (code == 0) return {};
  return {jb::status_code::internal, "the copy failed with code " + std::to_string(code)};
}

jb::status set(void* to, std::int32_t value, std::size_t count, jb::stream_ref stream) {
  using set_words = int(std::uint64_t, unsigned, std::size_t, void*);
  const int code = driver<set_words>("cuMemsetD32Async")(address(to), static_cast<unsigned>(value),
                                                         count, stream.handle());
  if (code == 0) return {};
  return {jb::status_code::internal, "setting failed with code " + std::to_string(code)};
}

// One name, two functions.
jb::status fill_on_cuda(jb::stream_ref stream, jb::buffer_view<const std::int32_t> x,
                        std::int32_t value, jb::buffer_view<std::int32_t> y) {
  return set(y.data(), value, x.size(), stream);
}
void fill_on_cpu(jb::buffer_view<const std::int32_t> /*x*/, std::int32_t value,
                 jb::buffer_view<std::int32_t> y) {
  for (std::int32_t& v : y.elements()) v = value;
}
JAXBRIDGE_EXPORT_AS(fill, cuda, fill_on_cuda).parameters("x, value").result(jb::same_as<0>);
JAXBRIDGE_EXPORT_AS(fill, cpu, fill_on_cpu).parameters("x, value").result(jb::same_as<0>);

jb::status through_scratch(jb::stream_ref stream, jb::scratch& memory,
                           jb::buffer_view<const float> x, jb::buffer_view<float> y) {
  auto block = memory.allocate(x.size_bytes());
  if (!block.ok()) return block.error();
  if (auto s = copy_bytes(x.data(), block.value(), x.size_bytes(), stream); !s.ok()) return s;
  return copy_bytes(block.value(), y.data(), x.size_bytes(), stream);
}
JAXBRIDGE_EXPORT(through_scratch, cuda).parameters("x").result(jb::same_as<0>);

jb::status through_workspace(jb::stream_ref stream, jb::buffer_view<const float, 1> x,
                             jb::workspace<float> w, jb::buffer_view<float, 1> y) {
  if (auto s = copy_bytes(x.data(), w.data(), x.size_bytes(), stream); !s.ok()) return s;
  return copy_bytes(w.data(), y.data(), x.size_bytes(), stream);
}
JAXBRIDGE_EXPORT(through_workspace, cuda)
    .parameters("x[n]")
    .result(jb::same_as<0>, jb::shape("[n]"))
    .capturable();

jb::status overwrite(jb::stream_ref stream, jb::in_place<std::int32_t> x, std::int32_t value) {
  return set(x.data(), value, x.size(), stream);
}
JAXBRIDGE_EXPORT(overwrite, cuda).parameters("x, value").result(jb::same_as<0>);

struct mine {
  explicit mine(jb::device d) : ordinal(d.ordinal) {}
  std::int32_t ordinal;
};
jb::status ordinals(jb::stream_ref stream, jb::device on, jb::state<mine> state,
                    jb::buffer_view<const std::int32_t, 1> /*x*/,
                    jb::buffer_view<std::int32_t, 1> out) {
  if (auto s = set(out.data(), on.ordinal, 1, stream); !s.ok()) return s;
  return set(out.data() + 1, state->ordinal, 1, stream);
}
JAXBRIDGE_EXPORT(ordinals, cuda).parameters("x").result(jb::shape("[2]"));

// Comes back when two calls are in it at a time, each with the number that it came as; an error
// after 30 seconds.
jb::status meet(jb::stream_ref stream, jb::buffer_view<const std::int32_t, 1> x,
                jb::buffer_view<std::int32_t, 1> out) {
  static std::atomic<int> arrived = 0;
  const int number = arrived++;
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (arrived < (number / 2 + 1) * 2) {
    if (std::chrono::steady_clock::now() > end) {
      return {jb::status_code::internal, "the other call did not come"};
    }
    std::this_thread::yield();
  }
  return set(out.data(), number % 2, x.size(), stream);
}
JAXBRIDGE_EXPORT(meet, cuda).parameters("x").result(jb::same_as<0>);

// For bind: a C function that enqueues on the stream it gets.
extern "C" __attribute__((visibility("default"))) int plain_copy(const float* x, float* y,
                                                                 std::int64_t n, void* stream);
int plain_copy(const float* x, float* y, std::int64_t n, void* stream) {
  const auto bytes = static_cast<std::size_t>(n) * sizeof(float);
  return static_cast<int>(copy_bytes(x, y, bytes, jb::stream_ref(stream)).code());
}

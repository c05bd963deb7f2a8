// SPDX-License-Identifier: Apache-2.0
// Exported functions as XLA calls them, also on CUDA: frames, attributes, states, memory, threads.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <vector>

#include "fakes/frame_builder.hpp"
#include "jaxbridge/jaxbridge.hpp"
#include "jaxbridge/testing.hpp"

namespace jb = jaxbridge;
namespace ffi = jaxbridge::abi::xla_ffi;

namespace {

struct seen {
  void* stream = nullptr;
  jb::device on;
  void* scratch = nullptr;
};
seen last;

jb::status record(jb::stream_ref s, jb::device on, jb::scratch& memory,
                  jb::buffer_view<const float, 1> x, jb::buffer_view<float, 1> y) {
  auto block = memory.allocate(100);
  if (!block.ok()) return block.error();
  last = {s.handle(), on, block.value()};
  return x.size() == y.size() ? jb::status()
                              : jb::status(jb::status_code::out_of_range, "sizes differ");
}
JAXBRIDGE_EXPORT(record, cpu, cuda).parameters("x").result(jb::same_as<0>);

struct made {
  explicit made(jb::device d) : on(d) { ++count; }
  jb::device on;
  static inline int count = 0;
};

jb::status with_state(jb::state<made> s, jb::buffer_view<std::int32_t, 0> out) {
  out[0] = s->on.ordinal;
  return {};
}
JAXBRIDGE_EXPORT(with_state, cuda).result(jb::shape("[]")).capturable();

jb::status numbers(std::complex<float> c, std::span<const std::complex<double>> l,
                   std::optional<std::span<const std::int32_t>> o, jb::attributes_view d,
                   jb::buffer_view<double, 0> out) {
  out[0] = static_cast<double>(c.imag());
  for (const auto& v : l) out[0] += v.imag();
  for (const int v : o.value_or(std::span<const std::int32_t>())) out[0] += v;
  out[0] += static_cast<double>(d.size());
  return {};
}
JAXBRIDGE_EXPORT(numbers, cpu).parameters("c, l, o, d").result(jb::shape("[]"));

void twice(jb::buffer_view<const std::int32_t, 1> x, jb::buffer_view<std::int32_t, 1> y) {
  y[0] = 2 * x[0];
}
void thrice(jb::buffer_view<const std::int32_t, 2> x, jb::buffer_view<std::int32_t, 2> y) {
  y[0] = 3 * x[0];
}
JAXBRIDGE_EXPORT_AS(times, cpu, twice, thrice).result(jb::same_as<0>);

jb::status updated(jb::in_place<float, 1> x) {
  x[0] += 1;
  return {};
}
JAXBRIDGE_EXPORT(updated, cpu).result(jb::same_as<0>);

fake_xla::outcome run(ffi::handler* h, fake_xla::frame_builder& frame) {
  return fake_xla::take(h(&frame.frame()));
}

const jb::abi::native::function* find(const std::string& name, std::uint32_t platform) {
  for (const auto* f = jaxbridge_library_v1()->first; f != nullptr; f = f->next) {
    if (std::string(f->name.data, f->name.size) == name && f->platform == platform) return f;
  }
  return nullptr;
}

std::string text(const jb::abi::native::text& t) { return {t.data, t.size}; }

TEST(testing_header, calls_a_handler_with_values) {
  jb::testing::frame_builder call;
  call.operand<std::int32_t>({1}, {21}).result<std::int32_t>({1});
  ASSERT_TRUE(call.run(&jaxbridge_ffi_times_cpu).ok());
  EXPECT_EQ(call.result_values<std::int32_t>(0)[0], 42);

  jb::testing::frame_builder wrong;
  wrong.operand<float>({1}, {21}).result<std::int32_t>({1});
  const jb::testing::outcome got = wrong.run(&jaxbridge_ffi_times_cpu);
  EXPECT_EQ(got.code, 3);
  EXPECT_NE(got.message.find("times: "), std::string::npos) << got.message;
  EXPECT_EQ(jb::testing::live_errors(), 0);
}

}  // namespace

TEST(exports, say_what_they_take) {
  const auto* f = find("record", jb::abi::native::platform_cuda);
  ASSERT_NE(f, nullptr);
  EXPECT_NE(find("record", jb::abi::native::platform_cpu), nullptr);
  EXPECT_EQ(text(f->signatures), "float32[*], out float32[*]");
  EXPECT_EQ(text(f->parameters), "x");
  EXPECT_EQ(f->result_count, 1U);
  EXPECT_EQ(text(f->results[0]), "same_as 0");
  EXPECT_EQ(text(find("times", 0)->signatures),
            "int32[*], out int32[*]\nint32[*,*], out int32[*,*]");
  EXPECT_EQ(text(find("numbers", 0)->signatures),
            "complex64, list complex128, optional list int32, dict, out float64[]");
  EXPECT_EQ(find("numbers", 1), nullptr);
}

TEST(exports, get_stream_device_and_scratch_on_cuda) {
  fake_xla::frame_builder frame;
  frame.operand(jb::dtype::float32, {3}).result(jb::dtype::float32, {3});
  frame.context().stream = &frame;
  frame.context().ordinal = 2;
  last = {};
  EXPECT_EQ(run(&jaxbridge_ffi_record_cuda, frame).message, "");
  EXPECT_EQ(last.stream, &frame);
  EXPECT_EQ(last.on, (jb::device{jb::platform::cuda, 2}));
  EXPECT_NE(last.scratch, nullptr);
  EXPECT_EQ(fake_xla::live_blocks(), 0);  // XLA has it back
}

TEST(exports, get_memory_of_the_host_on_the_cpu) {
  fake_xla::frame_builder frame;
  frame.operand(jb::dtype::float32, {3}).result(jb::dtype::float32, {3});
  last = {&frame, {}, nullptr};
  EXPECT_EQ(run(&jaxbridge_ffi_record_cpu, frame).message, "");
  EXPECT_EQ(last.stream, nullptr);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(last.scratch) % 64, 0U);
}

TEST(exports, name_themselves_in_errors) {
  fake_xla::frame_builder frame;
  frame.operand(jb::dtype::float32, {3}).result(jb::dtype::float32, {4});
  const fake_xla::outcome got = run(&jaxbridge_ffi_record_cpu, frame);
  EXPECT_EQ(got.code, 11);
  EXPECT_EQ(got.message, "record: sizes differ");
  EXPECT_EQ(fake_xla::live_errors(), 0);
}

TEST(exports, refuse_other_arrays) {
  fake_xla::frame_builder other_type;
  other_type.operand(jb::dtype::float64, {3}).result(jb::dtype::float32, {3});
  EXPECT_EQ(run(&jaxbridge_ffi_record_cpu, other_type).message,
            "record: operand 'x' is float64[3], expected float32[*]");
  fake_xla::frame_builder other_rank;
  other_rank.operand(jb::dtype::float32, {3}).result(jb::dtype::float32, {3, 1});
  EXPECT_EQ(run(&jaxbridge_ffi_record_cpu, other_rank).message,
            "record: result 0 is float32[3,1], expected out float32[*]");
  fake_xla::frame_builder none;
  EXPECT_EQ(run(&jaxbridge_ffi_record_cpu, none).message, "record: got 0 operands, expected 1");
  fake_xla::frame_builder bad;
  bad.operand(jb::dtype::float32, {3}).result(jb::dtype::float32, {3});
  bad.frame();
  bad.raw_operand_at(0).rank = -1;
  EXPECT_NE(fake_xla::take(jaxbridge_ffi_record_cpu(&bad.frame())).code, -1);
}

TEST(exports, choose_the_overload_by_rank) {
  std::int32_t x = 5;
  std::int32_t y = 0;
  fake_xla::frame_builder one;
  one.raw_operand(4, {1}, &x).raw_result(4, {1}, &y);
  EXPECT_EQ(run(&jaxbridge_ffi_times_cpu, one).message, "");
  EXPECT_EQ(y, 10);
  fake_xla::frame_builder two;
  two.raw_operand(4, {1, 1}, &x).raw_result(4, {1, 1}, &y);
  EXPECT_EQ(run(&jaxbridge_ffi_times_cpu, two).message, "");
  EXPECT_EQ(y, 15);
  fake_xla::frame_builder three;
  three.raw_operand(4, {1, 1, 1}, &x).raw_result(4, {1, 1, 1}, &y);
  EXPECT_EQ(run(&jaxbridge_ffi_times_cpu, three).message,
            "times: no overload takes these arrays; there are:\nint32[*], out int32[*]\n"
            "int32[*,*], out int32[*,*]");
}

TEST(exports, read_complex_numbers_from_their_parts) {
  double y = 0;
  fake_xla::frame_builder frame;
  frame.raw_result(12, {}, &y);
  frame.attributes().array<float>("c", {1, 2}).array<double>("l", {0, 3, 0, 4});
  frame.attributes().dictionary("d").scalar("v", 1.0);
  EXPECT_EQ(run(&jaxbridge_ffi_numbers_cpu, frame).message, "");
  EXPECT_EQ(y, 2 + 3 + 4 + 1);
  frame.attributes().array<std::int32_t>("o", {10, 20});
  EXPECT_EQ(run(&jaxbridge_ffi_numbers_cpu, frame).message, "");
  EXPECT_EQ(y, 40);
  frame.attributes().array<float>("o", {10});
  EXPECT_EQ(run(&jaxbridge_ffi_numbers_cpu, frame).message,
            "numbers: attribute 'o' is missing, or not optional list int32");
}

TEST(exports, refuse_a_copy_of_what_is_updated_in_place) {
  float x = 1;
  float y = 0;
  fake_xla::frame_builder same;
  same.raw_operand(11, {1}, &x).raw_result(11, {1}, &x);
  EXPECT_EQ(run(&jaxbridge_ffi_updated_cpu, same).message, "");
  EXPECT_EQ(x, 2);
  fake_xla::frame_builder other;
  other.raw_operand(11, {1}, &x).raw_result(11, {1}, &y);
  EXPECT_EQ(run(&jaxbridge_ffi_updated_cpu, other).code, 9);
  EXPECT_EQ(x, 2);
}

TEST(exports, make_states_before_a_capture) {
  const auto* f = find("with_state", jb::abi::native::platform_cuda);
  ASSERT_NE(f->initialize, nullptr);
  std::int32_t out = -1;
  fake_xla::frame_builder frame;
  frame.raw_result(4, {}, &out);
  frame.context().ordinal = 3;
  frame.stage(ffi::stage_initialize);
  made::count = 0;
  EXPECT_EQ(fake_xla::take(f->initialize(&frame.frame())).message, "");
  EXPECT_EQ(made::count, 1);
  frame.stage(ffi::stage_execute);
  EXPECT_EQ(run(f->execute, frame).message, "");
  EXPECT_EQ(out, 3);
  EXPECT_EQ(made::count, 1);
  frame.context().ordinal = 1;
  EXPECT_EQ(run(f->execute, frame).message, "");
  EXPECT_EQ(out, 1);
  EXPECT_EQ(made::count, 2);
}

TEST(exports, answer_the_oldest_and_the_newest_runtime) {
  fake_xla::metadata_query oldest;
  jaxbridge_ffi_with_state_cuda(&oldest.frame());
  EXPECT_EQ(oldest.answer().api_version.minor_version, 1);
  EXPECT_EQ(oldest.answer().traits, ffi::trait_command_buffer_compatible);
  EXPECT_TRUE(oldest.rest_is_untouched());
  fake_xla::metadata_query newer(9);
  jaxbridge_ffi_record_cuda(&newer.frame());
  EXPECT_EQ(newer.answer().api_version.minor_version, ffi::api_minor_newest_checked);
  EXPECT_EQ(newer.answer().traits, 0U);
}

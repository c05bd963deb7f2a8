// SPDX-License-Identifier: Apache-2.0
// Call frames: what is read out of good ones, and what is said of bad ones.
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <ostream>
#include <string>
#include <thread>
#include <vector>

#include "core/dispatch/call.hpp"
#include "fakes/frame_builder.hpp"

namespace {

using fake_xla::frame_builder;
using jaxbridge::any_buffer;
using jaxbridge::dtype;
using jaxbridge::platform;
using jaxbridge::result;
using jaxbridge::status;
using jaxbridge::status_code;
using jaxbridge::dispatch::buffer_count;
using jaxbridge::dispatch::call;
using jaxbridge::dispatch::call_memory;

namespace ffi = jaxbridge::abi::xla_ffi;

// A decoded frame together with the memory of its lists.
struct decoded {
  explicit decoded(const ffi::call_frame& frame, platform where = platform::cpu) {
    const result<std::size_t> count = buffer_count(frame);
    if (!count.ok()) {
      error = count.error();
      return;
    }
    memory.emplace(count.value());
    error = jaxbridge::dispatch::decode(frame, where, memory->data(), out);
  }

  std::optional<call_memory> memory;
  call out;
  status error;
};

void expect_same(const any_buffer& got, const ffi::buffer& raw) {
  EXPECT_EQ(got.data, raw.data);
  EXPECT_EQ(static_cast<int>(got.dtype), raw.dtype);
  ASSERT_EQ(got.rank(), static_cast<std::size_t>(raw.rank));
  EXPECT_TRUE(std::equal(got.shape.begin(), got.shape.end(), raw.dims));
}

TEST(decode, reads_key_and_spec) {
  for (const std::int64_t key :
       {std::int64_t{0}, std::int64_t{-1}, std::int64_t{1} << 40,
        std::numeric_limits<std::int64_t>::min(), std::numeric_limits<std::int64_t>::max()}) {
    frame_builder b(key, "a spec: \xc3\xa9");
    b.attributes().scalar("other", 1.5).string("zzz", "more").dictionary("d");
    const decoded d(b.frame());
    ASSERT_TRUE(d.error.ok()) << d.error.message();
    EXPECT_EQ(d.out.key, key);
    EXPECT_EQ(d.out.spec, "a spec: \xc3\xa9");
    EXPECT_TRUE(d.out.operands.empty());
    EXPECT_TRUE(d.out.results.empty());
  }
}

TEST(decode, every_element_type){
#define JAXBRIDGE_ENTRY(id, text, xla, bits, dlpack)                   \
  {                                                                    \
    frame_builder b;                                                   \
    b.operand(dtype::id, {3, 5}).result(dtype::id, {7});               \
    const decoded d(b.frame());                                        \
    ASSERT_TRUE(d.error.ok()) << (text) << ": " << d.error.message();  \
    ASSERT_EQ(d.out.operands.size(), 1u);                              \
    ASSERT_EQ(d.out.results.size(), 1u);                               \
    EXPECT_EQ(d.out.operands[0].dtype, dtype::id);                     \
    EXPECT_EQ(d.out.results[0].dtype, dtype::id);                      \
    EXPECT_EQ(d.out.operands[0].size_bytes(), (15u * (bits) + 7) / 8); \
    expect_same(d.out.operands[0], b.raw_operand_at(0));               \
    expect_same(d.out.results[0], b.raw_result_at(0));                 \
  }
    JAXBRIDGE_DTYPES(JAXBRIDGE_ENTRY)
#undef JAXBRIDGE_ENTRY
}

TEST(decode, every_rank) {
  for (std::size_t rank = 0; rank <= 32; ++rank) {
    std::vector<std::int64_t> shape(rank, 1);
    if (rank > 0) shape[rank / 2] = 3;
    frame_builder b;
    b.operand(dtype::float32, shape).result(dtype::complex128, shape);
    const decoded d(b.frame());
    ASSERT_TRUE(d.error.ok()) << rank << ": " << d.error.message();
    expect_same(d.out.operands[0], b.raw_operand_at(0));
    expect_same(d.out.results[0], b.raw_result_at(0));
    EXPECT_EQ(d.out.operands[0].rank(), rank);
    EXPECT_EQ(d.out.operands[0].size(), rank == 0 ? 1u : 3u);
  }
}

TEST(decode, up_to_256_operands_and_results) {
  for (std::int64_t n = 0; n <= 256; ++n) {
    frame_builder b;
    const std::int64_t results = 256 - n;
    for (std::int64_t i = 0; i < n; ++i) b.operand(dtype::int16, {i});
    for (std::int64_t i = 0; i < results; ++i) b.result(dtype::uint8, {2, i});
    const decoded d(b.frame());
    ASSERT_TRUE(d.error.ok()) << n << ": " << d.error.message();
    ASSERT_EQ(d.out.operands.size(), static_cast<std::size_t>(n));
    ASSERT_EQ(d.out.results.size(), static_cast<std::size_t>(results));
    for (std::size_t i = 0; i < d.out.operands.size(); ++i) {
      expect_same(d.out.operands[i], b.raw_operand_at(i));
    }
    for (std::size_t i = 0; i < d.out.results.size(); ++i) {
      expect_same(d.out.results[i], b.raw_result_at(i));
    }
  }
}

TEST(decode, arrays_without_elements_may_have_no_address) {
  const std::int64_t most = std::numeric_limits<std::int64_t>::max();
  frame_builder b;
  b.raw_operand(static_cast<int>(dtype::float64), {0}, nullptr)
      .raw_operand(static_cast<int>(dtype::int4), {4, 0, 2}, nullptr)
      .raw_operand(static_cast<int>(dtype::float64), {most, 0, most}, nullptr)
      .raw_result(static_cast<int>(dtype::bool_), {1, 0}, nullptr);
  const decoded d(b.frame());
  ASSERT_TRUE(d.error.ok()) << d.error.message();
  for (const any_buffer& operand : d.out.operands) {
    EXPECT_EQ(operand.data, nullptr);
    EXPECT_EQ(operand.size(), 0u);
    EXPECT_EQ(operand.size_bytes(), 0u);
  }
  EXPECT_EQ(d.out.results[0].rank(), 2u);
}

TEST(decode, memory_of_operand_and_result_may_be_the_same) {
  float memory[2] = {};
  frame_builder b;
  b.raw_operand(static_cast<int>(dtype::float32), {2}, memory)
      .raw_result(static_cast<int>(dtype::float32), {2}, memory);
  const decoded d(b.frame());
  ASSERT_TRUE(d.error.ok());
  EXPECT_EQ(d.out.operands[0].data, d.out.results[0].data);
}

TEST(decode, asks_for_the_device) {
  frame_builder b;
  b.context().ordinal = 3;
  b.context().stream = &b;
  const decoded on_cpu(b.frame());
  ASSERT_TRUE(on_cpu.error.ok());
  EXPECT_EQ(on_cpu.out.device, (jaxbridge::device{platform::cpu, 3}));
  EXPECT_EQ(on_cpu.out.stream.handle(), nullptr);
  EXPECT_EQ(b.context().stream_calls, 0) << "the CPU has no stream: XLA's function would fail";

  const decoded on_cuda(b.frame(), platform::cuda);
  ASSERT_TRUE(on_cuda.error.ok());
  EXPECT_EQ(on_cuda.out.device, (jaxbridge::device{platform::cuda, 3}));
  EXPECT_EQ(on_cuda.out.stream.handle(), &b);
  EXPECT_EQ(b.context().stream_calls, 1);
}

TEST(decode, asks_for_the_stream_at_every_call) {
  frame_builder b;
  int streams[3] = {};
  for (int& stream : streams) {
    b.context().stream = &stream;
    const decoded d(b.frame(), platform::cuda);
    ASSERT_TRUE(d.error.ok());
    EXPECT_EQ(d.out.stream.handle(), &stream);
  }
}

TEST(decode, a_runtime_without_ordinals_has_device_0) {
  frame_builder b;
  b.context().ordinal = 3;
  b.api().struct_size = fake_xla::size_before_device_ordinal;
  const decoded d(b.frame(), platform::cuda);
  ASSERT_TRUE(d.error.ok());
  EXPECT_EQ(d.out.device.ordinal, 0);
  EXPECT_EQ(b.context().ordinal_calls, 0) << "the slot lies behind the table's end";
}

TEST(decode, newer_runtimes_have_longer_structs) {
  frame_builder b;
  b.operand(dtype::int32, {2});
  ffi::call_frame& frame = b.frame();
  frame.struct_size = sizeof(frame) + 64;
  frame.args.struct_size += 16;
  frame.rets.struct_size += 16;
  frame.attrs.struct_size += 16;
  b.raw_operand_at(0).struct_size += 16;
  b.api().struct_size += 64;
  EXPECT_TRUE(decoded(frame).error.ok());
}

// A frame and what is wrong with it.
struct fault {
  const char* name;
  std::function<void(frame_builder&, ffi::call_frame&)> spoil;
  const char* text;
  status_code code = status_code::invalid_argument;
  platform where = platform::cpu;
};

void PrintTo(const fault& f, std::ostream* out) { *out << f.name; }

class malformed_frame : public testing::TestWithParam<fault> {};

TEST_P(malformed_frame, is_an_error_that_says_what_is_wrong) {
  // Operands: int32[2, 3] and float32[]; result: float64[4].
  frame_builder b;
  b.operand(dtype::int32, {2, 3}).operand(dtype::float32, {}).result(dtype::float64, {4});
  ffi::call_frame& frame = b.frame();
  ASSERT_TRUE(decoded(frame, GetParam().where).error.ok());
  GetParam().spoil(b, frame);
  const decoded d(frame, GetParam().where);
  ASSERT_FALSE(d.error.ok());
  EXPECT_EQ(d.error.code(), GetParam().code);
  EXPECT_NE(d.error.message().find(GetParam().text), std::string::npos) << d.error.message();
  EXPECT_EQ(fake_xla::live_errors(), 0) << "XLA's error is ours to destroy";
}

constexpr std::int64_t most = std::numeric_limits<std::int64_t>::max();
constexpr auto old_runtime = "does not speak the FFI version that jaxbridge was built for";

// What to do to the frame: an expression.
#define SPOIL(...) \
  [](frame_builder& b [[maybe_unused]], ffi::call_frame& frame [[maybe_unused]]) { __VA_ARGS__; }

const fault frame_faults[] = {
    {"frame_too_short", SPOIL(frame.struct_size = offsetof(ffi::call_frame, attrs)),
     "malformed XLA call frame: struct_size 120, expected at least 168"},
    {"frame_too_short_says_why", SPOIL(frame.struct_size = 0), old_runtime},
    {"operands_too_short", SPOIL(frame.args.struct_size = 8),
     "operands have struct_size 8, expected at least 40"},
    {"operands_negative", SPOIL(frame.args.size = -1), "operands have size -1"},
    {"operands_too_many", SPOIL(frame.args.size = most), "operands have size 9223372036854775807"},
    {"operands_without_entries", SPOIL(frame.args.args = nullptr),
     "operands have size 2 but no entries"},
    {"operands_without_types", SPOIL(frame.args.types = nullptr),
     "operands have size 2 but no entries"},
    {"results_too_short", SPOIL(frame.rets.struct_size = 39),
     "results have struct_size 39, expected at least 40"},
    {"results_negative", SPOIL(frame.rets.size = -7), "results have size -7"},
    {"results_too_many", SPOIL(frame.rets.size = most), "results have size 9223372036854775807"},
    {"results_without_entries", SPOIL(frame.rets.rets = nullptr),
     "results have size 1 but no entries"},
    {"results_without_types", SPOIL(frame.rets.types = nullptr),
     "results have size 1 but no entries"},
    {"table_null", SPOIL(frame.api = nullptr), "no table of functions"},
    {"table_too_short", SPOIL(b.api().struct_size = fake_xla::size_before_stream),
     "no table of functions"},
    {"device_fails", SPOIL(b.context().ordinal_error = "no device here"),
     "XLA names no device for this call: no device here", status_code::internal},
    {"stream_fails", SPOIL(b.context().stream_error = "no stream here"),
     "XLA gives no stream for this call: no stream here", status_code::internal, platform::cuda},
};

const fault buffer_faults[] = {
    {"operand_type", SPOIL(b.operand_types()[1] = static_cast<ffi::argument_type>(2)),
     "operand 1 is not a buffer (type 2)"},
    {"operand_null", SPOIL(b.operand_entries()[0] = nullptr), "operand 0 is not a buffer (type 1)"},
    {"result_type", SPOIL(b.result_types()[0] = static_cast<ffi::return_type>(-3)),
     "result 0 is not a buffer (type -3)"},
    {"result_null", SPOIL(b.result_entries()[0] = nullptr), "result 0 is not a buffer (type 1)"},
    {"too_short", SPOIL(b.raw_operand_at(1).struct_size = 40),
     "operand 1 has struct_size 40, expected at least 48"},
    {"rank_negative", SPOIL(b.raw_operand_at(0).rank = -1), "operand 0 has rank -1"},
    {"without_extents", SPOIL(b.raw_operand_at(0).dims = nullptr),
     "operand 0 has rank 2 but no extents"},
    {"extent_negative", SPOIL(b.raw_result_at(0).dims[0] = -4), "result 0 has extent -4"},
    {"extent_negative_beside_0",
     SPOIL(b.raw_operand_at(0).dims[0] = 0, b.raw_operand_at(0).dims[1] = -1),
     "operand 0 has extent -1"},
    {"without_memory", SPOIL(b.raw_operand_at(1).data = nullptr),
     "operand 1 has elements but no memory"},
    {"size_overflows", SPOIL(b.raw_operand_at(0).dims[0] = most),
     "operand 0 is larger than the address space"},
    {"size_wraps_to_0",
     SPOIL(b.raw_operand_at(0).dims[0] = std::int64_t{1} << 62, b.raw_operand_at(0).dims[1] = 8),
     "operand 0 is larger than the address space"},
    {"size_is_most_of_64_bits",
     SPOIL(b.raw_operand_at(0).dtype = static_cast<int>(dtype::uint1),
           b.raw_operand_at(0).dims[0] = most, b.raw_operand_at(0).dims[1] = 2),
     "operand 0 is larger than the address space"},
    {"element_type_unknown", SPOIL(b.raw_operand_at(0).dtype = 34),
     "operand 0 has an element type that jaxbridge does not know (XLA's number 34); cast it before "
     "the call",
     status_code::unimplemented},
    {"element_type_token", SPOIL(b.raw_result_at(0).dtype = 17),
     "result 0 has an element type that jaxbridge does not know (XLA's number 17)",
     status_code::unimplemented},
    {"element_type_negative", SPOIL(b.raw_result_at(0).dtype = -1), "(XLA's number -1)",
     status_code::unimplemented},
};

const fault attribute_faults[] = {
    {"too_short", SPOIL(frame.attrs.struct_size = 32),
     "attributes have struct_size 32, expected at least 48"},
    {"negative", SPOIL(frame.attrs.size = -2), "attributes have size -2"},
    {"without_entries", SPOIL(frame.attrs.attrs = nullptr),
     "attributes have size 2 but no entries"},
    {"without_types", SPOIL(frame.attrs.types = nullptr), "attributes have size 2 but no entries"},
    {"without_names", SPOIL(frame.attrs.names = nullptr), "attributes have no names"},
    {"none", SPOIL(frame.attrs.size = 0), "no attribute 'key' (int64)"},
    {"no_key", SPOIL(frame.attrs = b.attributes().remove("key").build()),
     "no attribute 'key' (int64) or no 'spec' (string)"},
    {"no_spec", SPOIL(frame.attrs = b.attributes().remove("spec").build()),
     "no attribute 'key' (int64) or no 'spec' (string)"},
    {"key_of_another_type",
     SPOIL(frame.attrs = b.attributes().scalar("key", std::uint64_t{1}).build()),
     "no attribute 'key' (int64)"},
    {"key_is_a_string", SPOIL(frame.attrs = b.attributes().string("key", "1").build()),
     "no attribute 'key' (int64)"},
    {"spec_is_a_number", SPOIL(frame.attrs = b.attributes().scalar("spec", 1.0).build()),
     "no 'spec' (string)"},
};

std::string fault_name(const testing::TestParamInfo<fault>& test) { return test.param.name; }

INSTANTIATE_TEST_SUITE_P(frame, malformed_frame, testing::ValuesIn(frame_faults), fault_name);
INSTANTIATE_TEST_SUITE_P(buffers, malformed_frame, testing::ValuesIn(buffer_faults), fault_name);
INSTANTIATE_TEST_SUITE_P(attributes, malformed_frame, testing::ValuesIn(attribute_faults),
                         fault_name);

TEST(call_memory, is_used_again_by_the_next_call) {
  const any_buffer* first = nullptr;
  {
    const call_memory memory(8);
    first = memory.data();
  }
  const call_memory memory(8);
  EXPECT_EQ(memory.data(), first);
}

TEST(call_memory, has_an_address_also_for_no_buffers) { EXPECT_NE(call_memory(0).data(), nullptr); }

// Deep enough, and growing, so that every container behind it is enlarged below live lists.
void nest(int depth) {
  const std::size_t count = static_cast<std::size_t>(depth) * 7 + 1;
  const call_memory memory(count);
  for (std::size_t i = 0; i < count; ++i) memory.data()[i].data = &memory.data()[i];
  if (depth < 40) {
    nest(depth + 1);
    nest(40);
  }
  for (std::size_t i = 0; i < count; ++i) ASSERT_EQ(memory.data()[i].data, &memory.data()[i]);
}

TEST(call_memory, of_an_outer_call_stays_as_it_is) { nest(0); }

TEST(call_memory, threads_share_none) {
  const call_memory mine(4);
  any_buffer* theirs = nullptr;
  std::thread([&] { theirs = call_memory(4).data(); }).join();
  EXPECT_NE(mine.data(), theirs);
}

TEST(call_memory, says_when_there_is_none) {
  const std::size_t impossible = std::numeric_limits<std::size_t>::max() / 2;
  {
    const call_memory memory(impossible);
    EXPECT_EQ(memory.data(), nullptr);
    const call_memory inner(4);
    EXPECT_NE(inner.data(), nullptr);
  }
  EXPECT_NE(call_memory(4).data(), nullptr);
}

}  // namespace

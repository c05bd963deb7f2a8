// SPDX-License-Identifier: Apache-2.0
// The handlers, called as XLA calls them.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <cstdint>
#include <latch>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "core/dispatch/call.hpp"
#include "core/dispatch/entry_points.hpp"
#include "core/dispatch/registry.hpp"
#include "fakes/frame_builder.hpp"
#include "fakes/function_target.hpp"

namespace {

using fake_xla::frame_builder;
using fake_xla::metadata_query;
using fake_xla::outcome;
using fake_xla::registration;
using fake_xla::take;
using jaxbridge::any_buffer;
using jaxbridge::dtype;
using jaxbridge::platform;
using jaxbridge::status;
using jaxbridge::status_code;
using jaxbridge::dispatch::answered_api_minor;
using jaxbridge::dispatch::call;
using jaxbridge::dispatch::call_cpu;
using jaxbridge::dispatch::call_cuda;
using jaxbridge::dispatch::call_cuda_capturable;
using jaxbridge::dispatch::process_registry;
using jaxbridge::dispatch::runtime_api_minor;

namespace ffi = jaxbridge::abi::xla_ffi;

class entry_points : public testing::Test {
 protected:
  void TearDown() override {
    EXPECT_EQ(fake_xla::live_errors(), 0);
    EXPECT_EQ(process_registry().size(), 0u);
    process_registry().set_resolver({});
  }
};

TEST_F(entry_points, call_the_target_of_the_key) {
  int seen = 0;
  const registration wrong(1, [](const call&) { return status(status_code::internal, "wrong"); });
  const registration right(2, [&](const call& c) {
    ++seen;
    EXPECT_EQ(c.key, 2);
    EXPECT_EQ(c.spec, "the spec");
    EXPECT_EQ(c.operands.size(), 2u);
    EXPECT_EQ(c.results.size(), 1u);
    const auto at = [](const any_buffer& b) { return static_cast<float*>(b.data); };
    for (int i = 0; i < 3; ++i) at(c.results[0])[i] = at(c.operands[0])[i] + at(c.operands[1])[i];
    return status();
  });
  float x[] = {1, 2, 3};
  float y[] = {10, 20, 30};
  float z[] = {0, 0, 0};
  constexpr int f32 = static_cast<int>(dtype::float32);
  frame_builder b(2, "the spec");
  b.raw_operand(f32, {3}, x).raw_operand(f32, {3}, y).raw_result(f32, {3}, z);
  EXPECT_EQ(call_cpu(&b.frame()), nullptr);
  EXPECT_EQ(seen, 1);
  EXPECT_EQ(z[0], 11);
  EXPECT_EQ(z[2], 33);
}

TEST_F(entry_points, tell_the_platform) {
  std::vector<jaxbridge::device> devices;
  std::vector<void*> streams;
  const registration target(1, [&](const call& c) {
    devices.push_back(c.device);
    streams.push_back(c.stream.handle());
    return status();
  });
  frame_builder b(1);
  b.context().ordinal = 1;
  b.context().stream = &b;
  EXPECT_EQ(call_cpu(&b.frame()), nullptr);
  EXPECT_EQ(call_cuda(&b.frame()), nullptr);
  EXPECT_EQ(call_cuda_capturable(&b.frame()), nullptr);
  EXPECT_EQ(devices, (std::vector<jaxbridge::device>{
                         {platform::cpu, 1}, {platform::cuda, 1}, {platform::cuda, 1}}));
  EXPECT_EQ(streams, (std::vector<void*>{nullptr, &b, &b}));
}

TEST_F(entry_points, errors_cross_as_code_and_text) {
  status_code code = status_code::ok;
  std::string text;
  const registration target(1, [&](const call&) { return status(code, text); });
  frame_builder b(1);
  for (int number = 1; number <= 16; ++number) {
    code = static_cast<status_code>(number);
    text = "what went wrong, n\xc2\xb0 " + std::to_string(number);
    const outcome got = take(call_cpu(&b.frame()));
    EXPECT_EQ(got.code, number);
    EXPECT_EQ(got.message, text);
  }
  code = status_code::internal;
  text = "";
  EXPECT_EQ(take(call_cpu(&b.frame())).code, 13) << "an error without a text is one too";
  code = status_code::ok;
  text = "reported with no code";
  const outcome got = take(call_cpu(&b.frame()));
  EXPECT_EQ(got.code, 2);
  EXPECT_EQ(got.message, text);
}

TEST_F(entry_points, work_after_an_error) {
  bool fail = true;
  const registration target(
      1, [&](const call&) { return fail ? status(status_code::internal, "once") : status(); });
  frame_builder b(1);
  EXPECT_EQ(take(call_cpu(&b.frame())).message, "once");
  fail = false;
  EXPECT_EQ(call_cpu(&b.frame()), nullptr);
}

TEST_F(entry_points, a_malformed_frame_is_an_error_and_calls_nothing) {
  const registration target(1, [](const call&) {
    ADD_FAILURE() << "called";
    return status();
  });
  frame_builder b(1);
  b.operand(dtype::int8, {1});
  ffi::call_frame& frame = b.frame();
  b.raw_operand_at(0).rank = -1;
  outcome got = take(call_cpu(&frame));
  EXPECT_EQ(got.code, static_cast<int>(status_code::invalid_argument));
  EXPECT_NE(got.message.find("operand 0 has rank -1"), std::string::npos) << got.message;

  b.frame().args.size = -1;
  got = take(call_cpu(&frame));
  EXPECT_EQ(got.code, static_cast<int>(status_code::invalid_argument));
  EXPECT_NE(got.message.find("operands have size -1"), std::string::npos) << got.message;

  b.attributes().remove("key");
  got = take(call_cpu(&b.frame()));
  EXPECT_EQ(got.code, static_cast<int>(status_code::invalid_argument));
  EXPECT_NE(got.message.find("no attribute 'key' (int64)"), std::string::npos) << got.message;
}

TEST_F(entry_points, errors_of_the_runtime_cross_too) {
  const registration target(1, [](const call&) {
    ADD_FAILURE() << "called";
    return status();
  });
  frame_builder b(1);
  b.context().stream_error = "no stream in this stage";
  const outcome got = take(call_cuda(&b.frame()));
  EXPECT_EQ(got.code, static_cast<int>(status_code::internal));
  EXPECT_EQ(got.message, "XLA gives no stream for this call: no stream in this stage");
}

TEST_F(entry_points, a_missing_key_is_an_error) {
  frame_builder b(404);
  const outcome got = take(call_cpu(&b.frame()));
  EXPECT_EQ(got.code, static_cast<int>(status_code::not_found));
  EXPECT_NE(got.message.find("key 404"), std::string::npos) << got.message;
}

TEST_F(entry_points, a_missing_key_is_resolved_by_its_spec) {
  process_registry().set_resolver([](std::int64_t key, std::string_view spec) {
    EXPECT_EQ(key, 405);
    EXPECT_EQ(spec, "from a cache");
    return fake_xla::make_target([](const call& c) {
      return status(status_code::unavailable, "resolved " + std::string(c.spec));
    });
  });
  frame_builder b(405, "from a cache");
  EXPECT_EQ(take(call_cpu(&b.frame())).message, "resolved from a cache");
}

TEST_F(entry_points, do_nothing_in_other_stages) {
  const registration target(1, [](const call&) {
    ADD_FAILURE() << "called";
    return status();
  });
  frame_builder b(1);
  for (const int stage : {0, 1, 2, 4, 5, -1}) {
    b.stage(static_cast<ffi::execution_stage>(stage));
    EXPECT_EQ(call_cpu(&b.frame()), nullptr) << stage;
    EXPECT_EQ(call_cuda(&b.frame()), nullptr) << stage;
    EXPECT_EQ(call_cuda_capturable(&b.frame()), nullptr) << stage;
  }
  // An early stage has neither buffers nor key, and no target may be wanted for them.
  b.attributes().remove("key").remove("spec");
  b.stage(ffi::stage_instantiate);
  EXPECT_EQ(call_cpu(&b.frame()), nullptr);
}

TEST_F(entry_points, an_unknown_extension_is_passed_by) {
  int calls = 0;
  const registration target(1, [&](const call&) {
    ++calls;
    return status();
  });
  frame_builder b(1);
  ffi::extension_base other{sizeof(other), static_cast<ffi::extension_type>(77), nullptr};
  b.frame().extension_start = &other;
  EXPECT_EQ(call_cpu(&b.frame()), nullptr);
  EXPECT_EQ(calls, 1);
}

// A callee that runs another program finds its own lists unchanged after that.
TEST_F(entry_points, are_reentrant) {
  constexpr int deepest = 6;
  int depth = 0;
  const registration target(1, [&](const call& c) {
    const std::vector<any_buffer> operands(c.operands.begin(), c.operands.end());
    const std::vector<any_buffer> results(c.results.begin(), c.results.end());
    const std::string spec(c.spec);
    EXPECT_EQ(spec, "depth " + std::to_string(depth));
    if (depth < deepest) {
      ++depth;
      frame_builder inner(1, "depth " + std::to_string(depth));
      for (std::int64_t i = 0; i < 40 * depth; ++i) {
        inner.operand(dtype::int8, {i, 2}).result(dtype::float64, {2, i});
      }
      EXPECT_EQ(call_cpu(&inner.frame()), nullptr);
      frame_builder bad(1, "bad");
      bad.operand(dtype::int8, {});
      bad.frame();
      bad.raw_operand_at(0).dtype = 99;
      bad.raw_operand_at(0).data = nullptr;
      EXPECT_EQ(take(call_cpu(&bad.frame())).code, 12);
      --depth;
    }
    const auto same = [](const any_buffer& a, const any_buffer& b) {
      return a.data == b.data && a.dtype == b.dtype && a.shape.data() == b.shape.data() &&
             a.shape.size() == b.shape.size();
    };
    EXPECT_TRUE(std::equal(operands.begin(), operands.end(), c.operands.begin(), same));
    EXPECT_TRUE(std::equal(results.begin(), results.end(), c.results.begin(), same));
    EXPECT_EQ(c.spec, spec);
    return status();
  });
  frame_builder b(1, "depth 0");
  for (std::int64_t i = 0; i < 20; ++i) b.operand(dtype::int32, {i}).result(dtype::int32, {i, 1});
  EXPECT_EQ(call_cpu(&b.frame()), nullptr);
}

// Eight threads call on two devices, all at the same time, while targets come and go.
TEST_F(entry_points, serve_threads_and_devices_at_once) {
  constexpr std::int64_t threads = 8;
  constexpr int rounds = 200;
  int streams[2] = {};
  std::barrier inside(threads);
  std::atomic<std::int64_t> calls = 0;
  const registration target(1, [&](const call& c) {
    // All eight are inside the target once, so that none waited for another.
    if (c.spec == "first") inside.arrive_and_wait();
    ++calls;
    const auto in = static_cast<const std::int64_t*>(c.operands[0].data);
    if (c.stream.handle() != &streams[c.device.ordinal] || c.device.ordinal != in[0] % 2) {
      return status(status_code::internal, "another call's device");
    }
    for (std::int64_t i = 0; i < c.results[0].shape[0]; ++i) {
      static_cast<std::int64_t*>(c.results[0].data)[i] = in[i] + 1;
    }
    return status();
  });
  std::vector<std::thread> all;
  for (std::int64_t id = 0; id < threads; ++id) {
    all.emplace_back([&, id] {
      constexpr int i64 = static_cast<int>(dtype::int64);
      std::vector<std::int64_t> in(static_cast<std::size_t>(id) + 3, id);
      const auto n = static_cast<std::int64_t>(in.size());
      for (int round = 0; round < rounds; ++round) {
        std::vector<std::int64_t> out(in.size(), -1);
        frame_builder b(1, round == 0 ? "first" : "later");
        b.context().ordinal = static_cast<std::int32_t>(id % 2);
        b.context().stream = &streams[id % 2];
        b.raw_operand(i64, {n}, in.data()).raw_result(i64, {n}, out.data());
        const outcome got = take(call_cuda(&b.frame()));
        if (got.code != 0) inside.arrive_and_drop();  // or the others would wait for this thread
        ASSERT_EQ(got.code, 0) << got.message;
        ASSERT_EQ(out, std::vector<std::int64_t>(in.size(), id + 1));

        // A key of its own comes and goes meanwhile, and a missing one fails.
        const registration mine(100 + id, [](const call&) { return status(); });
        frame_builder own(100 + id);
        ASSERT_EQ(call_cpu(&own.frame()), nullptr);
        frame_builder missing(200 + id);
        ASSERT_EQ(take(call_cpu(&missing.frame())).code, 5);
      }
    });
  }
  for (std::thread& t : all) t.join();
  EXPECT_EQ(calls, threads * rounds);
}

TEST_F(entry_points, a_target_that_is_removed_meanwhile_ends_after_its_call) {
  std::latch running(1);
  std::latch removed(1);
  std::atomic<bool> ended = false;
  process_registry().add(1, fake_xla::make_target(
                                [&](const call&) {
                                  running.count_down();
                                  removed.wait();
                                  return status(status_code::unavailable, ended ? "late" : "alive");
                                },
                                [&] { ended = true; }));
  outcome got;
  std::thread caller([&] {
    frame_builder b(1);
    got = take(call_cpu(&b.frame()));
    if (got.message != "alive" && got.message != "late") running.count_down();  // not called
  });
  running.wait();
  process_registry().remove(1);
  removed.count_down();
  caller.join();
  EXPECT_EQ(got.message, "alive");
  EXPECT_TRUE(ended);
}

using handler = ffi::error* (*)(ffi::call_frame*) noexcept;

void expect_answer(handler h, metadata_query& query, int minor, std::uint32_t traits) {
  query.answer().api_version.major_version = -1;
  query.answer().traits = 0xdead;
  EXPECT_EQ(h(&query.frame()), nullptr);
  EXPECT_EQ(query.answer().api_version.major_version, 0);
  EXPECT_EQ(query.answer().api_version.minor_version, minor);
  EXPECT_EQ(query.answer().traits, traits);
  EXPECT_TRUE(query.rest_is_untouched());
  EXPECT_EQ(answered_api_minor(), minor);
}

class metadata : public entry_points {};

TEST_F(metadata, is_the_older_of_runtime_and_newest_checked) {
  for (int minor = 1; minor <= ffi::api_minor_newest_checked + 4; ++minor) {
    metadata_query query(minor);
    expect_answer(&call_cpu, query, std::min(minor, ffi::api_minor_newest_checked), 0);
    EXPECT_EQ(runtime_api_minor(), minor);
  }
}

TEST_F(metadata, is_the_oldest_where_the_runtime_does_not_say) {
  metadata_query query;  // the form of jaxlib 0.8.0
  expect_answer(&call_cpu, query, 1, 0);
  EXPECT_EQ(runtime_api_minor(), -1);
}

TEST_F(metadata, is_the_oldest_where_the_table_has_no_version) {
  metadata_query query(4);
  query.api().struct_size = fake_xla::size_before_version;
  expect_answer(&call_cpu, query, 1, 0);
  EXPECT_EQ(runtime_api_minor(), -1);
}

TEST_F(metadata, has_the_trait_for_the_capturable_symbol_only) {
  metadata_query query(3);
  expect_answer(&call_cpu, query, 3, 0);
  expect_answer(&call_cuda, query, 3, 0);
  expect_answer(&call_cuda_capturable, query, 3, ffi::trait_command_buffer_compatible);
  metadata_query oldest;
  expect_answer(&call_cuda, oldest, 1, 0);
  expect_answer(&call_cuda_capturable, oldest, 1, ffi::trait_command_buffer_compatible);
}

TEST_F(metadata, is_found_behind_another_extension_and_in_any_stage) {
  metadata_query query(3);
  ffi::extension_base other{sizeof(other), static_cast<ffi::extension_type>(77),
                            &query.extension().base};
  query.frame().extension_start = &other;
  expect_answer(&call_cpu, query, 3, 0);
  query.frame().stage = ffi::stage_instantiate;
  expect_answer(&call_cpu, query, 3, 0);
}

TEST_F(metadata, newer_runtimes_have_longer_structs) {
  metadata_query query(9);
  query.answer().struct_size += 24;
  query.extension().base.struct_size += 8;
  query.api().struct_size += 80;
  expect_answer(&call_cpu, query, ffi::api_minor_newest_checked, 0);
}

// A struct that is too short is not written to; the query is then a frame without a call.
TEST_F(metadata, is_not_written_where_it_does_not_fit) {
  const auto expect_no_answer = [](metadata_query& query) {
    query.answer().traits = 0xdead;
    const outcome got = take(call_cuda_capturable(&query.frame()));
    EXPECT_EQ(got.code, static_cast<int>(status_code::invalid_argument));
    EXPECT_EQ(query.answer().traits, 0xdeadu);
  };
  metadata_query short_answer(3);
  short_answer.answer().struct_size = offsetof(ffi::metadata, traits);
  expect_no_answer(short_answer);
  metadata_query short_extension(3);
  short_extension.extension().base.struct_size = sizeof(ffi::extension_base);
  expect_no_answer(short_extension);
  metadata_query no_answer(3);
  no_answer.extension().metadata = nullptr;
  expect_no_answer(no_answer);
}

// Nobody can be told, and success would mean wrong results.
TEST(entry_points_death_test, without_a_table_an_error_ends_the_process) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  frame_builder b(404);
  EXPECT_DEATH(call_cpu(&b.without_api().frame()), "no table of functions");
  b.frame().api = &b.api();
  b.api().struct_size = 8;
  EXPECT_DEATH(call_cpu(&b.frame()), "no table of functions");
}

}  // namespace

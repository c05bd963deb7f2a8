// SPDX-License-Identifier: Apache-2.0
// Programs that update memory of others, between what the owners of that enqueue.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "core/cuda/context.hpp"
#include "core/cuda/driver.hpp"
#include "core/dispatch/entry_points.hpp"
#include "core/memory/update.hpp"
#include "fakes/fake_cuda_fixture.hpp"
#include "fakes/frame_builder.hpp"

namespace {

using namespace jaxbridge::cuda;  // NOLINT: the names of cuda.h
using fake_cuda::api;
using fake_cuda::hold;
using fake_xla::frame_builder;
using fake_xla::outcome;
using fake_xla::take;
using jaxbridge::dtype;
using jaxbridge::result;
using jaxbridge::status;
using jaxbridge::stream_ref;
using jaxbridge::dispatch::enqueued_cuda;
using jaxbridge::memory::begin_update;
using jaxbridge::memory::end_update;

constexpr int f32 = static_cast<int>(dtype::float32);

class update : public fake_cuda::cuda_test {
 protected:
  void SetUp() override {
    cuda_test::SetUp();
    static_cast<void>(driver::get());
    owner_ = api().make_stream(0, true);
    xla_ = api().make_stream(0, true);
  }

  void TearDown() override {
    EXPECT_EQ(fake_xla::live_errors(), 0);
    cuda_test::TearDown();
  }

  std::uint64_t begin(std::uint64_t number = 0) {
    const result<std::uint64_t> begun = begin_update(stream_ref(owner_), stream_ref(xla_), number);
    EXPECT_TRUE(begun.ok());
    return begun.value();
  }

  result<bool> end(std::uint64_t number) { return end_update(number, stream_ref(owner_)); }

  // The end of the program, which XLA calls.
  static void run(CUstream on, std::vector<float>& content) {
    const std::vector<float> before = content;
    frame_builder b;
    b.attributes().remove("key").remove("spec");
    b.context().stream = on;
    b.raw_operand(f32, {2}, content.data()).raw_result(f32, {2}, content.data());
    EXPECT_EQ(take(enqueued_cuda(&b.frame())).code, 0);
    EXPECT_EQ(content, before);
  }

  void run() { run(xla_, content_); }

  void copy(CUstream s, const float& from, float& to) {
    const auto scope = context_scope::enter(0);
    EXPECT_EQ(
        driver::get().cuMemcpyDtoDAsync(reinterpret_cast<CUdeviceptr>(&to),
                                        reinterpret_cast<CUdeviceptr>(&from), sizeof(float), s),
        CUDA_SUCCESS);
  }

  CUstream owner_ = nullptr;
  CUstream xla_ = nullptr;
  float memory_ = 0;
  std::vector<float> content_{1, 2};
};

TEST_F(update, jax_follows_the_owner_and_the_host_does_not_wait) {
  const float late = 7;
  float seen = 0;
  api().hold_stream(owner_, hold::until_released);
  copy(owner_, late, memory_);
  begin();
  copy(xla_, memory_, seen);
  EXPECT_EQ(seen, 0);
  api().hold_stream(owner_, hold::none);
  EXPECT_EQ(seen, 7);
}

TEST_F(update, the_owner_follows_jax_and_the_host_does_not_wait) {
  const float late = 7;
  float seen = 0;
  const std::uint64_t number = begin();
  run();
  api().hold_stream(xla_, hold::until_released);
  copy(xla_, late, memory_);  // what the program has after that
  const result<bool> ended = end(number);
  ASSERT_TRUE(ended.ok());
  EXPECT_TRUE(ended.value());
  copy(owner_, memory_, seen);
  EXPECT_EQ(seen, 0);
  api().hold_stream(xla_, hold::none);
  EXPECT_EQ(seen, 7);
}

TEST_F(update, the_end_of_a_program_enqueues_nothing) {
  begin();
  api().clear_calls();
  run();
  EXPECT_EQ(api().calls(), 0u);
}

TEST_F(update, a_program_that_did_not_come_to_its_end_is_not_followed) {
  const std::uint64_t number = begin();
  api().clear_calls();
  EXPECT_FALSE(end(number).value());
  EXPECT_EQ(api().calls(), 0u);
}

TEST_F(update, a_program_of_before_is_not_followed) {
  const std::uint64_t first = begin();
  run();
  const std::uint64_t second = begin();
  EXPECT_NE(first, second);
  EXPECT_FALSE(end(second).value());
  run();
  EXPECT_FALSE(end(first).value());
  EXPECT_TRUE(end(second).value());
}

TEST_F(update, all_memory_of_a_program_is_one_update) {
  const std::uint64_t number = begin();
  EXPECT_EQ(begin(number), number);
  run();
  EXPECT_TRUE(end(number).value());
  EXPECT_TRUE(end(number).value());
}

TEST_F(update, a_program_that_another_thread_may_still_be_in_is_not_followed) {
  const std::uint64_t number = begin();
  std::thread([&] {
    begin();
    run();
  }).join();
  api().clear_calls();
  EXPECT_FALSE(end(number).value());
  EXPECT_EQ(api().calls(), 0u);
}

TEST_F(update, a_program_around_another_update_is_not_followed) {
  const std::uint64_t outer = begin();
  const std::uint64_t inner = begin();
  run();
  EXPECT_TRUE(end(inner).value());
  EXPECT_FALSE(end(outer).value()) << "it failed, perhaps";
  run();
  EXPECT_FALSE(end(outer).value());
}

TEST_F(update, a_program_around_one_whose_owner_has_no_known_stream_is_not_followed) {
  const std::uint64_t outer = begin();
  api().clear_calls();
  const result<std::uint64_t> inner = begin_update(std::nullopt, stream_ref(xla_), 0);
  ASSERT_TRUE(inner.ok());
  EXPECT_EQ(api().calls(), 0u);
  run();
  EXPECT_FALSE(end(outer).value()) << "it failed, perhaps";
}

TEST_F(update, memory_of_any_type_may_be_there) {
  const std::uint64_t number = begin();
  frame_builder b;
  b.attributes().remove("key").remove("spec");
  b.context().stream = xla_;
  constexpr int token = 17;
  b.raw_operand(f32, {2}, content_.data()).raw_operand(token, {2}, content_.data());
  b.raw_result(f32, {2}, content_.data());
  EXPECT_EQ(take(enqueued_cuda(&b.frame())).code, 0);
  EXPECT_TRUE(end(number).value());
}

TEST_F(update, a_program_on_another_stream_is_an_error) {
  const std::uint64_t number = begin();
  run(api().make_stream(0, true), content_);
  const result<bool> ended = end(number);
  ASSERT_FALSE(ended.ok());
  EXPECT_NE(ended.error().message().find("on another stream than those before"), std::string::npos);
}

TEST_F(update, an_owner_that_is_being_captured_is_an_error) {
  {
    const auto scope = context_scope::enter(0);
    ASSERT_EQ(driver::get().cuStreamBeginCapture(owner_, CU_STREAM_CAPTURE_MODE_RELAXED),
              CUDA_SUCCESS);
  }
  api().clear_calls();
  const auto begun = begin_update(stream_ref(owner_), stream_ref(xla_), 0);
  EXPECT_EQ(begun.error().code(), jaxbridge::status_code::failed_precondition);
  EXPECT_EQ(fake_cuda::call_names(), std::vector<std::string>{"cuStreamIsCapturing"});
  CUgraph graph = nullptr;
  EXPECT_EQ(driver::get().cuStreamEndCapture(owner_, &graph), CUDA_SUCCESS);
  EXPECT_EQ(driver::get().cuGraphDestroy(graph), CUDA_SUCCESS);
}

TEST_F(update, errors_of_the_driver_are_reported) {
  for (const char* name : {"cuEventRecord", "cuStreamWaitEvent"}) {
    api().fail(name, 1, CUDA_ERROR_INVALID_VALUE, false);
    EXPECT_FALSE(begin_update(stream_ref(owner_), stream_ref(xla_), 0).ok()) << name;
    const std::uint64_t number = begin();
    run();
    api().fail(name, 1, CUDA_ERROR_INVALID_VALUE, false);
    EXPECT_FALSE(end(number).ok()) << name;
  }
}

}  // namespace

// SPDX-License-Identifier: Apache-2.0
// Programs that update memory of others, and what the owners of that have enqueued.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "core/cuda/context.hpp"
#include "core/cuda/driver.hpp"
#include "core/dispatch/entry_points.hpp"
#include "core/memory/live_imports.hpp"
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
using jaxbridge::status;
using jaxbridge::stream_ref;
using jaxbridge::dispatch::fence_cuda;
using jaxbridge::memory::add_import;
using jaxbridge::memory::owner_follows;
using jaxbridge::memory::owner_wrote;
using jaxbridge::memory::remove_import;
using jaxbridge::memory::wait_for_owner;

constexpr int f32 = static_cast<int>(dtype::float32);

class fence : public fake_cuda::cuda_test {
 protected:
  void SetUp() override {
    cuda_test::SetUp();
    static_cast<void>(driver::get());
    owner_ = api().make_stream(0, true);
    xla_ = api().make_stream(0, true);
    add_import(address());
  }

  void TearDown() override {
    remove_import(address());
    EXPECT_EQ(fake_xla::live_errors(), 0);
    cuda_test::TearDown();
  }

  [[nodiscard]] std::uintptr_t address() const {
    return reinterpret_cast<std::uintptr_t>(&memory_);
  }

  outcome run(void* operand, void* result) {
    frame_builder b;
    b.attributes().remove("key").remove("spec");
    b.context().stream = xla_;
    std::uint8_t token = 7;
    b.raw_operand(f32, {1}, operand).raw_result(f32, {1}, result);
    b.raw_result(static_cast<int>(dtype::uint8), {1}, &token);
    const outcome got = take(fence_cuda(&b.frame()));
    EXPECT_EQ(token, 7);
    return got;
  }

  outcome run() { return run(&memory_, &memory_); }

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
};

TEST_F(fence, xla_waits_for_the_owner_and_the_host_does_not) {
  const float late = 7;
  float seen = 0;
  api().hold_stream(owner_, hold::until_released);
  copy(owner_, late, memory_);
  EXPECT_TRUE(owner_wrote(address(), stream_ref(owner_)).ok());
  EXPECT_EQ(run().code, 0);
  copy(xla_, memory_, seen);
  EXPECT_EQ(seen, 0);
  api().hold_stream(owner_, hold::none);
  EXPECT_EQ(seen, 7);
}

TEST_F(fence, nothing_is_waited_for_twice) {
  api().hold_stream(owner_, hold::until_released);
  EXPECT_TRUE(owner_wrote(address(), stream_ref(owner_)).ok());
  const CUstream other = api().make_stream(0, true);
  EXPECT_TRUE(wait_for_owner(address(), stream_ref(other)).ok());
  const float now = 3;
  float seen = 0;
  EXPECT_EQ(run().code, 0);
  copy(xla_, now, seen);
  EXPECT_EQ(seen, 3) << "only the first is behind the owner";
  api().hold_stream(owner_, hold::none);
}

TEST_F(fence, the_last_mark_counts) {
  const CUstream second = api().make_stream(0, true);
  EXPECT_TRUE(owner_wrote(address(), stream_ref(owner_)).ok());
  api().hold_stream(second, hold::until_released);
  const float late = 5;
  float seen = 0;
  copy(second, late, memory_);
  EXPECT_TRUE(owner_wrote(address(), stream_ref(second)).ok());
  EXPECT_EQ(run().code, 0);
  copy(xla_, memory_, seen);
  EXPECT_EQ(seen, 0);
  api().hold_stream(second, hold::none);
  EXPECT_EQ(seen, 5);
}

TEST_F(fence, a_copy_of_xlas_is_an_error) {
  float other = 0;
  const outcome moved = run(&memory_, &other);
  EXPECT_NE(moved.message.find("XLA made a copy of external array 0"), std::string::npos);
  const outcome unknown = run(&other, &other);
  EXPECT_NE(unknown.message.find("XLA made a copy of external array 0"), std::string::npos);
}

TEST_F(fence, a_frame_without_its_results_is_an_error) {
  frame_builder b;
  b.context().stream = xla_;
  b.raw_operand(f32, {1}, &memory_);
  const outcome got = take(fence_cuda(&b.frame()));
  EXPECT_NE(got.message.find("a result for each of its 1 operands"), std::string::npos);
}

TEST_F(fence, arrays_without_elements_are_no_memory) {
  frame_builder b;
  b.context().stream = xla_;
  b.raw_operand(f32, {0}, nullptr).raw_result(f32, {0}, nullptr);
  EXPECT_EQ(take(fence_cuda(&b.frame())).code, 0);
}

TEST_F(fence, memory_that_is_not_imported_has_no_owner) {
  const float other = 0;
  const auto at = reinterpret_cast<std::uintptr_t>(&other);
  EXPECT_FALSE(owner_wrote(at, stream_ref(owner_)).ok());
  EXPECT_FALSE(wait_for_owner(at, stream_ref(xla_)).ok());
}

TEST_F(fence, a_mark_ends_with_the_import) {
  EXPECT_TRUE(owner_wrote(address(), stream_ref(owner_)).ok());
  remove_import(address());
  add_import(address());
  EXPECT_TRUE(wait_for_owner(address(), stream_ref(xla_)).ok());
}

TEST_F(fence, the_owner_follows_what_its_thread_has_run) {
  const float late = 7;
  float seen = 0;
  EXPECT_TRUE(owner_wrote(address(), stream_ref(owner_)).ok());
  EXPECT_EQ(run().code, 0);
  api().hold_stream(xla_, hold::until_released);
  copy(xla_, late, memory_);  // what the program does after its fence
  const auto follows = owner_follows(address(), stream_ref(owner_));
  ASSERT_TRUE(follows.ok());
  EXPECT_TRUE(follows.value());
  copy(owner_, memory_, seen);
  EXPECT_EQ(seen, 0);
  api().hold_stream(xla_, hold::none);
  EXPECT_EQ(seen, 7);
}

TEST_F(fence, the_owner_follows_no_program_of_before) {
  EXPECT_TRUE(owner_wrote(address(), stream_ref(owner_)).ok());
  EXPECT_FALSE(owner_follows(address(), stream_ref(owner_)).value());
  EXPECT_EQ(run().code, 0);
  EXPECT_TRUE(owner_follows(address(), stream_ref(owner_)).value());
  EXPECT_TRUE(owner_wrote(address(), stream_ref(owner_)).ok());
  EXPECT_FALSE(owner_follows(address(), stream_ref(owner_)).value());
}

TEST_F(fence, the_owner_follows_no_program_that_another_thread_may_still_be_in) {
  EXPECT_TRUE(owner_wrote(address(), stream_ref(owner_)).ok());
  std::thread([&] { EXPECT_EQ(run().code, 0); }).join();
  api().clear_calls();
  EXPECT_FALSE(owner_follows(address(), stream_ref(owner_)).value());
  EXPECT_EQ(api().calls(), 0u);
}

TEST_F(fence, the_owner_follows_nothing_where_nothing_is_imported) {
  const float other = 0;
  EXPECT_FALSE(owner_follows(reinterpret_cast<std::uintptr_t>(&other), stream_ref(owner_)).value());
}

TEST_F(fence, errors_of_the_driver_are_reported) {
  api().fail("cuEventRecord", 1, CUDA_ERROR_INVALID_VALUE, false);
  EXPECT_FALSE(owner_wrote(address(), stream_ref(owner_)).ok());
  EXPECT_TRUE(owner_wrote(address(), stream_ref(owner_)).ok());
  api().fail("cuStreamWaitEvent", 1, CUDA_ERROR_INVALID_VALUE, false);
  EXPECT_NE(run().code, 0);
  api().fail("cuEventRecord", 1, CUDA_ERROR_INVALID_VALUE, false);
  EXPECT_FALSE(owner_follows(address(), stream_ref(owner_)).ok());
}

}  // namespace

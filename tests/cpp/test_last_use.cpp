// SPDX-License-Identifier: Apache-2.0
// Owners that a device may still be using, against the fake driver.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <string>
#include <thread>

#include "core/cuda/context.hpp"
#include "core/cuda/device_memory.hpp"
#include "core/cuda/export_stream.hpp"
#include "core/cuda/pointer.hpp"
#include "core/memory/last_use.hpp"
#include "core/memory/live_imports.hpp"
#include "fakes/fake_cuda_fixture.hpp"

namespace {

using namespace jaxbridge::cuda;  // NOLINT: the names of cuda.h
using fake_cuda::api;
using fake_cuda::hold;
using jaxbridge::stream_ref;
using jaxbridge::memory::release_after_last_use;
using jaxbridge::memory::release_unused;

class last_use : public fake_cuda::cuda_test {
 protected:
  void SetUp() override {
    cuda_test::SetUp();
    stream_ = api().make_stream(0, true);
  }

  void TearDown() override {
    until_released(released_ + static_cast<int>(release_unused()));
    cuda_test::TearDown();
  }

  static void count(void* to) noexcept { ++*static_cast<std::atomic<int>*>(to); }

  void let_go() { release_after_last_use(stream_ref(stream_), 0, &released_, &count); }

  // By this thread or by the one that watches.
  void until_released(int expected) {
    while (released_ < expected) {
      release_unused();
      std::this_thread::yield();
    }
  }

  CUstream stream_ = nullptr;
  std::atomic<int> released_{0};
  char from_ = 1;
  char to_ = 0;
};

TEST_F(last_use, an_idle_stream_releases_at_once) {
  let_go();
  EXPECT_EQ(released_, 1);
  EXPECT_EQ(release_unused(), 0u);
  EXPECT_EQ(fake_cuda::count("cuEventRecord"), 0u);
}

TEST_F(last_use, the_legacy_stream_is_not_past_what_it_waits_for) {
  CUstream blocking = api().make_stream(0, false);
  api().hold_stream(blocking, hold::until_released);
  ASSERT_TRUE(jaxbridge::cuda::copy(&to_, &from_, 1, stream_ref(blocking)).ok());
  const auto scope = context_scope::enter(0);
  release_after_last_use(stream_ref::legacy_default(), 0, &released_, &count);
  static_cast<void>(release_unused());  // the watching thread may have it just now
  EXPECT_EQ(released_, 0);
  api().hold_stream(blocking, hold::none);
  until_released(1);
}

TEST_F(last_use, of_the_default_stream_of_another_thread_is_waited_for) {
  auto* const own = reinterpret_cast<CUstream>(CU_STREAM_PER_THREAD);
  std::atomic<bool> enqueued{false};
  std::atomic<bool> asked{false};
  std::thread uses([&] {
    const auto scope = context_scope::enter(0);
    api().hold_stream(own, hold::until_released);
    EXPECT_TRUE(jaxbridge::cuda::copy(&to_, &from_, 1, stream_ref(own)).ok());
    enqueued = true;
    while (!asked) std::this_thread::yield();
    api().hold_stream(own, hold::none);
  });
  while (!enqueued) std::this_thread::yield();
  release_after_last_use(stream_ref(own), 0, &released_, &count);
  static_cast<void>(release_unused());  // the watching thread may have it just now
  EXPECT_EQ(released_, 0);
  asked = true;
  uses.join();
  until_released(1);
}

TEST_F(last_use, pending_work_keeps_the_owner) {
  api().hold_stream(stream_, hold::until_released);
  ASSERT_TRUE(jaxbridge::cuda::copy(&to_, &from_, 1, stream_ref(stream_)).ok());
  let_go();
  static_cast<void>(release_unused());  // the watching thread may have it just now
  EXPECT_EQ(released_, 0);
  EXPECT_EQ(to_, 0);
  // Later work on the stream is none of this owner's.
  api().hold_stream(stream_, hold::none);
  until_released(1);
  EXPECT_EQ(to_, 1);
  EXPECT_EQ(released_, 1);
}

TEST_F(last_use, what_is_being_asked_for_is_counted) {
  api().hold_stream(stream_, hold::until_released);
  ASSERT_TRUE(jaxbridge::cuda::copy(&to_, &from_, 1, stream_ref(stream_)).ok());
  let_go();
  // The watching thread asks, and is kept there with the owner.
  api().gather("cuEventQuery", 2);
  while (api().gathered() == 0) std::this_thread::yield();
  EXPECT_EQ(release_unused(), 1u);
  api().gather("cuEventQuery", 0);
  api().hold_stream(stream_, hold::none);
  until_released(1);
  EXPECT_EQ(release_unused(), 0u);
}

TEST_F(last_use, the_thread_releases_without_another_call) {
  api().hold_stream(stream_, hold::until_released);
  ASSERT_TRUE(jaxbridge::cuda::copy(&to_, &from_, 1, stream_ref(stream_)).ok());
  let_go();
  api().hold_stream(stream_, hold::none);
  while (released_ == 0) std::this_thread::yield();
  EXPECT_EQ(released_, 1);
}

TEST_F(last_use, a_capture_is_left_alone_and_waited_for) {
  ASSERT_EQ(api().begin_capture(stream_, fake_cuda::capture_mode::relaxed), CUDA_SUCCESS);
  let_go();
  EXPECT_EQ(released_, 0);
  EXPECT_EQ(fake_cuda::count("cuEventRecord"), 0u);
  std::size_t work = 0;
  EXPECT_EQ(api().end_capture(stream_, &work), CUDA_SUCCESS);
  until_released(1);
}

TEST_F(last_use, asking_harms_no_capture_of_another_thread) {
  api().hold_stream(stream_, hold::until_released);
  ASSERT_TRUE(jaxbridge::cuda::copy(&to_, &from_, 1, stream_ref(stream_)).ok());
  let_go();
  CUstream captured = api().make_stream(0, true);
  ASSERT_EQ(api().begin_capture(captured, fake_cuda::capture_mode::global), CUDA_SUCCESS);
  std::thread([this] {
    static_cast<void>(release_unused());  // the watching thread may have it just now
    let_go();
    release_after_last_use(stream_ref(api().make_stream(0, true)), 0, &released_, &count);
  }).join();
  EXPECT_EQ(released_, 1);
  std::size_t work = 0;
  EXPECT_EQ(api().end_capture(captured, &work), CUDA_SUCCESS);
  api().hold_stream(stream_, hold::none);
  until_released(3);
}

TEST_F(last_use, an_answer_that_does_not_come_keeps_the_owner) {
  api().hold_stream(stream_, hold::until_released);
  ASSERT_TRUE(jaxbridge::cuda::copy(&to_, &from_, 1, stream_ref(stream_)).ok());
  for (const char* name : {"cuStreamQuery", "cuEventRecord", "cuEventQuery"}) {
    api().fail(name, 1, CUDA_ERROR_ILLEGAL_ADDRESS, false);
    let_go();
    api().fail(nullptr, 0, CUDA_SUCCESS, false);
    EXPECT_EQ(release_unused(), 0u) << name;
    EXPECT_EQ(released_, 0) << "a leak is better than memory that is used: " << name;
  }
  api().hold_stream(stream_, hold::none);
}

TEST_F(last_use, a_process_that_ends_keeps_everything) {
  static_cast<void>(jaxbridge::begin_exit());
  const std::size_t calls = api().calls();
  let_go();
  EXPECT_EQ(released_, 0);
  EXPECT_EQ(api().calls(), calls) << "and asks the driver nothing";
  jaxbridge::cancel_exit_for_testing();
}

using pointer = fake_cuda::cuda_test;

TEST_F(pointer, what_the_driver_says) {
  char memory[4] = {};
  using place = pointer_info::place;
  EXPECT_EQ(inspect(memory).value().where, place::unknown);
  EXPECT_EQ(inspect(memory).value().ordinal, 0);
  api().declare_memory(&memory[1], 1, 1, false, false);
  EXPECT_EQ(inspect(&memory[1]).value().where, place::device);
  EXPECT_EQ(inspect(&memory[1]).value().ordinal, 1);
  api().declare_memory(&memory[2], 1, 0, true, false);
  EXPECT_EQ(inspect(&memory[2]).value().where, place::host);
  api().declare_memory(&memory[3], 1, 1, false, true);
  EXPECT_EQ(inspect(&memory[3]).value().where, place::managed);
  api().fail("cuPointerGetAttributes", 1, CUDA_ERROR_ILLEGAL_ADDRESS, false);
  EXPECT_FALSE(inspect(memory).ok());
}

using export_streams = fake_cuda::cuda_test;

TEST_F(export_streams, one_for_each_device_that_waits_for_no_other) {
  const auto first = export_stream(0);
  ASSERT_TRUE(first.ok());
  EXPECT_NE(first.value().handle(), nullptr);
  EXPECT_EQ(export_stream(0).value(), first.value());
  EXPECT_NE(export_stream(1).value(), first.value());
  EXPECT_EQ(fake_cuda::count("cuStreamCreate"), 2u);
  for (const fake_cuda::call& c : fake_cuda::calls()) {
    if (std::string(c.name) != "cuStreamCreate") continue;
    EXPECT_EQ(c.arguments[0], CU_STREAM_NON_BLOCKING);
  }
  EXPECT_FALSE(export_stream(-1).ok());
  EXPECT_FALSE(export_stream(max_devices).ok());
}

TEST_F(export_streams, threads_at_the_first_call_get_the_same) {
  api().gather("cuStreamCreate", 2);
  std::array<stream_ref, 2> got;
  std::array<std::thread, 2> threads;
  for (std::size_t i = 0; i < 2; ++i) {
    threads[i] = std::thread([&got, i] { got[i] = export_stream(0).value(); });
  }
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(got[0], got[1]);
  EXPECT_EQ(fake_cuda::count("cuStreamDestroy"), 1u);
}

TEST_F(export_streams, an_error_is_reported_and_not_kept) {
  api().fail("cuStreamCreate", 1, CUDA_ERROR_OUT_OF_MEMORY, false);
  EXPECT_FALSE(export_stream(0).ok());
  EXPECT_TRUE(export_stream(0).ok());
}

TEST(live_imports, are_counted_by_address) {
  using namespace jaxbridge::memory;  // NOLINT
  EXPECT_EQ(live_imports(64), 0u);
  add_import(64);
  add_import(64);
  add_import(128);
  EXPECT_EQ(live_imports(64), 2u);
  remove_import(64);
  EXPECT_EQ(live_imports(64), 1u);
  remove_import(64);
  remove_import(64);
  EXPECT_EQ(live_imports(64), 0u);
  remove_import(128);
  EXPECT_EQ(live_imports(128), 0u);
}

}  // namespace

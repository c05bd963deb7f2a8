// SPDX-License-Identifier: Apache-2.0
// Order between streams, the events behind it, and what a capture allows.
#include <gtest/gtest.h>

#include <array>
#include <barrier>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/cuda/context.hpp"
#include "core/cuda/driver.hpp"
#include "core/cuda/event.hpp"
#include "core/cuda/stream_order.hpp"
#include "core/exit.hpp"
#include "fakes/fake_cuda_fixture.hpp"

namespace {

using namespace jaxbridge::cuda;  // NOLINT: the names of cuda.h
using fake_cuda::api;
using fake_cuda::capture_mode;
using fake_cuda::hold;
using jaxbridge::result;
using jaxbridge::status;
using jaxbridge::status_code;
using jaxbridge::stream_ref;
using names = std::vector<std::string>;

CUstream handle_of(std::uintptr_t value) { return reinterpret_cast<CUstream>(value); }

class stream_order_test : public fake_cuda::cuda_test {
 protected:
  void SetUp() override {
    cuda_test::SetUp();
    static_cast<void>(driver::get());
    make_streams();
  }

  // a and b on device 0, far on device 1, as XLA's streams are: not ordered with the legacy one.
  void make_streams() {
    a = api().make_stream(0, true);
    b = api().make_stream(0, true);
    far = api().make_stream(1, true);
  }

  static void copy(CUstream s, const int& from, int& to) {
    // The copy wants the context of its stream to be current.
    CUcontext c = nullptr;
    EXPECT_EQ(driver::get().cuStreamGetCtx(s, &c), CUDA_SUCCESS);
    const auto scope = context_scope::enter(c);
    EXPECT_EQ(driver::get().cuMemcpyDtoDAsync(reinterpret_cast<CUdeviceptr>(&to),
                                              reinterpret_cast<CUdeviceptr>(&from), sizeof(int), s),
              CUDA_SUCCESS);
  }

  static status order_handles(CUstream from, CUstream to) {
    return order(stream_ref(from), stream_ref(to));
  }

  // Work on `to` runs after work on `from` that is late.
  static void expect_ordered(CUstream from, CUstream to) {
    const int x = 7;
    int y = 0;
    int z = 0;
    api().hold_stream(from, hold::until_released);
    copy(from, x, y);
    const status s = order_handles(from, to);
    EXPECT_TRUE(s.ok()) << s.message();
    copy(to, y, z);
    EXPECT_EQ(z, 0);
    api().hold_stream(from, hold::none);
    EXPECT_EQ(y, 7);
    EXPECT_EQ(z, 7);
  }

  CUstream a = nullptr;
  CUstream b = nullptr;
  CUstream far = nullptr;
};

TEST_F(stream_order_test, the_second_stream_waits) {
  ASSERT_TRUE(primary_context(0).ok());
  expect_ordered(a, b);
}

TEST_F(stream_order_test, without_order_it_does_not) {
  // Shows that the fake would tell.
  ASSERT_TRUE(primary_context(0).ok());
  const int x = 7;
  int y = 0;
  int z = 5;
  api().hold_stream(a, hold::until_released);
  copy(a, x, y);
  copy(b, y, z);
  EXPECT_EQ(z, 0);
  api().hold_stream(a, hold::none);
  EXPECT_EQ(z, 0);
}

TEST_F(stream_order_test, the_first_stream_does_not_wait_for_the_second) {
  ASSERT_TRUE(primary_context(0).ok());
  const int x = 7;
  int y = 0;
  api().hold_stream(b, hold::until_released);
  EXPECT_TRUE(order_handles(a, b).ok());
  copy(a, x, y);
  EXPECT_EQ(y, 7);
  api().hold_stream(b, hold::none);
}

TEST_F(stream_order_test, across_devices_both_ways) {
  ASSERT_TRUE(primary_context(0).ok());
  ASSERT_TRUE(primary_context(1).ok());
  expect_ordered(a, far);
  expect_ordered(far, a);
  const auto scope = context_scope::enter(1);  // whatever is current
  expect_ordered(a, far);
  expect_ordered(far, a);
}

TEST_F(stream_order_test, the_default_streams_of_the_current_context) {
  const auto scope = context_scope::enter(0);
  for (const std::uintptr_t special : {std::uintptr_t{0}, CU_STREAM_LEGACY, CU_STREAM_PER_THREAD}) {
    expect_ordered(handle_of(special), a);
    expect_ordered(a, handle_of(special));
    expect_ordered(handle_of(special), far);
    expect_ordered(far, handle_of(special));
  }
}

TEST_F(stream_order_test, a_default_stream_needs_a_context) {
  const status s = order_handles(nullptr, a);
  EXPECT_EQ(s.code(), status_code::failed_precondition);
  EXPECT_EQ(s.message(),
            "cuStreamGetCtx: CUDA_ERROR_INVALID_CONTEXT (201): invalid device context");
}

TEST_F(stream_order_test, the_same_stream_needs_nothing) {
  api().clear_calls();
  EXPECT_TRUE(order_handles(a, a).ok());
  EXPECT_TRUE(order_handles(nullptr, nullptr).ok());
  EXPECT_TRUE(order_handles(nullptr, handle_of(CU_STREAM_LEGACY)).ok());
  EXPECT_TRUE(order_handles(handle_of(CU_STREAM_LEGACY), nullptr).ok());
  EXPECT_EQ(api().calls(), 0u);
}

TEST_F(stream_order_test, the_calls_and_their_arguments) {
  const auto scope = context_scope::enter(0);
  api().clear_calls();
  EXPECT_TRUE(order_handles(a, b).ok());
  EXPECT_EQ(fake_cuda::call_names(),
            (names{"cuStreamGetCtx", "cuCtxGetCurrent", "cuEventCreate", "cuCtxGetCurrent",
                   "cuEventRecord", "cuStreamWaitEvent"}));
  EXPECT_EQ(fake_cuda::calls()[2].arguments[0], CU_EVENT_DISABLE_TIMING);
  api().clear_calls();
  EXPECT_TRUE(order_handles(a, b).ok());
  const auto calls = fake_cuda::calls();
  EXPECT_EQ(fake_cuda::call_names(),
            (names{"cuStreamGetCtx", "cuEventRecord", "cuStreamWaitEvent"}));
  ASSERT_EQ(calls.size(), 3u);
  EXPECT_EQ(calls[1].arguments[1], reinterpret_cast<std::uintptr_t>(a));
  EXPECT_EQ(calls[2].arguments[0], reinterpret_cast<std::uintptr_t>(b));
  EXPECT_EQ(calls[1].arguments[0], calls[2].arguments[1]) << "one and the same event";
  EXPECT_EQ(calls[2].arguments[2], 0u);
}

TEST_F(stream_order_test, an_event_used_again_keeps_earlier_waits) {
  ASSERT_TRUE(primary_context(0).ok());
  const CUstream c = api().make_stream(0, true);
  const CUstream d = api().make_stream(0, true);
  const int x = 7;
  int y = 0;
  int z = 0;
  api().hold_stream(a, hold::until_released);
  copy(a, x, y);
  EXPECT_TRUE(order_handles(a, b).ok());
  EXPECT_TRUE(order_handles(c, d).ok());
  EXPECT_EQ(api().live().events, 1u);
  copy(b, y, z);
  EXPECT_EQ(z, 0);
  api().hold_stream(a, hold::none);
  EXPECT_EQ(z, 7);
}

TEST_F(stream_order_test, devices_have_pools_of_their_own) {
  for (int n = 0; n < 3; ++n) {
    EXPECT_TRUE(order_handles(a, far).ok());
    EXPECT_TRUE(order_handles(far, a).ok());
  }
  EXPECT_EQ(api().live().events, 2u);
}

TEST_F(stream_order_test, a_stream_of_another_library_gets_an_event_of_its_context) {
  const CUcontext foreign = api().make_context(0);
  const CUstream s = api().make_stream_in(foreign, true);
  EXPECT_TRUE(order_handles(s, a).ok());
  EXPECT_EQ(api().live().events, 0u) << "not kept: such a context may end at any time";
  expect_ordered(s, a);
  expect_ordered(a, s);
}

TEST_F(stream_order_test, a_pool_keeps_a_bounded_number_of_events) {
  std::vector<event> events;
  for (int n = 0; n < 100; ++n) {
    result<event> e = event::record(stream_ref(a));
    ASSERT_TRUE(e.ok());
    events.push_back(std::move(e).value());
  }
  EXPECT_EQ(api().live().events, 100u);
  events.clear();
  EXPECT_EQ(api().live().events, 64u);
  EXPECT_EQ(trim_events(), 64u);
  EXPECT_EQ(api().live().events, 0u);
}

TEST_F(stream_order_test, an_event_can_be_asked_and_waited_for) {
  ASSERT_TRUE(primary_context(0).ok());
  const int x = 7;
  int y = 0;
  api().hold_stream(a, hold::until_synchronized);
  copy(a, x, y);
  const result<event> e = event::record(stream_ref(a));
  ASSERT_TRUE(e.ok());
  EXPECT_FALSE(e.value().done().value());
  EXPECT_EQ(y, 0);
  EXPECT_TRUE(e.value().synchronize().ok());
  EXPECT_EQ(y, 7);
  EXPECT_TRUE(e.value().done().value());
  api().fail("cuEventQuery", 1, CUDA_ERROR_ILLEGAL_ADDRESS, false);
  EXPECT_EQ(e.value().done().error().code(), status_code::internal);
}

TEST_F(stream_order_test, a_moved_event_goes_back_once) {
  {
    result<event> first = event::record(stream_ref(a));
    event moved = std::move(first).value();
    result<event> second = event::record(stream_ref(b));
    moved = std::move(second).value();
    EXPECT_TRUE(moved.synchronize().ok());
  }
  EXPECT_EQ(trim_events(), 2u);
}

TEST_F(stream_order_test, a_moved_event_takes_its_pool_along) {
  {
    result<event> first = event::record(stream_ref(a));
    event moved = std::move(first).value();
    result<event> second = event::record(stream_ref(far));
    moved = std::move(second).value();
  }
  // Each pool has an event of its own device: the wrong one could not be recorded.
  EXPECT_TRUE(order_handles(a, far).ok());
  EXPECT_TRUE(order_handles(far, a).ok());
  EXPECT_EQ(api().live().events, 2u);
}

TEST_F(stream_order_test, the_host_never_waits) {
  ASSERT_TRUE(primary_context(0).ok());
  EXPECT_TRUE(order_handles(a, b).ok());
  for (const char* name : {"cuStreamSynchronize", "cuEventSynchronize", "cuCtxSynchronize"}) {
    EXPECT_EQ(fake_cuda::count(name), 0u);
  }
}

TEST_F(stream_order_test, every_failing_call_is_reported_and_leaves_nothing) {
  const auto path = [this] { return !order_handles(far, a).ok(); };
  // Neither context nor event is known yet: the driver is asked for the device of the context, then
  // makes an event in it. Silent: the ends of these two scopes, which have nobody to tell.
  EXPECT_EQ(fail_every_call([this] { make_streams(); }, path, {5, 6, 12, 13}), 15);
  // Both are there.
  const auto warm = [this, path] {
    make_streams();
    EXPECT_FALSE(path());
  };
  EXPECT_EQ(fail_every_call(warm, path, {}), 3);
}

TEST_F(stream_order_test, eight_threads_order_their_streams) {
  ASSERT_TRUE(primary_context(0).ok());
  std::barrier start(8);
  std::vector<std::thread> threads;
  std::array<int, 8> wrong{};
  for (std::size_t i = 0; i < 8; ++i) {
    threads.emplace_back([&, i] {
      const CUstream from = api().make_stream(static_cast<int>(i % 2), true);
      const CUstream to = api().make_stream(static_cast<int>(i / 2 % 2), true);
      int y = 0;
      int z = 0;
      start.arrive_and_wait();
      for (int n = 1; n <= 50; ++n) {
        api().hold_stream(from, hold::until_synchronized);
        copy(from, n, y);
        if (!order_handles(from, to).ok()) ++wrong[i];
        copy(to, y, z);
        if (driver::get().cuStreamSynchronize(to) != CUDA_SUCCESS) ++wrong[i];
        if (z != n) ++wrong[i];
      }
    });
  }
  for (auto& t : threads) t.join();
  for (const int w : wrong) EXPECT_EQ(w, 0);
  EXPECT_LE(api().live().events, 8u);
}

TEST_F(stream_order_test, nothing_is_called_once_the_process_ends) {
  {
    const CUstream s = api().make_stream_in(api().make_context(0), true);
    const result<event> unpooled = event::record(stream_ref(s));
    const result<event> pooled = event::record(stream_ref(a));
    ASSERT_TRUE(unpooled.ok() && pooled.ok());
    api().clear_calls();
    jaxbridge::begin_exit();
  }
  EXPECT_EQ(api().calls(), 0u);
  jaxbridge::cancel_exit_for_testing();
  EXPECT_EQ(api().live().events, 2u) << "left where they are";
  trim_events();
  api().reset(2);  // forgets the one that no pool has
}

TEST_F(stream_order_test, a_capture_is_seen_and_not_harmed) {
  const auto scope = context_scope::enter(0);
  EXPECT_FALSE(is_capturing(stream_ref(a)));
  EXPECT_FALSE(is_capturing(stream_ref::legacy_default()));
  ASSERT_EQ(api().begin_capture(a, capture_mode::thread_local_), CUDA_SUCCESS);
  EXPECT_TRUE(is_capturing(stream_ref(a)));
  EXPECT_FALSE(is_capturing(stream_ref(b)));
  EXPECT_FALSE(is_capturing(stream_ref::legacy_default())) << "a does not wait for it";
  EXPECT_EQ(api().end_capture(a, nullptr), CUDA_SUCCESS);
  EXPECT_FALSE(is_capturing(stream_ref(a)));

  const CUstream blocking = api().make_stream(0, false);
  ASSERT_EQ(api().begin_capture(blocking, capture_mode::thread_local_), CUDA_SUCCESS);
  EXPECT_TRUE(is_capturing(stream_ref::legacy_default()));
  EXPECT_TRUE(is_capturing(stream_ref(handle_of(CU_STREAM_LEGACY))));
  EXPECT_TRUE(is_capturing(stream_ref(blocking)));
  EXPECT_FALSE(is_capturing(stream_ref(a)));
  EXPECT_EQ(api().end_capture(blocking, nullptr), CUDA_SUCCESS);
}

TEST_F(stream_order_test, a_failed_capture_is_still_one) {
  ASSERT_EQ(api().begin_capture(a, capture_mode::thread_local_), CUDA_SUCCESS);
  EXPECT_EQ(driver::get().cuStreamSynchronize(a), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  EXPECT_TRUE(is_capturing(stream_ref(a)));
  EXPECT_EQ(api().end_capture(a, nullptr), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
}

TEST_F(stream_order_test, nothing_is_captured_without_a_driver_or_a_stream) {
  EXPECT_FALSE(is_capturing(stream_ref(reinterpret_cast<void*>(0x5000))));
  EXPECT_FALSE(is_capturing(stream_ref::legacy_default())) << "no context";
  const fake_cuda::environment_scope path("JAXBRIDGE_CUDA_DRIVER", "/nowhere");
  driver::reset_for_testing();
  EXPECT_FALSE(is_capturing(stream_ref(a)));
  EXPECT_EQ(order_handles(a, b).code(), status_code::unavailable);
}

TEST_F(stream_order_test, a_captured_stream_forks_and_joins) {
  const auto scope = context_scope::enter(0);
  ASSERT_EQ(api().begin_capture(a, capture_mode::thread_local_), CUDA_SUCCESS);
  EXPECT_TRUE(order_handles(a, b).ok());
  EXPECT_TRUE(is_capturing(stream_ref(b)));
  const int x = 7;
  int y = 0;
  copy(b, x, y);
  EXPECT_TRUE(order_handles(b, a).ok());
  std::size_t work = 0;
  EXPECT_EQ(api().end_capture(a, &work), CUDA_SUCCESS);
  EXPECT_EQ(work, 3u) << "two events and the copy";
  EXPECT_EQ(y, 0);
  EXPECT_FALSE(is_capturing(stream_ref(b)));

  // Afterwards the event of the pool is an ordinary one again.
  expect_ordered(a, b);
}

TEST_F(stream_order_test, a_captured_stream_cannot_wait_for_one_that_is_not) {
  const auto scope = context_scope::enter(0);
  EXPECT_TRUE(order_handles(a, b).ok());
  ASSERT_EQ(api().begin_capture(a, capture_mode::thread_local_), CUDA_SUCCESS);
  const status s = order_handles(b, a);
  EXPECT_EQ(s.code(), status_code::failed_precondition);
  EXPECT_NE(s.message().find("CUDA_ERROR_STREAM_CAPTURE_ISOLATION (905)"), std::string::npos);
  EXPECT_EQ(api().end_capture(a, nullptr), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
}

}  // namespace

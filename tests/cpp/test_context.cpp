// SPDX-License-Identifier: Apache-2.0
// Primary contexts, and what is current in a scope and after it.
#include <gtest/gtest.h>

#include <barrier>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/cuda/context.hpp"
#include "core/cuda/driver.hpp"
#include "core/exit.hpp"
#include "fakes/fake_cuda_fixture.hpp"

namespace {

using namespace jaxbridge::cuda;  // NOLINT: the names of cuda.h
using fake_cuda::api;
using jaxbridge::result;
using jaxbridge::status_code;
using names = std::vector<std::string>;

class context_test : public fake_cuda::cuda_test {
 protected:
  static CUcontext current() {
    CUcontext c = nullptr;
    EXPECT_EQ(driver::get().cuCtxGetCurrent(&c), CUDA_SUCCESS);
    return c;
  }

  static void push(CUcontext c) { EXPECT_EQ(driver::get().cuCtxPushCurrent(c), CUDA_SUCCESS); }

  static CUcontext pop() {
    CUcontext c = nullptr;
    EXPECT_EQ(driver::get().cuCtxPopCurrent(&c), CUDA_SUCCESS);
    return c;
  }
};

TEST_F(context_test, a_scope_makes_the_primary_context_current) {
  {
    const result<context_scope> scope = context_scope::enter(1);
    ASSERT_TRUE(scope.ok()) << scope.error().message();
    EXPECT_EQ(current(), api().primary(1));
  }
  EXPECT_EQ(current(), nullptr);
}

TEST_F(context_test, the_calls_of_a_first_and_of_a_second_scope) {
  static_cast<void>(driver::get());
  api().clear_calls();
  { const auto scope = context_scope::enter(0); }
  EXPECT_EQ(fake_cuda::call_names(),
            (names{"cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxGetCurrent", "cuCtxPushCurrent",
                   "cuCtxPopCurrent", "cuCtxGetCurrent"}));
  api().clear_calls();
  { const auto scope = context_scope::enter(0); }
  EXPECT_EQ(fake_cuda::call_names(),
            (names{"cuCtxGetCurrent", "cuCtxPushCurrent", "cuCtxPopCurrent", "cuCtxGetCurrent"}));
}

TEST_F(context_test, nothing_is_pushed_over_the_same_context) {
  const auto outer = context_scope::enter(0);
  api().clear_calls();
  { const auto scope = context_scope::enter(0); }
  EXPECT_EQ(fake_cuda::call_names(), (names{"cuCtxGetCurrent", "cuCtxGetCurrent"}));
  EXPECT_EQ(current(), api().primary(0));
}

TEST_F(context_test, scopes_nest) {
  {
    const auto a = context_scope::enter(0);
    {
      const auto b = context_scope::enter(1);
      {
        const auto c = context_scope::enter(0);
        EXPECT_EQ(current(), api().primary(0));
      }
      EXPECT_EQ(current(), api().primary(1));
    }
    EXPECT_EQ(current(), api().primary(0));
  }
  EXPECT_EQ(api().live().context_depth, 0u);
}

TEST_F(context_test, the_context_of_another_library_comes_back) {
  const CUcontext foreign = api().make_context(0);
  push(foreign);
  {
    const auto scope = context_scope::enter(0);
    EXPECT_EQ(current(), api().primary(0));
  }
  EXPECT_EQ(pop(), foreign);
}

TEST_F(context_test, a_given_context_can_be_entered) {
  const CUcontext foreign = api().make_context(1);
  {
    const auto scope = context_scope::enter(foreign);
    EXPECT_EQ(current(), foreign);
  }
  EXPECT_EQ(current(), nullptr);
}

TEST_F(context_test, a_callee_that_switches_device_is_undone) {
  ASSERT_TRUE(primary_context(1).ok());
  const CUcontext foreign = api().make_context(0);
  // Over none, over another context, over the same one: pushed in the first two.
  for (const CUcontext before : {CUcontext{}, foreign, primary_context(0).value()}) {
    if (before != nullptr) push(before);
    {
      const auto scope = context_scope::enter(0);
      EXPECT_EQ(driver::get().cuCtxSetCurrent(api().primary(1)), CUDA_SUCCESS);
    }
    EXPECT_EQ(current(), before);
    if (before != nullptr) pop();
    EXPECT_EQ(api().live().context_depth, 0u);
  }
}

TEST_F(context_test, a_callee_that_leaves_a_context_behind_does_not_change_ours) {
  const CUcontext foreign = api().make_context(0);
  push(foreign);
  {
    const auto scope = context_scope::enter(0);
    push(api().primary(0));
  }
  EXPECT_EQ(current(), foreign);
  pop();
  EXPECT_EQ(pop(), foreign);
}

TEST_F(context_test, a_callee_that_pops_ours_does_not_change_what_was) {
  const CUcontext foreign = api().make_context(0);
  push(foreign);
  {
    const auto scope = context_scope::enter(0);
    pop();
  }
  EXPECT_EQ(pop(), foreign);
}

TEST_F(context_test, a_moved_scope_ends_once) {
  const CUcontext foreign = api().make_context(0);
  push(foreign);
  {
    result<context_scope> scope = context_scope::enter(0);
    ASSERT_TRUE(scope.ok());
    {
      const context_scope moved = std::move(scope).value();
      EXPECT_EQ(current(), api().primary(0));
    }
    EXPECT_EQ(current(), foreign);
  }
  EXPECT_EQ(pop(), foreign);
}

TEST_F(context_test, a_device_is_retained_once_by_all_threads) {
  std::barrier start(8);
  std::vector<std::thread> threads;
  std::vector<CUcontext> seen(8, nullptr);
  for (std::size_t i = 0; i < 8; ++i) {
    threads.emplace_back([&, i] {
      start.arrive_and_wait();
      const int device = static_cast<int>(i % 2);
      for (int n = 0; n < 50; ++n) {
        const auto scope = context_scope::enter(device);
        if (!scope.ok()) return;
      }
      seen[i] = primary_context(device).value();
    });
  }
  for (auto& t : threads) t.join();
  for (std::size_t i = 0; i < 8; ++i) EXPECT_EQ(seen[i], api().primary(static_cast<int>(i % 2)));
  EXPECT_EQ(api().live().retained, 2u);
}

TEST_F(context_test, threads_that_retain_at_the_same_time_keep_one_reference) {
  api().gather("cuDevicePrimaryCtxRetain", 2);
  CUcontext seen = nullptr;
  std::thread second([&] { seen = primary_context(1).value(); });
  EXPECT_EQ(primary_context(1).value(), api().primary(1));
  second.join();
  EXPECT_EQ(seen, api().primary(1));
  EXPECT_EQ(fake_cuda::count("cuDevicePrimaryCtxRetain"), 2u);
  EXPECT_EQ(fake_cuda::count("cuDevicePrimaryCtxRelease"), 1u);
  EXPECT_EQ(api().live().retained, 1u);
}

TEST_F(context_test, an_ordinal_out_of_range_is_refused) {
  for (const int ordinal : {-1, max_devices, 1 << 30}) {
    const result<CUcontext> c = primary_context(ordinal);
    ASSERT_FALSE(c.ok());
    EXPECT_EQ(c.error().code(), status_code::invalid_argument);
    EXPECT_NE(c.error().message().find(std::to_string(ordinal)), std::string::npos);
    EXPECT_FALSE(context_scope::enter(ordinal).ok());
  }
  const auto absent = context_scope::enter(2);
  ASSERT_FALSE(absent.ok());
  EXPECT_EQ(absent.error().message(),
            "cuDeviceGet: CUDA_ERROR_INVALID_DEVICE (101): invalid device ordinal");
}

TEST_F(context_test, without_a_driver_entering_says_so) {
  const fake_cuda::environment_scope path("JAXBRIDGE_CUDA_DRIVER", "/nowhere");
  const auto scope = context_scope::enter(0);
  ASSERT_FALSE(scope.ok());
  EXPECT_EQ(scope.error().code(), status_code::unavailable);
  EXPECT_NE(scope.error().message().find("/nowhere"), std::string::npos);
}

TEST_F(context_test, the_device_of_a_context) {
  // Not met before: the driver is asked.
  EXPECT_EQ(device_of(api().primary(0)).error().message(),
            "cuCtxPushCurrent: CUDA_ERROR_INVALID_CONTEXT (201): invalid device context")
      << "a context that nobody retains";
  CUcontext retained = nullptr;
  EXPECT_EQ(driver::get().cuDevicePrimaryCtxRetain(&retained, 1), CUDA_SUCCESS);
  EXPECT_EQ(device_of(retained).value(), 1);
  EXPECT_EQ(driver::get().cuDevicePrimaryCtxRelease(1), CUDA_SUCCESS);
  // Met before: nobody is asked.
  api().clear_calls();
  EXPECT_EQ(device_of(retained).value(), 1);
  EXPECT_EQ(api().calls(), 0u);
  // Of another library.
  EXPECT_EQ(device_of(api().make_context(1)).value(), -1);
  EXPECT_EQ(device_of(nullptr).error().code(), status_code::failed_precondition);
  EXPECT_EQ(api().live().context_depth, 0u);
}

TEST_F(context_test, every_failing_call_is_reported_and_leaves_nothing) {
  const auto path = [] { return !context_scope::enter(1).ok(); };
  // At the end of a scope nobody can be told.
  EXPECT_EQ(fail_every_call([] {}, path, {5, 6}), 6);
}

TEST_F(context_test, a_failing_pop_still_restores_what_was_current) {
  const CUcontext foreign = api().make_context(0);
  push(foreign);
  {
    const auto scope = context_scope::enter(0);
    api().fail("cuCtxPopCurrent", 1, CUDA_ERROR_UNKNOWN, false);
  }
  EXPECT_EQ(current(), foreign);
  pop();
  pop();
}

TEST_F(context_test, a_current_context_that_cannot_be_told_is_set_again) {
  push(primary_context(0).value());
  ASSERT_TRUE(primary_context(1).ok());
  {
    const auto scope = context_scope::enter(0);
    EXPECT_EQ(driver::get().cuCtxSetCurrent(api().primary(1)), CUDA_SUCCESS);
    api().fail("cuCtxGetCurrent", 1, CUDA_ERROR_UNKNOWN, false);
  }
  EXPECT_EQ(pop(), api().primary(0));
}

TEST_F(context_test, what_was_current_is_made_so_again) {
  ASSERT_TRUE(make_current(nullptr).ok());
  ASSERT_TRUE(primary_context(0).ok());
  ASSERT_TRUE(primary_context(1).ok());
  for (CUcontext before : {api().primary(0), api().primary(1), static_cast<CUcontext>(nullptr)}) {
    ASSERT_TRUE(make_current(before).ok());
    EXPECT_EQ(current(), before);
    const result<CUcontext> asked = current_context();
    ASSERT_TRUE(asked.ok());
    EXPECT_EQ(asked.value(), before);
    EXPECT_EQ(driver::get().cuCtxSetCurrent(api().primary(1)), CUDA_SUCCESS);
    EXPECT_TRUE(make_current(asked.value()).ok());
    EXPECT_EQ(current(), before);
  }
}

TEST_F(context_test, a_context_that_is_current_is_not_set) {
  push(primary_context(0).value());
  api().clear_calls();
  EXPECT_TRUE(make_current(api().primary(0)).ok());
  EXPECT_EQ(fake_cuda::call_names(), (names{"cuCtxGetCurrent"}));
  pop();
}

TEST_F(context_test, errors_of_making_current_are_reported) {
  ASSERT_TRUE(primary_context(0).ok());
  api().fail("cuCtxGetCurrent", 1, CUDA_ERROR_UNKNOWN, false);
  EXPECT_FALSE(current_context().ok());
  api().fail("cuCtxSetCurrent", 1, CUDA_ERROR_INVALID_CONTEXT, false);
  EXPECT_EQ(make_current(api().primary(0)).code(), status_code::failed_precondition);
}

TEST_F(context_test, nothing_is_called_once_the_process_ends) {
  {
    const auto scope = context_scope::enter(0);
    api().clear_calls();
    jaxbridge::begin_exit();
  }
  EXPECT_EQ(api().calls(), 0u);
  jaxbridge::cancel_exit_for_testing();
  pop();
}

}  // namespace

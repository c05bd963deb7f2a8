// SPDX-License-Identifier: Apache-2.0
// A gtest fixture with a fresh fake CUDA driver, which at its end looks for what was left behind.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>
#include <set>
#include <string>

#include "core/cuda/context.hpp"
#include "core/cuda/driver.hpp"
#include "core/cuda/event.hpp"
#include "core/cuda/export_stream.hpp"
#include "core/cuda/graph.hpp"
#include "core/cuda/staging.hpp"
#include "core/exit.hpp"
#include "fake_cuda.hpp"

namespace fake_cuda {

class cuda_test : public testing::Test {
 protected:
  void SetUp() override {
    api().reset(2);
    jaxbridge::cuda::driver::reset_for_testing();
  }

  void TearDown() override {
    api().fail(nullptr, 0, CUresult{}, false);
    give_all_back();
    const live_objects left = api().live();
    EXPECT_EQ(left.events, 0u);
    EXPECT_EQ(left.host_blocks, 0u);
    EXPECT_EQ(left.device_blocks, 0u);
    EXPECT_EQ(left.retained, 0u);
    EXPECT_EQ(left.context_depth, 0u);
    EXPECT_EQ(left.streams, 0u);
    EXPECT_EQ(left.graphs, 0u);
    EXPECT_EQ(left.executables, 0u);
    EXPECT_EQ(left.captures, 0u);
    jaxbridge::cuda::driver::reset_for_testing();
  }

  // Empties every pool and cache of the core.
  static void give_all_back() {
    jaxbridge::cancel_exit_for_testing();
    for (int device = 0; device < 2; ++device) {
      if (jaxbridge::cuda::staging_usage(device).blocks == 0) continue;
      const jaxbridge::status s = jaxbridge::cuda::trim_staging(device);
      EXPECT_TRUE(s.ok()) << s.message();
    }
    jaxbridge::cuda::trim_events();
    jaxbridge::cuda::trim_capture_streams();
    jaxbridge::cuda::release_export_streams_for_testing();
    jaxbridge::cuda::release_primary_contexts_for_testing();
  }

  /// Runs `path` again and again, with the first, the second, ... driver call failing, until no
  /// call is left to fail. `path` says whether it reported an error; `prepare` runs before each,
  /// undisturbed. Nothing may be left behind. `silent`: the calls, counted from 1, whose failure is
  /// not to be reported, because nobody is there to be told or because it does no harm. Returns the
  /// number of calls that were made to fail.
  static long fail_every_call(
      const std::function<void()>& prepare, const std::function<bool()>& path,
      const std::set<long>& silent,
      jaxbridge::cuda::CUresult code = jaxbridge::cuda::CUDA_ERROR_INVALID_VALUE) {
    for (long nth = 1;; ++nth) {
      api().reset(2);
      jaxbridge::cuda::driver::reset_for_testing();
      EXPECT_TRUE(jaxbridge::cuda::driver::status().ok());
      prepare();
      const std::size_t depth = api().live().context_depth;
      api().fail(nullptr, nth, code, false);
      const bool reported = path();
      const char* failed = api().failed();
      api().fail(nullptr, 0, CUresult{}, false);
      const bool expected = failed != nullptr && silent.count(nth) == 0;
      EXPECT_EQ(reported, expected) << "call " << nth << " " << (failed != nullptr ? failed : "");
      EXPECT_EQ(api().live().context_depth, depth) << "call " << nth;
      // What could not be destroyed because just that failed is the one thing that may be left.
      const std::string name = failed != nullptr ? failed : "";
      give_all_back();
      const live_objects left = api().live();
      EXPECT_EQ(left.events, name == "cuEventDestroy" ? 1u : 0u) << "call " << nth << " " << name;
      EXPECT_EQ(left.host_blocks, 0u) << "call " << nth << " " << name;
      // Nor is device memory given back without cuMemFree, or without its context.
      EXPECT_LE(left.device_blocks, expected ? 0u : 1u) << "call " << nth << " " << name;
      EXPECT_EQ(left.retained, 0u) << "call " << nth << " " << name;
      if (failed == nullptr || testing::Test::HasFailure()) {
        api().reset(2);
        jaxbridge::cuda::driver::reset_for_testing();
        return nth - 1;
      }
    }
  }
};

/// Sets an environment variable (null: takes it away) for as long as it lives.
class environment_scope {
 public:
  environment_scope(const char* name, const char* value) : name_(name) {
    const char* old = std::getenv(name);  // NOLINT(concurrency-mt-unsafe)
    had_ = old != nullptr;
    if (had_) old_ = old;
    set(value);
  }
  environment_scope(const environment_scope&) = delete;
  environment_scope& operator=(const environment_scope&) = delete;
  ~environment_scope() { set(had_ ? old_.c_str() : nullptr); }

 private:
  void set(const char* value) {
    if (value != nullptr) {
      setenv(name_, value, 1);  // NOLINT(concurrency-mt-unsafe)
    } else {
      unsetenv(name_);  // NOLINT(concurrency-mt-unsafe)
    }
  }

  const char* name_;
  std::string old_;
  bool had_ = false;
};

}  // namespace fake_cuda

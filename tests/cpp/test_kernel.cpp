// SPDX-License-Identifier: Apache-2.0
// Kernels on the fake driver: what is loaded where, and launched how.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "core/cuda/module.hpp"
#include "core/cuda/staging.hpp"
#include "core/native/kernel_target.hpp"
#include "fakes/fake_cuda_fixture.hpp"

namespace {

using namespace jaxbridge::cuda;  // NOLINT: the names of cuda.h
using fake_cuda::api;
using jaxbridge::any_buffer;
using jaxbridge::dtype;
using jaxbridge::status;
using jaxbridge::stream_ref;
using jaxbridge::native::argument;
using jaxbridge::native::kernel_target;

// y[i] = x[i] + a, for each thread.
void add(const std::uint64_t* words, const std::uint32_t* shape) {
  const auto* x = reinterpret_cast<const float*>(words[0]);
  auto* y = reinterpret_cast<float*>(words[1]);
  float a = 0;
  std::memcpy(&a, &words[2], sizeof(a));
  for (std::uint32_t i = 0; i < shape[0] * shape[3]; ++i) y[i] = x[i] + a;
}

// The same, and x[0] is changed.
void spoil(const std::uint64_t* words, const std::uint32_t* shape) {
  add(words, shape);
  reinterpret_cast<float*>(words[0])[0] += 1;
}

class kernel_test : public fake_cuda::cuda_test {
 protected:
  void SetUp() override {
    cuda_test::SetUp();
    api().define_kernel("add", 3, &add);
  }
  void TearDown() override {
    EXPECT_EQ(api().live().modules, 0U);
    cuda_test::TearDown();
  }

  static std::shared_ptr<kernel> make(std::uint32_t shared = 0) {
    return std::make_shared<kernel>("// has add", "add", shared);
  }

  static argument of(argument::source from, std::uint32_t index) {
    argument a;
    a.from = from;
    a.index = index;
    return a;
  }

  static std::vector<argument> arguments(float value) {
    argument a;
    std::memcpy(&a.bits, &value, sizeof(value));
    return {of(argument::source::operand, 0), of(argument::source::result, 0), a};
  }

  // A call on `x` and `y` in device `ordinal`.
  static status call(kernel_target& t, CUstream stream, int ordinal, std::array<float, 4>& x,
                     std::array<float, 4>& y) {
    static const std::array<std::int64_t, 1> shape = {4};
    const any_buffer in{x.data(), dtype::float32, shape};
    const any_buffer out{y.data(), dtype::float32, shape};
    jaxbridge::dispatch::call c;
    c.device = {jaxbridge::platform::cuda, ordinal};
    c.stream = stream_ref(stream);
    c.operands = {&in, 1};
    c.results = {&out, 1};
    return t.invoke(c);
  }

  std::array<float, 4> x_{1, 2, 3, 4};
  std::array<float, 4> y_{};
};

TEST_F(kernel_test, is_launched_on_the_stream_of_the_call) {
  kernel_target t("f", make(), arguments(0.5F), {{2, 1, 1}, {2, 1, 1}, 16}, {}, 8);
  CUstream stream = api().make_stream(0, true);
  ASSERT_TRUE(call(t, stream, 0, x_, y_).ok());
  EXPECT_EQ(y_, (std::array<float, 4>{1.5, 2.5, 3.5, 4.5}));
  EXPECT_EQ(t.calls(), 1U);
  ASSERT_EQ(fake_cuda::count("cuLaunchKernel"), 1U);
  fake_cuda::call last{};
  for (const fake_cuda::call& c : fake_cuda::calls()) {
    if (c.name == std::string("cuLaunchKernel")) last = c;
  }
  EXPECT_EQ(last.arguments[1], 2U);
  EXPECT_EQ(last.arguments[2], 2U);
  EXPECT_EQ(last.arguments[3], 16U);
  EXPECT_EQ(last.arguments[4], reinterpret_cast<std::uintptr_t>(stream));
}

TEST_F(kernel_test, is_a_graph_when_its_arguments_come_again) {
  kernel_target t("f", make(), arguments(1), {{1, 1, 1}, {4, 1, 1}, 0}, {}, 8);
  CUstream stream = api().make_stream(0, true);
  std::array<float, 4> z{};
  for (int i = 0; i < 5; ++i) {
    x_[0] = static_cast<float>(i);
    ASSERT_TRUE(call(t, stream, 0, x_, y_).ok());
    ASSERT_TRUE(call(t, stream, 0, y_, z).ok());
    EXPECT_EQ(y_[0], static_cast<float>(i + 1));
    EXPECT_EQ(z[0], static_cast<float>(i + 2));
  }
  // Each list of arguments once as it is, and once captured.
  EXPECT_EQ(fake_cuda::count("cuLaunchKernel"), 4U);
  EXPECT_EQ(fake_cuda::count("cuGraphLaunch"), 8U);
  EXPECT_EQ(t.graphs()->captures(), 2U);
  EXPECT_EQ(t.graphs()->replays(), 6U);
  EXPECT_EQ(t.calls(), 10U);

  // On another stream, and on another device, it is another launch.
  CUstream other = api().make_stream(0, true);
  ASSERT_TRUE(call(t, other, 0, x_, y_).ok());
  ASSERT_TRUE(call(t, api().make_stream(1, true), 1, x_, y_).ok());
  EXPECT_EQ(fake_cuda::count("cuLaunchKernel"), 6U);

  // XLA's capture gets the kernel itself.
  ASSERT_EQ(api().begin_capture(stream, fake_cuda::capture_mode::thread_local_), CUDA_SUCCESS);
  EXPECT_TRUE(call(t, stream, 0, x_, y_).ok());
  std::size_t pieces = 0;
  EXPECT_EQ(api().end_capture(stream, &pieces), CUDA_SUCCESS);
  EXPECT_EQ(fake_cuda::count("cuLaunchKernel"), 7U);

  EXPECT_EQ(t.graphs()->size(), 2U);
  EXPECT_EQ(api().live().executables, 2U);
  (void)t.graphs()->clear();
  EXPECT_EQ(api().live().executables, 0U);
  ASSERT_TRUE(call(t, stream, 0, x_, y_).ok());
  EXPECT_EQ(fake_cuda::count("cuLaunchKernel"), 8U);
}

TEST_F(kernel_test, is_launched_where_no_graph_can_be_had) {
  for (const char* name : {"cuStreamBeginCapture", "cuGraphInstantiateWithFlags"}) {
    kernel_target t("f", make(), arguments(1), {{1, 1, 1}, {4, 1, 1}, 0}, {}, 8);
    CUstream stream = api().make_stream(0, true);
    ASSERT_TRUE(call(t, stream, 0, x_, y_).ok());
    api().fail(name, 1, CUDA_ERROR_OUT_OF_MEMORY, false);
    const std::size_t launched = fake_cuda::count("cuGraphLaunch");
    for (int i = 1; i < 4; ++i) {
      x_[0] = static_cast<float>(i);
      ASSERT_TRUE(call(t, stream, 0, x_, y_).ok()) << name;
      EXPECT_EQ(y_[0], static_cast<float>(i + 1)) << name;
    }
    EXPECT_EQ(fake_cuda::count("cuGraphLaunch"), launched) << name;  // it is not tried again
  }
}

TEST_F(kernel_test, tells_of_a_graph_that_cannot_be_launched) {
  kernel_target t("f", make(), arguments(1), {{1, 1, 1}, {4, 1, 1}, 0}, {}, 8);
  CUstream stream = api().make_stream(0, true);
  for (int i = 0; i < 2; ++i) ASSERT_TRUE(call(t, stream, 0, x_, y_).ok());
  api().fail("cuGraphLaunch", 1, CUDA_ERROR_INVALID_VALUE, false);
  const status s = call(t, stream, 0, x_, y_);
  EXPECT_NE(s.message().find("f: cuGraphLaunch"), std::string::npos) << s.message();
  EXPECT_TRUE(call(t, stream, 0, x_, y_).ok());
}

TEST_F(kernel_test, is_loaded_once_for_each_device) {
  const auto k = make();
  kernel_target t("f", k, arguments(1), {{1, 1, 1}, {4, 1, 1}, 0}, {}, 8);
  const std::array streams = {api().make_stream(0, true), api().make_stream(1, true)};
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&, i] {
      std::array<float, 4> x{1, 2, 3, 4};
      std::array<float, 4> y{};
      EXPECT_TRUE(call(t, streams[static_cast<std::size_t>(i % 2)], i % 2, x, y).ok());
      EXPECT_EQ(y[3], 5);
    });
  }
  for (std::thread& one : threads) one.join();
  EXPECT_EQ(k->loaded(), 2);
  EXPECT_EQ(fake_cuda::count("cuModuleLoadData"), 2U);
  EXPECT_EQ(api().live().modules, 2U);
}

TEST_F(kernel_test, is_loaded_while_xla_captures) {
  kernel_target t("f", make(), arguments(1), {{1, 1, 1}, {4, 1, 1}, 0}, {}, 8);
  CUstream stream = api().make_stream(0, true);
  ASSERT_EQ(api().begin_capture(stream, fake_cuda::capture_mode::thread_local_), CUDA_SUCCESS);
  EXPECT_TRUE(call(t, stream, 0, x_, y_).ok());
  std::size_t pieces = 0;
  EXPECT_EQ(api().end_capture(stream, &pieces), CUDA_SUCCESS);
  EXPECT_EQ(pieces, 1U);
  EXPECT_EQ(y_[0], 0);  // captured, and not run
}

TEST_F(kernel_test, asks_for_much_shared_memory) {
  kernel_target t("f", make(64U << 10), arguments(1), {{1, 1, 1}, {4, 1, 1}, 64U << 10}, {}, 8);
  EXPECT_TRUE(call(t, api().make_stream(0, true), 0, x_, y_).ok());
  EXPECT_EQ(fake_cuda::count("cuFuncSetAttribute"), 1U);
}

TEST_F(kernel_test, of_no_blocks_does_nothing) {
  kernel_target t("f", make(), arguments(1), {{0, 1, 1}, {4, 1, 1}, 0}, {}, 8);
  EXPECT_TRUE(call(t, api().make_stream(0, true), 0, x_, y_).ok());
  EXPECT_EQ(fake_cuda::count("cuLaunchKernel"), 0U);
}

TEST_F(kernel_test, that_is_not_in_the_code_is_named) {
  kernel_target t("f", std::make_shared<kernel>("// has add", "sub", 0), arguments(1),
                  {{1, 1, 1}, {4, 1, 1}, 0}, {}, 8);
  const status s = call(t, api().make_stream(0, true), 0, x_, y_);
  EXPECT_NE(s.message().find("f: the code has no kernel 'sub': declare it extern \"C\""),
            std::string::npos)
      << s.message();
}

TEST_F(kernel_test, on_memory_that_is_not_one_is_refused) {
  kernel_target t("f", make(), arguments(1), {{1, 1, 1}, {4, 1, 1}, 0},
                  jaxbridge::dispatch::in_place({}, {{0, 0}}, {}), 8);
  EXPECT_FALSE(call(t, api().make_stream(0, true), 0, x_, y_).ok());
  EXPECT_EQ(fake_cuda::count("cuLaunchKernel"), 0U);
}

TEST_F(kernel_test, says_which_driver_call_failed) {
  CUstream stream = api().make_stream(0, true);
  for (const char* name : {"cuCtxPushCurrent", "cuModuleLoadData", "cuModuleGetFunction",
                           "cuFuncSetAttribute", "cuLaunchKernel"}) {
    kernel_target t("f", make(64U << 10), arguments(1), {{1, 1, 1}, {4, 1, 1}, 64U << 10}, {}, 8);
    api().fail(name, 1, CUDA_ERROR_INVALID_VALUE, false);
    const status s = call(t, stream, 0, x_, y_);
    EXPECT_NE(s.message().find(name), std::string::npos) << name << ": " << s.message();
    EXPECT_TRUE(call(t, stream, 0, x_, y_).ok()) << name;  // it is tried anew
  }
}

TEST_F(kernel_test, ends_quietly_when_the_process_ends) {
  {
    kernel_target t("f", make(), arguments(1), {{1, 1, 1}, {4, 1, 1}, 0}, {}, 8);
    // Of three streams one has a graph, and one is to get it.
    const std::array streams = {api().make_stream(0, true), api().make_stream(0, true),
                                api().make_stream(0, true)};
    for (std::size_t i : {0U, 0U, 1U}) EXPECT_TRUE(call(t, streams[i], 0, x_, y_).ok());
    EXPECT_EQ(t.graphs()->size(), 1U);
    jaxbridge::begin_exit();
    api().clear_calls();
    for (CUstream stream : streams) {
      const status s = call(t, stream, 0, x_, y_);
      EXPECT_EQ(s.message(), "f: the process is ending");
    }
  }
  EXPECT_TRUE(fake_cuda::calls().empty());
  api().reset(2);
}

TEST_F(kernel_test, inspected_calls_that_are_right_stay_right) {
  kernel_target t("f", make(), arguments(1), {{1, 1, 1}, {4, 1, 1}, 0}, {}, 8, true);
  CUstream stream = api().make_stream(0, true);
  for (int i = 0; i < 4; ++i) {  // replays among them
    x_[0] = static_cast<float>(i);
    y_ = {};
    const status s = call(t, stream, 0, x_, y_);
    ASSERT_TRUE(s.ok()) << s.message();
    EXPECT_EQ(y_, (std::array<float, 4>{x_[0] + 1, 3, 4, 5}));
  }
  EXPECT_EQ(t.graphs()->replays(), 2U);
  EXPECT_EQ(api().live().context_depth, 0U);
  (void)trim_staging(0);
}

TEST_F(kernel_test, an_inspected_call_finds_what_is_not_written) {
  kernel_target t("f", make(), arguments(1), {{1, 1, 1}, {3, 1, 1}, 0}, {}, 8, true);
  ASSERT_TRUE(call(t, api().make_stream(0, true), 0, x_, y_).ok());
  EXPECT_EQ(std::memcmp(&y_[3], "\xA5\xA5\xA5\xA5", 4), 0);
  (void)trim_staging(0);
}

TEST_F(kernel_test, an_inspected_call_finds_an_argument_that_changed) {
  api().define_kernel("spoil", 3, &spoil);
  const auto code = std::make_shared<kernel>("// has spoil", "spoil", 0);
  CUstream stream = api().make_stream(0, true);
  const jaxbridge::dispatch::in_place named({"f: argument 'x'"}, {}, {});
  kernel_target t("f", code, arguments(1), {{1, 1, 1}, {4, 1, 1}, 0}, named, 8, true);
  EXPECT_EQ(call(t, stream, 0, x_, y_).message(),
            "f: argument 'x' was written to, and the function's signature says that it only reads "
            "it: declare it as updated (inout, in C++ in_place<T>), or write to a copy");
  // Under a capture there is no content yet, and nothing may be waited for.
  api().clear_calls();
  ASSERT_EQ(api().begin_capture(stream, fake_cuda::capture_mode::thread_local_), CUDA_SUCCESS);
  EXPECT_TRUE(call(t, stream, 0, x_, y_).ok());
  std::size_t pieces = 0;
  EXPECT_EQ(api().end_capture(stream, &pieces), CUDA_SUCCESS);
  EXPECT_EQ(pieces, 1U);
  EXPECT_EQ(fake_cuda::count("cuStreamSynchronize"), 0U);
  (void)trim_staging(0);
}

TEST_F(kernel_test, a_fault_of_what_was_enqueued_is_that_of_the_inspected_call) {
  for (const auto& [nth, text] :
       {std::pair{1, "f: debug mode: the arguments cannot be copied: cuStreamSynchronize"},
        std::pair{2, "f: the work that it enqueued failed: cuStreamSynchronize"}}) {
    kernel_target t("f", make(), arguments(1), {{1, 1, 1}, {4, 1, 1}, 0}, {}, 8, true);
    CUstream stream = api().make_stream(0, true);
    api().fail("cuStreamSynchronize", nth, CUDA_ERROR_INVALID_VALUE, false);
    const status s = call(t, stream, 0, x_, y_);
    EXPECT_EQ(s.message().rfind(text, 0), 0U) << s.message();
    api().fail(nullptr, 0, CUDA_SUCCESS, false);
  }
  (void)trim_staging(0);
}

TEST_F(kernel_test, runs_once_or_not_at_all_whichever_driver_call_fails) {
  const char* failed = "";
  for (long nth = 1; failed != nullptr; ++nth) {
    api().reset(2);
    jaxbridge::cuda::driver::reset_for_testing();
    ASSERT_TRUE(jaxbridge::cuda::driver::status().ok());
    api().define_kernel("add", 3, &add);
    CUstream stream = api().make_stream(0, true);
    {
      kernel_target t("f", make(), arguments(1), {{1, 1, 1}, {4, 1, 1}, 0}, {}, 1);
      api().fail(nullptr, nth, CUDA_ERROR_INVALID_VALUE, false);
      int errors = 0;
      for (int i = 0; i < 5; ++i) {
        x_[0] = static_cast<float>(i);
        y_[0] = -1;
        const std::size_t before = fake_cuda::executions().size();
        const status s = call(t, stream, 0, x_, y_);
        EXPECT_EQ(fake_cuda::executions().size() - before, s.ok() ? 1U : 0U) << nth;
        EXPECT_EQ(y_[0], s.ok() ? x_[0] + 1 : -1) << nth;
        errors += s.ok() ? 0 : 1;
      }
      EXPECT_LE(errors, 1) << nth;
      failed = api().failed();
      api().fail(nullptr, 0, CUDA_SUCCESS, false);
    }
    // A capture that could not be ended, and a graph that could not be destroyed, are left.
    const std::string name = failed != nullptr ? failed : "";
    EXPECT_EQ(api().live().captures, name == "cuStreamEndCapture" ? 1U : 0U) << nth;
    EXPECT_EQ(api().live().graphs, name == "cuGraphDestroy" ? 1U : 0U) << nth;
    EXPECT_EQ(api().live().executables, 0U) << nth << " " << name;
    EXPECT_EQ(api().live().context_depth, 0U) << nth << " " << name;
    give_all_back();
  }
  api().reset(2);
}

TEST_F(kernel_test, on_threads_of_two_devices_while_graphs_are_cleared) {
  for (const std::size_t limit : {0U, 1U, 8U}) {
    kernel_target t("f", make(), arguments(1), {{1, 1, 1}, {4, 1, 1}, 0}, {}, limit);
    const std::array streams = {api().make_stream(0, true), api().make_stream(1, true)};
    std::atomic<int> wrong{0};
    std::atomic<bool> done{false};
    std::thread clears([&] {
      while (!done) (void)t.graphs()->clear();
    });
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([&, i] {
        std::array<std::array<float, 4>, 3> x{};
        std::array<std::array<float, 4>, 3> y{};
        for (std::size_t k = 0; k < 300; ++k) {
          x[k % 3][0] = static_cast<float>(k);
          const bool ok =
              call(t, streams[static_cast<std::size_t>(i % 2)], i % 2, x[k % 3], y[k % 3]).ok();
          if (!ok || y[k % 3][0] != static_cast<float>(k + 1)) ++wrong;
        }
      });
    }
    for (std::thread& one : threads) one.join();
    done = true;
    clears.join();
    EXPECT_EQ(wrong, 0);
    EXPECT_EQ(t.calls(), 1200U);
    EXPECT_LE(t.graphs()->size(), limit * streams.size());  // on each device
    if (limit == 0) {
      EXPECT_EQ(t.graphs()->captures(), 0U);
    }
  }
}

}  // namespace

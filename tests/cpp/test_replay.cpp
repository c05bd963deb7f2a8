// SPDX-License-Identifier: Apache-2.0
// Capture, replay, and what is kept for which memory.
#include <gtest/gtest.h>

#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/cuda/context.hpp"
#include "core/cuda/driver.hpp"
#include "core/cuda/graph.hpp"
#include "core/cuda/stream_order.hpp"
#include "core/exit.hpp"
#include "core/replay/graphs.hpp"
#include "fakes/fake_cuda_fixture.hpp"

namespace {

using namespace jaxbridge::cuda;  // NOLINT: the names of cuda.h
using fake_cuda::api;
using jaxbridge::result;
using jaxbridge::status_code;
using jaxbridge::stream_ref;
using jaxbridge::replay::graphs;
using words = std::vector<std::uintptr_t>;

class replay_test : public fake_cuda::cuda_test {
 protected:
  void SetUp() override {
    cuda_test::SetUp();
    static_cast<void>(driver::get());
    make_streams();
  }

  void make_streams() {
    handle = api().make_stream(0, true);
    other = api().make_stream(0, true);
    stream = stream_ref(handle);
  }

  static CUresult copy(CUstream s, const int& from, int& to) {
    const auto scope = context_scope::enter(0);
    if (!scope.ok()) return CUDA_ERROR_INVALID_CONTEXT;
    return driver::get().cuMemcpyDtoDAsync(reinterpret_cast<CUdeviceptr>(&to),
                                           reinterpret_cast<CUdeviceptr>(&from), sizeof(int), s);
  }

  // A graph of one copy.
  std::shared_ptr<graph> recorded(const int& from, int& to,
                                  std::shared_ptr<void> resources = nullptr) const {
    result<capture> c = capture::begin(0);
    EXPECT_TRUE(c.ok());
    EXPECT_EQ(copy(of(c.value()), from, to), CUDA_SUCCESS);
    result<std::shared_ptr<graph>> made = c.value().end(stream, std::move(resources));
    EXPECT_TRUE(made.ok()) << made.error().message();
    return made.value();
  }

  static CUstream of(const capture& c) { return static_cast<CUstream>(c.stream().handle()); }

  CUstream handle = nullptr;
  CUstream other = nullptr;
  stream_ref stream;
};

TEST_F(replay_test, CapturedWorkRunsAtEachLaunchAndNotBefore) {
  int from = 1;
  int to = 0;
  const std::shared_ptr<graph> g = recorded(from, to);
  EXPECT_EQ(to, 0);
  for (from = 5; from < 8; ++from) {
    EXPECT_TRUE(g->launch().ok());
    EXPECT_EQ(to, from);
  }
  EXPECT_EQ(fake_cuda::count("cuGraphLaunch"), 3u);
  EXPECT_EQ(api().live().graphs, 0u);
  EXPECT_FALSE(is_capturing(stream));
}

TEST_F(replay_test, TheCaptureIsOnAStreamOfItsOwn) {
  int from = 1;
  int to = 0;
  int elsewhere = 0;
  result<capture> c = capture::begin(0);
  ASSERT_TRUE(c.ok());
  EXPECT_TRUE(is_capturing(c.value().stream()));
  EXPECT_FALSE(is_capturing(stream));
  // Other work on the stream that the graph is for, also of another thread, goes on.
  EXPECT_EQ(copy(handle, from, elsewhere), CUDA_SUCCESS);
  EXPECT_EQ(elsewhere, 1);
  CUresult waited = CUDA_ERROR_UNKNOWN;
  std::thread([&] {
    const auto scope = context_scope::enter(0);
    waited = driver::get().cuStreamSynchronize(handle);
  }).join();
  EXPECT_EQ(waited, CUDA_SUCCESS);
  EXPECT_EQ(copy(of(c.value()), from, to), CUDA_SUCCESS);
  EXPECT_TRUE(c.value().end(stream, nullptr).ok());
  EXPECT_EQ(to, 0);
}

TEST_F(replay_test, TwoCapturesAtOnceHaveTwoStreams) {
  result<capture> a = capture::begin(0);
  result<capture> b = capture::begin(0);
  ASSERT_TRUE(a.ok() && b.ok());
  EXPECT_NE(of(a.value()), of(b.value()));
}

TEST_F(replay_test, AStreamIsUsedAgain) {
  int from = 3;
  int to = 0;
  CUstream first = nullptr;
  {
    result<capture> c = capture::begin(0);
    ASSERT_TRUE(c.ok());
    first = of(c.value());
    EXPECT_EQ(copy(first, from, to), CUDA_SUCCESS);
  }  // dropped
  EXPECT_EQ(to, 0);
  EXPECT_FALSE(is_capturing(stream_ref(first)));
  result<capture> again = capture::begin(0);
  ASSERT_TRUE(again.ok());
  EXPECT_EQ(of(again.value()), first);
  EXPECT_EQ(fake_cuda::count("cuStreamCreate"), 1u);
}

TEST_F(replay_test, AStreamWhoseCaptureFailedIsNot) {
  int from = 3;
  int to = 0;
  result<capture> c = capture::begin(0);
  ASSERT_TRUE(c.ok());
  CUstream const first = of(c.value());
  EXPECT_EQ(copy(first, from, to), CUDA_SUCCESS);
  {
    const auto scope = context_scope::enter(0);
    EXPECT_NE(driver::get().cuStreamSynchronize(first), CUDA_SUCCESS);
  }
  const auto made = c.value().end(stream, nullptr);
  ASSERT_FALSE(made.ok());
  EXPECT_EQ(made.error().code(), status_code::failed_precondition);
  EXPECT_NE(made.error().message().find("cuStreamEndCapture"), std::string::npos);
  EXPECT_EQ(to, 0);
  EXPECT_EQ(fake_cuda::count("cuStreamDestroy"), 1u);
  EXPECT_EQ(copy(handle, from, to), CUDA_SUCCESS);
  EXPECT_EQ(to, 3);
}

TEST_F(replay_test, AStreamThatWasNotJoinedIsAnError) {
  int from = 3;
  int to = 0;
  result<capture> c = capture::begin(0);
  ASSERT_TRUE(c.ok());
  EXPECT_EQ(copy(of(c.value()), from, to), CUDA_SUCCESS);
  {
    const auto scope = context_scope::enter(0);
    EXPECT_TRUE(order(c.value().stream(), stream_ref(other)).ok());
    EXPECT_EQ(copy(other, from, to), CUDA_SUCCESS);
  }
  EXPECT_FALSE(c.value().end(stream, nullptr).ok());
  EXPECT_FALSE(is_capturing(stream_ref(other)));
}

TEST_F(replay_test, NothingCapturedIsAnError) {
  result<capture> c = capture::begin(0);
  ASSERT_TRUE(c.ok());
  const auto made = c.value().end(stream, nullptr);
  ASSERT_FALSE(made.ok());
  EXPECT_NE(made.error().message().find("enqueued nothing"), std::string::npos);
}

TEST_F(replay_test, ResourcesEndAfterTheLastLaunchHasRun) {
  int from = 1;
  int to = 0;
  api().hold_stream(handle, fake_cuda::hold::until_synchronized);
  std::vector<int> seen;
  std::shared_ptr<void> resources(&to, [&](int* p) { seen.push_back(*p); });
  std::shared_ptr<graph> g = recorded(from, to, std::move(resources));
  EXPECT_TRUE(g->launch().ok());
  EXPECT_EQ(to, 0);
  EXPECT_TRUE(seen.empty());
  g.reset();
  EXPECT_EQ(seen, std::vector<int>{1});
  EXPECT_EQ(fake_cuda::count("cuGraphExecDestroy"), 1u);
}

TEST_F(replay_test, WhileTheProcessEndsTheDriverIsLeftAlone) {
  int from = 1;
  int to = 0;
  std::shared_ptr<graph> g = recorded(from, to);
  jaxbridge::begin_exit(std::chrono::milliseconds(0));
  api().clear_calls();
  g.reset();
  EXPECT_TRUE(fake_cuda::calls().empty());
  api().reset(2);  // what is left over is the process's
  driver::reset_for_testing();
}

TEST_F(replay_test, EveryDriverCallMayFail) {
  int from = 4;
  int to = 0;
  const auto prepare = [&] {
    make_streams();
    api().clear_calls();
  };
  const auto path = [&] {
    result<capture> c = capture::begin(0);
    if (!c.ok()) return true;
    const bool enqueued = copy(of(c.value()), from, to) == CUDA_SUCCESS;
    const auto made = c.value().end(stream, nullptr);
    if (!made.ok() || !enqueued) return true;
    return !made.value()->launch().ok();
  };
  // What only gives back is not reported: the work is done.
  const std::set<std::string> gives_back = {"cuCtxPopCurrent", "cuGraphDestroy",
                                            "cuStreamSynchronize", "cuGraphExecDestroy"};
  std::set<long> silent;
  give_all_back();
  api().reset(2);
  driver::reset_for_testing();
  EXPECT_TRUE(driver::status().ok());
  prepare();
  EXPECT_FALSE(path());
  long position = 0;
  bool launched = false;
  std::string before;
  for (const std::string& name : fake_cuda::call_names()) {
    ++position;
    // A scope that ends looks at what is current after it.
    const bool ends_scope = name == "cuCtxGetCurrent" && before == "cuCtxPopCurrent";
    if (launched || ends_scope || gives_back.count(name) > 0) silent.insert(position);
    launched = launched || name == "cuGraphLaunch";
    before = name;
  }
  give_all_back();
  const long failed = fail_every_call(prepare, path, silent);
  EXPECT_GT(failed, 8);
  EXPECT_EQ(failed, position);
}

// ---- which memory -------------------------------------------------------------------------------

TEST_F(replay_test, MemoryThatComesAgainIsCaptured) {
  graphs all(4);
  EXPECT_EQ(all.find(words{1}), nullptr);
  EXPECT_FALSE(all.should_capture(words{1}));
  EXPECT_FALSE(all.should_capture(words{2}));
  EXPECT_TRUE(all.should_capture(words{1}));
  int from = 1;
  int to = 0;
  EXPECT_NE(all.keep(words{1}, recorded(from, to)), nullptr);
  ASSERT_NE(all.find(words{1}), nullptr);
  EXPECT_EQ(all.replays(), 1u);
  EXPECT_EQ(all.captures(), 1u);
  EXPECT_EQ(all.size(), 1u);
  EXPECT_EQ(all.find(words{2}), nullptr);
  EXPECT_TRUE(all.should_capture(words{2}));
}

TEST_F(replay_test, MemoryThatNeverComesAgainIsNotCaptured) {
  graphs all(4);
  for (std::uintptr_t i = 0; i < 1000; ++i) {
    EXPECT_FALSE(all.should_capture(words{i}));
  }
  EXPECT_TRUE(all.should_capture(words{999}));
  EXPECT_FALSE(all.should_capture(words{1}));  // too long ago
}

TEST_F(replay_test, TheLeastRecentlyUsedGraphGoes) {
  graphs all(2);
  int from = 1;
  int to = 0;
  std::vector<int> ended;
  for (int i = 0; i < 3; ++i) {
    std::shared_ptr<void> resources(&to, [&ended, i](void*) { ended.push_back(i); });
    (void)all.keep(words{static_cast<std::uintptr_t>(i)}, recorded(from, to, std::move(resources)));
  }
  EXPECT_EQ(ended, std::vector<int>{0});
  EXPECT_EQ(all.size(), 2u);
  std::shared_ptr<void> gone = all.clear();
  EXPECT_EQ(ended.size(), 1u);
  gone.reset();
  EXPECT_EQ(ended.size(), 3u);
  EXPECT_EQ(all.size(), 0u);
}

TEST_F(replay_test, OnceGivenUpNothingIsCaptured) {
  graphs all(4);
  EXPECT_FALSE(all.should_capture(words{1}));
  EXPECT_TRUE(all.give_up());
  EXPECT_FALSE(all.give_up());
  EXPECT_FALSE(all.should_capture(words{1}));
  graphs none(0);
  EXPECT_FALSE(none.should_capture(words{1}));
  EXPECT_FALSE(none.should_capture(words{1}));
}

}  // namespace

// SPDX-License-Identifier: Apache-2.0
// Capture, replay, and what is kept for which memory.
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/cuda/context.hpp"
#include "core/cuda/driver.hpp"
#include "core/cuda/graph.hpp"
#include "core/cuda/stream_order.hpp"
#include "core/exit.hpp"
#include "core/replay/device_graphs.hpp"
#include "core/replay/graphs.hpp"
#include "core/replay/staged_graph.hpp"
#include "fakes/fake_cuda_fixture.hpp"

namespace {

using namespace jaxbridge::cuda;  // NOLINT: the names of cuda.h
using fake_cuda::api;
using jaxbridge::any_buffer;
using jaxbridge::result;
using jaxbridge::status_code;
using jaxbridge::stream_ref;
using jaxbridge::replay::call_key;
using jaxbridge::replay::cost_of_staging;
using jaxbridge::replay::graphs;
using jaxbridge::replay::staged_graph;
using jaxbridge::replay::staging_area;
using jaxbridge::replay::step;
namespace dispatch = jaxbridge::dispatch;

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

  // `path` makes a graph and launches it, and says whether it was told of a failure. What only
  // gives back is not reported, and nothing once the graph is launched: the work is done. Returns
  // how many calls were made to fail.
  long fail_every_call_of(const std::function<bool()>& path,
                          const std::set<std::string>& gives_back) {
    const auto prepare = [this] {
      make_streams();
      api().clear_calls();
    };
    give_all_back();
    api().reset(2);
    driver::reset_for_testing();
    EXPECT_TRUE(driver::status().ok());
    prepare();
    EXPECT_FALSE(path());
    std::set<long> silent;
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
    EXPECT_EQ(failed, position);
    return failed;
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
  const auto path = [&] {
    result<capture> c = capture::begin(0);
    if (!c.ok()) return true;
    const bool enqueued = copy(of(c.value()), from, to) == CUDA_SUCCESS;
    const auto made = c.value().end(stream, nullptr);
    if (!made.ok() || !enqueued) return true;
    return !made.value()->launch().ok();
  };
  EXPECT_GT(fail_every_call_of(path, {"cuCtxPopCurrent", "cuGraphDestroy", "cuStreamSynchronize",
                                      "cuGraphExecDestroy"}),
            8);
}

// ---- copies around the work
// -----------------------------------------------------------------------

// A call of one operand and one result, of one int each.
struct int_call {
  int operand = 0;
  int result = 0;
  any_buffer buffers[2];
  dispatch::call call;

  explicit int_call(stream_ref stream, int value = 0) : operand(value) {
    buffers[0] = {&operand, jaxbridge::dtype::int32, {}};
    buffers[1] = {&result, jaxbridge::dtype::int32, {}};
    call.device = {jaxbridge::platform::cuda, 0};
    call.stream = stream;
    call.operands = {buffers, 1};
    call.results = {buffers + 1, 1};
  }
};

class staged_graph_test : public replay_test {
 protected:
  // A graph that copies the operand to the result, on memory of its own.
  std::shared_ptr<const staged_graph> staged(
      const int_call& like, std::span<const staging_area::index_pair> in_place = {},
      std::shared_ptr<void> resources = nullptr) const {
    auto area = staging_area::make(like.call, in_place);
    if (!area.ok()) return nullptr;
    std::vector<any_buffer> buffers;
    const dispatch::call on_it = area.value()->call_on_it(like.call, buffers);
    result<capture> c = capture::begin(0);
    if (!c.ok()) return nullptr;
    const auto& from = *static_cast<const int*>(on_it.operands[0].data);
    auto& to = *static_cast<int*>(on_it.results[0].data);
    if (copy(of(c.value()), from, to) != CUDA_SUCCESS) return nullptr;
    struct kept {
      std::shared_ptr<const staging_area> area;
      std::shared_ptr<void> resources;
    };
    std::vector<memory_copy> list;
    auto made = c.value().end(stream, std::make_shared<kept>(kept{area.value(), resources}),
                              area.value()->copies(like.call, list));
    if (!made.ok()) return nullptr;
    return std::make_shared<staged_graph>(area.value(), made.value());
  }
};

TEST_F(staged_graph_test, OneGraphServesCallsOnAnyMemory) {
  const auto g = staged(int_call(stream));
  ASSERT_NE(g, nullptr);
  std::vector<std::unique_ptr<int_call>> calls;
  for (int i = 1; i < 20; ++i) {
    calls.push_back(std::make_unique<int_call>(stream, i));
    EXPECT_TRUE(g->launch(calls.back()->call).ok());
  }
  for (const auto& c : calls) EXPECT_EQ(c->result, c->operand);
  EXPECT_EQ(fake_cuda::count("cuGraphInstantiateWithFlags"), 1u);
  EXPECT_EQ(fake_cuda::count("cuMemAlloc"), 1u);
}

TEST_F(staged_graph_test, LaunchesThatWaitKeepTheirOwnMemory) {
  const auto g = staged(int_call(stream));
  ASSERT_NE(g, nullptr);
  api().hold_stream(handle, fake_cuda::hold::until_synchronized);
  int_call a(stream, 3);
  int_call b(stream, 4);
  EXPECT_TRUE(g->launch(a.call).ok());
  EXPECT_TRUE(g->launch(b.call).ok());
  EXPECT_EQ(a.result, 0);
  {
    const auto scope = context_scope::enter(0);
    EXPECT_EQ(driver::get().cuStreamSynchronize(handle), CUDA_SUCCESS);
  }
  EXPECT_EQ(a.result, 3);
  EXPECT_EQ(b.result, 4);
}

TEST_F(staged_graph_test, AnOperandInPlaceAndItsResultAreOneCopy) {
  int_call c(stream, 5);
  c.buffers[1].data = &c.operand;
  const staging_area::index_pair pairs[] = {{0, 0}};
  auto area = staging_area::make(c.call, pairs);
  ASSERT_TRUE(area.ok());
  std::vector<any_buffer> buffers;
  const dispatch::call on_it = area.value()->call_on_it(c.call, buffers);
  EXPECT_EQ(on_it.operands[0].data, on_it.results[0].data);
  EXPECT_NE(on_it.operands[0].data, &c.operand);
  std::vector<memory_copy> list;
  const copies_around copies = area.value()->copies(c.call, list);
  ASSERT_EQ(copies.before.size(), 1u);
  ASSERT_EQ(copies.after.size(), 1u);
  EXPECT_EQ(copies.before[0].from, &c.operand);
  EXPECT_EQ(copies.after[0].to, &c.operand);
}

TEST_F(staged_graph_test, ArraysWithoutElementsAreNotCopied) {
  int_call c(stream, 5);
  const std::int64_t none[] = {0};
  any_buffer buffers[] = {c.buffers[0], {nullptr, jaxbridge::dtype::int32, none}};
  c.call.operands = buffers;
  auto area = staging_area::make(c.call, {});
  ASSERT_TRUE(area.ok());
  std::vector<any_buffer> moved;
  const dispatch::call on_it = area.value()->call_on_it(c.call, moved);
  EXPECT_EQ(on_it.operands[1].data, nullptr);
  const auto g = staged(c);
  ASSERT_NE(g, nullptr);
  EXPECT_TRUE(g->launch(c.call).ok());
  EXPECT_EQ(c.result, 5);
}

TEST_F(staged_graph_test, MemoryAndResourcesEndAfterTheLastLaunch) {
  int_call c(stream, 7);
  std::vector<int> seen;
  std::shared_ptr<void> resources(&c, [&](int_call* p) { seen.push_back(p->result); });
  auto g = staged(int_call(stream), {}, std::move(resources));
  ASSERT_NE(g, nullptr);
  api().hold_stream(handle, fake_cuda::hold::until_synchronized);
  EXPECT_TRUE(g->launch(c.call).ok());
  EXPECT_TRUE(seen.empty());
  EXPECT_EQ(api().live().device_blocks, 1u);
  g.reset();
  EXPECT_EQ(seen, std::vector<int>{7});
  EXPECT_EQ(api().live().device_blocks, 0u);
}

TEST_F(staged_graph_test, EveryDriverCallMayFail) {
  const auto path = [&] {
    int_call c(stream, 9);
    const auto g = staged(c);
    return g == nullptr || !g->launch(c.call).ok();
  };
  EXPECT_GT(fail_every_call_of(path, {"cuCtxPopCurrent", "cuGraphDestroy", "cuStreamSynchronize",
                                      "cuGraphExecDestroy", "cuMemFree"}),
            20);
}

// ---- which memory -------------------------------------------------------------------------------

// Calls of one kind, told apart by one address.
struct keys {
  std::vector<std::uintptr_t> words;
  std::uint64_t generation;

  explicit keys(std::uintptr_t memory, std::uintptr_t kind = 0, std::uint64_t of = 0)
      : words{kind, memory}, generation(of) {}
  operator call_key() const {  // NOLINT(google-explicit-constructor)
    return {words, std::span(words).first(1), generation};
  }
};

step next(graphs& all, std::uintptr_t memory, std::size_t bytes = 0, std::size_t buffers = 2) {
  std::shared_ptr<void> gone;
  return all.next(keys(memory), bytes, buffers, gone);
}

constexpr std::chrono::nanoseconds quick = std::chrono::microseconds(1);

// What a call does that is to run.
void run(graphs& all, std::uintptr_t memory, std::chrono::nanoseconds duration = quick) {
  EXPECT_EQ(next(all, memory), step::run);
  all.ran(keys(memory), duration);
}

TEST_F(staged_graph_test, MemoryThatComesAgainIsCaptured) {
  graphs all(4);
  EXPECT_EQ(all.find(keys(1)), nullptr);
  EXPECT_EQ(next(all, 1), step::run);
  run(all, 1);  // the first one failed
  run(all, 2);
  EXPECT_EQ(next(all, 1), step::capture);
  int from = 1;
  int to = 0;
  EXPECT_NE(all.keep(keys(1), std::shared_ptr<const graph>(recorded(from, to))), nullptr);
  ASSERT_NE(all.find(keys(1)), nullptr);
  EXPECT_EQ(all.replays(), 1u);
  EXPECT_EQ(all.captures(), 1u);
  EXPECT_EQ(all.size(), 1u);
  EXPECT_EQ(all.find(keys(2)), nullptr);
  EXPECT_EQ(all.find(keys(1, 1)), nullptr);  // other shapes
  EXPECT_EQ(next(all, 2), step::capture);
}

TEST_F(staged_graph_test, MemoryThatNeverComesAgainIsNotCaptured) {
  graphs all(4);
  for (std::uintptr_t i = 0; i < 1000; ++i) {
    run(all, i);
  }
  EXPECT_EQ(next(all, 999), step::capture);
  EXPECT_EQ(next(all, 1), step::run);  // too long ago
}

TEST_F(staged_graph_test, CallsOnNewMemoryGetOneGraphWhereThatCostsLess) {
  graphs all(4);
  for (int i = 0; i < graphs::patience; ++i) {
    run(all, static_cast<std::uintptr_t>(i), std::chrono::microseconds(i == 3 ? 20 : 500));
    EXPECT_EQ(all.find_staged(keys(100)), nullptr);
  }
  EXPECT_EQ(next(all, 20), step::stage);
  EXPECT_EQ(next(all, 21), step::run);  // until it is there
  (void)all.keep(keys(0), staged(int_call(stream)));
  EXPECT_NE(all.find_staged(keys(22)), nullptr);
  EXPECT_EQ(all.find_staged(keys(22, 1)), nullptr);  // another kind
  EXPECT_EQ(all.staged(), 1u);
  EXPECT_EQ(all.replays(), 1u);
  // What comes again gets its own.
  EXPECT_EQ(all.find_staged(keys(22)), nullptr);
  EXPECT_EQ(next(all, 22), step::capture);
}

TEST_F(staged_graph_test, WhatCostsLessIsChosen) {
  EXPECT_GT(cost_of_staging(0, 2), std::chrono::microseconds(3));
  EXPECT_LT(cost_of_staging(4096, 2), std::chrono::microseconds(10));
  EXPECT_GT(cost_of_staging(std::size_t{100} << 20, 2), std::chrono::microseconds(50));
  const auto decided = [](std::chrono::nanoseconds run, std::size_t bytes) {
    graphs all(4);
    for (std::uintptr_t i = 0; i < graphs::patience; ++i) {
      (void)next(all, i, bytes);
      all.ran(keys(i), run);
    }
    return next(all, 50, bytes);
  };
  EXPECT_EQ(decided(std::chrono::microseconds(20), 4096), step::stage);
  EXPECT_EQ(decided(std::chrono::microseconds(3), 4096), step::run);
  EXPECT_EQ(decided(std::chrono::microseconds(20), std::size_t{50} << 20), step::run);
  EXPECT_EQ(decided(std::chrono::seconds(1), graphs::most_staged_bytes), step::stage);
  EXPECT_EQ(decided(std::chrono::seconds(1), graphs::most_staged_bytes + 1), step::run);
}

TEST_F(staged_graph_test, AGraphInUseDoesNotGoForAnother) {
  graphs all(2);
  int from = 1;
  int to = 0;
  for (std::uintptr_t i = 0; i < 2; ++i) {
    (void)all.keep(keys(i), std::shared_ptr<const graph>(recorded(from, to)));
  }
  // Three lists in turn, and room for two: the third goes without.
  for (int round = 0; round < 20; ++round) {
    EXPECT_NE(all.find(keys(0)), nullptr);
    EXPECT_NE(all.find(keys(1)), nullptr);
    EXPECT_EQ(all.find(keys(2)), nullptr);
    run(all, 2);
  }
  // Another program begins.
  int calls = 0;
  do {
    EXPECT_EQ(all.find(keys(3)), nullptr);
    if (++calls > 1) all.ran(keys(3), quick);
  } while (calls < 20 && next(all, 3) != step::capture);
  EXPECT_GT(calls, 4);
  EXPECT_LT(calls, 20);
}

TEST_F(staged_graph_test, TheLeastRecentlyUsedGraphGoes) {
  graphs all(2);
  int from = 1;
  int to = 0;
  std::vector<int> ended;
  for (int i = 0; i < 3; ++i) {
    std::shared_ptr<void> resources(&to, [&ended, i](void*) { ended.push_back(i); });
    (void)all.keep(keys(static_cast<std::uintptr_t>(i)),
                   std::shared_ptr<const graph>(recorded(from, to, std::move(resources))));
  }
  EXPECT_EQ(ended, std::vector<int>{0});
  EXPECT_EQ(all.size(), 2u);
  (void)all.keep(keys(0), staged(int_call(stream)));
  std::shared_ptr<void> gone = all.clear();
  EXPECT_EQ(ended.size(), 1u);
  EXPECT_EQ(api().live().device_blocks, 1u);
  gone.reset();
  EXPECT_EQ(ended.size(), 3u);
  EXPECT_EQ(api().live().device_blocks, 0u);
  EXPECT_EQ(all.size(), 0u);
  EXPECT_EQ(all.find_staged(keys(9)), nullptr);
}

TEST_F(staged_graph_test, OnceGivenUpAKindIsNotCaptured) {
  graphs all(4);
  run(all, 1);
  std::shared_ptr<void> gone;
  EXPECT_TRUE(all.give_up(keys(1)));
  EXPECT_FALSE(all.give_up(keys(2)));
  EXPECT_EQ(next(all, 1), step::run);
  const keys shape(1, 7);
  EXPECT_EQ(all.next(shape, 0, 2, gone), step::run);
  all.ran(shape, quick);
  EXPECT_EQ(all.next(shape, 0, 2, gone), step::capture);
  (void)all.clear();
  run(all, 1);
  EXPECT_EQ(next(all, 1), step::capture);
}

TEST_F(staged_graph_test, AFunctionThatIsNeverCapturedIsNotTriedForEver) {
  graphs all(4);
  std::size_t told = 0;
  for (std::uintptr_t kind = 0; kind < 100; ++kind) {
    std::shared_ptr<void> gone;
    const keys one(1, kind);
    EXPECT_EQ(all.next(one, 0, 2, gone), step::run);
    all.ran(one, quick);
    if (all.next(one, 0, 2, gone) == step::capture && all.give_up(one)) ++told;
  }
  EXPECT_GT(told, 10u);
  EXPECT_LT(told, 25u);
}

TEST_F(staged_graph_test, AKindThatIsGivenUpCountsOnceWhateverComesBetween) {
  graphs all(64);
  std::shared_ptr<void> gone;
  const keys bad(1);
  all.ran(bad, quick);
  std::size_t told = 0;
  for (std::uintptr_t i = 0; i < 400; ++i) {  // of 20 kinds, more than are kept
    const keys another(100 + i, 1 + i % 20);
    EXPECT_EQ(all.next(another, 0, 2, gone), step::run);
    all.ran(another, quick);
    if (all.next(bad, 0, 2, gone) == step::capture && all.give_up(bad)) ++told;
  }
  EXPECT_EQ(told, 1u);
  const keys good(1, 99);
  EXPECT_EQ(all.next(good, 0, 2, gone), step::run);
  all.ran(good, quick);
  EXPECT_EQ(all.next(good, 0, 2, gone), step::capture);
}

TEST_F(staged_graph_test, ACallThatBeganBeforeTheEndLeavesNothing) {
  graphs all(4);
  int from = 1;
  int to = 0;
  int ended = 0;
  run(all, 1);
  EXPECT_EQ(next(all, 1), step::capture);
  (void)all.clear(1);
  std::shared_ptr<void> resources(&to, [&ended](void*) { ++ended; });
  std::shared_ptr<void> gone =
      all.keep(keys(1), std::shared_ptr<const graph>(recorded(from, to, std::move(resources))));
  EXPECT_EQ(ended, 0);  // not under the lock
  gone.reset();
  EXPECT_EQ(ended, 1);
  EXPECT_EQ(all.find(keys(1)), nullptr);
  (void)all.keep(keys(2), staged(int_call(stream)));
  EXPECT_EQ(all.find_staged(keys(3)), nullptr);
  EXPECT_FALSE(all.give_up(keys(1)));
  all.ran(keys(1), quick);

  const keys later(1, 0, 1);
  EXPECT_EQ(all.next(later, 0, 2, gone), step::run);  // not seen yet, and not given up
  all.ran(later, quick);
  EXPECT_EQ(all.next(later, 0, 2, gone), step::capture);
  EXPECT_EQ(next(all, 1), step::run);  // of one that began before
}

TEST_F(staged_graph_test, EachDeviceHasATableOfItsOwn) {
  using jaxbridge::replay::device_graphs;
  device_graphs all(2);
  graphs& first = all.on(0);
  graphs& last = all.on(jaxbridge::cuda::max_devices - 1);
  EXPECT_NE(&first, &last);
  EXPECT_EQ(&first, &all.on(0));
  int from = 1;
  int to = 0;
  for (std::uintptr_t i = 0; i < 3; ++i) {
    (void)first.keep(keys(i), std::shared_ptr<const graph>(recorded(from, to)));
  }
  EXPECT_EQ(last.find(keys(1)), nullptr);
  (void)last.keep(keys(1), std::shared_ptr<const graph>(recorded(from, to)));
  EXPECT_NE(first.find(keys(1)), nullptr);
  EXPECT_NE(last.find(keys(1)), nullptr);
  (void)last.keep(keys(7), staged(int_call(stream)));
  EXPECT_NE(last.find_staged(keys(8)), nullptr);
  EXPECT_EQ(all.size(), 3u);  // two of the first, whose limit that is
  EXPECT_EQ(all.captures(), 5u);
  EXPECT_EQ(all.replays(), 3u);
  EXPECT_EQ(all.staged(), 1u);

  EXPECT_EQ(all.clear(5).size(), 2u);
  EXPECT_EQ(all.size(), 0u);
  EXPECT_EQ(all.captures(), 5u);
  for (const int ordinal : {0, 1}) {  // also where a device is used for the first time
    std::shared_ptr<void> gone;
    graphs& here = all.on(ordinal);
    here.ran(keys(1), quick);
    EXPECT_EQ(here.next(keys(1), 0, 2, gone), step::run);  // of one that began before
    here.ran(keys(1, 0, 5), quick);
    EXPECT_EQ(here.next(keys(1, 0, 5), 0, 2, gone), step::capture);
  }
}

TEST_F(staged_graph_test, WithoutALimitNothingIsKept) {
  graphs none(0);
  run(none, 1);
  run(none, 1, std::chrono::seconds(1));
  EXPECT_EQ(none.find_staged(keys(1)), nullptr);
}

TEST_F(staged_graph_test, TheEndOfAGraphDoesNotSpoilACapture) {
  int from = 3;
  int to = 0;
  std::shared_ptr<graph> exact = recorded(from, to);
  auto copies = staged(int_call(stream));
  result<capture> c = capture::begin(0);
  ASSERT_TRUE(c.ok());
  EXPECT_EQ(copy(of(c.value()), from, to), CUDA_SUCCESS);
  exact.reset();
  copies.reset();
  const auto made = c.value().end(stream, nullptr);
  EXPECT_TRUE(made.ok()) << made.error().message();
  EXPECT_EQ(api().live().device_blocks, 0u);
}

}  // namespace

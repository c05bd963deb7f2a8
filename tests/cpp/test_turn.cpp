// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <latch>
#include <thread>
#include <vector>

#include "core/turn.hpp"

namespace jaxbridge {
namespace {

using namespace std::chrono_literals;

// Has a turn until it is told to end it.
class holder {
 public:
  explicit holder(turns& of)
      : thread_([this, &of] {
          const turn held(of);
          EXPECT_TRUE(held.is_ours());
          taken_.count_down();
          end_.wait();
        }) {
    taken_.wait();
  }
  void end() { end_.count_down(); }

 private:
  std::latch taken_{1};
  std::latch end_{1};
  std::jthread thread_;
};

void on_another_thread(const std::function<void()>& work) { std::jthread(work).join(); }

TEST(turn, one_thread_has_it_at_a_time) {
  turns of(1h);
  int calls = 0;  // a data race without the turn
  {
    std::vector<std::jthread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([&] {
        for (int n = 0; n < 1000; ++n) {
          const turn ours(of);
          ASSERT_TRUE(ours.is_ours());
          ++calls;
        }
      });
    }
  }
  EXPECT_EQ(calls, 4000);
}

TEST(turn, who_waits_has_it_when_it_ends) {
  turns of(1h);
  holder first(of);
  std::jthread second([&] { EXPECT_TRUE(turn(of).is_ours()); });
  first.end();
}

TEST(turn, who_waits_in_vain_goes_on) {
  turns of(1us);
  holder first(of);
  on_another_thread([&] { EXPECT_FALSE(turn(of).is_ours()); });
  first.end();
}

TEST(turn, who_went_on_leaves_it_to_whom_it_is) {
  turns of(1us);
  holder first(of);
  on_another_thread([&] {
    { const turn none(of); }
    EXPECT_FALSE(turn(of).is_ours());
  });
  first.end();
}

TEST(turn, after_waits_in_vain_some_calls_do_not_wait) {
  turns brief(0us);
  turns of(1h);
  holder first(brief);
  holder second(of);
  on_another_thread([&] {
    for (int i = 0; i < 3; ++i) EXPECT_FALSE(turn(brief).is_ours());
    for (int i = 0; i < 32; ++i) EXPECT_FALSE(turn(of).is_ours());
    second.end();
    EXPECT_TRUE(turn(of).is_ours());  // which waits for it
  });
  first.end();
}

TEST(turn, a_call_inside_a_call_has_the_outer_ones) {
  turns of(1h);
  const turn outer(of);
  EXPECT_TRUE(outer.is_ours());
  EXPECT_FALSE(turn(of).is_ours());
}

TEST(turn, a_child_of_fork_forgets_those_of_other_threads) {
  turns of(1h);
  holder elsewhere(of);
  of.forget_other_threads();
  EXPECT_TRUE(turn(of).is_ours());
  elsewhere.end();
}

TEST(turn, a_child_of_fork_in_a_call_without_a_turn_forgets_them_too) {
  turns of(0us);
  holder elsewhere(of);
  const turn none(of);
  EXPECT_FALSE(none.is_ours());
  of.forget_other_threads();
  on_another_thread([&] { EXPECT_TRUE(turn(of).is_ours()); });
  elsewhere.end();
}

TEST(turn, a_child_of_fork_keeps_its_own) {
  turns of(1us);
  const turn own(of);
  of.forget_other_threads();
  on_another_thread([&] { EXPECT_FALSE(turn(of).is_ours()); });
}

}  // namespace
}  // namespace jaxbridge

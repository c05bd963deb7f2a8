// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <atomic>
#include <latch>
#include <optional>
#include <thread>

#include "core/exit.hpp"

namespace jaxbridge {
namespace {

class exit_test : public ::testing::Test {
 protected:
  ~exit_test() override { cancel_exit_for_testing(); }
};

TEST_F(exit_test, uses_are_granted_until_it_begins) {
  { EXPECT_TRUE(python_use().granted()); }
  EXPECT_FALSE(exiting());
  begin_exit();
  EXPECT_TRUE(exiting());
  EXPECT_FALSE(python_use().granted());
}

TEST_F(exit_test, what_was_granted_before_is_waited_for) {
  std::latch granted(1);
  std::latch refused(1);
  std::atomic<bool> finished = false;
  std::thread user([&] {
    const python_use use;
    ASSERT_TRUE(use.granted());
    granted.count_down();
    refused.wait();
    EXPECT_FALSE(exiting());
    finished = true;
  });
  granted.wait();
  std::thread other([&] {
    // Ends as soon as begin_exit() has begun.
    while (python_use().granted()) std::this_thread::yield();
    refused.count_down();
  });
  begin_exit(std::chrono::hours(1));
  EXPECT_TRUE(finished);
  EXPECT_TRUE(exiting());
  user.join();
  other.join();
}

TEST_F(exit_test, a_child_of_fork_waits_for_nobody_elses_use) {
  std::latch granted(1);
  std::latch forked(1);
  std::thread user([&] {
    const python_use use;
    granted.count_down();
    forked.wait();
  });
  granted.wait();
  // As in the child: the thread that goes on is this one.
  after_fork_in_child();
  EXPECT_TRUE(begin_exit());
  forked.count_down();
  user.join();
}

TEST_F(exit_test, a_child_of_fork_waits_for_its_own_use) {
  const python_use use;
  after_fork_in_child();
  EXPECT_FALSE(begin_exit());
}

TEST_F(exit_test, patience_ends) {
  const python_use stuck;
  EXPECT_FALSE(begin_exit(std::chrono::milliseconds(5)));
  EXPECT_TRUE(exiting());
}

}  // namespace
}  // namespace jaxbridge

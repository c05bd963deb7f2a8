// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <cstdint>
#include <latch>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "core/dispatch/registry.hpp"
#include "fakes/function_target.hpp"

namespace {

using fake_xla::make_target;
using jaxbridge::result;
using jaxbridge::status;
using jaxbridge::status_code;
using jaxbridge::dispatch::call;
using jaxbridge::dispatch::registry;
using jaxbridge::dispatch::target;

using found = result<std::shared_ptr<target>>;

TEST(registry, finds_what_was_added) {
  registry r;
  const auto one = make_target();
  const auto two = make_target();
  r.add(1, one);
  r.add(-2, two);
  EXPECT_EQ(r.size(), 2u);
  EXPECT_EQ(r.find(1, "").value(), one);
  EXPECT_EQ(r.find(-2, "").value(), two);
}

TEST(registry, says_what_to_do_about_a_missing_key) {
  registry r;
  r.add(1, make_target());
  const found missing = r.find(-42, "spec");
  ASSERT_FALSE(missing.ok());
  EXPECT_EQ(missing.error().code(), status_code::not_found);
  EXPECT_EQ(missing.error().message(),
            "no function is registered under key -42 in this process; import the module that "
            "defines it before the program runs");
}

TEST(registry, counts_users) {
  registry r;
  r.add(1, make_target());
  r.add(1, make_target());
  r.add(1, make_target());
  EXPECT_EQ(r.size(), 1u);
  r.remove(1);
  EXPECT_TRUE(r.contains(1));
  r.remove(1);
  EXPECT_TRUE(r.contains(1));
  r.remove(1);
  EXPECT_FALSE(r.contains(1));
  EXPECT_FALSE(r.find(1, "").ok());
  EXPECT_EQ(r.size(), 0u);
}

TEST(registry, removing_what_is_not_there_does_nothing) {
  registry r;
  r.remove(1);
  r.add(1, make_target());
  r.remove(2);
  EXPECT_TRUE(r.contains(1));
}

TEST(registry, keeps_the_first_users_target) {
  registry r;
  bool first_ended = false;
  bool second_ended = false;
  const auto nothing = [](const call&) { return status(); };
  r.add(1, make_target(nothing, [&] { first_ended = true; }));
  r.add(1, make_target(nothing, [&] { second_ended = true; }));
  EXPECT_FALSE(first_ended);
  EXPECT_TRUE(second_ended) << "equal by content, so it is not needed";
  r.remove(1);
  EXPECT_FALSE(first_ended) << "there is a user left";
  r.remove(1);
  EXPECT_TRUE(first_ended);
}

// Its destructor may want the GIL, which another thread holds that wants the registry.
TEST(registry, no_target_ends_under_the_lock) {
  registry r;
  int ended = 0;
  const auto nothing = [](const call&) { return status(); };
  const auto uses_the_registry = [&] {
    r.add(2, make_target());
    r.remove(2);
    ++ended;
  };
  r.add(1, make_target(nothing, uses_the_registry));
  r.add(1, make_target(nothing, uses_the_registry));
  EXPECT_EQ(ended, 1);
  r.remove(1);
  r.remove(1);
  EXPECT_EQ(ended, 2);
}

TEST(registry, a_removed_target_lives_as_long_as_its_call) {
  registry r;
  std::atomic<bool> ended = false;
  std::latch running(1);
  std::latch removed(1);
  r.add(1, make_target(
               [&](const call&) {
                 running.count_down();
                 removed.wait();
                 return ended ? status(status_code::internal, "ended under the call") : status();
               },
               [&] { ended = true; }));
  status out;
  std::thread caller([&] {
    const found t = r.find(1, "");
    out = t.value()->invoke(call{});
  });
  running.wait();
  r.remove(1);
  EXPECT_FALSE(r.contains(1));
  EXPECT_FALSE(ended);
  removed.count_down();
  caller.join();
  EXPECT_TRUE(out.ok()) << out.message();
  EXPECT_TRUE(ended);
}

// With a lock held over a call, this test does not end.
TEST(registry, nobody_waits_for_a_running_call) {
  registry r;
  std::latch running(1);
  std::latch done(1);
  r.add(1, make_target([&](const call&) {
          running.count_down();
          done.wait();
          return status();
        }));
  std::thread caller([&] { EXPECT_TRUE(r.find(1, "").value()->invoke(call{}).ok()); });
  running.wait();
  EXPECT_TRUE(r.find(1, "").ok());
  EXPECT_FALSE(r.find(2, "").ok());
  r.add(2, make_target());
  EXPECT_TRUE(r.find(2, "").value()->invoke(call{}).ok());
  r.remove(2);
  r.set_resolver({});
  done.count_down();
  caller.join();
}

TEST(resolver, is_asked_for_missing_keys_only) {
  registry r;
  const auto known = make_target();
  const auto made = make_target();
  r.add(1, known);
  std::vector<std::pair<std::int64_t, std::string>> asked;
  r.set_resolver([&](std::int64_t key, std::string_view spec) -> found {
    asked.emplace_back(key, spec);
    return made;
  });
  EXPECT_EQ(r.find(1, "one").value(), known);
  EXPECT_TRUE(asked.empty());
  EXPECT_EQ(r.find(2, "two").value(), made);
  ASSERT_EQ(asked.size(), 1u);
  EXPECT_EQ(asked[0], std::make_pair(std::int64_t{2}, std::string("two")));
  EXPECT_FALSE(r.contains(2)) << "to register is the resolver's choice";
}

TEST(resolver, gives_its_own_error) {
  registry r;
  r.set_resolver([](std::int64_t, std::string_view) -> found {
    return status(status_code::failed_precondition, "import scene before the program runs");
  });
  const found missing = r.find(3, "");
  ASSERT_FALSE(missing.ok());
  EXPECT_EQ(missing.error().code(), status_code::failed_precondition);
  EXPECT_EQ(missing.error().message(), "import scene before the program runs");
}

// With a lock held over the resolver, this test does not end.
TEST(resolver, may_register) {
  registry r;
  int asked = 0;
  r.set_resolver([&](std::int64_t key, std::string_view) -> found {
    ++asked;
    const auto made = make_target();
    r.add(key, made);
    r.set_resolver(nullptr);
    return made;
  });
  const auto first = r.find(5, "").value();
  EXPECT_EQ(r.find(5, "").value(), first);
  EXPECT_EQ(asked, 1);
  EXPECT_FALSE(r.find(6, "").ok());
}

TEST(resolver, of_one_key_does_not_keep_another_waiting) {
  registry r;
  std::latch resolving(1);
  std::latch done(1);
  r.set_resolver([&](std::int64_t key, std::string_view) -> found {
    if (key == 1) {
      resolving.count_down();
      done.wait();
    }
    return make_target();
  });
  std::thread slow([&] { EXPECT_TRUE(r.find(1, "").ok()); });
  resolving.wait();
  EXPECT_TRUE(r.find(2, "").ok());
  r.add(3, make_target());
  EXPECT_TRUE(r.find(3, "").ok());
  done.count_down();
  slow.join();
}

TEST(registry, serves_many_threads) {
  constexpr int threads = 8;
  constexpr int rounds = 300;
  registry r;
  r.add(0, make_target());
  std::atomic<int> alive = 0;
  std::barrier start(threads);
  std::vector<std::thread> all;
  for (int i = 0; i < threads; ++i) {
    all.emplace_back([&, i] {
      start.arrive_and_wait();
      for (int round = 0; round < rounds; ++round) {
        const std::int64_t key = 1 + (i + round) % 3;  // shared with the others
        ++alive;
        r.add(key, make_target([](const call&) { return status(); }, [&] { --alive; }));
        const found mine = r.find(key, "");
        ASSERT_TRUE(mine.ok()) << "this thread is a user of the key";
        ASSERT_TRUE(mine.value()->invoke(call{}).ok());
        r.remove(key);
        ASSERT_TRUE(r.find(0, "").ok());
      }
    });
  }
  for (std::thread& t : all) t.join();
  EXPECT_EQ(r.size(), 1u);
  EXPECT_EQ(alive, 0);
}

}  // namespace

// SPDX-License-Identifier: Apache-2.0
// What is checked of operands that are updated.
#include <gtest/gtest.h>

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/dispatch/in_place.hpp"
#include "core/memory/live_imports.hpp"

namespace {

using jaxbridge::any_buffer;
using jaxbridge::dtype;
using jaxbridge::status;
using jaxbridge::dispatch::call;
using jaxbridge::dispatch::in_place;

class in_place_test : public testing::Test {
 protected:
  any_buffer floats(std::size_t first, std::size_t count) {
    extents_.push_back(std::make_unique<std::int64_t>(static_cast<std::int64_t>(count)));
    any_buffer b;
    b.data = count == 0 ? nullptr : memory_ + first;
    b.dtype = dtype::float32;
    b.shape = {extents_.back().get(), 1};
    return b;
  }

  static status check(const in_place& rules, std::initializer_list<any_buffer> operands,
                      std::initializer_list<any_buffer> results) {
    const std::vector<any_buffer> in = operands;
    const std::vector<any_buffer> out = results;
    call c;
    c.operands = in;
    c.results = out;
    return rules.check(c);
  }

  float memory_[64] = {};
  std::vector<std::unique_ptr<std::int64_t>> extents_;
};

TEST_F(in_place_test, one_memory_is_right) {
  const in_place rules({"x", "y"}, {{1, 0}}, {});
  EXPECT_TRUE(rules.writes(1));
  EXPECT_FALSE(rules.writes(0));
  EXPECT_FALSE(rules.writes(7));
  EXPECT_TRUE(check(rules, {floats(0, 8), floats(8, 8)}, {floats(8, 8)}).ok());
}

TEST_F(in_place_test, other_memory_is_an_error_that_names_the_operand) {
  const in_place rules({"f: argument x"}, {{0, 0}}, {});
  const status s = check(rules, {floats(0, 8)}, {floats(8, 8)});
  EXPECT_EQ(s.message().rfind("f: argument x is in place, but XLA gave its result", 0), 0u)
      << s.message();
}

TEST_F(in_place_test, memory_in_common_is_an_error) {
  const in_place rules({"x", "y"}, {{0, 0}}, {});
  for (const std::size_t first : {std::size_t{1}, std::size_t{8}, std::size_t{15}}) {
    const status s = check(rules, {floats(8, 8), floats(first, 8)}, {floats(8, 8)});
    EXPECT_EQ(s.message().rfind("x and y are in the same memory", 0), 0u) << first;
  }
  EXPECT_TRUE(check(rules, {floats(8, 8), floats(0, 8)}, {floats(8, 8)}).ok());
  EXPECT_TRUE(check(rules, {floats(8, 8), floats(16, 8)}, {floats(8, 8)}).ok());
  EXPECT_TRUE(check(rules, {floats(8, 8), floats(8, 0)}, {floats(8, 8)}).ok());
}

TEST_F(in_place_test, no_elements_have_nothing_in_common) {
  const in_place rules({"x", "y"}, {{0, 0}}, {});
  any_buffer none = floats(0, 0);
  none.data = memory_ + 10;
  EXPECT_TRUE(check(rules, {floats(8, 8), none}, {floats(8, 8)}).ok());
  EXPECT_TRUE(check(rules, {none, floats(8, 8)}, {none}).ok());
}

TEST_F(in_place_test, operands_that_are_only_read_may_have_memory_in_common) {
  const in_place rules({"x", "y"}, {}, {});
  EXPECT_TRUE(check(rules, {floats(0, 8), floats(4, 8)}, {}).ok());
}

TEST_F(in_place_test, external_memory_has_to_be_imported) {
  const in_place rules({"x"}, {{0, 0}}, {0});
  const auto address = reinterpret_cast<std::uintptr_t>(memory_);
  const status s = check(rules, {floats(0, 8)}, {floats(0, 8)});
  EXPECT_EQ(s.message().rfind("x is a Ref of another library's memory, but XLA gave", 0), 0u);
  jaxbridge::memory::add_import(address);
  EXPECT_TRUE(check(rules, {floats(0, 8)}, {floats(0, 8)}).ok());
  jaxbridge::memory::remove_import(address);
  EXPECT_FALSE(check(rules, {floats(0, 8)}, {floats(0, 8)}).ok());
  EXPECT_TRUE(check(rules, {floats(0, 0)}, {floats(0, 0)}).ok());
}

TEST_F(in_place_test, a_call_without_the_buffers_is_an_error) {
  const in_place rules({}, {{1, 0}}, {});
  EXPECT_FALSE(check(rules, {floats(0, 8)}, {floats(0, 8)}).ok());
  EXPECT_FALSE(check(rules, {floats(0, 8), floats(8, 8)}, {}).ok());
}

TEST_F(in_place_test, rules_that_do_not_fit_are_refused) {
  EXPECT_THROW(in_place({}, {{std::size_t{1} << 40, 0}}, {}), std::invalid_argument);
  EXPECT_THROW(in_place({}, {{0, std::size_t{1} << 40}}, {}), std::invalid_argument);
  EXPECT_THROW(in_place({}, {{0, 0}}, {1}), std::invalid_argument);
}

}  // namespace

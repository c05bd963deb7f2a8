// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>

#include "jaxbridge/status.hpp"

namespace {

using jaxbridge::result;
using jaxbridge::status;
using jaxbridge::status_code;

TEST(status, is_success_by_default) {
  const status s;
  EXPECT_TRUE(s.ok());
  EXPECT_EQ(s.code(), status_code::ok);
  EXPECT_EQ(s.message(), "");
}

TEST(status, keeps_code_and_text) {
  const std::string text("what went \0 wrong: \xc3\xa9", 21);
  const status s(status_code::not_found, text);
  EXPECT_FALSE(s.ok());
  EXPECT_EQ(s.code(), status_code::not_found);
  EXPECT_EQ(s.message(), text);
}

TEST(status, an_error_is_never_taken_for_success) {
  const status s(status_code::ok, "no code");
  EXPECT_FALSE(s.ok());
  EXPECT_EQ(s.code(), status_code::unknown);
  EXPECT_EQ(s.message(), "no code");
}

TEST(result, holds_a_value) {
  result<std::string> r = std::string("value");
  ASSERT_TRUE(r.ok());
  EXPECT_EQ(r.value(), "value");
  r.value() += "s";
  EXPECT_EQ(std::as_const(r).value(), "values");
}

TEST(result, moves_a_value_out) {
  result<std::unique_ptr<int>> r = std::make_unique<int>(7);
  ASSERT_TRUE(r.ok());
  const std::unique_ptr<int> out = std::move(r).value();
  EXPECT_EQ(*out, 7);
}

TEST(result, holds_an_error) {
  const result<int> r = status(status_code::unavailable, "not now");
  ASSERT_FALSE(r.ok());
  EXPECT_EQ(r.error().code(), status_code::unavailable);
  EXPECT_EQ(r.error().message(), "not now");
}

}  // namespace

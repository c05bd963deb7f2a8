// SPDX-License-Identifier: Apache-2.0
// XLA's memory for the time of one call.
#include <gtest/gtest.h>

#include <string>
#include <thread>
#include <vector>

#include "core/dispatch/scratch.hpp"
#include "fakes/frame_builder.hpp"

namespace {

using jaxbridge::status_code;
using jaxbridge::dispatch::call;
using jaxbridge::dispatch::scratch;

class scratch_test : public testing::Test {
 protected:
  void SetUp() override {
    c.api = &builder.api();
    c.context = builder.frame().ctx;
  }
  void TearDown() override {
    EXPECT_EQ(fake_xla::live_blocks(), 0);
    EXPECT_EQ(fake_xla::live_errors(), 0);
  }

  fake_xla::frame_builder builder;
  call c;
};

TEST_F(scratch_test, BlocksGoBackOneByOneOrAtTheEnd) {
  scratch s(c);
  const auto a = s.allocate(100);
  const auto b = s.allocate(200);
  ASSERT_TRUE(a.ok() && b.ok());
  EXPECT_NE(a.value(), b.value());
  EXPECT_EQ(fake_xla::live_blocks(), 2);
  EXPECT_TRUE(s.free(a.value()));
  EXPECT_FALSE(s.free(a.value()));
  EXPECT_FALSE(s.free(&c));
  ASSERT_EQ(s.live().size(), 1u);
  EXPECT_EQ(s.live()[0].first, b.value());
  EXPECT_EQ(s.live()[0].second, 200u);
  s.end();
  EXPECT_TRUE(s.live().empty());
  EXPECT_EQ(fake_xla::live_blocks(), 0);
}

TEST_F(scratch_test, AfterTheEndNothingIsAllocatedAndNobodyIsListenedTo) {
  scratch s(c);
  const auto a = s.allocate(100);
  ASSERT_TRUE(a.ok());
  s.end();
  c.api = nullptr;  // XLA's frame is gone
  EXPECT_FALSE(s.free(a.value()));
  const auto late = s.allocate(1);
  ASSERT_FALSE(late.ok());
  EXPECT_EQ(late.error().code(), status_code::failed_precondition);
  s.end();
}

TEST_F(scratch_test, NoBytesAreNoBlock) {
  scratch s(c);
  const auto none = s.allocate(0);
  ASSERT_TRUE(none.ok());
  EXPECT_EQ(none.value(), nullptr);
  EXPECT_TRUE(s.live().empty());
}

TEST_F(scratch_test, WhatXlaRefusesIsAnErrorWithTheSize) {
  scratch s(c);
  const auto much = s.allocate(std::size_t{1} << 50);
  ASSERT_FALSE(much.ok());
  EXPECT_EQ(much.error().code(), status_code::resource_exhausted);
  EXPECT_NE(much.error().message().find("1125899906842624 bytes"), std::string::npos);
  EXPECT_NE(much.error().message().find("Out of memory"), std::string::npos);
}

TEST_F(scratch_test, ARuntimeWithoutMemorySaysSo) {
  builder.api().struct_size = offsetof(jaxbridge::abi::xla_ffi::api, device_memory_allocate);
  scratch s(c);
  const auto none = s.allocate(8);
  ASSERT_FALSE(none.ok());
  EXPECT_EQ(none.error().code(), status_code::unimplemented);
}

TEST_F(scratch_test, AnyThreadAllocatesAndFrees) {
  scratch s(c);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 200; ++i) {
        const auto a = s.allocate(64);
        const auto b = s.allocate(32);
        EXPECT_TRUE(a.ok() && s.free(a.value()));
        EXPECT_TRUE(b.ok());
      }
    });
  }
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(s.live().size(), 800u);
  s.end();
}

}  // namespace

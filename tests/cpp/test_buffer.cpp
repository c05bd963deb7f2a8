// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "jaxbridge/buffer.hpp"
#include "jaxbridge/device.hpp"
#include "jaxbridge/stream.hpp"

namespace {

using jaxbridge::any_buffer;
using jaxbridge::dtype;

any_buffer of(dtype type, const std::vector<std::int64_t>& shape) {
  return {nullptr, type, {shape.data(), shape.size()}};
}

TEST(any_buffer, counts_elements_and_bytes) {
  const std::vector<std::int64_t> scalar;
  const std::vector<std::int64_t> matrix = {3, 5};
  const std::vector<std::int64_t> empty = {3, 0, std::int64_t{1} << 62};
  EXPECT_EQ(of(dtype::float64, scalar).size(), 1u);
  EXPECT_EQ(of(dtype::float64, scalar).rank(), 0u);
  EXPECT_EQ(of(dtype::float64, scalar).size_bytes(), 8u);
  EXPECT_EQ(of(dtype::complex128, matrix).size(), 15u);
  EXPECT_EQ(of(dtype::complex128, matrix).rank(), 2u);
  EXPECT_EQ(of(dtype::complex128, matrix).size_bytes(), 240u);
  EXPECT_EQ(of(dtype::int8, empty).size(), 0u);
  EXPECT_EQ(of(dtype::int8, empty).size_bytes(), 0u);
}

TEST(any_buffer, packs_elements_below_a_byte) {
  const std::vector<std::int64_t> shape = {3, 5};
  EXPECT_EQ(of(dtype::int4, shape).size_bytes(), 8u);
  EXPECT_EQ(of(dtype::uint2, shape).size_bytes(), 4u);
  EXPECT_EQ(of(dtype::int1, shape).size_bytes(), 2u);
  EXPECT_EQ(of(dtype::float4_e2m1fn, shape).size_bytes(), 8u);
}

TEST(stream_ref, is_the_legacy_default_unless_told) {
  int there = 0;
  const jaxbridge::stream_ref some(&there);
  EXPECT_EQ(jaxbridge::stream_ref{}.handle(), nullptr);
  EXPECT_EQ(jaxbridge::stream_ref::legacy_default(), jaxbridge::stream_ref{});
  EXPECT_EQ(some.handle(), &there);
  EXPECT_EQ(some.address(), reinterpret_cast<std::uintptr_t>(&there));
  EXPECT_NE(some, jaxbridge::stream_ref::legacy_default());
}

TEST(device, compares_platform_and_ordinal) {
  const jaxbridge::device cpu;
  EXPECT_EQ(cpu, (jaxbridge::device{jaxbridge::platform::cpu, 0}));
  EXPECT_NE(cpu, (jaxbridge::device{jaxbridge::platform::cpu, 1}));
  EXPECT_NE(cpu, (jaxbridge::device{jaxbridge::platform::cuda, 0}));
  EXPECT_STREQ(name(jaxbridge::platform::cpu), "cpu");
  EXPECT_STREQ(name(jaxbridge::platform::cuda), "cuda");
}

}  // namespace

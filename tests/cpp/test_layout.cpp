// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <vector>

#include "core/memory/array.hpp"
#include "jaxbridge/layout.hpp"

namespace {

using jaxbridge::bounds;
using jaxbridge::byte_range;
using jaxbridge::classify;
using jaxbridge::dtype;
using jaxbridge::element_count;
using jaxbridge::layout_kind;
using jaxbridge::layout_view;
using jaxbridge::status_code;
using jaxbridge::memory::array;
using list = std::vector<std::int64_t>;

constexpr std::int64_t most = std::numeric_limits<std::int64_t>::max();

array make(list shape, list strides, dtype t = dtype::float32) {
  static float element = 0;
  array a;
  a.data = &element;
  a.dtype = t;
  a.shape = std::move(shape);
  a.strides = std::move(strides);
  return a;
}

list settled(array a) {
  settle_strides(a);
  return a.strides;
}

layout_kind kind(list shape, list strides) {
  return classify(make(std::move(shape), std::move(strides)).layout());
}

TEST(layout, kinds) {
  EXPECT_EQ(kind({}, {}), layout_kind::compact);
  EXPECT_EQ(kind({3}, {4}), layout_kind::compact);
  EXPECT_EQ(kind({2, 3}, {12, 4}), layout_kind::compact);
  EXPECT_EQ(kind({2, 3}, {4, 8}), layout_kind::transposed);
  EXPECT_EQ(kind({2, 3, 4}, {4, 32, 8}), layout_kind::transposed);
  EXPECT_EQ(kind({2, 3}, {16, 4}), layout_kind::strided);
  EXPECT_EQ(kind({3}, {8}), layout_kind::strided);
  EXPECT_EQ(kind({2, 3}, {4, 4}), layout_kind::strided) << "elements that overlap";
  EXPECT_EQ(kind({2, 3}, {0, 4}), layout_kind::broadcast);
  EXPECT_EQ(kind({2, 3}, {0, -4}), layout_kind::negative);
  EXPECT_EQ(kind({2, 3}, {-12, 4}), layout_kind::negative);
  EXPECT_EQ(name(kind({3}, {8})), "strided");
}

TEST(layout, strides_of_length_1_and_of_nothing_say_nothing) {
  EXPECT_EQ(kind({1, 3}, {999, 4}), layout_kind::compact);
  EXPECT_EQ(kind({1, 3}, {-4, 4}), layout_kind::compact);
  EXPECT_EQ(kind({3, 1}, {4, 0}), layout_kind::compact);
  EXPECT_EQ(kind({1, 1}, {1, 1}), layout_kind::compact);
  EXPECT_EQ(kind({2, 1, 3}, {4, 7, 8}), layout_kind::transposed);
  EXPECT_EQ(kind({2, 0, 3}, {-1, 0, 5}), layout_kind::compact);
}

TEST(layout, bounds_are_the_lowest_and_the_highest_byte) {
  EXPECT_EQ(bounds(make({}, {}).layout()), (byte_range{0, 4}));
  EXPECT_EQ(bounds(make({2, 3}, {12, 4}).layout()), (byte_range{0, 24}));
  EXPECT_EQ(bounds(make({3}, {-4}).layout()), (byte_range{-8, 4}));
  EXPECT_EQ(bounds(make({5, 6}, {96, -8}).layout()), (byte_range{-40, 388}));
  EXPECT_EQ(bounds(make({7}, {0}).layout()), (byte_range{0, 4}));
  EXPECT_EQ(bounds(make({0, 3}, {-100, 4}).layout()), (byte_range{0, 0}));
  EXPECT_FALSE(bounds(make({3}, {most}).layout()).has_value());
  EXPECT_FALSE(bounds(make({2, 2}, {most / 2, most / 2 + 10}).layout()).has_value());
  EXPECT_FALSE(bounds(make({most}, {-4}).layout()).has_value());
}

TEST(layout, element_counts) {
  EXPECT_EQ(element_count(list{}), 1);
  EXPECT_EQ(element_count(list{2, 3}), 6);
  EXPECT_EQ(element_count(list{most, 0, most}), 0);
  EXPECT_FALSE(element_count(list{most, 2}).has_value());
  EXPECT_FALSE(element_count(list{-1}).has_value());
  EXPECT_FALSE(element_count(list{0, -1}).has_value());
}

TEST(layout, settled_strides_are_true_for_every_axis) {
  EXPECT_EQ(settled(make({1, 3}, {999, 4})), (list{12, 4}));
  EXPECT_EQ(settled(make({3, 1}, {4, 999})), (list{4, 4}));
  EXPECT_EQ(settled(make({2, 3}, {4, 8})), (list{4, 8}));
  EXPECT_EQ(settled(make({2, 1, 3}, {4, 0, 8})), (list{4, 8, 8}));
  EXPECT_EQ(settled(make({2, 0, 3}, {0, 0, 0})), (list{12, 12, 4}));
  EXPECT_EQ(settled(make({most, 0, most}, {0, 0, 0})), (list{0, 0, 0}));
}

void expect_refused(const array& a, status_code code, const char* part) {
  const jaxbridge::status s = jaxbridge::memory::check(a);
  ASSERT_FALSE(s.ok());
  EXPECT_EQ(s.code(), code) << s.message();
  EXPECT_NE(s.message().find(part), std::string::npos) << s.message();
}

TEST(array, what_is_none) {
  expect_refused(make({2}, {}), status_code::invalid_argument, "0 strides");
  expect_refused(make({-2}, {4}), status_code::invalid_argument, "negative extent");
  expect_refused(make({most}, {4}), status_code::invalid_argument, "more bytes");
  expect_refused(make({2}, {4}, dtype::int4), status_code::unimplemented, "smaller than a byte");
  expect_refused(make({2}, {4}, dtype::invalid), status_code::unimplemented, "invalid");
  expect_refused(make(list(65, 1), list(65, 4)), status_code::invalid_argument, "65 axes");
  expect_refused(make({3}, {most / 2}), status_code::invalid_argument, "address space");
  expect_refused(make({3}, {-(most / 2)}), status_code::invalid_argument, "address space");
  array null = make({2}, {4});
  null.data = nullptr;
  expect_refused(null, status_code::invalid_argument, "address is null");
}

TEST(array, what_is_one) {
  EXPECT_TRUE(jaxbridge::memory::check(make({2, 3}, {12, 4})).ok());
  EXPECT_TRUE(jaxbridge::memory::check(make({2, 3}, {-12, 0})).ok());
  array nothing = make({0, most}, {0, 0});
  nothing.data = nullptr;
  EXPECT_TRUE(jaxbridge::memory::check(nothing).ok());
  EXPECT_EQ(nothing.size_bytes(), 0);
  EXPECT_EQ(make({2, 3}, {12, 4}, dtype::complex64).size_bytes(), 48);
  EXPECT_EQ(jaxbridge::memory::describe(make({2, 3}, {12, 4})), "float32[2,3]");
}

}  // namespace

// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <complex>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "fakes/frame_builder.hpp"
#include "jaxbridge/attributes.hpp"

namespace {

using fake_xla::attribute_set;
using jaxbridge::attributes_view;
using jaxbridge::dtype;

namespace ffi = jaxbridge::abi::xla_ffi;

TEST(attributes_view, of_nothing) {
  const attributes_view none;
  EXPECT_EQ(none.size(), 0u);
  EXPECT_FALSE(none.scalar<std::int64_t>("key").has_value());
  EXPECT_FALSE(none.string("spec").has_value());
}

TEST(attributes_view, reads_scalars_of_every_type) {
  attribute_set set;
  set.scalar("bool", true)
      .scalar("i8", std::int8_t{-8})
      .scalar("i16", std::int16_t{-16})
      .scalar("i32", std::int32_t{-32})
      .scalar("i64", std::numeric_limits<std::int64_t>::min())
      .scalar("u8", std::uint8_t{8})
      .scalar("u16", std::uint16_t{16})
      .scalar("u32", std::uint32_t{32})
      .scalar("u64", std::numeric_limits<std::uint64_t>::max())
      .scalar("f32", 0.5F)
      .scalar("f64", 0.25)
      .scalar("c64", std::complex<float>(1, 2))
      .scalar("c128", std::complex<double>(3, 4));
  const attributes_view view(set.build());
  EXPECT_EQ(view.size(), 13u);
  EXPECT_EQ(view.scalar<bool>("bool"), true);
  EXPECT_EQ(view.scalar<std::int8_t>("i8"), -8);
  EXPECT_EQ(view.scalar<std::int16_t>("i16"), -16);
  EXPECT_EQ(view.scalar<std::int32_t>("i32"), -32);
  EXPECT_EQ(view.scalar<std::int64_t>("i64"), std::numeric_limits<std::int64_t>::min());
  EXPECT_EQ(view.scalar<std::uint8_t>("u8"), 8);
  EXPECT_EQ(view.scalar<std::uint16_t>("u16"), 16);
  EXPECT_EQ(view.scalar<std::uint32_t>("u32"), 32u);
  EXPECT_EQ(view.scalar<std::uint64_t>("u64"), std::numeric_limits<std::uint64_t>::max());
  EXPECT_EQ(view.scalar<float>("f32"), 0.5F);
  EXPECT_EQ(view.scalar<double>("f64"), 0.25);
  EXPECT_EQ(view.scalar<std::complex<float>>("c64"), std::complex<float>(1, 2));
  EXPECT_EQ(view.scalar<std::complex<double>>("c128"), std::complex<double>(3, 4));
}

TEST(attributes_view, wants_the_exact_type) {
  attribute_set set;
  set.scalar("n", std::int32_t{7});
  const attributes_view view(set.build());
  EXPECT_FALSE(view.scalar<std::int64_t>("n").has_value());
  EXPECT_FALSE(view.scalar<std::uint32_t>("n").has_value());
  EXPECT_FALSE(view.scalar<float>("n").has_value());
  EXPECT_FALSE(view.string("n").has_value());
}

TEST(attributes_view, wants_the_exact_name) {
  attribute_set set;
  set.scalar("key", std::int64_t{7}).string("", "nameless");
  const attributes_view view(set.build());
  EXPECT_FALSE(view.scalar<std::int64_t>("ke").has_value());
  EXPECT_FALSE(view.scalar<std::int64_t>("keys").has_value());
  EXPECT_FALSE(view.scalar<std::int64_t>(std::string_view("key\0", 4)).has_value());
  EXPECT_EQ(view.string(""), "nameless");
}

TEST(attributes_view, reads_strings) {
  const std::string binary("a\0b\xff", 4);
  attribute_set set;
  set.string("empty", "").string("binary", binary).string("long", std::string(1 << 16, 'x'));
  const attributes_view view(set.build());
  EXPECT_EQ(view.string("empty"), "");
  EXPECT_EQ(view.string("binary"), binary);
  EXPECT_EQ(view.string("long")->size(), std::size_t{1} << 16);
}

TEST(attributes_view, an_empty_string_may_have_no_address) {
  attribute_set set;
  set.string("s", "text");
  ffi::attributes& raw = set.build();
  auto& text = *static_cast<ffi::byte_span*>(raw.attrs[0]);
  text.ptr = nullptr;
  EXPECT_FALSE(attributes_view(raw).string("s").has_value()) << "4 characters at null";
  text.len = 0;
  EXPECT_EQ(attributes_view(raw).string("s"), "");
}

TEST(attributes_view, passes_arrays_and_dictionaries_by) {
  attribute_set set;
  set.array("a", std::vector<std::int64_t>{1, 2, 3}).array("none", std::vector<float>{});
  set.dictionary("d").scalar("key", std::int64_t{1});
  set.scalar("z", std::int64_t{26});
  const attributes_view view(set.build());
  EXPECT_EQ(view.size(), 4u);
  EXPECT_FALSE(view.scalar<std::int64_t>("a").has_value());
  EXPECT_FALSE(view.string("a").has_value());
  EXPECT_FALSE(view.scalar<std::int64_t>("d").has_value());
  EXPECT_FALSE(view.scalar<std::int64_t>("key").has_value()) << "of the inner dictionary";
  EXPECT_EQ(view.scalar<std::int64_t>("z"), 26);
}

TEST(attributes_view, survives_null_entries) {
  attribute_set set;
  set.scalar("a", std::int64_t{1}).string("b", "text").scalar("c", std::int64_t{3});
  ffi::attributes& raw = set.build();
  raw.names[0] = nullptr;
  raw.attrs[1] = nullptr;
  static_cast<ffi::scalar*>(raw.attrs[2])->value = nullptr;
  const attributes_view view(raw);
  EXPECT_FALSE(view.scalar<std::int64_t>("a").has_value());
  EXPECT_FALSE(view.string("b").has_value());
  EXPECT_FALSE(view.scalar<std::int64_t>("c").has_value());
}

}  // namespace

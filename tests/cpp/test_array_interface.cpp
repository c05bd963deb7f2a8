// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "core/memory/array_interface.hpp"

namespace {

using jaxbridge::dtype;
using jaxbridge::result;
using jaxbridge::memory::array;
using jaxbridge::memory::array_interface;
using jaxbridge::memory::describe;
using jaxbridge::memory::memory_kind;
using jaxbridge::memory::parse_typestr;
using jaxbridge::memory::typestr_of;
using list = std::vector<std::int64_t>;

constexpr std::int64_t most = std::numeric_limits<std::int64_t>::max();

std::string refusal(std::string_view typestr) {
  const result<dtype> got = parse_typestr(typestr);
  EXPECT_FALSE(got.ok()) << typestr;
  return got.ok() ? "" : got.error().message();
}

TEST(typestr, comes_back) {
  int known = 0;
#define JAXBRIDGE_ENTRY(id, text, xla, bits, dlpack)                  \
  if (const std::string_view s = typestr_of(dtype::id); !s.empty()) { \
    ++known;                                                          \
    EXPECT_EQ(parse_typestr(s).value(), dtype::id) << text;           \
  }
  JAXBRIDGE_DTYPES(JAXBRIDGE_ENTRY)
#undef JAXBRIDGE_ENTRY
  EXPECT_EQ(known, 14);
  EXPECT_EQ(typestr_of(dtype::bfloat16), "");
}

TEST(typestr, byte_orders) {
  EXPECT_EQ(parse_typestr("=f4").value(), dtype::float32);
  EXPECT_EQ(parse_typestr("<b1").value(), dtype::bool_);
  EXPECT_EQ(parse_typestr(">u1").value(), dtype::uint8);
  EXPECT_NE(refusal(">f4").find("other byte order"), std::string::npos);
  EXPECT_NE(refusal("|f4").find("does not say its byte order"), std::string::npos);
  EXPECT_NE(refusal("f4").find("too short"), std::string::npos);
  EXPECT_NE(refusal("f4x").find("no byte order"), std::string::npos);
}

TEST(typestr, what_is_none) {
  for (const char* text :
       {"<f16", "<c32", "<M8[ns]", "|S4", "<U3", "|O", "<i3", "<i44", "<f", "<"}) {
    EXPECT_FALSE(parse_typestr(text).ok()) << text;
  }
  EXPECT_NE(refusal("<V2").find("DLPack"), std::string::npos);
  EXPECT_NE(refusal("|O8").find("\"|O8\""), std::string::npos);
  EXPECT_NE(refusal(std::string("<x\n\0y", 5)).find("\"<x??y\""), std::string::npos);
  EXPECT_LT(refusal(std::string(5000, '<')).size(), 200u);
}

class interface : public testing::Test {
 protected:
  array_interface fields() {
    array_interface f;
    f.address = reinterpret_cast<std::uintptr_t>(data_);
    f.typestr = "<f4";
    f.shape = shape_;
    return f;
  }
  void refused(const array_interface& f, const char* part) {
    const result<array> got = describe(f, memory_kind::device, 0);
    ASSERT_FALSE(got.ok());
    EXPECT_NE(got.error().message().find(part), std::string::npos) << got.error().message();
  }

  float data_[64] = {};
  list shape_ = {2, 3};
};

TEST_F(interface, what_the_fields_say) {
  array_interface f = fields();
  f.readonly = true;
  const result<array> got = describe(f, memory_kind::device, 1);
  ASSERT_TRUE(got.ok());
  EXPECT_EQ(got.value().data, data_);
  EXPECT_EQ(got.value().dtype, dtype::float32);
  EXPECT_EQ(got.value().kind, memory_kind::device);
  EXPECT_EQ(got.value().ordinal, 1);
  EXPECT_TRUE(got.value().readonly);
  EXPECT_EQ(got.value().strides, (list{12, 4})) << "no strides: row-major";
  f.offset = 8;
  EXPECT_EQ(describe(f, memory_kind::host, 0).value().data, data_ + 2);
}

TEST_F(interface, strides_are_bytes_and_may_run_backwards) {
  array_interface f = fields();
  const list strides = {-12, 4};
  f.address += 12;
  f.strides = strides;
  EXPECT_EQ(describe(f, memory_kind::host, 0).value().strides, strides);
}

TEST_F(interface, an_empty_array_may_have_an_address_and_any_strides) {
  array_interface f = fields();
  shape_ = {0};
  const list strides = {-4};
  f.shape = shape_;
  f.strides = strides;
  EXPECT_EQ(describe(f, memory_kind::host, 0).value().size(), 0);
  f.address = 0;
  EXPECT_EQ(describe(f, memory_kind::host, 0).value().data, nullptr);
}

TEST_F(interface, what_is_refused) {
  array_interface f = fields();
  f.has_mask = true;
  refused(f, "mask");
  f = fields();
  f.is_structured = true;
  refused(f, "structured");
  f = fields();
  f.typestr = "<V8";
  refused(f, "raw bytes");
  f = fields();
  f.address = 0;
  refused(f, "address is null");
  f = fields();
  const list one = {4};
  f.strides = one;
  refused(f, "1 strides for 2 axes");
  f = fields();
  f.offset = -1;
  refused(f, "offset -1");
  f = fields();
  f.offset = most;
  f.address = std::numeric_limits<std::uintptr_t>::max() - 8;
  refused(f, "leaves the memory");
  f = fields();
  const list far = {most / 2, most / 2};
  f.strides = far;
  refused(f, "address space");
  f = fields();
  shape_ = {most, most};
  refused(f, "more bytes");
}

}  // namespace

// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "core/memory/dlpack_export.hpp"
#include "core/memory/dlpack_import.hpp"

namespace {

namespace dlpack = jaxbridge::abi::dlpack;
using jaxbridge::dtype;
using jaxbridge::result;
using jaxbridge::status_code;
using jaxbridge::memory::array;
using jaxbridge::memory::describe;
using jaxbridge::memory::dlpack_tensor;
using jaxbridge::memory::memory_kind;
using list = std::vector<std::int64_t>;

constexpr std::int64_t most = std::numeric_limits<std::int64_t>::max();

// A tensor as a producer would make it, changed by a test.
struct tensor_source {
  float data[64] = {};
  list shape = {2, 3};
  list strides = {3, 1};
  dlpack::tensor tensor{data,         {dlpack::device_cpu, 0}, 2, {dlpack::code_float, 32, 1},
                        shape.data(), strides.data(),          0};
};

class dlpack_import : public testing::Test {
 protected:
  array accepted() {
    const result<array> got = describe(source_.tensor, false);
    EXPECT_TRUE(got.ok()) << got.error().message();
    return got.ok() ? got.value() : array{};
  }
  void refused(status_code code, const char* part) {
    const result<array> got = describe(source_.tensor, false);
    ASSERT_FALSE(got.ok());
    EXPECT_EQ(got.error().code(), code) << got.error().message();
    EXPECT_NE(got.error().message().find(part), std::string::npos) << got.error().message();
  }

  tensor_source source_;
};

TEST_F(dlpack_import, what_the_tensor_says) {
  const array a = accepted();
  EXPECT_EQ(a.data, source_.data);
  EXPECT_EQ(a.dtype, dtype::float32);
  EXPECT_EQ(a.kind, memory_kind::host);
  EXPECT_EQ(a.shape, (list{2, 3}));
  EXPECT_EQ(a.strides, (list{12, 4}));
  EXPECT_FALSE(a.readonly);
  EXPECT_TRUE(describe(source_.tensor, true).value().readonly);
}

TEST_F(dlpack_import, byte_offset_is_part_of_the_address) {
  source_.tensor.byte_offset = 20;
  EXPECT_EQ(accepted().data, source_.data + 5);
  source_.tensor.byte_offset = std::numeric_limits<std::uint64_t>::max();
  refused(status_code::invalid_argument, "byte_offset");
}

TEST_F(dlpack_import, null_strides_are_compact) {
  source_.tensor.strides = nullptr;
  EXPECT_EQ(accepted().strides, (list{12, 4}));
  source_.tensor.ndim = 0;
  source_.tensor.shape = nullptr;
  EXPECT_EQ(accepted().size(), 1);
}

TEST_F(dlpack_import, strides_of_length_1_axes_and_of_nothing_are_not_followed) {
  source_.shape = {1, 3};
  source_.strides = {most, 1};
  EXPECT_EQ(accepted().strides, (list{0, 4}));
  source_.shape = {0, 3};
  source_.strides = {most, -most};
  source_.tensor.data = nullptr;
  EXPECT_EQ(accepted().size_bytes(), 0);
}

TEST_F(dlpack_import, every_device) {
  source_.tensor.device = {dlpack::device_cuda, 3};
  EXPECT_EQ(accepted().kind, memory_kind::device);
  EXPECT_EQ(accepted().ordinal, 3);
  source_.tensor.device = {dlpack::device_cuda_host, 3};
  EXPECT_EQ(accepted().kind, memory_kind::pinned);
  EXPECT_EQ(accepted().ordinal, 0);
  source_.tensor.device = {dlpack::device_cuda_managed, 1};
  EXPECT_EQ(accepted().kind, memory_kind::managed);
  EXPECT_EQ(accepted().ordinal, 1);
  source_.tensor.device = {static_cast<dlpack::device_type>(8), 0};
  refused(status_code::unimplemented, "the device type 8");
  source_.tensor.device = {dlpack::device_cuda, -1};
  refused(status_code::invalid_argument, "device id -1");
}

TEST_F(dlpack_import, every_element_type_we_export) {
#define JAXBRIDGE_ENTRY(id, text, xla, width, code)                          \
  if (code != JAXBRIDGE_NO_DLPACK) {                                         \
    EXPECT_EQ(jaxbridge::dtype_from_dlpack(code, width), dtype::id) << text; \
  }
  JAXBRIDGE_DTYPES(JAXBRIDGE_ENTRY)
#undef JAXBRIDGE_ENTRY
  EXPECT_EQ(jaxbridge::dtype_from_dlpack(JAXBRIDGE_NO_DLPACK, 4), dtype::invalid);
  source_.tensor.dtype = {dlpack::code_complex, 32, 1};
  refused(status_code::unimplemented, "code 5, 32 bits");
  source_.tensor.dtype = {dlpack::code_float, 32, 4};
  refused(status_code::unimplemented, "4 lanes is a vector");
  source_.tensor.dtype = {dlpack::code_float4_e2m1fn, 4, 1};
  refused(status_code::unimplemented, "smaller than a byte");
  source_.tensor.dtype = {200, 8, 1};
  refused(status_code::unimplemented, "code 200");
}

TEST_F(dlpack_import, what_is_no_array) {
  source_.tensor.ndim = -1;
  refused(status_code::invalid_argument, "-1 axes");
  source_.tensor.ndim = 65;
  refused(status_code::invalid_argument, "65 axes");
  source_.tensor.ndim = 2;
  source_.tensor.shape = nullptr;
  refused(status_code::invalid_argument, "shape is missing");
  source_.tensor.shape = source_.shape.data();
  source_.tensor.data = nullptr;
  refused(status_code::invalid_argument, "address is null");
  source_.tensor.data = source_.data;
  source_.shape = {-1, 3};
  refused(status_code::invalid_argument, "negative extent");
  source_.shape = {2, 3};
  source_.strides = {most, 1};
  refused(status_code::unimplemented, "stride");
}

int deleted = 0;

TEST(dlpack_tensor, calls_its_deleter_once) {
  deleted = 0;
  tensor_source source;
  dlpack::managed_tensor old{source.tensor, nullptr, [](auto*) { ++deleted; }};
  {
    dlpack_tensor first(&old);
    EXPECT_TRUE(first.describe().ok());
    dlpack_tensor second(std::move(first));
    EXPECT_FALSE(first.describe().ok());  // NOLINT(bugprone-use-after-move)
    first = std::move(second);
    EXPECT_EQ(deleted, 0);
  }
  EXPECT_EQ(deleted, 1);
  old.deleter = nullptr;
  dlpack_tensor without(&old);
}

TEST(dlpack_tensor, of_another_major_version_nothing_is_read) {
  deleted = 0;
  dlpack::managed_tensor_versioned newer{};
  newer.version = {2, 0};
  newer.deleter = [](auto*) { ++deleted; };
  newer.tensor.ndim = -7;
  {
    const dlpack_tensor owned(&newer);
    const result<array> got = owned.describe();
    ASSERT_FALSE(got.ok());
    EXPECT_NE(got.error().message().find("version 2.0"), std::string::npos);
  }
  EXPECT_EQ(deleted, 1);
}

TEST(dlpack_tensor, the_read_only_flag) {
  tensor_source source;
  dlpack::managed_tensor_versioned managed{{1, 0}, nullptr, nullptr, 0, source.tensor};
  EXPECT_FALSE(dlpack_tensor(&managed).describe().value().readonly);
  managed.flags = dlpack::flag_read_only;
  EXPECT_TRUE(dlpack_tensor(&managed).describe().value().readonly);
}

TEST(dlpack_tensor, what_we_export_comes_back) {
  float data[6] = {};
  const list shape = {3, 2};
  const list strides = {4, 12};
  jaxbridge::memory::dlpack_source s;
  s.data = data;
  s.dtype = dtype::float32;
  s.shape = shape;
  s.strides = strides;
  s.readonly = true;
  const auto made = jaxbridge::memory::export_versioned(s);
  ASSERT_TRUE(made.ok());
  const dlpack_tensor owned(made.value());
  const result<array> got = owned.describe();
  ASSERT_TRUE(got.ok());
  EXPECT_EQ(got.value().data, data);
  EXPECT_EQ(got.value().shape, shape);
  EXPECT_EQ(got.value().strides, strides);
  EXPECT_TRUE(got.value().readonly);
}

}  // namespace

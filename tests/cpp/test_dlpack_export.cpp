// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "core/memory/dlpack_export.hpp"

namespace {

namespace dlpack = jaxbridge::abi::dlpack;
using jaxbridge::dtype;
using jaxbridge::platform;
using jaxbridge::result;
using jaxbridge::status;
using jaxbridge::status_code;
using jaxbridge::memory::dlpack_source;

void count(void* owner) noexcept { ++*static_cast<int*>(owner); }

// Both forms of a managed tensor pass the same tests.
struct versioned {
  using type = dlpack::managed_tensor_versioned;
  static result<type*> make(const dlpack_source& s) {
    return jaxbridge::memory::export_versioned(s);
  }
};
struct unversioned {
  using type = dlpack::managed_tensor;
  static result<type*> make(const dlpack_source& s) {
    return jaxbridge::memory::export_unversioned(s);
  }
};

template <class Form>
class dlpack_export : public testing::Test {
 protected:
  // A source that counts its releases.
  dlpack_source source(dtype type, const std::vector<std::int64_t>& shape) {
    return {data_,  type, {shape.data(), shape.size()}, {dlpack::device_cpu, 0}, false, &releases_,
            &count, {}};
  }

  std::vector<std::int64_t> strides_of(const std::vector<std::int64_t>& shape) {
    const auto made = Form::make(source(dtype::float32, shape));
    EXPECT_TRUE(made.ok());
    if (!made.ok()) return {};
    const dlpack::tensor& t = made.value()->tensor;
    EXPECT_EQ(t.ndim, static_cast<int>(shape.size()));
    EXPECT_EQ(std::vector<std::int64_t>(t.shape, t.shape + t.ndim), shape);
    const std::vector<std::int64_t> out(t.strides, t.strides + t.ndim);
    made.value()->deleter(made.value());
    return out;
  }

  void expect_error(const dlpack_source& s, status_code code, const char* part) {
    const auto made = Form::make(s);
    ASSERT_FALSE(made.ok());
    EXPECT_EQ(made.error().code(), code);
    EXPECT_NE(made.error().message().find(part), std::string::npos) << made.error().message();
    EXPECT_EQ(releases_, 0) << "the caller still owns it";
  }

  alignas(64) float data_[64] = {};
  int releases_ = 0;
};

struct form_names {
  template <class Form>
  static std::string GetName(int) {
    return std::is_same_v<Form, versioned> ? "versioned" : "unversioned";
  }
};
using forms = testing::Types<versioned, unversioned>;
TYPED_TEST_SUITE(dlpack_export, forms, form_names);

TYPED_TEST(dlpack_export, describes_the_memory) {
  const std::vector<std::int64_t> shape = {2, 3, 4};
  const auto made = TypeParam::make(this->source(dtype::float32, shape));
  ASSERT_TRUE(made.ok());
  const dlpack::tensor& t = made.value()->tensor;
  EXPECT_EQ(t.data, this->data_);
  EXPECT_EQ(t.byte_offset, 0u);
  EXPECT_EQ(t.ndim, 3);
  EXPECT_EQ(t.device.type, dlpack::device_cpu);
  EXPECT_EQ(t.device.id, 0);
  EXPECT_EQ(t.dtype.code, dlpack::code_float);
  EXPECT_EQ(t.dtype.bits, 32);
  EXPECT_EQ(t.dtype.lanes, 1);
  EXPECT_NE(t.shape, shape.data()) << "the tensor outlives the source's shape";
  made.value()->deleter(made.value());
}

TYPED_TEST(dlpack_export, strides_are_compact_and_row_major) {
  using list = std::vector<std::int64_t>;
  EXPECT_EQ(this->strides_of({5}), (list{1}));
  EXPECT_EQ(this->strides_of({2, 3, 4}), (list{12, 4, 1}));
  EXPECT_EQ(this->strides_of({1, 3, 1, 4, 1}), (list{12, 4, 4, 1, 1}));
  EXPECT_EQ(this->strides_of({1}), (list{1}));
  EXPECT_EQ(this->strides_of({2, 0, 3}), (list{3, 3, 1}));
  EXPECT_EQ(this->strides_of(list(32, 1)), list(32, 1));
  EXPECT_EQ(this->releases_, 6);
}

TYPED_TEST(dlpack_export, rank_0_has_no_lists) {
  const auto made = TypeParam::make(this->source(dtype::float32, {}));
  ASSERT_TRUE(made.ok());
  EXPECT_EQ(made.value()->tensor.ndim, 0);
  EXPECT_EQ(made.value()->tensor.shape, nullptr);
  EXPECT_EQ(made.value()->tensor.strides, nullptr);
  EXPECT_EQ(made.value()->tensor.data, this->data_);
  made.value()->deleter(made.value());
}

TYPED_TEST(dlpack_export, no_elements_no_address) {
  const std::vector<std::int64_t> shape = {4, 0};
  const auto made = TypeParam::make(this->source(dtype::float32, shape));
  ASSERT_TRUE(made.ok());
  EXPECT_EQ(made.value()->tensor.data, nullptr);
  EXPECT_EQ(made.value()->tensor.ndim, 2);
  made.value()->deleter(made.value());
}

TYPED_TEST(dlpack_export, every_element_type_or_an_error) {
  for (int number = 0; number < 64; ++number) {
    const dtype type = jaxbridge::dtype_from_xla(number);
    if (type == dtype::invalid) continue;
    const std::vector<std::int64_t> shape = {2};
    const auto made = TypeParam::make(this->source(type, shape));
    if (jaxbridge::dlpack_code(type) == JAXBRIDGE_NO_DLPACK) {
      ASSERT_FALSE(made.ok()) << name(type);
      EXPECT_EQ(made.error().code(), status_code::unimplemented);
      EXPECT_NE(made.error().message().find(name(type)), std::string::npos);
      continue;
    }
    ASSERT_TRUE(made.ok()) << name(type);
    EXPECT_EQ(made.value()->tensor.dtype.code, jaxbridge::dlpack_code(type)) << name(type);
    EXPECT_EQ(made.value()->tensor.dtype.bits, jaxbridge::bit_width(type)) << name(type);
    EXPECT_EQ(made.value()->tensor.dtype.lanes, 1);
    made.value()->deleter(made.value());
  }
}

TYPED_TEST(dlpack_export, names_the_device) {
  dlpack_source s = this->source(dtype::float32, {});
  s.device = jaxbridge::memory::dlpack_device({platform::cuda, 3});
  const auto on_cuda = TypeParam::make(s);
  ASSERT_TRUE(on_cuda.ok());
  EXPECT_EQ(on_cuda.value()->tensor.device.type, dlpack::device_cuda);
  EXPECT_EQ(on_cuda.value()->tensor.device.id, 3);
  on_cuda.value()->deleter(on_cuda.value());

  s.device = jaxbridge::memory::dlpack_device({platform::cpu, 1});  // a virtual device of XLA
  const auto on_cpu = TypeParam::make(s);
  ASSERT_TRUE(on_cpu.ok());
  EXPECT_EQ(on_cpu.value()->tensor.device.type, dlpack::device_cpu);
  EXPECT_EQ(on_cpu.value()->tensor.device.id, 0);
  on_cpu.value()->deleter(on_cpu.value());
}

TYPED_TEST(dlpack_export, releases_the_owner_once_and_from_any_thread) {
  const auto made = TypeParam::make(this->source(dtype::float32, {}));
  ASSERT_TRUE(made.ok());
  EXPECT_EQ(this->releases_, 0);
  std::thread([&] { made.value()->deleter(made.value()); }).join();
  EXPECT_EQ(this->releases_, 1);
}

TYPED_TEST(dlpack_export, needs_no_owner) {
  dlpack_source s = this->source(dtype::float32, {});
  s.owner = nullptr;
  s.release = nullptr;
  const auto made = TypeParam::make(s);
  ASSERT_TRUE(made.ok());
  made.value()->deleter(made.value());
  EXPECT_EQ(this->releases_, 0);
}

TYPED_TEST(dlpack_export, refuses_impossible_shapes) {
  const std::int64_t most = std::numeric_limits<std::int64_t>::max();
  const std::vector<std::int64_t> negative = {2, -1};
  this->expect_error(this->source(dtype::float32, negative), status_code::invalid_argument,
                     "extent -1, expected 0 or more");
  const std::vector<std::int64_t> huge = {2, most};
  this->expect_error(this->source(dtype::float32, huge), status_code::invalid_argument,
                     "more elements than an address can count");
}

TYPED_TEST(dlpack_export, refuses_unknown_element_types) {
  this->expect_error(this->source(dtype::int4, {}), status_code::unimplemented, "int4");
  this->expect_error(this->source(dtype::invalid, {}), status_code::unimplemented, "invalid");
}

TEST(dlpack_export_versioned, carries_version_and_flags) {
  dlpack_source s;
  s.dtype = dtype::int8;
  for (const bool readonly : {false, true}) {
    s.readonly = readonly;
    const auto made = jaxbridge::memory::export_versioned(s);
    ASSERT_TRUE(made.ok());
    EXPECT_EQ(made.value()->version.major, 1u);
    EXPECT_EQ(made.value()->version.minor, dlpack::produced_version.minor);
    EXPECT_EQ(made.value()->flags, readonly ? dlpack::flag_read_only : 0u);
    made.value()->deleter(made.value());
  }
}

TYPED_TEST(dlpack_export, strides_of_the_source) {
  const std::vector<std::int64_t> shape = {2, 3};
  const std::vector<std::int64_t> bytes = {4, 8};
  dlpack_source s = this->source(dtype::float32, shape);
  s.strides = bytes;
  const auto made = TypeParam::make(s);
  ASSERT_TRUE(made.ok());
  const dlpack::tensor& t = made.value()->tensor;
  EXPECT_EQ(std::vector<std::int64_t>(t.strides, t.strides + 2), (std::vector<std::int64_t>{1, 2}));
  made.value()->deleter(made.value());
  this->releases_ = 0;
  const std::vector<std::int64_t> odd = {6, 4};
  s.strides = odd;
  this->expect_error(s, status_code::unimplemented, "stride of 6 bytes");
}

TEST(dlpack_export_flags, a_copy_says_so) {
  float data = 0;
  dlpack_source s;
  s.data = &data;
  s.dtype = dtype::float32;
  s.is_copied = true;
  const auto made = jaxbridge::memory::export_versioned(s);
  ASSERT_TRUE(made.ok());
  EXPECT_EQ(made.value()->flags, dlpack::flag_is_copied);
  made.value()->deleter(made.value());
}

TEST(dlpack_export_device, every_kind_of_memory) {
  using jaxbridge::memory::dlpack_device;
  using jaxbridge::memory::memory_kind;
  EXPECT_EQ(dlpack_device(memory_kind::host, 0).type, dlpack::device_cpu);
  EXPECT_EQ(dlpack_device(memory_kind::device, 2).type, dlpack::device_cuda);
  EXPECT_EQ(dlpack_device(memory_kind::device, 2).id, 2);
  EXPECT_EQ(dlpack_device(memory_kind::pinned, 2).type, dlpack::device_cuda_host);
  EXPECT_EQ(dlpack_device(memory_kind::pinned, 2).id, 0);
  EXPECT_EQ(dlpack_device(memory_kind::managed, 1).type, dlpack::device_cuda_managed);
  EXPECT_EQ(dlpack_device(memory_kind::managed, 1).id, 1);
}

}  // namespace

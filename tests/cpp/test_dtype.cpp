// SPDX-License-Identifier: Apache-2.0
// The table of element types. tests/compile holds its numbers against XLA's and DLPack's headers.
#include <gtest/gtest.h>

#include <complex>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "jaxbridge/dtype.hpp"

namespace {

using jaxbridge::bit_width;
using jaxbridge::dlpack_code;
using jaxbridge::dtype;
using jaxbridge::dtype_from_dlpack;
using jaxbridge::dtype_from_name;
using jaxbridge::dtype_from_xla;
using jaxbridge::dtype_of;
using jaxbridge::item_size;
using jaxbridge::name;

const std::vector<dtype> all = {
#define JAXBRIDGE_ENTRY(id, text, xla, bits, dlpack) dtype::id,
    JAXBRIDGE_DTYPES(JAXBRIDGE_ENTRY)
#undef JAXBRIDGE_ENTRY
};

TEST(dtype, names_are_unique) {
  std::set<std::string> names;
  for (const dtype t : all) EXPECT_TRUE(names.emplace(name(t)).second) << name(t);
  EXPECT_EQ(names.count("invalid"), 0u);
  EXPECT_EQ(names.size(), 30u);
}

TEST(dtype, comes_back_from_its_number) {
  for (const dtype t : all) EXPECT_EQ(dtype_from_xla(static_cast<int>(t)), t) << name(t);
}

TEST(dtype, comes_back_from_its_name) {
  for (const dtype t : all) EXPECT_EQ(dtype_from_name(name(t)), t) << name(t);
  for (const char* text : {"", "invalid", "float", "bool_", "float128", "int32 "}) {
    EXPECT_EQ(dtype_from_name(text), dtype::invalid) << text;
  }
}

TEST(dtype, comes_back_from_dlpacks_code) {
  for (const dtype t : all) {
    const auto bits = static_cast<std::uint8_t>(bit_width(t));
    const bool has = dlpack_code(t) != JAXBRIDGE_NO_DLPACK;
    EXPECT_EQ(dtype_from_dlpack(dlpack_code(t), bits), has ? t : dtype::invalid) << name(t);
  }
  EXPECT_EQ(dtype_from_dlpack(2, 33), dtype::invalid);
  EXPECT_EQ(dtype_from_dlpack(3, 64), dtype::invalid) << "an opaque handle";
}

TEST(dtype, numbers_that_are_none) {
  std::set<int> known;
  for (const dtype t : all) known.insert(static_cast<int>(t));
  for (int number = -300; number <= 600; ++number) {
    if (known.count(number) == 0) {
      EXPECT_EQ(dtype_from_xla(number), dtype::invalid) << number;
    }
  }
  constexpr int tuple = 13;
  constexpr int token = 17;
  EXPECT_EQ(dtype_from_xla(tuple), dtype::invalid);
  EXPECT_EQ(dtype_from_xla(token), dtype::invalid);
}

TEST(dtype, invalid_has_no_size) {
  EXPECT_EQ(name(dtype::invalid), "invalid");
  EXPECT_EQ(bit_width(dtype::invalid), 0u);
  EXPECT_EQ(item_size(dtype::invalid), 0u);
  EXPECT_EQ(dlpack_code(dtype::invalid), JAXBRIDGE_NO_DLPACK);
  // A number that was cast without a look into the table.
  EXPECT_EQ(name(static_cast<dtype>(200)), "invalid");
}

// Digits at the end of a name, or after "int" and "float", are its width.
TEST(dtype, widths_agree_with_the_names) {
  for (const dtype t : all) {
    const std::string text(name(t));
    if (text == "bool") {
      EXPECT_EQ(bit_width(t), 8u);
      continue;
    }
    const std::size_t first = text.find_first_of("0123456789");
    ASSERT_NE(first, std::string::npos) << text;
    EXPECT_EQ(bit_width(t), std::stoul(text.substr(first))) << text;
    EXPECT_EQ(item_size(t), bit_width(t) / 8) << text;
  }
}

TEST(dtype, of_cpp_types) {
  static_assert(dtype_of<bool> == dtype::bool_);
  static_assert(dtype_of<std::int8_t> == dtype::int8);
  static_assert(dtype_of<std::uint64_t> == dtype::uint64);
  static_assert(dtype_of<const float> == dtype::float32);
  static_assert(dtype_of<double> == dtype::float64);
  static_assert(dtype_of<std::complex<float>> == dtype::complex64);
  static_assert(dtype_of<const volatile std::complex<double>> == dtype::complex128);
  static_assert(dtype_of<void*> == dtype::invalid);
  static_assert(dtype_of<std::string> == dtype::invalid);
  EXPECT_EQ(item_size(dtype_of<std::complex<double>>), sizeof(std::complex<double>));
}

TEST(dtype, dlpack_has_no_integers_below_a_byte) {
  const std::set<dtype> without = {dtype::int1,  dtype::int2,  dtype::int4,
                                   dtype::uint1, dtype::uint2, dtype::uint4};
  for (const dtype t : all) {
    EXPECT_EQ(dlpack_code(t) == JAXBRIDGE_NO_DLPACK, without.count(t) == 1) << name(t);
  }
}

}  // namespace

// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "core/dispatch/entry_points.hpp"
#include "core/memory/live_imports.hpp"
#include "fakes/frame_builder.hpp"

namespace {

using fake_xla::frame_builder;
using fake_xla::outcome;
using fake_xla::take;
using jaxbridge::dtype;
using jaxbridge::dispatch::check_external_cpu;
using jaxbridge::dispatch::check_external_cuda;

constexpr int f32 = static_cast<int>(dtype::float32);

class external : public ::testing::Test {
 protected:
  void SetUp() override { jaxbridge::memory::add_import(address()); }
  void TearDown() override {
    jaxbridge::memory::remove_import(address());
    EXPECT_EQ(fake_xla::live_errors(), 0);
  }
  [[nodiscard]] std::uintptr_t address() { return reinterpret_cast<std::uintptr_t>(&memory_); }

  // The first operand is the result; the others are read.
  static std::string error_of(const std::vector<void*>& operands, void* result) {
    frame_builder b(0, "f: argument 'x'\nf: argument 'y'");
    for (void* data : operands) b.raw_operand(f32, {1}, data);
    b.raw_result(f32, {1}, result);
    const outcome on_cuda = take(check_external_cuda(&b.frame()));
    const outcome on_cpu = take(check_external_cpu(&b.frame()));
    EXPECT_EQ(on_cuda.message, on_cpu.message);
    return on_cpu.message;
  }

  float memory_ = 0;
  float other_ = 0;
};

TEST_F(external, memory_that_is_imported_passes) {
  EXPECT_EQ(error_of({&memory_, &other_}, &memory_), "");
}

TEST_F(external, a_copy_is_an_error_that_names_the_operand) {
  EXPECT_NE(error_of({&other_, &memory_}, &other_)
                .find("f: argument 'x' is a Ref of another library's memory, but XLA gave the"),
            std::string::npos);
  EXPECT_NE(
      error_of({&memory_, &other_}, &other_).find("f: argument 'x' is in place, but XLA gave"),
      std::string::npos);
}

TEST_F(external, one_memory_twice_is_an_error) {
  EXPECT_NE(error_of({&memory_, &memory_}, &memory_)
                .find("f: argument 'x' and f: argument 'y' are in the same memory"),
            std::string::npos);
}

}  // namespace

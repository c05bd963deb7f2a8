// SPDX-License-Identifier: Apache-2.0
// Descriptions of libraries, also damaged ones: tests/python/test_native.py has more, as files.
#include <gtest/gtest.h>

#include <array>
#include <string>

#include "core/exit.hpp"
#include "core/native/c_function.hpp"
#include "core/native/library.hpp"

namespace jaxbridge::native {
namespace {

abi::xla_ffi::error* handler(abi::xla_ffi::call_frame* /*frame*/) { return nullptr; }

// A description in memory that counts as a library's.
struct described {
  abi::native::library all{sizeof(abi::native::library), abi::native::major_version, &first};
  abi::native::function first{};
  std::atomic<std::uint64_t> calls{3};
  char name[8] = "scale";
  char signatures[40] = "float32[*], out float32[*]\nb";

  described() {
    first.struct_size = sizeof(first);
    first.name = {name, 5};
    first.signatures = {signatures, 28};
    first.execute = &handler;
    first.calls = &calls;
  }
  [[nodiscard]] std::vector<segment> segments() const {
    const auto at = reinterpret_cast<std::uintptr_t>(this);
    const auto code = reinterpret_cast<std::uintptr_t>(&handler);
    return {{at, at + sizeof(*this), true, false}, {code, code + 1, false, true}};
  }
};

}  // namespace

TEST(native_library, is_read) {
  const described d;
  const auto found = read_descriptor(&d.all, d.segments());
  ASSERT_TRUE(found.ok()) << found.error().message();
  ASSERT_EQ(found.value().size(), 1U);
  const function& f = found.value()[0];
  EXPECT_EQ(f.name, "scale");
  EXPECT_EQ(f.signatures, (std::vector<std::string>{"float32[*], out float32[*]", "b"}));
  EXPECT_EQ(f.call_count(), 3U);
}

TEST(native_library, of_a_newer_jaxbridge_may_say_more) {
  described d;
  d.first.struct_size += 100;
  d.all.struct_size += 8;
  EXPECT_TRUE(read_descriptor(&d.all, d.segments()).ok());
}

TEST(native_library, outside_of_its_memory_is_an_error) {
  described d;
  auto segments = d.segments();
  segments[0].end = reinterpret_cast<std::uintptr_t>(d.name) + 2;
  EXPECT_FALSE(read_descriptor(&d.all, segments).ok());
  d.first.name.data = reinterpret_cast<const char*>(~std::uintptr_t{0});
  EXPECT_FALSE(read_descriptor(&d.all, d.segments()).ok());
  EXPECT_FALSE(read_descriptor(nullptr, d.segments()).ok());
}

int nothing() { return 0; }

TEST(c_function, checks_the_arrays_of_a_call) {
  const auto outcome = [](argument::source from,
                          std::vector<dispatch::in_place::index_pair> pairs) {
    argument a;
    a.from = from;
    c_function f("f", reinterpret_cast<void*>(&nothing), {a}, {}, returned::nothing,
                 dispatch::in_place({}, std::move(pairs), {}));
    return f.invoke({});
  };
  EXPECT_EQ(outcome(argument::source::operand, {}).message(),
            "f: the program has fewer arrays than the function's signature");
  EXPECT_TRUE(outcome(argument::source::value, {}).ok());
  EXPECT_FALSE(outcome(argument::source::value, {{0, 0}}).ok());
}

// A call on the CPU of a function of two arrays.
struct on_two_arrays {
  std::array<std::int32_t, 2> x{1, 2};
  std::array<std::int32_t, 2> y{};
  std::array<std::int64_t, 1> shape{2};
  any_buffer in{x.data(), dtype::int32, shape};
  any_buffer out{y.data(), dtype::int32, shape};
  dispatch::call c;

  on_two_arrays() {
    c.operands = {&in, 1};
    c.results = {&out, 1};
  }
};

void first_only(std::int32_t* x, std::int32_t* y) {
  y[0] = x[0];
  x[1] = 7;
}

std::vector<argument> two_pointers() {
  argument x;
  x.from = argument::source::operand;
  argument y;
  y.from = argument::source::result;
  return {x, y};
}

TEST(c_function, is_inspected_in_debug_mode) {
  for (const bool inspects : {false, true}) {
    on_two_arrays a;
    c_function f("f", reinterpret_cast<void*>(&first_only), two_pointers(), {}, returned::nothing,
                 {}, inspects);
    const status s = f.invoke(a.c);
    EXPECT_EQ(s.ok(), !inspects);
    EXPECT_EQ(a.y[0], 1);
    EXPECT_EQ(a.y[1], inspects ? static_cast<std::int32_t>(0xA5A5A5A5) : 0);
    EXPECT_EQ(s.message().rfind("operand 0 was written to", 0) == 0, inspects) << s.message();
  }
  // What it may write to is not looked at, nor what has no elements.
  on_two_arrays a;
  a.out = a.in;
  c_function updates("f", reinterpret_cast<void*>(&first_only), two_pointers(), {},
                     returned::nothing, dispatch::in_place({}, {{0, 0}}, {}), true);
  EXPECT_TRUE(updates.invoke(a.c).ok());
  EXPECT_EQ(a.x, (std::array<std::int32_t, 2>{1, 7}));
  on_two_arrays empty;
  empty.shape[0] = 0;
  empty.out.data = nullptr;
  empty.in.data = nullptr;
  c_function nothing_to_do("f", reinterpret_cast<void*>(&nothing), two_pointers(), {},
                           returned::nothing, {}, true);
  EXPECT_TRUE(nothing_to_do.invoke(empty.c).ok());
}

TEST(c_function, is_not_called_once_the_process_is_ending) {
  on_two_arrays a;
  c_function f("f", reinterpret_cast<void*>(&first_only), two_pointers(), {}, returned::nothing,
               {});
  begin_exit();
  EXPECT_EQ(f.invoke(a.c).message(), "f: the process is ending");
  cancel_exit_for_testing();
  EXPECT_EQ(a.y[0], 0);
  EXPECT_TRUE(f.invoke(a.c).ok());
}

}  // namespace jaxbridge::native

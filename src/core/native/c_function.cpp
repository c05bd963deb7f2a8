// SPDX-License-Identifier: Apache-2.0
#include "core/native/c_function.hpp"

#include <array>
#include <cstring>
#include <string>
#include <utility>

namespace jaxbridge::native {
namespace {

#if !defined(__x86_64__) && !defined(__aarch64__)
#error "the calling convention of this machine is not known here: see registers"
#endif

// Both calling conventions (System V's for x86-64, AAPCS64 as on Linux) pass integers and addresses
// in one kind of register and floating-point numbers in another, each kind in the order of the
// parameters; what finds no register lies on the stack, 8 bytes each, in the order of the
// parameters. So any call is a call of one C function with as many integers and as many doubles as
// there are registers, and words on the stack behind them.
#if defined(__x86_64__)
constexpr std::size_t integer_registers = 6;
#else
constexpr std::size_t integer_registers = 8;
#endif
constexpr std::size_t float_registers = 8;

using word = std::uint64_t;

struct registers {
  std::array<word, integer_registers> integers{};
  std::array<double, float_registers> floats{};
  std::array<word, max_arguments> stack{};
  std::size_t stack_size = 0;
};

template <class>
using word_for = word;

template <std::size_t... I, std::size_t... S>
#if defined(__clang__)
__attribute__((no_sanitize("function")))
#endif
int call_with(void* address, const registers& r, std::index_sequence<I...> /*integers*/,
              std::index_sequence<S...> /*stack*/) {
  const auto& f = r.floats;
  using function = int (*)(decltype((void)I, word())..., double, double, double, double, double,
                           double, double, double, decltype((void)S, word())...);
  return reinterpret_cast<function>(address)(r.integers[I]..., f[0], f[1], f[2], f[3], f[4], f[5],
                                             f[6], f[7], r.stack[S]...);
}

int call(void* address, const registers& r) {
  constexpr auto integers = std::make_index_sequence<integer_registers>();
  // Words behind those that the function reads do no harm.
  if (r.stack_size == 0) return call_with(address, r, integers, std::make_index_sequence<0>());
  if (r.stack_size <= 8) return call_with(address, r, integers, std::make_index_sequence<8>());
  return call_with(address, r, integers, std::make_index_sequence<max_arguments>());
}

double as_double(word bits) {
  double out = 0;
  std::memcpy(&out, &bits, sizeof(out));
  return out;
}

}  // namespace

c_function::c_function(std::string name, void* address, std::vector<argument> arguments,
                       std::vector<std::string> texts, returned returns,
                       dispatch::in_place in_place, bool inspects)
    : native_target(std::move(name), std::move(arguments), std::move(in_place), inspects),
      address_(address),
      texts_(std::move(texts)),
      returns_(returns) {}

status c_function::run(const dispatch::call& c) {
  registers r;
  std::size_t integers = 0;
  std::size_t floats = 0;
  for (const argument& a : arguments()) {
    const word w = word_of(a, c, texts_);
    if (!a.is_float && integers < integer_registers) {
      r.integers[integers++] = w;
    } else if (a.is_float && floats < float_registers) {
      r.floats[floats++] = as_double(w);
    } else {
      r.stack[r.stack_size++] = w;
    }
  }
  const int code = call(address_, r);
  if (returns_ == returned::error_code && code != 0) {
    return {status_code::internal, name() + " returned the error code " + std::to_string(code)};
  }
  return {};
}

}  // namespace jaxbridge::native

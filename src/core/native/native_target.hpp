// SPDX-License-Identifier: Apache-2.0
// A target that calls no Python: what C functions, kernels and functions of libraries have in
// common.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/device_counter.hpp"
#include "core/dispatch/in_place.hpp"
#include "core/dispatch/registry.hpp"
#include "core/replay/device_graphs.hpp"

namespace jaxbridge::native {

/// What one parameter of a C function, or of a kernel, gets. Everything that follows from shapes is
/// a value: a target serves calls of one list of shapes.
struct argument {
  enum class source : std::uint8_t {
    operand,  ///< the address of operand `index`
    result,   ///< the address of result `index`
    value,    ///< `bits`, the same at each call
    text,     ///< the address of the text `index` of the target
    stream,   ///< the call's stream
  };

  source from = source::value;
  /// Whether the C type is float or double: other registers.
  bool is_float = false;
  std::uint32_t index = 0;
  std::uint64_t bits = 0;
};

/// The word that `a` is for this call: an address, or a number in its lowest bytes.
[[nodiscard]] std::uint64_t word_of(const argument& a, const dispatch::call& c,
                                    const std::vector<std::string>& texts) noexcept;

class native_target : public dispatch::target {
 public:
  /// `inspects`: whether each call is inspected (inspection.hpp), as debug mode wants it.
  native_target(std::string name, std::vector<argument> arguments, dispatch::in_place in_place,
                bool inspects);

  /// Counts the call, and makes it unless the process is ending, or the call has not the arrays
  /// that the arguments name, in the memory that they should be in.
  status invoke(const dispatch::call& c) noexcept final;

  /// How often XLA has called it.
  [[nodiscard]] std::uint64_t calls() const noexcept { return calls_.total(); }
  /// What it replays; null where it replays nothing.
  [[nodiscard]] virtual replay::device_graphs* graphs() noexcept { return nullptr; }

 protected:
  /// The work of a call that has been checked.
  [[nodiscard]] virtual status run(const dispatch::call& c) = 0;

  [[nodiscard]] const std::string& name() const noexcept { return name_; }
  [[nodiscard]] const std::vector<argument>& arguments() const noexcept { return arguments_; }

 private:
  std::string name_;
  std::vector<argument> arguments_;
  dispatch::in_place in_place_;
  bool inspects_;
  device_counter calls_;
};

}  // namespace jaxbridge::native

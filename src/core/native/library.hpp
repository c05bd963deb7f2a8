// SPDX-License-Identifier: Apache-2.0
// A shared library of native functions: opened, and its description checked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <jaxbridge/abi/native_library.hpp>
#include <jaxbridge/attribute_set.hpp>
#include <jaxbridge/device.hpp>
#include <jaxbridge/dtype.hpp>
#include <jaxbridge/status.hpp>
#include <string>
#include <vector>

namespace jaxbridge::native {

/// Memory of a library, as the loader mapped it.
struct segment {
  std::uintptr_t begin;
  std::uintptr_t end;
  bool readable;
  bool executable;
};

/// One function of a library on one platform, as the library describes it. The texts are copies.
struct function {
  std::string name;
  std::string doc;
  std::vector<std::string> signatures;  // one for each overload
  std::string parameters;
  std::vector<std::string> results;
  std::string vmap_method;
  jaxbridge::platform platform = jaxbridge::platform::cpu;
  std::uint32_t flags = 0;
  abi::xla_ffi::handler* execute = nullptr;
  abi::xla_ffi::handler* initialize = nullptr;    // may be null
  abi::native::shape_function* shapes = nullptr;  // may be null
  const std::atomic<std::uint64_t>* calls = nullptr;

  /// The functions are plain data, so that equal names on two platforms stay two entries.
  [[nodiscard]] std::uint64_t call_count() const noexcept {
    return calls->load(std::memory_order_relaxed);
  }
};

/// The functions that `descriptor` names, in the order of their definition. Whatever it points to
/// has to lie in `segments`: a library that says otherwise is an error here, and no crash.
[[nodiscard]] result<std::vector<function>> read_descriptor(const abi::native::library* descriptor,
                                                            const std::vector<segment>& segments);

/// Opens the file at `path`, runs its initializers, and reads its descriptor. It is never closed:
/// XLA keeps handlers for as long as the process lives.
[[nodiscard]] result<std::vector<function>> open_library(const std::string& path);

/// The type of an operand or a result.
struct array_type {
  jaxbridge::dtype dtype = jaxbridge::dtype::invalid;
  std::vector<std::int64_t> shape;
};

/// The types of all results, hidden ones last, as the function's shape function has them.
[[nodiscard]] result<std::vector<array_type>> infer_shapes(const function& f,
                                                           const std::vector<array_type>& operands,
                                                           attribute_set& attributes,
                                                           std::size_t result_count);

}  // namespace jaxbridge::native

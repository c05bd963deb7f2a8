// SPDX-License-Identifier: Apache-2.0
// NumPy arrays over buffers, made through NumPy's C API at a third of what its Python API takes.
#pragma once

#include <cstdint>
#include <span>

#include "python/py.hpp"

namespace jaxbridge::python {

/// A new array over the memory of `buffer`, a call_buffer on the CPU, which becomes its base;
/// writable if the buffer is. Throws nb::python_error, nb::value_error for a buffer whose call has
/// ended.
[[nodiscard]] nb::object as_array(nb::handle buffer);

/// Whether an array that as_array(buffer) made is as it was then, and this is the only reference to
/// it: then nobody can tell it from a new one. Never for a NumPy whose layout is not known.
[[nodiscard]] bool is_as_new(nb::handle array, nb::handle buffer) noexcept;

/// A new array over `data`, with `base` as its base. Strides are in bytes, none: row-major. Throws
/// nb::python_error, and TypeError where NumPy's C API is not one that we know.
[[nodiscard]] nb::object array_over(nb::handle base, nb::handle dtype,
                                    std::span<const std::int64_t> shape,
                                    std::span<const std::int64_t> strides, void* data,
                                    bool readonly);

/// The Python function as_array, by which a plan asks for such arrays.
[[nodiscard]] nb::handle as_array_function();

void bind_numpy_array(nb::module_& m);

}  // namespace jaxbridge::python

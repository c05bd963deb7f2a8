// SPDX-License-Identifier: Apache-2.0
// NumPy arrays over buffers, made through NumPy's C API at a third of what its Python API takes.
#pragma once

#include "python/py.hpp"

namespace jaxbridge::python {

/// A new array over the memory of `buffer`, a call_buffer on the CPU, which becomes its base;
/// writable if the buffer is. Throws nb::python_error, nb::value_error for a buffer whose call has
/// ended.
[[nodiscard]] nb::object as_array(nb::handle buffer);

/// The Python function that does the same, by which a plan asks for such arrays.
[[nodiscard]] nb::handle as_array_function();

void bind_numpy_array(nb::module_& m);

}  // namespace jaxbridge::python

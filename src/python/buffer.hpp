// SPDX-License-Identifier: Apache-2.0
// Python's view of one buffer of a call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "jaxbridge/buffer.hpp"
#include "jaxbridge/device.hpp"
#include "jaxbridge/stream.hpp"
#include "python/py.hpp"

namespace jaxbridge::python {

/// Element type and shape, with their Python objects. Made once for each plan and shared by the
/// buffers of its calls. Made and destroyed with the GIL held.
struct buffer_layout {
  jaxbridge::dtype dtype = jaxbridge::dtype::invalid;
  std::vector<std::int64_t> shape;
  nb::object numpy_dtype;
  nb::object shape_tuple;
  std::size_t size_bytes = 0;
  // For the buffer protocol: null where it has no text for the element type, else with the strides
  // of a row-major array.
  const char* format = nullptr;
  std::int64_t itemsize = 0;
  std::vector<std::int64_t> strides;
};

/// XLA's memory for the time of one call. Whatever a framework makes of it refers to this object,
/// so that its reference count tells whether a view is still alive when the call ends.
struct call_buffer {
  void* data = nullptr;
  std::shared_ptr<const buffer_layout> layout;
  jaxbridge::device device;
  stream_ref stream;
  bool readonly = true;
  /// The call has ended: the memory is XLA's again, and no protocol hands it out any more.
  bool revoked = false;
};

/// Sets the table from our dtype names to NumPy's dtype objects.
void set_dtypes(nb::dict by_name);
[[nodiscard]] nb::object numpy_dtype(jaxbridge::dtype type);
/// The element type of one of NumPy's dtype objects; `invalid` for another byte order, a structure,
/// or what JAX has no arrays of.
[[nodiscard]] jaxbridge::dtype dtype_of_numpy(nb::handle dtype);
/// PEP 3118's text for an element type; null where it has none: ml_dtypes' types.
[[nodiscard]] const char* buffer_format(jaxbridge::dtype type) noexcept;
[[nodiscard]] std::shared_ptr<const buffer_layout> make_layout(const any_buffer& b);

void bind_buffer(nb::module_& m);

}  // namespace jaxbridge::python

// SPDX-License-Identifier: Apache-2.0
// Memory that somebody owns, as a Python object that every library understands.
#pragma once

#include <cstdint>
#include <optional>

#include "core/memory/array.hpp"
#include "core/memory/dlpack_import.hpp"
#include "jaxbridge/stream.hpp"
#include "python/py.hpp"

namespace jaxbridge::python {

/// An array and what keeps it alive. Made and used with the GIL held; also destroyed with it: who
/// holds one from elsewhere holds a reference to its Python object.
struct view {
  memory::array array;
  /// The content is there once this stream is past what it has now. Nothing: nobody need wait.
  std::optional<stream_ref> stream;
  nb::object numpy_dtype;
  nb::object shape;
  /// What keeps the memory alive: a tensor, an object, both or nothing.
  memory::dlpack_tensor tensor;
  nb::object owner;
  /// Where a consumer works with the memory: the owners go when the device is past what this stream
  /// has at the view's end, and `consumer`, which keeps the stream, with them.
  std::optional<stream_ref> used_on;
  nb::object consumer;
  bool released = false;

  view() = default;
  view(view&&) = default;
  view& operator=(view&&) = default;
  view(const view&) = delete;
  view& operator=(const view&) = delete;
  ~view();

  /// Lets the owners go, now or after the consumer's last use.
  void let_go() noexcept;
};

/// In bytes, as a tuple.
[[nodiscard]] nb::object strides_of(const view& v);

/// Fills in what Python is shown of `v.array`, settles its strides, and makes the object.
[[nodiscard]] nb::object make_view(view v);

/// What a consumer by address is told after the view: pointer, nbytes, ordinal, shape, dtype, and
/// strides or None where it is compact.
template <class Function>
auto with_parts(const view& v, Function function) {
  const memory::array& a = v.array;
  return function(a.address(), a.size_bytes(), a.ordinal, v.shape, v.numpy_dtype,
                  is_compact(a.layout()) ? nb::none() : strides_of(v));
}

/// The view itself, with an error where it was released.
[[nodiscard]] const view& usable(const view& v);

/// Later work on `to` waits for the content of `v`. The host does not.
void order_after(const view& v, stream_ref to);

/// A stream as DLPack and the array interface write it: 1 is the legacy default stream. Throws
/// where it is 0, which they forbid.
[[nodiscard]] stream_ref stream_from(long long handle, const char* where);
[[nodiscard]] std::uintptr_t stream_to(stream_ref stream);

/// An address or a handle as Python writes it, NumPy's integers too; errors begin with `what`.
[[nodiscard]] std::uintptr_t as_address(nb::handle number, const char* what);

/// The handle of a thread's own default stream is another stream in another thread. The legacy one
/// waits for all of these.
[[nodiscard]] stream_ref of_any_thread(stream_ref stream);

/// What a tensor says of its array; throws where JAX has no such arrays.
[[nodiscard]] memory::array described(const memory::dlpack_tensor& tensor);

void bind_view(nb::module_& m);
void bind_exporter(nb::module_& m);
void bind_view_sources(nb::module_& m);

}  // namespace jaxbridge::python

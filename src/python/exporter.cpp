// SPDX-License-Identifier: Apache-2.0
// How arrays of JAX become a library's: a function made once for all of one kind.
#include <optional>
#include <stdexcept>
#include <utility>

#include "core/cuda/context.hpp"
#include "core/cuda/export_stream.hpp"
#include "core/cuda/stream_order.hpp"
#include "python/capsule.hpp"
#include "python/view.hpp"

namespace jaxbridge::python {
namespace {

using memory::memory_kind;

// The stream of a consumer, and what keeps it.
struct consumer {
  stream_ref stream;
  nb::object keep;
};

// (handle, what keeps it), or a function of the ordinal that returns that, or the stream as an
// object with the handle as `ptr`; None: no consumer.
std::optional<consumer> consumer_of(nb::handle given, int ordinal) {
  if (given.is_none()) return std::nullopt;
  const auto at = [](nb::handle handle) {
    return stream_ref(reinterpret_cast<void*>(as_address(handle, "stream")));
  };
  nb::object found = nb::isinstance<nb::tuple>(given) ? nb::borrow(given) : given(ordinal);
  if (!nb::isinstance<nb::tuple>(found)) {
    static PyObject* const handle_of = PyUnicode_InternFromString("ptr");
    const stream_ref stream = at(found.attr(nb::handle(handle_of)));
    return consumer{stream, std::move(found)};
  }
  if (nb::len(found) != 2) throw nb::type_error("expected a stream's handle and what keeps it");
  return consumer{at(found[0]), found[1]};
}

// Where an array of JAX is made ready: on the consumer's stream, or on one of ours. Nothing: the
// host is to wait, since a captured stream cannot wait for what is outside of its graph. Called
// with the device's context current.
result<std::optional<stream_ref>> ready_stream(int ordinal, std::optional<stream_ref> wanted) {
  if (!wanted) {
    const result<stream_ref> ours = [ordinal] {
      const nb::gil_scoped_release no_gil;  // the first one is made
      return cuda::export_stream(ordinal);
    }();
    if (!ours.ok()) return ours.error();
    wanted = ours.value();
  }
  if (cuda::is_capturing(*wanted)) return std::optional<stream_ref>();
  return wanted;
}

// How arrays of JAX of one kind, on one device, become a library's.
struct way_out {
  nb::object exporter;         // jaxlib's: (array on one device, *, stream) -> capsule
  nb::object data_of;          // of an array on one device; None: its addressable_data(0)
  std::optional<int> ordinal;  // of a CUDA device
  nb::object stream;           // see consumer_of()
  nb::object make;             // of a view; None: the view is it
  bool by_parts = false;       // `make` gets with_parts() after it
  bool readonly = true;
};

// The array to export: its data on its device. Not it itself: deleted while the capsule lives, it
// would end the process (jaxlib 0.8 to 0.12).
nb::object data_of(const way_out& way, nb::handle array) {
  static PyObject* const is_deleted = PyUnicode_InternFromString("is_deleted");
  static PyObject* const addressable_data = PyUnicode_InternFromString("addressable_data");
  static PyObject* const zero = PyLong_FromLong(0);
  PyObject* const given[] = {array.ptr(), zero};
  nb::object data;
  if (!way.data_of.is_none()) {
    // Older releases return that of an array that was deleted, too.
    const nb::object deleted = nb::steal(PyObject_VectorcallMethod(is_deleted, given, 1, nullptr));
    if (!deleted.is_valid()) throw nb::python_error();
    if (!deleted.is(Py_True)) {
      data = nb::steal(PyObject_Vectorcall(way.data_of.ptr(), given, 1, nullptr));
      if (!data.is_valid()) throw nb::python_error();
      return data;
    }
  }
  data = nb::steal(PyObject_VectorcallMethod(addressable_data, given, 2, nullptr));
  if (!data.is_valid()) throw nb::python_error();
  return data;
}

nb::object exported(const way_out& way, nb::handle array, nb::handle stream) {
  static PyObject* const keywords = Py_BuildValue("(s)", "stream");
  const nb::object data = data_of(way, array);
  PyObject* const given[] = {data.ptr(), stream.ptr()};
  const nb::object capsule = nb::steal(PyObject_Vectorcall(way.exporter.ptr(), given, 1, keywords));
  if (!capsule.is_valid()) throw nb::python_error();
  return capsule;
}

nb::object export_array(const way_out& way, nb::object array) {
  // The exporter, and the consumer's library, may make another device current: the last to end.
  std::optional<cuda::context_scope> on_device;
  std::optional<consumer> used_by;
  view v;
  if (way.ordinal) {
    // With the GIL: JAX has the context already, and no question of these waits for the device.
    result<cuda::context_scope> entered = cuda::context_scope::enter(*way.ordinal);
    if (!entered.ok()) throw std::runtime_error(entered.error().message());
    on_device.emplace(std::move(entered).value());
    used_by = consumer_of(way.stream, *way.ordinal);
    const result<std::optional<stream_ref>> ready =
        ready_stream(*way.ordinal, used_by ? std::optional(used_by->stream) : std::nullopt);
    if (!ready.ok()) throw std::runtime_error(ready.error().message());
    v.stream = ready.value();
  }
  const nb::object waiting = v.stream ? nb::object(nb::int_(stream_to(*v.stream))) : nb::none();
  if (v.stream) v.stream = of_any_thread(*v.stream);
  const nb::object capsule = exported(way, array, waiting);
  v.tensor = take_tensor(capsule);
  // JAX's has nothing left to do, and would raise an error to find that out.
  static_cast<void>(PyCapsule_SetDestructor(capsule.ptr(), nullptr));
  v.array = described(v.tensor);
  // Page-locked memory is ordinary memory of the host, and not all libraries know the difference.
  if (!way.ordinal && !way.make.is_none() && v.array.kind == memory_kind::pinned) {
    v.array.kind = memory_kind::host;
  }
  v.array.readonly = way.readonly;
  v.owner = std::move(array);
  const nb::object out = make_view(std::move(v));
  view& made = *nb::inst_ptr<view>(out);
  // Only here: a view that was moved from still says where it was used.
  if (used_by) {
    made.used_on = of_any_thread(used_by->stream);
    made.consumer = std::move(used_by->keep);
  }
  if (way.make.is_none()) return out;
  if (!way.by_parts) return way.make(out);
  return with_parts(made, [&](const auto&... parts) { return way.make(out, parts...); });
}

}  // namespace

void bind_exporter(nb::module_& m) {
  m.def(
      "exporter",
      [](nb::object exporter, nb::object data_of, std::optional<int> ordinal, nb::object stream,
         nb::object make, bool by_parts, bool readonly) {
        way_out way;
        way.exporter = std::move(exporter);
        way.data_of = std::move(data_of);
        way.ordinal = ordinal;
        way.stream = std::move(stream);
        way.make = std::move(make);
        way.by_parts = by_parts;
        way.readonly = readonly;
        return nb::cpp_function([way = std::move(way)](nb::object array) {
          return export_array(way, std::move(array));
        });
      },
      nb::arg("exporter"), nb::kw_only(), nb::arg("data_of") = nb::none(),
      nb::arg("ordinal") = nb::none(), nb::arg("stream") = nb::none(), nb::arg("make") = nb::none(),
      nb::arg("by_parts") = false, nb::arg("readonly") = true,
      nb::sig("def exporter(exporter: collections.abc.Callable[..., typing.Any], *, data_of: "
              "collections.abc.Callable[[typing.Any], typing.Any] | None = None, ordinal: int | "
              "None = None, stream: tuple[int, object] | collections.abc.Callable[[int], "
              "tuple[int, object]] | None = None, make: "
              "collections.abc.Callable[..., typing.Any] | None = None, by_parts: bool = False, "
              "readonly: bool = True) -> collections.abc.Callable[[typing.Any], typing.Any]"),
      "A function that makes a view of an array of JAX, or what `make` makes of that.\n\n"
      "`exporter(array, stream=)` returns a DLPack capsule of an array on one device, ready on a "
      "stream by DLPack's number, or (None) at once. `data_of`: returns the `addressable_data(0)` "
      "of an array that is not deleted. `ordinal`: of the CUDA device that has the "
      "arrays; it is current meanwhile, and what was so before at the end. `stream`: the "
      "consumer's, a CUstream and what keeps it, or what returns that for the ordinal, or an "
      "object with the CUstream as `ptr`; the memory is JAX's again when it is past what it has at "
      "the view's end. None: no consumer is known, and the view is ready on a stream of ours. "
      "`by_parts`: `make` gets the view's `parts` after it.");
}

}  // namespace jaxbridge::python

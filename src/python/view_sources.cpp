// SPDX-License-Identifier: Apache-2.0
// What views are made of, and how JAX gets the memory of one.
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

#include "core/cuda/pointer.hpp"
#include "core/exit.hpp"
#include "core/memory/array_interface.hpp"
#include "core/memory/dlpack_export.hpp"
#include "core/memory/last_use.hpp"
#include "core/memory/live_imports.hpp"
#include "python/buffer.hpp"
#include "python/capsule.hpp"
#include "python/gil.hpp"
#include "python/view.hpp"

namespace jaxbridge::python {
namespace {

using memory::memory_kind;

[[noreturn]] void raise(const status& s) {
  if (s.code() == status_code::unimplemented) throw nb::buffer_error(s.message().c_str());
  throw nb::value_error(s.message().c_str());
}

[[noreturn]] void no_such_dtype(nb::handle dtype) {
  const std::string text = nb::cast<std::string>(nb::str(dtype));
  const nb::object native = dtype.attr("newbyteorder")("=");
  if (dtype_of_numpy(native) != jaxbridge::dtype::invalid) {
    throw nb::type_error(("dtype " + text +
                          " has the bytes of a number in another order than this machine; convert "
                          "it first, with x.astype(x.dtype.newbyteorder(\"=\"))")
                             .c_str());
  }
  throw nb::type_error(("JAX has no arrays of dtype " + text +
                        "; convert it first, with x.astype(...) to a dtype that JAX has")
                           .c_str());
}

std::int64_t as_int(nb::handle number, const char* what) {
  // NumPy's integers too.
  PyObject* const index = PyNumber_Index(number.ptr());
  if (index == nullptr) {
    PyErr_Clear();
    throw nb::type_error((std::string(what) + ": expected a whole number").c_str());
  }
  const nb::object owned = nb::steal(index);
  const std::int64_t out = PyLong_AsLongLong(index);
  if (out == -1 && PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    throw nb::value_error((std::string(what) + ": the number does not fit 64 bits").c_str());
  }
  return out;
}

std::vector<std::int64_t> as_ints(nb::handle numbers, const char* what) {
  std::vector<std::int64_t> out;
  for (const nb::handle n : nb::iter(numbers)) out.push_back(as_int(n, what));
  return out;
}

// A field of an array interface; None where it is missing.
nb::object field(const nb::dict& fields, const char* name) {
  PyObject* const found = PyDict_GetItemString(fields.ptr(), name);
  return found == nullptr ? nb::none() : nb::borrow(found);
}

// NumPy writes one nameless field for a plain dtype.
bool is_structured(const nb::object& descr) {
  if (descr.is_none() || !nb::isinstance<nb::list>(descr)) return false;
  if (nb::len(descr) != 1) return true;
  const nb::object first = descr[0];
  return !nb::isinstance<nb::tuple>(first) || nb::len(first) != 2 || !first[0].equal(nb::str(""));
}

// The protocol says no device, and labels may be wrong: the driver knows who owns an address.
void place_on_device(memory::array& a) {
  if (is_empty(a.shape)) return;
  result<cuda::pointer_info> found = [&a] {
    const nb::gil_scoped_release no_gil;
    return cuda::inspect(a.data);
  }();
  if (!found.ok()) throw std::runtime_error(found.error().message());
  switch (found.value().where) {
    case cuda::pointer_info::place::unknown:
      throw nb::value_error(
          ("the address " + std::to_string(a.address()) +
           " is said to be on CUDA, but the driver knows no such memory: it is ordinary memory of "
           "the host, or was freed; give host memory to from_external as a NumPy array")
              .c_str());
    case cuda::pointer_info::place::managed:
      a.kind = memory_kind::managed;
      break;
    case cuda::pointer_info::place::device:
    case cuda::pointer_info::place::host:  // mapped: a device reaches it by this address
      a.kind = memory_kind::device;
      break;
  }
  a.ordinal = found.value().ordinal;
  if (found.value().is_foreign) {
    throw nb::buffer_error(
        ("the memory at " + std::to_string(a.address()) +
         " belongs to a CUDA context that is not the primary one of its device; JAX works in that "
         "one, and does not reach it: allocate in the primary context (PyCUDA: "
         "pycuda.autoprimaryctx), or copy it over the host")
            .c_str());
  }
}

nb::object view_of_interface(const nb::dict& fields, nb::object owner, nb::handle dtype,
                             bool on_cuda) {
  memory::array_interface in;
  const nb::object data = field(fields, "data");
  if (!nb::isinstance<nb::tuple>(data) || nb::len(data) != 2) {
    throw nb::type_error("array interface: expected data to be (address, read-only)");
  }
  in.address = as_address(data[0], "array interface: data");
  const int readonly = PyObject_IsTrue(nb::object(data[1]).ptr());
  if (readonly < 0) throw nb::python_error();
  in.readonly = readonly == 1;
  const nb::object shape = field(fields, "shape");
  if (!nb::isinstance<nb::tuple>(shape)) {
    throw nb::type_error("array interface: expected shape to be a tuple");
  }
  const std::vector<std::int64_t> extents = as_ints(shape, "array interface: shape");
  in.shape = extents;
  std::vector<std::int64_t> steps;
  if (const nb::object strides = field(fields, "strides"); !strides.is_none()) {
    steps = as_ints(strides, "array interface: strides");
    in.strides = steps;
  }
  if (const nb::object offset = field(fields, "offset"); !offset.is_none()) {
    in.offset = as_int(offset, "array interface: offset");
  }
  in.has_mask = !field(fields, "mask").is_none();
  view v;
  if (dtype.is_none()) {
    in.is_structured = is_structured(field(fields, "descr"));
    const nb::object text = field(fields, "typestr");
    if (!nb::isinstance<nb::str>(text)) {
      throw nb::type_error("array interface: expected typestr to be a string");
    }
    Py_ssize_t length = 0;
    const char* const utf8 = PyUnicode_AsUTF8AndSize(text.ptr(), &length);
    if (utf8 == nullptr) {
      PyErr_Clear();
      throw nb::value_error("array interface: typestr is no text that UTF-8 has");
    }
    const std::string typestr(utf8, static_cast<std::size_t>(length));
    in.typestr = typestr;
    result<memory::array> got =
        memory::describe(in, on_cuda ? memory_kind::device : memory_kind::host, 0);
    if (!got.ok()) raise(got.error());
    v.array = std::move(got).value();
  } else {
    // It says more than the text, where ml_dtypes' types are raw bytes.
    v.array.dtype = dtype_of_numpy(dtype);
    if (v.array.dtype == jaxbridge::dtype::invalid) no_such_dtype(dtype);
    v.array.shape = extents;
    if (in.strides) {
      v.array.strides = steps;
    } else if (!memory::set_compact(v.array)) {
      throw nb::value_error("the array has more bytes than an address can count");
    }
    v.array.data = reinterpret_cast<void*>(in.address);
    v.array.readonly = in.readonly;
    v.array.kind = on_cuda ? memory_kind::device : memory_kind::host;
    if (const status s = memory::check(v.array); !s.ok()) raise(s);
  }
  if (on_cuda) {
    place_on_device(v.array);
    // No stream says that nothing is pending, and not all who say so are right: work on the default
    // stream is waited for, which costs an event.
    const nb::object stream = field(fields, "stream");
    v.stream = stream.is_none()
                   ? stream_ref::legacy_default()
                   : of_any_thread(stream_from(as_int(stream, "array interface: stream"),
                                               "the CUDA array interface"));
  }
  v.owner = std::move(owner);
  return make_view(std::move(v));
}

nb::object view_of_memory(nb::handle pointer, nb::handle shape, nb::handle dtype,
                          std::string_view platform, int ordinal, nb::handle strides,
                          nb::handle stream, bool readonly, nb::object owner) {
  view v;
  v.array.dtype = dtype_of_numpy(dtype);
  if (v.array.dtype == jaxbridge::dtype::invalid) no_such_dtype(dtype);
  v.array.data = reinterpret_cast<void*>(as_address(pointer, "pointer"));
  v.array.shape = as_ints(shape, "shape");
  v.array.readonly = readonly;
  if (strides.is_none()) {
    if (!memory::set_compact(v.array)) v.array.strides.assign(v.array.shape.size(), 0);
  } else {
    v.array.strides = as_ints(strides, "strides");
  }
  v.array.kind = platform == "cuda"     ? memory_kind::device
                 : platform == "pinned" ? memory_kind::pinned
                                        : memory_kind::host;
  if (const status s = memory::check(v.array); !s.ok()) raise(s);
  if (platform == "cuda") {
    v.array.ordinal = ordinal;
    place_on_device(v.array);
    if (ordinal != v.array.ordinal && !is_empty(v.array.shape)) {
      throw nb::value_error(("the memory is on CUDA device " + std::to_string(v.array.ordinal) +
                             ", not on device " + std::to_string(ordinal))
                                .c_str());
    }
    if (!stream.is_none()) {
      v.stream = of_any_thread(stream_ref(reinterpret_cast<void*>(as_address(stream, "stream"))));
    }
  }
  v.owner = std::move(owner);
  return make_view(std::move(v));
}

nb::object view_of_capsule(nb::handle capsule, nb::handle stream, nb::handle readonly,
                           nb::object owner) {
  view v;
  v.tensor = take_tensor(capsule);
  v.array = described(v.tensor);
  if (memory::is_on_device(v.array.kind)) {
    if (!is_empty(v.array.shape)) place_on_device(v.array);
    if (!stream.is_none()) {
      v.stream = of_any_thread(stream_ref(reinterpret_cast<void*>(as_address(stream, "stream"))));
    }
  }
  if (!readonly.is_none()) v.array.readonly = nb::cast<bool>(readonly);
  v.owner = std::move(owner);
  return make_view(std::move(v));
}

// ---- to JAX
// --------------------------------------------------------------------------------------

// One import of a view by JAX, until the device is past JAX's last use.
struct import {
  PyObject* object;  // owned: what keeps the view
  std::uintptr_t address;
  std::optional<stream_ref> used_on;
  int ordinal;
};

void end_import(void* ended) noexcept {
  const python_use use;
  if (!use.granted()) return;
  auto* const i = static_cast<import*>(ended);
  // First: who sees that the owner has gone finds no import either.
  memory::remove_import(i->address);
  const thread_gil gil;
  Py_DECREF(i->object);
  delete i;
}

// JAX calls it as soon as no array of its refers to the memory: the device may still be at it.
void release_import(void* owner) noexcept {
  auto* const i = static_cast<import*>(owner);
  if (i->used_on) {
    memory::release_after_last_use(*i->used_on, i->ordinal, i, &end_import);
  } else {
    end_import(i);
  }
}

nb::object hand_over(nb::handle_t<view> self, nb::handle used_on, nb::handle kept, bool as_device) {
  const view& v = usable(nb::cast<view&>(self));
  memory::array a = v.array;
  // JAX knows no managed memory: a device reaches it as its own. Pinned memory is ordinary memory
  // where no device has it.
  if (a.kind == memory_kind::managed) a.kind = memory_kind::device;
  if (a.kind == memory_kind::pinned && used_on.is_none()) a.kind = memory_kind::host;
  if (a.kind == memory_kind::pinned && as_device) a.kind = memory_kind::device;
  memory::dlpack_source source;
  source.data = a.data;
  source.dtype = a.dtype;
  source.shape = a.shape;
  source.strides = a.strides;
  source.device = memory::dlpack_device(a.kind, a.ordinal);
  auto* const i = new import{Py_NewRef(kept.ptr()), a.address(), std::nullopt, a.ordinal};
  if (!used_on.is_none()) {
    i->used_on = stream_ref(reinterpret_cast<void*>(as_address(used_on, "stream")));
  }
  source.owner = i;
  source.release = &release_import;
  memory::add_import(i->address);
  return make_capsule(source, false);
}

}  // namespace

std::uintptr_t as_address(nb::handle number, const char* what) {
  PyObject* const index = PyNumber_Index(number.ptr());
  if (index == nullptr) {
    PyErr_Clear();
    throw nb::type_error((std::string(what) + ": expected an address").c_str());
  }
  const nb::object owned = nb::steal(index);
  const unsigned long long out = PyLong_AsUnsignedLongLong(index);
  if (out == std::numeric_limits<unsigned long long>::max() && PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    throw nb::value_error((std::string(what) + ": the number is no address").c_str());
  }
  return out;
}

stream_ref of_any_thread(stream_ref stream) {
  return stream.address() == 2 ? stream_ref::legacy_default() : stream;
}

memory::array described(const memory::dlpack_tensor& tensor) {
  result<memory::array> got = tensor.describe();
  if (!got.ok()) raise(got.error());
  return std::move(got).value();
}

void bind_view_sources(nb::module_& m) {
  m.def("view_of_memory", &view_of_memory, nb::arg("pointer"), nb::arg("shape"), nb::arg("dtype"),
        nb::arg("platform"), nb::arg("ordinal"), nb::arg("strides").none(),
        nb::arg("stream").none(), nb::arg("readonly"), nb::arg("owner").none(),
        nb::sig("def view_of_memory(pointer: int, shape: tuple[int, ...], dtype: "
                "numpy.dtype[typing.Any], platform: str, ordinal: int, strides: tuple[int, ...] | "
                "None, stream: int | None, readonly: bool, owner: object) -> View"),
        "`platform`: \"cpu\", \"cuda\", or \"pinned\".");
  m.def("view_of_interface", &view_of_interface, nb::arg("fields"), nb::arg("owner").none(),
        nb::arg("dtype").none(), nb::arg("on_cuda"),
        nb::sig("def view_of_interface(fields: dict[str, typing.Any], owner: object, dtype: "
                "numpy.dtype[typing.Any] | None, on_cuda: bool) -> View"),
        "Of an array interface's dictionary; a dtype goes before its typestr.");
  m.def("view_of_capsule", &view_of_capsule, nb::arg("capsule").none(), nb::arg("stream").none(),
        nb::arg("readonly").none(), nb::arg("owner").none(),
        nb::sig("def view_of_capsule(capsule: typing.Any, stream: int | None, readonly: bool | "
                "None, owner: object) -> View"),
        "Of a DLPack capsule, which it consumes. `stream`: where the content is ready. The driver "
        "is asked who owns the memory.");
  m.def("hand_over", &hand_over, nb::arg("view"), nb::arg("used_on").none(), nb::arg("kept"),
        nb::arg("as_device"),
        nb::sig("def hand_over(view: View, used_on: int | None, kept: object, as_device: bool) -> "
                "typing.Any"),
        "A DLPack capsule for JAX, dense views only. The view ends when the device is past what "
        "`used_on` has when JAX lets go. `as_device`: pinned memory as that of a device.");
  m.def("live_imports", &memory::live_imports, nb::arg("pointer"),
        "How many arrays of JAX, or uses by the device, still keep the memory at an address.");
  m.def(
      "release_unused", [] { return memory::release_unused(); },
      "Releases owners that the device has finished with; how many are left.");
}

}  // namespace jaxbridge::python

// SPDX-License-Identifier: Apache-2.0
#include "python/view.hpp"

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "core/cuda/context.hpp"
#include "core/cuda/device_memory.hpp"
#include "core/cuda/stream_order.hpp"
#include "core/exit.hpp"
#include "core/memory/array_interface.hpp"
#include "core/memory/dlpack_export.hpp"
#include "core/memory/last_use.hpp"
#include "jaxbridge/abi/dlpack.hpp"
#include "python/buffer.hpp"
#include "python/capsule.hpp"
#include "python/gil.hpp"
#include "python/numpy_array.hpp"

namespace jaxbridge::python {
namespace {

namespace dlpack = abi::dlpack;
using memory::memory_kind;

// What a view leaves behind until the device is past its consumer's last use.
struct owners {
  memory::dlpack_tensor tensor;
  nb::object owner;
  nb::object consumer;
};

void drop_owners(void* kept) noexcept {
  const python_use use;
  if (!use.granted()) return;
  const thread_gil gil;
  delete static_cast<owners*>(kept);
}

// Makes a view of a copy, for consumers that ask for one: copier(view, stream, dl_device).
nb::object& copier() {
  static nb::object& kept = *new nb::object;
  return kept;
}

bool as_bool(nb::handle value, const char* what) {
  const int truth = PyObject_IsTrue(value.ptr());
  const bool is_one = PyBool_Check(value.ptr()) ||
                      nb::isinstance(value, nb::module_::import_("numpy").attr("bool_"));
  if (truth < 0 || !is_one) {
    PyErr_Clear();
    throw nb::type_error((std::string(what) + ": expected None, True or False").c_str());
  }
  return truth == 1;
}

long long as_handle(nb::handle stream) {
  PyObject* const index = PyNumber_Index(stream.ptr());
  if (index == nullptr) {
    PyErr_Clear();
    throw nb::type_error("DLPack: stream: expected None or an integer");
  }
  const nb::object owned = nb::steal(index);
  const long long out = PyLong_AsLongLong(index);
  if (out == -1 && PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    throw nb::value_error("DLPack: stream: the number is no handle");
  }
  return out;
}

dlpack::device device_of(const view& v) {
  return memory::dlpack_device(v.array.kind, v.array.ordinal);
}

bool on_device(const view& v) { return memory::is_on_device(v.array.kind); }

nb::object tuple_of(std::span<const std::int64_t> numbers) {
  const nb::object out = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(numbers.size())));
  if (!out.is_valid()) throw nb::python_error();
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    PyObject* const number = PyLong_FromLongLong(numbers[i]);
    if (number == nullptr) throw nb::python_error();
    PyTuple_SetItem(out.ptr(), static_cast<Py_ssize_t>(i), number);  // which takes the number
  }
  return out;
}

nb::dict interface_of(const view& v) {
  const std::string_view typestr = memory::typestr_of(v.array.dtype);
  if (typestr.empty()) {
    // Raw bytes ("V2") would be another array; consumers ask for DLPack next.
    PyErr_SetString(PyExc_AttributeError,
                    "an array interface has no text for this dtype; use DLPack");
    throw nb::python_error();
  }
  nb::dict out;
  out["shape"] = v.shape;
  out["typestr"] = nb::str(typestr.data(), typestr.size());
  const std::uintptr_t address = is_empty(v.array.shape) ? 0 : v.array.address();
  out["data"] = nb::make_tuple(address, v.array.readonly);
  out["version"] = 3;
  out["strides"] = is_compact(v.array.layout()) ? nb::none() : strides_of(v);
  return out;
}

nb::object numpy_view(nb::handle_t<view> self) {
  const view& v = usable(nb::cast<view&>(self));
  if (v.array.kind == memory_kind::device) {
    throw nb::type_error(
        "this memory is on CUDA: the host cannot read it; use to_external(array, \"numpy\") for a "
        "copy on the host");
  }
  return array_over(self, v.numpy_dtype, v.array.shape, v.array.strides, v.array.data,
                    v.array.readonly);
}

[[noreturn]] void no_attribute(const char* why) {
  PyErr_SetString(PyExc_AttributeError, why);
  throw nb::python_error();
}

nb::dict cpu_interface(const view& v) {
  if (usable(v).array.kind == memory_kind::device) {
    no_attribute("__array_interface__: this memory is on CUDA");
  }
  return interface_of(v);
}

nb::dict cuda_interface(const view& v) {
  if (!on_device(usable(v))) {
    no_attribute("__cuda_array_interface__: this memory is on the CPU");
  }
  nb::dict out = interface_of(v);
  out["stream"] = v.stream ? nb::object(nb::int_(stream_to(*v.stream))) : nb::none();
  return out;
}

nb::object to_numpy(nb::handle_t<view> self, nb::object dtype, nb::object copy) {
  const nb::object array = numpy_view(self);
  return nb::module_::import_("numpy").attr("array")(array, dtype, nb::arg("copy") = copy);
}

nb::object export_copy(nb::handle self, nb::object stream, nb::object dl_device) {
  if (!copier().is_valid()) throw nb::buffer_error("this view cannot copy");
  return copier()(self, stream, dl_device);
}

nb::object to_dlpack(nb::handle_t<view> self, nb::object stream,
                     const std::optional<std::pair<int, int>>& max_version, nb::object dl_device,
                     nb::object copy) {
  const view* v = &usable(nb::cast<view&>(self));
  const dlpack::device here = device_of(*v);
  nb::object copied;  // keeps `v` where it is one
  const bool is_asked = !copy.is_none() && as_bool(copy, "copy");
  if (is_asked || (!dl_device.is_none() &&
                   !dl_device.equal(nb::make_tuple(static_cast<int>(here.type), here.id)))) {
    if (!copy.is_none() && !is_asked) {
      throw nb::buffer_error("copy=False, but the memory is on another device than dl_device asks");
    }
    copied = export_copy(self, stream, dl_device);
    v = &nb::cast<view&>(copied);
  } else if (on_device(*v)) {
    // No stream is the legacy default one, by DLPack; -1: the consumer knows the order.
    const long long asked = stream.is_none() ? 1 : as_handle(stream);
    if (asked != -1) order_after(*v, stream_from(asked, "DLPack"));
  }
  memory::dlpack_source source;
  source.data = v->array.data;
  source.dtype = v->array.dtype;
  source.shape = v->array.shape;
  source.strides = v->array.strides;
  source.device = device_of(*v);
  source.readonly = v->array.readonly;
  source.is_copied = copied.is_valid();
  source.owner = Py_NewRef(copied.is_valid() ? copied.ptr() : self.ptr());
  source.release = &release_reference;
  return make_capsule(source, max_version && max_version->first >= 1);
}

bool is_column_major(const memory::array& a) {
  if (is_empty(a.shape)) return true;
  std::int64_t step = a.item_size();
  for (std::size_t axis = 0; axis < a.shape.size(); ++axis) {
    if (a.shape[axis] != 1 && a.strides[axis] != step) return false;
    step *= a.shape[axis];
  }
  return true;
}

// PEP 3118. Who asks for a shape gets the array, who does not gets the bytes of a dense one.
int get_buffer(PyObject* self, Py_buffer* out, int flags) noexcept {
  const auto refuse = [out](const char* why) {
    PyErr_SetString(PyExc_BufferError, why);
    out->obj = nullptr;
    return -1;
  };
  // View.__new__ makes an object without content.
  if (!nb::inst_ready(nb::handle(self))) return refuse("this view has no content");
  const view* v = nb::inst_ptr<view>(nb::handle(self));
  if (v->released) return refuse("this view was released");
  if (v->array.kind == memory_kind::device) {
    return refuse("this memory is on CUDA: the host cannot read it");
  }
  const auto asks = [flags](int what) { return (flags & what) == what; };
  const bool compact = classify(v->array.layout()) == layout_kind::compact;
  const bool columns = is_column_major(v->array);
  // Without strides, row-major is meant.
  if (!compact && (!asks(PyBUF_STRIDES) || asks(PyBUF_C_CONTIGUOUS))) {
    return refuse("this memory is not dense and row-major");
  }
  if (!columns && asks(PyBUF_F_CONTIGUOUS)) return refuse("this memory is not column-major");
  if (!compact && !columns && asks(PyBUF_ANY_CONTIGUOUS)) return refuse("this memory is not dense");
  static char nothing = 0;
  void* const data = v->array.data == nullptr ? &nothing : v->array.data;
  if (PyBuffer_FillInfo(out, self, data, static_cast<Py_ssize_t>(v->array.size_bytes()),
                        v->array.readonly ? 1 : 0, flags & ~PyBUF_FORMAT) != 0) {
    return -1;
  }
  if (!asks(PyBUF_ND)) return 0;
  const char* const format = asks(PyBUF_FORMAT) ? buffer_format(v->array.dtype) : nullptr;
  if (asks(PyBUF_FORMAT) && format == nullptr) {
    Py_CLEAR(out->obj);
    return refuse("the buffer protocol has no text for this dtype; use numpy.asarray");
  }
  // These live as long as the object, which the buffer keeps.
  out->format = const_cast<char*>(format);
  out->itemsize = static_cast<Py_ssize_t>(v->array.item_size());
  out->ndim = static_cast<int>(v->array.shape.size());
  out->shape = const_cast<Py_ssize_t*>(v->array.shape.data());
  out->strides = asks(PyBUF_STRIDES) ? const_cast<Py_ssize_t*>(v->array.strides.data()) : nullptr;
  return 0;
}

// An owner often holds its view: the collector has to see that. A view without content has nothing.
int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (!nb::inst_ready(nb::handle(self))) return 0;
  const view* v = nb::inst_ptr<view>(nb::handle(self));
  Py_VISIT(v->owner.ptr());
  Py_VISIT(v->consumer.ptr());
  return 0;
}

int clear(PyObject* self) {
  if (nb::inst_ready(nb::handle(self))) nb::inst_ptr<view>(nb::handle(self))->let_go();
  return 0;
}

PyType_Slot view_slots[] = {
    {Py_bf_getbuffer, reinterpret_cast<void*>(&get_buffer)},
    {Py_tp_traverse, reinterpret_cast<void*>(&traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(&clear)},
    {0, nullptr},
};

}  // namespace

view::~view() { let_go(); }

void view::let_go() noexcept {
  released = true;
  const std::optional<stream_ref> last = std::exchange(used_on, std::nullopt);
  memory::dlpack_tensor freed_tensor = std::move(tensor);
  nb::object freed_owner = std::move(owner);
  nb::object freed_consumer = std::move(consumer);
  if (!last) return;
  auto* const kept =
      new owners{std::move(freed_tensor), std::move(freed_owner), std::move(freed_consumer)};
  memory::release_after_last_use(*last, array.ordinal, kept, &drop_owners);
}

nb::object strides_of(const view& v) { return tuple_of(v.array.strides); }

nb::object make_view(view v) {
  v.numpy_dtype = numpy_dtype(v.array.dtype);
  v.shape = tuple_of(v.array.shape);
  memory::settle_strides(v.array);
  return nb::cast(std::move(v));
}

const view& usable(const view& v) {
  if (v.released) {
    throw nb::value_error(
        "this view was released: its memory may be gone; make a new one of the array");
  }
  return v;
}

void order_after(const view& v, stream_ref to) {
  if (!v.stream || *v.stream == to) return;
  const stream_ref from = *v.stream;
  const int ordinal = v.array.ordinal;
  status s;
  {
    const nb::gil_scoped_release no_gil;
    const result<cuda::context_scope> scope = cuda::context_scope::enter(ordinal);
    if (!scope.ok()) {
      s = scope.error();
    } else {
      // A captured stream cannot wait for what is outside of its graph; the host can.
      s = cuda::is_capturing(to) ? cuda::synchronize(from) : cuda::order(from, to);
    }
  }
  if (!s.ok()) throw std::runtime_error(s.message());
}

stream_ref stream_from(long long handle, const char* where) {
  if (handle == 0) {
    throw nb::value_error((std::string("stream 0 is not allowed by ") + where +
                           ": it does not say which default stream is meant; use 1 for the legacy "
                           "one, 2 for that of the thread")
                              .c_str());
  }
  if (handle < 0) {
    throw nb::value_error(
        (std::string(where) + ": expected a stream's handle, 1 or 2, got " + std::to_string(handle))
            .c_str());
  }
  return stream_ref(reinterpret_cast<void*>(static_cast<std::uintptr_t>(handle == 1 ? 0 : handle)));
}

std::uintptr_t stream_to(stream_ref stream) {
  return stream.address() == 0 ? std::uintptr_t{1} : stream.address();
}

void bind_view(nb::module_& m) {
  nb::class_<view>(m, "View", nb::is_final(), nb::type_slots(view_slots),
                   nb::is_weak_referenceable(),
                   "An array in memory that somebody owns, with every protocol by which libraries "
                   "hand arrays to one another. It keeps the memory alive.")
      .def_prop_ro(
          "pointer", [](const view& v) { return usable(v).array.address(); },
          "Address of the first element; may be 0 where there are no elements.")
      .def_prop_ro(
          "shape", [](const view& v) { return v.shape; },
          nb::sig("def shape(self) -> tuple[int, ...]"))
      .def_prop_ro("strides", &strides_of, nb::sig("def strides(self) -> tuple[int, ...]"),
                   "In bytes.")
      .def_prop_ro(
          "dtype", [](const view& v) { return v.numpy_dtype; },
          nb::sig("def dtype(self) -> numpy.dtype[typing.Any]"), "NumPy's or ml_dtypes' dtype.")
      .def_prop_ro("ndim", [](const view& v) { return v.array.shape.size(); })
      .def_prop_ro(
          "nbytes", [](const view& v) { return v.array.size_bytes(); },
          "Of the elements, without gaps between them.")
      .def_prop_ro(
          "platform", [](const view& v) { return on_device(v) ? "cuda" : "cpu"; },
          nb::sig("def platform(self) -> str"), "\"cpu\" or \"cuda\".")
      .def_prop_ro(
          "ordinal", [](const view& v) { return v.array.ordinal; },
          "The device within its platform.")
      .def_prop_ro(
          "memory", [](const view& v) { return nb::str(memory::name(v.array.kind).data()); },
          nb::sig("def memory(self) -> str"),
          "\"host\", \"device\", \"pinned\" (of the host, page-locked) or \"managed\".")
      .def_prop_ro(
          "layout", [](const view& v) { return nb::str(name(classify(v.array.layout())).data()); },
          nb::sig("def layout(self) -> str"),
          "\"compact\" (dense and row-major), \"transposed\" (dense), \"strided\", \"broadcast\" "
          "or "
          "\"negative\".")
      .def_prop_ro(
          "stream",
          [](const view& v) {
            return v.stream ? std::optional<std::uintptr_t>(v.stream->address()) : std::nullopt;
          },
          "CUstream on which the content is ready, 0 for the legacy default one; None: it is "
          "there.")
      .def_prop_ro("readonly", [](const view& v) { return v.array.readonly; })
      .def_prop_ro(
          "parts",
          [](const view& v) {
            return with_parts(usable(v), [](auto... parts) { return nb::make_tuple(parts...); });
          },
          nb::sig("def parts(self) -> tuple[int, int, int, tuple[int, ...], "
                  "numpy.dtype[typing.Any], tuple[int, ...] | None]"),
          "(pointer, nbytes, ordinal, shape, dtype, strides; None: compact), all at once.")
      .def_prop_ro(
          "owner", [](const view& v) { return v.owner.is_valid() ? v.owner : nb::none(); },
          nb::sig("def owner(self) -> typing.Any"),
          "The object that is kept alive for the memory; None where there is none to be seen.")
      .def_prop_ro(
          "reach",
          [](const view& v) {
            const byte_range r = *bounds(v.array.layout());
            return nb::make_tuple(r.low, r.high);
          },
          nb::sig("def reach(self) -> tuple[int, int]"),
          "The bytes from `pointer` in which all elements lie: [low, high).")
      .def(
          "release", [](view& v) { v.released = true; },
          "Later uses raise ValueError. The owner goes with this object, which arrays that were "
          "made "
          "of it keep: their memory stays.")
      .def_prop_ro("__array_interface__", &cpu_interface,
                   nb::sig("def __array_interface__(self) -> dict[str, typing.Any]"))
      .def_prop_ro("__cuda_array_interface__", &cuda_interface,
                   nb::sig("def __cuda_array_interface__(self) -> dict[str, typing.Any]"))
      .def("__array__", &to_numpy, nb::arg("dtype") = nb::none(), nb::arg("copy") = nb::none(),
           nb::sig("def __array__(self, dtype: object = None, copy: bool | None = None) -> "
                   "numpy.typing.NDArray[typing.Any]"))
      .def(
          "__dlpack_device__",
          [](const view& v) {
            const dlpack::device d = device_of(usable(v));
            return nb::make_tuple(static_cast<int>(d.type), d.id);
          },
          nb::sig("def __dlpack_device__(self) -> tuple[int, int]"))
      .def(
          "__dlpack__", &to_dlpack, nb::kw_only(), nb::arg("stream") = nb::none(),
          nb::arg("max_version") = nb::none(), nb::arg("dl_device") = nb::none(),
          nb::arg("copy") = nb::none(),
          nb::sig("def __dlpack__(self, *, stream: int | None = None, max_version: tuple[int, int] "
                  "| None = None, dl_device: tuple[int, int] | None = None, copy: bool | None = "
                  "None) -> typing.Any"))
      .def("__repr__", [](const view& v) {
        return "<jaxbridge view of " + memory::describe(v.array) + " in " +
               std::string(memory::name(v.array.kind)) + " memory, " +
               std::string(name(classify(v.array.layout()))) +
               (v.array.readonly ? ", read-only" : "") + (v.released ? ", released" : "") + ">";
      });
  m.def("view_as_array", &numpy_view, nb::arg("view"),
        nb::sig("def view_as_array(view: View) -> numpy.ndarray"),
        "A NumPy array over memory that the host reaches; the view is its base.");
  m.def(
      "set_view_copier", [](nb::object copy) { copier() = std::move(copy); }, nb::arg("copy"),
      nb::sig("def set_view_copier(copy: collections.abc.Callable[[View, int | None, tuple[int, "
              "int] | None], View]) -> None"),
      "Sets what makes a view of a copy, for consumers that ask for one.");
}

}  // namespace jaxbridge::python

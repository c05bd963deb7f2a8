// SPDX-License-Identifier: Apache-2.0
#include "python/buffer.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <string>
#include <type_traits>
#include <unordered_map>

#include "core/cuda/stream_order.hpp"
#include "core/memory/dlpack_export.hpp"
#include "jaxbridge/abi/dlpack.hpp"
#include "python/capsule.hpp"

namespace jaxbridge::python {
namespace {

namespace dlpack = abi::dlpack;

// From our names to NumPy's dtype objects. Never destroyed: see exit.hpp.
nb::dict& dtypes() {
  static nb::dict& table = *new nb::dict;
  return table;
}

// And from these to the numbers of our element types.
nb::dict& numbers() {
  static nb::dict& table = *new nb::dict;
  return table;
}

const call_buffer& live(const call_buffer& b) {
  if (b.revoked) {
    throw nb::value_error(
        "this buffer belongs to a call that has ended, and its memory is XLA's again; copy what is "
        "needed later inside the function");
  }
  return b;
}

std::string array_interface_typestr(const buffer_layout& layout) {
  const nb::object text = layout.numpy_dtype.attr("str");
  return nb::cast<std::string>(text);
}

nb::dict array_interface(const call_buffer& b, int version) {
  nb::dict out;
  out["shape"] = b.layout->shape_tuple;
  out["typestr"] = array_interface_typestr(*b.layout);
  out["data"] = nb::make_tuple(reinterpret_cast<std::uintptr_t>(b.data), b.readonly);
  out["version"] = version;
  out["strides"] = nb::none();
  return out;
}

nb::dict cpu_interface(nb::handle self) {
  const call_buffer& b = live(nb::cast<call_buffer&>(self));
  if (b.device.platform != platform::cpu) {
    PyErr_SetString(PyExc_AttributeError, "__array_interface__: this buffer is on CUDA");
    throw nb::python_error();
  }
  if (b.layout->format == nullptr) {
    // Its text would be that of raw bytes ("V2"), and consumers ask for __array__ next.
    PyErr_SetString(PyExc_AttributeError, "__array_interface__: it has no text for this dtype");
    throw nb::python_error();
  }
  return array_interface(b, 3);
}

nb::object to_numpy(nb::handle self, nb::handle dtype, nb::handle copy) {
  const call_buffer& b = live(nb::cast<call_buffer&>(self));
  if (b.device.platform != platform::cpu) {
    throw nb::type_error(
        "this buffer is on CUDA: the host cannot read it; use cupy.asarray(buffer), or "
        "framework=\"numpy\" for a copy on the host");
  }
  if (b.layout->itemsize == 0) {
    throw nb::type_error(
        "elements of less than a byte are packed, and NumPy has no such arrays; take "
        "the bytes: numpy.frombuffer(buffer, \"uint8\")");
  }
  const nb::module_ numpy = nb::module_::import_("numpy");
  const nb::object view = numpy.attr("ndarray")(b.layout->shape_tuple, b.layout->numpy_dtype, self);
  return numpy.attr("array")(view, dtype, nb::arg("copy") = copy);
}

nb::dict cuda_interface(const call_buffer& b) {
  if (live(b).device.platform != platform::cuda) {
    PyErr_SetString(PyExc_AttributeError, "__cuda_array_interface__: this buffer is on the CPU");
    throw nb::python_error();
  }
  nb::dict out = array_interface(b, 3);
  // The protocol forbids 0, and its 1 is CUDA's legacy default stream.
  const std::uintptr_t stream = b.stream.address();
  out["stream"] = stream == 0 ? std::uintptr_t{1} : stream;
  return out;
}

nb::object to_dlpack(nb::handle self, const std::optional<std::pair<int, int>>& max_version) {
  const call_buffer& b = live(nb::cast<call_buffer&>(self));
  memory::dlpack_source source;
  source.data = b.data;
  source.dtype = b.layout->dtype;
  source.shape = b.layout->shape;
  source.device = memory::dlpack_device(b.device);
  source.readonly = b.readonly;
  source.owner = Py_NewRef(self.ptr());
  source.release = &release_reference;
  return make_capsule(source, max_version && max_version->first >= 1);
}

// PEP 3118. Who asks for a format gets the array, who does not gets its bytes.
int get_buffer(PyObject* self, Py_buffer* view, int flags) noexcept {
  const auto refuse = [view](const char* why) {
    PyErr_SetString(PyExc_BufferError, why);
    view->obj = nullptr;
    return -1;
  };
  // Buffer.__new__ makes an object without content.
  if (!nb::inst_ready(nb::handle(self))) return refuse("this buffer was not made by a call");
  const call_buffer* b = nb::inst_ptr<call_buffer>(nb::handle(self));
  if (b->revoked) return refuse("this buffer belongs to a call that has ended");
  if (b->device.platform != platform::cpu) {
    return refuse("this buffer is on CUDA: the host cannot read it");
  }
  // XLA may give no address for an array without elements; a buffer must have one.
  static char nothing = 0;
  void* data = b->data == nullptr ? &nothing : b->data;
  const buffer_layout& layout = *b->layout;
  if (PyBuffer_FillInfo(view, self, data, static_cast<Py_ssize_t>(layout.size_bytes),
                        b->readonly ? 1 : 0, flags) != 0) {
    return -1;
  }
  constexpr int as_array = PyBUF_FORMAT | PyBUF_ND;
  if ((flags & as_array) != as_array) return 0;
  const bool fortran = (flags & PyBUF_F_CONTIGUOUS) == PyBUF_F_CONTIGUOUS;
  if (layout.format == nullptr || (fortran && layout.shape.size() > 1)) {
    Py_CLEAR(view->obj);
    return refuse(fortran ? "this buffer is row-major"
                          : "the buffer protocol has no text for this dtype; use numpy.asarray");
  }
  // The layout lives as long as the object, which the view keeps.
  static_assert(std::is_same_v<std::int64_t, Py_ssize_t>);
  view->format = const_cast<char*>(layout.format);
  view->itemsize = layout.itemsize;
  view->ndim = static_cast<int>(layout.shape.size());
  view->shape = const_cast<Py_ssize_t*>(layout.shape.data());
  view->strides = (flags & PyBUF_STRIDES) == PyBUF_STRIDES
                      ? const_cast<Py_ssize_t*>(layout.strides.data())
                      : nullptr;
  return 0;
}

PyType_Slot buffer_slots[] = {
    {Py_bf_getbuffer, reinterpret_cast<void*>(&get_buffer)},
    {0, nullptr},
};

}  // namespace

void set_dtypes(nb::dict by_name) {
  for (const auto& [text, object] : by_name) {
    numbers()[object] = static_cast<int>(dtype_from_name(nb::cast<std::string_view>(text)));
  }
  dtypes() = std::move(by_name);
}

jaxbridge::dtype dtype_of_numpy(nb::handle dtype) {
  // Another byte order is another dtype object, and not in the table.
  PyObject* const number = PyDict_GetItemWithError(numbers().ptr(), dtype.ptr());
  if (number != nullptr) return static_cast<jaxbridge::dtype>(PyLong_AsLong(number));
  if (PyErr_Occurred() != nullptr) throw nb::python_error();
  return jaxbridge::dtype::invalid;
}

nb::object numpy_dtype(jaxbridge::dtype type) {
  // Found once each; with the GIL, and never destroyed.
  static auto& found = *new std::array<nb::object, 256>;
  nb::object& known = found[static_cast<std::uint8_t>(type)];
  if (known.is_valid()) return known;
  const std::string_view text = name(type);
  const nb::str key(text.data(), text.size());
  if (!dtypes().contains(key)) {
    throw nb::type_error(("element type " + std::string(text) +
                          " is not known to the installed NumPy and ml_dtypes; cast it before the "
                          "call")
                             .c_str());
  }
  known = dtypes()[key];
  return known;
}

const char* buffer_format(jaxbridge::dtype type) noexcept {
  using enum jaxbridge::dtype;
  // long, as NumPy's int64 is: its "q" is another type of the same size.
  static_assert(sizeof(long) == 8);
  switch (type) {
    case bool_:
      return "?";
    case int8:
      return "b";
    case int16:
      return "h";
    case int32:
      return "i";
    case int64:
      return "l";
    case uint8:
      return "B";
    case uint16:
      return "H";
    case uint32:
      return "I";
    case uint64:
      return "L";
    case float16:
      return "e";
    case float32:
      return "f";
    case float64:
      return "d";
    case complex64:
      return "Zf";
    case complex128:
      return "Zd";
    default:
      return nullptr;
  }
}

std::shared_ptr<const buffer_layout> make_layout(const any_buffer& b) {
  auto layout = std::make_shared<buffer_layout>();
  layout->dtype = b.dtype;
  layout->shape.assign(b.shape.begin(), b.shape.end());
  layout->numpy_dtype = numpy_dtype(b.dtype);
  nb::list extents;
  for (const std::int64_t extent : b.shape) extents.append(extent);
  layout->shape_tuple = nb::tuple(extents);
  layout->size_bytes = b.size_bytes();
  layout->format = buffer_format(b.dtype);
  layout->itemsize = static_cast<std::int64_t>(bit_width(b.dtype) / 8);
  layout->strides.resize(b.shape.size());
  std::int64_t stride = layout->itemsize;
  for (std::size_t axis = b.shape.size(); axis-- > 0;) {
    layout->strides[axis] = stride;
    stride *= std::max<std::int64_t>(b.shape[axis], 1);
  }
  return layout;
}

void bind_buffer(nb::module_& m) {
  nb::class_<call_buffer>(m, "Buffer", nb::is_final(), nb::type_slots(buffer_slots),
                          "A dense row-major array that XLA owns, for the time of one call.")
      .def_prop_ro(
          "pointer",
          [](const call_buffer& b) { return reinterpret_cast<std::uintptr_t>(live(b).data); },
          "Address of the first element; may be 0 where there are no elements.")
      .def_prop_ro(
          "shape", [](const call_buffer& b) { return b.layout->shape_tuple; },
          nb::sig("def shape(self) -> tuple[int, ...]"))
      .def_prop_ro(
          "dtype", [](const call_buffer& b) { return b.layout->numpy_dtype; },
          nb::sig("def dtype(self) -> numpy.dtype[typing.Any]"), "NumPy's or ml_dtypes' dtype.")
      .def_prop_ro("ndim", [](const call_buffer& b) { return b.layout->shape.size(); })
      .def_prop_ro("nbytes", [](const call_buffer& b) { return b.layout->size_bytes; })
      .def_prop_ro(
          "platform", [](const call_buffer& b) { return name(b.device.platform); },
          nb::sig("def platform(self) -> str"), "\"cpu\" or \"cuda\".")
      .def_prop_ro(
          "ordinal", [](const call_buffer& b) { return b.device.ordinal; },
          "The device within its platform.")
      .def_prop_ro(
          "stream", [](const call_buffer& b) { return b.stream.address(); },
          "XLA's CUstream for this call; 0 on the CPU.")
      .def_prop_ro("readonly", [](const call_buffer& b) { return b.readonly; })
      .def_prop_ro(
          "__array_interface__", [](nb::handle_t<call_buffer> self) { return cpu_interface(self); },
          nb::sig("def __array_interface__(self) -> dict[str, typing.Any]"))
      .def_prop_ro("__cuda_array_interface__", &cuda_interface,
                   nb::sig("def __cuda_array_interface__(self) -> dict[str, typing.Any]"))
      .def(
          "__array__",
          [](nb::handle_t<call_buffer> self, nb::object dtype, nb::object copy) {
            return to_numpy(self, dtype, copy);
          },
          nb::arg("dtype") = nb::none(), nb::arg("copy") = nb::none(),
          nb::sig("def __array__(self, dtype: object = None, copy: bool | None = None) -> "
                  "numpy.typing.NDArray[typing.Any]"))
      .def(
          "__dlpack_device__",
          [](const call_buffer& b) {
            const dlpack::device d = memory::dlpack_device(live(b).device);
            return nb::make_tuple(static_cast<int>(d.type), d.id);
          },
          nb::sig("def __dlpack_device__(self) -> tuple[int, int]"))
      .def(
          "__dlpack__",
          [](nb::handle_t<call_buffer> self, nb::object stream,
             const std::optional<std::pair<int, int>>& max_version, nb::object dl_device,
             nb::object copy_requested) {
            const call_buffer& b = nb::cast<call_buffer&>(self);
            if (!dl_device.is_none()) {
              const dlpack::device d = memory::dlpack_device(b.device);
              if (!dl_device.equal(nb::make_tuple(static_cast<int>(d.type), d.id))) {
                throw nb::buffer_error("a buffer of a call cannot move to another device");
              }
            }
            if (!copy_requested.is_none() && nb::cast<bool>(copy_requested)) {
              throw nb::buffer_error("a buffer of a call is not copied; copy the array made of it");
            }
            // Work of this call is ordered on XLA's stream. A consumer on another one waits for it.
            if (b.device.platform == platform::cuda && !stream.is_none()) {
              const long long asked = nb::cast<long long>(stream);
              if (asked == 0)
                throw nb::value_error("stream=0 is not allowed by DLPack; use 1 or 2");
              if (asked != -1) {
                const auto handle = static_cast<std::uintptr_t>(asked == 1 ? 0 : asked);
                const stream_ref consumer(reinterpret_cast<void*>(handle));
                if (consumer != b.stream) {
                  const status s = cuda::order(b.stream, consumer);
                  if (!s.ok()) throw std::runtime_error(s.message());
                }
              }
            }
            return to_dlpack(self, max_version);
          },
          nb::kw_only(), nb::arg("stream") = nb::none(), nb::arg("max_version") = nb::none(),
          nb::arg("dl_device") = nb::none(), nb::arg("copy") = nb::none(),
          nb::sig("def __dlpack__(self, *, stream: int | None = None, max_version: tuple[int, int] "
                  "| None = None, dl_device: tuple[int, int] | None = None, copy: bool | None = "
                  "None) -> object"))
      .def("__repr__", [](const call_buffer& b) {
        const nb::object text =
            nb::str("Buffer({}, {}, {}:{}{}{})")
                .attr("format")(b.layout->shape_tuple, b.layout->numpy_dtype,
                                name(b.device.platform), b.device.ordinal,
                                b.readonly ? ", readonly" : "", b.revoked ? ", ended" : "");
        return nb::cast<std::string>(text);
      });
  m.def("set_dtypes", &set_dtypes, nb::arg("by_name"),
        nb::sig("def set_dtypes(by_name: dict[str, numpy.dtype[typing.Any]]) -> None"),
        "Sets the table from names to dtype objects; once, at import.");
  m.def(
      "dtype_names",
      [] {
        nb::list out;
#define JAXBRIDGE_ENTRY(id, text, xla, bits, dlpack) out.append(text);
        JAXBRIDGE_DTYPES(JAXBRIDGE_ENTRY)
#undef JAXBRIDGE_ENTRY
        return out;
      },
      nb::sig("def dtype_names() -> list[str]"), "The names of XLA's element types.");
}

}  // namespace jaxbridge::python

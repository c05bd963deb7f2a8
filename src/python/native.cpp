// SPDX-License-Identifier: Apache-2.0
#include "python/native.hpp"

#include <array>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "core/cuda/module.hpp"
#include "core/native/c_function.hpp"
#include "core/native/kernel_target.hpp"
#include "core/native/library_target.hpp"

namespace jaxbridge::python {
namespace {

using native::argument;
using index_pair = dispatch::in_place::index_pair;

template <class T>
T value_or_raise(result<T> r) {
  if (r.ok()) return std::move(r).value();
  throw nb::value_error(r.error().message().c_str());
}

nb::object handler_capsule(abi::xla_ffi::handler* h) {
  if (h == nullptr) return nb::none();
  return nb::capsule(reinterpret_cast<void*>(h), "xla._CUSTOM_CALL_TARGET");
}

// (source, is_float, index, bits) of one parameter.
using described = std::tuple<std::string, bool, std::uint32_t, std::uint64_t>;

std::vector<argument> arguments_of(const std::string& of, const std::vector<described>& all,
                                   std::size_t most) {
  if (all.size() > most) {
    throw nb::value_error((of + ": it has at most " + std::to_string(most) +
                           " words of parameters, and these are " + std::to_string(all.size()))
                              .c_str());
  }
  std::vector<argument> out;
  for (const auto& [source, is_float, index, bits] : all) {
    argument a;
    a.is_float = is_float;
    a.index = index;
    a.bits = bits;
    if (source == "operand") {
      a.from = argument::source::operand;
    } else if (source == "result") {
      a.from = argument::source::result;
    } else if (source == "value") {
      a.from = argument::source::value;
    } else if (source == "text") {
      a.from = argument::source::text;
    } else if (source == "stream") {
      a.from = argument::source::stream;
    } else {
      throw nb::value_error(("no source of an argument: " + source).c_str());
    }
    out.push_back(a);
  }
  return out;
}

// Attributes as XLA has them: name -> str, (dtype, bytes) of a scalar, [dtype, bytes] of an array,
// dict.
void fill(attribute_set& to, const nb::dict& from) {
  for (const auto& [key, value] : from) {
    const auto name = nb::cast<std::string>(key);
    if (nb::isinstance<nb::str>(value)) {
      to.string(name, nb::cast<std::string>(value));
    } else if (nb::isinstance<nb::dict>(value)) {
      fill(to.dictionary(name), nb::cast<nb::dict>(value));
    } else {
      const auto type = dtype_from_name(nb::cast<std::string>(value[0]));
      const auto bytes = nb::cast<nb::bytes>(value[1]);
      const std::size_t item = item_size(type);
      if (item == 0) throw nb::value_error("an attribute has no dtype that XLA has");
      if (nb::isinstance<nb::list>(value)) {
        to.raw_array(name, static_cast<int>(type), bytes.c_str(), bytes.size() / item, item);
      } else {
        to.raw_scalar(name, static_cast<int>(type), bytes.c_str(), bytes.size());
      }
    }
  }
}

std::size_t counted(const native_handle& h, std::size_t (replay::device_graphs::*count)() const) {
  const replay::device_graphs* const g = h.target->graphs();
  return g == nullptr ? 0 : (g->*count)();
}

struct kernel_handle {
  std::shared_ptr<cuda::kernel> kernel;
};

using named_type = std::pair<std::string, std::vector<std::int64_t>>;

std::vector<named_type> infer(const native::function& f, const std::vector<named_type>& operands,
                              const nb::dict& attributes, std::size_t result_count) {
  if (f.shapes == nullptr) throw nb::value_error("the function has no shape function");
  std::vector<native::array_type> types;
  for (const auto& [name, shape] : operands) types.push_back({dtype_from_name(name), shape});
  attribute_set set;
  fill(set, attributes);
  std::vector<named_type> out;
  for (native::array_type& t : value_or_raise(native::infer_shapes(f, types, set, result_count))) {
    out.emplace_back(std::string(name(t.dtype)), std::move(t.shape));
  }
  return out;
}

}  // namespace

void bind_native(nb::module_& m) {
  nb::class_<native::function>(m, "NativeFunction", nb::is_final(),
                               "A function of a native library, on one platform.")
      .def_ro("name", &native::function::name)
      .def_ro("doc", &native::function::doc)
      .def_ro("signatures", &native::function::signatures, "One for each overload.")
      .def_ro("parameters", &native::function::parameters)
      .def_ro("results", &native::function::results,
              "A rule for the shape of each result, or none.")
      .def_ro("vmap_method", &native::function::vmap_method)
      .def_ro("flags", &native::function::flags)
      .def_prop_ro("platform",
                   [](const native::function& f) { return jaxbridge::name(f.platform); })
      .def_prop_ro("has_shape_function",
                   [](const native::function& f) { return f.shapes != nullptr; })
      .def_prop_ro("execute", [](const native::function& f) { return handler_capsule(f.execute); })
      .def_prop_ro("initialize",
                   [](const native::function& f) { return handler_capsule(f.initialize); })
      .def_prop_ro("calls", &native::function::call_count, "How often XLA has called it.")
      .def("infer", &infer, nb::arg("operands"), nb::arg("attributes"), nb::arg("result_count"),
           nb::sig("def infer(self, operands: collections.abc.Sequence[tuple[str, "
                   "collections.abc.Sequence[int]]], attributes: dict[str, typing.Any], "
                   "result_count: int) -> list[tuple[str, list[int]]]"),
           "(dtype, shape) of each result, hidden ones last, by the shape function.");

  m.def(
      "open_library",
      [](const std::string& path) {
        result<std::vector<native::function>> found = status(status_code::internal, "");
        {
          const nb::gil_scoped_release no_gil;  // its initializers may take long
          found = native::open_library(path);
        }
        return value_or_raise(std::move(found));
      },
      nb::arg("path"),
      "Opens a library of native functions, for as long as the process lives. ValueError: it is "
      "none.");

  nb::class_<native_handle>(m, "NativeTarget", nb::is_final(),
                            "What a key stands for: calls no Python.")
      .def_prop_ro(
          "calls", [](const native_handle& h) { return h.target->calls(); },
          "How often XLA has called it.")
      .def_prop_ro(
          "replays",
          [](const native_handle& h) { return counted(h, &replay::device_graphs::replays); })
      .def_prop_ro(
          "captures",
          [](const native_handle& h) { return counted(h, &replay::device_graphs::captures); })
      .def_prop_ro("kept",
                   [](const native_handle& h) { return counted(h, &replay::device_graphs::size); })
      // What only a target that calls Python counts.
      .def_prop_ro("hits", [](const native_handle&) { return 0; })
      .def_prop_ro("staged", [](const native_handle&) { return 0; })
      .def("clear_plans", [](const native_handle& h) {
        const nb::gil_scoped_release no_gil;  // a graph's end waits for its stream
        if (replay::device_graphs* const g = h.target->graphs(); g != nullptr)
          const auto gone = g->clear();
      });

  m.attr("max_arguments") = native::max_arguments;
  m.def(
      "c_function",
      [](std::string name, std::uintptr_t address, const std::vector<described>& arguments,
         std::vector<std::string> texts, bool returns_error_code,
         std::vector<std::string> operand_names, std::vector<index_pair> in_place,
         std::vector<std::size_t> external, bool inspects) {
        std::vector<argument> words = arguments_of(name, arguments, native::max_arguments);
        return native_handle{std::make_shared<native::c_function>(
            std::move(name), reinterpret_cast<void*>(address), std::move(words), std::move(texts),
            returns_error_code ? native::returned::error_code : native::returned::nothing,
            dispatch::in_place(std::move(operand_names), std::move(in_place), std::move(external)),
            inspects)};
      },
      nb::kw_only(), nb::arg("name"), nb::arg("address"), nb::arg("arguments"), nb::arg("texts"),
      nb::arg("returns_error_code"), nb::arg("operand_names"), nb::arg("in_place"),
      nb::arg("external"), nb::arg("inspects"),
      "A target that calls the C function at an address.");

  m.def(
      "library_function",
      [](std::string name, const std::vector<native::function>& functions,
         std::vector<std::string> operand_names, std::vector<index_pair> in_place,
         std::vector<std::size_t> external) {
        return native_handle{std::make_shared<native::library_target>(
            std::move(name), functions,
            dispatch::in_place(std::move(operand_names), std::move(in_place),
                               std::move(external)))};
      },
      nb::kw_only(), nb::arg("name"), nb::arg("functions"), nb::arg("operand_names"),
      nb::arg("in_place"), nb::arg("external"),
      "A target that calls a function of a library, one for each platform, and inspects each "
      "call.");

  m.def(
      "compute_capability",
      [](int ordinal) {
        const result<std::pair<int, int>> found = cuda::compute_capability(ordinal);
        if (!found.ok()) throw std::runtime_error(found.error().message());
        return found.value();
      },
      nb::arg("ordinal"), "Of a CUDA device. RuntimeError: there is none.");

  nb::class_<kernel_handle>(m, "Kernel", nb::is_final(),
                            "One kernel of a module of device code: PTX, or a cubin.")
      .def(
          "__init__",
          [](kernel_handle* self, const nb::bytes& image, std::string name, std::uint32_t shared) {
            new (self) kernel_handle{std::make_shared<cuda::kernel>(
                std::string(image.c_str(), image.size()), std::move(name), shared)};
          },
          nb::kw_only(), nb::arg("image"), nb::arg("name"), nb::arg("shared"))
      .def_prop_ro(
          "loaded", [](const kernel_handle& k) { return k.kernel->loaded(); },
          "On how many devices it is loaded.")
      .def(
          "target",
          [](const kernel_handle& k, std::string name, const std::vector<described>& arguments,
             std::array<std::uint32_t, 3> grid, std::array<std::uint32_t, 3> block,
             std::uint32_t shared, std::vector<std::string> operand_names,
             std::vector<index_pair> in_place, std::vector<std::size_t> external, std::size_t limit,
             bool inspects) {
            std::vector<argument> words =
                arguments_of(name, arguments, native::max_kernel_arguments);
            return native_handle{std::make_shared<native::kernel_target>(
                std::move(name), k.kernel, std::move(words),
                cuda::launch_shape{grid, block, shared},
                dispatch::in_place(std::move(operand_names), std::move(in_place),
                                   std::move(external)),
                limit, inspects)};
          },
          nb::kw_only(), nb::arg("name"), nb::arg("arguments"), nb::arg("grid"), nb::arg("block"),
          nb::arg("shared"), nb::arg("operand_names"), nb::arg("in_place"), nb::arg("external"),
          nb::arg("limit"), nb::arg("inspects"), "A target that launches it on the call's stream.");
}

}  // namespace jaxbridge::python

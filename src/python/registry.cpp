// SPDX-License-Identifier: Apache-2.0
#include "python/registry.hpp"

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

#include "core/dispatch/entry_points.hpp"
#include "core/dispatch/registry.hpp"
#include "core/exit.hpp"
#include "python/gil.hpp"
#include "python/native.hpp"
#include "python/python_target.hpp"

namespace jaxbridge::python {

void bind_registry(nb::module_& m) {
  m.def(
      "register",
      [](std::int64_t key, std::shared_ptr<python_target> target) {
        dispatch::process_registry().add(key, std::move(target));
      },
      nb::arg("key"), nb::arg("target"), "Counts one more user of the key.");
  m.def(
      "register",
      [](std::int64_t key, const native_handle& target) {
        dispatch::process_registry().add(key, target.target);
      },
      nb::arg("key"), nb::arg("target"));
  m.def(
      "unregister",
      [](std::int64_t key) {
        if (const python_use use; use.granted()) dispatch::process_registry().remove(key);
      },
      nb::arg("key"), "Counts one user of the key less; the last one takes the target along.");
  m.def(
      "registered", [](std::int64_t key) { return dispatch::process_registry().contains(key); },
      nb::arg("key"));
  m.def("registry_size", [] { return dispatch::process_registry().size(); });
  m.def(
      "set_resolver",
      [](nb::object resolve) {
        // Never freed: XLA's threads may ask until the process ends.
        auto* const kept = new nb::object(std::move(resolve));
        dispatch::process_registry().set_resolver([kept](std::int64_t key, std::string_view spec)
                                                      -> result<std::shared_ptr<dispatch::target>> {
          const python_use use;
          if (!use.granted()) {
            return status(status_code::failed_precondition,
                          "the Python interpreter is shutting down");
          }
          const thread_gil gil;
          try {
            PyObject* const text =
                PyUnicode_DecodeUTF8(spec.data(), static_cast<Py_ssize_t>(spec.size()), "replace");
            if (text == nullptr) throw nb::python_error();
            const nb::object found = (*kept)(key, nb::steal(text));
            if (nb::isinstance<native_handle>(found)) {
              const auto& native = nb::cast<const native_handle&>(found);
              return std::shared_ptr<dispatch::target>(native.target);
            }
            auto target = nb::cast<std::shared_ptr<python_target>>(found);
            if (target == nullptr) throw std::invalid_argument("the resolver gave no target");
            return std::shared_ptr<dispatch::target>(std::move(target));
          } catch (nb::python_error& raised) {
            try {
              const nb::object text = nb::str(raised.value());
              return status(status_code::not_found, nb::cast<std::string>(text));
            } catch (std::exception& second) {
              return status(status_code::not_found,
                            std::string("the function was not found, and the error's text "
                                        "cannot be read: ") +
                                second.what());
            }
          } catch (std::exception& e) {
            return status(status_code::internal, e.what());
          }
        });
      },
      nb::arg("resolve"),
      nb::sig("def set_resolver(resolve: collections.abc.Callable[[int, str], Target | "
              "NativeTarget]) -> None"),
      "Sets resolve(key, spec) -> Target, asked for keys that no one has registered.");
  m.def(
      "handlers",
      [] {
        const auto capsule = [](abi::xla_ffi::handler* h) {
          return nb::capsule(reinterpret_cast<void*>(h), "xla._CUSTOM_CALL_TARGET");
        };
        nb::list out;
        out.append(nb::make_tuple("jaxbridge.call", "cpu", capsule(&dispatch::call_cpu)));
        out.append(nb::make_tuple("jaxbridge.call", "CUDA", capsule(&dispatch::call_cuda)));
        out.append(
            nb::make_tuple("jaxbridge.call_capturable", "cpu", capsule(&dispatch::call_cpu)));
        out.append(nb::make_tuple("jaxbridge.call_capturable", "CUDA",
                                  capsule(&dispatch::call_cuda_capturable)));
        out.append(nb::make_tuple("jaxbridge.enqueued", "CUDA", capsule(&dispatch::enqueued_cuda)));
        out.append(nb::make_tuple("jaxbridge.check_external", "cpu",
                                  capsule(&dispatch::check_external_cpu)));
        out.append(nb::make_tuple("jaxbridge.check_external", "CUDA",
                                  capsule(&dispatch::check_external_cuda)));
        return out;
      },
      nb::sig("def handlers() -> list[tuple[str, str, typing.Any]]"),
      "(target name, platform, capsule) of each handler.");
  m.def(
      "ffi_versions",
      [] { return nb::make_tuple(dispatch::runtime_api_minor(), dispatch::answered_api_minor()); },
      nb::sig("def ffi_versions() -> tuple[int, int]"),
      "Minor FFI version of the runtime (-1: it did not say) and the one that we answered.");
}

}  // namespace jaxbridge::python

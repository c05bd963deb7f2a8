// SPDX-License-Identifier: Apache-2.0
// The extension module: what each bound noun is, stands in that noun's file.
#include <chrono>

#include "core/exit.hpp"
#include "core/memory/last_use.hpp"
#include "core/turn.hpp"
#include "python/buffer.hpp"
#include "python/current_call.hpp"
#include "python/driver.hpp"
#include "python/native.hpp"
#include "python/numpy_array.hpp"
#include "python/plan.hpp"
#include "python/py.hpp"
#include "python/python_target.hpp"
#include "python/registry.hpp"
#include "python/scratch.hpp"
#include "python/view.hpp"

NB_MODULE(_core, m) {
  m.doc() = "The part of jaxbridge that is written in C++.";
#if defined(JAXBRIDGE_LEAK_WARNINGS)
  nb::set_leak_warnings(true);
#else
  nb::set_leak_warnings(false);
#endif
  jaxbridge::python::bind_buffer(m);
  jaxbridge::python::bind_current_call(m);
  jaxbridge::python::bind_driver(m);
  jaxbridge::python::bind_numpy_array(m);
  jaxbridge::python::bind_scratch(m);
  jaxbridge::python::bind_plan(m);
  jaxbridge::python::bind_target(m);
  jaxbridge::python::bind_native(m);
  jaxbridge::python::bind_registry(m);
  jaxbridge::python::bind_view(m);
  jaxbridge::python::bind_view_sources(m);
  jaxbridge::python::bind_exporter(m);
  m.def(
      "begin_exit",
      [] {
        // Functions that are running may finish; one that never does must not stop the exit.
        const nb::gil_scoped_release no_gil;
        return jaxbridge::begin_exit(std::chrono::seconds(10));
      },
      "From now on nothing calls Python or CUDA; called through atexit. Whether every call has "
      "ended.");
  m.def(
      "after_fork_in_child",
      [] {
        jaxbridge::after_fork_in_child();
        jaxbridge::turns::for_gil().forget_other_threads();
        jaxbridge::memory::forget_uses_in_child();
      },
      "Forgets the calls of threads that a forked child does not have.");
}

// SPDX-License-Identifier: Apache-2.0
#include "python/gil.hpp"

#include "core/exit.hpp"

namespace jaxbridge::python {
namespace {

// One PyGILState_Ensure that is not released before the thread ends, so that its thread state
// stays.
struct kept_state {
  PyGILState_STATE state{};
  bool kept = false;

  ~kept_state() {
    if (!kept) return;
    // Once the process is ending, the interpreter takes the state along.
    const python_use use;
    if (!use.granted()) return;
    PyEval_RestoreThread(PyGILState_GetThisThreadState());
    PyGILState_Release(state);
  }
};

thread_local kept_state this_thread;

}  // namespace

thread_gil::thread_gil() {
  if (PyGILState_GetThisThreadState() == nullptr) {
    this_thread.state = PyGILState_Ensure();
    this_thread.kept = true;
    PyEval_SaveThread();
  }
  state_ = PyGILState_Ensure();
}

}  // namespace jaxbridge::python

// SPDX-License-Identifier: Apache-2.0
// The GIL, taken by any thread.
#pragma once

#include "python/py.hpp"

namespace jaxbridge::python {

/// Holds the GIL. A thread of XLA's gets a Python thread state at its first use, and keeps it:
/// making one costs more than a call.
///
/// Used under a granted python_use only.
class thread_gil {
 public:
  thread_gil();
  ~thread_gil() { PyGILState_Release(state_); }
  thread_gil(const thread_gil&) = delete;
  thread_gil& operator=(const thread_gil&) = delete;

 private:
  PyGILState_STATE state_;
};

}  // namespace jaxbridge::python

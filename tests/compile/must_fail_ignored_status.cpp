// expect: ignoring return
// SPDX-License-Identifier: Apache-2.0
// An error that nobody looks at is a warning, and warnings are errors here.
#include "jaxbridge/status.hpp"

#pragma GCC diagnostic error "-Wunused-result"
#ifdef __clang__
#pragma GCC diagnostic error "-Wunused-value"
#endif

jaxbridge::status work();
void forget() { work(); }

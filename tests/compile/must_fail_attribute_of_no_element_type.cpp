// expect: no matching (member )?function for call
// SPDX-License-Identifier: Apache-2.0
// A scalar attribute has an element type; a pointer is none.
#include "jaxbridge/attributes.hpp"

auto pointer(const jaxbridge::attributes_view& a) { return a.scalar<void*>("pointer"); }

// expect: memory of scratch& ends with the call
// SPDX-License-Identifier: Apache-2.0
// XLA gives scratch memory to others before a captured call is replayed.
#include "jaxbridge/jaxbridge.hpp"

jaxbridge::status f(jaxbridge::buffer_view<const float>, jaxbridge::scratch&,
                    jaxbridge::buffer_view<float>);
JAXBRIDGE_EXPORT(f, cuda).capturable();

// expect: no viable conversion|conversion from|use of deleted function
// SPDX-License-Identifier: Apache-2.0
// Any pointer converts to void*; none becomes a stream unasked.
#include "jaxbridge/stream.hpp"

int something = 0;
const jaxbridge::stream_ref stream = &something;

// expect: use of deleted function|call to deleted constructor
// SPDX-License-Identifier: Apache-2.0
// A default stream is asked for by name.
#include "jaxbridge/stream.hpp"

const jaxbridge::stream_ref stream(nullptr);

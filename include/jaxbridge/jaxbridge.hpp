// SPDX-License-Identifier: Apache-2.0
// Everything a native author needs.
#pragma once

#include "attributes.hpp"   // IWYU pragma: export
#include "buffer.hpp"       // IWYU pragma: export
#include "device.hpp"       // IWYU pragma: export
#include "dtype.hpp"        // IWYU pragma: export
#include "export.hpp"       // IWYU pragma: export
#include "frame.hpp"        // IWYU pragma: export
#include "handler.hpp"      // IWYU pragma: export
#include "layout.hpp"       // IWYU pragma: export
#include "scratch.hpp"      // IWYU pragma: export
#include "shape_rules.hpp"  // IWYU pragma: export
#include "signature.hpp"    // IWYU pragma: export
#include "state.hpp"        // IWYU pragma: export
#include "status.hpp"       // IWYU pragma: export
#include "stream.hpp"       // IWYU pragma: export
#include "thread_pool.hpp"  // IWYU pragma: export

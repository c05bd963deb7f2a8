// SPDX-License-Identifier: Apache-2.0
// Everything a native author needs.
#pragma once

#include "attributes.hpp"  // IWYU pragma: export
#include "buffer.hpp"      // IWYU pragma: export
#include "device.hpp"      // IWYU pragma: export
#include "dtype.hpp"       // IWYU pragma: export
#include "layout.hpp"      // IWYU pragma: export
#include "status.hpp"      // IWYU pragma: export
#include "stream.hpp"      // IWYU pragma: export

// SPDX-License-Identifier: Apache-2.0
// Which memory of others JAX has now.
#pragma once

#include <cstddef>
#include <cstdint>

namespace jaxbridge::memory {

/// Counts one more import of the memory at `address`. Any thread.
void add_import(std::uintptr_t address);

/// One import has ended, and its owner is let go. Any thread.
void remove_import(std::uintptr_t address) noexcept;

/// How many imports of the memory at `address` there are. Any thread.
[[nodiscard]] std::size_t live_imports(std::uintptr_t address);

}  // namespace jaxbridge::memory

// SPDX-License-Identifier: Apache-2.0
// DLPack tensors in the capsules in which Python hands them on.
#pragma once

#include "core/memory/dlpack_export.hpp"
#include "core/memory/dlpack_import.hpp"
#include "python/py.hpp"

namespace jaxbridge::python {

/// A capsule with a tensor of `source`, "dltensor_versioned" or "dltensor". One that nobody
/// consumes frees its tensor. The owner is taken in any case: where this throws, it has been
/// released.
[[nodiscard]] nb::object make_capsule(const memory::dlpack_source& source, bool versioned);

/// Releases a Python object that owns a tensor: its `owner` is Py_NewRef(object).
void release_reference(void* object) noexcept;

/// Takes the tensor out of a capsule, which is renamed, as a consumer does. Throws TypeError for
/// what is no capsule with a tensor, or one that has been consumed.
[[nodiscard]] memory::dlpack_tensor take_tensor(nb::handle capsule);

}  // namespace jaxbridge::python

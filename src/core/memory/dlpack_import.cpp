// SPDX-License-Identifier: Apache-2.0
#include "core/memory/dlpack_import.hpp"

#include <cstdint>
#include <string>

namespace jaxbridge::memory {
namespace {

namespace dlpack = abi::dlpack;

status refuse(status_code code, const std::string& what) {
  return {code, "DLPack import: " + what};
}

result<memory_kind> kind_of(const dlpack::device& d) {
  switch (d.type) {
    case dlpack::device_cpu:
      return memory_kind::host;
    case dlpack::device_cuda:
      return memory_kind::device;
    case dlpack::device_cuda_host:
      return memory_kind::pinned;
    case dlpack::device_cuda_managed:
      return memory_kind::managed;
  }
  return refuse(status_code::unimplemented,
                "the device type " + std::to_string(static_cast<std::int32_t>(d.type)) +
                    " is not supported; expected the CPU (1), CUDA (2), pinned (3) or managed (13) "
                    "memory: copy the array to one of these first");
}

result<dtype> dtype_in(const dlpack::data_type& t) {
  const auto refused = [&t](const char* why) {
    return refuse(status_code::unimplemented, "the element type with code " +
                                                  std::to_string(t.code) + ", " +
                                                  std::to_string(t.bits) + " bits and " +
                                                  std::to_string(t.lanes) + " lanes " + why);
  };
  if (t.lanes != 1) return refused("is a vector; export it with one lane and one axis more");
  const dtype found = dtype_from_dlpack(t.code, t.bits);
  if (found == dtype::invalid) return refused("is none that JAX has; convert it first");
  return found;
}

}  // namespace

result<array> describe(const dlpack::tensor& t, bool readonly) {
  const result<memory_kind> kind = kind_of(t.device);
  if (!kind.ok()) return kind.error();
  const result<dtype> type = dtype_in(t.dtype);
  if (!type.ok()) return type.error();
  if (t.ndim < 0 || t.ndim > static_cast<std::int32_t>(max_rank)) {
    return refuse(status_code::invalid_argument, "an array of " + std::to_string(t.ndim) +
                                                     " axes; expected 0 to " +
                                                     std::to_string(max_rank));
  }
  if (t.ndim > 0 && t.shape == nullptr) {
    return refuse(status_code::invalid_argument, "the shape is missing");
  }

  array out;
  out.dtype = type.value();
  out.kind = kind.value();
  // Host memory has no ordinals; some producers put their own numbers there.
  out.ordinal = is_on_device(out.kind) ? t.device.id : 0;
  if (out.ordinal < 0) {
    return refuse(status_code::invalid_argument,
                  "the device id " + std::to_string(t.device.id) + "; expected 0 or more");
  }
  out.readonly = readonly;
  const auto ndim = static_cast<std::size_t>(t.ndim);
  out.shape.assign(t.shape, t.shape + ndim);
  if (t.strides == nullptr) {
    if (!set_compact(out)) out.strides.assign(ndim, 0);  // check() tells whether that is an error
  } else {
    out.strides.resize(ndim);
    const bool empty = is_empty(out.shape);
    for (std::size_t axis = 0; axis < ndim; ++axis) {
      // Where nothing lies no stride is followed, whatever it says.
      const std::int64_t steps = empty || out.shape[axis] == 1 ? 0 : t.strides[axis];
      if (__builtin_mul_overflow(steps, out.item_size(), &out.strides[axis])) {
        return refuse(status_code::unimplemented,
                      "the stride " + std::to_string(steps) + " of axis " + std::to_string(axis) +
                          " does not fit into an address (CuPy exports negative strides so); pass "
                          "the array itself, or a copy");
      }
    }
  }
  const auto base = reinterpret_cast<std::uintptr_t>(t.data);
  std::uintptr_t address = 0;
  if (__builtin_add_overflow(base, t.byte_offset, &address)) {
    return refuse(status_code::invalid_argument,
                  "the byte_offset " + std::to_string(t.byte_offset) + " leaves the address space");
  }
  // NOLINTNEXTLINE(performance-no-int-to-ptr): the sum of address and offset may not overflow
  out.data = base == 0 ? nullptr : reinterpret_cast<void*>(address);
  if (status s = check(out); !s.ok()) return refuse(s.code(), s.message());
  return out;
}

dlpack_tensor::~dlpack_tensor() {
  if (unversioned_ != nullptr && unversioned_->deleter != nullptr) {
    unversioned_->deleter(unversioned_);
  }
  if (versioned_ != nullptr && versioned_->deleter != nullptr) versioned_->deleter(versioned_);
}

result<array> dlpack_tensor::describe() const {
  if (versioned_ != nullptr) {
    if (versioned_->version.major != dlpack::produced_version.major) {
      return refuse(status_code::unimplemented,
                    "the tensor is of version " + std::to_string(versioned_->version.major) + "." +
                        std::to_string(versioned_->version.minor) + "; expected " +
                        std::to_string(dlpack::produced_version.major) +
                        ".x: ask the producer for that with max_version");
    }
    return memory::describe(versioned_->tensor, (versioned_->flags & dlpack::flag_read_only) != 0);
  }
  if (unversioned_ != nullptr) return memory::describe(unversioned_->tensor, false);
  return refuse(status_code::failed_precondition, "there is no tensor");
}

}  // namespace jaxbridge::memory

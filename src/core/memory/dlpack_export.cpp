// SPDX-License-Identifier: Apache-2.0
#include "core/memory/dlpack_export.hpp"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <new>
#include <string>
#include <type_traits>

namespace jaxbridge::memory {
namespace {

namespace dlpack = abi::dlpack;

// The tensor, what its deleter needs, and after them shape and strides: one allocation.
template <class Managed>
struct block {
  Managed managed;
  void* owner;
  void (*release)(void* owner) noexcept;

  [[nodiscard]] std::int64_t* extents() noexcept {
    return reinterpret_cast<std::int64_t*>(this + 1);
  }
};
static_assert(alignof(block<dlpack::managed_tensor>) >= alignof(std::int64_t));
static_assert(alignof(block<dlpack::managed_tensor_versioned>) >= alignof(std::int64_t));

template <class Managed>
void free_block(Managed* self) noexcept {
  static_assert(std::is_standard_layout_v<block<Managed>> &&
                std::is_trivially_destructible_v<block<Managed>>);
  if (self == nullptr) return;
  auto* const whole = static_cast<block<Managed>*>(self->manager_ctx);
  if (whole->release != nullptr) whole->release(whole->owner);
  ::operator delete(whole);
}

status check(const dlpack_source& source) noexcept {
  if (dlpack_code(source.dtype) == JAXBRIDGE_NO_DLPACK) {
    return {status_code::unimplemented, "DLPack has no element type " +
                                            std::string(name(source.dtype)) +
                                            "; cast the array to a wider one before the call"};
  }
  if (source.shape.size() > std::size_t{std::numeric_limits<std::int32_t>::max()}) {
    return {status_code::invalid_argument,
            "DLPack has no rank " + std::to_string(source.shape.size())};
  }
  for (const std::int64_t extent : source.shape) {
    if (extent < 0) {
      return {status_code::invalid_argument,
              "DLPack export: extent " + std::to_string(extent) + ", expected 0 or more"};
    }
  }
  const auto bytes = static_cast<std::int64_t>(item_size(source.dtype));
  for (const std::int64_t stride : source.strides) {
    if (bytes == 0 || stride % bytes != 0) {
      return {status_code::unimplemented,
              "DLPack counts strides in elements, and a stride of " + std::to_string(stride) +
                  " bytes is no whole number of " + std::string(name(source.dtype)) +
                  "; make a dense copy first"};
    }
  }
  return {};
}

// The source's strides, in elements; else compact row-major ones of `shape`, true for every axis,
// also where it has length 1; an axis of length 0 counts as 1. False where they do not fit.
bool fill_strides(const dlpack_source& source, std::int64_t* strides) noexcept {
  const std::span<const std::int64_t> shape = source.shape;
  if (!source.strides.empty()) {
    // check() has refused what has less than a byte.
    const auto bytes =
        std::max<std::int64_t>(static_cast<std::int64_t>(item_size(source.dtype)), 1);
    for (std::size_t axis = 0; axis < shape.size(); ++axis) {
      strides[axis] = source.strides[axis] / bytes;
    }
    return true;
  }
  std::int64_t stride = 1;
  for (std::size_t axis = shape.size(); axis-- > 0;) {
    strides[axis] = stride;
    if (__builtin_mul_overflow(stride, std::max<std::int64_t>(shape[axis], 1), &stride)) {
      return false;
    }
  }
  return true;
}

template <class Managed>
result<Managed*> make(const dlpack_source& source) noexcept {
  if (status s = check(source); !s.ok()) return s;
  const std::size_t ndim = source.shape.size();
  void* const raw =
      ::operator new(sizeof(block<Managed>) + 2 * ndim * sizeof(std::int64_t), std::nothrow);
  if (raw == nullptr) {
    return status(status_code::resource_exhausted, "DLPack export: no memory for the tensor");
  }
  auto* const whole = new (raw) block<Managed>{{}, source.owner, source.release};
  std::int64_t* const shape = whole->extents();
  std::int64_t* const strides = shape + ndim;
  std::copy(source.shape.begin(), source.shape.end(), shape);
  if (!fill_strides(source, strides)) {
    ::operator delete(raw);
    return status(status_code::invalid_argument,
                  "DLPack export: the shape has more elements than an address can count");
  }
  const bool empty = std::find(shape, strides, 0) != strides;

  whole->managed.manager_ctx = whole;
  whole->managed.deleter = &free_block<Managed>;
  dlpack::tensor& t = whole->managed.tensor;
  t.data = empty ? nullptr : source.data;
  t.device = source.device;
  t.ndim = static_cast<std::int32_t>(ndim);
  t.dtype = {dlpack_code(source.dtype), static_cast<std::uint8_t>(bit_width(source.dtype)), 1};
  t.shape = ndim == 0 ? nullptr : shape;
  t.strides = ndim == 0 ? nullptr : strides;
  t.byte_offset = 0;
  return &whole->managed;
}

}  // namespace

result<dlpack::managed_tensor_versioned*> export_versioned(const dlpack_source& source) noexcept {
  result<dlpack::managed_tensor_versioned*> made = make<dlpack::managed_tensor_versioned>(source);
  if (!made.ok()) return made;
  made.value()->version = dlpack::produced_version;
  made.value()->flags = (source.readonly ? dlpack::flag_read_only : 0) |
                        (source.is_copied ? dlpack::flag_is_copied : 0);
  return made;
}

result<dlpack::managed_tensor*> export_unversioned(const dlpack_source& source) noexcept {
  return make<dlpack::managed_tensor>(source);
}

}  // namespace jaxbridge::memory

// SPDX-License-Identifier: Apache-2.0
// DLPack's C ABI: how array libraries hand memory to one another.
//
// These are our own declarations of the part that is used. tests/compile/abi_dlpack.cpp holds them
// against the standard and against every copy of its header that is installed.
#pragma once

#include <cstddef>
#include <cstdint>

namespace jaxbridge {
inline namespace v1 {
namespace abi::dlpack {

/// A consumer that meets another major version may call the deleter and touch nothing else. A newer
/// minor version only adds enumerators and promises.
struct version {
  std::uint32_t major;
  std::uint32_t minor;
};

/// What our tensors follow: 1.2 promises strides, which may be null in older ones.
inline constexpr version produced_version{1, 2};

/// Fixed underlying type: a newer producer sends values that are not listed here.
enum device_type : std::int32_t {
  device_cpu = 1,
  device_cuda = 2,
  device_cuda_host = 3,      // pinned
  device_cuda_managed = 13,  // migrates between host and device
};

struct device {
  device_type type;
  std::int32_t id;  // 0 for memory of the host, pinned and managed memory
};

/// The kind of number. jaxbridge/dtype.hpp has the codes of our element types.
enum type_code : std::uint8_t {
  code_int = 0,
  code_uint = 1,
  code_float = 2,
  code_opaque_handle = 3,
  code_bfloat = 4,
  code_complex = 5,
  code_bool = 6,
  code_float8_e3m4 = 7,
  code_float8_e4m3 = 8,
  code_float8_e4m3b11fnuz = 9,
  code_float8_e4m3fn = 10,
  code_float8_e4m3fnuz = 11,
  code_float8_e5m2 = 12,
  code_float8_e5m2fnuz = 13,
  code_float8_e8m0fnu = 14,
  code_float6_e2m3fn = 15,
  code_float6_e3m2fn = 16,
  code_float4_e2m1fn = 17,
};

struct data_type {
  std::uint8_t code;  // a type_code; a newer producer sends others
  std::uint8_t bits;  // of one number; complex: of both parts
  std::uint16_t lanes;
};

/// Memory, not owned. Null `strides` mean compact row-major, from producers before 1.2.
struct tensor {
  void* data;  // null where there are no elements
  dlpack::device device;
  std::int32_t ndim;
  data_type dtype;
  std::int64_t* shape;    // null only where ndim is 0
  std::int64_t* strides;  // in elements
  std::uint64_t byte_offset;
};

/// Before 1.0: capsule "dltensor". Whoever consumes it calls `deleter`, which may be null, once. It
/// cannot say that the memory is read-only.
struct managed_tensor {
  dlpack::tensor tensor;
  void* manager_ctx;
  void (*deleter)(managed_tensor* self);
};

inline constexpr std::uint64_t flag_read_only = 1U << 0;
/// The consumer is the only owner.
inline constexpr std::uint64_t flag_is_copied = 1U << 1;
/// Elements smaller than a byte take a byte each, instead of being packed.
inline constexpr std::uint64_t flag_is_subbyte_padded = 1U << 2;

/// Since 1.0: capsule "dltensor_versioned". Fields up to `flags` stay where they are in every major
/// version, so that the deleter can always be called.
struct managed_tensor_versioned {
  dlpack::version version;
  void* manager_ctx;
  void (*deleter)(managed_tensor_versioned* self);
  std::uint64_t flags;
  dlpack::tensor tensor;
};

}  // namespace abi::dlpack
}  // namespace v1
}  // namespace jaxbridge

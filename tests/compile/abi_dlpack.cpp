// SPDX-License-Identifier: Apache-2.0
// Our declarations of DLPack against the standard's sizes, and against one copy of its header where
// one is named. tests/python/test_dlpack_headers.py names each that is installed.
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "jaxbridge/abi/dlpack.hpp"
#include "jaxbridge/dtype.hpp"

#if defined(JAXBRIDGE_DLPACK_HEADER)
#include JAXBRIDGE_DLPACK_HEADER
#endif

namespace {

namespace dlpack = jaxbridge::abi::dlpack;

// The standard, on 64-bit platforms.
static_assert(sizeof(void*) == 8);
#define AT(type, field, offset) static_assert(offsetof(type, field) == (offset))

static_assert(sizeof(dlpack::version) == 8);
AT(dlpack::version, major, 0);
AT(dlpack::version, minor, 4);

static_assert(sizeof(dlpack::device) == 8);
AT(dlpack::device, type, 0);
AT(dlpack::device, id, 4);

static_assert(sizeof(dlpack::data_type) == 4);
AT(dlpack::data_type, code, 0);
AT(dlpack::data_type, bits, 1);
AT(dlpack::data_type, lanes, 2);

static_assert(sizeof(dlpack::tensor) == 48);
AT(dlpack::tensor, data, 0);
AT(dlpack::tensor, device, 8);
AT(dlpack::tensor, ndim, 16);
AT(dlpack::tensor, dtype, 20);
AT(dlpack::tensor, shape, 24);
AT(dlpack::tensor, strides, 32);
AT(dlpack::tensor, byte_offset, 40);

static_assert(sizeof(dlpack::managed_tensor) == 64);
AT(dlpack::managed_tensor, tensor, 0);
AT(dlpack::managed_tensor, manager_ctx, 48);
AT(dlpack::managed_tensor, deleter, 56);

static_assert(sizeof(dlpack::managed_tensor_versioned) == 80);
AT(dlpack::managed_tensor_versioned, version, 0);
AT(dlpack::managed_tensor_versioned, manager_ctx, 8);
AT(dlpack::managed_tensor_versioned, deleter, 16);
AT(dlpack::managed_tensor_versioned, flags, 24);
AT(dlpack::managed_tensor_versioned, tensor, 32);

static_assert(std::is_standard_layout_v<dlpack::managed_tensor> &&
              std::is_trivial_v<dlpack::managed_tensor>);
static_assert(std::is_standard_layout_v<dlpack::managed_tensor_versioned> &&
              std::is_trivial_v<dlpack::managed_tensor_versioned>);

static_assert(dlpack::device_cpu == 1 && dlpack::device_cuda == 2 &&
              dlpack::device_cuda_host == 3 && dlpack::device_cuda_managed == 13);
static_assert(dlpack::flag_read_only == 1 && dlpack::flag_is_copied == 2 &&
              dlpack::flag_is_subbyte_padded == 4);

// The table of element types says the same.
#define CODE(type, value) static_assert(jaxbridge::dlpack_code(jaxbridge::dtype::type) == (value))
CODE(bool_, dlpack::code_bool);
CODE(int8, dlpack::code_int);
CODE(int64, dlpack::code_int);
CODE(uint8, dlpack::code_uint);
CODE(uint64, dlpack::code_uint);
CODE(float16, dlpack::code_float);
CODE(float64, dlpack::code_float);
CODE(bfloat16, dlpack::code_bfloat);
CODE(complex64, dlpack::code_complex);
CODE(complex128, dlpack::code_complex);
CODE(float8_e3m4, dlpack::code_float8_e3m4);
CODE(float8_e4m3, dlpack::code_float8_e4m3);
CODE(float8_e4m3b11fnuz, dlpack::code_float8_e4m3b11fnuz);
CODE(float8_e4m3fn, dlpack::code_float8_e4m3fn);
CODE(float8_e4m3fnuz, dlpack::code_float8_e4m3fnuz);
CODE(float8_e5m2, dlpack::code_float8_e5m2);
CODE(float8_e5m2fnuz, dlpack::code_float8_e5m2fnuz);
CODE(float8_e8m0fnu, dlpack::code_float8_e8m0fnu);
CODE(float4_e2m1fn, dlpack::code_float4_e2m1fn);

#if defined(JAXBRIDGE_DLPACK_HEADER)

// A field of ours lies where theirs does and is as large.
#define FIELD(ours, our_field, theirs, their_field)                           \
  static_assert(offsetof(ours, our_field) == offsetof(theirs, their_field) && \
                sizeof(ours::our_field) == sizeof(theirs::their_field))
#define SAME_FIELD(ours, theirs, field) FIELD(ours, field, theirs, field)
#define WHOLE(ours, theirs) \
  static_assert(sizeof(ours) == sizeof(theirs) && alignof(ours) == alignof(theirs))
#define VALUE(ours, theirs) \
  static_assert(static_cast<std::uint64_t>(ours) == static_cast<std::uint64_t>(theirs))

static_assert(DLPACK_MAJOR_VERSION == dlpack::produced_version.major);

WHOLE(dlpack::version, DLPackVersion);
SAME_FIELD(dlpack::version, DLPackVersion, major);
SAME_FIELD(dlpack::version, DLPackVersion, minor);

WHOLE(dlpack::device, DLDevice);
FIELD(dlpack::device, type, DLDevice, device_type);
FIELD(dlpack::device, id, DLDevice, device_id);

WHOLE(dlpack::data_type, DLDataType);
SAME_FIELD(dlpack::data_type, DLDataType, code);
SAME_FIELD(dlpack::data_type, DLDataType, bits);
SAME_FIELD(dlpack::data_type, DLDataType, lanes);

WHOLE(dlpack::tensor, DLTensor);
SAME_FIELD(dlpack::tensor, DLTensor, data);
SAME_FIELD(dlpack::tensor, DLTensor, device);
SAME_FIELD(dlpack::tensor, DLTensor, ndim);
SAME_FIELD(dlpack::tensor, DLTensor, dtype);
SAME_FIELD(dlpack::tensor, DLTensor, shape);
SAME_FIELD(dlpack::tensor, DLTensor, strides);
SAME_FIELD(dlpack::tensor, DLTensor, byte_offset);

WHOLE(dlpack::managed_tensor, DLManagedTensor);
FIELD(dlpack::managed_tensor, tensor, DLManagedTensor, dl_tensor);
SAME_FIELD(dlpack::managed_tensor, DLManagedTensor, manager_ctx);
SAME_FIELD(dlpack::managed_tensor, DLManagedTensor, deleter);

WHOLE(dlpack::managed_tensor_versioned, DLManagedTensorVersioned);
SAME_FIELD(dlpack::managed_tensor_versioned, DLManagedTensorVersioned, version);
SAME_FIELD(dlpack::managed_tensor_versioned, DLManagedTensorVersioned, manager_ctx);
SAME_FIELD(dlpack::managed_tensor_versioned, DLManagedTensorVersioned, deleter);
SAME_FIELD(dlpack::managed_tensor_versioned, DLManagedTensorVersioned, flags);
FIELD(dlpack::managed_tensor_versioned, tensor, DLManagedTensorVersioned, dl_tensor);

VALUE(dlpack::device_cpu, kDLCPU);
VALUE(dlpack::device_cuda, kDLCUDA);
VALUE(dlpack::device_cuda_host, kDLCUDAHost);
VALUE(dlpack::device_cuda_managed, kDLCUDAManaged);
VALUE(dlpack::flag_read_only, DLPACK_FLAG_BITMASK_READ_ONLY);
VALUE(dlpack::flag_is_copied, DLPACK_FLAG_BITMASK_IS_COPIED);
VALUE(dlpack::code_int, kDLInt);
VALUE(dlpack::code_uint, kDLUInt);
VALUE(dlpack::code_float, kDLFloat);
VALUE(dlpack::code_opaque_handle, kDLOpaqueHandle);
VALUE(dlpack::code_bfloat, kDLBfloat);
VALUE(dlpack::code_complex, kDLComplex);
VALUE(dlpack::code_bool, kDLBool);
#if DLPACK_MINOR_VERSION >= 1
VALUE(dlpack::flag_is_subbyte_padded, DLPACK_FLAG_BITMASK_IS_SUBBYTE_TYPE_PADDED);
VALUE(dlpack::code_float8_e3m4, kDLFloat8_e3m4);
VALUE(dlpack::code_float8_e4m3, kDLFloat8_e4m3);
VALUE(dlpack::code_float8_e4m3b11fnuz, kDLFloat8_e4m3b11fnuz);
VALUE(dlpack::code_float8_e4m3fn, kDLFloat8_e4m3fn);
VALUE(dlpack::code_float8_e4m3fnuz, kDLFloat8_e4m3fnuz);
VALUE(dlpack::code_float8_e5m2, kDLFloat8_e5m2);
VALUE(dlpack::code_float8_e5m2fnuz, kDLFloat8_e5m2fnuz);
VALUE(dlpack::code_float8_e8m0fnu, kDLFloat8_e8m0fnu);
VALUE(dlpack::code_float6_e2m3fn, kDLFloat6_e2m3fn);
VALUE(dlpack::code_float6_e3m2fn, kDLFloat6_e3m2fn);
VALUE(dlpack::code_float4_e2m1fn, kDLFloat4_e2m1fn);
#endif

#endif  // JAXBRIDGE_DLPACK_HEADER

}  // namespace

// SPDX-License-Identifier: Apache-2.0
// Our declarations of XLA's FFI against the header of one jaxlib. Built against the oldest and the
// newest supported one.
#include <xla/ffi/api/c_api.h>

#include <cstddef>
#include <type_traits>

#include "jaxbridge/abi/xla_ffi.hpp"
#include "jaxbridge/dtype.hpp"
#include "jaxbridge/status.hpp"

namespace {

namespace ffi = jaxbridge::abi::xla_ffi;

// What was renamed, by the minor version that has the new name first. Layouts stayed. The macro is
// the header's own, so a renamed thing that is not listed here fails to compile.
//   0.2  TypeId_Register -> Type_Register
//   0.4  ExecutionContext_Get -> InvokeContext_Get; Extension_Base -> InternalExtension;
//        Error_GetMessage -> Error_GetDetails, and `errc` after the fields of the former
#if XLA_FFI_API_MINOR >= 2
#define RENAMED_TYPE_REGISTER XLA_FFI_Type_Register
#else
#define RENAMED_TYPE_REGISTER XLA_FFI_TypeId_Register
#endif
#if XLA_FFI_API_MINOR >= 4
#define RENAMED_CONTEXT_GET XLA_FFI_InvokeContext_Get
#define RENAMED_ERROR_GET_MESSAGE XLA_FFI_Error_GetDetails
using renamed_error_get_message_args = XLA_FFI_Error_GetDetails_Args;
using renamed_extension = XLA_FFI_InternalExtension;
#else
#define RENAMED_CONTEXT_GET XLA_FFI_ExecutionContext_Get
#define RENAMED_ERROR_GET_MESSAGE XLA_FFI_Error_GetMessage
using renamed_error_get_message_args = XLA_FFI_Error_GetMessage_Args;
using renamed_extension = XLA_FFI_Extension_Base;
#endif

// Versions. A newer header fails here, and asks for a look at what it changed.
static_assert(XLA_FFI_API_MAJOR == ffi::api_major);
static_assert(XLA_FFI_API_MINOR >= ffi::api_minor_oldest);
static_assert(XLA_FFI_API_MINOR <= ffi::api_minor_newest_checked);
#if defined(JAXBRIDGE_XLA_OLD)
static_assert(XLA_FFI_API_MINOR == ffi::api_minor_oldest);
#elif defined(JAXBRIDGE_XLA_NEW)
static_assert(XLA_FFI_API_MINOR == ffi::api_minor_newest_checked);
#endif

// A field of ours lies where XLA's does and is as large. Pointers to XLA's types differ in type.
#define FIELD(ours, our_field, theirs, their_field)                           \
  static_assert(offsetof(ours, our_field) == offsetof(theirs, their_field) && \
                sizeof(ours::our_field) == sizeof(theirs::their_field) &&     \
                std::is_pointer_v<decltype(ours::our_field)> ==               \
                    std::is_pointer_v<decltype(theirs::their_field)>)
#define SAME_FIELD(ours, theirs, field) FIELD(ours, field, theirs, field)
// The struct is all of XLA's.
#define WHOLE(ours, theirs) \
  static_assert(sizeof(ours) == sizeof(theirs) && alignof(ours) == alignof(theirs))
// The struct is the beginning of XLA's.
#define PREFIX(ours, theirs) \
  static_assert(sizeof(ours) <= sizeof(theirs) && alignof(ours) == alignof(theirs))
#define HEAD(ours, theirs)               \
  SAME_FIELD(ours, theirs, struct_size); \
  SAME_FIELD(ours, theirs, extension_start)

WHOLE(ffi::extension_base, renamed_extension);
SAME_FIELD(ffi::extension_base, renamed_extension, struct_size);
SAME_FIELD(ffi::extension_base, renamed_extension, type);
SAME_FIELD(ffi::extension_base, renamed_extension, next);

WHOLE(ffi::api_version, XLA_FFI_Api_Version);
HEAD(ffi::api_version, XLA_FFI_Api_Version);
SAME_FIELD(ffi::api_version, XLA_FFI_Api_Version, major_version);
SAME_FIELD(ffi::api_version, XLA_FFI_Api_Version, minor_version);

WHOLE(ffi::error_create_args, XLA_FFI_Error_Create_Args);
HEAD(ffi::error_create_args, XLA_FFI_Error_Create_Args);
SAME_FIELD(ffi::error_create_args, XLA_FFI_Error_Create_Args, message);
FIELD(ffi::error_create_args, code, XLA_FFI_Error_Create_Args, errc);
static_assert(sizeof(ffi::error_create_args) >= XLA_FFI_Error_Create_Args_STRUCT_SIZE);

PREFIX(ffi::error_get_message_args, renamed_error_get_message_args);
HEAD(ffi::error_get_message_args, renamed_error_get_message_args);
FIELD(ffi::error_get_message_args, error_, renamed_error_get_message_args, error);
SAME_FIELD(ffi::error_get_message_args, renamed_error_get_message_args, message);

WHOLE(ffi::error_destroy_args, XLA_FFI_Error_Destroy_Args);
HEAD(ffi::error_destroy_args, XLA_FFI_Error_Destroy_Args);
FIELD(ffi::error_destroy_args, error_, XLA_FFI_Error_Destroy_Args, error);

WHOLE(ffi::buffer, XLA_FFI_Buffer);
HEAD(ffi::buffer, XLA_FFI_Buffer);
SAME_FIELD(ffi::buffer, XLA_FFI_Buffer, dtype);
SAME_FIELD(ffi::buffer, XLA_FFI_Buffer, data);
SAME_FIELD(ffi::buffer, XLA_FFI_Buffer, rank);
SAME_FIELD(ffi::buffer, XLA_FFI_Buffer, dims);
static_assert(sizeof(ffi::buffer) <= XLA_FFI_Buffer_STRUCT_SIZE, "decode asks for so much");

WHOLE(ffi::byte_span, XLA_FFI_ByteSpan);
SAME_FIELD(ffi::byte_span, XLA_FFI_ByteSpan, ptr);
SAME_FIELD(ffi::byte_span, XLA_FFI_ByteSpan, len);

WHOLE(ffi::scalar, XLA_FFI_Scalar);
SAME_FIELD(ffi::scalar, XLA_FFI_Scalar, dtype);
SAME_FIELD(ffi::scalar, XLA_FFI_Scalar, value);

WHOLE(ffi::array, XLA_FFI_Array);
SAME_FIELD(ffi::array, XLA_FFI_Array, dtype);
SAME_FIELD(ffi::array, XLA_FFI_Array, size);
SAME_FIELD(ffi::array, XLA_FFI_Array, data);

WHOLE(ffi::arguments, XLA_FFI_Args);
HEAD(ffi::arguments, XLA_FFI_Args);
SAME_FIELD(ffi::arguments, XLA_FFI_Args, size);
SAME_FIELD(ffi::arguments, XLA_FFI_Args, types);
SAME_FIELD(ffi::arguments, XLA_FFI_Args, args);
static_assert(sizeof(ffi::arguments) <= XLA_FFI_Args_STRUCT_SIZE, "decode asks for so much");

WHOLE(ffi::returns, XLA_FFI_Rets);
HEAD(ffi::returns, XLA_FFI_Rets);
SAME_FIELD(ffi::returns, XLA_FFI_Rets, size);
SAME_FIELD(ffi::returns, XLA_FFI_Rets, types);
SAME_FIELD(ffi::returns, XLA_FFI_Rets, rets);
static_assert(sizeof(ffi::returns) <= XLA_FFI_Rets_STRUCT_SIZE, "decode asks for so much");

WHOLE(ffi::attributes, XLA_FFI_Attrs);
HEAD(ffi::attributes, XLA_FFI_Attrs);
SAME_FIELD(ffi::attributes, XLA_FFI_Attrs, size);
SAME_FIELD(ffi::attributes, XLA_FFI_Attrs, types);
SAME_FIELD(ffi::attributes, XLA_FFI_Attrs, names);
SAME_FIELD(ffi::attributes, XLA_FFI_Attrs, attrs);
static_assert(sizeof(ffi::attributes) <= XLA_FFI_Attrs_STRUCT_SIZE, "decode asks for so much");

WHOLE(ffi::call_frame, XLA_FFI_CallFrame);
HEAD(ffi::call_frame, XLA_FFI_CallFrame);
SAME_FIELD(ffi::call_frame, XLA_FFI_CallFrame, api);
SAME_FIELD(ffi::call_frame, XLA_FFI_CallFrame, ctx);
SAME_FIELD(ffi::call_frame, XLA_FFI_CallFrame, stage);
SAME_FIELD(ffi::call_frame, XLA_FFI_CallFrame, args);
SAME_FIELD(ffi::call_frame, XLA_FFI_CallFrame, rets);
SAME_FIELD(ffi::call_frame, XLA_FFI_CallFrame, attrs);
SAME_FIELD(ffi::call_frame, XLA_FFI_CallFrame, future);
static_assert(offsetof(ffi::call_frame, future) <= XLA_FFI_CallFrame_STRUCT_SIZE,
              "decode asks for so much");

WHOLE(ffi::stream_get_args, XLA_FFI_Stream_Get_Args);
HEAD(ffi::stream_get_args, XLA_FFI_Stream_Get_Args);
SAME_FIELD(ffi::stream_get_args, XLA_FFI_Stream_Get_Args, ctx);
SAME_FIELD(ffi::stream_get_args, XLA_FFI_Stream_Get_Args, stream);

WHOLE(ffi::device_memory_allocate_args, XLA_FFI_DeviceMemory_Allocate_Args);
HEAD(ffi::device_memory_allocate_args, XLA_FFI_DeviceMemory_Allocate_Args);
SAME_FIELD(ffi::device_memory_allocate_args, XLA_FFI_DeviceMemory_Allocate_Args, ctx);
SAME_FIELD(ffi::device_memory_allocate_args, XLA_FFI_DeviceMemory_Allocate_Args, size);
SAME_FIELD(ffi::device_memory_allocate_args, XLA_FFI_DeviceMemory_Allocate_Args, alignment);
SAME_FIELD(ffi::device_memory_allocate_args, XLA_FFI_DeviceMemory_Allocate_Args, data);

WHOLE(ffi::device_memory_free_args, XLA_FFI_DeviceMemory_Free_Args);
HEAD(ffi::device_memory_free_args, XLA_FFI_DeviceMemory_Free_Args);
SAME_FIELD(ffi::device_memory_free_args, XLA_FFI_DeviceMemory_Free_Args, ctx);
SAME_FIELD(ffi::device_memory_free_args, XLA_FFI_DeviceMemory_Free_Args, size);
SAME_FIELD(ffi::device_memory_free_args, XLA_FFI_DeviceMemory_Free_Args, data);

WHOLE(ffi::thread_pool_schedule_args, XLA_FFI_ThreadPool_Schedule_Args);
HEAD(ffi::thread_pool_schedule_args, XLA_FFI_ThreadPool_Schedule_Args);
SAME_FIELD(ffi::thread_pool_schedule_args, XLA_FFI_ThreadPool_Schedule_Args, ctx);
SAME_FIELD(ffi::thread_pool_schedule_args, XLA_FFI_ThreadPool_Schedule_Args, task);
SAME_FIELD(ffi::thread_pool_schedule_args, XLA_FFI_ThreadPool_Schedule_Args, data);
static_assert(std::is_same_v<ffi::task, XLA_FFI_Task>);

WHOLE(ffi::thread_pool_num_threads_args, XLA_FFI_ThreadPool_NumThreads_Args);
HEAD(ffi::thread_pool_num_threads_args, XLA_FFI_ThreadPool_NumThreads_Args);
SAME_FIELD(ffi::thread_pool_num_threads_args, XLA_FFI_ThreadPool_NumThreads_Args, ctx);
SAME_FIELD(ffi::thread_pool_num_threads_args, XLA_FFI_ThreadPool_NumThreads_Args, num_threads);

WHOLE(ffi::device_ordinal_get_args, XLA_FFI_DeviceOrdinal_Get_Args);
HEAD(ffi::device_ordinal_get_args, XLA_FFI_DeviceOrdinal_Get_Args);
SAME_FIELD(ffi::device_ordinal_get_args, XLA_FFI_DeviceOrdinal_Get_Args, ctx);
SAME_FIELD(ffi::device_ordinal_get_args, XLA_FFI_DeviceOrdinal_Get_Args, device_ordinal);

PREFIX(ffi::metadata, XLA_FFI_Metadata);
SAME_FIELD(ffi::metadata, XLA_FFI_Metadata, struct_size);
SAME_FIELD(ffi::metadata, XLA_FFI_Metadata, api_version);
SAME_FIELD(ffi::metadata, XLA_FFI_Metadata, traits);
static_assert(offsetof(ffi::metadata, traits) + sizeof(ffi::metadata::traits) <=
                  XLA_FFI_Metadata_STRUCT_SIZE,
              "the metadata answer asks for so much");

WHOLE(ffi::metadata_extension, XLA_FFI_Metadata_Extension);
FIELD(ffi::metadata_extension, base, XLA_FFI_Metadata_Extension, extension_base);
SAME_FIELD(ffi::metadata_extension, XLA_FFI_Metadata_Extension, metadata);
static_assert(sizeof(ffi::metadata_extension) <= XLA_FFI_Metadata_Extension_STRUCT_SIZE,
              "the metadata answer asks for so much");

// The table. Every slot is held, also those that only keep a place.
PREFIX(ffi::api, XLA_FFI_Api);
HEAD(ffi::api, XLA_FFI_Api);
SAME_FIELD(ffi::api, XLA_FFI_Api, api_version);
FIELD(ffi::api, internal, XLA_FFI_Api, internal_api);
FIELD(ffi::api, error_create, XLA_FFI_Api, XLA_FFI_Error_Create);
FIELD(ffi::api, error_get_message, XLA_FFI_Api, RENAMED_ERROR_GET_MESSAGE);
FIELD(ffi::api, error_destroy, XLA_FFI_Api, XLA_FFI_Error_Destroy);
FIELD(ffi::api, handler_register, XLA_FFI_Api, XLA_FFI_Handler_Register);
FIELD(ffi::api, stream_get, XLA_FFI_Api, XLA_FFI_Stream_Get);
FIELD(ffi::api, type_register, XLA_FFI_Api, RENAMED_TYPE_REGISTER);
FIELD(ffi::api, context_get, XLA_FFI_Api, RENAMED_CONTEXT_GET);
FIELD(ffi::api, state_set, XLA_FFI_Api, XLA_FFI_State_Set);
FIELD(ffi::api, state_get, XLA_FFI_Api, XLA_FFI_State_Get);
FIELD(ffi::api, device_memory_allocate, XLA_FFI_Api, XLA_FFI_DeviceMemory_Allocate);
FIELD(ffi::api, device_memory_free, XLA_FFI_Api, XLA_FFI_DeviceMemory_Free);
FIELD(ffi::api, thread_pool_schedule, XLA_FFI_Api, XLA_FFI_ThreadPool_Schedule);
FIELD(ffi::api, thread_pool_num_threads, XLA_FFI_Api, XLA_FFI_ThreadPool_NumThreads);
FIELD(ffi::api, future_create, XLA_FFI_Api, XLA_FFI_Future_Create);
FIELD(ffi::api, future_set_available, XLA_FFI_Api, XLA_FFI_Future_SetAvailable);
FIELD(ffi::api, future_set_error, XLA_FFI_Api, XLA_FFI_Future_SetError);
FIELD(ffi::api, run_id_get, XLA_FFI_Api, XLA_FFI_RunId_Get);
FIELD(ffi::api, device_ordinal_get, XLA_FFI_Api, XLA_FFI_DeviceOrdinal_Get);

// Enumerations: as large as XLA's, and with its values.
#define VALUE(ours, theirs) static_assert(static_cast<int>(ours) == static_cast<int>(theirs))

static_assert(sizeof(XLA_FFI_DataType) == sizeof(int) && sizeof(XLA_FFI_Error_Code) == sizeof(int));
static_assert(sizeof(ffi::argument_type) == sizeof(XLA_FFI_ArgType));
static_assert(sizeof(ffi::return_type) == sizeof(XLA_FFI_RetType));
static_assert(sizeof(ffi::attribute_type) == sizeof(XLA_FFI_AttrType));

VALUE(ffi::extension_metadata, XLA_FFI_Extension_Metadata);
VALUE(ffi::argument_buffer, XLA_FFI_ArgType_BUFFER);
VALUE(ffi::return_buffer, XLA_FFI_RetType_BUFFER);
VALUE(ffi::attribute_array, XLA_FFI_AttrType_ARRAY);
VALUE(ffi::attribute_dictionary, XLA_FFI_AttrType_DICTIONARY);
VALUE(ffi::attribute_scalar, XLA_FFI_AttrType_SCALAR);
VALUE(ffi::attribute_string, XLA_FFI_AttrType_STRING);
VALUE(ffi::stage_instantiate, XLA_FFI_ExecutionStage_INSTANTIATE);
VALUE(ffi::stage_prepare, XLA_FFI_ExecutionStage_PREPARE);
VALUE(ffi::stage_initialize, XLA_FFI_ExecutionStage_INITIALIZE);
VALUE(ffi::stage_execute, XLA_FFI_ExecutionStage_EXECUTE);
VALUE(ffi::trait_command_buffer_compatible, XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE);

// Written as a switch over XLA's enumeration: -Wswitch names an element type that we lack, and a
// name of ours that XLA lacks does not compile.
constexpr jaxbridge::dtype dtype_of_xla(XLA_FFI_DataType type) {
  using jaxbridge::dtype;
  switch (type) {
    case XLA_FFI_DataType_INVALID:
    case XLA_FFI_DataType_TOKEN:
      return dtype::invalid;
#define SAME(theirs, ours) \
  case theirs:             \
    return dtype::ours;
      SAME(XLA_FFI_DataType_PRED, bool_)
      SAME(XLA_FFI_DataType_S1, int1)
      SAME(XLA_FFI_DataType_S2, int2)
      SAME(XLA_FFI_DataType_S4, int4)
      SAME(XLA_FFI_DataType_S8, int8)
      SAME(XLA_FFI_DataType_S16, int16)
      SAME(XLA_FFI_DataType_S32, int32)
      SAME(XLA_FFI_DataType_S64, int64)
      SAME(XLA_FFI_DataType_U1, uint1)
      SAME(XLA_FFI_DataType_U2, uint2)
      SAME(XLA_FFI_DataType_U4, uint4)
      SAME(XLA_FFI_DataType_U8, uint8)
      SAME(XLA_FFI_DataType_U16, uint16)
      SAME(XLA_FFI_DataType_U32, uint32)
      SAME(XLA_FFI_DataType_U64, uint64)
      SAME(XLA_FFI_DataType_F16, float16)
      SAME(XLA_FFI_DataType_F32, float32)
      SAME(XLA_FFI_DataType_F64, float64)
      SAME(XLA_FFI_DataType_BF16, bfloat16)
      SAME(XLA_FFI_DataType_C64, complex64)
      SAME(XLA_FFI_DataType_C128, complex128)
      SAME(XLA_FFI_DataType_F8E5M2, float8_e5m2)
      SAME(XLA_FFI_DataType_F8E3M4, float8_e3m4)
      SAME(XLA_FFI_DataType_F8E4M3, float8_e4m3)
      SAME(XLA_FFI_DataType_F8E4M3FN, float8_e4m3fn)
      SAME(XLA_FFI_DataType_F8E4M3B11FNUZ, float8_e4m3b11fnuz)
      SAME(XLA_FFI_DataType_F8E5M2FNUZ, float8_e5m2fnuz)
      SAME(XLA_FFI_DataType_F8E4M3FNUZ, float8_e4m3fnuz)
      SAME(XLA_FFI_DataType_F4E2M1FN, float4_e2m1fn)
      SAME(XLA_FFI_DataType_F8E8M0FNU, float8_e8m0fnu)
#undef SAME
  }
  return dtype::invalid;
}

constexpr int known_element_types() {
  int count = 0;
  // XLA's enumeration has 6 bits; a constant expression may not leave them.
  for (int number = 0; number < 64; ++number) {
    const jaxbridge::dtype ours = jaxbridge::dtype_from_xla(number);
    if (dtype_of_xla(static_cast<XLA_FFI_DataType>(number)) != ours) return -number;
    if (ours != jaxbridge::dtype::invalid) ++count;
  }
  return count;
}
static_assert(known_element_types() == 30, "negative: the first number on which we differ");

VALUE(jaxbridge::status_code::ok, XLA_FFI_Error_Code_OK);
VALUE(jaxbridge::status_code::cancelled, XLA_FFI_Error_Code_CANCELLED);
VALUE(jaxbridge::status_code::unknown, XLA_FFI_Error_Code_UNKNOWN);
VALUE(jaxbridge::status_code::invalid_argument, XLA_FFI_Error_Code_INVALID_ARGUMENT);
VALUE(jaxbridge::status_code::deadline_exceeded, XLA_FFI_Error_Code_DEADLINE_EXCEEDED);
VALUE(jaxbridge::status_code::not_found, XLA_FFI_Error_Code_NOT_FOUND);
VALUE(jaxbridge::status_code::already_exists, XLA_FFI_Error_Code_ALREADY_EXISTS);
VALUE(jaxbridge::status_code::permission_denied, XLA_FFI_Error_Code_PERMISSION_DENIED);
VALUE(jaxbridge::status_code::resource_exhausted, XLA_FFI_Error_Code_RESOURCE_EXHAUSTED);
VALUE(jaxbridge::status_code::failed_precondition, XLA_FFI_Error_Code_FAILED_PRECONDITION);
VALUE(jaxbridge::status_code::aborted, XLA_FFI_Error_Code_ABORTED);
VALUE(jaxbridge::status_code::out_of_range, XLA_FFI_Error_Code_OUT_OF_RANGE);
VALUE(jaxbridge::status_code::unimplemented, XLA_FFI_Error_Code_UNIMPLEMENTED);
VALUE(jaxbridge::status_code::internal, XLA_FFI_Error_Code_INTERNAL);
VALUE(jaxbridge::status_code::unavailable, XLA_FFI_Error_Code_UNAVAILABLE);
VALUE(jaxbridge::status_code::data_loss, XLA_FFI_Error_Code_DATA_LOSS);
VALUE(jaxbridge::status_code::unauthenticated, XLA_FFI_Error_Code_UNAUTHENTICATED);

}  // namespace

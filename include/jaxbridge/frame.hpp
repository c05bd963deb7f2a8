// SPDX-License-Identifier: Apache-2.0
// XLA's call frame: read with every field checked first, and answered.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <span>
#include <string>
#include <utility>

#include "abi/xla_ffi.hpp"
#include "buffer.hpp"
#include "device.hpp"
#include "dtype.hpp"
#include "status.hpp"
#include "stream.hpp"

namespace jaxbridge {
inline namespace v1 {
namespace detail {

// No program has as many: a larger count is not one.
inline constexpr std::int64_t max_entries = std::int64_t{1} << 20;

inline status malformed(std::string what) {
  return {status_code::invalid_argument,
          "malformed XLA call frame: " + std::move(what) +
              "; this jaxlib does not speak the FFI version that jaxbridge was built for "
              "(run python -m jaxbridge)"};
}

/// Whether a buffer must have memory: shapes alone are asked for while a program is traced.
enum class memory : bool { needed, absent };

/// Reads an entry of a frame's operands or results. False where anything is out of the ordinary:
/// decode_buffer() says what.
inline bool read_buffer(const void* raw, int type, any_buffer& out,
                        memory with = memory::needed) noexcept {
  namespace ffi = abi::xla_ffi;
  if (type != ffi::argument_buffer || raw == nullptr) return false;
  const auto& buffer = *static_cast<const ffi::buffer*>(raw);
  const dtype t = dtype_from_xla(buffer.dtype);
  if (buffer.struct_size < sizeof(ffi::buffer) || t == dtype::invalid || buffer.rank < 0 ||
      (buffer.rank > 0 && buffer.dims == nullptr)) {
    return false;
  }
  const std::span<const std::int64_t> shape(buffer.dims, static_cast<std::size_t>(buffer.rank));
  std::size_t bits = bit_width(t);
  for (const std::int64_t extent : shape) {
    if (extent < 0 || __builtin_mul_overflow(bits, static_cast<std::size_t>(extent), &bits)) {
      return false;
    }
  }
  if (bits > std::numeric_limits<std::size_t>::max() / 2 ||
      (buffer.data == nullptr && bits != 0 && with == memory::needed)) {
    return false;
  }
  out = {buffer.data, t, shape};
  return true;
}

/// Reads entry `index` of a frame's operands or results (`kind` says which, for messages).
inline status decode_buffer(const void* raw, int type, const char* kind, std::int64_t index,
                            any_buffer& out, memory with = memory::needed) {
  namespace ffi = abi::xla_ffi;
  if (read_buffer(raw, type, out, with)) return {};
  const auto where = [&] { return std::string(kind) + " " + std::to_string(index); };
  if (type != ffi::argument_buffer || raw == nullptr) {
    return malformed(where() + " is not a buffer (type " + std::to_string(type) + ")");
  }
  const auto& buffer = *static_cast<const ffi::buffer*>(raw);
  if (buffer.struct_size < sizeof(ffi::buffer)) {
    return malformed(where() + " has struct_size " + std::to_string(buffer.struct_size) +
                     ", expected at least " + std::to_string(sizeof(ffi::buffer)));
  }
  out.dtype = dtype_from_xla(buffer.dtype);
  if (out.dtype == dtype::invalid) {
    return {status_code::unimplemented,
            where() + " has an element type that jaxbridge does not know (XLA's number " +
                std::to_string(buffer.dtype) + "); cast it before the call"};
  }
  if (buffer.rank < 0 || (buffer.rank > 0 && buffer.dims == nullptr)) {
    return malformed(where() + " has rank " + std::to_string(buffer.rank) +
                     (buffer.rank < 0 ? "" : " but no extents"));
  }
  out.shape = {buffer.dims, static_cast<std::size_t>(buffer.rank)};
  bool empty = false;
  for (const std::int64_t extent : out.shape) {
    if (extent < 0) return malformed(where() + " has extent " + std::to_string(extent));
    empty = empty || extent == 0;
  }
  if (!empty) {
    std::size_t bits = bit_width(out.dtype);
    for (const std::int64_t extent : out.shape) {
      if (__builtin_mul_overflow(bits, static_cast<std::size_t>(extent), &bits)) {
        bits = std::numeric_limits<std::size_t>::max();
        break;
      }
    }
    if (bits > std::numeric_limits<std::size_t>::max() / 2) {
      return malformed(where() + " is larger than the address space");
    }
    if (buffer.data == nullptr && with == memory::needed) {
      return malformed(where() + " has elements but no memory");
    }
  }
  out.data = buffer.data;
  return {};
}

/// Checks the head of a list of a frame: operands, results or attributes.
template <class List>
status check_list(const List& list, void** entries, const char* kind) {
  if (list.struct_size < sizeof(List)) {
    return malformed(std::string(kind) + " have struct_size " + std::to_string(list.struct_size) +
                     ", expected at least " + std::to_string(sizeof(List)));
  }
  if (list.size < 0 || list.size > max_entries) {
    return malformed(std::string(kind) + " have size " + std::to_string(list.size));
  }
  if (list.size > 0 && (entries == nullptr || list.types == nullptr)) {
    return malformed(std::string(kind) + " have size " + std::to_string(list.size) +
                     " but no entries");
  }
  return {};
}

/// Whether a frame's lists may be read. Where not, check_lists() says why.
inline bool has_lists(const abi::xla_ffi::call_frame& frame) noexcept {
  namespace ffi = abi::xla_ffi;
  const auto fits = [](const auto& list, void** entries) {
    return list.struct_size >= sizeof(list) && list.size >= 0 && list.size <= max_entries &&
           (list.size == 0 || (entries != nullptr && list.types != nullptr));
  };
  return frame.struct_size >= offsetof(ffi::call_frame, future) &&
         fits(frame.args, frame.args.args) && fits(frame.rets, frame.rets.rets) &&
         fits(frame.attrs, frame.attrs.attrs) &&
         (frame.attrs.size == 0 || frame.attrs.names != nullptr);
}

/// Checks the heads of all lists, so that their entries may be read.
inline status check_lists(const abi::xla_ffi::call_frame& frame) {
  namespace ffi = abi::xla_ffi;
  if (has_lists(frame)) return {};
  if (frame.struct_size < offsetof(ffi::call_frame, future)) {
    return malformed("struct_size " + std::to_string(frame.struct_size) + ", expected at least " +
                     std::to_string(offsetof(ffi::call_frame, future)));
  }
  if (status s = check_list(frame.args, frame.args.args, "operands"); !s.ok()) return s;
  if (status s = check_list(frame.rets, frame.rets.rets, "results"); !s.ok()) return s;
  if (status s = check_list(frame.attrs, frame.attrs.attrs, "attributes"); !s.ok()) return s;
  if (frame.attrs.size > 0 && frame.attrs.names == nullptr) {
    return malformed("attributes have no names");
  }
  return {};
}

/// The text of an error that a function of `api` returned; destroys the error.
inline std::string consume(const abi::xla_ffi::api& api, abi::xla_ffi::error* error) {
  namespace ffi = abi::xla_ffi;
  ffi::error_get_message_args get{sizeof(get), nullptr, error, nullptr};
  api.error_get_message(&get);
  std::string text = get.message == nullptr ? "no message" : get.message;
  ffi::error_destroy_args destroy{sizeof(destroy), nullptr, error};
  api.error_destroy(&destroy);
  return text;
}

/// Whether the runtime's functions of version 0.1 are there.
inline status check_api(const abi::xla_ffi::call_frame& frame) {
  namespace ffi = abi::xla_ffi;
  if (frame.api == nullptr ||
      !ffi::has_slot(frame.api->struct_size, offsetof(ffi::api, stream_get))) {
    return malformed("no table of functions");
  }
  return {};
}

/// The device of a call.
inline status locate_device(const abi::xla_ffi::call_frame& frame, platform where, device& out) {
  namespace ffi = abi::xla_ffi;
  out = {where, 0};
  if (!ffi::has_slot(frame.api->struct_size, offsetof(ffi::api, device_ordinal_get))) return {};
  ffi::device_ordinal_get_args get{sizeof(get), nullptr, frame.ctx, 0};
  if (ffi::error* error = frame.api->device_ordinal_get(&get); error != nullptr) {
    return {status_code::internal,
            "XLA names no device for this call: " + consume(*frame.api, error)};
  }
  out.ordinal = get.device_ordinal;
  return {};
}

/// The stream of a call; none on the CPU.
inline status locate_stream(const abi::xla_ffi::call_frame& frame, platform where,
                            stream_ref& out) {
  namespace ffi = abi::xla_ffi;
  out = {};
  if (where != platform::cuda) return {};
  ffi::stream_get_args get{sizeof(get), nullptr, frame.ctx, nullptr};
  if (ffi::error* error = frame.api->stream_get(&get); error != nullptr) {
    return {status_code::internal,
            "XLA gives no stream for this call: " + consume(*frame.api, error)};
  }
  out = stream_ref(get.stream);
  return {};
}

/// Device and stream of a call.
inline status locate(const abi::xla_ffi::call_frame& frame, platform where, device& on,
                     stream_ref& stream) {
  if (status s = check_api(frame); !s.ok()) return s;
  if (status s = locate_device(frame, where, on); !s.ok()) return s;
  return locate_stream(frame, where, stream);
}

/// `text` with a question mark for each byte that is no UTF-8, which Python would not take.
inline std::string as_utf8(std::string text) {
  for (std::size_t i = 0; i < text.size();) {
    const auto byte = [&text, i](std::size_t k) -> unsigned {
      return i + k < text.size() ? static_cast<unsigned char>(text[i + k]) : 0U;
    };
    const unsigned first = byte(0);
    const unsigned second = byte(1);
    const std::size_t size = first < 0x80                     ? 1
                             : first >= 0xc2 && first <= 0xdf ? 2
                             : first >= 0xe0 && first <= 0xef ? 3
                             : first >= 0xf0 && first <= 0xf4 ? 4
                                                              : 0;
    bool good = size > 0;
    for (std::size_t k = 1; k < size; ++k) good = good && (byte(k) & 0xc0) == 0x80;
    // What has a shorter form, halves of UTF-16's pairs, and what is no character's number.
    good = good && !(first == 0xe0 && second < 0xa0) && !(first == 0xed && second >= 0xa0) &&
           !(first == 0xf0 && second < 0x90) && !(first == 0xf4 && second >= 0x90);
    if (!good) text[i] = '?';
    i += good ? size : 1;
  }
  return text;
}

/// XLA's form of a status; null for success.
inline abi::xla_ffi::error* to_error(const abi::xla_ffi::call_frame& frame, const status& s) {
  namespace ffi = abi::xla_ffi;
  if (s.ok()) return nullptr;
  if (frame.api == nullptr ||
      !ffi::has_slot(frame.api->struct_size, offsetof(ffi::api, error_create))) {
    // Nobody can be told, and to return would pass for success: wrong results.
    std::fprintf(stderr, "jaxbridge: %s\n", s.message().c_str());
    std::abort();
  }
  const std::string message = as_utf8(s.message());
  ffi::error_create_args args{sizeof(args), nullptr, message.c_str(), static_cast<int>(s.code())};
  return frame.api->error_create(&args);
}

/// Where XLA asks what the handler is, the place of the answer; else null. It asks once for each
/// registration.
inline abi::xla_ffi::metadata* metadata_query(const abi::xla_ffi::call_frame& frame) noexcept {
  namespace ffi = abi::xla_ffi;
  for (ffi::extension_base* e = frame.extension_start; e != nullptr; e = e->next) {
    if (e->type == ffi::extension_metadata && e->struct_size >= sizeof(ffi::metadata_extension)) {
      ffi::metadata* out = reinterpret_cast<ffi::metadata_extension*>(e)->metadata;
      const std::size_t needed = offsetof(ffi::metadata, traits) + sizeof(out->traits);
      return out != nullptr && out->struct_size >= needed ? out : nullptr;
    }
  }
  return nullptr;
}

/// The minor FFI version of the runtime that asks; -1 where it does not say (0.1).
inline int runtime_minor_of(const abi::xla_ffi::call_frame& frame) noexcept {
  namespace ffi = abi::xla_ffi;
  const bool says = frame.api != nullptr && frame.api->struct_size >= offsetof(ffi::api, internal);
  return says ? frame.api->api_version.minor_version : -1;
}

/// Answers the query. A handler of a newer version than the runtime's own would be refused,
/// silently on CUDA, so the answer is the older of the two. Returns the minor version answered.
inline int answer_metadata(const abi::xla_ffi::call_frame& frame, abi::xla_ffi::metadata& out,
                           std::uint32_t traits) noexcept {
  namespace ffi = abi::xla_ffi;
  const int runtime = runtime_minor_of(frame);
  const int minor =
      runtime < 0 ? ffi::api_minor_oldest : std::min(runtime, ffi::api_minor_newest_checked);
  out.api_version.major_version = ffi::api_major;
  out.api_version.minor_version = minor;
  out.traits = traits;
  return minor;
}

}  // namespace detail
}  // namespace v1
}  // namespace jaxbridge

// SPDX-License-Identifier: Apache-2.0
#include "core/memory/array_interface.hpp"

#include <array>
#include <bit>
#include <string>
#include <utility>

namespace jaxbridge::memory {
namespace {

static_assert(std::endian::native == std::endian::little);

// Kind and size as the protocol writes them, without the byte order.
constexpr std::array<std::pair<std::string_view, dtype>, 14> known = {{
    {"b1", dtype::bool_},
    {"i1", dtype::int8},
    {"i2", dtype::int16},
    {"i4", dtype::int32},
    {"i8", dtype::int64},
    {"u1", dtype::uint8},
    {"u2", dtype::uint16},
    {"u4", dtype::uint32},
    {"u8", dtype::uint64},
    {"f2", dtype::float16},
    {"f4", dtype::float32},
    {"f8", dtype::float64},
    {"c8", dtype::complex64},
    {"c16", dtype::complex128},
}};

status refuse(status_code code, const std::string& what) {
  return {code, "array interface: " + what};
}

// For messages: what a producer sends may be anything.
std::string quoted(std::string_view text) {
  std::string out = "\"";
  for (const char c : text.substr(0, 32)) out += c >= ' ' && c <= '~' ? c : '?';
  return out + (text.size() > 32 ? "...\"" : "\"");
}

}  // namespace

result<dtype> parse_typestr(std::string_view text) {
  const auto wrong = [text](const char* why) {
    return refuse(status_code::unimplemented, "the typestr " + quoted(text) + why);
  };
  if (text.size() < 3) return wrong(" is too short; expected such as \"<f4\"");
  const char order = text.front();
  if (order != '<' && order != '>' && order != '|' && order != '=') {
    return wrong(" has no byte order; expected such as \"<f4\"");
  }
  const std::string_view rest = text.substr(1);
  for (const auto& [code, type] : known) {
    if (rest != code) continue;
    if (order == '>' && item_size(type) > 1) {
      return wrong(
          " has the other byte order; convert it, in NumPy with "
          "x.astype(x.dtype.newbyteorder(\"=\"))");
    }
    if (order == '|' && item_size(type) > 1) return wrong(" does not say its byte order");
    return type;
  }
  if (rest.front() == 'V') {
    return wrong(
        " is raw bytes or a structure: an array interface has no text for bfloat16 and float8; "
        "export the array by DLPack, or take one field of it");
  }
  return wrong(" is no element type that JAX has; convert it first");
}

result<array> describe(const array_interface& fields, memory_kind kind, int ordinal) {
  if (fields.has_mask) {
    return refuse(status_code::unimplemented,
                  "the array has a mask, which JAX has no arrays for; fill it in first, and pass "
                  "mask and data as two arrays");
  }
  if (fields.is_structured) {
    return refuse(status_code::unimplemented,
                  "the array has structured elements; pass its fields one by one");
  }
  const result<dtype> type = parse_typestr(fields.typestr);
  if (!type.ok()) return type.error();
  array out;
  out.dtype = type.value();
  out.kind = kind;
  out.ordinal = ordinal;
  out.readonly = fields.readonly;
  out.shape.assign(fields.shape.begin(), fields.shape.end());
  if (fields.strides) {
    if (fields.strides->size() != fields.shape.size()) {
      return refuse(status_code::invalid_argument,
                    "there are " + std::to_string(fields.strides->size()) + " strides for " +
                        std::to_string(fields.shape.size()) + " axes");
    }
    out.strides.assign(fields.strides->begin(), fields.strides->end());
    const bool empty = is_empty(out.shape);
    for (std::size_t axis = 0; axis < out.shape.size(); ++axis) {
      // Where nothing lies no stride is followed, whatever it says.
      if (empty || out.shape[axis] == 1) out.strides[axis] = 0;
    }
  } else if (!set_compact(out)) {
    out.strides.assign(out.shape.size(), 0);  // check() tells whether that is an error
  }
  std::uintptr_t address = fields.address;
  const auto offset = static_cast<std::uintptr_t>(fields.offset);
  if (fields.offset < 0 || __builtin_add_overflow(address, offset, &address)) {
    return refuse(status_code::invalid_argument,
                  "the offset " + std::to_string(fields.offset) + " leaves the memory");
  }
  // NOLINTNEXTLINE(performance-no-int-to-ptr): the sum of address and offset may not overflow
  out.data = fields.address == 0 ? nullptr : reinterpret_cast<void*>(address);
  if (status s = check(out); !s.ok()) return refuse(s.code(), s.message());
  return out;
}

std::string_view typestr_of(dtype t) noexcept {
  // A text with its byte order; one byte has none.
  switch (t) {
    case dtype::bool_:
      return "|b1";
    case dtype::int8:
      return "|i1";
    case dtype::int16:
      return "<i2";
    case dtype::int32:
      return "<i4";
    case dtype::int64:
      return "<i8";
    case dtype::uint8:
      return "|u1";
    case dtype::uint16:
      return "<u2";
    case dtype::uint32:
      return "<u4";
    case dtype::uint64:
      return "<u8";
    case dtype::float16:
      return "<f2";
    case dtype::float32:
      return "<f4";
    case dtype::float64:
      return "<f8";
    case dtype::complex64:
      return "<c8";
    case dtype::complex128:
      return "<c16";
    default:
      return {};
  }
}

}  // namespace jaxbridge::memory

// SPDX-License-Identifier: Apache-2.0
// Element types: XLA's numbering, and what each is called elsewhere.
#pragma once

#include <complex>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <type_traits>

namespace jaxbridge {
inline namespace v1 {

// The one table of element types: our name (also NumPy's or ml_dtypes'), XLA's number, bits per
// element, DLPack's type code. `JAXBRIDGE_NO_DLPACK` marks what DLPack cannot say.
#define JAXBRIDGE_NO_DLPACK 255
#define JAXBRIDGE_DTYPES(X)                             \
  X(bool_, "bool", 1, 8, 6)                             \
  X(int1, "int1", 30, 1, 255)                           \
  X(int2, "int2", 26, 2, 255)                           \
  X(int4, "int4", 21, 4, 255)                           \
  X(int8, "int8", 2, 8, 0)                              \
  X(int16, "int16", 3, 16, 0)                           \
  X(int32, "int32", 4, 32, 0)                           \
  X(int64, "int64", 5, 64, 0)                           \
  X(uint1, "uint1", 31, 1, 255)                         \
  X(uint2, "uint2", 27, 2, 255)                         \
  X(uint4, "uint4", 22, 4, 255)                         \
  X(uint8, "uint8", 6, 8, 1)                            \
  X(uint16, "uint16", 7, 16, 1)                         \
  X(uint32, "uint32", 8, 32, 1)                         \
  X(uint64, "uint64", 9, 64, 1)                         \
  X(float16, "float16", 10, 16, 2)                      \
  X(float32, "float32", 11, 32, 2)                      \
  X(float64, "float64", 12, 64, 2)                      \
  X(bfloat16, "bfloat16", 16, 16, 4)                    \
  X(complex64, "complex64", 15, 64, 5)                  \
  X(complex128, "complex128", 18, 128, 5)               \
  X(float8_e3m4, "float8_e3m4", 29, 8, 7)               \
  X(float8_e4m3, "float8_e4m3", 28, 8, 8)               \
  X(float8_e4m3b11fnuz, "float8_e4m3b11fnuz", 23, 8, 9) \
  X(float8_e4m3fn, "float8_e4m3fn", 20, 8, 10)          \
  X(float8_e4m3fnuz, "float8_e4m3fnuz", 25, 8, 11)      \
  X(float8_e5m2, "float8_e5m2", 19, 8, 12)              \
  X(float8_e5m2fnuz, "float8_e5m2fnuz", 24, 8, 13)      \
  X(float8_e8m0fnu, "float8_e8m0fnu", 33, 8, 14)        \
  X(float4_e2m1fn, "float4_e2m1fn", 32, 4, 17)

/// An element type. The values are those of XLA's FFI (xla::PrimitiveType).
enum class dtype : std::uint8_t {
  invalid = 0,
#define JAXBRIDGE_ENTRY(id, text, xla, bits, dlpack) id = xla,
  JAXBRIDGE_DTYPES(JAXBRIDGE_ENTRY)
#undef JAXBRIDGE_ENTRY
};

/// NumPy's (or ml_dtypes') name of `t`; "invalid" for what XLA has and we do not know.
[[nodiscard]] constexpr std::string_view name(dtype t) noexcept {
  switch (t) {
#define JAXBRIDGE_ENTRY(id, text, xla, bits, dlpack) \
  case dtype::id:                                    \
    return text;
    JAXBRIDGE_DTYPES(JAXBRIDGE_ENTRY)
#undef JAXBRIDGE_ENTRY
    default:
      return "invalid";
  }
}

/// Bits per element; 0 for `invalid`.
[[nodiscard]] constexpr std::size_t bit_width(dtype t) noexcept {
  switch (t) {
#define JAXBRIDGE_ENTRY(id, text, xla, bits, dlpack) \
  case dtype::id:                                    \
    return bits;
    JAXBRIDGE_DTYPES(JAXBRIDGE_ENTRY)
#undef JAXBRIDGE_ENTRY
    default:
      return 0;
  }
}

/// DLPack's type code; JAXBRIDGE_NO_DLPACK where DLPack has none.
[[nodiscard]] constexpr std::uint8_t dlpack_code(dtype t) noexcept {
  switch (t) {
#define JAXBRIDGE_ENTRY(id, text, xla, bits, dlpack) \
  case dtype::id:                                    \
    return dlpack;
    JAXBRIDGE_DTYPES(JAXBRIDGE_ENTRY)
#undef JAXBRIDGE_ENTRY
    default:
      return JAXBRIDGE_NO_DLPACK;
  }
}

/// Bytes per element; 0 where an element is smaller than a byte (XLA packs those) or `invalid`.
[[nodiscard]] constexpr std::size_t item_size(dtype t) noexcept { return bit_width(t) / 8; }

/// The element type with that number in XLA, `invalid` where we know none.
[[nodiscard]] constexpr dtype dtype_from_xla(std::int32_t number) noexcept {
  switch (number) {
#define JAXBRIDGE_ENTRY(id, text, xla, bits, dlpack) \
  case xla:                                          \
    return dtype::id;
    JAXBRIDGE_DTYPES(JAXBRIDGE_ENTRY)
#undef JAXBRIDGE_ENTRY
    default:
      return dtype::invalid;
  }
}

/// The element type that DLPack calls so; `invalid` where we know none. `bits` are those of one
/// element, of both parts of a complex number.
[[nodiscard]] constexpr dtype dtype_from_dlpack(std::uint8_t code, std::uint8_t bits) noexcept {
  if (code == JAXBRIDGE_NO_DLPACK) return dtype::invalid;
#define JAXBRIDGE_ENTRY(id, text, xla, width, dlpack) \
  if (dlpack == code && width == bits) return dtype::id;
  JAXBRIDGE_DTYPES(JAXBRIDGE_ENTRY)
#undef JAXBRIDGE_ENTRY
  return dtype::invalid;
}

/// The element type of that name; `invalid` where we know none.
[[nodiscard]] constexpr dtype dtype_from_name(std::string_view text) noexcept {
#define JAXBRIDGE_ENTRY(id, called, xla, bits, dlpack) \
  if (text == called) return dtype::id;
  JAXBRIDGE_DTYPES(JAXBRIDGE_ENTRY)
#undef JAXBRIDGE_ENTRY
  return dtype::invalid;
}

namespace detail {
template <class T>
struct dtype_entry {
  static constexpr dtype value = dtype::invalid;
};
#define JAXBRIDGE_ENTRY(type, id)             \
  template <>                                 \
  struct dtype_entry<type> {                  \
    static constexpr dtype value = dtype::id; \
  };
JAXBRIDGE_ENTRY(bool, bool_)
JAXBRIDGE_ENTRY(std::int8_t, int8)
JAXBRIDGE_ENTRY(std::int16_t, int16)
JAXBRIDGE_ENTRY(std::int32_t, int32)
JAXBRIDGE_ENTRY(std::int64_t, int64)
JAXBRIDGE_ENTRY(std::uint8_t, uint8)
JAXBRIDGE_ENTRY(std::uint16_t, uint16)
JAXBRIDGE_ENTRY(std::uint32_t, uint32)
JAXBRIDGE_ENTRY(std::uint64_t, uint64)
JAXBRIDGE_ENTRY(float, float32)
JAXBRIDGE_ENTRY(double, float64)
JAXBRIDGE_ENTRY(std::complex<float>, complex64)
JAXBRIDGE_ENTRY(std::complex<double>, complex128)
#undef JAXBRIDGE_ENTRY
}  // namespace detail

/// The element type of the C++ type T (const is looked through); `invalid` where there is none. It
/// may be specialized for a type of yours: template <> inline constexpr jaxbridge::dtype
/// jaxbridge::dtype_of<__half> = jaxbridge::dtype::float16;
template <class T>
inline constexpr dtype dtype_of = detail::dtype_entry<std::remove_cv_t<T>>::value;

}  // namespace v1
}  // namespace jaxbridge

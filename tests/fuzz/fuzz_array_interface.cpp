// SPDX-License-Identifier: Apache-2.0
// The fields of array interfaces, made of arbitrary bytes: an array, or an error with a text.
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "core/memory/array_interface.hpp"
#include "fuzz/array_properties.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using jaxbridge::memory::memory_kind;
  fuzzing::reader in(data, size);
  jaxbridge::memory::array_interface fields;
  fields.address = in.byte() < 0xe0 ? 0x10000 : static_cast<std::uintptr_t>(in.wide());
  fields.readonly = in.byte() % 2 == 1;
  fields.has_mask = in.byte() > 0xf0;
  fields.is_structured = in.byte() > 0xf0;
  fields.offset = in.byte() < 0xe0 ? 0 : in.wide();
  const char* const usual[] = {"<f4", "|b1", "<c16", "|u1", "<i8", ">f4", "|V2", "<f2"};
  const std::uint8_t type = in.byte();
  std::string typestr = usual[type % 8];
  if (type > 0xe0) {
    typestr.resize(in.byte() % 8);
    for (char& c : typestr) c = static_cast<char>(in.byte());
  }
  fields.typestr = typestr;
  std::vector<std::int64_t> shape(in.byte() % 9);
  for (std::int64_t& extent : shape) extent = in.extent();
  fields.shape = shape;
  std::vector<std::int64_t> strides(in.byte() < 0xf0 ? shape.size() : in.byte() % 9);
  for (std::int64_t& stride : strides) stride = in.stride();
  if (in.byte() % 4 != 3) fields.strides = strides;
  const auto kind = static_cast<memory_kind>(in.byte() % 4);
  fuzzing::check(describe(fields, kind, in.byte()));
  return 0;
}

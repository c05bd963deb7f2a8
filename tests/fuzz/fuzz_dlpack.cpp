// SPDX-License-Identifier: Apache-2.0
// DLPack tensors made of arbitrary bytes: an array that holds what check() promises and comes back
// from its own export, or an error with a text. The deleter runs once, whatever the tensor says.
//
// 0 is what a sane producer sends; an input that ends early goes on with zeros.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/memory/dlpack_export.hpp"
#include "core/memory/dlpack_import.hpp"
#include "fuzz/array_properties.hpp"

namespace {

namespace dlpack = jaxbridge::abi::dlpack;
using fuzzing::reader;
using fuzzing::require;
using jaxbridge::result;
using jaxbridge::memory::array;
using jaxbridge::memory::dlpack_tensor;

int deleted = 0;

void comes_back(const array& a) {
  jaxbridge::memory::dlpack_source source;
  source.data = a.data;
  source.dtype = a.dtype;
  source.shape = a.shape;
  source.strides = a.strides;
  source.device = jaxbridge::memory::dlpack_device(a.kind, a.ordinal);
  source.readonly = a.readonly;
  const auto made = jaxbridge::memory::export_versioned(source);
  require(made.ok(), "what was imported cannot be exported");
  const dlpack_tensor owned(made.value());
  const result<array> again = owned.describe();
  require(again.ok(), "what was exported cannot be imported");
  const array& b = again.value();
  require(b.shape == a.shape && b.dtype == a.dtype && b.kind == a.kind && b.ordinal == a.ordinal &&
              b.readonly == a.readonly && (b.data == a.data || a.size() == 0),
          "another array came back");
  for (std::size_t axis = 0; axis < a.shape.size(); ++axis) {
    // The others are never followed.
    require(a.size() == 0 || a.shape[axis] == 1 || a.strides[axis] == b.strides[axis],
            "other strides came back");
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  reader in(data, size);
  const bool versioned = in.byte() % 2 == 1;
  dlpack::version version{1, in.byte()};
  if (in.byte() > 0xf0) version.major = static_cast<std::uint32_t>(in.wide());
  const std::uint64_t flags = in.byte();

  dlpack::tensor t{};
  // 64 KiB that exist, and any address beyond: nothing is read there.
  t.data = in.byte() < 0xe0 ? reinterpret_cast<void*>(std::uintptr_t{0x10000})
                            : reinterpret_cast<void*>(static_cast<std::uintptr_t>(in.wide()));
  const std::uint8_t device = in.byte();
  t.device = {static_cast<dlpack::device_type>(device < 0xf0 ? 1 + device % 16 : in.wide()),
              in.byte() < 0xe0 ? 0 : static_cast<std::int32_t>(in.wide())};
  const std::uint8_t type = in.byte();
  t.dtype = {static_cast<std::uint8_t>(type < 0xe0 ? 2 : in.byte() % 24),
             static_cast<std::uint8_t>(type < 0xe0 ? 32 : 1u << in.byte() % 8),
             static_cast<std::uint16_t>(in.byte() < 0xf0 ? 1 : in.byte())};
  const std::uint8_t rank = in.byte();
  t.ndim = rank < 0xf0 ? rank % 9 : static_cast<std::int32_t>(in.wide());
  const std::size_t there = static_cast<std::size_t>(std::clamp<std::int64_t>(t.ndim, 0, 128));
  std::vector<std::int64_t> shape(there);
  std::vector<std::int64_t> strides(there);
  for (std::int64_t& extent : shape) extent = in.extent();
  for (std::int64_t& stride : strides) stride = in.stride();
  // An extent list shorter than `ndim` would be a lie that nothing can find.
  if (t.ndim > 128) t.ndim = 128;
  t.shape = in.byte() < 0xf0 ? shape.data() : nullptr;
  t.strides = in.byte() % 4 != 3 ? strides.data() : nullptr;
  t.byte_offset = in.byte() < 0xe0 ? 0 : static_cast<std::uint64_t>(in.wide());

  deleted = 0;
  dlpack::managed_tensor old{t, nullptr, [](auto*) { ++deleted; }};
  dlpack::managed_tensor_versioned fresh{version, nullptr, [](auto*) { ++deleted; }, flags, t};
  {
    const dlpack_tensor owned = versioned ? dlpack_tensor(&fresh) : dlpack_tensor(&old);
    const result<array> got = owned.describe();
    fuzzing::check(got);
    if (got.ok()) comes_back(got.value());
  }
  require(deleted == 1, "the deleter did not run once");
  return 0;
}

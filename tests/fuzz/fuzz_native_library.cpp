// SPDX-License-Identifier: Apache-2.0
// What a library says of itself, made from arbitrary bytes: no crash, and nothing is read that does
// not lie in the library's memory (which ends where the heap block does).
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

#include "core/native/library.hpp"

namespace {

namespace native = jaxbridge::abi::native;
using jaxbridge::native::read_descriptor;
using jaxbridge::native::segment;

void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "fuzz_native_library: %s\n", what);
  std::abort();
}

jaxbridge::abi::xla_ffi::error* handler(jaxbridge::abi::xla_ffi::call_frame* /*frame*/) {
  return nullptr;
}

constexpr std::size_t arena_size = 2048;

class reader {
 public:
  reader(const std::uint8_t* data, std::size_t size) : next_(data), end_(data + size) {}
  std::uint8_t byte() { return next_ == end_ ? 0 : *next_++; }
  std::size_t number() {
    const std::size_t high = byte();
    return high << 8 | byte();
  }
  /// Into the arena mostly; its end, null, and anywhere otherwise.
  template <class T>
  T* pointer(std::byte* arena) {
    const std::uint8_t kind = byte();
    if (kind >= 0xf8) return nullptr;
    if (kind >= 0xf0) return reinterpret_cast<T*>(~std::uintptr_t{0} - byte());
    const std::size_t at = number() % (arena_size + 1);
    // Aligned mostly.
    return reinterpret_cast<T*>(arena + (kind >= 0xe0 ? at : at / alignof(T) * alignof(T)));
  }
  native::text text(std::byte* arena) {
    const char* const data = pointer<const char>(arena);
    const std::uint8_t kind = byte();
    return {data, kind < 0xf0 ? kind % 32U : kind < 0xf8 ? number() : ~std::size_t{0} - byte()};
  }

 private:
  const std::uint8_t* next_;
  const std::uint8_t* end_;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  reader in(data, size);
  const auto block = std::make_unique<std::byte[]>(arena_size);
  std::byte* const arena = block.get();
  // Letters, so that names there are names mostly.
  std::memset(arena, 'a', arena_size);
  for (std::size_t i = in.byte(); i > 0; --i) {
    arena[in.number() % arena_size] = static_cast<std::byte>(in.byte());
  }
  auto* const library = new (arena) native::library{sizeof(native::library), 1, nullptr};
  if (in.byte() >= 0xf0) library->struct_size = in.number();
  if (in.byte() >= 0xf0) library->major = in.byte();
  const native::function** link = &library->first;
  for (std::size_t n = in.byte() % 4; n > 0; --n) {
    auto* const f = in.pointer<native::function>(arena);
    const auto at = reinterpret_cast<std::uintptr_t>(f) - reinterpret_cast<std::uintptr_t>(arena);
    *link = f;
    if (at > arena_size - sizeof(native::function) || at % alignof(native::function) != 0) break;
    new (f) native::function{};
    f->struct_size = in.byte() < 0xf0 ? sizeof(native::function) : in.number();
    f->name = in.text(arena);
    f->doc = in.text(arena);
    f->signatures = in.text(arena);
    f->parameters = in.text(arena);
    f->results = in.byte() < 0x80 ? nullptr : in.pointer<const native::text>(arena);
    f->result_count = f->results == nullptr && in.byte() < 0xf0 ? 0 : in.number();
    f->vmap_method = in.text(arena);
    f->platform = in.byte() < 0xf0 ? in.byte() % 2U : in.byte();
    f->flags = in.byte();
    f->execute = in.byte() < 0xf0
                     ? &handler
                     : reinterpret_cast<jaxbridge::abi::xla_ffi::handler*>(in.pointer<char>(arena));
    f->calls = in.pointer<const std::atomic<std::uint64_t>>(arena);
    link = &f->next;
    if (in.byte() >= 0xf0) f->next = f;  // without an end
  }
  const auto begin = reinterpret_cast<std::uintptr_t>(arena);
  const auto code = reinterpret_cast<std::uintptr_t>(&handler);
  const auto found = read_descriptor(
      library, {{begin, begin + arena_size, true, false}, {code, code + 1, false, true}});
  if (!found.ok()) {
    require(!found.error().message().empty(), "an empty error");
    return 0;
  }
  for (const auto& f : found.value()) {
    require(!f.name.empty() && f.name.find('\0') == std::string::npos, "a name that is none");
    require(f.execute == &handler, "code of nobody");
    require(!f.signatures.empty(), "no signature");
    static_cast<void>(f.call_count());
  }
  return 0;
}

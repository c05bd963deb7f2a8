// SPDX-License-Identifier: Apache-2.0
#include "python/scratch.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

namespace jaxbridge::python {
namespace {

using dispatch::scratch;

// An allocator in C, as torch takes one: what it allocates on this thread is scratch memory of the
// call that the thread is in, and what it frees, on any thread, goes back to the call that it is
// of.
struct hooks {
  std::mutex mutex;
  std::map<void*, std::weak_ptr<scratch>> owners;
  // Blocks, with their sizes, that were in use when their call ended. Torch frees them some day,
  // and until then it must not get them once more.
  std::map<void*, std::size_t> orphans;
};

hooks& all() {
  static hooks& instance = *new hooks;  // torch frees at exit
  return instance;
}

// The innermost call of this thread comes last.
thread_local std::vector<std::shared_ptr<scratch>> of_this_thread;

std::uintptr_t address_of(const void* p) { return reinterpret_cast<std::uintptr_t>(p); }

// The end of an orphan that a block overlaps; 0: of none.
std::uintptr_t end_of_orphan_in(void* block, std::size_t bytes) {
  const std::lock_guard lock(all().mutex);
  const auto& orphans = all().orphans;
  auto next = orphans.lower_bound(block);
  if (next != orphans.end() && address_of(next->first) < address_of(block) + bytes) {
    return address_of(next->first) + next->second;
  }
  if (next == orphans.begin()) return 0;
  --next;
  const std::uintptr_t end = address_of(next->first) + next->second;
  return end > address_of(block) ? end : 0;
}

// Of torch's signature; null is its "out of memory".
void* hook_allocate(std::ptrdiff_t size, int /*device*/, void* /*stream*/) noexcept {
  if (of_this_thread.empty() || size <= 0) return nullptr;
  const std::shared_ptr<scratch>& mine = of_this_thread.back();
  const auto bytes = static_cast<std::size_t>(size);
  // Blocks that lie in orphans, and fillers of what is left of these: held until one is found.
  constexpr std::size_t most = 128;
  std::array<void*, most> unusable{};
  std::size_t count = 0;
  void* found = nullptr;
  while (found == nullptr && count + 2 <= most) {
    const result<void*> made = mine->allocate(bytes);
    if (!made.ok()) break;
    const std::uintptr_t end = end_of_orphan_in(made.value(), bytes);
    if (end == 0) {
      found = made.value();
      break;
    }
    unusable[count++] = made.value();
    const std::uintptr_t from = address_of(made.value()) + bytes;
    if (end <= from) continue;
    if (const result<void*> filler = mine->allocate(end - from); filler.ok()) {
      unusable[count++] = filler.value();
    }
  }
  for (std::size_t i = 0; i < count; ++i) (void)mine->free(unusable[i]);
  if (found == nullptr) return nullptr;
  const std::lock_guard lock(all().mutex);
  all().owners[found] = mine;
  return found;
}

void hook_free(void* block, std::ptrdiff_t /*bytes*/, int /*device*/, void* /*stream*/) noexcept {
  std::shared_ptr<scratch> owner;
  {
    const std::lock_guard lock(all().mutex);
    if (all().orphans.erase(block) > 0) return;
    const auto found = all().owners.find(block);
    if (found == all().owners.end()) return;
    owner = found->second.lock();
    all().owners.erase(found);
  }
  if (owner != nullptr) (void)owner->free(block);
}

// The call ends, and what it still has belongs to nobody.
void leave_hooks() {
  if (of_this_thread.empty()) return;
  const std::shared_ptr<scratch> ended = std::move(of_this_thread.back());
  of_this_thread.pop_back();
  const std::lock_guard lock(all().mutex);
  for (const auto& [block, bytes] : ended->live()) {
    if (all().owners.erase(block) > 0) all().orphans.emplace(block, bytes);
  }
}

}  // namespace

void bind_scratch(nb::module_& m) {
  nb::class_<scratch>(
      m, "Scratch", nb::is_final(),
      "Memory of XLA's for one call. Any thread; once the call has ended nothing can "
      "be allocated, and what is freed is not looked at.")
      .def(
          "allocate",
          [](scratch& self, std::size_t nbytes) {
            const result<void*> made = self.allocate(nbytes);
            if (!made.ok()) {
              PyErr_SetString(PyExc_MemoryError, made.error().message().c_str());
              throw nb::python_error();
            }
            return reinterpret_cast<std::uintptr_t>(made.value());
          },
          nb::arg("nbytes"),
          "The address of at least so many bytes on the device of the call; 0 for none.")
      .def(
          "free",
          [](scratch& self, std::uintptr_t pointer) {
            (void)self.free(reinterpret_cast<void*>(pointer));
          },
          nb::arg("pointer"), "Gives a block back.")
      .def_prop_ro(
          "live",
          [](const scratch& self) {
            nb::list out;
            for (const auto& [block, bytes] : self.live()) {
              out.append(nb::make_tuple(reinterpret_cast<std::uintptr_t>(block), bytes));
            }
            return out;
          },
          nb::sig("def live(self) -> list[tuple[int, int]]"),
          "(address, size in bytes) of the blocks that were not given back.");
  m.def(
      "scratch_hooks",
      [] {
        return nb::make_tuple(reinterpret_cast<std::uintptr_t>(&hook_allocate),
                              reinterpret_cast<std::uintptr_t>(&hook_free));
      },
      nb::sig("def scratch_hooks() -> tuple[int, int]"),
      "The addresses of `void* allocate(ssize_t bytes, int device, void* stream)` and `void "
      "free(void*, ssize_t bytes, int device, void* stream)`.");
  m.def(
      "enter_scratch_hooks",
      [](std::shared_ptr<scratch> s) { of_this_thread.push_back(std::move(s)); },
      nb::arg("scratch"), "The hooks give this thread memory of that scratch.");
  m.def("leave_scratch_hooks", &leave_hooks,
        "They give this thread memory of the scratch before; what was not freed is not listened "
        "for.");
}

}  // namespace jaxbridge::python

// SPDX-License-Identifier: Apache-2.0
#include "core/native/library.hpp"

#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <fstream>
#include <utility>

namespace jaxbridge::native {
namespace {

namespace ffi = abi::xla_ffi;

constexpr std::size_t max_functions = 65536;
constexpr std::size_t max_text = std::size_t{1} << 20;
constexpr std::size_t max_rules = 1024;

// What a function's descriptor had in the first version of the ABI.
constexpr std::size_t oldest_function_size = offsetof(abi::native::function, calls) + sizeof(void*);
constexpr std::size_t oldest_library_size = offsetof(abi::native::library, first) + sizeof(void*);

status wrong(std::string what) {
  return {status_code::invalid_argument,
          "its description of itself is damaged: " + std::move(what) +
              "; build it again with the headers of jaxbridge.get_include()"};
}

class reader {
 public:
  explicit reader(const std::vector<segment>& segments) : segments_(segments) {}

  [[nodiscard]] bool readable(const void* p, std::size_t bytes, std::size_t alignment = 1) const {
    const auto begin = reinterpret_cast<std::uintptr_t>(p);
    if (p == nullptr || begin % alignment != 0) return false;
    return std::any_of(segments_.begin(), segments_.end(), [&](const segment& s) {
      return s.readable && begin >= s.begin && begin <= s.end && bytes <= s.end - begin;
    });
  }

  template <class Function>
  [[nodiscard]] bool executable(Function* f) const {
    const auto at = reinterpret_cast<std::uintptr_t>(f);
    return std::any_of(segments_.begin(), segments_.end(), [&](const segment& s) {
      return s.executable && at >= s.begin && at < s.end;
    });
  }

  [[nodiscard]] bool text(const abi::native::text& from, std::string& to) const {
    if (from.size == 0) return true;
    if (from.size > max_text || !readable(from.data, from.size)) return false;
    to.assign(from.data, from.size);
    return to.find('\0') == std::string::npos;
  }

 private:
  const std::vector<segment>& segments_;
};

bool is_identifier(const std::string& s) {
  const auto letter = [](char c) {
    return c == '_' || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
  };
  return !s.empty() && letter(s.front()) && std::all_of(s.begin(), s.end(), [&](char c) {
    return letter(c) || (c >= '0' && c <= '9');
  });
}

status read_function(const reader& memory, const abi::native::function& from, function& to) {
  if (!memory.text(from.name, to.name) || !is_identifier(to.name)) {
    return wrong("a function's name is no identifier");
  }
  const std::string of = " of " + to.name;
  std::string signatures;
  if (!memory.text(from.signatures, signatures) || !memory.text(from.doc, to.doc) ||
      !memory.text(from.parameters, to.parameters) ||
      !memory.text(from.vmap_method, to.vmap_method)) {
    return wrong("a text" + of + " is outside of the library");
  }
  for (std::size_t begin = 0; begin <= signatures.size();) {
    const std::size_t end = std::min(signatures.find('\n', begin), signatures.size());
    to.signatures.push_back(signatures.substr(begin, end - begin));
    begin = end + 1;
  }
  if (from.result_count > max_rules ||
      (from.result_count > 0 &&
       !memory.readable(from.results, from.result_count * sizeof(abi::native::text),
                        alignof(abi::native::text)))) {
    return wrong("the rules for the results" + of + " are outside of the library");
  }
  to.results.resize(from.result_count);
  for (std::size_t i = 0; i < from.result_count; ++i) {
    if (!memory.text(from.results[i], to.results[i])) {
      return wrong("a rule for the results" + of + " is outside of the library");
    }
  }
  if (from.platform > abi::native::platform_cuda) {
    return wrong("the platform" + of + " is number " + std::to_string(from.platform));
  }
  to.platform = from.platform == abi::native::platform_cuda ? platform::cuda : platform::cpu;
  to.flags = from.flags;
  if (!memory.executable(from.execute) ||
      (from.initialize != nullptr && !memory.executable(from.initialize)) ||
      (from.shapes != nullptr && !memory.executable(from.shapes))) {
    return wrong("the code" + of + " is outside of the library");
  }
  to.execute = from.execute;
  to.initialize = from.initialize;
  to.shapes = from.shapes;
  if (!memory.readable(from.calls, sizeof(*from.calls), alignof(std::atomic<std::uint64_t>))) {
    return wrong("the count of calls" + of + " is outside of the library");
  }
  to.calls = from.calls;
  return {};
}

struct loaded_object {
  std::uintptr_t base;
  std::string name;
  std::vector<segment> segments;
};

// The segments of the object that the loader put at `base`.
int collect(dl_phdr_info* info, std::size_t /*size*/, void* out) {
  auto& object = *static_cast<loaded_object*>(out);
  if (info->dlpi_addr != object.base || object.name != info->dlpi_name) return 0;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& header = info->dlpi_phdr[i];
    if (header.p_type != PT_LOAD) continue;
    const std::uintptr_t begin = info->dlpi_addr + header.p_vaddr;
    object.segments.push_back({begin, begin + header.p_memsz, (header.p_flags & PF_R) != 0,
                               (header.p_flags & PF_X) != 0});
  }
  return 1;
}

// Whether the file has all that its header names. The loader maps that without a look at the file's
// length, and what lies behind the end is the end of the process. Other faults it reports itself.
bool is_whole(const std::string& path) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  const auto size = static_cast<std::uint64_t>(std::max<std::streamoff>(file.tellg(), 0));
  const auto read_at = [&file](std::uint64_t offset, void* to, std::size_t bytes) {
    file.seekg(static_cast<std::streamoff>(offset));
    return static_cast<bool>(
        file.read(static_cast<char*>(to), static_cast<std::streamsize>(bytes)));
  };
  ElfW(Ehdr) header;
  ElfW(Phdr) segment;
  if (!read_at(0, &header, sizeof(header)) || std::memcmp(header.e_ident, ELFMAG, SELFMAG) != 0 ||
      header.e_phentsize != sizeof(segment)) {
    return true;
  }
  for (std::size_t i = 0; i < header.e_phnum; ++i) {
    if (!read_at(header.e_phoff + i * sizeof(segment), &segment, sizeof(segment))) return false;
    if (segment.p_type == PT_LOAD &&
        (segment.p_offset > size || segment.p_filesz > size - segment.p_offset)) {
      return false;
    }
  }
  return true;
}

// Asks a handler what it is, as the oldest runtime does. XLA would refuse one that gives no answer,
// before its first backend is there only when that is made: for the whole process.
bool answers(abi::xla_ffi::handler* h) {
  ffi::metadata answer{};
  answer.struct_size = offsetof(ffi::metadata, traits) + sizeof(answer.traits);
  answer.api_version.struct_size = sizeof(answer.api_version);
  ffi::metadata_extension question{{sizeof(question), ffi::extension_metadata, nullptr}, &answer};
  ffi::call_frame frame{};
  frame.struct_size = offsetof(ffi::call_frame, future);
  frame.extension_start = &question.base;
  frame.stage = ffi::stage_execute;
  return h(&frame) == nullptr && answer.api_version.major_version == ffi::api_major &&
         answer.api_version.minor_version == ffi::api_minor_oldest;
}

}  // namespace

result<std::vector<function>> read_descriptor(const abi::native::library* descriptor,
                                              const std::vector<segment>& segments) {
  const reader memory(segments);
  if (!memory.readable(descriptor, sizeof(descriptor->struct_size),
                       alignof(abi::native::library)) ||
      descriptor->struct_size < oldest_library_size ||
      !memory.readable(descriptor, oldest_library_size)) {
    return wrong("it is too short, or outside of the library");
  }
  if (descriptor->major != abi::native::major_version) {
    return status(status_code::unimplemented,
                  "it was built for version " + std::to_string(descriptor->major) +
                      " of jaxbridge's native interface, and this jaxbridge has version " +
                      std::to_string(abi::native::major_version) + "; build it again");
  }
  std::vector<function> out;
  const abi::native::function* next = descriptor->first;
  while (next != nullptr) {
    if (out.size() == max_functions) return wrong("its list of functions has no end");
    if (!memory.readable(next, sizeof(next->struct_size), alignof(abi::native::function)) ||
        next->struct_size < oldest_function_size || !memory.readable(next, oldest_function_size)) {
      return wrong("a function of it is too short, or outside of the library");
    }
    if (status s = read_function(memory, *next, out.emplace_back()); !s.ok()) return s;
    next = next->next;
  }
  // Each was put in front of those before it.
  std::reverse(out.begin(), out.end());
  return out;
}

result<std::vector<function>> open_library(const std::string& path) {
  if (!is_whole(path)) {
    return status(status_code::invalid_argument,
                  "the file is cut short: it may still be written, or is a part of one; build it "
                  "again");
  }
  // NOW: a symbol that is missing is an error here, and not the end of the process at a call.
  void* const handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* const why = dlerror();  // NOLINT(concurrency-mt-unsafe): glibc's is of the thread
    return status(status_code::invalid_argument, why != nullptr ? why : "dlopen failed");
  }
  void* const symbol = dlsym(handle, abi::native::library_symbol);
  struct link_map* map = nullptr;
  if (dlinfo(handle, RTLD_DI_LINKMAP, &map) != 0 || map == nullptr) {
    return status(status_code::internal, "the loader does not say where it is");
  }
  loaded_object object{map->l_addr, map->l_name, {}};
  dl_iterate_phdr(&collect, &object);
  auto* const descriptor = reinterpret_cast<abi::native::library_function*>(symbol);
  // Not that of a library which it is linked to.
  if (symbol == nullptr || !reader(object.segments).executable(descriptor)) {
    return status(status_code::not_found,
                  std::string("it exports no ") + abi::native::library_symbol +
                      ": it is no library of jaxbridge functions (JAXBRIDGE_EXPORT in "
                      "<jaxbridge/jaxbridge.hpp>); for a plain C function take jaxbridge.bind");
  }
  result<std::vector<function>> found = read_descriptor(descriptor(), object.segments);
  if (!found.ok()) return found;
  for (const function& f : found.value()) {
    if (!answers(f.execute) || (f.initialize != nullptr && !answers(f.initialize))) {
      return wrong("the code of " + f.name + " is no handler of XLA's");
    }
  }
  return found;
}

result<std::vector<array_type>> infer_shapes(const function& f,
                                             const std::vector<array_type>& operands,
                                             attribute_set& attributes, std::size_t result_count) {
  std::vector<ffi::buffer> buffers;
  std::vector<void*> entries;
  std::vector<ffi::argument_type> types(operands.size(), ffi::argument_buffer);
  buffers.reserve(operands.size());
  for (const array_type& a : operands) {
    ffi::buffer& b = buffers.emplace_back();
    b = {sizeof(b),
         nullptr,
         static_cast<int>(a.dtype),
         nullptr,
         static_cast<std::int64_t>(a.shape.size()),
         const_cast<std::int64_t*>(a.shape.data())};
    entries.push_back(&b);
  }
  ffi::call_frame frame{};
  frame.struct_size = offsetof(ffi::call_frame, future);
  frame.stage = ffi::stage_execute;
  frame.args = {sizeof(frame.args), nullptr, static_cast<std::int64_t>(operands.size()),
                types.data(), entries.data()};
  frame.rets = {sizeof(frame.rets), nullptr, 0, nullptr, nullptr};
  frame.attrs = attributes.build();

  // One at least: what the header calls takes the first, wherever there is none.
  std::vector<abi::native::shape> shapes(std::max<std::size_t>(result_count, 1));
  std::array<char, 1024> message{};
  const std::int32_t code =
      f.shapes(&frame, shapes.data(), result_count, message.data(), message.size());
  if (code != 0) {
    message.back() = '\0';
    return status(static_cast<status_code>(code > 0 && code <= 16 ? code : 2), message.data());
  }
  std::vector<array_type> out;
  for (std::size_t i = 0; i < result_count; ++i) {
    const abi::native::shape& s = shapes[i];
    const dtype type = dtype_from_xla(s.dtype);
    const bool fits = s.rank >= 0 && static_cast<std::size_t>(s.rank) <= abi::native::max_rank;
    if (type == dtype::invalid || !fits ||
        std::any_of(s.extents, s.extents + s.rank, [](std::int64_t n) { return n < 0; })) {
      return status(status_code::internal,
                    "its shape function gave no valid type for result " + std::to_string(i));
    }
    out.push_back({type, {s.extents, s.extents + s.rank}});
  }
  return out;
}

}  // namespace jaxbridge::native

// SPDX-License-Identifier: Apache-2.0
#include "core/dispatch/entry_points.hpp"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>

#include "core/dispatch/call.hpp"
#include "core/dispatch/fence.hpp"
#include "core/dispatch/registry.hpp"

namespace jaxbridge::dispatch {
namespace {

namespace ffi = abi::xla_ffi;

std::atomic<int> runtime_minor{-1};
std::atomic<int> answered_minor{-1};

ffi::error* to_error(const ffi::call_frame& frame, const status& s) noexcept {
  if (s.ok()) return nullptr;
  if (frame.api == nullptr ||
      !ffi::has_slot(frame.api->struct_size, offsetof(ffi::api, error_create))) {
    // Nobody can be told, and to return would pass for success: wrong results.
    std::fprintf(stderr, "jaxbridge: %s\n", s.message().c_str());
    std::abort();
  }
  ffi::error_create_args args{sizeof(args), nullptr, s.message().c_str(),
                              static_cast<int>(s.code())};
  return frame.api->error_create(&args);
}

// XLA asks once per registration what we are. A handler of a newer version than the runtime's own
// would be refused, silently on CUDA, so the answer is the older of the two.
void answer_metadata(const ffi::call_frame& frame, ffi::metadata& out,
                     std::uint32_t traits) noexcept {
  int minor = ffi::api_minor_oldest;
  runtime_minor = -1;
  if (frame.api != nullptr && frame.api->struct_size >= offsetof(ffi::api, internal)) {
    runtime_minor = frame.api->api_version.minor_version;
    minor = std::min(frame.api->api_version.minor_version, ffi::api_minor_newest_checked);
  }
  answered_minor = minor;
  out.api_version.major_version = ffi::api_major;
  out.api_version.minor_version = minor;
  out.traits = traits;
}

ffi::metadata* metadata_query(const ffi::call_frame& frame) noexcept {
  for (ffi::extension_base* e = frame.extension_start; e != nullptr; e = e->next) {
    if (e->type == ffi::extension_metadata && e->struct_size >= sizeof(ffi::metadata_extension)) {
      ffi::metadata* out = reinterpret_cast<ffi::metadata_extension*>(e)->metadata;
      const std::size_t needed = offsetof(ffi::metadata, traits) + sizeof(out->traits);
      return out != nullptr && out->struct_size >= needed ? out : nullptr;
    }
  }
  return nullptr;
}

using decode_function = status (*)(const ffi::call_frame&, platform, any_buffer*, call&) noexcept;
using work_function = status (*)(const call&) noexcept;

status run(const ffi::call_frame& frame, platform where, decode_function decode,
           work_function work) noexcept {
  const result<std::size_t> count = buffer_count(frame);
  if (!count.ok()) return count.error();
  const call_memory memory(count.value());
  if (memory.data() == nullptr) {
    return {status_code::resource_exhausted, "no memory for the list of this call's buffers"};
  }
  call c;
  if (status s = decode(frame, where, memory.data(), c); !s.ok()) return s;
  return work(c);
}

status call_target(const call& c) noexcept {
  // Ours for the time of the call: clear() and the end of an executable may remove it meanwhile.
  const result<std::shared_ptr<target>> found = process_registry().find(c.key, c.spec);
  if (!found.ok()) return found.error();
  return found.value()->invoke(c);
}

ffi::error* handle(ffi::call_frame* frame, platform where, std::uint32_t traits,
                   decode_function decode = &dispatch::decode,
                   work_function work = &call_target) noexcept {
  if (ffi::metadata* out = metadata_query(*frame); out != nullptr) {
    answer_metadata(*frame, *out, traits);
    return nullptr;
  }
  if (frame->stage != ffi::stage_execute) return nullptr;
  return to_error(*frame, run(*frame, where, decode, work));
}

}  // namespace

ffi::error* call_cpu(ffi::call_frame* frame) noexcept { return handle(frame, platform::cpu, 0); }

ffi::error* call_cuda(ffi::call_frame* frame) noexcept { return handle(frame, platform::cuda, 0); }

ffi::error* call_cuda_capturable(ffi::call_frame* frame) noexcept {
  return handle(frame, platform::cuda, ffi::trait_command_buffer_compatible);
}

ffi::error* fence_cuda(ffi::call_frame* frame) noexcept {
  return handle(frame, platform::cuda, 0, &decode_memory, &fence);
}

int runtime_api_minor() noexcept { return runtime_minor; }
int answered_api_minor() noexcept { return answered_minor; }

}  // namespace jaxbridge::dispatch

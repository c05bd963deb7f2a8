// SPDX-License-Identifier: Apache-2.0
#include "core/dispatch/entry_points.hpp"

#include <atomic>
#include <memory>

#include "core/dispatch/call.hpp"
#include "core/dispatch/external.hpp"
#include "core/dispatch/registry.hpp"
#include "core/memory/update.hpp"
#include "jaxbridge/frame.hpp"

namespace jaxbridge::dispatch {
namespace {

namespace ffi = abi::xla_ffi;

std::atomic<int> runtime_minor{-1};
std::atomic<int> answered_minor{-1};

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

// The results of the program are operands, where they are.
status update_enqueued(const call& c) noexcept {
  memory::update_enqueued(c.stream);
  return {};
}

ffi::error* handle(ffi::call_frame* frame, platform where, std::uint32_t traits,
                   decode_function decode = &dispatch::decode,
                   work_function work = &call_target) noexcept {
  if (ffi::metadata* out = detail::metadata_query(*frame); out != nullptr) {
    runtime_minor = detail::runtime_minor_of(*frame);
    answered_minor = detail::answer_metadata(*frame, *out, traits);
    return nullptr;
  }
  if (frame->stage != ffi::stage_execute) return nullptr;
  return detail::to_error(*frame, run(*frame, where, decode, work));
}

}  // namespace

ffi::error* call_cpu(ffi::call_frame* frame) noexcept { return handle(frame, platform::cpu, 0); }

ffi::error* call_cuda(ffi::call_frame* frame) noexcept { return handle(frame, platform::cuda, 0); }

ffi::error* call_cuda_capturable(ffi::call_frame* frame) noexcept {
  return handle(frame, platform::cuda, ffi::trait_command_buffer_compatible);
}

ffi::error* check_external_cpu(ffi::call_frame* frame) noexcept {
  return handle(frame, platform::cpu, 0, &decode, &check_external);
}

ffi::error* check_external_cuda(ffi::call_frame* frame) noexcept {
  // Not to be captured: it enqueues nothing, and XLA takes no empty graph.
  return handle(frame, platform::cuda, 0, &decode, &check_external);
}

ffi::error* enqueued_cuda(ffi::call_frame* frame) noexcept {
  return handle(frame, platform::cuda, 0, &decode_place, &update_enqueued);
}

int runtime_api_minor() noexcept { return runtime_minor; }
int answered_api_minor() noexcept { return answered_minor; }

}  // namespace jaxbridge::dispatch

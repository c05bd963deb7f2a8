// SPDX-License-Identifier: Apache-2.0
// Loading of the CUDA driver, and its errors in words.
#include "core/cuda/driver.hpp"

#include <dlfcn.h>
#include <link.h>

#include <atomic>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <string_view>
#include <utility>

#include "core/exit.hpp"

namespace jaxbridge::cuda {
namespace {

using lookup_function = void* (*)(void* library, const char* name);

// One attempt to load: what it found, or why it failed.
struct load_outcome {
  driver table;
  driver_info info;
  jaxbridge::status status;
};

// Guards the load itself. It is held over dlopen and cuInit, once: whoever comes meanwhile needs
// their result, and neither calls back into us or asks for the GIL.
constinit std::mutex load_lock;
constinit std::atomic<const load_outcome*> loaded{nullptr};
constinit lookup_function lookup_entry = nullptr;  // under load_lock; set by tests only

// Every outcome ever made, so that a table handed out stays valid. Never destroyed.
std::vector<std::unique_ptr<load_outcome>>& outcomes() {
  static auto* all = new std::vector<std::unique_ptr<load_outcome>>;
  return *all;
}

std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

constexpr const char* driver_variable = "JAXBRIDGE_CUDA_DRIVER";

// Where the loader found the library, for messages; its own name if that cannot be told.
std::string path_of(void* library, const char* file) {
  struct link_map* map = nullptr;
  if (dlinfo(library, RTLD_DI_LINKMAP, &map) == 0 && map != nullptr && map->l_name != nullptr &&
      map->l_name[0] != '\0') {
    return map->l_name;
  }
  return file;
}

// cuGetProcAddress in the form of CUDA 12, and in the form of 11.3 that later drivers keep.
using get_address_v2 = CUresult (*)(const char*, void**, int, std::uint64_t, int*);
using get_address_v1 = CUresult (*)(const char*, void**, int, std::uint64_t);

struct entry_finder {
  get_address_v2 v2 = nullptr;
  get_address_v1 v1 = nullptr;

  void* operator()(const char* name, int version) const {
    // The flags: 0 takes the variants that work on the legacy default stream.
    void* address = nullptr;
    int found = 0;
    const CUresult code =
        v2 != nullptr ? v2(name, &address, version, 0, &found) : v1(name, &address, version, 0);
    return code == CUDA_SUCCESS ? address : nullptr;
  }
};

void fill(driver& table, std::vector<const char*>& missing, const entry_finder& find) {
#define JAXBRIDGE_ENTRY(name, version, parameters)                    \
  if (void* address = find(#name, version); address != nullptr) {     \
    table.name = reinterpret_cast<CUresult(*) parameters>(address);   \
  } else {                                                            \
    table.name = &detail::unavailable<CUresult parameters>::no_entry; \
    missing.push_back(#name);                                         \
  }
  JAXBRIDGE_CUDA_DRIVER_FUNCTIONS(JAXBRIDGE_ENTRY)
#undef JAXBRIDGE_ENTRY
}

// "NAME (code): text". `table` is passed in: while loading, get() has no answer yet.
std::string describe(const driver& table, CUresult code) {
  const char* name = nullptr;
  const char* text = nullptr;
  if (table.cuGetErrorName(code, &name) != CUDA_SUCCESS || name == nullptr) name = "CUDA error";
  if (table.cuGetErrorString(code, &text) != CUDA_SUCCESS) text = nullptr;
  std::string words = std::string(name) + " (" + std::to_string(static_cast<int>(code)) + ")";
  if (text != nullptr) words.append(": ").append(text);
  return words;
}

jaxbridge::status init_failure(const driver& table, CUresult code, const std::string& path) {
  std::string words = "no usable CUDA device: cuInit of " + path + ": " + describe(table, code);
  switch (code) {
    case CUDA_ERROR_NO_DEVICE: {
      const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");  // NOLINT(concurrency-mt-unsafe)
      words.append("; CUDA_VISIBLE_DEVICES is ")
          .append(visible == nullptr ? "not set" : "'" + std::string(visible) + "'")
          .append(", nvidia-smi shows which devices there are");
      break;
    }
    case CUDA_ERROR_STUB_LIBRARY:
      words.append(
          "; this is the stub of the CUDA toolkit: take its folder out of LD_LIBRARY_PATH");
      break;
    case CUDA_ERROR_SYSTEM_DRIVER_MISMATCH:
      words.append("; kernel module and library differ: reboot, or reload the NVIDIA module");
      break;
    default:
      words.append("; see what nvidia-smi says");
      break;
  }
  return {status_code::unavailable, std::move(words)};
}

// Fills `to`. On failure the table is left in its first state: every call in it reports.
jaxbridge::status load(load_outcome& to) {
  const char* file = std::getenv(driver_variable);  // NOLINT(concurrency-mt-unsafe)
  const bool chosen = file != nullptr && file[0] != '\0';
  if (!chosen) file = "libcuda.so.1";

  // Never closed: others in this process use the same driver.
  void* library = dlopen(file, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* reason = dlerror();  // NOLINT(concurrency-mt-unsafe): the text is the thread's own
    std::string words = "no CUDA driver: dlopen of " + std::string(file) +
                        " failed: " + (reason != nullptr ? reason : "no reason given");
    words.append(chosen ? "; it is what the environment variable JAXBRIDGE_CUDA_DRIVER names: "
                          "correct or unset it"
                        : "; install the NVIDIA driver (nvidia-smi must work; a container needs "
                          "its GPU option, such as --gpus all), or set JAXBRIDGE_CUDA_DRIVER to "
                          "the library's path");
    return {status_code::unavailable, std::move(words)};
  }
  to.info.path = path_of(library, file);

  const lookup_function lookup = lookup_entry != nullptr ? lookup_entry : &dlsym;
  entry_finder find;
  find.v2 = reinterpret_cast<get_address_v2>(lookup(library, "cuGetProcAddress_v2"));
  find.v1 = reinterpret_cast<get_address_v1>(lookup(library, "cuGetProcAddress"));
  if (find.v2 == nullptr && find.v1 == nullptr) {
    return {status_code::failed_precondition,
            "the CUDA driver " + to.info.path +
                " has no cuGetProcAddress: it is older than CUDA 11.3, or no driver at all; "
                "install a driver for CUDA " +
                version_text(oldest_driver_version) + " or later"};
  }

  driver table;
  fill(table, to.info.missing, find);
  if (const CUresult code = table.cuDriverGetVersion(&to.info.version); code != CUDA_SUCCESS) {
    return {status_code::unavailable,
            "the CUDA driver " + to.info.path +
                " does not tell its version: cuDriverGetVersion: " + describe(table, code)};
  }
  if (to.info.version < oldest_driver_version) {
    return {status_code::failed_precondition, "the CUDA driver " + to.info.path + " is for CUDA " +
                                                  version_text(to.info.version) + "; CUDA " +
                                                  version_text(oldest_driver_version) +
                                                  " or later is needed: update the NVIDIA driver"};
  }
  if (const CUresult code = table.cuInit(0); code != CUDA_SUCCESS) {
    return init_failure(table, code, to.info.path);
  }
  to.table = table;
  return {};
}

const load_outcome& load_once() {
  const std::lock_guard<std::mutex> hold(load_lock);
  if (const load_outcome* done = loaded.load(std::memory_order_relaxed); done != nullptr) {
    return *done;
  }
  auto outcome = std::make_unique<load_outcome>();
  outcome->status = load(*outcome);
  const load_outcome* done = outcome.get();
  outcomes().push_back(std::move(outcome));
  loaded.store(done, std::memory_order_release);
  return *done;
}

const load_outcome& outcome() {
  const load_outcome* done = loaded.load(std::memory_order_acquire);
  return done != nullptr ? *done : load_once();
}

status_code code_for(CUresult code) noexcept {
  switch (code) {
    case CUDA_ERROR_INVALID_VALUE:
    case CUDA_ERROR_INVALID_DEVICE:
    case CUDA_ERROR_INVALID_HANDLE:
      return status_code::invalid_argument;
    case CUDA_ERROR_OUT_OF_MEMORY:
      return status_code::resource_exhausted;
    case CUDA_ERROR_NOT_INITIALIZED:
    case CUDA_ERROR_DEINITIALIZED:
    case CUDA_ERROR_NO_DEVICE:
    case CUDA_ERROR_SYSTEM_NOT_READY:
      return status_code::unavailable;
    case CUDA_ERROR_NOT_SUPPORTED:
      return status_code::unimplemented;
    case CUDA_ERROR_INVALID_CONTEXT:
      return status_code::failed_precondition;
    default:
      // 900 to 908: what a stream capture forbids.
      return code >= CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED &&
                     code <= CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD
                 ? status_code::failed_precondition
                 : status_code::internal;
  }
}

// Errors of work enqueued earlier, which the driver reports at some later call.
bool is_asynchronous(CUresult code) noexcept {
  return code == CUDA_ERROR_ILLEGAL_ADDRESS || code == CUDA_ERROR_ASSERT ||
         (code >= CUDA_ERROR_HARDWARE_STACK_ERROR && code <= CUDA_ERROR_LAUNCH_FAILED);
}

bool is_missing(const driver_info& info, std::string_view what) noexcept {
  const std::string_view name = what.substr(0, what.find(' '));
  for (const char* missing : info.missing) {
    if (name == missing) return true;
  }
  return false;
}

}  // namespace

const driver& driver::get() noexcept { return outcome().table; }

jaxbridge::status driver::status() { return outcome().status; }

const driver_info& driver::info() noexcept { return outcome().info; }

void driver::reset_for_testing(lookup_function lookup) {
  const std::lock_guard<std::mutex> hold(load_lock);
  lookup_entry = lookup;
  loaded.store(nullptr, std::memory_order_release);
}

jaxbridge::status detail::failure(CUresult code, const char* what) {
  // The driver is torn down under a thread that still runs. Nobody is left to act on it.
  if (code == CUDA_ERROR_DEINITIALIZED && exiting()) return {};
  const load_outcome& load = outcome();
  if (code == CUDA_ERROR_NOT_INITIALIZED && !load.status.ok()) {
    return {load.status.code(), std::string(what) + ": " + load.status.message()};
  }
  if (code == CUDA_ERROR_NOT_SUPPORTED && is_missing(load.info, what)) {
    return {status_code::unimplemented, std::string(what) + ": the CUDA driver " + load.info.path +
                                            " (CUDA " + version_text(load.info.version) +
                                            ") has no such function: update the NVIDIA driver"};
  }
  std::string words = std::string(what) + ": " + describe(load.table, code);
  if (is_asynchronous(code)) {
    words.append(
        "; the fault lies in work enqueued earlier, JAXBRIDGE_DEBUG=1 tells in which call");
  }
  return {code_for(code), std::move(words)};
}

}  // namespace jaxbridge::cuda

// SPDX-License-Identifier: Apache-2.0
// The driver table: loading, what is missing, errors in words.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <chrono>
#include <cstring>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "core/cuda/driver.hpp"
#include "core/exit.hpp"
#include "fakes/fake_cuda_fixture.hpp"

namespace {

using namespace jaxbridge::cuda;  // NOLINT: the names of cuda.h
using fake_cuda::api;
using fake_cuda::environment_scope;
using jaxbridge::status_code;

class driver_test : public fake_cuda::cuda_test {};

constexpr std::size_t function_count = 0
#define JAXBRIDGE_ENTRY(name, version, parameters) +1
    JAXBRIDGE_CUDA_DRIVER_FUNCTIONS(JAXBRIDGE_ENTRY)
#undef JAXBRIDGE_ENTRY
    ;

bool contains(const std::string& text, const char* part) {
  return text.find(part) != std::string::npos;
}

// Calls a slot that must not reach a driver.
template <class... Args>
CUresult call_empty(CUresult (*function)(Args...)) {
  if (function == nullptr) return CUDA_ERROR_UNKNOWN;
  return function(Args{}...);
}

void expect_every_call_fails() {
  const driver& cu = driver::get();
#define JAXBRIDGE_ENTRY(name, version, parameters) \
  EXPECT_EQ(call_empty(cu.name), CUDA_ERROR_NOT_INITIALIZED) << #name;
  JAXBRIDGE_CUDA_DRIVER_FUNCTIONS(JAXBRIDGE_ENTRY)
#undef JAXBRIDGE_ENTRY
}

TEST_F(driver_test, loads_at_first_use_and_once) {
  EXPECT_EQ(api().lookups(), 0u);
  int count = 0;
  EXPECT_EQ(driver::get().cuDeviceGetCount(&count), CUDA_SUCCESS);
  EXPECT_EQ(count, 2);
  EXPECT_TRUE(driver::status().ok()) << driver::status().message();
  EXPECT_EQ(api().lookups(), function_count);
  EXPECT_EQ(fake_cuda::call_names(),
            (std::vector<std::string>{"cuDriverGetVersion", "cuInit", "cuDeviceGetCount"}));
  const driver* first = &driver::get();
  EXPECT_EQ(&driver::get(), first);
  EXPECT_EQ(api().lookups(), function_count);
}

TEST_F(driver_test, tells_what_it_found) {
  EXPECT_EQ(driver::info().version, 12040);
  EXPECT_TRUE(contains(driver::info().path, "fake_cuda")) << driver::info().path;
  EXPECT_TRUE(driver::info().missing.empty());
}

TEST_F(driver_test, asks_for_the_version_in_the_list) {
  static_cast<void>(driver::get());
  std::set<std::string> names;
#define JAXBRIDGE_ENTRY(name, version, parameters)         \
  EXPECT_EQ(api().asked_version(#name), version) << #name; \
  names.insert(#name);
  JAXBRIDGE_CUDA_DRIVER_FUNCTIONS(JAXBRIDGE_ENTRY)
#undef JAXBRIDGE_ENTRY
  EXPECT_EQ(names.size(), function_count) << "a function stands in the list twice";
}

TEST_F(driver_test, slots_are_filled_with_their_own_function) {
  const driver& cu = driver::get();
  api().clear_calls();
  char text[16] = "";
  EXPECT_EQ(cu.cuDeviceGetName(text, sizeof text, 1), CUDA_SUCCESS);
  EXPECT_STREQ(text, "Fake Device 1");
  CUdevice device = -1;
  EXPECT_EQ(cu.cuDeviceGet(&device, 1), CUDA_SUCCESS);
  EXPECT_EQ(device, 1);
  EXPECT_EQ(fake_cuda::call_names(), (std::vector<std::string>{"cuDeviceGetName", "cuDeviceGet"}));
}

TEST_F(driver_test, eight_threads_race_for_the_first_load) {
  std::barrier start(8);
  std::vector<std::thread> threads;
  std::vector<int> counts(8, 0);
  std::vector<const driver*> tables(8, nullptr);
  for (std::size_t i = 0; i < 8; ++i) {
    threads.emplace_back([&, i] {
      start.arrive_and_wait();
      tables[i] = &driver::get();
      static_cast<void>(tables[i]->cuDeviceGetCount(&counts[i]));
      if (!driver::status().ok()) counts[i] = -1;
    });
  }
  for (auto& t : threads) t.join();
  for (std::size_t i = 0; i < 8; ++i) {
    EXPECT_EQ(counts[i], 2);
    EXPECT_EQ(tables[i], tables[0]);
  }
  EXPECT_EQ(fake_cuda::count("cuInit"), 1u);
  EXPECT_EQ(api().lookups(), function_count);
}

// Entry points are looked up only once all threads are on their way into the driver.
std::atomic<int> on_their_way{0};
std::atomic<int> loads{0};

void* slow_lookup(void* library, const char* name) {
  ++loads;
  while (on_their_way.load() < 8) std::this_thread::yield();
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  return dlsym(library, name);
}

TEST_F(driver_test, threads_that_come_while_it_loads_wait_for_it) {
  on_their_way = 0;
  loads = 0;
  driver::reset_for_testing(&slow_lookup);
  std::vector<std::thread> threads;
  std::vector<const driver*> tables(8, nullptr);
  for (const driver*& table : tables) {
    threads.emplace_back([&table] {
      ++on_their_way;
      table = &driver::get();
    });
  }
  for (auto& t : threads) t.join();
  for (const driver* table : tables) EXPECT_EQ(table, tables[0]);
  EXPECT_EQ(loads, 2) << "one for each form of cuGetProcAddress";
  EXPECT_EQ(fake_cuda::count("cuInit"), 1u);
}

TEST_F(driver_test, without_a_library_every_call_is_an_error_that_says_why) {
  const environment_scope path("JAXBRIDGE_CUDA_DRIVER", "/nowhere/libcuda.so.1");
  const jaxbridge::status s = driver::status();
  EXPECT_EQ(s.code(), status_code::unavailable);
  EXPECT_TRUE(contains(s.message(), "/nowhere/libcuda.so.1")) << s.message();
  EXPECT_TRUE(contains(s.message(), "JAXBRIDGE_CUDA_DRIVER")) << s.message();
  EXPECT_TRUE(driver::info().path.empty());
  expect_every_call_fails();

  const jaxbridge::status call = check(driver::get().cuInit(0), "cuInit");
  EXPECT_EQ(call.code(), status_code::unavailable);
  EXPECT_TRUE(contains(call.message(), "cuInit: no CUDA driver")) << call.message();
}

TEST_F(driver_test, an_unset_or_empty_path_means_libcuda) {
  for (const char* value : {static_cast<const char*>(nullptr), ""}) {
    const environment_scope path("JAXBRIDGE_CUDA_DRIVER", value);
    driver::reset_for_testing();
    // This machine may have a driver, with or without a device.
    EXPECT_TRUE(driver::status().ok() || contains(driver::status().message(), "libcuda.so"))
        << driver::status().message();
    EXPECT_EQ(api().lookups(), 0u);
  }
}

TEST_F(driver_test, a_library_that_is_no_driver_is_refused) {
  const environment_scope path("JAXBRIDGE_CUDA_DRIVER", "libm.so.6");
  EXPECT_EQ(driver::status().code(), status_code::failed_precondition);
  EXPECT_TRUE(contains(driver::status().message(), "cuGetProcAddress"));
  EXPECT_TRUE(contains(driver::status().message(), "12.0"));
  expect_every_call_fails();
}

void* without_v2(void* library, const char* name) {
  return std::strcmp(name, "cuGetProcAddress_v2") == 0 ? nullptr : dlsym(library, name);
}

void* without_v1(void* library, const char* name) {
  return std::strcmp(name, "cuGetProcAddress") == 0 ? nullptr : dlsym(library, name);
}

TEST_F(driver_test, one_form_of_cuGetProcAddress_is_enough) {
  for (auto* lookup : {&without_v1, &without_v2}) {
    api().reset(1);
    api().hide("cuStreamQuery");
    driver::reset_for_testing(lookup);
    EXPECT_TRUE(driver::status().ok()) << driver::status().message();
    int count = 0;
    EXPECT_EQ(driver::get().cuDeviceGetCount(&count), CUDA_SUCCESS);
    EXPECT_EQ(count, 1);
    ASSERT_EQ(driver::info().missing.size(), 1u);
    EXPECT_STREQ(driver::info().missing[0], "cuStreamQuery");
  }
}

TEST_F(driver_test, a_missing_function_fails_alone_and_is_named) {
  api().hide("cuStreamGetCtx");
  EXPECT_TRUE(driver::status().ok());
  EXPECT_EQ(driver::info().missing.size(), 1u);
  CUcontext context = nullptr;
  const CUresult code = driver::get().cuStreamGetCtx(nullptr, &context);
  EXPECT_EQ(code, CUDA_ERROR_NOT_SUPPORTED);
  for (const char* what : {"cuStreamGetCtx", "cuStreamGetCtx of XLA's stream"}) {
    const jaxbridge::status s = check(code, what);
    EXPECT_EQ(s.code(), status_code::unimplemented);
    EXPECT_TRUE(contains(s.message(), "no such function")) << s.message();
    EXPECT_TRUE(contains(s.message(), "12.4")) << s.message();
    EXPECT_TRUE(contains(s.message(), what)) << s.message();
  }
  // The same code from a function that is there is the driver's own.
  EXPECT_TRUE(contains(check(code, "cuStreamQuery").message(), "CUDA_ERROR_NOT_SUPPORTED (801)"));
  EXPECT_EQ(driver::get().cuInit(0), CUDA_SUCCESS);
}

TEST_F(driver_test, error_texts_may_be_missing_too) {
  api().hide("cuGetErrorName");
  api().hide("cuGetErrorString");
  EXPECT_TRUE(driver::status().ok());
  EXPECT_EQ(check(CUDA_ERROR_INVALID_VALUE, "cuInit").message(), "cuInit: CUDA error (1)");
}

TEST_F(driver_test, a_driver_for_cuda_11_is_refused) {
  api().set_driver_version(11080);
  EXPECT_EQ(driver::status().code(), status_code::failed_precondition);
  EXPECT_TRUE(contains(driver::status().message(), "11.8")) << driver::status().message();
  EXPECT_TRUE(contains(driver::status().message(), "12.0")) << driver::status().message();
  EXPECT_EQ(driver::info().version, 11080);
  EXPECT_EQ(fake_cuda::count("cuInit"), 0u);
  expect_every_call_fails();
}

TEST_F(driver_test, the_oldest_and_newer_drivers_are_taken) {
  for (const int version : {12000, 13000, 14020}) {
    api().reset(1);
    api().set_driver_version(version);
    driver::reset_for_testing();
    EXPECT_TRUE(driver::status().ok()) << version;
    EXPECT_EQ(driver::info().version, version);
  }
}

TEST_F(driver_test, no_device_is_said_with_what_hides_it) {
  api().reset(0);
  const environment_scope visible("CUDA_VISIBLE_DEVICES", "7");
  const jaxbridge::status s = driver::status();
  EXPECT_EQ(s.code(), status_code::unavailable);
  EXPECT_TRUE(contains(s.message(), "CUDA_ERROR_NO_DEVICE (100)")) << s.message();
  EXPECT_TRUE(contains(s.message(), "CUDA_VISIBLE_DEVICES is '7'")) << s.message();
  expect_every_call_fails();
}

TEST_F(driver_test, each_failure_while_loading_is_latched) {
  for (const char* name : {"cuInit", "cuDriverGetVersion"}) {
    for (const CUresult code :
         {CUDA_ERROR_UNKNOWN, CUDA_ERROR_STUB_LIBRARY, CUDA_ERROR_SYSTEM_DRIVER_MISMATCH}) {
      api().reset(1);
      driver::reset_for_testing();
      api().fail(name, 1, code, false);
      EXPECT_EQ(driver::status().code(), status_code::unavailable);
      EXPECT_TRUE(contains(driver::status().message(), name));
      // The order to fail is used up: only memory can say this again.
      EXPECT_EQ(driver::status().code(), status_code::unavailable);
      expect_every_call_fails();
      EXPECT_EQ(fake_cuda::count(name), 1u);
    }
  }
}

TEST_F(driver_test, loading_functions_may_be_missing) {
  for (const char* name : {"cuInit", "cuDriverGetVersion"}) {
    api().reset(1);
    api().hide(name);
    driver::reset_for_testing();
    EXPECT_EQ(driver::status().code(), status_code::unavailable) << name;
    expect_every_call_fails();
  }
}

TEST_F(driver_test, success_is_ok) { EXPECT_TRUE(check(CUDA_SUCCESS, "cuInit").ok()); }

TEST_F(driver_test, an_error_names_the_call_the_code_and_the_text) {
  EXPECT_EQ(check(CUDA_ERROR_INVALID_HANDLE, "cuEventRecord").message(),
            "cuEventRecord: CUDA_ERROR_INVALID_HANDLE (400): invalid resource handle");
  EXPECT_EQ(check(static_cast<CUresult>(123456), "cuEventRecord").message(),
            "cuEventRecord: CUDA error (123456)");
  EXPECT_TRUE(contains(check(CUDA_ERROR_ILLEGAL_ADDRESS, "cuStreamSynchronize").message(),
                       "JAXBRIDGE_DEBUG=1"));
  EXPECT_FALSE(contains(check(CUDA_ERROR_INVALID_VALUE, "cuStreamSynchronize").message(),
                        "JAXBRIDGE_DEBUG=1"));
}

TEST_F(driver_test, codes_become_the_status_codes_of_xla) {
  const std::vector<std::pair<CUresult, status_code>> table = {
      {CUDA_ERROR_INVALID_VALUE, status_code::invalid_argument},
      {CUDA_ERROR_OUT_OF_MEMORY, status_code::resource_exhausted},
      {CUDA_ERROR_NOT_INITIALIZED, status_code::unavailable},
      {CUDA_ERROR_DEINITIALIZED, status_code::unavailable},
      {CUDA_ERROR_NO_DEVICE, status_code::unavailable},
      {CUDA_ERROR_INVALID_DEVICE, status_code::invalid_argument},
      {CUDA_ERROR_INVALID_CONTEXT, status_code::failed_precondition},
      {CUDA_ERROR_INVALID_HANDLE, status_code::invalid_argument},
      {CUDA_ERROR_ILLEGAL_ADDRESS, status_code::internal},
      {CUDA_ERROR_NOT_SUPPORTED, status_code::unimplemented},
      {CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, status_code::failed_precondition},
      {CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD, status_code::failed_precondition},
      {static_cast<CUresult>(909), status_code::internal},
      {CUDA_ERROR_UNKNOWN, status_code::internal},
  };
  for (const auto& [code, expected] : table) {
    EXPECT_EQ(check(code, "cuInit").code(), expected) << code;
  }
}

TEST_F(driver_test, a_driver_torn_down_at_exit_is_no_error) {
  EXPECT_FALSE(check(CUDA_ERROR_DEINITIALIZED, "cuStreamQuery").ok());
  jaxbridge::begin_exit();
  EXPECT_TRUE(jaxbridge::exiting());
  EXPECT_TRUE(check(CUDA_ERROR_DEINITIALIZED, "cuStreamQuery").ok());
  EXPECT_FALSE(check(CUDA_ERROR_INVALID_VALUE, "cuStreamQuery").ok());
  jaxbridge::cancel_exit_for_testing();
  EXPECT_FALSE(jaxbridge::exiting());
}

TEST_F(driver_test, pointer_attributes_reach_the_driver) {
  std::vector<char> memory(64);
  api().declare_memory(memory.data(), memory.size(), 1, false, true);
  const driver& cu = driver::get();
  int ordinal = -1;
  const auto pointer = reinterpret_cast<CUdeviceptr>(memory.data() + 5);
  EXPECT_EQ(cu.cuPointerGetAttribute(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, pointer),
            CUDA_SUCCESS);
  EXPECT_EQ(ordinal, 1);
  EXPECT_EQ(cu.cuPointerGetAttribute(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, pointer + 64),
            CUDA_ERROR_INVALID_VALUE);
  unsigned int managed = 7;
  unsigned int type = 7;
  CUpointer_attribute wanted[] = {CU_POINTER_ATTRIBUTE_IS_MANAGED,
                                  CU_POINTER_ATTRIBUTE_MEMORY_TYPE};
  void* values[] = {&managed, &type};
  EXPECT_EQ(cu.cuPointerGetAttributes(2, wanted, values, pointer), CUDA_SUCCESS);
  EXPECT_EQ(managed, 1u);
  EXPECT_EQ(type, static_cast<unsigned int>(CU_MEMORYTYPE_DEVICE));
}

}  // namespace

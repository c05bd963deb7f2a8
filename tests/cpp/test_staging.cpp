// SPDX-License-Identifier: Apache-2.0
// Pinned host memory: values, reuse, bounds, failures.
#include <gtest/gtest.h>

#include <array>
#include <barrier>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/cuda/context.hpp"
#include "core/cuda/driver.hpp"
#include "core/cuda/staging.hpp"
#include "core/exit.hpp"
#include "fakes/fake_cuda_fixture.hpp"

namespace {

using namespace jaxbridge::cuda;  // NOLINT: the names of cuda.h
using fake_cuda::api;
using fake_cuda::capture_mode;
using fake_cuda::hold;
using jaxbridge::result;
using jaxbridge::status;
using jaxbridge::status_code;
using jaxbridge::stream_ref;
using names = std::vector<std::string>;

constexpr std::size_t kib = 1024;
constexpr std::size_t mib = kib * kib;
constexpr std::size_t block = 64 * kib;  // the smallest
constexpr std::size_t ints = 1000;

class staging_test : public fake_cuda::cuda_test {
 protected:
  void SetUp() override {
    cuda_test::SetUp();
    static_cast<void>(driver::get());
    make_streams();
  }

  void TearDown() override {
    set_staging_limit(512 * mib);
    cuda_test::TearDown();
  }

  // s and other on device 0, far on device 1.
  void make_streams() {
    s = api().make_stream(0, true);
    other = api().make_stream(0, true);
    far = api().make_stream(1, true);
  }

  static staging_block lease(CUstream stream, std::size_t bytes = block, int device = 0) {
    result<staging_block> b = staging_block::lease(device, stream_ref(stream), bytes);
    EXPECT_TRUE(b.ok()) << b.error().message();
    return std::move(b).value();
  }

  static void wait_until_blocked(int threads) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    while (api().blocked_threads() < threads) {
      if (std::chrono::steady_clock::now() > end) {
        ADD_FAILURE() << "no " << threads << " threads wait in the driver";
        return;
      }
      std::this_thread::yield();
    }
  }

  CUstream s = nullptr;
  CUstream other = nullptr;
  CUstream far = nullptr;
};

// What a NumPy callee on CUDA does: y = 2 x. The first error, if any.
status twice(int device, CUstream stream, const std::vector<int>& x, std::vector<int>& y) {
  const std::size_t bytes = x.size() * sizeof(int);
  staging_layout layout;
  const std::size_t in = layout.add(bytes);
  const std::size_t out = layout.add(bytes);
  result<staging_block> b = staging_block::lease(device, stream_ref(stream), layout.size_bytes());
  if (!b.ok()) return b.error();
  staging_block& host = b.value();
  if (status st = host.to_host(in, x.data(), bytes); !st.ok()) return st;
  if (status st = host.wait(); !st.ok()) return st;
  for (std::size_t i = 0; i < x.size(); ++i) {
    int value = 0;
    std::memcpy(&value, host.at(in) + i * sizeof(int), sizeof(int));
    value *= 2;
    std::memcpy(host.at(out) + i * sizeof(int), &value, sizeof(int));
  }
  return host.to_device(y.data(), out, bytes);
}

TEST(staging_layout, pieces_are_aligned_and_distinct) {
  staging_layout layout;
  EXPECT_EQ(layout.size_bytes(), 0u);
  EXPECT_EQ(layout.add(1), 0u);
  EXPECT_EQ(layout.add(0), 64u);
  EXPECT_EQ(layout.add(64), 128u);
  EXPECT_EQ(layout.add(65), 192u);
  EXPECT_EQ(layout.add(0), 320u);
  EXPECT_EQ(layout.size_bytes(), 384u);
  static_assert(staging_alignment >= 64);
}

TEST(staging_layout, an_overflow_is_never_granted) {
  constexpr std::size_t most = std::numeric_limits<std::size_t>::max();
  for (const std::size_t huge : {most, most - 1, most - 63, most - 64, most / 2 + 1}) {
    staging_layout layout;
    layout.add(huge);
    layout.add(huge);
    layout.add(64);
    EXPECT_EQ(layout.size_bytes(), most) << huge;
  }
}

TEST_F(staging_test, a_size_beyond_the_address_space_is_refused) {
  constexpr std::size_t most = std::numeric_limits<std::size_t>::max();
  for (const std::size_t bytes : {most, most - 1, most - 64 * mib + 1}) {
    const auto b = staging_block::lease(0, stream_ref(s), bytes);
    ASSERT_FALSE(b.ok());
    EXPECT_EQ(b.error().code(), status_code::resource_exhausted);
  }
  EXPECT_EQ(fake_cuda::count("cuMemHostAlloc"), 0u);
}

TEST_F(staging_test, values_go_through_and_back) {
  for (const hold how : {hold::none, hold::until_synchronized}) {
    std::vector<int> x(ints);
    std::vector<int> y(ints, -1);
    for (std::size_t i = 0; i < ints; ++i) x[i] = static_cast<int>(i);
    api().hold_stream(s, how);
    const status st = twice(0, s, x, y);
    ASSERT_TRUE(st.ok()) << st.message();
    if (how != hold::none) {
      EXPECT_EQ(y[1], -1) << "the copy back is asynchronous";
    }
    EXPECT_EQ(driver::get().cuStreamSynchronize(s), CUDA_SUCCESS);
    for (std::size_t i = 0; i < ints; ++i) ASSERT_EQ(y[i], static_cast<int>(2 * i));
  }
}

TEST_F(staging_test, what_is_before_the_copies_on_the_stream_is_waited_for) {
  std::vector<int> source(ints, 21);
  std::vector<int> x(ints, 0);
  std::vector<int> y(ints, 0);
  api().hold_stream(s, hold::until_synchronized);
  {
    const auto scope = context_scope::enter(0);
    EXPECT_EQ(driver::get().cuMemcpyDtoDAsync(reinterpret_cast<CUdeviceptr>(x.data()),
                                              reinterpret_cast<CUdeviceptr>(source.data()),
                                              ints * sizeof(int), s),
              CUDA_SUCCESS);
  }
  ASSERT_TRUE(twice(0, s, x, y).ok());
  EXPECT_EQ(driver::get().cuStreamSynchronize(s), CUDA_SUCCESS);
  EXPECT_EQ(y[ints - 1], 42);
}

TEST_F(staging_test, the_calls_of_a_first_and_of_a_second_use) {
  const auto scope = context_scope::enter(0);
  std::vector<int> x(ints, 1);
  std::vector<int> y(ints, 0);
  const auto without_current = [] {
    names all;
    for (const std::string& name : fake_cuda::call_names()) {
      if (name != "cuCtxGetCurrent") all.push_back(name);
    }
    return all;
  };
  api().clear_calls();
  ASSERT_TRUE(twice(0, s, x, y).ok());
  EXPECT_EQ(without_current(),
            (names{"cuStreamIsCapturing", "cuMemHostAlloc", "cuEventCreate", "cuMemcpyDtoHAsync",
                   "cuStreamSynchronize", "cuMemcpyHtoDAsync", "cuEventRecord"}));
  api().clear_calls();
  ASSERT_TRUE(twice(0, s, x, y).ok());
  EXPECT_EQ(without_current(),
            (names{"cuStreamIsCapturing", "cuEventQuery", "cuMemcpyDtoHAsync",
                   "cuStreamSynchronize", "cuMemcpyHtoDAsync", "cuEventRecord"}));
  // The event stands behind the last copy.
  const auto ran = fake_cuda::executions();
  ASSERT_EQ(ran.size(), 3u);
  EXPECT_STREQ(ran[0].kind, "DtoH");
  EXPECT_STREQ(ran[1].kind, "HtoD");
  EXPECT_STREQ(ran[2].kind, "record");
  for (const auto& e : ran) EXPECT_EQ(e.stream, s);
}

TEST_F(staging_test, pieces_are_where_the_layout_says) {
  staging_layout layout;
  layout.add(1);
  const std::size_t second = layout.add(10);
  const staging_block b = lease(s, layout.size_bytes());
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(b.at(0)) % staging_alignment, 0u);
  EXPECT_EQ(b.at(second) - b.at(0), static_cast<std::ptrdiff_t>(second));
}

TEST_F(staging_test, nothing_to_stage_is_fine) {
  staging_block b = lease(s, 0);
  EXPECT_NE(b.at(0), nullptr);
  EXPECT_TRUE(b.to_host(0, nullptr, 0).ok());
  EXPECT_TRUE(b.to_device(nullptr, 0, 0).ok());
  EXPECT_TRUE(b.wait().ok());
  EXPECT_EQ(fake_cuda::count("cuMemcpyDtoHAsync"), 0u);
  EXPECT_EQ(fake_cuda::count("cuMemcpyHtoDAsync"), 0u);
}

TEST_F(staging_test, a_piece_outside_the_block_is_refused) {
  constexpr std::size_t most = std::numeric_limits<std::size_t>::max();
  std::vector<char> memory(200);
  staging_block b = lease(s, 128);
  const std::vector<std::pair<std::size_t, std::size_t>> outside = {
      {0, 129}, {64, 65}, {128, 1}, {129, 0}, {most, 2}, {2, most}, {64, most - 63}};
  for (const auto& [offset, bytes] : outside) {
    EXPECT_EQ(b.to_host(offset, memory.data(), bytes).code(), status_code::out_of_range);
    EXPECT_EQ(b.to_device(memory.data(), offset, bytes).code(), status_code::out_of_range);
  }
  EXPECT_TRUE(b.to_host(64, memory.data(), 64).ok());
  EXPECT_TRUE(b.to_host(128, memory.data(), 0).ok());
}

TEST_F(staging_test, a_block_is_reused_only_after_its_last_copy) {
  std::vector<int> x(ints, 5);
  std::vector<int> y(ints, 0);
  api().hold_stream(s, hold::until_released);
  std::byte* first = nullptr;
  {
    staging_block b = lease(s);
    first = b.at(0);
    std::memcpy(first, x.data(), ints * sizeof(int));
    EXPECT_TRUE(b.to_device(y.data(), 0, ints * sizeof(int)).ok());
  }
  {
    const staging_block b = lease(other);
    EXPECT_NE(b.at(0), first) << "the copy has not run";
    std::memset(b.at(0), 0xff, block);
  }
  EXPECT_EQ(api().live().host_blocks, 2u);
  api().hold_stream(s, hold::none);
  EXPECT_EQ(y[ints - 1], 5);
  // The oldest complete one comes first.
  const staging_block a = lease(other);
  EXPECT_EQ(a.at(0), first);
  const staging_block b = lease(other);
  EXPECT_NE(b.at(0), first);
  EXPECT_EQ(api().live().host_blocks, 2u);
}

TEST_F(staging_test, a_read_that_nobody_waited_for_is_waited_for_before_reuse) {
  std::vector<int> x(ints, 5);
  api().hold_stream(s, hold::until_released);
  std::byte* first = nullptr;
  {
    staging_block b = lease(s);
    first = b.at(0);
    EXPECT_TRUE(b.to_host(0, x.data(), ints * sizeof(int)).ok());
  }
  EXPECT_NE(lease(other).at(0), first);
  api().hold_stream(s, hold::none);
  EXPECT_EQ(lease(other).at(0), first);
}

TEST_F(staging_test, a_block_that_was_waited_for_needs_no_event) {
  std::vector<int> x(ints, 5);
  {
    staging_block b = lease(s);
    EXPECT_TRUE(b.to_host(0, x.data(), ints * sizeof(int)).ok());
    EXPECT_TRUE(b.wait().ok());
  }
  static_cast<void>(lease(s));
  EXPECT_EQ(fake_cuda::count("cuEventRecord"), 0u);
  EXPECT_EQ(fake_cuda::count("cuEventQuery"), 0u);
}

TEST_F(staging_test, sizes_are_rounded_to_few) {
  const std::vector<std::pair<std::size_t, std::size_t>> table = {{0, 64 * kib},
                                                                  {1, 64 * kib},
                                                                  {64 * kib, 64 * kib},
                                                                  {64 * kib + 1, 128 * kib},
                                                                  {3 * mib, 4 * mib},
                                                                  {64 * mib, 64 * mib},
                                                                  {64 * mib + 1, 128 * mib},
                                                                  {129 * mib, 192 * mib}};
  for (const auto& [asked, given] : table) {
    static_cast<void>(lease(s, asked));
    EXPECT_EQ(staging_usage(0).size_bytes, given) << asked;
    EXPECT_EQ(api().live().host_bytes, given) << asked;
    EXPECT_TRUE(trim_staging(0).ok());
    EXPECT_EQ(staging_usage(0).size_bytes, 0u);
  }
}

TEST_F(staging_test, the_memory_is_portable) {
  static_cast<void>(lease(s));
  for (const auto& c : fake_cuda::calls()) {
    if (std::string(c.name) != "cuMemHostAlloc") continue;
    EXPECT_EQ(c.arguments[0], block);
    EXPECT_EQ(c.arguments[1], CU_MEMHOSTALLOC_PORTABLE);
  }
}

TEST_F(staging_test, devices_have_pools_of_their_own) {
  static_cast<void>(lease(s, block, 0));
  static_cast<void>(lease(far, block, 1));
  EXPECT_EQ(staging_usage(0).blocks, 1u);
  EXPECT_EQ(staging_usage(1).blocks, 1u);
  EXPECT_EQ(staging_usage(-1).blocks, 0u);
  EXPECT_EQ(staging_usage(max_devices).blocks, 0u);
  EXPECT_TRUE(trim_staging(1).ok());
  EXPECT_EQ(staging_usage(0).blocks, 1u);
  EXPECT_EQ(staging_usage(1).blocks, 0u);
  EXPECT_EQ(trim_staging(max_devices).code(), status_code::invalid_argument);
  EXPECT_EQ(staging_block::lease(-1, stream_ref(s), 1).error().code(),
            status_code::invalid_argument);
}

TEST_F(staging_test, works_whatever_context_is_current) {
  std::vector<int> x(ints, 4);
  std::vector<int> y(ints, 0);
  const auto scope = context_scope::enter(0);
  const status st = twice(1, far, x, y);
  ASSERT_TRUE(st.ok()) << st.message();
  EXPECT_EQ(y[0], 8);
  const CUcontext foreign = api().make_context(0);
  const auto inner = context_scope::enter(foreign);
  ASSERT_TRUE(twice(0, s, x, y).ok());
  // The legacy stream is that of the device asked for, not of the context that is current.
  ASSERT_TRUE(twice(0, nullptr, x, y).ok());
  const CUstream used = fake_cuda::executions().back().stream;
  const auto home = context_scope::enter(0);
  EXPECT_EQ(driver::get().cuMemsetD8Async(reinterpret_cast<CUdeviceptr>(y.data()), 0, 4, nullptr),
            CUDA_SUCCESS);
  EXPECT_EQ(fake_cuda::executions().back().stream, used);
}

TEST_F(staging_test, at_the_limit_the_oldest_is_waited_for_and_taken) {
  set_staging_limit(2 * block);
  std::vector<int> x(ints, 5);
  std::vector<std::vector<int>> y(6, std::vector<int>(ints, 0));
  api().hold_stream(s, hold::until_synchronized);
  std::vector<std::byte*> seen;
  for (std::size_t n = 0; n < y.size(); ++n) {
    staging_block b = lease(s);
    seen.push_back(b.at(0));
    x.assign(ints, static_cast<int>(n));
    std::memcpy(b.at(0), x.data(), ints * sizeof(int));
    EXPECT_TRUE(b.to_device(y[n].data(), 0, ints * sizeof(int)).ok());
    EXPECT_LE(api().live().host_bytes, 2 * block);
  }
  EXPECT_EQ(seen[2], seen[0]);
  EXPECT_EQ(seen[3], seen[1]);
  EXPECT_EQ(fake_cuda::count("cuEventSynchronize"), 4u);
  EXPECT_EQ(driver::get().cuStreamSynchronize(s), CUDA_SUCCESS);
  for (std::size_t n = 0; n < y.size(); ++n) EXPECT_EQ(y[n][7], static_cast<int>(n));
}

TEST_F(staging_test, at_the_limit_blocks_of_other_sizes_are_freed) {
  set_staging_limit(4 * block);
  for (int n = 0; n < 3; ++n) {
    const staging_block a = lease(s, block);
    const staging_block b = lease(s, block);
    const staging_block c = lease(s, 2 * block);
  }
  EXPECT_EQ(staging_usage(0).size_bytes, 4 * block);
  static_cast<void>(lease(s, 4 * block));
  EXPECT_EQ(staging_usage(0).size_bytes, 4 * block);
  EXPECT_EQ(staging_usage(0).blocks, 1u);
  EXPECT_EQ(api().live().host_bytes, 4 * block);
  EXPECT_EQ(api().live().events, 1u);
}

TEST_F(staging_test, what_is_leased_may_exceed_the_limit) {
  set_staging_limit(block);
  {
    const staging_block a = lease(s);
    const staging_block b = lease(s);
    const staging_block c = lease(s, 8 * block);
    EXPECT_EQ(staging_usage(0).leased, 3u);
  }
  // The next lease brings it down.
  static_cast<void>(lease(s, 2 * block));
  EXPECT_EQ(staging_usage(0).blocks, 1u);
  EXPECT_EQ(staging_usage(0).size_bytes, 2 * block);
}

TEST_F(staging_test, no_lock_is_held_while_a_thread_waits) {
  set_staging_limit(block);
  std::vector<int> x(ints, 5);
  api().hold_stream(s, hold::until_released);
  {
    staging_block b = lease(s);
    EXPECT_TRUE(b.to_device(x.data(), 0, 16).ok());
  }
  // At the limit: waits for the copy. The other: waits for the stream.
  std::thread for_a_block([&] { static_cast<void>(lease(other)); });
  wait_until_blocked(1);
  std::thread for_the_stream([&] {
    staging_block b = lease(s, 2 * block);
    EXPECT_TRUE(b.to_host(0, x.data(), 16).ok());
    EXPECT_TRUE(b.wait().ok());
  });
  wait_until_blocked(2);
  {
    staging_block b = lease(other, 4 * block);
    EXPECT_TRUE(b.to_host(0, x.data(), 16).ok());
    EXPECT_TRUE(b.wait().ok());
  }
  EXPECT_EQ(staging_usage(0).blocks, 3u);
  api().hold_stream(s, hold::none);
  for_a_block.join();
  for_the_stream.join();
}

TEST_F(staging_test, memory_that_runs_out_is_made_room_for) {
  static_cast<void>(lease(s, block));
  static_cast<void>(lease(s, 2 * block));
  api().fail("cuMemHostAlloc", 1, CUDA_ERROR_OUT_OF_MEMORY, false);
  static_cast<void>(lease(s, 4 * block));
  EXPECT_EQ(api().live().host_bytes, 4 * block);
  EXPECT_EQ(staging_usage(0).blocks, 1u);
}

TEST_F(staging_test, memory_that_runs_out_for_good_is_an_error_with_the_size) {
  static_cast<void>(lease(s, block));
  api().fail("cuMemHostAlloc", 1, CUDA_ERROR_OUT_OF_MEMORY, true);
  const auto b = staging_block::lease(0, stream_ref(s), 3 * mib);
  ASSERT_FALSE(b.ok());
  EXPECT_EQ(b.error().code(), status_code::resource_exhausted);
  EXPECT_EQ(b.error().message(),
            "cuMemHostAlloc of 4194304 bytes of pinned host memory: CUDA_ERROR_OUT_OF_MEMORY (2): "
            "out of memory");
  EXPECT_EQ(staging_usage(0).blocks, 0u);
  EXPECT_EQ(staging_usage(0).size_bytes, 0u);
}

TEST_F(staging_test, a_failed_event_is_replaced_by_waiting) {
  std::vector<int> x(ints, 5);
  api().hold_stream(s, hold::until_synchronized);
  {
    staging_block b = lease(s);
    EXPECT_TRUE(b.to_device(x.data(), 0, 16).ok());
    api().fail("cuEventRecord", 1, CUDA_ERROR_UNKNOWN, false);
  }
  EXPECT_EQ(fake_cuda::count("cuStreamSynchronize"), 1u);
  EXPECT_EQ(fake_cuda::executions().size(), 1u);
  static_cast<void>(lease(s));
  EXPECT_EQ(staging_usage(0).blocks, 1u);
  EXPECT_EQ(staging_usage(0).lost, 0u);
}

TEST_F(staging_test, a_block_whose_copies_cannot_be_told_is_never_reused) {
  std::vector<int> x(ints, 5);
  api().hold_stream(s, hold::until_synchronized);
  {
    staging_block b = lease(s);
    EXPECT_TRUE(b.to_device(x.data(), 0, 16).ok());
    api().fail(nullptr, 1, CUDA_ERROR_UNKNOWN, true);
  }
  api().fail(nullptr, 0, CUresult{}, false);
  EXPECT_EQ(staging_usage(0).lost, 1u);
  static_cast<void>(lease(s));
  EXPECT_EQ(staging_usage(0).blocks, 2u);
  api().fail("cuCtxSynchronize", 1, CUDA_ERROR_UNKNOWN, false);
  EXPECT_FALSE(trim_staging(0).ok());
  EXPECT_EQ(staging_usage(0).blocks, 1u) << "the other one is freed";
  // Once the device has finished everything, it is.
  EXPECT_TRUE(trim_staging(0).ok());
  EXPECT_EQ(staging_usage(0).blocks, 0u);
  EXPECT_EQ(fake_cuda::executions().size(), 1u);
}

TEST_F(staging_test, trimming_waits_for_copies_and_spares_what_is_leased) {
  std::vector<int> x(ints, 5);
  std::vector<int> y(ints, 0);
  api().hold_stream(s, hold::until_synchronized);
  ASSERT_TRUE(twice(0, s, x, y).ok());
  const staging_block b = lease(other);
  EXPECT_TRUE(trim_staging(0).ok());
  EXPECT_EQ(y[0], 10);
  EXPECT_EQ(staging_usage(0).blocks, 1u);
  EXPECT_EQ(staging_usage(0).leased, 1u);
  std::memset(b.at(0), 1, block);
}

TEST_F(staging_test, trimming_ends_although_blocks_come_back_meanwhile) {
  std::vector<int> x(ints, 5);
  api().hold_stream(s, hold::until_released);
  {
    staging_block b = lease(s);
    EXPECT_TRUE(b.to_device(x.data(), 0, 16).ok());
  }
  std::thread trimming([] { EXPECT_TRUE(trim_staging(0).ok()); });
  wait_until_blocked(1);
  static_cast<void>(lease(other));
  api().hold_stream(s, hold::none);
  trimming.join();
  EXPECT_EQ(staging_usage(0).blocks, 1u) << "what came back later stays";
}

TEST_F(staging_test, a_capture_is_refused_and_not_harmed) {
  const auto scope = context_scope::enter(0);
  static_cast<void>(lease(s));
  ASSERT_EQ(api().begin_capture(s, capture_mode::thread_local_), CUDA_SUCCESS);
  const auto b = staging_block::lease(0, stream_ref(s), block);
  ASSERT_FALSE(b.ok());
  EXPECT_EQ(b.error().code(), status_code::failed_precondition);
  EXPECT_NE(b.error().message().find("graph=\"off\""), std::string::npos);
  EXPECT_EQ(api().end_capture(s, nullptr), CUDA_SUCCESS);
  EXPECT_TRUE(staging_block::lease(0, stream_ref(s), block).ok());
}

TEST_F(staging_test, a_moved_block_is_given_back_once) {
  {
    result<staging_block> b = staging_block::lease(0, stream_ref(s), block);
    const staging_block moved = std::move(b).value();
    EXPECT_EQ(staging_usage(0).leased, 1u);
  }
  EXPECT_EQ(staging_usage(0).leased, 0u);
}

TEST_F(staging_test, every_failing_call_is_reported_and_leaves_nothing) {
  std::vector<int> x(ints, 5);
  std::vector<int> y(ints, 0);
  const auto path = [&] { return !twice(0, s, x, y).ok(); };
  // Unreported: 1, the question whether the stream is captured; each leaving of a context; and all
  // of the end, which waits for the stream where it cannot record.
  // 1 captured? 2-3 retain, 4-5 enter, 6-7 allocate, 8-9 leave; 10-11 enter, 12 copy, 13-14 leave;
  // 15-16 enter, 17 wait, 18-19 leave; 20-21 enter, 22 copy, 23-24 leave; 25-26 enter, 27 record,
  // 28-29 leave.
  EXPECT_EQ(fail_every_call([this] { make_streams(); }, path,
                            {1, 8, 9, 13, 14, 18, 19, 23, 24, 25, 26, 27, 28, 29}),
            29);
  // A block is there whose copy is pending: 4 query, 5-6 allocate, 7-8 leave, ...
  const auto pending = [&] {
    make_streams();
    api().hold_stream(s, hold::until_synchronized);
    EXPECT_FALSE(path());
  };
  EXPECT_EQ(fail_every_call(pending, path, {1, 7, 8, 12, 13, 17, 18, 22, 23, 24, 25, 26, 27, 28}),
            28);
  // Its copy is complete: 4 query, 5-6 leave, ...
  const auto complete = [&] {
    make_streams();
    EXPECT_FALSE(path());
  };
  EXPECT_EQ(fail_every_call(complete, path, {1, 5, 6, 10, 11, 15, 16, 20, 21, 22, 23, 24, 25, 26}),
            26);
}

TEST_F(staging_test, every_failing_call_of_making_room_leaves_nothing) {
  set_staging_limit(3 * block);
  std::vector<int> x(ints, 5);
  std::vector<int> y(ints, 0);
  // One block whose copy is pending, one that is idle.
  const auto crowded = [&] {
    make_streams();
    api().hold_stream(s, hold::until_synchronized);
    EXPECT_TRUE(twice(0, s, x, y).ok());
    static_cast<void>(lease(s, 2 * block));
  };
  const auto lease_more = [&] { return !staging_block::lease(0, stream_ref(s), 4 * block).ok(); };
  // 1 captured? 2-3 enter, 4 wait, 5-6 free, 7-8 free, 9-10 allocate, 11-12 leave.
  EXPECT_EQ(fail_every_call(crowded, lease_more, {1, 11, 12}), 12);
  // Memory that runs out once, 9, is no error.
  EXPECT_EQ(fail_every_call(crowded, lease_more, {1, 9, 11, 12}, CUDA_ERROR_OUT_OF_MEMORY), 12);
  // 1-2 enter, 3 wait, 4-5 free, 6-7 free, 8-9 leave.
  EXPECT_EQ(fail_every_call(crowded, [] { return !trim_staging(0).ok(); }, {8, 9}), 9);
}

TEST_F(staging_test, nothing_is_called_once_the_process_ends) {
  std::vector<int> x(ints, 5);
  {
    staging_block b = lease(s);
    EXPECT_TRUE(b.to_device(x.data(), 0, 16).ok());
    api().clear_calls();
    jaxbridge::begin_exit();
  }
  EXPECT_EQ(api().calls(), 0u);
  EXPECT_EQ(staging_usage(0).lost, 1u);
  jaxbridge::cancel_exit_for_testing();
}

TEST_F(staging_test, without_a_driver_leasing_says_so) {
  const fake_cuda::environment_scope path("JAXBRIDGE_CUDA_DRIVER", "/nowhere");
  driver::reset_for_testing();
  const auto b = staging_block::lease(0, stream_ref(s), 1);
  ASSERT_FALSE(b.ok());
  EXPECT_EQ(b.error().code(), status_code::unavailable);
}

TEST_F(staging_test, eight_threads_on_two_devices) {
  set_staging_limit(6 * block);
  std::barrier start(8);
  std::vector<std::thread> threads;
  std::array<int, 8> wrong{};
  for (std::size_t i = 0; i < 8; ++i) {
    threads.emplace_back([&, i] {
      const int device = static_cast<int>(i % 2);
      const CUstream stream = api().make_stream(device, true);
      api().hold_stream(stream, hold::until_synchronized);
      std::vector<int> x(ints * (1 + 8 * (i % 3)));
      std::vector<int> y(x.size());
      start.arrive_and_wait();
      for (int n = 0; n < 40; ++n) {
        x.assign(x.size(), n + static_cast<int>(i));
        if (!twice(device, stream, x, y).ok()) ++wrong[i];
        // Every other time the next call finds the copy back pending.
        if (n % 2 == 0) continue;
        if (driver::get().cuStreamSynchronize(stream) != CUDA_SUCCESS) ++wrong[i];
        if (y.front() != 2 * x.front() || y.back() != 2 * x.back()) ++wrong[i];
      }
    });
  }
  for (auto& t : threads) t.join();
  for (const int w : wrong) EXPECT_EQ(w, 0);
  for (int device = 0; device < 2; ++device) {
    EXPECT_EQ(staging_usage(device).leased, 0u);
    EXPECT_EQ(staging_usage(device).lost, 0u);
  }
}

}  // namespace

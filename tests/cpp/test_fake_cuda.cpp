// SPDX-License-Identifier: Apache-2.0
// The fake driver does what driver 580 (CUDA 13.0) was seen to do on an H200 while a stream is
// captured, and about contexts and pointers.
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "core/cuda/context.hpp"
#include "core/cuda/driver.hpp"
#include "fakes/fake_cuda_fixture.hpp"

namespace {

using namespace jaxbridge::cuda;  // NOLINT: the names of cuda.h
using fake_cuda::api;
using fake_cuda::capture_mode;

class fake_cuda_test : public fake_cuda::cuda_test {
 protected:
  void SetUp() override {
    cuda_test::SetUp();
    static_cast<void>(driver::get());
    other = api().make_stream(0, true);
  }

  CUstream other = nullptr;
};

// A call made while another stream is captured: what it returns for a captured stream that does not
// block the legacy one, for one that does, and for either when another thread makes the call.
struct seen {
  const char* name;
  std::function<CUresult()> call;
  int non_blocking;
  int blocking;
  int non_blocking_other_thread;
  int blocking_other_thread;
};

TEST_F(fake_cuda_test, what_a_thread_local_capture_forbids) {
  const driver& cu = driver::get();
  CUevent plain = nullptr;
  void* pinned = nullptr;
  std::vector<unsigned char> memory(64);
  const auto address = reinterpret_cast<CUdeviceptr>(memory.data());
  {
    const auto scope = context_scope::enter(0);
    ASSERT_EQ(cu.cuEventCreate(&plain, CU_EVENT_DISABLE_TIMING), CUDA_SUCCESS);
  }
  const std::vector<seen> table = {
      {"cuStreamQuery", [&] { return cu.cuStreamQuery(other); }, 900, 900, 0, 0},
      {"cuStreamSynchronize", [&] { return cu.cuStreamSynchronize(other); }, 900, 900, 0, 0},
      {"cuEventQuery", [&] { return cu.cuEventQuery(plain); }, 900, 900, 0, 0},
      {"cuEventSynchronize", [&] { return cu.cuEventSynchronize(plain); }, 900, 900, 0, 0},
      {"cuCtxSynchronize", [&] { return cu.cuCtxSynchronize(); }, 900, 900, 900, 900},
      {"cuMemHostAlloc",
       [&] {
         void* p = nullptr;
         const CUresult code = cu.cuMemHostAlloc(&p, 4096, 0);
         if (code == CUDA_SUCCESS) static_cast<void>(cu.cuMemFreeHost(p));
         return code;
       },
       900, 900, 0, 0},
      {"cuMemFreeHost",
       [&] {
         const CUresult code = cu.cuMemFreeHost(pinned);
         if (code == CUDA_SUCCESS) pinned = nullptr;
         return code;
       },
       900, 900, 0, 0},
      {"cuEventCreate and cuEventDestroy",
       [&] {
         CUevent e = nullptr;
         const CUresult code = cu.cuEventCreate(&e, 0);
         return code != CUDA_SUCCESS ? code : cu.cuEventDestroy(e);
       },
       0, 0, 0, 0},
      {"cuStreamGetCtx of the legacy stream",
       [&] {
         CUcontext c = nullptr;
         return cu.cuStreamGetCtx(nullptr, &c);
       },
       0, 906, 0, 906},
      {"cuStreamQuery of the legacy stream", [&] { return cu.cuStreamQuery(nullptr); }, 900, 906, 0,
       906},
      {"cuStreamSynchronize of the legacy stream", [&] { return cu.cuStreamSynchronize(nullptr); },
       900, 906, 0, 906},
      {"cuMemsetD8Async on the legacy stream",
       [&] { return cu.cuMemsetD8Async(address, 0, 4, nullptr); }, 0, 906, 0, 906},
      {"cuEventRecord on the legacy stream", [&] { return cu.cuEventRecord(plain, nullptr); }, 0,
       906, 0, 906},
      {"cuMemsetD8Async", [&] { return cu.cuMemsetD8Async(address, 0, 4, other); }, 0, 0, 0, 0},
      {"cuEventRecord", [&] { return cu.cuEventRecord(plain, other); }, 0, 0, 0, 0},
  };
  for (const seen& row : table) {
    for (const bool blocking : {false, true}) {
      for (const bool other_thread : {false, true}) {
        const auto scope = context_scope::enter(0);
        const std::string what = std::string(row.name) + (blocking ? ", blocking" : "") +
                                 (other_thread ? ", other thread" : "");
        const CUstream s = api().make_stream(0, !blocking);
        ASSERT_EQ(cu.cuMemHostAlloc(&pinned, 4096, 0), CUDA_SUCCESS) << what;
        ASSERT_EQ(api().begin_capture(s, capture_mode::thread_local_), CUDA_SUCCESS);
        CUresult code = CUDA_SUCCESS;
        if (other_thread) {
          std::thread([&] {
            const auto its_scope = context_scope::enter(0);
            code = row.call();
          }).join();
        } else {
          code = row.call();
        }
        const int expected =
            other_thread ? (blocking ? row.blocking_other_thread : row.non_blocking_other_thread)
                         : (blocking ? row.blocking : row.non_blocking);
        EXPECT_EQ(code, expected) << what;
        // What is refused spoils the capture as well.
        EXPECT_EQ(api().end_capture(s, nullptr),
                  expected == 0 ? CUDA_SUCCESS : CUDA_ERROR_STREAM_CAPTURE_INVALIDATED)
            << what;
        if (pinned != nullptr) {
          EXPECT_EQ(cu.cuMemFreeHost(pinned), CUDA_SUCCESS);
        }
      }
    }
  }
  EXPECT_EQ(cu.cuEventDestroy(plain), CUDA_SUCCESS);
}

TEST_F(fake_cuda_test, the_other_modes_of_capture) {
  const driver& cu = driver::get();
  const auto scope = context_scope::enter(0);
  const CUstream s = api().make_stream(0, true);
  for (const capture_mode mode : {capture_mode::global, capture_mode::relaxed}) {
    const int expected = mode == capture_mode::global ? 900 : 0;
    ASSERT_EQ(api().begin_capture(s, mode), CUDA_SUCCESS);
    CUresult code = CUDA_SUCCESS;
    std::thread([&] { code = cu.cuStreamQuery(other); }).join();
    EXPECT_EQ(code, expected);
    EXPECT_EQ(api().end_capture(s, nullptr),
              expected == 0 ? CUDA_SUCCESS : CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    ASSERT_EQ(api().begin_capture(s, mode), CUDA_SUCCESS);
    EXPECT_EQ(cu.cuCtxSynchronize(), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    EXPECT_EQ(api().end_capture(s, nullptr), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  }
}

TEST_F(fake_cuda_test, events_of_a_capture) {
  const driver& cu = driver::get();
  const auto scope = context_scope::enter(0);
  const CUstream s = api().make_stream(0, true);
  CUevent e = nullptr;
  CUevent never = nullptr;
  ASSERT_EQ(cu.cuEventCreate(&e, 0), CUDA_SUCCESS);
  ASSERT_EQ(cu.cuEventCreate(&never, 0), CUDA_SUCCESS);
  const auto begin = [&] {
    ASSERT_EQ(api().begin_capture(s, capture_mode::thread_local_), CUDA_SUCCESS);
  };

  begin();
  EXPECT_EQ(cu.cuEventRecord(e, s), CUDA_SUCCESS);
  EXPECT_EQ(cu.cuEventQuery(e), CUDA_ERROR_CAPTURED_EVENT);
  EXPECT_EQ(api().end_capture(s, nullptr), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);

  begin();
  EXPECT_EQ(cu.cuEventRecord(e, s), CUDA_SUCCESS);
  EXPECT_EQ(api().end_capture(s, nullptr), CUDA_SUCCESS);
  EXPECT_EQ(cu.cuEventQuery(e), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cu.cuEventSynchronize(e), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cu.cuStreamWaitEvent(other, e, 0), CUDA_ERROR_INVALID_VALUE);

  begin();
  EXPECT_EQ(cu.cuEventRecord(e, s), CUDA_SUCCESS);
  EXPECT_EQ(cu.cuStreamWaitEvent(nullptr, e, 0), CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
  EXPECT_EQ(api().end_capture(s, nullptr), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);

  EXPECT_EQ(cu.cuEventRecord(e, other), CUDA_SUCCESS);
  begin();
  EXPECT_EQ(cu.cuStreamWaitEvent(s, never, 0), CUDA_SUCCESS);
  EXPECT_EQ(cu.cuStreamWaitEvent(s, e, 0), CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
  EXPECT_EQ(cu.cuStreamWaitEvent(s, never, 0), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  EXPECT_EQ(cu.cuEventRecord(e, s), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  EXPECT_EQ(api().end_capture(s, nullptr), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);

  // A stream that joins and gets no work need not come back; one that got some must (this one is
  // the documentation's word, not seen).
  begin();
  EXPECT_EQ(cu.cuEventRecord(e, s), CUDA_SUCCESS);
  EXPECT_EQ(cu.cuStreamWaitEvent(other, e, 0), CUDA_SUCCESS);
  EXPECT_EQ(api().end_capture(s, nullptr), CUDA_SUCCESS);
  begin();
  EXPECT_EQ(cu.cuEventRecord(e, s), CUDA_SUCCESS);
  EXPECT_EQ(cu.cuStreamWaitEvent(other, e, 0), CUDA_SUCCESS);
  EXPECT_EQ(cu.cuEventRecord(e, other), CUDA_SUCCESS);
  EXPECT_EQ(api().end_capture(s, nullptr), CUDA_ERROR_STREAM_CAPTURE_UNJOINED);

  begin();
  CUresult code = CUDA_SUCCESS;
  std::thread([&] { code = api().end_capture(s, nullptr); }).join();
  EXPECT_EQ(code, CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
  EXPECT_EQ(api().end_capture(s, nullptr), CUDA_ERROR_ILLEGAL_STATE);

  EXPECT_EQ(cu.cuEventDestroy(e), CUDA_SUCCESS);
  EXPECT_EQ(cu.cuEventDestroy(never), CUDA_SUCCESS);
}

TEST_F(fake_cuda_test, what_needs_a_current_context) {
  const driver& cu = driver::get();
  CUevent e = nullptr;
  {
    const auto scope = context_scope::enter(0);
    ASSERT_EQ(cu.cuEventCreate(&e, 0), CUDA_SUCCESS);
  }
  std::vector<unsigned char> memory(64);
  CUcontext c = nullptr;
  CUevent none = nullptr;
  void* pinned = nullptr;
  CUstreamCaptureStatus state = CU_STREAM_CAPTURE_STATUS_NONE;
  EXPECT_EQ(cu.cuCtxGetCurrent(&c), CUDA_SUCCESS);
  EXPECT_EQ(c, nullptr);
  EXPECT_EQ(cu.cuStreamGetCtx(other, &c), CUDA_SUCCESS);
  EXPECT_EQ(c, api().primary(0));
  EXPECT_EQ(cu.cuStreamGetCtx(nullptr, &c), CUDA_ERROR_INVALID_CONTEXT);
  EXPECT_EQ(cu.cuEventCreate(&none, 0), CUDA_ERROR_INVALID_CONTEXT);
  EXPECT_EQ(cu.cuEventRecord(e, other), CUDA_SUCCESS);
  EXPECT_EQ(cu.cuStreamWaitEvent(other, e, 0), CUDA_SUCCESS);
  EXPECT_EQ(cu.cuMemsetD8Async(reinterpret_cast<CUdeviceptr>(memory.data()), 1, 4, other),
            CUDA_SUCCESS);
  EXPECT_EQ(memory[3], 1);
  EXPECT_EQ(cu.cuStreamSynchronize(other), CUDA_SUCCESS);
  EXPECT_EQ(cu.cuEventQuery(e), CUDA_SUCCESS);
  EXPECT_EQ(cu.cuMemHostAlloc(&pinned, 4096, 0), CUDA_ERROR_INVALID_CONTEXT);
  EXPECT_EQ(cu.cuStreamIsCapturing(other, &state), CUDA_SUCCESS);
  EXPECT_EQ(cu.cuStreamIsCapturing(nullptr, &state), CUDA_ERROR_INVALID_CONTEXT);
  EXPECT_EQ(cu.cuCtxPopCurrent(&c), CUDA_ERROR_INVALID_CONTEXT);

  // An event belongs to a context, a wait for it does not.
  const CUcontext foreign = api().make_context(0);
  const CUstream s = api().make_stream_in(foreign, true);
  EXPECT_EQ(cu.cuEventRecord(e, s), CUDA_ERROR_INVALID_HANDLE);
  EXPECT_EQ(cu.cuStreamWaitEvent(s, e, 0), CUDA_SUCCESS);
  EXPECT_EQ(cu.cuEventDestroy(e), CUDA_SUCCESS);
}

TEST_F(fake_cuda_test, unknown_pointers) {
  const driver& cu = driver::get();
  int ordinal = 7;
  unsigned int type = 7;
  CUpointer_attribute wanted[] = {CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
                                  CU_POINTER_ATTRIBUTE_MEMORY_TYPE};
  void* values[] = {&ordinal, &type};
  const auto pointer = reinterpret_cast<CUdeviceptr>(&ordinal);
  EXPECT_EQ(cu.cuPointerGetAttributes(2, wanted, values, pointer), CUDA_SUCCESS);
  EXPECT_EQ(ordinal, -2);
  EXPECT_EQ(type, 0u);
  EXPECT_EQ(cu.cuPointerGetAttribute(&ordinal, wanted[0], pointer), CUDA_ERROR_INVALID_VALUE);
}

}  // namespace

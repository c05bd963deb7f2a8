// SPDX-License-Identifier: Apache-2.0
#include "python/driver.hpp"

#include <cstring>
#include <optional>
#include <stdexcept>

#include "core/cuda/capture_mode.hpp"
#include "core/cuda/context.hpp"
#include "core/cuda/device_memory.hpp"
#include "core/cuda/driver.hpp"
#include "core/cuda/export_stream.hpp"
#include "core/cuda/stream_order.hpp"
#include "core/memory/update.hpp"
#include "python/buffer.hpp"

namespace jaxbridge::python {
namespace {

void raise_error(const status& s) {
  if (!s.ok()) throw std::runtime_error(s.message());
}

stream_ref stream_at(std::uintptr_t handle) { return stream_ref(reinterpret_cast<void*>(handle)); }

// Runs `work` without the GIL and with the device's primary context current.
template <class Work>
void on_device(int ordinal, const Work& work) {
  status s;
  {
    const nb::gil_scoped_release no_gil;
    const result<cuda::context_scope> scope = cuda::context_scope::enter(ordinal);
    s = scope.ok() ? work() : scope.error();
  }
  raise_error(s);
}

std::uintptr_t current_context() {
  const result<cuda::CUcontext> current = cuda::current_context();
  raise_error(current.ok() ? status() : current.error());
  return reinterpret_cast<std::uintptr_t>(current.value());
}

void copy(const call_buffer& from, const call_buffer& to) {
  if (from.layout->size_bytes != to.layout->size_bytes || from.device != to.device) {
    throw nb::value_error("buffers of other size or on another device cannot be copied");
  }
  if (from.revoked || to.revoked) throw nb::value_error("the buffer's call has ended");
  if (to.readonly) throw nb::value_error("the destination is read-only");
  const std::size_t bytes = from.layout->size_bytes;
  if (bytes == 0 || from.data == to.data) return;
  if (from.device.platform == platform::cpu) {
    std::memmove(to.data, from.data, bytes);
  } else {
    on_device(to.device.ordinal, [&] { return cuda::copy(to.data, from.data, bytes, to.stream); });
  }
}

void fill(const call_buffer& b, unsigned char value) {
  if (b.revoked || b.readonly) throw nb::value_error("the buffer cannot be written");
  const std::size_t bytes = b.layout->size_bytes;
  if (bytes == 0) return;
  if (b.device.platform == platform::cpu) {
    std::memset(b.data, value, bytes);
  } else {
    on_device(b.device.ordinal, [&] { return cuda::fill(b.data, value, bytes, b.stream); });
  }
}

}  // namespace

void bind_driver(nb::module_& m) {
  m.def(
      "stream_order",
      [](std::uintptr_t from, std::uintptr_t to, int ordinal) {
        on_device(ordinal, [&] { return cuda::order(stream_at(from), stream_at(to)); });
      },
      nb::arg("from_stream"), nb::arg("to_stream"), nb::arg("ordinal"),
      "Later work on to_stream waits for what is on from_stream now; the host does not. 0 is the "
      "legacy default stream.");
  m.def(
      "begin_update",
      [](std::optional<std::uintptr_t> owner, std::uintptr_t jax, int ordinal,
         std::uint64_t number) {
        const std::optional<stream_ref> stream =
            owner ? std::optional(stream_at(*owner)) : std::nullopt;
        status s;
        on_device(ordinal, [&] {
          const result<std::uint64_t> begun = memory::begin_update(stream, stream_at(jax), number);
          if (begun.ok()) {
            number = begun.value();
          } else {
            s = begun.error();
          }
          return status();
        });
        if (s.code() == status_code::failed_precondition) {
          throw nb::buffer_error(("inplace: " + s.message()).c_str());
        }
        raise_error(s);
        return number;
      },
      nb::arg("owner_stream").none(), nb::arg("jax_stream"), nb::arg("ordinal"), nb::arg("number"),
      "What JAX's stream gets from now on comes after what that of an owner of memory has; None: "
      "it "
      "is not known. Returns the number of the update, which is given for more memory of the same "
      "program; 0: none yet.\n\nRaises BufferError where the owner's stream is being captured.");
  m.def(
      "end_update",
      [](std::uint64_t number, std::uintptr_t owner, int ordinal) {
        bool is_ordered = false;
        on_device(ordinal, [&] {
          const result<bool> ended = memory::end_update(number, stream_at(owner));
          if (!ended.ok()) return ended.error();
          is_ordered = ended.value();
          return status();
        });
        return is_ordered;
      },
      nb::arg("number"), nb::arg("owner_stream"), nb::arg("ordinal"),
      "What the owner's stream gets from now on comes after the program. False: it is not known "
      "that "
      "this thread has enqueued all of it.");
  m.def("current_context", &current_context,
        "The CUcontext that is current for this thread; 0: none.");
  m.def(
      "make_current",
      [](std::uintptr_t context) {
        raise_error(cuda::make_current(reinterpret_cast<cuda::CUcontext>(context)));
      },
      nb::arg("context"), "Makes a CUcontext, or none, current for this thread, where it is not.");
  m.def(
      "export_stream",
      [](int ordinal) {
        const result<stream_ref> found = [ordinal] {
          const nb::gil_scoped_release no_gil;
          return cuda::export_stream(ordinal);
        }();
        if (!found.ok()) throw std::runtime_error(found.error().message());
        return found.value().address();
      },
      nb::arg("ordinal"), "A stream without work, on which arrays of JAX become ready for others.");
  m.def(
      "synchronize_device",
      [](int ordinal) { on_device(ordinal, [] { return cuda::synchronize_context(); }); },
      nb::arg("ordinal"), "The host waits for all that the device was given.");
  m.def(
      "is_capturing",
      [](std::uintptr_t stream, int ordinal) {
        bool capturing = false;
        on_device(ordinal, [&] {
          capturing = cuda::is_capturing(stream_at(stream));
          return status();
        });
        return capturing;
      },
      nb::arg("stream"), nb::arg("ordinal"), "Whether a capture forbids to wait for the stream.");
  m.def(
      "synchronize",
      [](std::uintptr_t stream, int ordinal) {
        on_device(ordinal, [&] { return cuda::synchronize(stream_at(stream)); });
      },
      nb::arg("stream"), nb::arg("ordinal"), "The host waits for the stream.");
  m.def(
      "exchange_capture_mode",
      [](int mode) {
        const auto before =
            cuda::exchange_capture_mode(static_cast<cuda::CUstreamCaptureMode>(mode));
        if (!before.ok()) throw std::runtime_error(before.error().message());
        return static_cast<int>(before.value());
      },
      nb::arg("mode"),
      "Sets what this thread's captures forbid it (2: nothing); returns what was set before.");
  m.def("copy", &copy, nb::arg("source"), nb::arg("destination"),
        "Copies a buffer of this call; on CUDA on the call's stream.");
  m.def("fill", &fill, nb::arg("buffer"), nb::arg("value"),
        "Sets every byte of a buffer of this call; on CUDA on the call's stream.");
  m.def(
      "driver_info",
      [] {
        const status s = [] {
          const nb::gil_scoped_release no_gil;
          return cuda::driver::status();
        }();
        const cuda::driver_info& info = cuda::driver::info();
        nb::list missing;
        for (const char* name : info.missing) missing.append(name);
        int count = 0;
        if (s.ok()) count = cuda::device_count();
        nb::dict out;
        out["error"] = s.ok() ? nb::none() : nb::object(nb::str(s.message().c_str()));
        out["path"] = info.path;
        out["version"] = info.version;
        out["missing"] = missing;
        out["devices"] = count;
        return out;
      },
      nb::sig("def driver_info() -> dict[str, object]"),
      "Loads the driver and says what was found: error, path, version, missing, devices.");
}

}  // namespace jaxbridge::python

// SPDX-License-Identifier: Apache-2.0
#include "python/python_target.hpp"

#include <cxxabi.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>

#include "core/cuda/capture_mode.hpp"
#include "core/cuda/context.hpp"
#include "core/cuda/staging.hpp"
#include "core/cuda/stream_order.hpp"
#include "core/exit.hpp"
#include "core/turn.hpp"
#include "python/current_call.hpp"
#include "python/gil.hpp"
#include "python/scratch.hpp"

namespace jaxbridge::python {
namespace {

// A bound on the plans of one target: a program exported with symbolic shapes can bring any number.
constexpr std::size_t max_plans = 64;

bool same_layouts(std::span<const any_buffer> buffers,
                  const std::vector<std::shared_ptr<const buffer_layout>>& layouts) {
  return std::equal(buffers.begin(), buffers.end(), layouts.begin(), layouts.end(),
                    [](const any_buffer& b, const std::shared_ptr<const buffer_layout>& l) {
                      return b.dtype == l->dtype && std::equal(b.shape.begin(), b.shape.end(),
                                                               l->shape.begin(), l->shape.end());
                    });
}

std::vector<std::shared_ptr<const buffer_layout>> make_layouts(
    std::span<const any_buffer> buffers) {
  std::vector<std::shared_ptr<const buffer_layout>> layouts;
  layouts.reserve(buffers.size());
  for (const any_buffer& b : buffers) layouts.push_back(make_layout(b));
  return layouts;
}

nb::list describe(const std::vector<std::shared_ptr<const buffer_layout>>& layouts) {
  nb::list out;
  for (const auto& l : layouts) out.append(nb::make_tuple(l->numpy_dtype, l->shape_tuple));
  return out;
}

// A pinned block that holds the operands of `c`, each at its offset.
result<cuda::staging_block> to_host(const dispatch::call& c, std::size_t size_bytes,
                                    const std::vector<std::size_t>& offsets) {
  result<cuda::staging_block> block =
      cuda::staging_block::lease(c.device.ordinal, c.stream, size_bytes);
  if (!block.ok()) return block;
  for (std::size_t i = 0; i < c.operands.size(); ++i) {
    if (status s =
            block.value().to_host(offsets[i], c.operands[i].data, c.operands[i].size_bytes());
        !s.ok()) {
      return s;
    }
  }
  if (status s = block.value().wait(); !s.ok()) return s;
  return block;
}

// Which memory a call is on: the device, the stream, all addresses. Valid until this thread's next
// use.
std::span<const std::uintptr_t> key_of(const dispatch::call& c, const std::vector<void*>* host) {
  thread_local std::vector<std::uintptr_t> key;
  key.clear();
  key.push_back(static_cast<std::uintptr_t>(c.device.ordinal));
  key.push_back(c.stream.address());
  const auto add = [](const void* data) { key.push_back(reinterpret_cast<std::uintptr_t>(data)); };
  if (host != nullptr) {
    for (const void* data : *host) add(data);
  } else {
    for (const any_buffer& b : c.operands) add(b.data);
    for (const any_buffer& b : c.results) add(b.data);
  }
  return key;
}

// The interpreter ended before the function did, and Python (3.12, 3.13) ends this thread. Nothing
// of ours may run any more, not even a destructor, and XLA's frames cannot be unwound: the thread
// waits for the end of the process, as Python itself has it from 3.14 on.
[[noreturn]] void wait_for_the_end() {
  for (;;) pause();
}

graph_mode graph_mode_of(const std::string& text) {
  if (text == "off") return graph_mode::off;
  if (text == "replay") return graph_mode::replay;
  if (text == "verify") return graph_mode::verify;
  if (text == "xla") return graph_mode::xla;
  throw std::invalid_argument("no graph mode: " + text);
}

// "ValueError: text", whatever the text is.
std::string text_of(const nb::python_error& raised) {
  std::string text = "an exception";
  try {
    text = nb::cast<std::string>(raised.type().attr("__name__"));
    // Of str itself: what an exception says may be of a class with an encode() of its own.
    const nb::str said(raised.value());
    const auto encoded =
        nb::steal<nb::bytes>(PyUnicode_AsEncodedString(said.ptr(), "utf-8", "backslashreplace"));
    if (!encoded.is_valid()) throw nb::python_error();
    if (encoded.size() > 0) text.append(": ").append(encoded.c_str(), encoded.size());
  } catch (nb::python_error&) {
    // It can't be told what it says.
  }
  return text;
}

// Marks a binding as in use: a call inside the call, or on another thread, makes its own.
class use_of {
 public:
  explicit use_of(binding& b) noexcept : b_(b) { b_.in_use = true; }
  ~use_of() { b_.in_use = false; }
  use_of(const use_of&) = delete;
  use_of& operator=(const use_of&) = delete;

 private:
  binding& b_;
};

nb::list positions_of_held(const std::vector<binding::lease>& leases) {
  nb::list out;
  for (std::size_t i = 0; i < leases.size(); ++i) {
    if (leases[i].held()) out.append(i);
  }
  return out;
}

}  // namespace

python_target::python_target(nb::object make_plan, nb::object on_error, nb::object on_held,
                             nb::object on_not_captured, nb::object on_compared,
                             dispatch::in_place in_place, std::size_t limit, graph_mode graph)
    : make_plan_(std::move(make_plan)),
      on_error_(std::move(on_error)),
      on_held_(std::move(on_held)),
      limit_(limit),
      in_place_(std::move(in_place)),
      capturable_(graph == graph_mode::xla) {
  if (graph == graph_mode::verify) {
    replayer_ = std::make_unique<replayer>(limit, in_place_.pairs(), std::move(on_not_captured),
                                           std::move(on_compared));
  } else if (graph == graph_mode::replay) {
    replayer_ = std::make_unique<replayer>(limit, in_place_.pairs(), std::move(on_not_captured),
                                           nb::object());
  }
}

python_target::~python_target() {
  const python_use use;
  if (!use.granted()) {
    // Python may be gone: its objects are left where they are.
    (void)make_plan_.release();
    (void)on_error_.release();
    (void)on_held_.release();
    (void)captured_memory_.release();
    (void)replayer_.release();
    for (std::shared_ptr<plan>& p : plans_) new std::shared_ptr<plan>(std::move(p));
    return;
  }
  // The last owner can be one of XLA's threads.
  const thread_gil gil;
  make_plan_.reset();
  on_error_.reset();
  on_held_.reset();
  captured_memory_.reset();
  if (replayer_ != nullptr) replayer_->clear(++generation_);  // which waits, without the GIL
  replayer_.reset();
  plans_.clear();
}

std::size_t python_target::kept() const noexcept {
  std::size_t n = 0;
  for (const std::shared_ptr<plan>& p : plans_) n += p->bindings->size();
  return n;
}

void python_target::clear_plans() {
  // Destroying them runs Python, which can come back here.
  const std::vector<std::shared_ptr<plan>> cleared = std::exchange(plans_, {});
  ++generation_;
  if (replayer_ != nullptr) replayer_->clear(generation_);
}

std::shared_ptr<plan> python_target::plan_for(const dispatch::call& c) {
  const auto find = [&]() -> std::shared_ptr<plan> {
    for (const std::shared_ptr<plan>& p : plans_) {
      if (p->where == c.device.platform && same_layouts(c.operands, p->operands) &&
          same_layouts(c.results, p->results)) {
        return p;
      }
    }
    return nullptr;
  };
  if (std::shared_ptr<plan> found = find(); found != nullptr) return found;

  const std::uint64_t generation = generation_;
  auto operands = make_layouts(c.operands);
  auto results = make_layouts(c.results);
  const nb::object made =
      make_plan_(name(c.device.platform), describe(operands), describe(results));
  auto fresh = nb::cast<std::shared_ptr<plan>>(made);
  fresh->where = c.device.platform;
  fresh->operands = std::move(operands);
  fresh->results = std::move(results);
  fresh->bindings = std::make_unique<plan::cache>(limit_);
  fresh->generation = generation;
  // Making it ran Python, so that another thread may have forgotten what it is made of, or have
  // come first.
  if (generation != generation_) return fresh;
  if (std::shared_ptr<plan> found = find(); found != nullptr) return found;
  std::shared_ptr<plan> oldest;  // destroyed when the list is whole again
  if (plans_.size() >= max_plans) {
    oldest = std::move(plans_.front());
    plans_.erase(plans_.begin());
  }
  plans_.push_back(fresh);
  return fresh;
}

std::shared_ptr<binding> python_target::make_binding(const plan& p, const dispatch::call& c,
                                                     const std::vector<void*>* host) const {
  const std::size_t operand_count = c.operands.size();
  const device where = host == nullptr ? c.device : device{platform::cpu, 0};
  const stream_ref stream = host == nullptr ? c.stream : stream_ref();
  auto b = std::make_shared<binding>();
  for (std::size_t i = 0; i < operand_count; ++i) {
    const bool writable = in_place_.writes(i);
    void* data = host == nullptr ? c.operands[i].data : (*host)[i];
    b->operands.push_back(
        nb::cast(call_buffer{data, p.operands[i], where, stream, !writable, false}));
  }
  for (std::size_t i = 0; i < c.results.size(); ++i) {
    void* data = host == nullptr ? c.results[i].data : (*host)[operand_count + i];
    b->results.push_back(nb::cast(call_buffer{data, p.results[i], where, stream, false, false}));
  }
  complete(*b, p);
  return b;
}

// The lease of the views ends here, whether the function returned or raised. Throws where one is
// held.
void python_target::end_lease(const std::shared_ptr<binding>& b,
                              const nb::object& exception) const {
  if (!b->held()) return;
  // on_held looks again, after one collection, and raises where it was no false alarm.
  // What it is given lives on in the traceback of what it raises.
  on_held_(nb::cpp_function([b] {
             return nb::make_tuple(positions_of_held(b->operand_leases),
                                   positions_of_held(b->result_leases));
           }),
           exception);
}

// Calls the function on the memory of `c`, whose stream is being captured for `home`.
nb::object python_target::run_captured(const std::shared_ptr<plan>& p, const dispatch::call& c,
                                       stream_ref home) {
  // What a call that failed has allocated ends in the capture still: as long as this lives.
  std::optional<cuda::relaxed_capture_scope> relaxed;
  const std::shared_ptr<binding> b = make_binding(*p, c, nullptr);
  const current_call_scope scope(c);
  nb::object memory;
  try {
    p->call_captured(*b, {c.device.ordinal, c.stream, home, nullptr}, memory);
  } catch (__cxxabiv1::__forced_unwind&) {
    wait_for_the_end();
  } catch (nb::python_error& raised) {
    relaxed.emplace();
    b->revoke();
    // What interrupts the program is not about the capture.
    if (!raised.matches(PyExc_Exception)) throw;
    throw not_captured(text_of(raised));
  }
  try {
    end_lease(b, nb::none());
  } catch (...) {
    relaxed.emplace();
    b->revoke();
    throw;
  }
  return memory;
}

void python_target::run(const std::shared_ptr<plan>& p, const dispatch::call& c,
                        const std::vector<void*>* host) {
  // What a framework makes current, and does not put back, ends with it.
  std::optional<result<cuda::context_scope>> context;
  if (host == nullptr && c.device.platform == platform::cuda) {
    context.emplace(cuda::context_scope::enter(c.device.ordinal));
    if (!context->ok()) throw std::runtime_error(context->error().message());
  }
  if (replayer_ == nullptr || host != nullptr || c.device.platform != platform::cuda) {
    run_now(p, c, host);
    return;
  }
  const auto captured = [&](const dispatch::call& on) { return run_captured(p, on, c.stream); };
  const auto now = [&] { run_now(p, c, nullptr); };
  const bool is_done = replayer_->compares() ? replayer_->compared(c, p, captured, now)
                                             : replayer_->captured(c, p, captured);
  if (is_done) return;
  const auto start = std::chrono::steady_clock::now();
  now();
  replayer_->ran(c, *p, std::chrono::steady_clock::now() - start);
}

void python_target::run_now(const std::shared_ptr<plan>& of, const dispatch::call& c,
                            const std::vector<void*>* host) {
  plan& p = *of;
  std::shared_ptr<binding> b;
  bool is_kept = true;
  if (const std::shared_ptr<binding>* found = p.bindings->find(key_of(c, host)); found != nullptr) {
    ++hits_;
    b = *found;
  }
  if (b == nullptr || b->in_use) {
    is_kept = b == nullptr;
    b = make_binding(p, c, host);
    if (is_kept) {
      // Making it ran Python, so that another thread may have come first.
      const auto key = key_of(c, host);
      is_kept = p.bindings->find(key) == nullptr;
      // What goes for it is destroyed when the cache is whole again.
      if (is_kept) const auto gone = p.bindings->insert(key, b);
    }
  }
  const use_of use(*b);
  // What a view may still refer to is not used again.
  const auto give_up = [&] {
    b->revoke();
    if (!is_kept) return;
    const auto gone = p.bindings->erase(key_of(c, host));
  };

  const bool xla_captures = capturable_ && cuda::is_capturing(c.stream);
  std::optional<cuda::relaxed_capture_scope> relaxed;  // as in run_captured()
  nb::object memory;
  const current_call_scope scope(c);
  try {
    if (xla_captures) {
      p.call_captured(*b, {c.device.ordinal, c.stream, c.stream, nullptr}, memory);
      // XLA's graph lives at most as long as this target, and so does what it works on.
      captured_memory_.append(nb::make_tuple(of, memory));
    } else if (p.has_scratch) {
      const scratch_scope scratch(c);
      p.call(*b, {c.device.ordinal, c.stream, c.stream, scratch.get()});
    } else {
      p.call(*b, {c.device.ordinal, c.stream, c.stream, nullptr});
    }
  } catch (__cxxabiv1::__forced_unwind&) {
    wait_for_the_end();
  } catch (nb::python_error& raised) {
    if (xla_captures) relaxed.emplace();
    // An exception's frames hold views legitimately; on_held clears them.
    const nb::object exception = nb::borrow(raised.value());
    try {
      end_lease(b, exception);
    } catch (...) {
      give_up();
      throw;
    }
    // What the exception itself still holds must not hand out XLA's memory.
    give_up();
    throw;
  }
  try {
    end_lease(b, nb::none());
  } catch (...) {
    give_up();
    throw;
  }
}

status python_target::invoke_with_gil(const dispatch::call& c) {
  ++calls_;
  const std::shared_ptr<plan> p = plan_for(c);
  if (!p->staged) {
    run(p, c, nullptr);
    return {};
  }

  // The callee works on the host: operands come over, results go back, in one pinned block.
  cuda::staging_layout layout;
  std::vector<std::size_t> offsets;
  offsets.reserve(c.operands.size() + c.results.size());
  for (const any_buffer& b : c.operands) offsets.push_back(layout.add(b.size_bytes()));
  for (const any_buffer& b : c.results) offsets.push_back(layout.add(b.size_bytes()));
  // An in-place operand and its result are one memory on the host too.
  for (const auto& [operand, result] : in_place_.pairs()) {
    offsets[c.operands.size() + result] = offsets[operand];
  }
  result<cuda::staging_block> leased = [&] {
    const nb::gil_scoped_release no_gil;
    return to_host(c, layout.size_bytes(), offsets);
  }();
  if (!leased.ok()) return leased.error();
  cuda::staging_block& block = leased.value();
  std::vector<void*> host;
  host.reserve(offsets.size());
  for (const std::size_t offset : offsets) host.push_back(block.at(offset));
  run(p, c, &host);
  const nb::gil_scoped_release no_gil;
  for (std::size_t i = 0; i < c.results.size(); ++i) {
    if (status s = block.to_device(c.results[i].data, offsets[c.operands.size() + i],
                                   c.results[i].size_bytes());
        !s.ok()) {
      return s;
    }
  }
  return {};
}

status python_target::invoke(const dispatch::call& c) noexcept {
  const python_use use;
  if (!use.granted()) {
    return {status_code::failed_precondition,
            "the Python interpreter is shutting down: a call that a program still had to make was "
            "not made. Wait for results (jax.block_until_ready) before the program ends."};
  }
  if (status s = in_place_.check(c); !s.ok()) return s;
  if (replayer_ != nullptr && c.device.platform == platform::cuda) {
    if (std::optional<status> replayed = replayer_->replay(c)) return *std::move(replayed);
  }
  // On the CPU functions compute, many of them without the GIL: there nobody waits.
  std::optional<turn> this_turn;
  if (c.device.platform == platform::cuda) this_turn.emplace();
  const thread_gil gil;
  try {
    return invoke_with_gil(c);
  } catch (nb::python_error& raised) {
    const nb::object exception = nb::borrow(raised.value());
    try {
      return {status_code::internal, nb::cast<std::string>(on_error_(exception))};
    } catch (std::exception& second) {
      return {status_code::internal, std::string(raised.what()) + " (and " + second.what() + ")"};
    }
  } catch (std::exception& e) {
    return {status_code::internal, e.what()};
  }
}

void bind_target(nb::module_& m) {
  nb::class_<python_target>(m, "Target", nb::is_final(), "What a key stands for: calls Python.")
      .def(
          "__init__",
          [](python_target* self, nb::object make_plan, nb::object on_error, nb::object on_held,
             nb::object on_not_captured, nb::object on_compared,
             std::vector<std::string> operand_names,
             std::vector<dispatch::in_place::index_pair> in_place,
             std::vector<std::size_t> external, std::size_t limit, const std::string& graph) {
            new (self) python_target(std::move(make_plan), std::move(on_error), std::move(on_held),
                                     std::move(on_not_captured), std::move(on_compared),
                                     dispatch::in_place(std::move(operand_names),
                                                        std::move(in_place), std::move(external)),
                                     limit, graph_mode_of(graph));
          },
          nb::kw_only(), nb::arg("make_plan"), nb::arg("on_error"), nb::arg("on_held"),
          nb::arg("on_not_captured"), nb::arg("on_compared"), nb::arg("operand_names"),
          nb::arg("in_place"), nb::arg("external"), nb::arg("limit"), nb::arg("graph"),
          nb::sig(
              "def __init__(self, *, make_plan: collections.abc.Callable[..., Plan], on_error: "
              "collections.abc.Callable[..., str], on_held: collections.abc.Callable[..., "
              "None], on_not_captured: collections.abc.Callable[[str], None], on_compared: "
              "collections.abc.Callable[..., None], operand_names: "
              "collections.abc.Sequence[str], in_place: collections.abc.Sequence[tuple[int, "
              "int]], external: collections.abc.Sequence[int], limit: int, graph: str) -> None"))
      .def_prop_ro("replays", &python_target::replays, "How many of the calls replayed a graph.")
      .def_prop_ro("staged", &python_target::staged,
                   "How many of these replayed it on copies of their arrays.")
      .def_prop_ro("captures", &python_target::captures, "How often a call was captured.")
      .def_prop_ro("hits", &python_target::hits,
                   "How many of the calls came with addresses that were known.")
      .def_prop_ro("kept", &python_target::kept, "How many lists of addresses are kept.")
      .def_prop_ro("calls", &python_target::calls, "How often XLA has called it.")
      .def("clear_plans", &python_target::clear_plans, "Forgets its plans; they are made anew.");
}

}  // namespace jaxbridge::python

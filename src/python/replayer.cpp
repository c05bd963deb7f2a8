// SPDX-License-Identifier: Apache-2.0
#include "python/replayer.hpp"

#include <algorithm>
#include <string>

#include "core/cuda/capture_mode.hpp"
#include "core/cuda/device_memory.hpp"
#include "core/cuda/staging.hpp"
#include "core/exit.hpp"
#include "python/gil.hpp"

namespace jaxbridge::python {
namespace {

// What a call is told by; valid until this thread's next use.
replay::call_key key_of(const dispatch::call& c, std::uint64_t generation) {
  thread_local std::vector<std::uintptr_t> key;
  key.clear();
  key.push_back(static_cast<std::uintptr_t>(c.device.ordinal));
  key.push_back(c.stream.address());
  for (const std::span<const any_buffer> list : {c.operands, c.results}) {
    for (const any_buffer& b : list) {
      key.push_back(static_cast<std::uintptr_t>(b.dtype) << 32 | b.shape.size());
      for (const std::int64_t extent : b.shape) key.push_back(static_cast<std::uintptr_t>(extent));
    }
  }
  const std::size_t kind = key.size();
  for (const std::span<const any_buffer> list : {c.operands, c.results}) {
    for (const any_buffer& b : list) key.push_back(reinterpret_cast<std::uintptr_t>(b.data));
  }
  return {key, std::span<const std::uintptr_t>(key).first(kind), generation};
}

// What a graph's work uses: the plan, the memory that the function allocated from, and that of
// ours.
struct captured_resources {
  std::shared_ptr<plan> of;
  nb::object memory;
  std::shared_ptr<const replay::staging_area> area;

  // Any thread may be the one to end it.
  static std::shared_ptr<void> keep(captured_resources all) {
    return {new captured_resources(std::move(all)), [](captured_resources* r) {
              const python_use use;
              // At exit Python's objects are left where they are.
              if (!use.granted()) return;
              const thread_gil gil;
              // Pools give their memory back, perhaps while this thread captures something else.
              const cuda::relaxed_capture_scope relaxed;
              delete r;
            }};
  }
};

// Destroys what may wait for its stream. The GIL is held.
void destroy(std::shared_ptr<const void> gone) {
  if (gone == nullptr) return;
  const nb::gil_scoped_release no_gil;
  gone.reset();
}

// What is destroyed so at its end, also where Python raised.
template <class T>
struct destroyed_without_gil {
  std::shared_ptr<T> it;

  explicit destroyed_without_gil(std::shared_ptr<T> owned) noexcept : it(std::move(owned)) {}
  destroyed_without_gil(const destroyed_without_gil&) = delete;
  destroyed_without_gil& operator=(const destroyed_without_gil&) = delete;
  ~destroyed_without_gil() { destroy(std::move(it)); }
};

// A launch waits where the device has been given more than it takes.
template <class Launch>
status without_gil(const Launch& launch) {
  const nb::gil_scoped_release no_gil;
  return launch();
}

nb::bytes bytes_at(const cuda::staging_block& block, std::size_t offset, std::size_t size) {
  return nb::bytes(block.at(offset), size);
}

}  // namespace

replayer::replayer(std::size_t limit, std::span<const index_pair> in_place,
                   nb::object on_not_captured, nb::object on_compared)
    : in_place_(in_place.begin(), in_place.end()),
      on_not_captured_(std::move(on_not_captured)),
      on_compared_(std::move(on_compared)),
      graphs_(limit) {}

std::optional<status> replayer::replay(const dispatch::call& c) {
  if (compares()) return std::nullopt;
  const replay::call_key key = key_of(c, 0);  // whatever is there
  replay::graphs& here = graphs_.on(c.device.ordinal);
  if (const auto graph = here.find(key); graph != nullptr) return graph->launch();
  if (const auto staged = here.find_staged(key); staged != nullptr) return staged->launch(c);
  return std::nullopt;
}

replayer::made_graph replayer::record(const dispatch::call& on, stream_ref launched_on,
                                      const std::shared_ptr<plan>& p,
                                      const captured_run& run_captured,
                                      std::shared_ptr<const replay::staging_area> area,
                                      const cuda::copies_around& copies) {
  result<cuda::capture> recording = cuda::capture::begin(on.device.ordinal);
  if (!recording.ok()) return recording.error();
  dispatch::call on_capture = on;
  on_capture.stream = recording.value().stream();
  nb::object memory;
  try {
    memory = run_captured(on_capture);
  } catch (const not_captured& e) {
    return status(status_code::failed_precondition, e.what());
  }
  auto made = recording.value().end(
      launched_on, captured_resources::keep({p, std::move(memory), std::move(area)}), copies);
  if (!made.ok()) return made.error();
  return std::shared_ptr<const cuda::graph>(std::move(made.value()));
}

template <class Graph>
void replayer::keep(const dispatch::call& c, const plan& p, std::shared_ptr<const Graph> made) {
  destroy(graphs_.on(c.device.ordinal).keep(key_of(c, p.generation), std::move(made)));
}

status replayer::capture(const dispatch::call& c, const std::shared_ptr<plan>& p,
                         const captured_run& run_captured) {
  made_graph made = record(c, c.stream, p, run_captured, nullptr, {});
  if (!made.ok()) return made.error();
  const status s = without_gil([&] { return made.value()->launch(); });
  if (s.ok()) {
    keep(c, *p, std::move(made.value()));
  } else {
    destroy(std::move(made.value()));
  }
  return s;
}

replayer::made_staged replayer::record_staged(const dispatch::call& c,
                                              const std::shared_ptr<plan>& p,
                                              const captured_run& run_captured) {
  auto made_area = [&] {
    const nb::gil_scoped_release no_gil;  // it waits for the device
    return replay::staging_area::make(c, in_place_);
  }();
  if (!made_area.ok()) return made_area.error();
  const destroyed_without_gil area(std::move(made_area.value()));
  std::vector<any_buffer> buffers;
  std::vector<cuda::memory_copy> list;
  const dispatch::call on_it = area.it->call_on_it(c, buffers);
  made_graph recorded = record(on_it, c.stream, p, run_captured, area.it, area.it->copies(c, list));
  if (!recorded.ok()) return recorded.error();
  return std::make_shared<const replay::staged_graph>(area.it, recorded.value());
}

status replayer::stage(const dispatch::call& c, const std::shared_ptr<plan>& p,
                       const captured_run& run_captured) {
  made_staged made = record_staged(c, p, run_captured);
  if (!made.ok()) return made.error();
  const status s = without_gil([&] { return made.value()->launch(c); });
  if (s.ok()) {
    keep(c, *p, std::move(made.value()));
  } else {
    destroy(std::move(made.value()));
  }
  return s;
}

// Says once that calls of this kind are not captured any more.
void replayer::give_up(const dispatch::call& c, const plan& p, const status& failed) {
  if (!graphs_.on(c.device.ordinal).give_up(key_of(c, p.generation))) return;
  on_not_captured_(nb::str(failed.message().data(), failed.message().size()));
}

replay::step replayer::next(const dispatch::call& c, const plan& p) {
  std::shared_ptr<void> gone;
  const replay::step step =
      graphs_.on(c.device.ordinal)
          .next(key_of(c, p.generation), replay::staged_bytes(c), replay::staged_buffers(c), gone);
  destroy(std::move(gone));
  return step;
}

bool replayer::captured(const dispatch::call& c, const std::shared_ptr<plan>& p,
                        const captured_run& run_captured) {
  status failed;
  switch (next(c, *p)) {
    case replay::step::run:
      return false;
    case replay::step::stage:
      failed = stage(c, p, run_captured);
      // Without memory for copies the function runs on new memory, and is replayed on known.
      if (failed.code() == status_code::resource_exhausted) return false;
      break;
    case replay::step::capture:
      failed = capture(c, p, run_captured);
      break;
  }
  if (failed.ok()) return true;
  give_up(c, *p, failed);
  return false;
}

void replayer::ran(const dispatch::call& c, const plan& p, std::chrono::nanoseconds duration) {
  graphs_.on(c.device.ordinal).ran(key_of(c, p.generation), duration);
}

// What a replay does not write must not pass for what the last run, or the last replay, has
// written.
status replayer::overwrite_results(const dispatch::call& c) const {
  for (std::size_t i = 0; i < c.results.size(); ++i) {
    const auto is_it = [i](const index_pair& pair) { return pair.second == i; };
    if (std::any_of(in_place_.begin(), in_place_.end(), is_it)) continue;
    const any_buffer& b = c.results[i];
    if (status s = cuda::fill(b.data, 0xA5, b.size_bytes(), c.stream); !s.ok()) return s;
  }
  return {};
}

// The graph that would be replayed in place of the run, as in replay() and captured(), and made
// where it is time to; null: the call is to be run.
std::function<status()> replayer::graph_to_compare(const dispatch::call& c,
                                                   const std::shared_ptr<plan>& p,
                                                   const captured_run& run_captured) {
  const auto replayed = [](std::shared_ptr<const cuda::graph> graph) {
    return [graph = std::move(graph)] { return graph->launch(); };
  };
  const auto on_copies = [this, &c](std::shared_ptr<const replay::staged_graph> graph) {
    return [this, graph = std::move(graph), &c] {
      std::vector<any_buffer> buffers;
      status s = overwrite_results(graph->on_copies(c, buffers));
      return s.ok() ? graph->launch(c) : s;
    };
  };
  const replay::call_key key = key_of(c, 0);  // whatever is there
  replay::graphs& here = graphs_.on(c.device.ordinal);
  if (auto graph = here.find(key); graph != nullptr) return replayed(std::move(graph));
  if (auto graph = here.find_staged(key); graph != nullptr) {
    return on_copies(std::move(graph));
  }
  switch (next(c, *p)) {
    case replay::step::run:
      break;
    case replay::step::capture: {
      made_graph made = record(c, c.stream, p, run_captured, nullptr, {});
      if (made.ok()) {
        keep(c, *p, made.value());
        return replayed(std::move(made.value()));
      }
      give_up(c, *p, made.error());
      break;
    }
    case replay::step::stage: {
      made_staged made = record_staged(c, p, run_captured);
      if (made.ok()) {
        keep(c, *p, made.value());
        return on_copies(std::move(made.value()));
      }
      // As in captured().
      if (made.error().code() != status_code::resource_exhausted) give_up(c, *p, made.error());
      break;
    }
  }
  return nullptr;
}

bool replayer::compared(const dispatch::call& c, const std::shared_ptr<plan>& p,
                        const captured_run& run_captured, const std::function<void()>& run) {
  // Nobody else may keep the graph in the end: the function may clear its own.
  const destroyed_without_gil launch(
      std::make_shared<const std::function<status()>>(graph_to_compare(c, p, run_captured)));
  if (*launch.it == nullptr) return false;

  // What is updated in place, as it was; then the results of the replay, and those of the run.
  cuda::staging_layout layout;
  std::vector<std::size_t> before;
  std::vector<std::size_t> of_replay;
  std::vector<std::size_t> of_run;
  before.reserve(in_place_.size());
  for (const index_pair& pair : in_place_) {
    before.push_back(layout.add(c.operands[pair.first].size_bytes()));
  }
  for (std::vector<std::size_t>* offsets : {&of_replay, &of_run}) {
    for (const any_buffer& b : c.results) offsets->push_back(layout.add(b.size_bytes()));
  }
  std::optional<result<cuda::staging_block>> block;
  const auto to_host = [&](const any_buffer& b, std::size_t offset) {
    return block->value().to_host(offset, b.data, b.size_bytes());
  };
  const auto or_throw = [](const status& s) {
    if (!s.ok()) throw std::runtime_error(s.message());
  };
  {
    const nb::gil_scoped_release no_gil;
    block.emplace(cuda::staging_block::lease(c.device.ordinal, c.stream, layout.size_bytes()));
    or_throw(block->ok() ? status() : block->error());
    for (std::size_t i = 0; i < in_place_.size(); ++i) {
      or_throw(to_host(c.operands[in_place_[i].first], before[i]));
    }
    or_throw(overwrite_results(c));
    or_throw((*launch.it)());
    for (std::size_t i = 0; i < c.results.size(); ++i) {
      or_throw(to_host(c.results[i], of_replay[i]));
    }
    or_throw(block->value().wait());
    for (std::size_t i = 0; i < in_place_.size(); ++i) {
      const any_buffer& b = c.operands[in_place_[i].first];
      or_throw(block->value().to_device(b.data, before[i], b.size_bytes()));
    }
  }
  run();
  {
    const nb::gil_scoped_release no_gil;
    for (std::size_t i = 0; i < c.results.size(); ++i) or_throw(to_host(c.results[i], of_run[i]));
    or_throw(block->value().wait());
  }
  nb::list results;
  for (std::size_t i = 0; i < c.results.size(); ++i) {
    const std::size_t size = c.results[i].size_bytes();
    results.append(nb::make_tuple(p->results[i]->numpy_dtype,
                                  bytes_at(block->value(), of_run[i], size),
                                  bytes_at(block->value(), of_replay[i], size)));
  }
  on_compared_(results);
  return true;
}

void replayer::clear(std::uint64_t generation) {
  std::vector<std::shared_ptr<void>> graphs = graphs_.clear(generation);
  const nb::gil_scoped_release no_gil;  // they wait for their streams
  graphs.clear();
}

}  // namespace jaxbridge::python

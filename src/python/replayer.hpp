// SPDX-License-Identifier: Apache-2.0
// Captures the calls of a target into CUDA graphs, and replays them.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

#include "core/dispatch/in_place.hpp"
#include "core/replay/device_graphs.hpp"
#include "python/plan.hpp"
#include "python/py.hpp"

namespace jaxbridge::python {

/// A function raised in a capture, where it would perhaps not have raised otherwise.
class not_captured : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class replayer {
 public:
  using index_pair = dispatch::in_place::index_pair;
  /// Calls the function on the memory of a call, in a capture; returns what it allocated from.
  /// Throws not_captured where the function raised.
  using captured_run = std::function<nb::object(const dispatch::call&)>;

  /// `on_not_captured(reason)`, once. `on_compared([(result of a run, of a replay)])` raises where
  /// they differ; null: replays are not compared.
  replayer(std::size_t limit, std::span<const index_pair> in_place, nb::object on_not_captured,
           nb::object on_compared);
  replayer(const replayer&) = delete;
  replayer& operator=(const replayer&) = delete;
  /// With the GIL.
  ~replayer() = default;

  /// Replays the call where there is a graph for it. Without the GIL; any thread.
  [[nodiscard]] std::optional<status> replay(const dispatch::call& c);

  /// Captures the call, where that is the time to, and launches what was captured. False: the call
  /// is to be run. Where it can't be captured nothing of it has run nor will, and it is not tried
  /// again. The GIL is held.
  [[nodiscard]] bool captured(const dispatch::call& c, const std::shared_ptr<plan>& p,
                              const captured_run& run_captured);

  /// The function has run, and kept the host for that long.
  void ran(const dispatch::call& c, const plan& p, std::chrono::nanoseconds duration);

  [[nodiscard]] bool compares() const noexcept { return on_compared_.is_valid(); }
  /// Captures or replays the call, runs it, and compares. False as above. The GIL is held.
  [[nodiscard]] bool compared(const dispatch::call& c, const std::shared_ptr<plan>& p,
                              const captured_run& run_captured, const std::function<void()>& run);

  /// Forgets all graphs, and those to come of plans of other generations. The GIL is held.
  void clear(std::uint64_t generation);

  [[nodiscard]] const replay::device_graphs& counts() const noexcept { return graphs_; }

 private:
  using made_graph = result<std::shared_ptr<const cuda::graph>>;
  using made_staged = result<std::shared_ptr<const replay::staged_graph>>;

  [[nodiscard]] made_graph record(const dispatch::call& on, stream_ref launched_on,
                                  const std::shared_ptr<plan>& p, const captured_run& run_captured,
                                  std::shared_ptr<const replay::staging_area> area,
                                  const cuda::copies_around& copies);
  [[nodiscard]] made_staged record_staged(const dispatch::call& c, const std::shared_ptr<plan>& p,
                                          const captured_run& run_captured);
  [[nodiscard]] status stage(const dispatch::call& c, const std::shared_ptr<plan>& p,
                             const captured_run& run_captured);
  [[nodiscard]] status capture(const dispatch::call& c, const std::shared_ptr<plan>& p,
                               const captured_run& run_captured);
  [[nodiscard]] std::function<status()> graph_to_compare(const dispatch::call& c,
                                                         const std::shared_ptr<plan>& p,
                                                         const captured_run& run_captured);
  [[nodiscard]] status overwrite_results(const dispatch::call& c) const;
  [[nodiscard]] replay::step next(const dispatch::call& c, const plan& p);
  template <class Graph>
  void keep(const dispatch::call& c, const plan& p, std::shared_ptr<const Graph> made);
  void give_up(const dispatch::call& c, const plan& p, const status& failed);

  std::vector<index_pair> in_place_;
  nb::object on_not_captured_;
  nb::object on_compared_;
  replay::device_graphs graphs_;
};

}  // namespace jaxbridge::python

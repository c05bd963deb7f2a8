// SPDX-License-Identifier: Apache-2.0
// A target whose work a Python function does.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/dispatch/in_place.hpp"
#include "core/dispatch/registry.hpp"
#include "python/plan.hpp"
#include "python/py.hpp"
#include "python/replayer.hpp"

namespace jaxbridge::python {

/// What is done with calls on CUDA.
enum class graph_mode : std::uint8_t {
  off,     ///< The function runs at each call.
  replay,  ///< Calls are captured and replayed.
  verify,  ///< The same, and the function runs too: its results must be those of the replay.
  xla,     ///< XLA may capture the calls.
};

class python_target final : public dispatch::target {
 public:
  /// `make_plan(platform, operands, results) -> Plan`, where each buffer is described by (dtype,
  /// shape); `on_error(exception) -> text`; `on_held(held, exception or None) -> None or raises`,
  /// where `held() -> (operands, results)`; `on_not_captured` and `on_compared` as `replayer` has
  /// them; `limit`: how many bindings a plan keeps, and how many graphs the target.
  python_target(nb::object make_plan, nb::object on_error, nb::object on_held,
                nb::object on_not_captured, nb::object on_compared, dispatch::in_place in_place,
                std::size_t limit, graph_mode graph);
  ~python_target() override;

  status invoke(const dispatch::call& c) noexcept override;

  /// Replays are among them. Those that are compared run as well, and are counted there.
  [[nodiscard]] std::size_t calls() const noexcept {
    return calls_ + (replayer_ != nullptr && replayer_->compares() ? 0 : replays());
  }
  [[nodiscard]] std::size_t replays() const noexcept {
    return replayer_ != nullptr ? replayer_->counts().replays() : 0;
  }
  [[nodiscard]] std::size_t staged() const noexcept {
    return replayer_ != nullptr ? replayer_->counts().staged() : 0;
  }
  [[nodiscard]] std::size_t captures() const noexcept {
    return replayer_ != nullptr ? replayer_->counts().captures() : 0;
  }
  /// Calls whose list of addresses was known.
  [[nodiscard]] std::size_t hits() const noexcept { return hits_; }
  /// Lists of addresses that are kept.
  [[nodiscard]] std::size_t kept() const noexcept;
  void clear_plans();

 private:
  status invoke_with_gil(const dispatch::call& c);
  [[nodiscard]] std::shared_ptr<plan> plan_for(const dispatch::call& c);
  void run(const std::shared_ptr<plan>& p, const dispatch::call& c, const std::vector<void*>* host);
  void run_now(const std::shared_ptr<plan>& of, const dispatch::call& c,
               const std::vector<void*>* host);
  [[nodiscard]] nb::object run_captured(const std::shared_ptr<plan>& p, const dispatch::call& c,
                                        stream_ref home);
  [[nodiscard]] std::shared_ptr<binding> make_binding(const plan& p, const dispatch::call& c,
                                                      const std::vector<void*>* host) const;
  void end_lease(const std::shared_ptr<binding>& b, const nb::object& exception) const;

  // All of it is touched with the GIL held only.
  nb::object make_plan_;
  nb::object on_error_;
  nb::object on_held_;
  std::vector<std::shared_ptr<plan>> plans_;
  std::uint64_t generation_ = 0;  // how often these were forgotten
  std::size_t limit_;
  // What functions allocated in captures of XLA's.
  nb::list captured_memory_;
  std::size_t calls_ = 0;
  std::size_t hits_ = 0;
  // Also without the GIL.
  const dispatch::in_place in_place_;
  const bool capturable_;
  std::unique_ptr<replayer> replayer_;
};

void bind_target(nb::module_& m);

}  // namespace jaxbridge::python

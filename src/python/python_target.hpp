// SPDX-License-Identifier: Apache-2.0
// A target whose work a Python function does.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/dispatch/registry.hpp"
#include "core/replay/graphs.hpp"
#include "python/plan.hpp"
#include "python/py.hpp"

namespace jaxbridge::python {

class python_target final : public dispatch::target {
 public:
  using index_pair = std::pair<std::size_t, std::size_t>;

  /// `make_plan(platform, operands, results) -> Plan`, where each buffer is described by (dtype,
  /// shape); `on_error(exception) -> text`; `on_held(held, exception or None) -> None or raises`,
  /// where `held() -> (operands, results)`; `on_not_captured(reason)`, once; `limit`: how many
  /// bindings a plan keeps, and how many graphs the target; `replays`: whether work on CUDA is
  /// captured and replayed; `capturable`: whether XLA may capture it.
  python_target(nb::object make_plan, nb::object on_error, nb::object on_held,
                nb::object on_not_captured, std::vector<index_pair> in_place, std::size_t limit,
                bool replays, bool capturable);
  ~python_target() override;

  status invoke(const dispatch::call& c) noexcept override;

  /// Replays are among them.
  [[nodiscard]] std::size_t calls() const noexcept { return calls_ + replays(); }
  [[nodiscard]] std::size_t replays() const noexcept { return graphs_ ? graphs_->replays() : 0; }
  [[nodiscard]] std::size_t captures() const noexcept { return graphs_ ? graphs_->captures() : 0; }
  /// Calls whose list of addresses was known.
  [[nodiscard]] std::size_t hits() const noexcept { return hits_; }
  /// Lists of addresses that are kept.
  [[nodiscard]] std::size_t kept() const noexcept;
  void clear_plans();

 private:
  status invoke_with_gil(const dispatch::call& c);
  [[nodiscard]] std::shared_ptr<plan> plan_for(const dispatch::call& c);
  [[nodiscard]] status check_in_place(const dispatch::call& c) const;
  void run(const std::shared_ptr<plan>& p, const dispatch::call& c, const std::vector<void*>* host);
  [[nodiscard]] std::shared_ptr<binding> make_binding(const plan& p, const dispatch::call& c,
                                                      const std::vector<void*>* host) const;
  void end_lease(const std::shared_ptr<binding>& b, const nb::object& exception) const;
  [[nodiscard]] bool captured(const std::shared_ptr<plan>& p, const dispatch::call& c);

  // All of it is touched with the GIL held only.
  nb::object make_plan_;
  nb::object on_error_;
  nb::object on_held_;
  nb::object on_not_captured_;
  std::vector<index_pair> in_place_;
  std::vector<bool> writable_operand_;
  std::vector<std::shared_ptr<plan>> plans_;
  std::size_t limit_;
  bool capturable_;
  // What functions allocated in captures of XLA's.
  nb::list captured_memory_;
  std::size_t calls_ = 0;
  std::size_t hits_ = 0;
  // Also without the GIL.
  std::unique_ptr<replay::graphs> graphs_;
};

void bind_target(nb::module_& m);

}  // namespace jaxbridge::python

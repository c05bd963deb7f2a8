// SPDX-License-Identifier: Apache-2.0
// A target whose work a Python function does.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/dispatch/registry.hpp"
#include "python/plan.hpp"
#include "python/py.hpp"

namespace jaxbridge::python {

class python_target final : public dispatch::target {
 public:
  using index_pair = std::pair<std::size_t, std::size_t>;

  /// `make_plan(platform, operands, results) -> Plan`, where each buffer is described by (dtype,
  /// shape); `on_error(exception) -> text`; `on_held(held, exception or None) -> None or raises`,
  /// where `held() -> (operands, results)`; `limit`: how many bindings a plan keeps.
  python_target(nb::object make_plan, nb::object on_error, nb::object on_held,
                std::vector<index_pair> in_place, std::size_t limit);
  ~python_target() override;

  status invoke(const dispatch::call& c) noexcept override;

  [[nodiscard]] std::size_t calls() const noexcept { return calls_; }
  /// Calls whose list of addresses was known.
  [[nodiscard]] std::size_t hits() const noexcept { return hits_; }
  /// Lists of addresses that are kept.
  [[nodiscard]] std::size_t kept() const noexcept;
  void clear_plans();

 private:
  status invoke_with_gil(const dispatch::call& c);
  [[nodiscard]] std::shared_ptr<plan> plan_for(const dispatch::call& c);
  [[nodiscard]] status check_in_place(const dispatch::call& c) const;
  void run(plan& p, const dispatch::call& c, const std::vector<void*>* host);
  [[nodiscard]] std::shared_ptr<binding> make_binding(const plan& p, const dispatch::call& c,
                                                      const std::vector<void*>* host) const;
  void end_lease(const binding& b, const nb::object& exception) const;

  // All of it is touched with the GIL held only.
  nb::object make_plan_;
  nb::object on_error_;
  nb::object on_held_;
  std::vector<index_pair> in_place_;
  std::vector<bool> writable_operand_;
  std::vector<std::shared_ptr<plan>> plans_;
  std::size_t limit_;
  std::size_t calls_ = 0;
  std::size_t hits_ = 0;
};

void bind_target(nb::module_& m);

}  // namespace jaxbridge::python

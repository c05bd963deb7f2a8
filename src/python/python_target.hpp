// SPDX-License-Identifier: Apache-2.0
// A target whose work a Python function does.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/dispatch/registry.hpp"
#include "python/buffer.hpp"
#include "python/py.hpp"

namespace jaxbridge::python {

/// What was decided about calls of one platform and one list of shapes: layouts, and the Python
/// callable that does the work.
struct plan {
  jaxbridge::platform where = jaxbridge::platform::cpu;
  std::vector<std::shared_ptr<const buffer_layout>> operands;
  std::vector<std::shared_ptr<const buffer_layout>> results;
  nb::object run;
  /// The callee works on host memory although the call is on CUDA.
  bool staged = false;
};

class python_target final : public dispatch::target {
 public:
  using index_pair = std::pair<std::size_t, std::size_t>;

  /// `make_plan(platform, operands, results) -> (run, staged)`, where each buffer is described by
  /// (dtype, shape); `run(operands, results, ordinal, stream)`; `on_error(exception) -> text`;
  /// `on_held(operands, results, exception or None) -> None or raises`.
  python_target(nb::object make_plan, nb::object on_error, nb::object on_held,
                std::vector<index_pair> in_place);
  ~python_target() override;

  status invoke(const dispatch::call& c) noexcept override;

  [[nodiscard]] std::size_t calls() const noexcept { return calls_; }
  void clear_plans();

 private:
  status invoke_with_gil(const dispatch::call& c);
  [[nodiscard]] std::shared_ptr<const plan> plan_for(const dispatch::call& c);
  [[nodiscard]] status check_in_place(const dispatch::call& c) const;
  void run(const plan& p, const dispatch::call& c, const std::vector<void*>* host);

  // All of it is touched with the GIL held only.
  nb::object make_plan_;
  nb::object on_error_;
  nb::object on_held_;
  std::vector<index_pair> in_place_;
  std::vector<bool> writable_operand_;
  std::vector<std::shared_ptr<const plan>> plans_;
  std::size_t calls_ = 0;
};

void bind_target(nb::module_& m);

}  // namespace jaxbridge::python

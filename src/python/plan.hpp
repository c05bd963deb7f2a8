// SPDX-License-Identifier: Apache-2.0
// What was decided about calls of one platform and one list of shapes, and what is kept of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "core/dispatch/call.hpp"
#include "core/dispatch/scratch.hpp"
#include "core/lru_cache.hpp"
#include "python/buffer.hpp"
#include "python/py.hpp"

namespace jaxbridge::python {

/// How a framework's array is made of a buffer: `source(buffer) -> (leased, source)` once for each
/// memory, `view(source)` at each call.
struct viewer {
  enum class kind : std::uint8_t { buffer, numpy, python };

  kind what = kind::buffer;
  nb::object source;
  nb::object view;
};

/// One argument of the function: a value that is fixed, the view of an operand or a result, a list
/// or tuple of those of all results, or the state.
struct argument {
  enum class kind : std::uint8_t { value, operand, result, result_list, result_tuple, state };

  kind what = kind::value;
  std::size_t index = 0;
  nb::object value;
};

/// The buffers on one list of addresses, and what views are made of. Kept between calls: nothing
/// that is used again was changed by who got a view.
struct binding {
  /// Something that every view of a buffer refers to, so that its reference count tells whether one
  /// is alive; `idle` is that count while there is none.
  struct lease {
    nb::object of;
    Py_ssize_t idle = 0;
    // One is alive in a slot, where nobody else has it.
    bool kept = false;

    [[nodiscard]] bool held() const { return Py_REFCNT(of.ptr()) > idle + (kept ? 1 : 0); }
  };

  /// One argument that is an array. Between calls there is a view only where nobody can tell it
  /// from a new one.
  struct slot {
    const viewer* how = nullptr;  // the plan's
    nb::object source;
    nb::object view;
    lease* counted = nullptr;  // this binding's
  };

  std::vector<nb::object> operands;
  std::vector<nb::object> results;
  std::vector<lease> operand_leases;
  std::vector<lease> result_leases;
  // Of the operands, then of the results that the function makes. Their views, and the list of the
  // function's arguments, are those of the call that uses the binding.
  std::vector<slot> slots;
  std::vector<PyObject*> arguments;
  bool in_use = false;

  [[nodiscard]] bool held() const;
  /// No protocol of a buffer hands out its memory any more.
  void revoke() const;
};

/// The call that a function is called for.
struct occasion {
  std::int32_t ordinal = 0;
  stream_ref stream;
  // XLA's stream; in a capture of ours `stream` is another one.
  stream_ref home;
  // Where the function allocates from; null: from where it likes.
  std::shared_ptr<dispatch::scratch> scratch;
};

/// Made in Python (_plan.make_plan) and touched with the GIL held only.
struct plan {
  jaxbridge::platform where = jaxbridge::platform::cpu;
  std::vector<std::shared_ptr<const buffer_layout>> operands;
  std::vector<std::shared_ptr<const buffer_layout>> results;

  std::vector<viewer> operand_viewers;
  // The results that the function makes, by their position among all.
  std::vector<std::pair<std::size_t, viewer>> own_viewers;
  /// `scope(ordinal, stream) -> context manager or None`, or null. With a third argument, the
  /// scratch memory of the call, where the function is to have some.
  nb::object scope;
  bool has_scratch = false;
  /// The scope of a call that is captured: `capture_scope(ordinal, stream) -> (context manager,
  /// memory)`, where the memory is what the function allocates from; it lives as long as the graph.
  nb::object capture_scope;
  /// `state(ordinal, stream of XLA's)`: what was made once, in the scope; or null. The last of the
  /// operand views that `work` gets.
  nb::object state;
  /// The callee works on host memory although the call is on CUDA.
  bool staged = false;

  /// Either the function itself with its arguments ...
  nb::object function;
  std::vector<argument> arguments;
  nb::object keywords;
  /// ... then `finish(value, own views, result buffers)`; of a function that writes its results
  /// only for a value that is neither None nor the one it has written.
  nb::object finish;
  bool writes = false;
  /// ... or `work(operand views, own views, result buffers)`.
  nb::object work;

  using cache = lru_cache<std::shared_ptr<binding>>;
  std::unique_ptr<cache> bindings;
  /// How often its target had forgotten its plans before this one was made.
  std::uint64_t generation = 0;

  /// Calls the function on views of the buffers. All views that this makes are gone when it
  /// returns, but for those that the binding keeps.
  void call(binding& b, const occasion& on) const;
  /// The same in a capture. `memory` gets what has to live as long as what was captured, before the
  /// function is called: where that raises, the caller chooses when it ends.
  void call_captured(binding& b, const occasion& on, nb::object& memory) const;
};

/// Fills in what a plan needs to make a new binding's sources and leases.
void complete(binding& b, const plan& p);

void bind_plan(nb::module_& m);

}  // namespace jaxbridge::python

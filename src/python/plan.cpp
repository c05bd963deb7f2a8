// SPDX-License-Identifier: Apache-2.0
#include "python/plan.hpp"

#include <algorithm>
#include <span>
#include <string>

#include "python/numpy_array.hpp"

namespace jaxbridge::python {
namespace {

viewer make_viewer(nb::handle from) {
  viewer v;
  if (from.is_none()) return v;
  v.what = viewer::kind::numpy;
  if (from.is(as_array_function())) return v;
  v.what = viewer::kind::python;
  v.view = nb::borrow(from);
  if (nb::isinstance<nb::tuple>(from)) {
    v.source = from[0];
    v.view = from[1];
  }
  return v;
}

std::vector<argument> make_arguments(const nb::list& from) {
  std::vector<argument> out;
  for (const nb::handle item : from) {
    const std::string kind = nb::cast<std::string>(item[0]);
    argument a;
    if (kind == "value") {
      a.value = nb::borrow(item[1]);
    } else if (kind == "state") {
      a.what = argument::kind::state;
    } else if (kind == "result list") {
      a.what = argument::kind::result_list;
    } else if (kind == "result tuple") {
      a.what = argument::kind::result_tuple;
    } else {
      a.what = kind == "operand" ? argument::kind::operand : argument::kind::result;
      a.index = nb::cast<std::size_t>(item[1]);
    }
    out.push_back(std::move(a));
  }
  return out;
}

nb::object view_of(const viewer& v, const nb::object& source) {
  switch (v.what) {
    case viewer::kind::buffer:
      return source;
    case viewer::kind::numpy:
      return as_array(source);
    case viewer::kind::python:
      break;
  }
  return v.view(source);
}

std::pair<nb::object, nb::object> source_of(const viewer& v, const nb::object& buffer) {
  if (!v.source.is_valid()) return {buffer, buffer};
  const nb::object made = v.source(buffer);
  return {made[0], made[1]};
}

nb::list list_of(const std::vector<nb::object>& objects) {
  nb::list out;
  for (const nb::object& o : objects) out.append(o);
  return out;
}

// What `with` does, without its frame.
class scope_guard {
 public:
  explicit scope_guard(nb::object manager) : manager_(std::move(manager)) {
    if (!manager_.is_none()) manager_.attr("__enter__")();
  }
  scope_guard(const scope_guard&) = delete;
  scope_guard& operator=(const scope_guard&) = delete;
  ~scope_guard() = default;

  void leave() {
    if (!manager_.is_none()) manager_.attr("__exit__")(nb::none(), nb::none(), nb::none());
  }
  void leave(const nb::python_error& raised) {
    if (manager_.is_none()) return;
    manager_.attr("__exit__")(raised.type(), raised.value(), raised.traceback());
  }

 private:
  nb::object manager_;
};

// The views of one call, in slots of a binding that the caller has marked as in use. At the end
// they are gone, but for arrays of NumPy's that are as new: to look at one costs less than to make
// one.
class views_scope {
 public:
  explicit views_scope(std::vector<binding::slot>& slots) noexcept : slots_(slots) {}
  ~views_scope() {
    for (binding::slot& s : slots_) {
      s.counted->kept =
          s.how->what == viewer::kind::numpy && s.view.is_valid() && is_as_new(s.view, s.source);
      if (!s.counted->kept) s.view.reset();
    }
  }
  views_scope(const views_scope&) = delete;
  views_scope& operator=(const views_scope&) = delete;

  void make() {
    for (binding::slot& s : slots_) {
      if (!s.view.is_valid()) s.view = view_of(*s.how, s.source);
    }
  }

 private:
  std::vector<binding::slot>& slots_;
};

nb::list views_in(std::span<const binding::slot> slots) {
  nb::list out;
  for (const binding::slot& s : slots) out.append(s.view);
  return out;
}

nb::object tuple_in(std::span<const binding::slot> slots) {
  nb::object out = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(slots.size())));
  if (!out.is_valid()) throw nb::python_error();
  Py_ssize_t i = 0;
  for (const binding::slot& s : slots) PyTuple_SetItem(out.ptr(), i++, s.view.inc_ref().ptr());
  return out;
}

void call_function(const plan& p, binding& b, const occasion& on) {
  nb::object state;
  if (p.state.is_valid()) state = p.state(on.ordinal, on.home.address());
  views_scope scope(b.slots);
  scope.make();
  const std::span<const binding::slot> operands = std::span(b.slots).first(b.operands.size());
  const std::span<const binding::slot> own = std::span(b.slots).subspan(b.operands.size());

  if (!p.function.is_valid()) {
    nb::list operand_views = views_in(operands);
    if (state.is_valid()) operand_views.append(state);
    p.work(operand_views, views_in(own), list_of(b.results));
    return;
  }

  nb::object all_results;  // gone before the views are looked at
  PyObject** const arguments = b.arguments.data();
  for (std::size_t i = 0; i < p.arguments.size(); ++i) {
    const argument& a = p.arguments[i];
    switch (a.what) {
      case argument::kind::value:
        arguments[i + 1] = a.value.ptr();
        break;
      case argument::kind::operand:
        arguments[i + 1] = operands[a.index].view.ptr();
        break;
      case argument::kind::result:
        arguments[i + 1] = own[a.index].view.ptr();
        break;
      case argument::kind::result_list:
        all_results = views_in(own);
        arguments[i + 1] = all_results.ptr();
        break;
      case argument::kind::result_tuple:
        all_results = tuple_in(own);
        arguments[i + 1] = all_results.ptr();
        break;
      case argument::kind::state:
        arguments[i + 1] = state.ptr();
        break;
    }
  }
  const std::size_t named =
      p.keywords.is_valid() ? nb::len(p.keywords) : static_cast<std::size_t>(0);
  PyObject* const value =
      PyObject_Vectorcall(p.function.ptr(), arguments + 1,
                          (p.arguments.size() - named) | PY_VECTORCALL_ARGUMENTS_OFFSET,
                          named > 0 ? p.keywords.ptr() : nullptr);
  if (value == nullptr) throw nb::python_error();
  const nb::object returned = nb::steal(value);
  if (!p.finish.is_valid()) return;
  if (p.writes && (returned.is_none() || (!own.empty() && returned.is(own[0].view)))) return;
  p.finish(returned, views_in(own), list_of(b.results));
}

void call_in(nb::object manager, const plan& p, binding& b, const occasion& on) {
  scope_guard guard(std::move(manager));
  try {
    call_function(p, b, on);
  } catch (nb::python_error& raised) {
    guard.leave(raised);
    throw;
  }
  guard.leave();
}

}  // namespace

bool binding::held() const {
  const auto is_held = [](const lease& l) { return l.held(); };
  return std::any_of(operand_leases.begin(), operand_leases.end(), is_held) ||
         std::any_of(result_leases.begin(), result_leases.end(), is_held);
}

void binding::revoke() const {
  for (const nb::object& o : operands) nb::cast<call_buffer&>(o).revoked = true;
  for (const nb::object& o : results) nb::cast<call_buffer&>(o).revoked = true;
}

void complete(binding& b, const plan& p) {
  // Slots refer to leases, which therefore come first and stay where they are.
  for (const nb::object& buffer : b.operands) b.operand_leases.push_back({buffer});
  for (const nb::object& buffer : b.results) b.result_leases.push_back({buffer});
  const auto add = [&](const viewer& how, const nb::object& buffer, binding::lease& counted) {
    auto [leased, source] = source_of(how, buffer);
    counted.of = std::move(leased);
    b.slots.push_back({&how, std::move(source), {}, &counted});
  };
  for (std::size_t i = 0; i < b.operands.size(); ++i) {
    add(p.operand_viewers[i], b.operands[i], b.operand_leases[i]);
  }
  for (const auto& [i, how] : p.own_viewers) add(how, b.results[i], b.result_leases[i]);
  b.arguments.resize(p.arguments.size() + 1);
  for (binding::lease& l : b.operand_leases) l.idle = Py_REFCNT(l.of.ptr());
  for (binding::lease& l : b.result_leases) l.idle = Py_REFCNT(l.of.ptr());
}

void plan::call(binding& b, const occasion& on) const {
  if (!scope.is_valid()) {
    call_function(*this, b, on);
  } else if (on.scratch != nullptr) {
    call_in(scope(on.ordinal, on.stream.address(), on.scratch), *this, b, on);
  } else {
    call_in(scope(on.ordinal, on.stream.address()), *this, b, on);
  }
}

void plan::call_captured(binding& b, const occasion& on, nb::object& memory) const {
  if (!capture_scope.is_valid()) {
    call(b, on);
    return;
  }
  const nb::object made = capture_scope(on.ordinal, on.stream.address());
  memory = made[1];
  call_in(made[0], *this, b, on);
}

void bind_plan(nb::module_& m) {
  nb::class_<plan>(m, "Plan", nb::is_final(),
                   "What is done at a call of one platform and one list of shapes.")
      .def(
          "__init__",
          [](plan* self, const nb::list& operand_viewers, const nb::list& own_viewers,
             nb::object scope, bool scratch, nb::object capture_scope, bool staged,
             nb::object state, nb::object function, const nb::list& arguments, nb::object keywords,
             nb::object finish, bool writes, nb::object work) {
            auto* const p = new (self) plan;
            for (const nb::handle v : operand_viewers) {
              p->operand_viewers.push_back(make_viewer(v));
            }
            for (const nb::handle v : own_viewers) {
              p->own_viewers.emplace_back(nb::cast<std::size_t>(v[0]), make_viewer(v[1]));
            }
            p->staged = staged;
            p->has_scratch = scratch;
            if (!state.is_none()) p->state = std::move(state);
            if (!scope.is_none()) p->scope = std::move(scope);
            if (!capture_scope.is_none()) p->capture_scope = std::move(capture_scope);
            if (!function.is_none()) p->function = std::move(function);
            p->arguments = make_arguments(arguments);
            if (!keywords.is_none()) p->keywords = std::move(keywords);
            if (!finish.is_none()) p->finish = std::move(finish);
            p->writes = writes;
            if (!work.is_none()) p->work = std::move(work);
            for (const argument& a : p->arguments) {
              const bool is_operand = a.what == argument::kind::operand;
              const std::size_t count =
                  is_operand ? p->operand_viewers.size() : p->own_viewers.size();
              if ((is_operand || a.what == argument::kind::result) && a.index >= count) {
                throw nb::index_error("a plan's argument names a buffer that the call has not");
              }
            }
          },
          nb::kw_only(), nb::arg("operand_viewers"), nb::arg("own_viewers"),
          nb::arg("scope") = nb::none(), nb::arg("scratch") = false,
          nb::arg("capture_scope") = nb::none(), nb::arg("staged") = false,
          nb::arg("state") = nb::none(), nb::arg("function") = nb::none(),
          nb::arg("arguments") = nb::list(), nb::arg("keywords") = nb::none(),
          nb::arg("finish") = nb::none(), nb::arg("writes") = false, nb::arg("work") = nb::none(),
          nb::sig("def __init__(self, *, operand_viewers: list[typing.Any], own_viewers: "
                  "list[tuple[int, typing.Any]], scope: collections.abc.Callable[..., "
                  "typing.Any] | None = None, scratch: bool = False, capture_scope: "
                  "collections.abc.Callable[[int, int], tuple[typing.Any, typing.Any]] | None = "
                  "None, staged: bool = False, state: collections.abc.Callable[[int, int], "
                  "typing.Any] | None = None, function: "
                  "collections.abc.Callable[..., typing.Any] | None = None, arguments: "
                  "list[tuple[str, typing.Any]] = [], keywords: tuple[str, ...] | None = None, "
                  "finish: collections.abc.Callable[..., None] | None = None, writes: bool = "
                  "False, work: collections.abc.Callable[..., None] | None = None) -> None"));
}

}  // namespace jaxbridge::python

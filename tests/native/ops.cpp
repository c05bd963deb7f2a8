// SPDX-License-Identifier: Apache-2.0
// A library with everything that a native function can take, for tests in Python.
#include <jaxbridge/jaxbridge.hpp>
#include <stdexcept>
#include <string>
#include <thread>

namespace jb = jaxbridge;

jb::status scale(jb::stream_ref /*stream*/, jb::buffer_view<const float, 2> x, double a,
                 jb::buffer_view<float, 2> y) {
  for (std::size_t i = 0; i < x.size(); ++i) y[i] = static_cast<float>(a) * x[i];
  return {};
}
JAXBRIDGE_EXPORT(scale, cpu)
    .parameters("x, a = 2.0")
    .result(jb::same_as<0>)
    .doc("a * x, of a matrix.")
    .vmap("sequential");

template <class T>
void axpy(jb::buffer_view<const T> x, T a, jb::in_place<T> y) {
  if (x.size() != y.size()) throw std::invalid_argument("x and y have other sizes");
  for (std::size_t i = 0; i < x.size(); ++i) y[i] += a * x[i];
}
JAXBRIDGE_EXPORT_AS(axpy, cpu, axpy<float>, axpy<double>, axpy<std::complex<float>>)
    .parameters("x, a, y")
    .result(jb::same_as<1>)
    .elementwise();

void matmul(jb::buffer_view<const float, 2> x, jb::buffer_view<const float, 2> y,
            jb::buffer_view<float, 2> z) {
  for (std::int64_t i = 0; i < x.extent(0); ++i) {
    for (std::int64_t j = 0; j < y.extent(1); ++j) {
      z(i, j) = 0;
      for (std::int64_t k = 0; k < x.extent(1); ++k) z(i, j) += x(i, k) * y(k, j);
    }
  }
}
JAXBRIDGE_EXPORT(matmul, cpu).parameters("x[n, k], y[k, m]").result(jb::shape("[n, m]"));

// What arrives of every kind of attribute.
void attributes(jb::buffer_view<const void> x, bool b, std::int8_t i8, std::uint64_t u64, float f,
                std::complex<double> c, std::string_view s, std::span<const double> l,
                std::span<const bool> bits, jb::attributes_view d, std::optional<std::int32_t> o,
                jb::buffer_view<double, 1> out) {
  double sum = 0;
  for (const double v : l) sum += v;
  double set = 0;
  for (const bool v : bits) set += v ? 1 : 0;
  const double nested =
      d.dictionary("in").value_or(jb::attributes_view()).scalar<double>("x").value_or(-1);
  const double values[] = {b ? 1.0 : 0.0,
                           static_cast<double>(i8),
                           static_cast<double>(u64),
                           f,
                           c.real(),
                           c.imag(),
                           static_cast<double>(s.size()),
                           sum,
                           set,
                           static_cast<double>(d.scalar<std::int64_t>("n").value_or(-1)),
                           nested,
                           static_cast<double>(o.value_or(-1)),
                           static_cast<double>(x.rank()),
                           static_cast<double>(static_cast<int>(x.dtype()))};
  for (std::size_t i = 0; i < std::size(values); ++i) out[i] = values[i];
}
JAXBRIDGE_EXPORT(attributes, cpu)
    .parameters("x, b, i8, u64, f, c, s, l, bits, d, o")
    .result(jb::shape("[14]"));

struct counter {
  explicit counter(jb::device d) : ordinal(d.ordinal) {}
  std::int32_t ordinal;
  int calls = 0;
};
void count(jb::buffer_view<const float, 1> /*x*/, jb::state<counter> mine, jb::device on,
           jb::buffer_view<std::int32_t, 1> out) {
  const auto lock = mine.lock();
  out[0] = ++mine->calls;
  out[1] = mine->ordinal;
  out[2] = on.ordinal;
}
JAXBRIDGE_EXPORT(count, cpu).parameters("x").result(jb::shape("[3]")).side_effect();

// Through scratch memory, a workspace and XLA's threads.
jb::status sums(jb::buffer_view<const float, 2> x, jb::scratch& memory, jb::thread_pool pool,
                jb::workspace<float> w, jb::buffer_view<float, 1> out) {
  auto block = memory.allocate(x.size_bytes());
  if (!block.ok()) return block.error();
  float* copy = static_cast<float*>(block.value());
  const std::int64_t columns = x.extent(1);
  pool.parallel_for(x.extent(0), 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      float sum = 0;
      for (std::int64_t j = 0; j < columns; ++j) sum += copy[row * columns + j] = x(row, j);
      w[static_cast<std::size_t>(row)] = sum;
    }
  });
  for (std::size_t i = 0; i < out.size(); ++i) out[i] = w[i];
  return {};
}
JAXBRIDGE_EXPORT(sums, cpu).parameters("x[n, m]").result(jb::shape("[n]"), jb::shape("[n + 1]"));

// Two results, whose shapes a function says.
jb::status split_shapes(std::span<const jb::any_buffer> operands,
                        const jb::attributes_view& attributes,
                        std::span<jb::result_shape> results) {
  const std::int64_t n = operands[0].shape[0];
  const std::int64_t at = attributes.scalar<std::int64_t>("at").value_or(0);
  if (at < 0 || at > n) {
    return {jb::status_code::invalid_argument,
            "at is " + std::to_string(at) + ", of " + std::to_string(n)};
  }
  results[0].set(operands[0].dtype, {at});
  results[1].set(operands[0].dtype, {n - at});
  return {};
}
void split(jb::buffer_view<const double, 1> x, std::int64_t at, jb::buffer_view<double, 1> a,
           jb::buffer_view<double, 1> b) {
  std::copy_n(x.data(), at, a.data());
  std::copy(x.data() + at, x.data() + x.size(), b.data());
}
JAXBRIDGE_EXPORT(split, cpu).parameters("x, at").shapes<split_shapes>();

// No rule: the caller says the shape.
void fill(jb::buffer_view<const float, 0> value, jb::buffer_view<float> out) {
  for (float& v : out.elements()) v = value[0];
}
JAXBRIDGE_EXPORT(fill, cpu).parameters("value");

jb::status fails(jb::buffer_view<const float> /*x*/, std::string_view how,
                 jb::buffer_view<float> /*y*/) {
  if (how == "status") return {jb::status_code::out_of_range, "of its own"};
  if (how == "bad_alloc") throw std::bad_alloc();
  if (how == "int") throw 3;
  throw std::runtime_error("thrown");
}
JAXBRIDGE_EXPORT(fails, cpu).parameters("x, how").result(jb::same_as<0>);

// The thread of the interpreter can be elsewhere: nothing of Python's is on the way.
void thread_of(jb::buffer_view<const float> /*x*/, jb::buffer_view<std::uint64_t, 0> out) {
  out[0] = std::hash<std::thread::id>()(std::this_thread::get_id());
}
JAXBRIDGE_EXPORT(thread_of, cpu).parameters("x").result(jb::shape("[]"));

// Where an array lies that is updated, or only read.
std::uint64_t place_of(const void* data) { return reinterpret_cast<std::uintptr_t>(data); }
void bump(jb::in_place<float, 1> x, jb::buffer_view<std::uint64_t, 0> where) {
  for (float& v : x.elements()) v += 1;
  where[0] = place_of(x.data());
}
JAXBRIDGE_EXPORT(bump, cpu).parameters("x[n]").result(jb::same_as<0>, jb::shape("[]"));

void place(jb::buffer_view<const float, 1> x, jb::buffer_view<std::uint64_t, 0> where) {
  where[0] = place_of(x.data());
}
JAXBRIDGE_EXPORT(place, cpu).parameters("x[n]").result(jb::shape("[]"));

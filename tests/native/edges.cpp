// SPDX-License-Identifier: Apache-2.0
// What goes wrong in functions: exceptions of every kind, and the ends of what the headers take.
#include <atomic>
#include <cstdint>
#include <exception>
#include <jaxbridge/jaxbridge.hpp>
#include <limits>
#include <span>
#include <stdexcept>
#include <string_view>

namespace jb = jaxbridge;

namespace {
using floats = jb::buffer_view<const float, 1>;
using out = jb::buffer_view<float, 1>;

struct without_text : std::exception {
  const char* what() const noexcept override { return nullptr; }
};
}  // namespace

void throws(floats /*x*/, std::string_view how, out /*y*/) {
  if (how == "latin1") throw std::runtime_error("caf\xe9 \xed\xa0\x80 \xf0\x9f\x98\x80 \xc3");
  throw without_text();
}
JAXBRIDGE_EXPORT(throws, cpu).parameters("x, how").result(jb::same_as<0>);

// x + 1 on the threads; throws at an element.
void add_one(floats x, std::int64_t grain, std::int64_t bad, jb::thread_pool pool, out y) {
  pool.parallel_for(static_cast<std::int64_t>(x.size()), grain,
                    [&](std::int64_t begin, std::int64_t end) {
                      for (std::int64_t i = begin; i < end; ++i) {
                        if (i == bad || bad == -2) throw std::out_of_range("of a piece");
                        const auto k = static_cast<std::size_t>(i);
                        y[k] = x[k] + 1;
                      }
                    });
}
JAXBRIDGE_EXPORT(add_one, cpu).parameters("x, grain = 1, bad = -1").result(jb::same_as<0>);

// Threads that wait for threads, and one that throws inside.
void nested(floats x, bool bad, jb::thread_pool pool, out y) {
  const auto rows = static_cast<std::int64_t>(x.size()) / 8;
  pool.parallel_for(8, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      pool.parallel_for(rows, 1, [&](std::int64_t first, std::int64_t last) {
        for (std::int64_t i = row * rows + first; i < row * rows + last; ++i) {
          if (bad && i == 17) throw std::out_of_range("of an inner piece");
          y[static_cast<std::size_t>(i)] = x[static_cast<std::size_t>(i)] + 1;
        }
      });
    }
  });
}
JAXBRIDGE_EXPORT(nested, cpu).parameters("x, bad = False").result(jb::same_as<0>);

// Pieces of a range that ends where numbers end.
void huge_pieces(floats /*x*/, std::int64_t grain, jb::thread_pool pool, out y) {
  std::atomic<std::int64_t> pieces{0};
  std::atomic<bool> inside{true};
  constexpr std::int64_t most = std::numeric_limits<std::int64_t>::max();
  pool.parallel_for(most, grain, [&](std::int64_t begin, std::int64_t end) {
    if (begin < 0 || end <= begin) inside = false;
    ++pieces;
  });
  y[0] = inside ? static_cast<float>(pieces.load()) : -1.0F;
}
JAXBRIDGE_EXPORT(huge_pieces, cpu).parameters("x, grain").result(jb::same_as<0>);

// A default with the other kind of quote in it.
void quoted(floats /*x*/, std::string_view s, std::int32_t n, out y) {
  y[0] = static_cast<float>(s.size()) + static_cast<float>(n);
}
JAXBRIDGE_EXPORT(quoted, cpu).parameters(R"(x, s = "it's, [", n = 1)").result(jb::same_as<0>);

// More parameters than there were names for.
using tiny = std::int8_t;
void many(floats /*x*/, tiny, tiny, tiny, tiny, tiny, tiny, tiny, tiny, tiny, tiny, tiny, tiny,
          tiny, tiny, tiny, tiny, tiny, tiny, tiny, tiny, tiny, tiny, tiny, tiny, tiny, tiny, tiny,
          tiny, tiny, tiny, tiny, tiny, tiny, tiny, tiny last, out y) {
  y[0] = last;
}
JAXBRIDGE_EXPORT(many, cpu).result(jb::same_as<0>);

// A shape function without a result to write.
jb::status no_shapes(std::span<const jb::any_buffer> /*operands*/,
                     const jb::attributes_view& /*attributes*/,
                     std::span<jb::result_shape> /*results*/) {
  return {};
}
void no_results(floats /*x*/) {}
JAXBRIDGE_EXPORT(no_results, cpu).parameters("x").shapes<no_shapes>().side_effect();

// What is updated needs no rule of its own.
void twice(jb::in_place<float> x, jb::in_place<double, 2> y) {
  for (std::size_t i = 0; i < x.size(); ++i) x[i] *= 2;
  for (std::size_t i = 0; i < y.size(); ++i) y[i] *= 2;
}
JAXBRIDGE_EXPORT(twice, cpu).parameters("x, y");

// Beside another result it does, and rules can be wrong.
void updates_and_gives(jb::buffer_view<const float, 1> /*x*/, out z, jb::in_place<float, 1> y) {
  z[0] = y[0] += 1;
}
JAXBRIDGE_EXPORT(updates_and_gives, cpu).parameters("x, y");
JAXBRIDGE_EXPORT_AS(wrong_rule, cpu, updates_and_gives)
    .parameters("x[n], y[m]")
    .result(jb::same_as<0>, jb::shape("[n + 1]"));

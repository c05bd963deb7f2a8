// SPDX-License-Identifier: Apache-2.0
// The core alone: no Python, no XLA. What one call costs here is a lower bound of what it costs
// there.
#include <benchmark/benchmark.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/dispatch/call.hpp"
#include "core/dispatch/entry_points.hpp"
#include "core/dispatch/registry.hpp"
#include "core/lru_cache.hpp"
#include "empty_call.hpp"

namespace {

using jaxbridge::dispatch::call;
using jaxbridge::dispatch::call_memory;
using jaxbridge::dispatch::registry;

void decoding(benchmark::State& state) {
  bench::empty_call empty(static_cast<std::size_t>(state.range(0)));
  const auto& frame = empty.frame();
  for (auto _ : state) {
    const call_memory memory(jaxbridge::dispatch::buffer_count(frame).value());
    call c;
    const auto status =
        jaxbridge::dispatch::decode(frame, jaxbridge::platform::cpu, memory.data(), c);
    if (!status.ok()) state.SkipWithError("the frame was refused");
    benchmark::DoNotOptimize(c);
  }
}
BENCHMARK(decoding)->Name("decode a frame, operands")->RangeMultiplier(4)->Range(1, 256);

void lookup(benchmark::State& state) {
  registry table;
  for (std::int64_t key = 0; key < state.range(0); ++key) {
    table.add(key * 0x9E3779B9, fake_xla::make_target());
  }
  for (auto _ : state) benchmark::DoNotOptimize(table.find(0, "spec"));
}
BENCHMARK(lookup)->Name("find a target, registered")->Arg(1)->Arg(1000);

void cache_hit(benchmark::State& state) {
  const auto words = static_cast<std::size_t>(state.range(0));
  auto lists = bench::address_lists(16, words);
  jaxbridge::lru_cache<int> cache(lists.size());
  for (const auto& list : lists) static_cast<void>(cache.insert(list, 1));
  std::size_t next = 0;
  for (auto _ : state) {
    benchmark::DoNotOptimize(cache.find(lists[next]));
    next = (next + 1) % lists.size();
  }
}
BENCHMARK(cache_hit)->Name("hit the cache, addresses")->RangeMultiplier(4)->Range(1, 256);

void whole_call(benchmark::State& state) {
  bench::empty_call empty(static_cast<std::size_t>(state.range(0)));
  for (auto _ : state) {
    if (!empty.run()) state.SkipWithError("the call failed");
  }
}
BENCHMARK(whole_call)->Name("a whole empty call, operands")->RangeMultiplier(4)->Range(1, 256);

}  // namespace

BENCHMARK_MAIN();

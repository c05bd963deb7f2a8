// SPDX-License-Identifier: Apache-2.0
// XLA's side of a call of ours: the public frame builder, with `key` and `spec`.
//
// For tests, fuzzers and benchmarks alike: no GoogleTest here.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "jaxbridge/testing.hpp"

namespace fake_xla {

using namespace jaxbridge::testing;
using jaxbridge::attribute_set;

/// A frame for the execute stage, without buffers, with `key` and `spec`.
class frame_builder : public jaxbridge::testing::frame_builder {
 public:
  explicit frame_builder(std::int64_t key = 1, std::string spec = "spec") {
    attributes().scalar("key", key).string("spec", std::move(spec));
  }
};

}  // namespace fake_xla

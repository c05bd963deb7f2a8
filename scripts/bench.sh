#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# What a call costs, how that grows, and the core alone. Results go to benchmarks/results; arguments go to
# the Python scripts (--quick, --output DIRECTORY).
. "$(dirname "$0")/common.sh"

"$root/scripts/setup.sh" bench

core() {
  cmake --preset bench >build/bench.log
  cmake --build --preset bench
  if [ -x build/bench/benchmarks/core_benchmarks ]; then
    build/bench/benchmarks/core_benchmarks
  else
    note "google-benchmark is missing: apt-get install libbenchmark-dev"
  fi
  "$venv/bin/python" benchmarks/instructions.py
}

mkdir -p build
if command -v g++ >/dev/null 2>&1; then
  step "The core alone" core
else
  note "g++ is missing, so the core is not measured alone: apt-get install g++"
fi
step "What a call costs" "$venv/bin/python" benchmarks/call_cost.py "$@"
step "How it grows" "$venv/bin/python" benchmarks/growth.py "$@"

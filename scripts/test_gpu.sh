#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# All that needs a GPU, in the environment of the python3 on PATH, which has jaxbridge, JAX for CUDA, pytest and
# pytest-xdist: tests/gpu, tests/gpu_multi, the pages' examples on CUDA and the programs of examples/.
#   scripts/test_gpu.sh [DIRECTORY]     where the logs go (build/gpu-tests)
# Some 4 minutes on 16 cores: what measures memory has the device to itself, the rest shares it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
logs=${1:-build/gpu-tests}
mkdir -p "$logs"
logs=$(cd "$logs" && pwd)
export XLA_PYTHON_CLIENT_PREALLOCATE=false
python3 -c 'import jax; print(*jax.devices("cuda"))'

tests() { # title, folder, arguments of pytest
  local title=$1 folder=$2 result=0
  shift 2
  (cd "$root/tests/$folder" && python3 -m pytest -q -p no:cacheprovider -p no:benchmark -rfE "$@") >"$logs/$title.log" 2>&1 || result=$?
  printf '%-12s %s\n' "$title" "$(tail -n 1 "$logs/$title.log")"
  [ $result = 0 ] || touch "$logs/failed"
}
example() { # name, arguments
  local name=$1
  shift
  if (cd "$logs" && python3 "$root/examples/$name.py" "$@") >"$logs/$name.log" 2>&1; then
    printf '%-12s %s\n' "$name" passed
  else
    printf '%-12s %s\n' "$name" FAILED
    touch "$logs/failed"
  fi
}

rm -f "$logs/failed"
# What takes most of the device's memory, or looks at how much of it is free.
alone="most_of or G04 or L01 or E09_memory"
tests memory gpu test_memory_gpu.py &
tests native gpu test_native_gpu.py &
tests transforms gpu test_transforms_gpu.py &
JAX_PLATFORMS=cpu,cuda tests docs python -n 3 test_docs.py &
wait
tests cases gpu -k "test_cases_ and not ($alone)" &
tests replay gpu test_replay_gpu.py test_scratch_gpu.py test_state_gpu.py -k "not ($alone)" &
tests interchange gpu -n 4 test_interchange_gpu.py &
for name in deblur pendulums stencil terrain; do example "$name"; done
example fourier --platform cuda
wait
tests calls gpu -n 5 test_adapters_gpu.py test_call_gpu.py test_lazy_gpu.py
tests alone gpu -k "$alone"
tests multi gpu_multi
if [ -e "$logs/failed" ]; then
  grep -h '^FAILED\|^ERROR' "$logs"/*.log || true
  exit 1
fi

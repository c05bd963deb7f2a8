#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# All tests that need no GPU: the C++ tests, then the Python tests under the newest and the oldest JAX.
# Goes on after a failure and says at the end what failed. Arguments go to pytest: `-n 0` for one process.
. "$(dirname "$0")/common.sh"

"$root/scripts/setup.sh" tests

failed=()
check() {
  local title=$1 start=$SECONDS
  shift
  say "$title"
  if "$@"; then
    note "passed in $((SECONDS - start)) s"
  else
    note "FAILED after $((SECONDS - start)) s"
    failed+=("$title")
  fi
}

cpp_build() {
  cmake --preset release \
    -DJAXBRIDGE_XLA_INCLUDE_OLD="$(site_of build/venv-oldest)/jaxlib/include" \
    -DJAXBRIDGE_XLA_INCLUDE_NEW="$(site_of "$venv")/jaxlib/include" >build/release.log 2>&1 || {
    cat build/release.log >&2
    return 1
  }
  cmake --build --preset release
}

# Where tests/fake_gpu finds the fake driver and the runtime that calls handlers.
export JAXBRIDGE_FAKES="$root/build/release/tests/cpp"

# A shell's background job, and so some CI, starts with SIGINT ignored, and the tests of interrupts need it.
interruptible=()
if env --default-signal=INT true 2>/dev/null; then interruptible=(env --default-signal=INT); fi
# One process for each core, of up to a gigabyte each; a file's tests stay together.
workers=$(nproc)
[ "$workers" -le 8 ] || workers=8
run_pytest() {
  ${interruptible[@]+"${interruptible[@]}"} "$1/bin/python" -m pytest -n "$workers" --dist loadfile "${@:2}"
}

check_compiler
mkdir -p build
check "C++: release build, warnings as errors, ABI checks against the oldest and the newest jaxlib" cpp_build
check "C++: tests" ctest --preset release
check "Python: tests, newest JAX" run_pytest "$venv" tests/python tests/packaging tests/peers "$@"
check "Python: tests, JAX 0.8.0" run_pytest build/venv-oldest tests/python tests/peers "$@"
check "Python: tests on the fake driver, newest JAX" run_pytest "$venv" tests/fake_gpu
check "Python: tests on the fake driver, JAX 0.8.0" run_pytest build/venv-oldest tests/fake_gpu

if [ ${#failed[@]} -gt 0 ]; then
  printf '\nfailed:\n' >&2
  printf '  %s\n' "${failed[@]}" >&2
  exit 1
fi
say "all passed in $SECONDS s"

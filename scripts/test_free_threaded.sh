#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds jaxbridge for a free-threaded Python where one is found, and runs the Python tests on it, in
# build/venv-free-threaded-VERSION. Arguments go to pytest. JAXBRIDGE_FREE_THREADED_PYTHON=PATH names one.
# The module asks for the GIL, which guards what it keeps; PYTHON_GIL=0 before the command runs without it.
. "$(dirname "$0")/common.sh"

# Prints why $1 will not do; nothing if it will.
unfit() {
  "$1" - 2>&1 <<'PY' || echo "it does not run"
import os, sys, sysconfig
if sys.implementation.name != "cpython" or not sysconfig.get_config_var("Py_GIL_DISABLED"):
    print("it is not free-threaded")
elif not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")):
    print("Python.h is missing")
PY
}

candidates() {
  local name directory
  for name in python3.14t python3.13t; do type -aP "$name" 2>/dev/null || true; done
  for directory in "${PYENV_ROOT:-}" "$(pyenv root 2>/dev/null || true)" "$HOME/.pyenv"; do
    [ -z "$directory" ] || printf '%s\n' "$directory"/versions/*t/bin/python3
  done | LC_ALL=C sort -ruV
  for name in 3.14t 3.13t; do uv python find --no-project "$name" 2>/dev/null || true; done
  printf '%s\n' "$tools"/python/*freethreaded*/bin/python3 "$HOME"/.local/share/uv/python/*freethreaded*/bin/python3
}

find_free_threaded() {
  local candidate
  while read -r candidate; do
    if [ -x "$candidate" ] && [ -z "$(unfit "$candidate")" ]; then
      echo "$candidate"
      return 0
    fi
  done < <(candidates)
  return 1
}

if [ -n "${JAXBRIDGE_FREE_THREADED_PYTHON:-}" ]; then
  python=$JAXBRIDGE_FREE_THREADED_PYTHON
  reason=$(unfit "$python")
  [ -z "$reason" ] || die "JAXBRIDGE_FREE_THREADED_PYTHON=$python will not do: $reason."
elif ! python=$(find_free_threaded); then
  die "no free-threaded Python 3.13 or later with its headers on this machine (looked for python3.14t and" \
    "python3.13t on PATH, for pyenv's and for uv's), so nothing was tested. Install one, then run it again:" \
    "  uv python install 3.14t" \
    "  pyenv install 3.14t" \
    "or name one: JAXBRIDGE_FREE_THREADED_PYTHON=/path/to/python3.14t make test-free-threaded"
fi
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
environment="$root/build/venv-free-threaded-$version"
wheels="$root/build/dist-free-threaded"

if ! is_done "$environment/.jaxbridge/made" "$python"; then
  step "Environment of $python, ${environment#"$root"/}" make_venv "$python" "$environment"
  set_done "$environment/.jaxbridge/made" "$python"
fi
# In a subshell: what went wrong is on the screen, what it means is said here.
(install_group "$environment" base --only-binary=jaxlib,numpy,scipy "jax>=0.8.0" "numpy>=2.0" --group build --group test) ||
  die "JAX, NumPy, SciPy or nanobind cannot be installed for $python (see above), so nothing was tested." \
    "A release of theirs may have no wheel for this version: try another free-threaded Python."
(command -v cmake && command -v ninja) >/dev/null || pip_in "$environment" cmake ninja
export PATH="$PATH:$environment/bin"

build() {
  rm -rf "$wheels"
  "$environment/bin/python" -m pip wheel --no-build-isolation --no-deps --no-index \
    --wheel-dir "$wheels" . >build/wheel-free-threaded.log 2>&1 || {
    cat build/wheel-free-threaded.log >&2
    die "jaxbridge cannot be built for $python (the log above is build/wheel-free-threaded.log)"
  }
  "$environment/bin/python" -m pip install --quiet --no-deps --no-index --force-reinstall "$wheels"/*.whl
}
key=$(source_hash)
if ! is_done "$environment/.jaxbridge/wheel" "$key"; then
  check_compiler
  step "Building jaxbridge for Python ${version}t" build
  set_done "$environment/.jaxbridge/wheel" "$key"
fi

# Without the variable Python switches the GIL on at the import and warns of it.
export PYTHON_GIL="${PYTHON_GIL:-1}"
say "Python: tests, free-threaded Python $version, PYTHON_GIL=$PYTHON_GIL"
"$environment/bin/python" -m pytest tests/python "$@"

#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Brings what the checkout needs into .venv and build/, each thing once:
#   setup.sh              .venv with jax, numpy, scipy, what the demo needs, and jaxbridge itself
#   setup.sh frameworks   also every framework that jaxbridge has an adapter for
#   setup.sh lint         also the linters
#   setup.sh bench        also what the benchmarks plot with, and the other bridges that they measure
#   setup.sh tests        also the environments that make test runs the same wheel in
# JAXBRIDGE_PYTHON=PATH picks the Python; CXX picks the compiler.
. "$(dirname "$0")/common.sh"

# .venv, made or adopted.
environment() {
  local python
  if [ -x "$venv/bin/python" ] && python_fits "$venv/bin/python" && "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    modern_pip "$venv"
    return 0
  fi
  if ! python=$(find_python); then
    [ -z "${JAXBRIDGE_PYTHON:-}" ] ||
      die "JAXBRIDGE_PYTHON=$JAXBRIDGE_PYTHON will not do." \
        "It must be a CPython 3.12 or later, not free-threaded, with its headers: $(why_no_python)"
    note "no usable Python 3.12 or later on this machine"
    python=$(bring_python 3.12) ||
      die "no usable Python 3.12 or later, and none could be brought by uv." "Found:" \
        "$(why_no_python)" "Install one with its headers and venv, then run the same command again:" \
        "  apt-get install python3-venv python3-dev     (Ubuntu 24.04, Debian 13)" \
        "  dnf install python3-devel                    (Fedora)" \
        "or name one: JAXBRIDGE_PYTHON=/path/to/python3.12 make setup"
  fi
  step "Making .venv with $("$python" -VV | head -n 1 | cut -d' ' -f1,2) ($python)" make_venv "$python" "$venv"
}

# cmake and ninja from the machine if they will do, else from the package index.
build_tools() {
  local missing=() version
  version=$(cmake --version 2>/dev/null | sed -n 's/^cmake version \([0-9.]*\).*/\1/p' || true)
  if [ -z "$version" ] || [ "$(printf '%s\n' 3.25 "$version" | sort -V | head -n 1)" != 3.25 ]; then
    missing+=("cmake>=3.25")
  fi
  if ! command -v ninja >/dev/null 2>&1 || ! ninja --version >/dev/null 2>&1; then missing+=(ninja); fi
  if [ ${#missing[@]} -gt 0 ]; then
    step "Installing ${missing[*]} into .venv" pip_in "$venv" "${missing[@]}"
    hash -r
  fi
}

dependencies() {
  install_group "$venv" base "jax>=0.8.0" "numpy>=2.0" --group build --group demo --group test
}

build_wheel() {
  local log="$root/build/wheel.log"
  rm -rf "$dist"
  mkdir -p "$root/build"
  # What pip prints of a build that fails is all of it, of one that succeeds nothing.
  if ! "$venv/bin/python" -m pip wheel --no-build-isolation --no-deps --no-index \
    --wheel-dir "$dist" . >"$log" 2>&1; then
    cat "$log" >&2
    die "building jaxbridge failed (the log above is build/wheel.log)"
  fi
}

setup() {
  local key
  environment
  key=$({
    cat pyproject.toml
    "$venv/bin/python" -VV
  } | hash_of)
  if ! is_done "$venv/.jaxbridge/setup" "$key"; then
    check_compiler
    step "Installing jax, numpy, scipy, scikit-image, pytest and build tools into .venv (the first time 160 MB to download)" dependencies
    build_tools
    set_done "$venv/.jaxbridge/setup" "$key"
  fi
  key=$(source_hash)
  if ! is_done "$dist/.stamp" "$key"; then
    check_compiler
    step "Building jaxbridge with $CXX (half a minute on 2 cores)" build_wheel
    set_done "$dist/.stamp" "$key"
  fi
  install_wheel "$venv"
}

frameworks() {
  install_group "$venv" frameworks --group frameworks
}

lint() {
  install_group "$venv" lint --group lint
}

# A bridge that cannot be installed is named as missing by the benchmark.
bench() {
  local peer
  install_group "$venv" bench --group bench
  for peer in jax-tvm-ffi jaxbind; do
    (install_group "$venv" "bench-$peer" "$peer") || note "$peer could not be installed"
  done
}

oldest() {
  ensure_venv "$1" "$root/build/venv-oldest"
  # NumPy as the frameworks need it, since these are .venv's.
  install_group "$root/build/venv-oldest" base "jax==0.8.0" "jaxlib==0.8.0" "numpy<2.5" --group test
  # What is not here, the frameworks above all, is looked for in .venv: torch alone takes gigabytes.
  # A .pth file adds to the end of the path, so jax, numpy and jaxbridge are the ones from here.
  site_of "$venv" >"$(site_of "$root/build/venv-oldest")/zz_frameworks.pth"
  install_wheel "$root/build/venv-oldest"
}

other_python() {
  ensure_venv "$1" "$root/build/venv-py$2"
  install_group "$root/build/venv-py$2" base "jax>=0.8.0" "numpy>=2.0" --group test
  install_wheel "$root/build/venv-py$2"
}

# The same wheel under the oldest JAX, and under another Python where the machine has one.
tests() {
  local base other version
  base=$("$venv/bin/python" -c "import sys; print(sys._base_executable)")
  step "Environment of the oldest JAX, build/venv-oldest (the first time 120 MB to download)" oldest "$base"
  for version in 3.13 3.14 3.12; do
    if "$venv/bin/python" -c "import sys; sys.exit(sys.version_info[:2] == ($(tr . , <<<"$version")))"; then
      if other=$(find_python "$version"); then
        step "Environment of Python $version, build/venv-py$version (the first time 140 MB to download)" \
          other_python "$other" "$version"
        return 0
      fi
    fi
  done
  note "no second Python version on this machine: what needs one is skipped by name"
}

case ${1:-setup} in
  setup) setup ;;
  frameworks)
    setup
    step "Installing torch, numba, numba-cuda, warp and more into .venv (the first time 3.3 GB to download:
    PyPI's torch brings CUDA along, a smaller one is not to be had there)" frameworks
    ;;
  lint)
    setup
    step "Installing ruff and mypy into .venv" lint
    ;;
  bench)
    setup
    step "Installing matplotlib, jax-tvm-ffi and jaxbind into .venv (the first time 20 MB to download)" bench
    ;;
  tests)
    setup
    tests
    ;;
  *) die "unknown argument: $1" "usage: setup.sh [setup|frameworks|lint|bench|tests]" ;;
esac

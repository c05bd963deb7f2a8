# SPDX-License-Identifier: Apache-2.0
# Shared by the scripts beside it: messages, stamps, and how a Python and an environment are found.
# shellcheck shell=bash
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"

# What a user's shell sets for another project must not leak into this one's environments.
unset PYTHONPATH PYTHONHOME VIRTUAL_ENV PIP_TARGET PIP_USER PIP_PREFIX
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

venv="$root/.venv"
tools="$root/build/tools"
dist="$root/build/dist"
# Tools that the machine lacks come into .venv; the machine's own stand first.
export PATH="$PATH:$venv/bin"

say() { printf '==> %s\n' "$*"; }
note() { printf '    %s\n' "$*"; }
die() {
  printf '\nerror: %s\n' "$1" >&2
  shift
  local line
  for line in "$@"; do printf '       %s\n' "$line" >&2; done
  exit 1
}

# step TITLE COMMAND...: runs it and says how long it took.
step() {
  local title=$1 start=$SECONDS
  shift
  say "$title"
  "$@"
  note "done in $((SECONDS - start)) s"
}

# Progress bars on a terminal, only errors in a log.
pip_options=()
[ -t 1 ] || pip_options=(--quiet)

# --- stamps ------------------------------------------------------------------------------------------
# A stamp holds what a step was made from; while that is unchanged the step does nothing.
is_done() { [ -f "$1" ] && [ "$(cat "$1")" = "$2" ]; }
set_done() {
  mkdir -p "$(dirname "$1")"
  printf '%s' "$2" >"$1"
}

hash_of() { sha256sum | cut -d' ' -f1; }

# Everything that the wheel is made of.
source_hash() {
  local parts=(include src python cmake CMakeLists.txt pyproject.toml LICENSE)
  [ ! -f README.md ] || parts+=(README.md)
  find "${parts[@]}" -name __pycache__ -prune -o -type f -not -name '*.so' -print0 |
    LC_ALL=C sort -z | xargs -0 sha256sum | hash_of
}

# --- Python ------------------------------------------------------------------------------------------
# 0 if $1 runs (a pyenv shim may stand on PATH and fail) and is a CPython that jaxbridge can be built
# for; with $2 it must be that minor version. The limited API excludes free-threaded ones, and the
# headers are missing where a distribution packs them apart.
python_fits() {
  "$1" - "${2:-}" >/dev/null 2>&1 <<'PY'
import os, sys, sysconfig
want = sys.argv[1]
version = sys.version_info
fits = (
    version >= (3, 12)
    and sys.implementation.name == "cpython"
    and not sysconfig.get_config_var("Py_GIL_DISABLED")
    and version.releaselevel == "final"
    and want in ("", f"{version[0]}.{version[1]}")
    and os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h"))
)
sys.exit(not fits)
PY
}

# All candidates, the preferred first: 3.12 is the oldest supported one, and the one that every
# framework has wheels for.
python_candidates() {
  local name directory
  if [ -n "${JAXBRIDGE_PYTHON:-}" ]; then
    echo "$JAXBRIDGE_PYTHON"
    return
  fi
  for name in python3.12 python3.13 python3.14 python3 python; do
    type -aP "$name" 2>/dev/null || true
  done
  for directory in "${PYENV_ROOT:-}" "$(pyenv root 2>/dev/null || true)" "$HOME/.pyenv"; do
    [ -z "$directory" ] || printf '%s\n' "$directory"/versions/*/bin/python3
  done | LC_ALL=C sort -uV
  printf '%s\n' "$tools"/python/*/bin/python3 "$HOME"/.local/share/uv/python/*/bin/python3
}

# find_python [VERSION]: the path of one that fits, or nothing.
find_python() {
  local candidate
  while read -r candidate; do
    case $candidate in "$venv"/*) continue ;; esac
    if python_fits "$candidate" "${1:-}"; then
      echo "$candidate"
      return 0
    fi
  done < <(python_candidates)
  return 1
}

# Some Python, however old, that can install a package: to fetch uv or virtualenv with.
find_pip() {
  local candidate
  while read -r candidate; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 8))' >/dev/null 2>&1 &&
      "$candidate" -m pip --version >/dev/null 2>&1; then
      echo "$candidate"
      return 0
    fi
  done < <(python_candidates)
  return 1
}

find_uv() {
  if command -v uv >/dev/null 2>&1 && uv --version >/dev/null 2>&1; then
    command -v uv
    return 0
  fi
  local uv="$tools/uv/bin/uv" with
  if [ ! -x "$uv" ]; then
    with=$(find_pip) || return 1
    note "fetching uv (20 MB) with $with" >&2
    "$with" -m pip install --quiet --target "$tools/uv" uv >&2 || return 1
  fi
  echo "$uv"
}

# A Python of this version brought by uv into build/tools.
bring_python() {
  local uv
  uv=$(find_uv) || return 1
  note "letting uv bring Python $1 (30 MB) into build/tools" >&2
  UV_CACHE_DIR="$tools/uv-cache" UV_PYTHON_INSTALL_DIR="$tools/python" \
    "$uv" python install --no-bin "$1" >&2 || return 1
  find_python "$1"
}

why_no_python() {
  local candidate found=""
  while read -r candidate; do
    found+="$("$candidate" -c '
import os, sys, sysconfig
header = os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h"))
print("%s is %s%s" % (sys.executable, sys.version.split()[0], "" if header else ", without Python.h"))
' 2>/dev/null || true)"$'\n'
  done < <(python_candidates)
  printf '%s' "$found" | sed '/^$/d' | sort -u
}

# make_venv PYTHON DIRECTORY
make_venv() {
  local python=$1 directory=$2 uv with
  rm -rf "$directory"
  mkdir -p "$(dirname "$directory")"
  if "$python" -c 'import ensurepip, venv' >/dev/null 2>&1; then
    "$python" -m venv "$directory"
  elif "$python" -m pip --version >/dev/null 2>&1; then
    # Debian packs ensurepip apart (python3-venv).
    "$python" -m pip install --quiet --target "$tools/virtualenv" virtualenv
    PYTHONPATH="$tools/virtualenv" "$python" -m virtualenv --quiet "$directory"
  elif uv=$(find_uv); then
    "$uv" venv --quiet --seed --python "$python" "$directory"
  else
    with=$("$python" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
    die "$python can make no environment: it has neither venv nor pip." \
      "Install them, then run the same command again:" \
      "  apt-get install $with-venv      (Debian, Ubuntu)"
  fi
  modern_pip "$directory"
}

# modern_pip ENVIRONMENT: --group, for the dependency groups of pyproject.toml, came with 25.1.
modern_pip() {
  if ! "$1/bin/python" -c '
import pip, sys; sys.exit(tuple(map(int, pip.__version__.split(".")[:2])) < (25, 1))'; then
    pip_in "$1" --upgrade "pip>=25.1"
  fi
}

# ensure_venv PYTHON DIRECTORY: unless it is there whole.
ensure_venv() {
  if [ ! -f "$2/.jaxbridge/made" ] || ! python_fits "$2/bin/python"; then
    make_venv "$1" "$2"
    set_done "$2/.jaxbridge/made" yes
  fi
}

site_of() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))'; }

pip_in() {
  local directory=$1
  shift
  "$directory/bin/python" -m pip install ${pip_options[@]+"${pip_options[@]}"} "$@" ||
    die "installing into ${directory#"$root"/} failed (see above): pip install $*" \
      "The first run needs a network that reaches your Python package index; later ones don't."
}

# install_group ENVIRONMENT STAMP REQUIREMENTS...: once for each content of pyproject.toml.
install_group() {
  local directory=$1 name=$2 key
  shift 2
  key=$({
    cat pyproject.toml
    echo "$@"
    "$directory/bin/python" -VV
  } | hash_of)
  is_done "$directory/.jaxbridge/$name" "$key" && return 0
  pip_in "$directory" "$@"
  set_done "$directory/.jaxbridge/$name" "$key"
}

# install_wheel ENVIRONMENT: the wheel in build/dist, unless it is that one already.
install_wheel() {
  local directory=$1 wheel key
  wheel=$(echo "$dist"/jaxbridge-*.whl)
  key=$(hash_of <"$wheel")
  is_done "$directory/.jaxbridge/wheel" "$key" && return 0
  note "installing $(basename "$wheel") into ${directory#"$root"/}"
  "$directory/bin/python" -m pip install --quiet --no-deps --no-index --force-reinstall "$wheel"
  set_done "$directory/.jaxbridge/wheel" "$key"
}

# --- C++ ---------------------------------------------------------------------------------------------
# Sets CXX to a compiler that can do what the core needs.
check_compiler() {
  local compiler program
  program='#include <bit>
#include <concepts>
#include <span>
static_assert(std::endian::native == std::endian::little);
template <std::integral T> T twice(std::span<T> s) { return s[0] + s[0]; }
int main() { int x[] = {0}; return twice(std::span<int>(x)); }'
  if [ -z "${CXX:-}" ]; then
    # CMake takes c++ first. Where that is too old, a newer one beside it may be there.
    for compiler in c++ g++ clang++ g++-15 g++-14 g++-13 g++-12 clang++-19 clang++-18 clang++-17 clang++-16; do
      if command -v "$compiler" >/dev/null 2>&1 &&
        "$compiler" -std=c++20 -fsyntax-only -x c++ - <<<"$program" >/dev/null 2>&1; then
        export CXX=$compiler
        return 0
      fi
    done
    die "no C++20 compiler found (tried c++, g++, clang++ and versions of them)." \
      "Install one, then run the same command again:" \
      "  apt-get install g++          (Debian 12, Ubuntu 22.10 or later)" \
      "  dnf install gcc-c++          (Fedora, RHEL 10)" \
      "or name one: CXX=/path/to/g++-12 make setup"
  fi
  "$CXX" -std=c++20 -fsyntax-only -x c++ - <<<"$program" >/dev/null 2>&1 ||
    die "CXX=$CXX cannot compile C++20. jaxbridge needs GCC 12, Clang 14 or later."
}

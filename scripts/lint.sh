#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Format and lint of everything; changes nothing. lint.sh fix: changes what can be changed.
. "$(dirname "$0")/common.sh"

"$root/scripts/setup.sh" lint

mode=${1:-check}
cpp_files() { find include src tests benchmarks examples -name '*.[ch]pp' -not -path '*/corpus/*' 2>/dev/null | LC_ALL=C sort; }

tool() {
  local name
  for name in "$1-14" "$1"; do
    if command -v "$name" >/dev/null 2>&1 && "$name" --version | grep -q 'version 14\.'; then
      echo "$name"
      return
    fi
  done
  die "$1 14 not found: other versions format and warn differently." "Install it: apt-get install $1-14"
}

failed=()
check() {
  local title=$1 start=$SECONDS
  shift
  if "$@"; then
    say "$title: ok ($((SECONDS - start)) s)"
  else
    say "$title: FAILED"
    failed+=("$title")
  fi
}

tidy() {
  # The headers are seen through the sources that include them (HeaderFilterRegex).
  cmake --preset clang -DJAXBRIDGE_BUILD_TESTS=OFF >build/clang.log 2>&1 || {
    cat build/clang.log >&2
    return 1
  }
  find src/core -name '*.cpp' -print0 | LC_ALL=C sort -z |
    xargs -0 -n 1 -P "$(nproc)" "$clang_tidy" -p build/clang --quiet 2>build/tidy.log || {
    grep -v 'warnings generated\.$' build/tidy.log >&2
    return 1
  }
}

clang_format=$(tool clang-format)
clang_tidy=$(tool clang-tidy)
ruff="$venv/bin/ruff"
mkdir -p build

if [ "$mode" = fix ]; then
  cpp_files | xargs "$clang_format" -i
  "$ruff" check --fix --quiet . || true
  "$ruff" format --quiet .
fi
check "clang-format" xargs "$clang_format" --dry-run -Werror < <(cpp_files)
check "ruff check" "$ruff" check --quiet .
check "ruff format" "$ruff" format --check --quiet .
check "mypy" "$venv/bin/python" -m mypy
check "clang-tidy" tidy
if command -v shellcheck >/dev/null 2>&1; then
  check "shellcheck" shellcheck -x -P SCRIPTDIR scripts/*.sh .ci/run
fi

[ ${#failed[@]} -eq 0 ] || die "lint failed: ${failed[*]}" "make format changes what can be changed by a tool."

#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs the Python tests with the newest release of every minor version of JAX from 0.8 on, and with
# 0.8.0 itself, each in its own build/venv-jax-VERSION. Arguments go to pytest. Needs a network.
. "$(dirname "$0")/common.sh"

"$root/scripts/setup.sh"

base=$("$venv/bin/python" -c 'import sys; print(sys._base_executable)')
versions=$("$venv/bin/python" -m pip index versions jax 2>/dev/null | sed -n 's/^Available versions: //p' | tr -d ' ' | tr , '\n' |
  "$venv/bin/python" -c '
import sys
from packaging.version import Version
newest = {}
for version in sorted(map(Version, sys.stdin.read().split())):
    if version >= Version("0.8.0"):
        newest[version.release[:2]] = version
print("0.8.0", *newest.values())')
if [ -z "$versions" ] || [ "$versions" = 0.8.0 ]; then
  die "pip cannot list the versions of jax; this script needs a network."
fi

with_version() {
  local version=$1 directory="$root/build/venv-jax-$1"
  shift
  ensure_venv "$base" "$directory"
  install_group "$directory" base "jax==$version" --group test
  install_wheel "$directory"
  "$directory/bin/python" -m pytest tests/python tests/peers "$@"
}

results=()
worst=0
for version in $versions; do
  say "JAX $version"
  if with_version "$version" "$@"; then
    results+=("JAX $version: passed")
  else
    results+=("JAX $version: FAILED")
    worst=1
  fi
done
printf '\n'
printf '%s\n' "${results[@]}"
exit $worst

#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Writes python/jaxbridge/_core.pyi from the module installed in .venv; a test compares the two.
. "$(dirname "$0")/common.sh"
"$venv/bin/python" -m nanobind.stubgen --quiet --module jaxbridge._core --output-file "${1:-python/jaxbridge/_core.pyi}"

# SPDX-License-Identifier: Apache-2.0
# One name for each thing to do; what it takes is in scripts/.
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-free-threaded bench frameworks lint format wheel stubs clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | awk -F '\t' '{printf "make %-19s %s\n", $$1, $$2}'

setup:  ## .venv with jax, numpy, scipy and jaxbridge itself (all others do this first)
	@scripts/setup.sh

demo: setup  ## deblurs a photograph with an external image filter inside one jitted loop
	@.venv/bin/python examples/deblur.py

test:  ## builds and runs all tests that need no GPU
	@scripts/test.sh

test-free-threaded:  ## the Python tests on a free-threaded Python, where one is found
	@scripts/test_free_threaded.sh

bench:  ## what a call costs, beside other bridges; how that grows; the core alone
	@scripts/bench.sh

frameworks:  ## torch, numba, numba-cuda and warp into .venv (3.3 GB to download), for their tests
	@scripts/setup.sh frameworks

lint:  ## formats, linters and types, changing nothing
	@scripts/lint.sh

format:  ## the same, changing what a tool can change
	@scripts/lint.sh fix

wheel: setup  ## the wheel, in build/dist
	@ls -l build/dist/*.whl

stubs: setup  ## python/jaxbridge/_core.pyi from the built module
	@scripts/stubs.sh

clean:  ## removes what was built; stays: .venv, and a Python that was brought for it
	@mkdir -p build && find build -mindepth 1 -maxdepth 1 -not -name tools -exec rm -rf {} +

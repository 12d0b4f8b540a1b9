# `make` lists the targets. `make study` and `make test` do all set-up themselves.
STUDY ?= smoke
ARGS ?=
JOBS ?= 2
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
# Empty it to install whatever pyproject.toml allows instead of the pinned versions.
CONSTRAINTS ?= constraints.txt
CLUSTER_TESTS := $(wildcard tests/sweeps/test_slurm_*.py tests/sweeps/test_ray_*.py tests/sweeps/test_cluster_*.py)

.DEFAULT_GOAL := help
.PHONY: help setup setup-clusters study plan sweep status report test test-slow test-clusters check bench clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/\1|\2/' | awk -F'|' '{printf "  make %-14s %s\n", $$1, $$2}'
	@echo "  Variables: STUDY=$(STUDY) ARGS='' (overrides, e.g. ARGS='launch.workers=4 study.seeds=[0,1,2]')"

setup: $(VENV)/.installed ## install into .venv (about 2 minutes the first time)

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: PYTHON=$(PYTHON): Python 3.11 or later is needed" >&2; exit 2; }
	@echo "installing into $(VENV): about 2 minutes on a quiet machine, 1.5 GB"
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -e '.[dev]' $(if $(CONSTRAINTS),-c $(CONSTRAINTS))
	@touch $@

setup-clusters: setup ## also Ray, submitit and (as root, with apt-get) Slurm, as far as they can be had here
	@PY=$(PY) CONSTRAINTS=$(CONSTRAINTS) tests/setup_clusters.sh

study: setup ## the main job: launch study STUDY (default smoke), then write its report
	$(PY) -m sweeps.launch study=$(STUDY) $(ARGS)
	$(PY) -m analysis.report study=$(STUDY) $(filter runs_dir=%,$(ARGS))

plan: setup ## what study STUDY would train, and how long it would take here
	@$(PY) -m sweeps.plan study=$(STUDY) $(ARGS)

sweep: setup ## train what study STUDY lacks
	@$(PY) -m sweeps.launch study=$(STUDY) $(ARGS)

status: setup ## what of study STUDY is finished, running, failed, pending
	@$(PY) -m sweeps.status study=$(STUDY) $(ARGS)

report: setup ## fit, compare and draw what study STUDY has recorded
	@$(PY) -m analysis.report study=$(STUDY) $(ARGS)

test: setup ## the tests (fast ones)
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -n $(JOBS) --dist loadfile

test-slow: setup ## the tests that take longer: kills, coverage of intervals
	$(PY) -m pytest -q -m slow

test-clusters: setup ## executors on a real Slurm and a real Ray; says what is missing (make setup-clusters)
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -rs -m 'slurm or slow' $(CLUSTER_TESTS) $(ARGS)

check: setup ## lint and types
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

bench: setup ## step time and memory of every rule beside prenorm
	$(PY) benchmarks/step_time.py $(ARGS)

clean: ## remove build products and caches of tools; runs/ and .venv stay
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

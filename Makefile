# The two commands: `make demo` trains on this machine, `make test` proves the code. Both do all the set-up.
# `make test-all` has more of each kind: every layout for 20 steps, every dry run, Slurm, networks, browsers (docs/contributing/tests.md).
# Tests run in two processes, a file's in one of them: ranks that wait for each other, and tests without ranks, leave a
# core idle. Those of `make test-all` that measure how long something takes run after the others, alone.
PYTHON ?= python3
BIN := .venv/bin
# Ranks of the demo: one per GPU, or two on a CPU.
NPROC ?= $(shell gpus=$$(nvidia-smi -L 2>/dev/null | wc -l); [ $$gpus -gt 0 ] && echo $$gpus || echo 2)

.PHONY: demo test test-all test-exports test-ray test-cloud test-lm-eval test-null-gpu gpu docs install lint

demo: install
	$(BIN)/phalanx train examples/demo.toml --nproc $(NPROC) --set name=demo-$$(date +%Y%m%d-%H%M%S)

test: .venv/dev
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-all: .venv/dev .venv-ray/installed test-cloud test-lm-eval
	$(BIN)/python -m pytest --all -n 2 --dist loadfile -m 'not alone'
	$(BIN)/python -m pytest --all -m alone

# Exports to other trainers, read by those trainers' own parsers, from PyPI.
test-exports: .venv-exports/installed
	PYTHONPATH=src .venv-exports/bin/python -m pytest -p no:xdist -W ignore tests/plan/export/released_parsers.py

# A run on workers of Ray Train.
test-ray: .venv-ray/installed
	$(BIN)/python -m pytest --all tests/integration/test_ray.py

# Object storage, against a local server of S3 (moto). Its packages need another python-dateutil than kubernetes does.
test-cloud: .venv-cloud/installed
	PYTHONPATH=src .venv-cloud/bin/python -m pytest -p no:xdist --all tests/data/test_places_stores.py tests/runs/test_checkpoint_store.py \
	  tests/train/checkpoint/test_stored_reader.py tests/integration/test_object_storage.py

# Scores by lm-eval beside those of transformers. Its packages need another python-dateutil than kubernetes does.
test-lm-eval: .venv-lm-eval/installed
	PYTHONPATH=src .venv-lm-eval/bin/python -m pytest -p no:xdist --all tests/train/test_lm_eval_model.py

# The CUDA path over the real ProcessGroupNCCL, on a GPU that computes nothing (docs/contributing/tests.md). Needs a C compiler, and 5 GB
# for PyTorch's CUDA build.
NULL_GPU := $(CURDIR)/.venv-null-gpu/lib-null-gpu/lib
test-null-gpu: .venv-null-gpu/installed
	.venv-null-gpu/bin/python tests/null_gpu/build.py .venv-null-gpu/lib-null-gpu
	LD_LIBRARY_PATH=$(NULL_GPU) LD_PRELOAD=$(NULL_GPU)/libnullgpu.so .venv-null-gpu/bin/python -m pytest -n 2 tests/null_gpu

# What can only be seen on a GPU, one part after the other (docs/results/benchmarks/gpu.md).
gpu: .venv/dev
	$(BIN)/python -m benchmarks.gpu

# The documentation in site/. Every warning is an error.
docs: .venv-docs/installed
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict --quiet

lint: .venv/dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

install: .venv/installed

.venv/installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14) and "Phalanx needs Python 3.11 to 3.13: make PYTHON=python3.13")'
	[ -d .venv ] || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --editable '.[train,data,draw,gpu,swarm]'
	touch $@

.venv/dev: .venv/installed
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@

# An environment for this target, in which PyTorch and the tests' packages are those of .venv.
define venv_beside
rm -rf $(@D)
$(BIN)/python -m venv $(@D)
$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > \
  $$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/phalanx.pth
endef

# Megatron-LM's package is for Python 3.12 and later, and its parser runs on 3.11 too.
.venv-exports/installed: .venv/dev tests/plan/export/requirements.txt
	$(venv_beside)
	.venv-exports/bin/pip install --quiet --no-deps wheel
	DS_BUILD_OPS=0 .venv-exports/bin/pip install --quiet --no-deps --no-build-isolation -r tests/plan/export/requirements.txt
	.venv-exports/bin/pip install --quiet --no-deps --ignore-requires-python --target .venv-exports/megatron \
	  --python-version 3.12 --only-binary=:all: megatron-core==0.19.2
	touch $@

.venv-ray/installed: .venv/dev tests/integration/ray_requirements.txt
	$(venv_beside)
	.venv-ray/bin/pip install --quiet --no-deps -r tests/integration/ray_requirements.txt
	touch $@

.venv-cloud/installed: .venv/dev tests/integration/cloud_requirements.txt
	$(venv_beside)
	.venv-cloud/bin/pip install --quiet --no-deps -r tests/integration/cloud_requirements.txt
	touch $@

.venv-lm-eval/installed: .venv/dev tests/train/lm_eval_requirements.txt
	$(venv_beside)
	.venv-lm-eval/bin/pip install --quiet --no-deps -r tests/train/lm_eval_requirements.txt
	touch $@

.venv-docs/installed: pyproject.toml
	[ -d .venv-docs ] || $(PYTHON) -m venv .venv-docs
	.venv-docs/bin/pip install --quiet '.[docs]'
	touch $@

.venv-null-gpu/installed: pyproject.toml tests/null_gpu/requirements.txt
	[ -d .venv-null-gpu ] || $(PYTHON) -m venv .venv-null-gpu
	.venv-null-gpu/bin/pip install --quiet -r tests/null_gpu/requirements.txt --editable '.[train]'
	touch $@

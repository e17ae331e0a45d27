# Everything runs in .venv, which `make setup` creates from nothing; only python3 (3.11 or newer) is needed.
PYTHON := .venv/bin/python

.PHONY: setup demo quick test test-all kits digests processors gpu-contract architectures peers wheel lint clean

setup: .venv/.ready

.uv/bin/uv:
	python3 -m venv .uv
	.uv/bin/python -m pip install --quiet uv

# Byte-compiled at once: SGLang starts three processes that import the same thousands of files.
.venv/.ready: pyproject.toml .uv/bin/uv
	.uv/bin/uv sync --quiet --extra calibrate --group dev --compile-bytecode
	touch $@

demo: setup
	$(PYTHON) -m benchmarks demo $(ARGS)

# The core without servers, SGLang and the interpreter of kernels: a minute on two cores.
QUICK := tests/profiles tests/verify tests/scorers tests/fairkv tests/fitting tests/mem_pool tests/attention tests/test_imports.py \
	tests/test_docs.py
quick: setup
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest -n 2 --dist loadscope --ignore tests/fitting/test_processors.py $(QUICK) $(ARGS)

# Three processes, since tests wait for their servers, each with one that its servers are forked from. Both cores are taken
# then, so everything has one thread.
test: setup
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest -n 3 --dist loadscope $(ARGS)

# Every example of the property tests, and the variants that seldom break on their own.
test-all: setup
	$(PYTHON) -m pytest -n 2 --dist loadscope --thorough $(ARGS)

# SGLang's own test kits on its pool and on ours (docs/evaluation.md#sglangs-own-test-kits); POOLS=ragged for one of them.
POOLS ?= token ragged
KITS := tests/server/test_sglang_kits.py tests/server/test_more_kits.py tests/server/test_scripted_runtime.py
kits: setup
	for pool in $(POOLS); do OMP_NUM_THREADS=1 $(PYTHON) -m pytest --kits --kit-pool $$pool $(KITS) $(ARGS) || exit 1; done

# Digests of SGLang's functions that the plugin needs, as installed: the last step of a new release.
digests: setup
	$(PYTHON) -W ignore -m tests.sglang_digests

# Tests of fit, formats and scorers as processors with fewer instructions would run them; ARGS="--margin 3" names those
# that are within a factor of three of their tolerance.
processors: setup
	$(PYTHON) -m tests.processors $(ARGS)

# What the GPU path asks of the device, without one, against tests/gpu_contract/launches.json; ARGS=--update writes it.
gpu-contract: setup
	OMP_NUM_THREADS=1 $(PYTHON) -W ignore -m tests.gpu_contract $(ARGS)

# Every model family that SGLang serves on CPUs, with text and with pictures (docs/models.md).
architectures: setup
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest --architectures tests/server/test_architectures.py tests/server/test_images.py \
		$(ARGS)

# The wheel in an environment of its own, outside of this folder: its commands, and a server.
wheel: setup
	$(PYTHON) -m tests.installed_wheel

# Methods of kvpress for `python -m benchmarks quality --peers .venv-peers/bin/python`; it needs another transformers.
peers: .venv-peers/.ready

.venv-peers/.ready: .uv/bin/uv
	.uv/bin/uv venv --quiet --clear .venv-peers
	.uv/bin/uv pip install --quiet --python .venv-peers 'kvpress==0.5.5'
	touch $@

lint: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

clean:
	rm -rf .venv .venv-peers .uv

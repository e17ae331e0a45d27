# Everything runs in .venv, which `make setup` creates from nothing; only python3 (3.11 or newer) is needed.
PYTHON := .venv/bin/python

.PHONY: setup demo report test lint clean

setup: .venv/.ready

.uv/bin/uv:
	python3 -m venv .uv
	.uv/bin/python -m pip install --quiet uv

# Byte-compiled at once: SGLang starts three processes that import the same thousands of files.
.venv/.ready: pyproject.toml .uv/bin/uv
	.uv/bin/uv sync --quiet --extra dev --compile-bytecode
	touch $@

demo: setup
	$(PYTHON) -m benchmarks.demo $(ARGS)

report: setup
	$(PYTHON) -m benchmarks.report $(ARGS)

test: setup
	$(PYTHON) -m pytest $(ARGS)

lint: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

clean:
	rm -rf .venv .uv

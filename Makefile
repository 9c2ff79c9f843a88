# Everything runs in .venv, made on first use from the interpreter named here.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
RUNS ?= 200

.PHONY: demo test test-engines crash check format bench clean

demo: $(READY)
	$(BIN)/kvstore demo

test: $(READY)
	$(BIN)/pytest

# Real engines, each in an environment of its own that is made once, outside the clone. ENGINES=vllm: only that.
test-engines: $(READY)
	$(BIN)/python tests/engines/environments.py $(ENGINES)

# Daemons are killed under load RUNS times, then at each step of a write. SEED repeats a failed run.
crash: $(READY)
	$(BIN)/python -m tests.crash --runs $(RUNS) $(if $(SEED),--seed $(SEED))
	$(BIN)/python -m tests.crash.steps

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)
	$(BIN)/python -m bench all

$(READY): pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $(READY)

clean:
	rm -rf .venv build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

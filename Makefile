# Every target does all the set-up it needs; the second time that takes no time.
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-full test-faults check format docs clean

VENV ?= .venv
PROFILE ?= glyph-flow_grpo-ocr-cpu
# tests run side by side with actors on few cores: one thread each keeps them from fighting, and their numbers equal
TEST_ENV = OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
PYTEST = $(TEST_ENV) $(VENV)/bin/python -m pytest

help:
	@echo "make demo       set up, then train the embedded glyph model with OCR reward (15 minutes, no GPU needed)"
	@echo "make test       set up, then run the tests at reduced scale"
	@echo "make test-full  set up, then run the tests at full scale (hours)"
	@echo "make test-faults  set up, then injects every fault of the suite and writes docs/faults.md (half an hour)"
	@echo "make check      set up, then lint, type check and check the import rules"
	@echo "make docs       set up, then write the generated pages of docs/"
	@echo "make setup      only set up $(VENV)"

setup:
	@python="$$(scripts/find_python.sh)" && "$$python" scripts/set_up.py --venv $(VENV)

demo: setup
	@$(VENV)/bin/verl-omni train $(PROFILE)

test: setup
	@$(PYTEST) -m "not full"

test-full: setup
	@$(PYTEST) --timeout 14400

test-faults: setup
	@RECORD_FAULTS=1 $(PYTEST) -m faults tests/faults

check: setup
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/mypy
	@$(VENV)/bin/lint-imports

format: setup
	@$(VENV)/bin/ruff check --fix .
	@$(VENV)/bin/ruff format .

docs: setup
	@$(VENV)/bin/python scripts/make_settings_doc.py

clean:
	@rm -rf $(VENV) $(VENV).lock build dist *.egg-info

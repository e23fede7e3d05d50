# Every target sets itself up in a local virtual environment; PYTHON picks the interpreter it is made from.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# torch goes first: asked for by itself its pinned release is taken, whatever newer one another package would allow.
$(VENV)/.installed: setup.py constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "Python 3.11 or newer is needed and $(PYTHON) is $$($(PYTHON) --version 2>&1);" \
			"name another: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .[all]
	touch $@

.PHONY: install quickstart demo test lint clean
install: $(VENV)/.installed

quickstart: $(VENV)/.installed
	$(BIN)/python -m examples.quickstart

LAST = $$(ls -d quickstart/logs/$(1)/data/cafe/* | tail -n 1)
demo: $(VENV)/.installed
	@test -d quickstart/logs/rlhf-ppo || { echo "make quickstart comes first: there is no model to talk to"; exit 2; }
	$(BIN)/python -m lightrlhf.demo --max_new_tokens 96 \
		--experiment_dir $(call LAST,rlhf-supervised-finetuning) $(call LAST,rlhf-ppo)

test: $(VENV)/.installed
	$(BIN)/python -m pytest tests

lint: $(VENV)/.installed
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

clean:
	rm -rf $(VENV) quickstart

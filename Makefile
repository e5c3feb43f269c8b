# Each target does its own set-up in .venv; the machine needs Python ≥ 3.11, make and a package index.
PYTHON ?= python3
BIN := .venv/bin
INSTALL = python -m pip --quiet --disable-pip-version-check install --no-compile
PIP := $(BIN)/$(INSTALL) -c constraints.txt
PEER := .venv-peer
CLIENTS := .venv-clients
RIVALS := .venv-rivals
TOOLS := .venv-tools
PACKAGE := .venv-package
OLDEST := .venv-oldest
NEWEST := .venv-newest
NEWEST_PYTHON ?= $(shell for python in $(PYTHON) $(HOME)/.pyenv/versions/3.*/bin/python python3.12 python3.13 python3.14; do \
  $$python -c 'import sys; print("%d.%d" % sys.version_info[:2], sys.executable)' 2>/dev/null; done | sort -V | tail -1 | cut -d' ' -f2)
WORKERS ?= 2
THREADS ?= 1
CHECKS = tests/contract tests/reference tests/model/test_transformer_xl.py tests/model/test_vanilla.py tests/model/test_lstm.py tests/cli/test_kinds.py
PYTEST = OMP_NUM_THREADS=$(THREADS) $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal

# pip compiles no module, because that took most of an environment's time; Python keeps each that it compiles at its first import.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: site help quickstart check check-oldest check-newest test peers test-slow test-gpu test-data test-benchmarks faults parity clients tools rivals race test-browser annotated lint format bench clean package notebook

help:  ## show the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/; s/\$$\$$/$$/g' | expand -t 14

quickstart: $(BIN)/.core  ## train on Python's own library, score, write, draw: about five minutes on two cores
	$(BIN)/txl train quickstart --resume --out runs/quickstart
	$(BIN)/txl generate runs/quickstart --prompt "def read(self, " --tokens 400 --seed 1
	$(BIN)/txl eval runs/quickstart --compare-memory
	@echo
	@echo "The model is in runs/quickstart, its learning curve in runs/quickstart/loss.png. What to try next:"
	@echo "  $(BIN)/txl train YOUR.txt                              your own text: a file, a directory or a glob"
	@echo "  $(BIN)/txl explain runs/quickstart YOUR.txt            a page: what memory did for each token"
	@echo "  $(BIN)/txl generate runs/quickstart --prompt 'class '  another text every time"

check: $(BIN)/.test  ## what tells early that something is wrong, in under two minutes
	$(PYTEST) $(CHECKS)

check-oldest: $(OLDEST)/.ready  ## make check with the oldest torch that is supported
	OMP_NUM_THREADS=$(THREADS) $(OLDEST)/bin/python -m pytest -q -n $(WORKERS) --dist worksteal $(CHECKS)

check-newest: $(NEWEST)/.ready  ## make check with the newest Python found, or $$NEWEST_PYTHON
	OMP_NUM_THREADS=$(THREADS) $(NEWEST)/bin/python -m pytest -q -n $(WORKERS) --dist worksteal $(CHECKS)

test: $(BIN)/.test  ## the suite
	$(PYTEST)

faults: $(BIN)/.test  ## kills, full disks, flipped bits and command lines at full size
	$(PYTEST) -m faults tests

test-gpu: $(BIN)/.test  ## on a GPU: kernels, training, exact resume, decoding, commands, NCCL
	$(BIN)/python -m pytest -q -m gpu tests

test-data: $(BIN)/.test  ## tests on real corpora, found in $$TXL_DATA
	$(PYTEST) -m data tests

test-benchmarks: $(BIN)/.test $(PEER)/.ready  ## every benchmark at its smallest
	$(PYTEST) -m benchmarks tests/contract

peers: $(BIN)/.browser $(PEER)/.ready $(CLIENTS)/.ready $(TOOLS)/.ready $(RIVALS)/.ready $(PACKAGE)/.ready

test-slow: peers  ## all that is too slow for the suite: the targets around this one, slow tests, Hypothesis with many examples
	TXL_THOROUGH=1 $(PYTEST) -m '$(if $(LEAVE_OUT),not $(LEAVE_OUT) and )(hypothesis or slow or faults or data or benchmarks or parity or browser or gpu)' tests

parity: $(BIN)/.test $(PEER)/.ready  ## 400 random models of Hugging Face, converted, against the originals
	$(PYTEST) -m parity tests/parity

clients: $(BIN)/.test $(CLIENTS)/.ready  ## txl serve with openai-python and lm-evaluation-harness, and with schemathesis' requests
	$(PYTEST) -m 'parity or faults' tests/server/test_clients.py tests/server/test_fuzz.py

tools: $(BIN)/.test $(TOOLS)/.ready  ## minicons and inseq with our models in transformers
	$(PYTEST) -m parity tests/huggingface/test_tools.py

rivals: $(BIN)/.test $(RIVALS)/.ready  ## x-transformers, xLSTM and Mistral as kinds of model, against their libraries
	$(PYTEST) -m parity tests/parity/test_rivals.py

race: $(RIVALS)/.ready  ## ours against them and an LSTM, on four texts: three days on one core; RACE='...' are its options
	OMP_NUM_THREADS=1 $(RIVALS)/bin/python benchmarks/race.py $(RACE)

test-browser: $(BIN)/.browser  ## the pages of txl serve and txl explain in a browser: $$TXL_BROWSER, or the Chromium of this machine
	$(PYTEST) -m browser tests/server tests/explain

annotated: $(BIN)/.docs  ## the model explained line by line, in English and Chinese: docs/build/annotated/en.html and zh.html
	OMP_NUM_THREADS=$(THREADS) $(BIN)/python docs/annotate.py

site: $(BIN)/.site  ## the documentation as a site, in build/site/html; open index.html there
	OMP_NUM_THREADS=$(THREADS) $(BIN)/python docs/build_site.py

package: $(BIN)/.test $(PACKAGE)/.ready  ## build dist/, then train and serve from it in a clean environment; lint Dockerfile and CITATION.cff
	$(PYTEST) -n 0 -m 'slow or not slow' tests/contract/test_package.py
	$(PACKAGE)/bin/python -m build --no-isolation

notebook: $(BIN)/.notebook  ## examples/notebook.py as a notebook with its pictures, in build/notebook; the Chinese one beside it: ten minutes
	for name in notebook notebook.zh; do \
	  rm -rf build/$$name && mkdir -p build/$$name && \
	  $(BIN)/jupytext --quiet --to ipynb --output build/$$name/$$name.ipynb examples/$$name.py && \
	  $(BIN)/jupyter nbconvert --execute --ExecutePreprocessor.record_timing=False --inplace build/$$name/$$name.ipynb || exit 1; \
	done

lint: $(BIN)/.lint  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(BIN)/.lint  ## apply the style
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

bench: $(BIN)/.test $(PEER)/.ready  ## the figures of docs/results.md, against Hugging Face 4.35.2
	$(BIN)/python benchmarks/train_step.py
	$(BIN)/python benchmarks/xlnet.py
	$(BIN)/python benchmarks/attribution.py
	$(BIN)/python benchmarks/document_labels.py
	$(BIN)/python benchmarks/processes.py
	$(BIN)/python benchmarks/attention.py
	$(BIN)/python benchmarks/decode.py
	$(BIN)/python benchmarks/evaluate.py
	$(BIN)/python benchmarks/eval_speed.py
	$(BIN)/python benchmarks/long_session.py
	$(BIN)/python benchmarks/serve.py
	$(BIN)/python benchmarks/memory.py
	$(BIN)/python benchmarks/corpus.py
	$(BIN)/python benchmarks/convert.py
	$(BIN)/python benchmarks/large_vocabulary.py
	$(BIN)/python benchmarks/gpu/train_step.py
	$(BIN)/python benchmarks/gpu/decode.py
	$(BIN)/python benchmarks/gpu/score.py
	$(BIN)/python benchmarks/gpu/registers.py

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; make PYTHON=...")'
	$(PYTHON) -m venv .venv

$(BIN)/.core: $(BIN)/python pyproject.toml constraints.txt
	$(PIP) -e '.[plots]'
	@touch $@

$(BIN)/.test: $(BIN)/python pyproject.toml constraints.txt
	$(PIP) -e '.[test]'
	@touch $@

$(BIN)/.docs: $(BIN)/python pyproject.toml constraints.txt
	$(PIP) -e '.[docs]'
	@touch $@

$(BIN)/.browser: $(BIN)/.test
	$(PIP) -e '.[test,browser]'
	@touch $@

$(BIN)/.site: $(BIN)/.core
	$(PIP) -e '.[site]'
	@touch $@

$(BIN)/.notebook: $(BIN)/.core
	$(PIP) -e '.[notebook]'
	@touch $@

$(BIN)/.lint: $(BIN)/.test
	$(PIP) -e '.[test,browser,lint]'
	@touch $@

$(PEER)/.ready: benchmarks/peer-requirements.txt
	$(PYTHON) -m venv $(PEER)
	$(PEER)/bin/$(INSTALL) -r $<
	@touch $@

$(OLDEST)/.ready: pyproject.toml  # its Triton's interpreter fails with numpy 2.4
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/$(INSTALL) -e '.[test]' torch==2.10.0 'numpy<2.4'
	@touch $@

$(NEWEST)/.ready: pyproject.toml constraints.txt
	$(NEWEST_PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/$(INSTALL) -c constraints.txt -e '.[test]'
	@touch $@

$(RIVALS)/.ready: benchmarks/rivals-requirements.txt pyproject.toml constraints.txt
	$(PYTHON) -m venv $(RIVALS)
	$(RIVALS)/bin/$(INSTALL) -c constraints.txt -r $< -e .
	@touch $@

$(CLIENTS)/.ready: tests/server/clients/requirements.txt
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/$(INSTALL) -r $<
	@touch $@

$(TOOLS)/.ready: tests/huggingface/tools-requirements.txt pyproject.toml constraints.txt
	$(PYTHON) -m venv $(TOOLS)
	$(TOOLS)/bin/$(INSTALL) -c constraints.txt -r $< -e .
	@touch $@

$(PACKAGE)/.ready: tests/contract/package-requirements.txt
	$(PYTHON) -m venv $(PACKAGE)
	$(PACKAGE)/bin/$(INSTALL) -r $<
	@touch $@

clean:  ## remove environments and caches; runs stay
	rm -rf .venv $(PEER) $(CLIENTS) $(TOOLS) $(RIVALS) $(PACKAGE) $(OLDEST) $(NEWEST) .pytest_cache .ruff_cache .hypothesis build dist docs/build

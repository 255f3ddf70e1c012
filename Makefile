# Each target sets up all it needs on a bare machine with Python 3.11 or 3.12, and only once:
#   make demo [ARGS="--json out.json"]   make test   make check   make lowest   make soak   make versions

PYTHON ?= python3
BIN    := .venv/bin
READY  := .venv/ready
TARGET := .models/Qwen2.5-Coder-0.5B-Instruct
SMALL  := .models/SmolLM2-135M-Instruct
# The lowest version that an extra of pyproject.toml allows, as pip takes it.
LOWEST := import sys, tomllib; from packaging.requirements import Requirement; (r,) = map(Requirement, tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"][sys.argv[1]]); print(*(f"{r.name}=={s.version}" for s in r.specifier if s.operator == ">="))

.PHONY: demo test check lowest soak versions

demo: $(READY) $(TARGET)/config.json $(SMALL)/config.json
	$(BIN)/speccache demo --target $(TARGET) --speculative $(SMALL) $(ARGS)

test: $(READY) $(TARGET)/config.json $(SMALL)/config.json
	$(BIN)/python -m pytest $(ARGS)

# A thousand mixed requests in one crowded engine, each compared with what a fresh one answers: some minutes.
soak: $(READY)
	$(BIN)/python -m tests.soak $(ARGS)

# The integrations again, on the lowest version of their framework that pyproject.toml allows. Each alone: what else is
# installed of LangChain needs a newer core, and LlamaIndex imports it where it is there.
lowest: .lowest/llama-index .lowest/langchain
	PYTHONPATH=.lowest/llama-index $(BIN)/python -m pytest tests/unit tests/integration/llama_index -k llama_index $(ARGS)
	PYTHONPATH=.lowest/langchain $(BIN)/python -m pytest tests/unit -k langchain $(ARGS)

.lowest/%: pyproject.toml | $(READY)
	rm -rf $@
	$(BIN)/python -m pip install -qq --no-deps --target $@ $$($(BIN)/python -c '$(LOWEST)' $*)
	@touch $@

# The laws of reuse on other versions of vLLM: make versions ARGS="0.31.0"
versions: $(READY)
	$(BIN)/python scripts/versions.py $(ARGS)

check: $(READY)
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(None if (3, 11) <= sys.version_info < (3, 13) else "The CPU set-up needs Python 3.11 or 3.12; $(PYTHON) is " + sys.version.split()[0] + ". Try: make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv

# Newer than the lock: the environment is as locked.
$(READY): requirements/cpu.lock scripts/install_cpu.py pyproject.toml | $(BIN)/python
	$(BIN)/python scripts/install_cpu.py
	@touch $@

# config.json appears when its whole folder is complete.
.models/%/config.json: | $(READY)
	$(BIN)/python scripts/fetch_models.py $*

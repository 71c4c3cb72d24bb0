# `make test` and `make checks` before every commit.
PYTHON ?= python3
ENTRIES = pretrain_gpt.py pretrain_mamba.py
CHECKED = megatron_lengen tools tests examples $(ENTRIES) setup.py
# Folder by folder: two tools may have one name.
TOOLS = benchmark checkpoint data evaluate

.PHONY: test unit checks format kills example clean

test: ## the whole suite
	bash tests/run.sh

unit: ## the quick tests
	bash tests/run.sh tests/unit

checks: ## style and types (pip install -r requirements/dev.txt)
	$(PYTHON) -m ruff check $(CHECKED)
	$(PYTHON) -m ruff format --check $(CHECKED)
	$(PYTHON) -m mypy megatron_lengen tools/generate.py $(ENTRIES)
	set -e; for tools in $(TOOLS); do $(PYTHON) -m mypy tools/$$tools; done
	shellcheck -x -P SCRIPTDIR examples/common/*.sh tests/run.sh tools/benchmark/*.sh

format: ## apply the style
	$(PYTHON) -m ruff check --fix $(CHECKED)
	$(PYTHON) -m ruff format $(CHECKED)

kills: ## kill -9 at 40 random moments, four times: nothing that was saved is lost
	$(PYTHON) tests/parallel/kills.py --kills 40

example: ## the main recipe, tiny
	bash examples/smollm3_cpt_vpad.sh

clean: ## caches and build outputs; keeps .venv and runs/
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

# On a fresh machine, `make demo` and `make test` do the whole set-up.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.installed
OLDEST := .venv-oldest/bin/python
GALLERY := scripts/results/gallery

# Workers and subprocesses of tests would compile every module again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install demo ablate gallery results docs serve lint types unit slow oldest test test-all dist clean

help:  ## show this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

install: $(READY)  ## create .venv with the package and all extras (PYTHON=python3.12 chooses the Python)

$(READY): pyproject.toml
	test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

demo: $(READY)  ## train a small ViT with three encodings, and plot accuracy by image size (about 2 minutes)
	$(BIN)/lrpe-md ablate run digits -e none -e sincos -e rotate --attention softmax --seeds 1 --out runs/demo
	@echo "See the plot: runs/demo/resolution.png"

ablate: $(READY)  ## train a ViT with each encoding on scikit-learn's digits (about 5 minutes; ARGS="--seeds 1")
	$(BIN)/lrpe-md ablate run digits $(ARGS)

gallery: $(READY)  ## draw pictures of encodings, and write the page of all presets
	rm -f $(GALLERY)/*.png
	$(BIN)/python -m scripts.visualize -p dinov3 -p rope_vit_mixed -p wan -p pope --out $(GALLERY) --dpi 110 --dark
	$(BIN)/python -m scripts.visualize -p qwen3_vl --shape 18x28 --text 12 --out $(GALLERY) --dpi 110 --dark
	$(BIN)/python -m scripts.visualize.gallery
	$(BIN)/python -m scripts.visualize.encoding

results: $(READY)  ## write the pages and plots of docs/results, from scripts/results
	$(BIN)/python -m scripts.bench report $(ARGS)
	$(BIN)/python -m scripts.ablate report

docs: $(READY)  ## build the documentation in site/ (to search it, use make serve)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

serve: $(READY)  ## serve the documentation at http://127.0.0.1:8000, and rebuild it at every change
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

lint: $(READY)  ## run ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)  ## run pyright
	$(BIN)/pyright

unit: $(READY)  ## run the tests that are not marked slow (ARGS="-k cosine")
	$(BIN)/python -m pytest -n auto --dist worksteal -m "not slow and not gpu" $(ARGS)

slow: $(READY)  ## run the tests marked slow: compilers for GPUs, several processes, complete training runs
	$(BIN)/python -m pytest -n auto --dist worksteal -m "slow and not gpu" $(ARGS)

oldest:  ## run the tests of the library, adapters and models with the oldest supported torch, in .venv-oldest
	test -x $(OLDEST) || $(PYTHON) -m venv .venv-oldest
	$(OLDEST) -m pip install --quiet --disable-pip-version-check 'torch==2.11.*' -e '.[test]'
	$(OLDEST) -m pytest -n auto --dist worksteal -m "not slow and not gpu" \
		tests/boundary tests/integrations tests/kernels tests/models tests/unit $(ARGS)
	@# Versions of torch differ most in their compilers, and most tests of compilers are slow.
	$(OLDEST) -m pytest -n auto --dist worksteal -m "slow and not gpu" -k "compil or export or graph or trace" \
		tests/boundary tests/integrations tests/models $(ARGS)

test: lint unit  ## run lint and the tests that are not slow

test-all: $(READY)  ## run everything that CI tests: also type checks and the slow tests
	@# Run both at once, because pyright only uses one core.
	$(MAKE) --no-print-directory -j2 types test
	$(MAKE) --no-print-directory slow

dist: $(READY)  ## build wheel and sdist in dist/, check them, and test the installed wheel
	rm -rf dist
	$(BIN)/python -m build --quiet --no-isolation --sdist --wheel .
	$(BIN)/twine check --strict dist/*
	$(BIN)/python tests/installed.py dist/*.whl -n auto --dist worksteal $(ARGS)

clean:  ## remove .venv, caches and build outputs, but not runs/
	rm -rf .venv .editable build dist site .pytest_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

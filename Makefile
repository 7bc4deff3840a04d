# On a fresh machine `make demo` and `make test` do all the set-up themselves.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.installed
GALLERY := scripts/results/gallery

.PHONY: help install demo ablate gallery results docs serve lint types unit slow test test-all dist clean

help:  ## this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

install: $(READY)  ## .venv with the package and all its extras (PYTHON=python3.12 chooses the Python)

$(READY): pyproject.toml
	test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

demo: $(READY)  ## train a small ViT with three encodings, and plot accuracy by image size, about 2 minutes
	$(BIN)/lrpe-md ablate run digits -e none -e sincos -e rotate --attention softmax --seeds 1 --out runs/demo
	@echo "See the plot: runs/demo/resolution.png"

ablate: $(READY)  ## train a ViT with each encoding on scikit-learn's digits, about 5 minutes (ARGS="--seeds 1")
	$(BIN)/lrpe-md ablate run digits $(ARGS)

gallery: $(READY)  ## pictures of encodings, and the page of all presets
	rm -f $(GALLERY)/*.png
	$(BIN)/python -m scripts.visualize -p dinov3 -p rope_vit_mixed -p wan -p pope --out $(GALLERY) --dpi 110 --dark
	$(BIN)/python -m scripts.visualize -p qwen3_vl --shape 18x28 --text 12 --out $(GALLERY) --dpi 110 --dark
	$(BIN)/python -m scripts.visualize.gallery
	$(BIN)/python -m scripts.visualize.encoding

results: $(READY)  ## the pages and plots of docs/results, from scripts/results
	$(BIN)/python -m scripts.bench report $(ARGS)
	$(BIN)/python -m scripts.ablate report

docs: $(READY)  ## the documentation as a site, in site/; its search needs a web server: see make serve
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

serve: $(READY)  ## the documentation at http://127.0.0.1:8000, built again at every change
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

lint: $(READY)  ## ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)  ## pyright
	$(BIN)/pyright

unit: $(READY)  ## the tests that are not marked slow (ARGS="-k cosine")
	$(BIN)/python -m pytest -n auto --dist worksteal -m "not slow" $(ARGS)

slow: $(READY)  ## the tests marked slow: compilers for GPUs, several processes, whole trainings
	$(BIN)/python -m pytest -n auto --dist worksteal -m slow $(ARGS)

test: lint types unit  ## lint, type checks and the tests that are not slow

test-all: test slow  ## everything that CI tests

dist: $(READY)  ## wheel and sdist in dist/, checked, with the library's tests against the installed wheel
	rm -rf dist
	$(BIN)/python -m build --quiet --no-isolation --sdist --wheel .
	$(BIN)/twine check --strict dist/*
	$(BIN)/python tests/installed.py dist/*.whl -n auto --dist worksteal $(ARGS)

clean:  ## remove .venv, caches and build outputs; runs/ stays
	rm -rf .venv .editable build dist site .pytest_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Every target sets up .venv if it is missing.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
FLOORS := .venv-floors
SITE   := build/site
# The pinned versions need Python 3.11; several packages do not have them for 3.10.
CONSTRAINT = $(shell $(PYTHON) -c 'import sys; print("--constraint constraints.txt" if sys.version_info >= (3, 11) else "")')

.PHONY: help setup demo test quick-tests test-all test-floors check types format bench docs site release-check clean
.DEFAULT_GOAL := help

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(STAMP) ## make the environment .venv

$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) not found: install Python 3.10 or newer, or use 'make PYTHON=/path/to/python3.11 ...'" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 10) else f"this needs Python 3.10 or newer and $(PYTHON) is {v[0]}.{v[1]}: install one, or use \"make PYTHON=/path/to/python3.11 ...\"")'
	@test -d ls_edge/runtime || { echo "ls_edge/runtime is not a link to runtime/: this clone has no symbolic links; clone again with 'git clone -c core.symlinks=true' on a file system that has them" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "$(PYTHON) has no venv module: install it (Debian, Ubuntu: apt install python3-venv)" >&2; exit 1; }
	@echo "setting up $(VENV): torch is several GB, this takes some minutes the first time" >&2
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]' $(CONSTRAINT)
	@touch $@

demo: $(STAMP) ## train, export, serve, kill a peer, measure, on embedded data
	$(BIN)/ls-edge demo --out demo-out

# Each file stays in one process, because its tests share clusters; the third works while others wait for a limit.
test: $(STAMP) ## all checks, and the tests of the tiers unit and processes
	$(MAKE) --no-print-directory --jobs 2 check quick-tests

quick-tests: $(STAMP)
	$(BIN)/python -m pytest -n 3 --dist loadfile -m "not release"

test-all: $(STAMP) ## the other tests: documents, examples, packages, benchmarks, long ones
	$(BIN)/python -m pytest -n 3 --dist loadfile -m release

test-floors: $(FLOORS)/.installed ## tests with the lowest versions that pyproject.toml allows
	PYTHONWARNINGS=ignore $(FLOORS)/bin/python -m pytest -p no:cacheprovider -W default $(FLOOR_TESTS)

# Tests of the packages with lowest versions. Warnings are not errors here: newer versions deprecate old ones.
FLOOR_TESTS := tests/core tests/data tests/engines tests/evaluation tests/training tests/export tests/device tests/report tests/analysis \
	tests/runtime/serve tests/cli/test_help.py $(foreach name, predict publish, tests/cli/commands/test_$(name).py) \
	$(foreach name, codecs messages keys links local_cluster tracks, $(shell find tests/runtime -name test_$(name).py))

# torch, which is several GB, and the test tools come from .venv, after the lowest versions on the path.
$(FLOORS)/.installed: pyproject.toml tests/floors.py $(STAMP)
	@echo "setting up $(FLOORS) with the lowest versions" >&2
	$(BIN)/python -m venv --clear $(FLOORS)
	@echo "import site; site.addsitedir('$$(cd $(BIN) && ./python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')')" \
	  > "$$($(FLOORS)/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/borrowed.pth"
	$(BIN)/python tests/floors.py > $(FLOORS)/requirements.txt
	$(FLOORS)/bin/python -m pip install --quiet --disable-pip-version-check --requirement $(FLOORS)/requirements.txt
	@touch $@

check: $(STAMP) ## formatting, lint, spelling, types, links of the documents
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/codespell
	$(MAKE) --no-print-directory types site

# The newest numpy for Python 3.10 has other types than the pinned one, so types are not checked there.
types: $(STAMP) ## types alone
	@if $(BIN)/python -c 'import sys; sys.exit(sys.version_info >= (3, 11))'; then \
	  echo "types are not checked on Python 3.10: use 3.11 or newer, which has the pinned versions"; \
	else $(BIN)/mypy -p ls_edge; fi

format: $(STAMP) ## fix formatting and lint
	-$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP) ## the benchmarks that the documents quote
	$(BIN)/python -m benchmarks

docs: $(STAMP) ## write docs/commands.md and docs/json.md from the code
	$(BIN)/python docs/reference.py > docs/commands.md
	$(BIN)/python docs/json_reference.py > docs/json.md

# Fails on links and anchors that lead nowhere.
site: $(STAMP) ## the documents as a site, in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --site-dir $(SITE)

# RELEASE="--full" installs torch, too; RELEASE="--tag v0.1.0" compares the tag.
release-check: $(STAMP) ## build sdist and wheel, check them, and use the wheel in fresh environments
	$(BIN)/python -m tests.release_check $(RELEASE)

clean: ## remove the environment and all build results
	rm -rf $(VENV) $(FLOORS) build dist *.egg-info demo-out

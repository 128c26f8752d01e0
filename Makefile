# Two commands set up everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
TESTED_EXTRAS = server,flower,hub,recipfl,text,privacy,export,figures,tune,docs,dev
# Compiled modules are kept, also where the environment says that nothing is to be: tests start many interpreters.
export PYTHONDONTWRITEBYTECODE =
# Processes that share the tests: one more than the cores of a small machine, because some tests wait.
JOBS ?= 3

.PHONY: setup demo test test-thorough test-all test-compose test-processes test-containers test-guides test-nights test-arm64 test-gpu lint figures docs wheel release clean

setup: $(VENV)/installed

# constraints.txt holds the versions that this release was tested with. To compile all modules that are installed takes
# over a minute: those of a run are compiled here, others when they are first imported.
define install
	$(PYTHON) -c 'import sys; sys.exit("Wildflower needs Python 3.11 or newer; try: make PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --use-pep517 --no-compile --disable-pip-version-check --constraint constraints.txt --editable '.[$(1)]'
	$(BIN)/python -c 'import wildflower.server_app.app, wildflower.server_app.report, torch.utils.tensorboard, wildflower.launch.experiment'
	touch $@
endef

# What most runs need, the demo's among them.
$(VENV)/installed-for-runs: pyproject.toml constraints.txt
	$(call install,server)

# What the tests need beside it.
$(VENV)/installed: pyproject.toml constraints.txt
	$(call install,$(TESTED_EXTRAS))
	touch $(VENV)/installed-for-runs

demo: $(VENV)/installed-for-runs
	$(BIN)/wildflower run benchmarks/demo/digits.toml

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# GPUs are left alone: test-gpu is for them.
PYTEST = CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses $(JOBS) --dist worksteal

# What a change needs: linters, types, and all tests that are not marked as thorough.
test: lint
	$(PYTEST) -m "not thorough" $(PYTEST_ARGS)

test-thorough: setup
	$(PYTEST) -m thorough $(PYTEST_ARGS)

test-all: test test-thorough

# Real nodes: as processes of this machine, with every fault of the table in benchmarks/trust, then real containers,
# networks and faults; needs docker, compose, root to fill disks, and where no image can be pulled debootstrap.
test-compose: test-processes test-containers

# Two files at once: most of their time is waiting, and the tests of a file share a deployment.
test-processes: setup
	OMP_NUM_THREADS=1 $(BIN)/pytest --exitfirst --numprocesses 2 --dist loadfile tests/compose/recovery.py tests/compose/processes.py tests/compose/simulations.py tests/compose/your_devices.py $(PYTEST_ARGS)

test-containers: setup
	$(BIN)/pytest --exitfirst tests/compose/faults.py $(PYTEST_ARGS)

# Longer ones with the same needs: devices whose data lie in volumes of their own, and two guides typed as written.
test-guides: setup
	$(BIN)/pytest --exitfirst tests/compose/own_data.py tests/compose/deployment_page.py $(PYTEST_ARGS)

# Two nights of four containers and three processes, in 40 minutes of waiting; likewise.
test-nights: setup
	$(BIN)/pytest --exitfirst tests/compose/nights.py $(PYTEST_ARGS)

# An arm64 node under emulation; needs what test-compose needs, and qemu-user-static with binfmt_misc.
test-arm64: setup
	$(BIN)/pytest --exitfirst tests/compose/arm64.py $(PYTEST_ARGS)

# Methods, memory, workers and the trainer of a board's GPU, on a machine where PyTorch sees a GPU.
test-gpu: export NVIDIA_TF32_OVERRIDE = 0
test-gpu: setup
	$(BIN)/pytest tests/gpu.py $(PYTEST_ARGS)
	WILDFLOWER_BOARD_DEVICE=cuda $(BIN)/pytest tests/client_app/test_board_gpu.py $(PYTEST_ARGS)

# The figures of README and of pages, from what benchmarks recorded.
figures: setup
	$(BIN)/python -m benchmarks.figures

# The site, in build/site: open build/site/index.html. A warning is an error. MkDocs' advertisement is none of ours.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
	@echo build/site/index.html

# A wheel in dist/, and a round of the demo in an environment that has only it: the clone's own modules are not there.
wheel: $(VENV)/installed-for-runs
	rm -rf dist build *.egg-info
	$(BIN)/pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
	$(PYTHON) -m venv build/alone
	build/alone/bin/pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt "$$(echo dist/*.whl)[server]"
	cp benchmarks/demo/digits.toml build/alone
	cd build/alone && bin/wildflower run digits.toml --set rounds=1 --set evaluate-every=1
	rm -rf build

# The sdist, the wheel that is made of it, and the folder for Flower's app hub, in dist/, all tried in an empty environment.
# ADDRESS is where the repository's files are read, for README's links: https://HOST/OWNER/wildflower/blob/main
release: setup
	rm -rf dist build *.egg-info
	$(BIN)/python -m build --outdir dist .
	$(BIN)/python deploy/hub_bundle.py dist/hub/wildflower $(ADDRESS)
	deploy/check_release $(PYTHON) dist/*.whl dist/hub/wildflower benchmarks/demo/digits.toml
	rm -rf build *.egg-info

clean:
	rm -rf $(VENV) build *.egg-info

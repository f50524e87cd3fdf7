# Two commands on a fresh machine: `make demo` and `make test`. Each makes .venv as far as it needs it; a stamp file in it
# remembers, until pyproject.toml, constraints.txt or the C change. Another interpreter: `make PYTHON=python3.12 test`.

PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
    $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$python; break; }; done)
VENV := .venv
BIN := $(VENV)/bin
EXTENSIONS := storage/memory/_native.c storage/disk/_checksum.c storage/_core.pxd storage/_core.pyx backends/resp/_recvmsg.c kvredis/server/protocol/_hot.pyx kvredis/server/shm/_places.pyx
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt

.PHONY: demo test check nightly coverage bench gpu-check gpu-check-sglang docs docs-serve fuzz crash clean

demo: $(VENV)/demo.stamp
	$(BIN)/kvredis demo ttft

# Debian's packages come while pip installs ours.
test:
	scripts/system-packages & packages=$$!; $(MAKE) --no-print-directory $(VENV)/test.stamp && wait $$packages
	scripts/check

check: $(VENV)/test.stamp
	scripts/check

# All tests: also the slow, those of old versions of engines, and those that try every case; an hour or more.
nightly: $(VENV)/test.stamp
	scripts/system-packages
	NIGHTLY=yes scripts/check
	scripts/sanitize

# As check, and fails when the tests leave more than a tenth of lines and branches untried.
coverage: $(VENV)/test.stamp
	scripts/system-packages
	MEASURE=yes scripts/check

# 200,000 mutated sessions; FUZZ="--seed 7 --cases 1000" asks for others.
fuzz: $(VENV)/test.stamp
	scripts/fuzz $(FUZZ)

# 300 deaths of a server under load; CRASH_ROUNDS=1000 asks for more, CRASH_SEED=7 for the course of a run that failed.
crash: $(VENV)/test.stamp
	CRASH_ROUNDS=$${CRASH_ROUNDS:-300} $(BIN)/python -m pytest -q -s tests/faults/test_crash_rounds.py

bench: $(VENV)/bench.stamp
	scripts/system-packages
	$(BIN)/kvredis bench server

# On a machine with a GPU, within 8 minutes: that no token of real vLLM is wrong (scripts/gpu_check.py). vLLM is installed
# into .venv, or found in SITE, a folder of packages, by PYTHON as it is. CHECK="--only dense" asks for a part of it.
gpu-check: $(if $(SITE),,$(VENV)/vllm.stamp)
	PYTHONPATH=$${PYTHONPATH:-$(CURDIR)} $(if $(SITE),$(PYTHON),$(BIN)/python) scripts/gpu_check.py \
	    $(if $(SITE),--site $(SITE)) $(CHECK)

# The same of SGLang, within 7 minutes, which PYTHON or SITE has (scripts/gpu_check_sglang.py). CHECK="--pages 64 --door url"
# asks for a part of it, or for another way.
gpu-check-sglang:
	PYTHONPATH=$${PYTHONPATH:-$(CURDIR)} $(PYTHON) scripts/gpu_check_sglang.py $(if $(SITE),--site $(SITE)) $(CHECK)

# The documentation site, into site/; docs-serve shows it at http://127.0.0.1:8000 while you write.
docs: $(VENV)/docs.stamp
	scripts/docs

docs-serve: $(VENV)/docs.stamp
	scripts/docs serve

clean:
	rm -rf $(VENV) build dist site *.egg-info storage/*.so storage/*/*.so backends/*/*.so kvredis/server/*/*.so .demo .mypy_cache .ruff_cache .pytest_cache

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "kvredis needs Python 3.11 or newer: make PYTHON=/path/to/python3.11 ..."; exit 1; }
	@# Debian's python3 without python3-venv cannot put pip into a venv, but its own pip can.
	$(PYTHON) -m venv $(VENV) || { $(PYTHON) -m venv --clear --without-pip $(VENV) && \
	    $(PYTHON) -m pip --python $(BIN)/python install --quiet pip; }

# pip would compile 12,000 modules, and the tests import some thousands of them: these keep what they have compiled.
$(VENV)/test.stamp: PIP += --no-compile

# torch first and alone: pip then keeps the build that is found for this machine instead of pulling another's libraries.
$(VENV)/torch.stamp: constraints.txt | $(BIN)/python
	@echo "installing torch into $(VENV)"
	$(PIP) torch
	@touch $@

$(VENV)/%.stamp: pyproject.toml setup.py $(EXTENSIONS) constraints.txt $(VENV)/torch.stamp
	@echo "installing kvredis[$*] into $(VENV)"
	$(PIP) --editable '.[$*]'
	@touch $@

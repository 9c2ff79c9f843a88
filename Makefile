# All targets use .venv, which is created on first use with this interpreter.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
RUNS ?= 200
# Keeps byte code: otherwise every test process would compile all modules.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all simulate crash soak test-engines test-gpu test-wheel check docs format bench dist install uninstall deb clean

# STAY=1 keeps the daemon and a dashboard running until Ctrl-C.
demo: $(READY)
	@$(BIN)/kvstore demo $(if $(filter-out 0,$(STAY)),--stay)

# Tests of one file share their daemons. The last lines list the skipped tests with reasons.
PYTEST = $(BIN)/pytest --numprocesses 3 --dist loadfile
test: $(READY)
	$(PYTEST) -m "not long" --hypothesis-profile=quick

# Adds the long tests: simulations with ALL_SEEDS seeds, crashes of real daemons, and load for ALL_HOURS.
ALL_SEEDS ?= 1500
ALL_HOURS ?= 0.17
test-all: $(READY)
	$(PYTEST)
	$(MAKE) --no-print-directory simulate SEEDS=$(ALL_SEEDS) FIRST=1000
	$(MAKE) --no-print-directory crash RUNS=30
	$(MAKE) --no-print-directory soak HOURS=$(ALL_HOURS)

# Simulated clock, network and devices; one run per seed. SEEDS=n: number of seeds, FIRST=n: the first seed.
SEEDS ?= 1000
FIRST ?= 1
simulate: $(READY)
	$(BIN)/python -m tests.simulation --seeds $(SEEDS) --first $(FIRST) --jobs 2

# Real engines, each in a separate environment outside the clone. ENGINES=vllm: only this engine.
test-engines: $(READY)
	$(BIN)/python tests/engines/environments.py $(ENGINES)
	$(if $(ENGINES),,$(BIN)/pytest --numprocesses 2 tests/engines/test_benches.py)

# A real GPU. CUDA=12 or CUDA=13 selects the CUDA version, by default that of the driver. Fails without a GPU.
CUDA ?= $(shell nvidia-smi 2>/dev/null | sed -n 's/.*CUDA[A-Za-z ]* Version: *\([0-9]*\).*/\1/p')
EXTRA = $(if $(filter 12,$(CUDA)),cuda12,cuda)
test-gpu: $(READY)
	@[ -z "$(CUDA)" ] || $(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$(EXTRA)]'
	@$(BIN)/pytest tests/gpu

# Kills daemons under load RUNS times, then at each step of a write. SEED repeats a failed run.
crash: $(READY)
	$(BIN)/python -m tests.crash --runs $(RUNS) $(if $(SEED),--seed $(SEED))
	$(BIN)/python -m tests.crash.steps

# Load, operators and failures for HOURS; fails if a byte is wrong or the daemon grows. OUT: a folder for samples.
HOURS ?= 1
soak: $(READY)
	$(BIN)/python -m tests.soak --hours $(HOURS) $(if $(SEED),--seed $(SEED)) $(if $(OUT),--out $(OUT))

# Builds sdist and wheel, and installs the wheel for every Python from 3.11 to 3.14 on PATH and in pyenv.
test-wheel: $(READY)
	$(BIN)/pytest tests/packaging/test_wheel.py

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m bench check
	$(BIN)/python packaging/site.py

# The documentation site, in build/site. Fails for a broken link or anchor.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)
	$(BIN)/python -m bench all

# The C extension is built with it.
$(READY): pyproject.toml $(wildcard kvstore/native/*.[ch])
	@$(PYTHON) packaging/environment.py .venv --editable '.[dev]'
	@touch $(READY)

# The source archive and the wheel, in dist/.
dist: $(READY)
	$(BIN)/python -m build --outdir dist

# Installs files for PREFIX below DESTDIR. INSTALL_ENV=no skips the Python environment.
PREFIX ?= /usr/local
SYSCONFDIR ?= /etc
DESTDIR ?=
INSTALL_ENV ?= yes
SYSTEMD_VERSION ?= $(shell systemctl --version 2>/dev/null | sed -n '1s/^systemd \([0-9]*\).*/\1/p')
ENVIRONMENT := $(PREFIX)/lib/kvstore
COMMANDS := kvstore kvstore-llama-proxy
UNITS := $(DESTDIR)$(PREFIX)/lib/systemd/system
FILL = sed -e 's|@BIN@|$(PREFIX)/bin|g' -e 's|@SYSCONFDIR@|$(SYSCONFDIR)|g'
FILL_ONE = $(FILL) -e 's|@NAME@|kvstore|g' -e 's|@UNIT@|kvstore|g' -e 's|@CONFIG@|kvstore|g'
FILL_MANY = $(FILL) -e 's|@NAME@|kvstore-%i|g' -e 's|@UNIT@|kvstore@%i|g' -e 's|@CONFIG@|%i|g'

install:
ifneq ($(INSTALL_ENV),no)
	rm -rf build  # files of an earlier build would be installed too
	$(PYTHON) -m venv $(DESTDIR)$(ENVIRONMENT)
	$(DESTDIR)$(ENVIRONMENT)/bin/python -m pip install --quiet --disable-pip-version-check .
	sed -i '1s|^#!$(DESTDIR)/|#!/|' $(COMMANDS:%=$(DESTDIR)$(ENVIRONMENT)/bin/%)
	$(DESTDIR)$(ENVIRONMENT)/bin/python packaging/man.py $(DESTDIR)$(PREFIX)/share/man
endif
	install -d $(DESTDIR)$(PREFIX)/bin $(UNITS)
	ln -sfn $(COMMANDS:%=$(ENVIRONMENT)/bin/%) $(DESTDIR)$(PREFIX)/bin/
	for kind in service socket; do \
	    $(FILL_ONE) systemd/kvstore.$$kind.in > $(UNITS)/kvstore.$$kind && \
	    $(FILL_MANY) systemd/kvstore.$$kind.in > $(UNITS)/kvstore@.$$kind || exit 1; \
	done
	$(FILL_ONE) systemd/kvstore-admin.service.in > $(UNITS)/kvstore-admin.service
	$(FILL_MANY) systemd/kvstore-admin.service.in > $(UNITS)/kvstore-admin@.service
	if [ "$(SYSTEMD_VERSION)" -ge 254 ] 2>/dev/null; then \
	    install -D -m 644 systemd/preserve.conf $(UNITS)/kvstore.service.d/preserve.conf && \
	    install -D -m 644 systemd/preserve.conf $(UNITS)/kvstore@.service.d/preserve.conf; \
	fi
	install -D -m 644 systemd/kvstore.sysusers $(DESTDIR)$(PREFIX)/lib/sysusers.d/kvstore.conf
	install -D -m 644 systemd/kvstore.tmpfiles $(DESTDIR)$(PREFIX)/lib/tmpfiles.d/kvstore.conf
	[ -e $(DESTDIR)$(SYSCONFDIR)/kvstore/kvstore.toml ] || \
	    install -D -m 644 systemd/kvstore.toml $(DESTDIR)$(SYSCONFDIR)/kvstore/kvstore.toml

# Keeps the configuration and stored blocks.
uninstall:
	rm -rf $(DESTDIR)$(ENVIRONMENT) $(UNITS)/kvstore.service.d $(UNITS)/kvstore@.service.d
	rm -f $(UNITS)/kvstore.service $(UNITS)/kvstore.socket $(UNITS)/kvstore@.service $(UNITS)/kvstore@.socket
	rm -f $(UNITS)/kvstore-admin.service $(UNITS)/kvstore-admin@.service
	rm -f $(DESTDIR)$(PREFIX)/lib/sysusers.d/kvstore.conf $(DESTDIR)$(PREFIX)/lib/tmpfiles.d/kvstore.conf
	rm -f $(COMMANDS:%=$(DESTDIR)$(PREFIX)/bin/%)
	rm -f $(DESTDIR)$(PREFIX)/share/man/man1/kvstore.1 $(DESTDIR)$(PREFIX)/share/man/man5/kvstore.toml.5

# Builds dist/kvstore_VERSION_ARCH.deb for the same Debian release. PYTHON must be Debian's, with python3-venv.
deb: PYTHON = /usr/bin/python3
deb:
	PYTHON=$(PYTHON) packaging/debian/build dist

clean:
	rm -rf .venv build dist *.egg-info kvstore/native/*.so .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

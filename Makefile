# Every target makes and uses its own .venv. PYTHON picks the interpreter it is made from (3.11 or later).
PYTHON ?= python3
BIN := .venv/bin
SOURCES := src tests bench docs deploy

.PHONY: demo test check golden bench docs manifests proto clean

demo: .venv/run
	@$(BIN)/podgpu demo || [ $$? -eq 130 ]

test: .venv/dev
	$(BIN)/python -m pytest

# Format, lint, types, import directions (tests/test_architecture.py) and every test.
check: .venv/dev
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/python -m pytest

# Rewrites what the golden scenarios expect from what comes out now. Look at the diff before you commit it.
golden: .venv/dev
	$(BIN)/python -m pytest tests/nodes --rewrite-golden

bench: .venv/dev
	$(BIN)/python -m bench

# Rewrites the generated tables of README.md and docs/.
docs: .venv/dev
	$(BIN)/python -m docs.generate

# Writes the dashboards into the chart, and renders deploy/manifests from it.
manifests: .venv/dev
	$(BIN)/python -m deploy.dashboards
	$(BIN)/python -m deploy.render

# The message code must load on protobuf 6.31: the newest compiler emits code that it refuses.
proto:
	$(PYTHON) -m venv .venv-proto
	.venv-proto/bin/pip install --quiet grpcio-tools==1.74.0
	.venv-proto/bin/python -m grpc_tools.protoc -I src --python_out=src \
		podgpu/allocation/podresources.proto podgpu/hook/nri.proto

clean:
	rm -rf .venv .venv-proto build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

.venv/run: pyproject.toml
	@echo "setting up .venv (once)"
	@$(PYTHON) -m venv .venv
	@$(BIN)/pip install --quiet --disable-pip-version-check --editable .
	@touch $@

.venv/dev: .venv/run
	@echo "installing what the tests need (once)"
	@$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

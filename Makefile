.PHONY: help setup check test-fast test images cluster-up cluster-down
.DEFAULT_GOAL := help

python := .venv/bin/python
cluster := python3 tests/cluster/cluster

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup:  ## make .venv with all that the tests need; quick when nothing changed
	@scripts/setup

check: setup  ## lint, types, import rules
	.venv/bin/ruff check
	.venv/bin/mypy
	.venv/bin/lint-imports

test-fast: setup  ## tests without cluster, real model or long runs; under 2 minutes
	$(python) -m pytest -m "not cluster and not slow and not model"

test: setup  ## all tests; starts a one-node cluster of its own and takes it down
	scripts/test

images:  ## container images operator, sidecar and engine, tagged localhost/kvsteward-*:dev
	$(cluster) deps
	scripts/images

cluster-up:  ## a one-node Kubernetes in .e2e; use it with tests/cluster/cluster exec CMD
	$(cluster) deps
	$(cluster) build
	$(cluster) up

cluster-down:  ## stop it, leave nothing
	$(cluster) down

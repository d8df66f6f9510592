.PHONY: search reference help setup check test-fast test images cluster-up cluster-down demo demo-down crd \
    prove prove-engine prove-cluster prove-demo prove-sidecar bench-sidecar
.DEFAULT_GOAL := help

python := .venv/bin/python
cluster := python3 tests/cluster/cluster
# torch's threads sleep while they wait; spinning, they slow each other down on a busy machine
export OMP_WAIT_POLICY := passive

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

demo:  ## the whole story on a real cluster, from nothing; see scripts/demo for one's own cluster
	@scripts/demo

demo-down:  ## remove what the demo left
	@scripts/demo down

search: setup  ## look for faults of the control path in scenarios not tried before; SIMULATION_EXAMPLES=5000 for a night
	SIMULATION_EXAMPLES=$${SIMULATION_EXAMPLES:-300} $(python) -m pytest -m slow tests/simulation

crd: setup  ## generate crds/ from the contract's types
	$(python) -m kvsteward_contract.crd > crds/kvcachepolicies.kvsteward.dev.yaml

reference: setup  ## generate docs/reference.md from the contract's types and tables
	$(python) -m kvsteward_contract.reference > docs/reference.md

bench-sidecar: setup  ## cost of the sidecar's path, nginx beside it; JSON as its last line
	scripts/bench-sidecar

prove: prove-engine prove-sidecar prove-cluster prove-demo  ## the long measurements, written to docs/proof

prove-engine: setup  ## the engine's, with the real checkpoint
	scripts/model
	PROVE=1 $(python) -m pytest tests/cli/test_worked_example.py tests/engine/test_models.py \
	    tests/engine/test_warm_equals_cold_model.py

prove-sidecar: setup  ## the sidecar's
	scripts/bench-sidecar | tee /dev/stderr | tail -n 1 | $(python) -m json.tool > docs/proof/bench-sidecar.json

prove-cluster: setup  ## what a real cluster has to show
	PROVE=1 scripts/test -m cluster tests/e2e

prove-demo: setup  ## how long the demo takes the second time
	scripts/prove-demo

"""A real API server refuses each invalid example with a message that names the field and says what is allowed."""

import json
import subprocess
from pathlib import Path

import pytest
from kvsteward_contract import wire

pytestmark = pytest.mark.cluster
ROOT = Path(__file__).parents[2]

VALID = {
    "apiVersion": wire.API_VERSION,
    "kind": wire.KIND,
    "metadata": {"name": "crd-example", "namespace": "default"},
    "spec": {
        "engine": {
            "model": {
                "name": "smollm2",
                "revision": "1",
                "tokenizerRevision": "1",
                "source": {"persistentVolumeClaim": {"claimName": "models", "path": "smollm2"}},
            },
            "resources": {"limits": {"cpu": "2", "memory": "4Gi", "nvidia.com/gpu": 1}},
        },
        "cache": {"capacity": "8Gi"},
        "scopes": {
            "identity": {"source": "APIKey", "secret": "tenant-keys"},
            "overrides": [{"tenant": "acme", "quotaPercent": 30}],
        },
        "workloads": [{"name": "summaries"}, {"name": "checkout"}],
        "rollout": {"stage": "Canary", "canary": {"percent": 5, "workloads": ["summaries"]}},
    },
}


def kubectl(*args, given=None):
    return subprocess.run(
        ["kubectl", *args],
        input=None if given is None else json.dumps(given),
        text=True,
        capture_output=True,
        timeout=60,
        check=False,
    )


def changed(path, value):
    """VALID with one field set; a value of None takes it out."""
    resource = json.loads(json.dumps(VALID))
    *parents, last = path.split(".")
    place = resource
    for name in parents:
        place = place.setdefault(name, {})
    if value is None:
        del place[last]
    else:
        place[last] = value
    return resource


@pytest.fixture(scope="module", autouse=True)
def crd():
    applied = kubectl("apply", "-f", str(ROOT / "crds"))
    assert applied.returncode == 0, applied.stderr
    waited = kubectl("wait", "--for=condition=Established", f"crd/{wire.PLURAL}.{wire.GROUP}", "--timeout=30s")
    assert waited.returncode == 0, waited.stderr


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        pytest.param("metadata.name", "a.b", "names a Service", id="name-that-no-service-may-have"),
        pytest.param("metadata.name", "a" * 51, "names a Service", id="name-too-long-for-its-children"),
        pytest.param("spec.engine", None, "spec.engine: Required value", id="no-engine"),
        pytest.param("spec.engine.replicas", -1, "spec.engine.replicas: Invalid value", id="negative-replicas"),
        pytest.param("spec.engine.model.maxTokens", 1.5, "maxTokens: Invalid value", id="a-float"),
        pytest.param("spec.engine.backend", "TGI", "Unsupported value", id="unknown-backend"),
        pytest.param("spec.engine.model.source.persistentVolumeClaim.path", "../x", "path: Invalid", id="path-outside"),
        pytest.param("spec.cache.capacity", "plenty", "spec.cache.capacity: Invalid value", id="no-quantity"),
        pytest.param("spec.cache.dtype", "FP4", "Unsupported value", id="unknown-dtype"),
        pytest.param("spec.scopes.identity", {"source": "APIKey"}, "source APIKey needs secret", id="no-secret"),
        pytest.param("spec.scopes.identity", {"source": "Header"}, "needs gatewaySecret", id="header-without-proof"),
        pytest.param("spec.scopes.overrides", [{"tenant": "A B"}], "tenant: Invalid value", id="bad-tenant-name"),
        pytest.param("spec.scopes.overrides", [{"tenant": "a"}, {"tenant": "a"}], "Duplicate value", id="tenant-twice"),
        pytest.param("spec.scopes.private", {"quotaPercent": 101}, "quotaPercent: Invalid value", id="over-a-hundred"),
        pytest.param("spec.rollout.stage", "Everyone", "Unsupported value", id="unknown-stage"),
        pytest.param("spec.rollout.canary", {"percent": 96}, "may together be at most 100", id="canary-meets-control"),
        pytest.param("spec.rollout.canary", {"workloads": ["x"]}, "may only name entries", id="unknown-workload"),
        pytest.param("spec.rollout.advance", "Automatic", "Unsupported value", id="what-does-not-work-yet"),
        pytest.param("spec.rollover", {"drainSeconds": 7200}, "drainSeconds: Invalid value", id="drain-too-long"),
        pytest.param("spec.cache.compression", "zip", 'unknown field "spec.cache.compression"', id="unknown-field"),
    ],
)
def test_an_invalid_policy_is_refused_with_a_useful_message(path, value, message):
    accepted = kubectl("apply", "--dry-run=server", "-f", "-", given=VALID)
    assert accepted.returncode == 0, accepted.stderr
    refused = kubectl("apply", "--dry-run=server", "--validate=strict", "-f", "-", given=changed(path, value))
    assert refused.returncode != 0, refused.stdout
    assert message in refused.stderr


def test_the_model_name_cannot_be_changed_and_replicas_scale():
    try:
        assert kubectl("apply", "-f", "-", given=VALID).returncode == 0
        refused = kubectl("apply", "-f", "-", given=changed("spec.engine.model.name", "other"))
        assert "model.name cannot be changed" in refused.stderr
        scaled = kubectl("scale", wire.SHORT_NAME, "crd-example", "--replicas=0")
        assert scaled.returncode == 0, scaled.stderr
        assert kubectl("apply", "-f", "-", given=VALID).returncode == 0
        kept = kubectl("get", wire.SHORT_NAME, "crd-example", "-o", "jsonpath={.spec.engine.replicas}")
        assert kept.stdout == "0", "a later apply without the field keeps what scale set"
        columns = kubectl("get", wire.SHORT_NAME, "crd-example").stdout.splitlines()[0]
        assert columns.split() == ["NAME", "STAGE", "CANARY", "COLD", "TTFT", "P95", "REUSED", "%", "READY", "AGE"]
    finally:
        kubectl("delete", wire.SHORT_NAME, "crd-example", "--ignore-not-found")

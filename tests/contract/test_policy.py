import copy
from pathlib import Path

import pytest
import yaml
from kvsteward_contract.crd import RULES, crd, crd_yaml
from kvsteward_contract.policy import InvalidPolicy, decode_policy, decode_spec, semantic_refusals
from kvsteward_contract.quantity import parse_quantity
from kvsteward_contract.reference import reference

ROOT = Path(__file__).parents[2]
SPEC = {
    "engine": {
        "model": {
            "name": "smollm2",
            "revision": "1",
            "tokenizerRevision": "1",
            "source": {"persistentVolumeClaim": {"claimName": "models", "path": "smollm2"}},
        }
    },
    "cache": {"capacity": "1Gi"},
    "scopes": {"identity": {"source": "APIKey", "secret": "tenant-keys"}},
}


def changed(path: str, value):
    spec = copy.deepcopy(SPEC)
    *parents, last = path.split(".")
    place = spec
    for name in parents:
        place = place.setdefault(name, {})
    place[last] = value
    return spec


def test_defaults_are_safe():
    spec = decode_spec(SPEC)
    assert spec.rollout.stage.value == "Shadow"
    assert spec.rollout.advance.value == "Manual"
    assert spec.rollout.kill_switch.value == "Released"
    assert (spec.cache.dtype.value, spec.engine.replicas) == ("Auto", 1)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        pytest.param("rollout.stage", "Fast", "rollout.stage", id="unknown-stage"),
        pytest.param("cache.size", "1Gi", "size", id="unknown-field"),
        pytest.param("cache.capacity", "lots", "cache.capacity", id="not-a-quantity"),
        pytest.param("rollout.protectedPercent", 101, "protectedPercent", id="over-a-hundred"),
        pytest.param("engine.replicas", -1, "replicas", id="negative-replicas"),
        pytest.param("engine.model.source.persistentVolumeClaim.path", "../secrets", "path", id="path-outside"),
        pytest.param("scopes.identity", {"source": "APIKey"}, "needs secret", id="api-keys-without-a-secret"),
        pytest.param("scopes.identity", {"source": "Header"}, "needs gatewaySecret", id="header-without-proof"),
        pytest.param("rollout.canary", {"percent": 96}, "more than 100", id="canary-meets-control"),
        pytest.param("rollout.canary", {"workloads": ["x"]}, "x is not in spec.workloads", id="unknown-workload"),
        pytest.param("workloads", [{"name": "a"}, {"name": "a"}], "twice", id="workload-twice"),
        pytest.param("scopes.overrides", [{"tenant": "a"}, {"tenant": "a"}], "twice", id="override-twice"),
        pytest.param("scopes.overrides", [{"tenant": "a\n"}], "tenant ends with a line", id="line-break"),
        pytest.param("cache.capacity", "1Gi\n", "spec.cache.capacity ends with a line", id="line-break-of-a-size"),
        pytest.param("engine.template.labels", {"a\n": "b"}, "labels.a ends with a line", id="line-break-of-a-key"),
    ],
)
def test_an_invalid_spec_is_refused_by_the_name_of_its_field(path, value, message):
    decode_spec(SPEC)
    with pytest.raises(InvalidPolicy, match=message):
        decode_spec(changed(path, value))


@pytest.mark.parametrize(
    ("resource", "message"),
    [
        pytest.param(None, "expected a KVCachePolicy", id="empty-file"),
        pytest.param({"kind": "Deployment"}, "expected apiVersion", id="another-kind"),
        pytest.param(
            {"apiVersion": "kvsteward.dev/v1alpha1", "kind": "KVCachePolicy", "spec": SPEC},
            "metadata.name",
            id="no-name",
        ),
        pytest.param(
            {"apiVersion": "kvsteward.dev/v1alpha1", "kind": "KVCachePolicy", "metadata": {"name": "a"}},
            "spec is missing",
            id="no-spec",
        ),
    ],
)
def test_a_resource_that_is_no_policy_is_refused(resource, message):
    with pytest.raises(InvalidPolicy, match=message):
        decode_policy(resource)


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        pytest.param("engine.resources", {"limits": {"memory": "512Mi"}}, "CapacityExceedsMemory", id="pool-too-big"),
        pytest.param("engine.resources", {"limits": {"memory": "2"}}, "CapacityExceedsMemory", id="two-bytes"),
        pytest.param("engine.resources", {"limits": {"memory": "much"}}, "InvalidResources", id="no-quantity"),
        pytest.param("cache.capacity", "1k", "CapacityTooSmall", id="pool-of-nothing"),
        pytest.param("engine.template", {"labels": {"kvsteward.dev/policy": "x"}}, "ReservedLabel", id="our-label"),
    ],
)
def test_what_no_schema_sees_is_refused_with_a_reason(path, value, reason):
    assert semantic_refusals(decode_spec(SPEC)) == []
    assert [refusal.reason for refusal in semantic_refusals(decode_spec(changed(path, value)))] == [reason]


def test_a_pool_on_an_accelerator_is_not_held_against_the_memory_limit():
    limits = {"limits": {"memory": "512Mi", "nvidia.com/gpu": 1}}
    assert semantic_refusals(decode_spec(changed("engine.resources", limits))) == []


@pytest.mark.parametrize(
    ("text", "size"), [("8Gi", 8 << 30), ("1.5Ki", 1536), ("12", 12), ("3G", 3 * 10**9), ("0.5Mi", 1 << 19)]
)
def test_quantities_are_bytes(text, size):
    assert parse_quantity(text) == size


@pytest.mark.parametrize("text", ["", "8GB", "-1", "1e3", "Gi", "1 Gi", "8Gi\n", "٣Gi"])
def test_other_texts_are_no_quantities(text):
    with pytest.raises(ValueError, match="is not a size"):
        parse_quantity(text)


def test_the_crd_in_the_repository_is_the_generated_one():
    assert (ROOT / "crds/kvcachepolicies.kvsteward.dev.yaml").read_text() == crd_yaml(), "run `make crd`"


def test_every_list_map_and_string_of_the_spec_is_bounded():
    def walk(schema, path):
        if schema.get("type") == "array":
            assert "maxItems" in schema, path
            walk(schema["items"], f"{path}[]")
        if schema.get("type") == "object" and "additionalProperties" in schema:
            assert "maxProperties" in schema, path
            walk(schema["additionalProperties"], f"{path}.*")
        if schema.get("type") == "string" and "enum" not in schema:
            assert "maxLength" in schema, path
        for name, child in schema.get("properties", {}).items():
            walk(child, f"{path}.{name}")

    walk(crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"], "spec")


def test_every_rule_stands_in_the_crd():
    text = yaml.safe_dump(crd())
    placed = text.count("rule:")
    assert placed == sum(len(rules) for rules in RULES.values())


def test_the_reference_in_the_docs_is_the_generated_one():
    assert (ROOT / "docs/reference.md").read_text() == reference(), "run `make reference`"

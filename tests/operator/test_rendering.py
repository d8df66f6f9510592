"""What is put into the cluster: one golden Deployment, and what must hold for every one."""

import json
from pathlib import Path
from typing import Any

import pytest
from kvsteward_contract import wire
from kvsteward_contract.policy import PolicySpec, decode_policy
from kvsteward_engine.main import make_parser
from kvsteward_operator.acceptance import revision_data
from kvsteward_operator.objects import access, workload
from kvsteward_operator.objects.digests import significant, spec_digest, stored_spec
from kvsteward_operator.objects.naming import Owner
from kvsteward_sidecar.settings import parse
from support.operating import SETTINGS, policy_resource

GOLDEN = Path(__file__).parent / "golden-deployment.json"
OWNER = Owner("serving", "chat", "uid-1")


def spec(**changes: Any) -> PolicySpec:
    return decode_policy(policy_resource(**changes)).spec


def deployment(**changes: Any) -> dict[str, Any]:
    wanted = spec(**changes)
    data = revision_data(OWNER, wanted, [], SETTINGS)
    return workload.deployment(OWNER, data.template, replicas=wanted.engine.replicas, strategy=wanted.rollover.strategy)


def containers(body: dict[str, Any]) -> dict[str, dict[str, Any]]:
    pod = body["spec"]["template"]["spec"]
    return {container["name"]: container for container in [*pod["initContainers"], *pod["containers"]]}


def test_the_deployment_is_the_golden_one() -> None:
    """A change here restarts pods of policies that are edited next. To renew: write `deployment()` to the file."""
    assert deployment() == json.loads(GOLDEN.read_text())


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="api keys"),
        pytest.param(
            {"scopes": {"identity": {"source": "Header", "secret": None, "gatewaySecret": "gateway"}}}, id="header"
        ),
        pytest.param(
            {"engine": {"template": {"runtimeClassName": "nvidia", "tolerations": [{"key": "a"}]}}}, id="more"
        ),
    ],
)
def test_every_pod_passes_pod_security_restricted_and_gets_no_token_but_the_sidecar(changes: dict[str, Any]) -> None:
    body = deployment(**changes)
    pod = body["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    assert pod["enableServiceLinks"] is False
    for container in containers(body).values():
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert context["readOnlyRootFilesystem"] is True
    assert {next(iter(volume.keys() - {"name"})) for volume in pod["volumes"]} <= {
        "emptyDir", "persistentVolumeClaim", "projected", "secret",
    }  # fmt: skip
    holders = {name for name, one in containers(body).items() if any(m["name"] == "token" for m in one["volumeMounts"])}
    assert holders == {"sidecar"}
    secrets = {name for name, one in containers(body).items() for m in one["volumeMounts"] if m["name"] == "secret"}
    assert secrets == {"sidecar"}


def test_tenant_keys_are_optional_so_that_a_missing_secret_stops_no_pod() -> None:
    volumes = {volume["name"]: volume for volume in deployment()["spec"]["template"]["spec"]["volumes"]}
    assert volumes["tenants"]["secret"] == {"secretName": "tenant-keys", "optional": True, "defaultMode": 0o440}
    assert "optional" not in volumes["secret"]["secret"]


@pytest.mark.parametrize(
    ("strategy", "surge", "unavailable"), [("SurgeFirst", 1, 0), ("DrainFirst", 0, 1)]
)  # fmt: skip
def test_a_rollover_surges_or_drains_first(strategy: str, surge: int, unavailable: int) -> None:
    body = deployment(rollover={"strategy": strategy})
    assert body["spec"]["strategy"] == {
        "type": "RollingUpdate",
        "rollingUpdate": {"maxSurge": surge, "maxUnavailable": unavailable},
    }


def test_a_pod_may_drain_for_as_long_as_the_policy_says_and_a_little_more() -> None:
    body = deployment(rollover={"drainSeconds": 30})
    assert body["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == 45
    command = containers(body)["engine"]["lifecycle"]["preStop"]["exec"]["command"]
    assert command == ["kvsteward-engine", "drain", "--url=http://127.0.0.1:9902", "--seconds=30"]
    assert "--drain-seconds=30" in containers(body)["sidecar"]["args"]


def test_probes_go_through_the_sidecar_and_outlast_its_restart() -> None:
    engine = containers(deployment())["engine"]
    assert engine["livenessProbe"]["httpGet"] == {"path": "/engine/live", "port": wire.ADMIN_PORT, "scheme": "HTTP"}
    assert engine["livenessProbe"]["periodSeconds"] * engine["livenessProbe"]["failureThreshold"] >= 60
    assert "readinessProbe" not in engine


def test_the_admin_port_is_open_to_the_named_peers_and_to_nobody_without_one() -> None:
    peers = SETTINGS.admin_peers
    rules = workload.network_policy(OWNER, peers)["spec"]["ingress"]
    assert [(rule.get("from"), rule["ports"][0]["port"]) for rule in rules] == [(None, 8080), ([*peers], 9901)]
    assert len(workload.network_policy(OWNER, ())["spec"]["ingress"]) == 1


def test_a_sidecars_role_names_its_documents_and_its_policy_and_nothing_more() -> None:
    rules = access.role(OWNER, ["chat-b", "chat-a"])["rules"]
    assert [(rule["resources"], rule["resourceNames"]) for rule in rules] == [
        (["configmaps"], ["chat-a", "chat-b"]),
        ([wire.PLURAL], ["chat"]),
    ]
    assert all(rule["verbs"] == ["get", "list", "watch"] for rule in rules)


def test_fields_at_their_defaults_are_left_out_of_digests_at_every_depth() -> None:
    explicit = spec(
        cache={"blockTokens": 16, "eviction": {"policy": "LRU"}},
        engine={"image": "", "template": {"labels": {}}, "resources": {"limits": {}}},
        rollout={"canary": {"percent": 0, "workloads": []}, "attempt": 1},
    )
    assert spec_digest(explicit) == spec_digest(spec())
    assert "blockTokens" not in significant(explicit.cache)
    assert spec_digest(spec(cache={"blockTokens": 32})) != spec_digest(spec())


def test_what_is_stored_of_a_spec_reads_back_as_the_same_spec_without_replicas() -> None:
    wanted = spec(engine={"replicas": 7}, workloads=[{"name": "a"}], scopes={"overrides": [{"tenant": "acme"}]})
    stored = stored_spec(wanted)
    assert "replicas" not in stored["engine"]
    read = decode_policy({**policy_resource(), "spec": stored}).spec
    assert spec_digest(read) == spec_digest(wanted)


def test_labels_of_the_policy_cannot_take_the_operators_place() -> None:
    template = deployment(engine={"template": {"labels": {"team": "search"}}})["spec"]["template"]
    assert template["metadata"]["labels"]["team"] == "search"
    assert template["metadata"]["labels"][wire.POLICY_LABEL] == "chat"


@pytest.mark.parametrize("source", ["APIKey", "Header"])
def test_the_engine_and_the_sidecar_take_the_arguments_that_they_are_given(source: str) -> None:
    identity = {"source": source, "secret": "tenant-keys", "gatewaySecret": "gateway"}
    given = {
        name: [*container["command"][1:], *container["args"]]
        for name, container in containers(deployment(scopes={"identity": identity})).items()
    }
    engine = make_parser().parse_args(given["engine"])
    assert (engine.served_model_name, engine.block_tokens, engine.drain_seconds) == ("tiny", 16, 120)
    sidecar = parse(given["sidecar"])
    assert (sidecar.policy, sidecar.namespace) == ("chat", "serving")
    assert bool(sidecar.tenant_keys) == (source == "APIKey")
    short = containers(deployment(rollover={"drainSeconds": 0}))["sidecar"]
    assert parse([*short["command"][1:], *short["args"]]).closing_seconds == 0
    drain = containers(deployment())["engine"]["lifecycle"]["preStop"]["exec"]["command"][1:]
    assert make_parser().parse_args(drain).seconds == 120

"""The operator's chart, as helm renders it."""

import json
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from kvsteward_operator import kinds
from kvsteward_operator.main import read_peers

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "kvsteward"
NAMESPACE = "kvsteward-system"

pytestmark = pytest.mark.cluster  # helm is built with the cluster's programs


def helm(*args: str) -> subprocess.CompletedProcess[str]:
    if shutil.which("helm") is None:
        pytest.fail("no helm in PATH: run this with tests/cluster/cluster tools")
    return subprocess.run(["helm", *args], text=True, capture_output=True, check=False, timeout=60)


def render(*settings: str) -> list[dict[str, Any]]:
    sets = [word for setting in settings for word in ("--set-json", setting)]
    done = helm("template", "kvsteward", str(CHART), "-n", NAMESPACE, "--kube-version", "1.34", *sets)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def of_kind(documents: list[dict[str, Any]], *names: str) -> list[dict[str, Any]]:
    return [document for document in documents if document["kind"] in names]


def pod_specs(documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    pods = [document["spec"] for document in of_kind(documents, "Pod")]
    return pods + [document["spec"]["template"]["spec"] for document in of_kind(documents, "Deployment", "Job")]


def rules(documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [rule for document in of_kind(documents, "ClusterRole", "Role") for rule in document["rules"]]


def operator_verbs(documents: list[dict[str, Any]]) -> dict[tuple[str, str], set[str]]:
    """What the operator may do, {(group, resource): verbs}."""
    granted: dict[tuple[str, str], set[str]] = {}
    for role in of_kind(documents, "ClusterRole"):
        if role["metadata"]["name"].endswith("-policies"):
            for rule in role["rules"]:
                for group in rule["apiGroups"]:
                    for resource in rule["resources"]:
                        granted.setdefault((group, resource), set()).update(rule["verbs"])
    return granted


def test_helm_finds_nothing_to_object_to() -> None:
    done = helm("lint", "--strict", str(CHART))
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        pytest.param("colour=1", "colour", id="a value that nothing reads"),
        pytest.param('watch.namespaces="serving"', "namespaces", id="a string for the list of namespaces"),
        pytest.param('watch.namespaces=["*"]', "namespaces", id="a pattern for a namespace"),
        pytest.param('watch.namespaces=["a","a"]', "namespaces", id="a namespace twice"),
        pytest.param('image.pullPolicy="Sometimes"', "pullPolicy", id="an unknown pull policy"),
        pytest.param('image.engine=""', "engine", id="no engine image"),
        pytest.param('image.operator="a b"', "operator", id="a blank in an image reference"),
        pytest.param('monitoring.from=[{"pods":{}}]', "from", id="a peer that NetworkPolicy does not know"),
        pytest.param('operatorKey.secret="Not_A_Name"', "secret", id="a name no Secret can have"),
        pytest.param('resources.limit={"memory":"1Gi"}', "limit", id="a misspelt resource field"),
        pytest.param('nodeSelector={"gpu":true}', "nodeSelector", id="a node label that is no string"),
    ],
)
def test_a_bad_value_is_refused_by_name(setting: str, complaint: str) -> None:
    done = helm("template", str(CHART), "--kube-version", "1.34", "--set-json", setting)
    assert done.returncode != 0
    assert complaint in done.stderr


def test_the_chart_and_its_images_have_the_version_of_the_distribution() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    images = yaml.safe_load((CHART / "values.yaml").read_text())["image"]
    assert (chart["version"], chart["appVersion"]) == (version, version)
    assert [images[part].split(":")[1] for part in ("operator", "sidecar", "engine")] == [version] * 3


@pytest.mark.parametrize("watch", ["[]", '["serving","staging"]'])
def test_no_role_has_a_wildcard_and_secrets_can_only_be_created(watch: str) -> None:
    documents = render(f"watch.namespaces={watch}")
    assert len(rules(documents)) > 10
    assert "*" not in json.dumps(rules(documents))
    assert [rule["verbs"] for rule in rules(documents) if "secrets" in rule["resources"]] == [["create"], ["create"]]


def test_the_operator_may_watch_every_kind_it_owns_and_read_nothing_else() -> None:
    granted = operator_verbs(render())
    owned = {(kind.api_version.rpartition("/")[0], kind.plural) for kind in (kinds.POLICY, *kinds.CHILDREN)}
    readable = {key for key, verbs in granted.items() if {"get", "list", "watch"} <= verbs}
    assert readable == owned


def test_the_operator_may_do_all_that_it_grants_to_a_sidecar() -> None:
    granted = operator_verbs(render())
    for key in (("", "configmaps"), ("kvsteward.dev", "kvcachepolicies")):
        assert {"get", "list", "watch"} <= granted[key]


def test_watching_the_cluster_takes_one_cluster_wide_binding() -> None:
    documents = render()
    bound = [binding["roleRef"]["name"] for binding in of_kind(documents, "ClusterRoleBinding")]
    assert sorted(bound) == ["kvsteward-kvsteward-system", "kvsteward-kvsteward-system-policies"]
    assert "--cluster" in of_kind(documents, "Deployment")[0]["spec"]["template"]["spec"]["containers"][0]["args"]


def test_watching_two_namespaces_binds_the_rules_in_these_alone() -> None:
    documents = render('watch.namespaces=["serving","staging"]')
    bound = [binding["roleRef"]["name"] for binding in of_kind(documents, "ClusterRoleBinding")]
    assert bound == ["kvsteward-kvsteward-system"]
    places = {
        binding["metadata"].get("namespace")
        for binding in of_kind(documents, "RoleBinding")
        if binding["roleRef"]["name"] == "kvsteward-kvsteward-system-policies"
    }
    assert places == {"serving", "staging"}
    args = of_kind(documents, "Deployment")[0]["spec"]["template"]["spec"]["containers"][0]["args"]
    assert [arg for arg in args if arg.startswith(("--namespace", "--cluster"))] == [
        "--namespace=serving",
        "--namespace=staging",
    ]


def test_monitoring_peers_reach_the_operator_as_the_json_it_reads() -> None:
    peers = [{"podSelector": {"matchLabels": {"app": "prometheus"}}}, {"ipBlock": {"cidr": "10.0.0.0/8"}}]
    documents = render(f"monitoring.from={json.dumps(peers)}")
    args = of_kind(documents, "Deployment")[0]["spec"]["template"]["spec"]["containers"][0]["args"]
    given = next(arg for arg in args if arg.startswith("--admin-from="))
    assert list(read_peers(given.removeprefix("--admin-from="))) == peers


def test_the_user_roles_aggregate_to_view_edit_and_admin() -> None:
    labels = {
        label.removeprefix("rbac.authorization.k8s.io/aggregate-to-"): role["metadata"]["name"].rpartition("-")[2]
        for role in of_kind(render(), "ClusterRole")
        for label in role["metadata"]["labels"]
        if "aggregate-to" in label
    }
    assert labels == {"view": "view", "edit": "edit", "admin": "admin"}


def test_every_pod_is_fit_for_a_restricted_namespace() -> None:
    specs = pod_specs(render())
    assert len(specs) == 3
    for spec in specs:
        security = spec["securityContext"]
        assert security["runAsNonRoot"] is True and security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["enableServiceLinks"] is False
        for container in spec["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }


def test_the_operator_key_is_made_before_the_operator_and_stays_out_of_the_release() -> None:
    documents = render()
    job = of_kind(documents, "Job")[0]
    assert job["metadata"]["annotations"]["helm.sh/hook"] == "pre-install,pre-upgrade"
    assert job["spec"]["template"]["spec"]["containers"][0]["args"] == ["make-key", "--secret=kvsteward-operator-key"]
    volume = of_kind(documents, "Deployment")[0]["spec"]["template"]["spec"]["volumes"][0]
    assert volume["secret"]["secretName"] == "kvsteward-operator-key"
    assert of_kind(documents, "Secret") == []


def test_one_operator_runs_at_a_time() -> None:
    spec = of_kind(render(), "Deployment")[0]["spec"]
    assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})

"""Installing, upgrading and checking the operator with Helm."""

import pytest
from support.kube import Kube, KubectlFailed, run

pytestmark = pytest.mark.cluster
ACCOUNT = "system:serviceaccount:kvsteward-system:kvsteward"


def test_helm_test_says_that_the_install_works(system: Kube) -> None:
    system.helm("test", "kvsteward", "--timeout=60s")


def test_an_upgrade_keeps_the_operator_key(system: Kube) -> None:
    before = system.get("secret", "kvsteward-operator-key")
    system.helm("upgrade", "kvsteward", "charts/kvsteward", "--reuse-values", "--wait", "--timeout=180s")
    after = system.get("secret", "kvsteward-operator-key")
    assert (after["metadata"]["uid"], after["data"]) == (before["metadata"]["uid"], before["data"])


@pytest.mark.parametrize(
    ("verb", "what", "allowed"),
    [
        pytest.param("create", "secrets", "yes", id="it makes Secrets"),
        pytest.param("get", "secrets", "no", id="it reads none"),
        pytest.param("list", "secrets", "no", id="nor lists them"),
        pytest.param("patch", "deployments.apps", "yes", id="it applies Deployments"),
        pytest.param("delete", "deployments.apps", "no", id="it deletes none"),
        pytest.param("create", "pods", "no", id="it makes no pods itself"),
        pytest.param("create", "pods/exec", "no", id="it enters no pods"),
        pytest.param("patch", "kvcachepolicies.kvsteward.dev/status", "yes", id="it writes status"),
        pytest.param("patch", "kvcachepolicies.kvsteward.dev", "no", id="it edits no policy"),
        pytest.param("patch", "customresourcedefinitions.apiextensions.k8s.io", "no", id="it edits no CRD"),
    ],
)
def test_the_operator_has_the_rights_it_needs_and_no_others(system: Kube, verb: str, what: str, allowed: str) -> None:
    resource, _, subresource = what.partition("/")
    extra = [f"--subresource={subresource}"] if subresource else []
    try:
        answer = run("kubectl", "auth", "can-i", verb, resource, f"--as={ACCOUNT}", "-n", "serving", *extra)
    except KubectlFailed as refusal:  # it exits 1 for no
        answer = str(refusal).rpartition(":")[2]
    assert answer.strip().startswith(allowed)


@pytest.mark.parametrize("role", ["view", "edit", "admin"])
def test_the_clusters_own_roles_include_policies(system: Kube, role: str) -> None:
    rules = system.get("clusterrole", role)["rules"]
    verbs = {verb for rule in rules if "kvcachepolicies" in rule["resources"] for verb in rule["verbs"]}
    assert {"get", "list", "watch"} <= verbs
    assert ("patch" in verbs) == (role != "view")

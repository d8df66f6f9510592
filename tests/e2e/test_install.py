"""Installing, upgrading and checking the operator with Helm."""

import json

import pytest
from support import manifests
from support.kube import Kube, until

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
    ("verb", "group", "what", "allowed"),
    [
        pytest.param("create", "", "secrets", True, id="it makes Secrets"),
        pytest.param("get", "", "secrets", False, id="it reads none"),
        pytest.param("list", "", "secrets", False, id="nor lists them"),
        pytest.param("patch", "apps", "deployments", True, id="it applies Deployments"),
        pytest.param("delete", "apps", "deployments", False, id="it deletes none"),
        pytest.param("create", "", "pods", False, id="it makes no pods itself"),
        pytest.param("create", "", "pods/exec", False, id="it enters no pods"),
        pytest.param("patch", "kvsteward.dev", "kvcachepolicies/status", True, id="it writes status"),
        pytest.param("patch", "kvsteward.dev", "kvcachepolicies", False, id="it edits no policy"),
        pytest.param("patch", "apiextensions.k8s.io", "customresourcedefinitions", False, id="it edits no CRD"),
    ],
)
def test_the_operator_has_the_rights_it_needs_and_no_others(
    system: Kube, verb: str, group: str, what: str, allowed: bool
) -> None:
    resource, _, subresource = what.partition("/")
    asked = {"verb": verb, "group": group, "resource": resource, "subresource": subresource, "namespace": "serving"}
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {"user": ACCOUNT, "resourceAttributes": asked},
    }
    answer = system.kubectl("create", "-f", "-", "-o", "jsonpath={.status.allowed}", given=json.dumps(review))
    assert answer == str(allowed).lower()


@pytest.mark.parametrize("role", ["view", "edit", "admin"])
def test_the_clusters_own_roles_include_policies(system: Kube, role: str) -> None:
    rules = system.get("clusterrole", role)["rules"]
    verbs = {verb for rule in rules if "kvcachepolicies" in rule["resources"] for verb in rule["verbs"]}
    assert {"get", "list", "watch"} <= verbs
    assert ("patch" in verbs) == (role != "view")


def test_an_operator_for_one_namespace_needs_no_more_and_leaves_nothing_but_its_key(system: Kube) -> None:
    """Beside the one for the whole cluster, which takes no notice: there is no policy in this namespace."""
    kube = Kube("one-namespace")
    kube.apply(manifests.namespace(kube.namespace))
    until("default service account", lambda: kube.exists("serviceaccount", "default"))
    image = system.get("deployment", "kvsteward")["spec"]["template"]["spec"]["containers"][0]["image"]
    kube.helm(
        *("install", "second", "charts/kvsteward", "--wait", "--timeout=180s"),
        *("--set", f"image.operator={image}", "--set", f"watch.namespaces={{{kube.namespace}}}"),
    )
    log = kube.kubectl("logs", "deployment/second-kvsteward")
    assert f"watching {kube.namespace}" in log
    assert "403" not in log and "forbidden" not in log.lower()
    kube.helm("uninstall", "second", "--wait", "--timeout=60s")
    left = kube.items("deployments,services,serviceaccounts,roles,rolebindings,jobs,secrets")
    names = {(each["kind"], each["metadata"]["name"]) for each in left}
    assert names == {("ServiceAccount", "default"), ("Secret", "second-kvsteward-operator-key")}
    cluster = kube.items("clusterroles,clusterrolebindings", selector="app.kubernetes.io/instance=second")
    assert cluster == []

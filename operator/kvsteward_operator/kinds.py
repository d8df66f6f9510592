"""The kinds of object the operator deals in, and how the API server addresses them."""

from dataclasses import dataclass
from typing import Any

from kvsteward_contract import wire


@dataclass(frozen=True, slots=True)
class Kind:
    name: str
    api_version: str
    plural: str

    def path(self, namespace: str | None, name: str = "", subresource: str = "") -> str:
        """The URL path of one object, or of a collection; `namespace` None: over the whole cluster."""
        root = f"/apis/{self.api_version}" if "/" in self.api_version else f"/api/{self.api_version}"
        parts = [root, *(["namespaces", namespace] if namespace is not None else []), self.plural, name, subresource]
        return "/".join(part for part in parts if part)


POLICY = Kind(wire.KIND, wire.API_VERSION, wire.PLURAL)
SECRET = Kind("Secret", "v1", "secrets")
EVENT = Kind("Event", "v1", "events")
CONFIG_MAP = Kind("ConfigMap", "v1", "configmaps")
SERVICE = Kind("Service", "v1", "services")
SERVICE_ACCOUNT = Kind("ServiceAccount", "v1", "serviceaccounts")
ROLE = Kind("Role", "rbac.authorization.k8s.io/v1", "roles")
ROLE_BINDING = Kind("RoleBinding", "rbac.authorization.k8s.io/v1", "rolebindings")
DISRUPTION_BUDGET = Kind("PodDisruptionBudget", "policy/v1", "poddisruptionbudgets")
NETWORK_POLICY = Kind("NetworkPolicy", "networking.k8s.io/v1", "networkpolicies")
REVISION = Kind("ControllerRevision", "apps/v1", "controllerrevisions")
DEPLOYMENT = Kind("Deployment", "apps/v1", "deployments")
REPLICA_SET = Kind("ReplicaSet", "apps/v1", "replicasets")
POD = Kind("Pod", "v1", "pods")

# Watched by label. Secrets are not among them: the operator may only create those.
CHILDREN = (
    CONFIG_MAP, SERVICE, SERVICE_ACCOUNT, ROLE, ROLE_BINDING, DISRUPTION_BUDGET, NETWORK_POLICY, REVISION, DEPLOYMENT,
    REPLICA_SET, POD,
)  # fmt: skip
BY_NAME = {kind.name: kind for kind in (POLICY, SECRET, EVENT, *CHILDREN)}


def kind_of(body: dict[str, Any]) -> Kind:
    """The kind of an object that names it. Raises KeyError for one the operator doesn't deal in."""
    return BY_NAME[body["kind"]]

"""Names, labels and ownership of a policy's objects."""

from dataclasses import dataclass
from typing import Any

from kvsteward_contract import wire

MANAGER = "kvsteward-operator"
MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"
SELECTOR = f"{MANAGED_BY_LABEL}={MANAGER}"  # of everything the operator watches, but policies
CONTAINER_ENGINE, CONTAINER_SIDECAR = "engine", "sidecar"


@dataclass(frozen=True, slots=True)
class Owner:
    """The policy that owns the objects."""

    namespace: str
    name: str
    uid: str

    @property
    def access_name(self) -> str:
        """Of the ServiceAccount, Role, RoleBinding and Secret."""
        return f"{self.name}-kvsteward"

    @property
    def selector(self) -> dict[str, str]:
        """Labels that tell the policy's pods from all others; never change, as a Deployment's selector can't."""
        return {wire.POLICY_LABEL: self.name}

    @property
    def labels(self) -> dict[str, str]:
        return {
            "app.kubernetes.io/name": "kvsteward",
            "app.kubernetes.io/instance": self.name,
            "app.kubernetes.io/component": "engine",
            MANAGED_BY_LABEL: MANAGER,
            wire.POLICY_LABEL: self.name,
        }

    def generation(self, digest: str) -> str:
        """Name of the generation, and of its ConfigMap, with this identity digest."""
        return f"{self.name}-{digest[:8]}"

    def metadata(self, name: str, labels: dict[str, str] | None = None) -> dict[str, Any]:
        return {
            "name": name,
            "namespace": self.namespace,
            "labels": self.labels | (labels or {}),
            "ownerReferences": [self.reference],
        }

    @property
    def reference(self) -> dict[str, Any]:
        """Garbage collection follows it. `blockOwnerDeletion` would ask for rights on the policy's finalizers."""
        return {
            "apiVersion": wire.API_VERSION,
            "kind": wire.KIND,
            "name": self.name,
            "uid": self.uid,
            "controller": True,
            "blockOwnerDeletion": False,
        }


def controller_of(body: dict[str, Any]) -> dict[str, Any]:
    """The owner reference that controls an object; empty when none does."""
    for reference in body["metadata"].get("ownerReferences") or ():
        if reference.get("controller"):
            return dict(reference)
    return {}

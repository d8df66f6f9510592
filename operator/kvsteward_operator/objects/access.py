"""What a sidecar may ask the API server: to read its policy and its generation's document, nothing else."""

import base64
from collections.abc import Iterable
from typing import Any

from kvsteward_contract import wire

from .naming import Owner


def service_account(owner: Owner) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": owner.metadata(owner.access_name),
        "automountServiceAccountToken": False,
    }


def role(owner: Owner, config_maps: Iterable[str]) -> dict[str, Any]:
    """The operator's own role must contain these rules, else the API server takes this for an escalation."""
    verbs = ["get", "list", "watch"]
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "Role",
        "metadata": owner.metadata(owner.access_name),
        "rules": [
            {"apiGroups": [""], "resources": ["configmaps"], "resourceNames": sorted(config_maps), "verbs": verbs},
            {"apiGroups": [wire.GROUP], "resources": [wire.PLURAL], "resourceNames": [owner.name], "verbs": verbs},
        ],
    }


def role_binding(owner: Owner) -> dict[str, Any]:
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": owner.metadata(owner.access_name),
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": owner.access_name},
        "subjects": [{"kind": "ServiceAccount", "name": owner.access_name, "namespace": owner.namespace}],
    }


def secret(owner: Owner, salt: bytes, admin_token: str) -> dict[str, Any]:
    """Created, never read back or changed. Not `immutable`: the kubelet would give new pods the old one after a
    rotation."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": owner.metadata(owner.access_name),
        "type": "Opaque",
        "data": {
            wire.SALT_KEY: base64.b64encode(salt).decode(),
            wire.ADMIN_TOKEN_KEY: base64.b64encode(admin_token.encode()).decode(),
        },
    }

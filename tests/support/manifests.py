"""Objects that the cluster tests apply."""

from pathlib import Path
from typing import Any

Json = dict[str, Any]
MODEL = "smollm2-135m-instruct"


def namespace(name: str) -> Json:
    """One that takes only pods that follow Pod Security `restricted`."""
    label = {"pod-security.kubernetes.io/enforce": "restricted"}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": label}}


def models(namespace: str, folder: Path) -> list[Json]:
    """A claim `models` and the volume under it: a folder of this machine, which is the node."""
    size = {"storage": "1Gi"}
    volume = f"models-{namespace}"
    return [
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": volume},
            "spec": {
                "capacity": size,
                "accessModes": ["ReadOnlyMany"],
                "persistentVolumeReclaimPolicy": "Retain",
                "storageClassName": "",
                "claimRef": {"namespace": namespace, "name": "models"},
                "hostPath": {"path": str(folder), "type": "Directory"},
            },
        },
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": "models", "namespace": namespace},
            "spec": {
                "accessModes": ["ReadOnlyMany"],
                "storageClassName": "",
                "volumeName": volume,
                "resources": {"requests": size},
            },
        },
    ]


def tenant_keys(keys: dict[str, str], name: str = "tenant-keys") -> Json:
    """{tenant: API key}"""
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": keys}


def policy(name: str, *, path: str = "smollm2", model: str = MODEL, **changes: Any) -> Json:
    """A policy of one replica at stage Full over the claim `models`; `changes` are merged into its spec, as
    policy("chat", rollout={"stage": "Shadow"}, engine={"replicas": 2})."""
    spec: Json = {
        "engine": {
            "replicas": 1,
            "model": {
                "name": model,
                "revision": "1",
                "tokenizerRevision": "1",
                "source": {"persistentVolumeClaim": {"claimName": "models", "path": path}},
                "maxTokens": 2048,
            },
        },
        "cache": {"capacity": "256Mi"},
        "scopes": {"identity": {"source": "APIKey", "secret": "tenant-keys"}},
        "rollout": {"stage": "Full", "protectedPercent": 0},
        "rollover": {"drainSeconds": 30},
    }
    merge(spec, changes)
    return {"apiVersion": "kvsteward.dev/v1alpha1", "kind": "KVCachePolicy", "metadata": {"name": name}, "spec": spec}


def merge(into: Json, changes: Json) -> None:
    for field, value in changes.items():
        if isinstance(value, dict) and isinstance(into.get(field), dict):
            merge(into[field], value)
        else:
            into[field] = value

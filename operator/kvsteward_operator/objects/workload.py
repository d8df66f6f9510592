"""Deployment, Service, PodDisruptionBudget and NetworkPolicy of a policy."""

from collections.abc import Iterable, Mapping
from typing import Any

from kvsteward_contract import wire
from kvsteward_contract.policy import Strategy

from .naming import Owner
from .pods import STARTUP_SECONDS

# What a rolling update may add and take away: one pod at a time, in either order.
STRATEGIES = {
    Strategy.SURGE_FIRST: {"maxSurge": 1, "maxUnavailable": 0},
    Strategy.DRAIN_FIRST: {"maxSurge": 0, "maxUnavailable": 1},
}


def deployment(owner: Owner, template: Mapping[str, Any], *, replicas: int, strategy: Strategy) -> dict[str, Any]:
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": owner.metadata(owner.name),
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": owner.selector},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": STRATEGIES[strategy]},
            "revisionHistoryLimit": 2,
            "progressDeadlineSeconds": STARTUP_SECONDS + 60,
            "template": dict(template),
        },
    }


def service(owner: Owner) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": owner.metadata(owner.name),
        "spec": {
            "type": "ClusterIP",
            "selector": owner.selector,
            "ports": [{"name": "http", "port": wire.TRAFFIC_PORT, "targetPort": "http", "protocol": "TCP"}],
        },
    }


def endpoint(owner: Owner) -> str:
    return f"http://{owner.name}.{owner.namespace}.svc:{wire.TRAFFIC_PORT}"


def disruption_budget(owner: Owner) -> dict[str, Any]:
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": owner.metadata(owner.name),
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": owner.selector}},
    }


def network_policy(owner: Owner, admin_peers: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Traffic from anywhere, the admin port from the given peers only. An empty `from` would mean everybody, so
    without peers there is no rule for the admin port at all."""
    ingress: list[dict[str, Any]] = [{"ports": [{"port": wire.TRAFFIC_PORT, "protocol": "TCP"}]}]
    if peers := [dict(peer) for peer in admin_peers]:
        ingress.append({"from": peers, "ports": [{"port": wire.ADMIN_PORT, "protocol": "TCP"}]})
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": owner.metadata(owner.name),
        "spec": {
            "podSelector": {"matchLabels": owner.selector},
            "policyTypes": ["Ingress"],
            "ingress": ingress,
        },
    }

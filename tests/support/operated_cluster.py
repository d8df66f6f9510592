"""The cluster as `kubectl kvcache` sees it, with a real operator at work on a fake API server.

It stands at the one seam of the commands, the `Cluster` protocol. What the API server adds to a patch (defaults, rules,
resourceVersion, dry runs) it adds too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any
from urllib.parse import parse_qs, urlsplit

import msgspec
from kvsteward_cli.cluster.api import Conflict, NotFound, Object, PodSilent
from kvsteward_cli.errors import CommandFailed
from kvsteward_contract import wire
from kvsteward_contract.observation import encode_observation
from kvsteward_contract.policy import InvalidPolicy, decode_spec

from .operating import KEY, Operating, merged, policy_resource

TOKEN = "admin"


class OperatedCluster:
    """Policy `serving/chat` and what the operator makes of it. `writes` are the patches that were kept."""

    def __init__(self) -> None:
        self.namespace = KEY.namespace
        self.operating = Operating()
        self.writes: list[list[dict[str, Any]]] = []
        self.receipts: dict[str, list[Object]] = {}  # by pod, newest first
        self.pages: dict[str, list[Object]] = {}
        self.down: set[str] = set()  # pods whose engine doesn't run
        self.hang: set[str] = set()  # pods whose admin port gives no answer
        self.token = TOKEN
        self.before_patch = lambda: None  # what others do between a read and a write

    async def create(self, **spec: Any) -> None:
        resource = policy_resource(**spec)
        self.operating.api.put({**resource, "spec": defaulted(resource["spec"])})
        await self.operating.run()

    async def edit(self, **spec: Any) -> None:
        """By somebody else."""
        resource = self.operating.policy
        self.operating.api.put({**resource, "spec": defaulted(merged(resource["spec"], spec))})
        await self.operating.run()

    # --- the Cluster protocol

    def policy(self, name: str) -> Object:
        found = self.operating.api.find(wire.KIND, name, self.namespace)
        if found is None:
            raise NotFound(f"{wire.PLURAL} {name!r} was not found in this namespace; see -n")
        return found

    def policies(self, *, everywhere: bool = False) -> list[Object]:
        found = self.operating.api.of_kind(wire.KIND)
        return [one for one in found if everywhere or one["metadata"]["namespace"] == self.namespace]

    def patch(self, name: str, operations: Sequence[Mapping[str, Any]], *, dry_run: bool = False) -> Object:
        if not dry_run:
            act, self.before_patch = self.before_patch, lambda: None
            act()
        policy = self.policy(name)
        for operation in operations:
            *parents, last = operation["path"][1:].split("/")
            holder = policy
            for one in parents:
                holder = holder[one]
            if operation["op"] == "replace" and last not in holder:
                raise CommandFailed(f"the API server does not take the change: no {operation['path']}")
            holder[last] = deepcopy(operation["value"])
        if policy["metadata"]["resourceVersion"] != self.policy(name)["metadata"]["resourceVersion"]:
            raise Conflict("the object has been modified")
        try:
            policy["spec"] = defaulted(policy["spec"])
        except InvalidPolicy as error:
            raise CommandFailed(f"the API server does not take the change: {error}") from None
        if dry_run:
            return policy
        self.writes.append([dict(operation) for operation in operations])
        return self.operating.api.put(policy)

    def revisions(self, name: str) -> list[Object]:
        found = self.operating.api.of_kind("ControllerRevision")
        return [one for one in found if one["metadata"]["labels"][wire.POLICY_LABEL] == name]

    def pods(self, policy: Object) -> list[Object]:
        found = []
        for pod in self.operating.api.of_kind("Pod"):
            runs = "running" if pod["metadata"]["name"] not in self.down else "waiting"
            states = {"containerStatuses": "engine", "initContainerStatuses": "sidecar"}
            pod["status"] |= {field: [{"name": name, "state": {runs: {}}}] for field, name in states.items()}
            found.append(pod)
        return found

    def admin_token(self, name: str) -> str:
        return self.token

    def ask(self, pod: str, path: str, token: str, seconds: float) -> tuple[int, bytes]:
        if pod in self.hang:
            raise PodSilent("no port-forward: dial tcp: connection refused")
        if token != TOKEN:
            return 401, b'{"error": "the bearer token is not this policy\'s"}'
        url = urlsplit(path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        return getattr(self, f"_{url.path.rpartition('/')[2]}")(pod, query)

    def _observation(self, pod: str, query: dict[str, str]) -> tuple[int, bytes]:
        sidecars, body = self.operating.sidecars, self.operating.api.find("Pod", pod)
        assert body is not None
        if pod in sidecars.deaf:
            report = sidecars.reports(KEY)[body["metadata"]["uid"]]
            assert report.observation is not None
            return 200, encode_observation(report.observation)
        return 200, encode_observation(sidecars._observe(KEY, body))

    def _receipts(self, pod: str, query: dict[str, str]) -> tuple[int, bytes]:
        kept = self.receipts.get(pod, [])
        if "id" in query:
            found = next((one for one in kept if one["id"] == query["id"]), None)
            return (200, json.dumps(found).encode()) if found else (404, b'{"error": "no such receipt is kept"}')
        return 200, json.dumps({"receipts": kept[: int(query["limit"])]}).encode()

    def _ledger(self, pod: str, query: dict[str, str]) -> tuple[int, bytes]:
        start, limit = int(query.get("cursor") or 0), int(query["limit"])
        kept = self.pages.get(pod, [])
        cursor = str(start + limit) if start + limit < len(kept) else None
        return 200, json.dumps({"pages": kept[start : start + limit], "cursor": cursor}).encode()


def defaulted(spec: Object) -> Object:
    """As the API server stores a spec. Raises InvalidPolicy."""
    found: Object = msgspec.to_builtins(decode_spec(without_nothing(spec)))
    return without_nothing(found)


def without_nothing(value: Any) -> Any:
    """Without fields that are null: the API server drops those."""
    if isinstance(value, dict):
        return {name: without_nothing(one) for name, one in value.items() if one is not None}
    return [without_nothing(one) for one in value] if isinstance(value, list) else value

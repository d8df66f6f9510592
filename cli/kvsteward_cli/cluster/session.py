"""One run of a command: the cluster it speaks to, and how it speaks to people and scripts."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvsteward_cli.errors import CommandFailed

from .answers import Answer, gather
from .api import Cluster, Conflict, Object, PodSilent
from .switch import SIDECAR, runs

TRIES = 10  # a status is written between reading and writing now and then
ASK_SECONDS = 5.0


@dataclass(frozen=True)
class Session:
    """`json`: what scripts read goes to stdout as one JSON value; notes for people go to stderr either way."""

    cluster: Cluster
    json: bool = False
    clock: Callable[[], float] = time.time
    sleep: Callable[[float], None] = time.sleep

    def show(self, text: str, data: Any) -> None:
        print(json.dumps(data, indent=2, ensure_ascii=False) if self.json else text, flush=True)

    def note(self, text: str) -> None:
        print(f"note: {text}", file=sys.stderr, flush=True)

    # --- the resource

    def now(self, name: str, **rollout: Any) -> Object:
        """Writes fields of spec.rollout at once, whatever they were."""
        return self._patch(name, [setting(field, value) for field, value in rollout.items()])

    def tried(self, name: str, operations: Sequence[Mapping[str, Any]]) -> Object:
        """The policy as it would be after a patch, which is not kept."""
        return self._patch(name, operations, dry_run=True)

    def edit(self, name: str, decide: Callable[[Object], Sequence[Mapping[str, Any]]]) -> Object:
        """Writes what `decide` makes of the policy as it is; an empty decision writes nothing. If the status was
        written meanwhile it is decided again; if the spec was, somebody else is at it. Raises CommandFailed."""
        policy = self.cluster.policy(name)
        generation = policy["metadata"].get("generation")
        for _ in range(TRIES):
            operations = decide(policy)
            if not operations:
                return policy
            version = {"op": "add", "path": "/metadata/resourceVersion", "value": policy["metadata"]["resourceVersion"]}
            try:
                return self.cluster.patch(name, [version, *operations])
            except Conflict:
                policy = self.cluster.policy(name)
            if policy["metadata"].get("generation") != generation:
                break
        raise CommandFailed(f"{name} was edited by somebody else meanwhile: look at it, then try again")

    def _patch(self, name: str, operations: Sequence[Mapping[str, Any]], *, dry_run: bool = False) -> Object:
        for _ in range(TRIES):
            try:
                return self.cluster.patch(name, operations, dry_run=dry_run)
            except Conflict:
                continue
        raise CommandFailed(f"{name} changes faster than it can be written: try again")

    # --- the pods

    def ask(self, pods: Sequence[str], path: str, token: str) -> list[Answer]:
        """One answer of each pod's admin port."""
        return gather(pods, lambda pod: self.answer(pod, path, token), ASK_SECONDS)

    def answer(self, pod: str, path: str, token: str) -> Answer:
        try:
            status, body = self.cluster.ask(pod, path, token, ASK_SECONDS)
            found = json.loads(body)
        except PodSilent as silent:
            return Answer(pod, problem=str(silent))
        except ValueError:
            return Answer(pod, problem="does not answer like a sidecar")
        if status == 200:
            return Answer(pod, found)
        return Answer(pod, problem=str(found.get("error") if isinstance(found, dict) else "") or f"answers {status}")

    def sidecars(self, name: str) -> list[str]:
        """Names of the policy's pods whose sidecar runs."""
        pods = self.cluster.pods(self.cluster.policy(name))
        return [pod["metadata"]["name"] for pod in pods if runs(pod, SIDECAR)]


def setting(field: str, value: Any) -> dict[str, Any]:
    """Of spec.rollout; `add` writes a field whether or not it is there."""
    return {"op": "add", "path": f"/spec/rollout/{field}", "value": value}

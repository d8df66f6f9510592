"""Where the policy comes from: the API server, or a file on a laptop.

Both give the same thing: the last good document (with its version) and the last good reading of the resource it names,
kept through everything that goes wrong, with `problems` for people. `PolicyState` settles what to keep; the two sources
only feed it. `changed` is called synchronously, from the very read that brought the news.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

import aiohttp
from kvsteward_contract import wire
from kvsteward_contract.document import (
    PolicyDocument,
    UnknownDocument,
    canonical,
    compile_document,
    decode_document,
    version_of,
)
from kvsteward_contract.policy import InvalidPolicy, PolicySpec, decode_policy, semantic_refusals

from . import yaml_text
from .kube import Absent, ApiServer, Seen, Unreachable, follow
from .permission import ResourceView, UnreadableResource, read_resource

log = logging.getLogger(__name__)

FILE_POLL_SECONDS = 0.2
LOCAL_GENERATION = "local"


class PolicyState:
    """The last good document and resource. Every `take_*` that changes what is in force calls `changed`."""

    def __init__(self, changed: Callable[[], None], clock: Callable[[], float]) -> None:
        self.document: PolicyDocument | None = None
        self.version = ""
        self.clock = clock
        self.confirmed_at = clock()  # when the source last vouched for what is here; the start counts
        self._changed = changed
        self._seen: ResourceView | None = None  # whatever bears the policy's name
        self._resource: ResourceView | None = None  # the last one whose uid the document names
        self._problems: dict[str, str] = {}

    @property
    def resource(self) -> ResourceView | None:
        return self._resource

    @property
    def problems(self) -> tuple[str, ...]:
        return tuple(self._problems.values())

    def age(self) -> float:
        """Seconds since the source last vouched for the policy."""
        return max(0.0, self.clock() - self.confirmed_at)

    def confirm(self) -> None:
        self.confirmed_at = self.clock()

    def take_document(self, data: bytes | str) -> None:
        """A document's bytes, as they came. What can't be read leaves the last good one in force."""
        raw = data.encode() if isinstance(data, str) else data
        version = version_of(raw)
        if version == self.version:
            self.settle("document")
            return
        try:
            document = decode_document(raw)
        except UnknownDocument as error:
            self.report("document", f"PolicyUnreadable: {error}; the last good one stays in force")
            return
        self.settle("document")
        self.document, self.version = document, version
        if self._seen is not None and self._seen.uid == document.policy.uid:
            self._resource = self._seen
        elif self._resource is not None and self._resource.uid != document.policy.uid:
            self._resource = None
        stage = document.rollout.stage.value
        log.info("policy document %s: generation %s, stage %s", version, document.generation, stage)
        self._changed()

    def take_resource(self, resource: Mapping[str, Any]) -> None:
        """The resource, accepted or not."""
        try:
            view = read_resource(resource)
        except UnreadableResource as error:
            self.report("resource", f"ResourceUnreadable: {error}; the last reading stays in force")
            return
        self.settle("resource")
        self._seen = view
        if self.document is not None and view.uid != self.document.policy.uid:
            self.report("resource", f"ResourceReplaced: {view.uid} is not the uid this pod was made for; not followed")
            return
        if view != self._resource:
            self._resource = view
            log.info("resource: kill switch %s, stage %s", view.kill_switch.value, view.stage.value)
            self._changed()

    def report(self, about: str, problem: str) -> None:
        """Says a problem (a CamelCase reason, a colon, a sentence) once in the log; it stands until it is settled."""
        if self._problems.get(about) != problem:
            log.warning("%s", problem)
        self._problems[about] = problem

    def settle(self, about: str) -> None:
        self._problems.pop(about, None)


class KubernetesSource:
    """One ConfigMap and one KVCachePolicy, watched through the API server."""

    def __init__(
        self,
        state: PolicyState,
        session: aiohttp.ClientSession,
        server: ApiServer,
        *,
        namespace: str,
        policy: str,
        config_map: str,
    ) -> None:
        self.state, self.session, self.server = state, session, server
        self._documents = f"/api/v1/namespaces/{namespace}/configmaps"
        self._resources = f"/apis/{wire.API_VERSION}/namespaces/{namespace}/{wire.PLURAL}"
        self._config_map, self._policy = config_map, policy
        self._vouched: dict[str, float] = {}

    async def run(self) -> None:
        """Both watches, for ever."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow("document", self._documents, self._config_map, self._take_config_map))
            group.create_task(self._follow("resource", self._resources, self._policy, self.state.take_resource))

    async def _follow(
        self, about: str, collection: str, name: str, take: Callable[[Mapping[str, Any]], None]
    ) -> None:
        async with aclosing(follow(self.session, self.server, collection, name)) as changes:
            async for change in changes:
                if isinstance(change, Unreachable):
                    why = f"PolicyUnconfirmed: the {about} cannot be watched: {change.why}"
                    self.state.report(f"watch {about}", why)
                    continue
                self.state.settle(f"watch {about}")
                self._vouch(about)
                if isinstance(change, Seen):
                    self.state.settle(f"absent {about}")
                    take(change.object)
                elif isinstance(change, Absent):
                    why = f"PolicyAbsent: the {about} {name} does not exist; what was last read stays"
                    self.state.report(f"absent {about}", why)

    def _vouch(self, about: str) -> None:
        """The policy is as old as the older of the two watches' last words."""
        self._vouched[about] = self.state.clock()
        if len(self._vouched) == 2:
            self.state.confirmed_at = min(self._vouched.values())

    def _take_config_map(self, config_map: Mapping[str, Any]) -> None:
        data = (config_map.get("data") or {}).get(wire.DOCUMENT_KEY)
        if data is None:
            why = f"PolicyUnreadable: ConfigMap {self._config_map} has no key {wire.DOCUMENT_KEY}"
            self.state.report("document", why)
        else:
            self.state.take_document(data)


class FileSource:
    """A KVCachePolicy in a YAML file, followed while it is edited: the same document, compiled here."""

    def __init__(self, state: PolicyState, path: Path) -> None:
        self.state, self.path = state, path
        self._stamp: object = None
        self._started_with: PolicySpec | None = None

    async def run(self) -> None:
        """Looks for edits for ever."""
        while True:
            self.look()
            await asyncio.sleep(FILE_POLL_SECONDS)

    def look(self) -> None:
        """Reads the file if it changed."""
        try:
            status = self.path.stat()
            stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
            if stamp != self._stamp:
                self._take(self.path.read_text(encoding="utf-8"))
                self._stamp = stamp
            else:
                self.state.confirm()
        except (OSError, UnicodeDecodeError) as error:
            self._reject(f"cannot be read: {getattr(error, 'strerror', None) or error}")

    def _take(self, text: str) -> None:
        self.state.confirm()
        try:
            resource = yaml_text.document(text)
        except yaml_text.InvalidYaml as error:
            self._reject(f"is no YAML: {error}")
            return
        if not isinstance(resource, dict):
            self._reject("holds no resource")
            return
        metadata = resource.get("metadata")
        name = metadata.get("name") if isinstance(metadata, dict) else None
        known = metadata if isinstance(metadata, dict) else {}
        resource = {**resource, "metadata": {**known, "uid": f"local-{name}"}}
        self._take_document(resource)
        # Also from a spec that was just rejected: its switch and a lower stage act.
        if self.state.document is not None:
            self.state.take_resource(resource)

    def _take_document(self, resource: dict[str, Any]) -> None:
        try:
            policy = decode_policy(resource)
        except InvalidPolicy as error:
            self._reject(f"was not accepted: {error}")
            return
        if refusals := semantic_refusals(policy.spec):
            self._reject(f"was not accepted: {refusals[0].message}")
            return
        if self._started_with is not None and (fixed := changed_at_start_only(self._started_with, policy.spec)):
            self._reject(f"was not accepted: {fixed} takes effect only at a start; start again, or undo the edit")
            return
        current = self.state.document
        document = compile_document(policy, LOCAL_GENERATION, current.rollout if current is not None else None)
        self._started_with = self._started_with or policy.spec
        self.state.settle("file")
        self.state.take_document(canonical(document))

    def _reject(self, why: str) -> None:
        self.state.report("file", f"PolicyRejected: {self.path} {why}; the last good policy stays in force")


def changed_at_start_only(before: PolicySpec, after: PolicySpec) -> str:
    """The first field whose change needs a new engine, "" when none changed: a file has no operator to make one."""
    if before.engine != after.engine:
        return "spec.engine"
    for name, written in zip(before.cache.__struct_fields__, before.cache.__struct_encode_fields__, strict=True):
        if getattr(before.cache, name) != getattr(after.cache, name):
            return f"spec.cache.{written}"
    return ""

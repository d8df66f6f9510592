"""An operator at work on a fake API server: the real index, decisions and turns, made to run until nothing changes."""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from kvsteward_contract import wire
from kvsteward_contract.status import PolicyStatus
from kvsteward_operator.api import Object
from kvsteward_operator.index import Index, Key
from kvsteward_operator.reconcile import Reconciler
from kvsteward_operator.settings import Settings
from kvsteward_operator.telemetry import Telemetry
from kvsteward_operator.world import World

from .fake_api import FakeApi
from .fake_workloads import FakeSidecars, FakeWorkloads

START = 1_735_689_600.0  # 2025-01-01T00:00:00Z
SETTINGS = Settings(
    engine_image="kvsteward/engine:1",
    sidecar_image="kvsteward/sidecar:1",
    operator_key=bytes(32),
    admin_peers=({"podSelector": {"matchLabels": {"app.kubernetes.io/component": "operator"}}},),
)
KEY = Key("serving", "chat")


def policy_resource(**spec: Any) -> Object:
    """A valid policy `serving/chat` with the given parts of its spec merged in."""
    resource: Object = {
        "apiVersion": wire.API_VERSION,
        "kind": wire.KIND,
        "metadata": {"name": KEY.name, "namespace": KEY.namespace},
        "spec": {
            "engine": {
                "replicas": 2,
                "model": {
                    "name": "tiny",
                    "revision": "1",
                    "tokenizerRevision": "1",
                    "source": {"persistentVolumeClaim": {"claimName": "models", "path": "tiny"}},
                },
            },
            "cache": {"capacity": "64Mi"},
            "scopes": {"identity": {"source": "APIKey", "secret": "tenant-keys"}},
            "rollout": {"stage": "Shadow"},
        },
    }
    resource["spec"] = merged(resource["spec"], spec)
    return resource


def merged(base: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """A JSON merge patch: None takes a field away."""
    result = dict(deepcopy(base))
    for name, value in change.items():
        if value is None:
            result.pop(name, None)
        elif isinstance(value, Mapping) and isinstance(result.get(name), Mapping):
            result[name] = merged(result[name], value)
        else:
            result[name] = deepcopy(value)
    return result


class Operating:
    """`run` alternates operator, controllers and scrapes until nothing changes; `restart` loses all memory."""

    def __init__(self, settings: Settings = SETTINGS) -> None:
        self.now = START
        self.settings = settings
        self.api = FakeApi(clock=lambda: self.now)
        self.workloads = FakeWorkloads(self.api)
        self.sidecars = FakeSidecars(self.api, clock=lambda: self.now)
        self.api.watchers.append(self._watch)
        self.restart()

    def restart(self, settings: Settings | None = None) -> None:
        """A new process: an index from lists, and no memory."""
        self.settings = settings or self.settings
        self.index = Index()
        for body in self.api.objects.values():
            self.index.put(deepcopy(body))
        self.sidecars.followed.clear()
        self.sidecars._reports.clear()
        self.reconciler = Reconciler(
            self.api, self.index, self.sidecars, self.settings, lambda: self.now, Telemetry(lambda: self.now)
        )

    def _watch(self, change: str, body: Object) -> None:
        if body["kind"] in ("Secret", "Event"):
            return
        if change == "DELETED":
            self.index.remove(body)
        else:
            self.index.put(body)

    async def turn(self, key: Key = KEY) -> float | None:
        return await self.reconciler.turn(key)

    async def run(self, key: Key = KEY, *, rounds: int = 40) -> None:
        """Until a round changes nothing. Each round takes a second."""
        for _ in range(rounds):
            version = self.api._version
            await self.turn(key)
            self.workloads.step()
            self.sidecars.scrape()
            self.now += 1.0
            if self.api._version == version:
                await self.turn(key)
                if self.api._version == version:
                    return
        raise AssertionError(f"still changing after {rounds} rounds: {self.api.writes[-5:]}")

    def create(self, **spec: Any) -> Object:
        return self.api.put(policy_resource(**spec))

    def edit(self, **spec: Any) -> Object:
        """kubectl patch --type=merge, by a user."""
        resource = self.policy
        return self.api.put({**resource, "spec": merged(resource["spec"], spec)})

    @property
    def policy(self) -> Object:
        found = self.api.find(wire.KIND, KEY.name)
        assert found is not None
        return found

    @property
    def status(self) -> PolicyStatus:
        return World(self.policy, (), self.settings).status

    def condition(self, kind: str) -> tuple[str, str]:
        """Status and reason."""
        return next((one.status, one.reason) for one in self.status.conditions if one.type == kind)

    @property
    def events(self) -> list[str]:
        """Reasons, in the order of their creation."""
        return [
            body["reason"]
            for body in sorted(self.api.of_kind("Event"), key=lambda body: int(body["metadata"]["resourceVersion"]))
        ]

    @property
    def deployment(self) -> Object:
        found = self.api.find("Deployment", KEY.name)
        assert found is not None
        return found

"""What a sidecar's control side stands on in tests: policies, documents, an engine that only knows its policy routes,
and an API server that only knows list and watch."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from aiohttp import web
from kvsteward_contract.decision import Facts, decide
from kvsteward_contract.directive import EnginePolicy, EngineState, Outcome, encode
from kvsteward_contract.document import PolicyDocument, canonical, compile_document, version_of
from kvsteward_contract.policy import IdentitySource, decode_policy
from kvsteward_sidecar.control import Control
from kvsteward_sidecar.engine_link import EngineAddress
from kvsteward_sidecar.latch import LatchFile
from kvsteward_sidecar.receipts import Receipts
from kvsteward_sidecar.tenants import TenantFiles
from kvsteward_sidecar.ticket import Arrival, Ticket

UID = "5f6c7d1e-0000-4000-8000-000000000001"
TOKEN = "t" * 32
SALT = bytes(range(32))


def resource(uid: str = UID, **rollout: Any) -> dict[str, Any]:
    """A valid KVCachePolicy with these rollout fields."""
    return {
        "apiVersion": "kvsteward.dev/v1alpha1",
        "kind": "KVCachePolicy",
        "metadata": {"name": "chat", "namespace": "serving", "uid": uid},
        "spec": {
            "engine": {
                "model": {
                    "name": "tiny",
                    "revision": "1",
                    "tokenizerRevision": "1",
                    "source": {"persistentVolumeClaim": {"claimName": "models", "path": "tiny"}},
                }
            },
            "cache": {"capacity": "64Mi"},
            "scopes": {
                "identity": {"source": "APIKey", "secret": "keys"},
                "overrides": [{"tenant": "acme", "quotaPercent": 30}],
            },
            "workloads": [{"name": "summaries"}, {"name": "checkout"}],
            "rollout": rollout,
        },
    }


def document(uid: str = UID, generation: str = "chat-1", **rollout: Any) -> PolicyDocument:
    return compile_document(decode_policy(resource(uid, **rollout)), generation)


def config_map(made: PolicyDocument) -> dict[str, Any]:
    data = canonical(made)
    return {"metadata": {"name": "chat-1"}, "data": {"document": data.decode(), "version": version_of(data)}}


class PolicyEngine:
    """An engine's policy, outcome, statistics and ledger routes, with the rules of the contract."""

    def __init__(self) -> None:
        self.instance, self.epoch, self.version = "one", 0, ""
        self.violations = self.answered = 0
        self.pushes: list[EnginePolicy] = []
        self.outcomes: dict[str, Outcome | None] = {}  # None: still runs
        self.loading = False
        self.stuck = False  # takes requests and never answers
        self.confirm_after: asyncio.Event | None = None  # a push is confirmed only once this is set
        self.stats: dict[str, Any] = {"residentPages": {"Private": 3}, "evictions": {"Capacity": 2}, "oomRecoveries": 1}
        self.url = ""
        self._runner: web.AppRunner | None = None
        self._port = 0

    def restart(self) -> None:
        """As a new process: another instance, no policy."""
        self.instance, self.epoch, self.version = self.instance + "+", 0, ""
        self.violations = self.answered = 0

    def state(self) -> EngineState:
        latched = self.violations > self.answered
        return EngineState(
            self.instance, self.epoch, self.version, 0.0, "build", "float32", 16, 1024, 256, 512, "tiny",
            self.violations, latched,
        )  # fmt: skip

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/kv/v1/policy", self._get)
        app.router.add_post("/kv/v1/policy", self._post)
        app.router.add_get("/kv/v1/outcomes/{request}", self._outcome)
        app.router.add_get("/kv/v1/stats", self._stats)
        app.router.add_get("/kv/v1/ledger", self._ledger)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port)
        await site.start()
        self._port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self._port}"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def _refused(self, request: web.Request) -> web.Response | None:
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return web.Response(status=401)
        return web.Response(status=503) if self.loading else None

    def _json(self, message: EngineState | Outcome, status: int = 200) -> web.Response:
        return web.Response(body=encode(message), status=status, content_type="application/json")

    async def _get(self, request: web.Request) -> web.Response:
        while self.stuck:
            await asyncio.sleep(0.01)
        return self._refused(request) or self._json(self.state())

    async def _post(self, request: web.Request) -> web.Response:
        if (refused := self._refused(request)) is not None:
            return refused
        policy = msgspec.json.decode(await request.read(), type=EnginePolicy)
        self.pushes.append(policy)
        if self.confirm_after is not None:
            await self.confirm_after.wait()
        if policy.epoch < self.epoch:
            return self._json(self.state(), 409)
        self.epoch, self.version = policy.epoch, policy.version
        self.answered = max(self.answered, min(policy.violations, self.violations))
        return self._json(self.state())

    async def _outcome(self, request: web.Request) -> web.Response:
        if (refused := self._refused(request)) is not None:
            return refused
        name = request.match_info["request"]
        if name not in self.outcomes:
            return web.Response(status=404)
        found = self.outcomes[name]
        return web.Response(status=202) if found is None else self._json(found)

    async def _stats(self, request: web.Request) -> web.Response:
        return self._refused(request) or web.json_response(self.stats)

    async def _ledger(self, request: web.Request) -> web.Response:
        return self._refused(request) or web.json_response({"pages": [], "limit": request.query.get("limit")})


class ApiFake:
    """List and watch of named objects, with versions, bookmarks, and ways to misbehave."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        self.version = 100
        self.status = 0  # answered to every request when not 0
        self.lists, self.tokens = 0, []
        self.url = ""
        self.silent = False  # watches stay open and say nothing
        self._watches: list[tuple[str, str, asyncio.Queue[dict[str, Any] | None]]] = []
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/{collection:.*}", self._serve)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        self.end_watches()
        if self._runner is not None:
            await self._runner.cleanup()

    @property
    def watching(self) -> int:
        return len(self._watches)

    def put(self, collection: str, name: str, value: dict[str, Any]) -> None:
        kind = "MODIFIED" if (collection, name) in self.objects else "ADDED"
        self.version += 1
        metadata = {**value.get("metadata", {}), "name": name, "resourceVersion": str(self.version)}
        self.objects[collection, name] = {**value, "metadata": metadata}
        self._send(collection, name, {"type": kind, "object": self.objects[collection, name]})

    def delete(self, collection: str, name: str) -> None:
        self.version += 1
        gone = self.objects.pop((collection, name))
        self._send(collection, name, {"type": "DELETED", "object": gone})

    def bookmark(self) -> None:
        self.version += 1
        self.send_all({"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": str(self.version)}}})

    def send_all(self, event: dict[str, Any]) -> None:
        for collection, name, _ in self._watches:
            self._send(collection, name, event)

    def end_watches(self) -> None:
        for _, _, queue in self._watches:
            queue.put_nowait(None)

    def _send(self, collection: str, name: str, event: dict[str, Any]) -> None:
        for watched, one, queue in self._watches:
            if not self.silent and (watched, one) == (collection, name):
                queue.put_nowait(event)

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        self.tokens.append(request.headers.get("Authorization", ""))
        if self.status:
            return web.json_response({"message": "no"}, status=self.status)
        collection = "/" + request.match_info["collection"]
        name = request.query["fieldSelector"].removeprefix("metadata.name=")
        if "watch" not in request.query:
            self.lists += 1
            items = [self.objects[collection, name]] if (collection, name) in self.objects else []
            return web.json_response({"metadata": {"resourceVersion": str(self.version)}, "items": items})
        queue: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        entry = (collection, name, queue)
        self._watches.append(entry)
        response = web.StreamResponse()
        try:
            await response.prepare(request)
            while (event := await queue.get()) is not None:
                await response.write(json.dumps(event).encode() + b"\n")
        except ConnectionResetError:
            pass
        finally:
            self._watches.remove(entry)
        return response


async def until(condition: Callable[[], Any], seconds: float = 5.0) -> None:
    """Returns as soon as the condition holds; raises TimeoutError after `seconds`."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


def tenant_files(folder: Path, **keys: str) -> TenantFiles:
    """API keys as a mounted Secret has them: one file a tenant."""
    folder.mkdir(exist_ok=True)
    for tenant, key in keys.items():
        (folder / tenant).write_text(key + "\n")
    return TenantFiles(IdentitySource.API_KEY, folder)


def admit(control: Control, tenant: str | None = "acme", request: str = "1" * 32) -> Ticket:
    """As the traffic side does it."""
    permission = control.permission
    bucket = control.bucket("session")
    decision = decide(
        Facts(
            kill_switch=permission.stopped,
            policy_known=permission.known,
            tenant_known=tenant is not None,
            stage=permission.stage,
            protected=permission.protects(bucket),
            in_cohort=permission.in_cohort(bucket, "other"),
        )
    )
    grant = control.grant(tenant) if tenant is not None else None
    return control.admit(request, decision, Arrival(permission, grant, "other", bucket))


@asynccontextmanager
async def running_control(
    folder: Path, engine: PolicyEngine, lines: list[bytes] | None = None, **options: Any
) -> AsyncIterator[Control]:
    """A Control whose own loop runs, with two tenants and its state in `folder`."""
    written: list[bytes] = [] if lines is None else lines
    loop = asyncio.get_running_loop()
    async with aiohttp.ClientSession() as session:
        control = Control(
            session,
            EngineAddress(engine.url, TOKEN),
            SALT,
            tenant_files(folder / "tenants", acme="a" * 32, globex="g" * 32),
            LatchFile(folder / "latch.json"),
            Receipts(written.append),
            clock=options.pop("clock", loop.time),
            monotonic=loop.time,
            **options,
        )
        task = asyncio.create_task(control.run())
        try:
            yield control
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await control.settle()

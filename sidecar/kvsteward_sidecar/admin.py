"""The admin port: probes and metrics for anyone, everything about the cache for the bearer of the policy's token.

The engine's own probes go through here, since the engine listens on loopback only: `/engine/live` fails only when the
engine itself has not answered for its tolerance, never because the sidecar is young.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web
from kvsteward_contract.observation import encode_observation

from .control import Control
from .engine_link import GONE, SLOW

CURE = (
    "the bearer token is not this policy's: the operator (or `kvsteward admin-token`) makes it from its key and the "
    "policy's uid; after the Secret was rotated, restart the pods with `kubectl rollout restart`"
)
UNSET = "this sidecar has no admin token: give --admin-token-file a file that can be read and isn't empty"
DEFAULT_RECEIPTS, MAX_RECEIPTS = 100, 4096


class AdminToken:
    """The expected token, read anew for each request: they are rare, and a rotated file counts at once."""

    def __init__(self, path: Path | None) -> None:
        self.path = path

    def refusal(self, authorization: list[str]) -> str:
        """Why these Authorization headers don't pass, "" when they do. Constant time in the token."""
        expected = self._expected()
        if not expected:
            return UNSET
        if len(authorization) != 1:
            return CURE
        scheme, _, token = authorization[0].partition(" ")
        if scheme.lower() != "bearer":
            return CURE
        given = token.strip().encode("utf-8", "surrogateescape")
        return "" if hmac.compare_digest(given, expected) else CURE

    def _expected(self) -> bytes:
        try:
            return self.path.read_bytes().strip() if self.path is not None else b""
        except OSError:
            return b""


def admin_app(control: Control, token: AdminToken, serving: Callable[[], bool]) -> web.Application:
    """The port's routes. `serving` says whether the traffic port takes requests yet."""

    @web.middleware
    async def guard(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if request.path.startswith("/v1/") and (why := token.refusal(request.headers.getall("Authorization", []))):
            return _json({"error": why}, 401, {"WWW-Authenticate": "Bearer"})
        return await handler(request)

    async def healthz(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def readyz(_: web.Request) -> web.Response:
        if not serving():
            return _no("the traffic port is not open yet")
        if (refusal := control.refusal()) is not None:
            return _no(refusal.message)
        return web.Response(text="ok\n")

    async def engine_startup(_: web.Request) -> web.Response:
        return web.Response(text="ok\n") if control.engine_ready() else _no("the engine has not loaded its model yet")

    async def engine_live(_: web.Request) -> web.Response:
        return web.Response(text="ok\n") if control.link.live else _no("the engine does not answer")

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(
            body=control.metrics(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        )

    async def observation(_: web.Request) -> web.Response:
        return web.Response(body=encode_observation(control.observation()), content_type="application/json")

    async def policy(_: web.Request) -> web.Response:
        permission, source, confirmed = control.permission, control.policy, control.link.confirmed
        return _json(
            {
                "version": permission.version,
                "stage": permission.stage.value,
                "killSwitch": permission.kill_switch,
                "latch": control.latch,
                "epoch": permission.epoch,
                "acknowledged": control.link.acknowledged,
                "engineEpoch": confirmed.epoch if confirmed else 0,
                "document": source.document,
                "resource": _resource(control),
                "ageSeconds": source.age(),
                "problems": control.problems(),
            }
        )

    async def receipts(request: web.Request) -> web.Response:
        if identity := request.query.get("id"):
            found = control.receipts.find(identity)
            return _json(found) if found is not None else _json({"error": "no such receipt is kept any more"}, 404)
        limit = request.query.get("limit", str(DEFAULT_RECEIPTS))
        if not (limit.isdecimal() and len(limit) <= 4 and 1 <= int(limit) <= MAX_RECEIPTS):
            return _json({"error": f"limit must be 1 to {MAX_RECEIPTS}, not {limit[:20]!r}"}, 400)
        return _json({"receipts": control.receipts.newest(int(limit))})

    async def ledger(request: web.Request) -> web.Response:
        query = {name: request.query[name] for name in ("limit", "cursor") if name in request.query}
        status, body = await control.link.ledger(query)
        if status in (GONE, SLOW):
            return _json({"error": "the engine does not answer"}, 503)
        return web.Response(body=body, status=status, content_type="application/json")

    async def hold(_: web.Request) -> web.Response:
        control.hold_cold()
        return _json({"latch": control.latch, "epoch": control.permission.epoch})

    async def release(_: web.Request) -> web.Response:
        control.release()
        return _json({"latch": control.latch, "epoch": control.permission.epoch})

    app = web.Application(middlewares=[guard])
    app.router.add_get("/healthz", healthz)
    app.router.add_get("/readyz", readyz)
    app.router.add_get("/engine/startup", engine_startup)
    app.router.add_get("/engine/live", engine_live)
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/v1/observation", observation)
    app.router.add_get("/v1/policy", policy)
    app.router.add_get("/v1/receipts", receipts)
    app.router.add_get("/v1/ledger", ledger)
    app.router.add_post("/v1/cold", hold)
    app.router.add_delete("/v1/cold", release)
    return app


def _resource(control: Control) -> dict[str, str | int] | None:
    view = control.policy.resource
    if view is None:
        return None
    return {
        "uid": view.uid,
        "generation": view.generation,
        "killSwitch": view.kill_switch.value,
        "stage": view.stage.value,
    }


def _json(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(body), status=status, content_type="application/json", headers=headers or {}
    )


def _no(why: str) -> web.Response:
    return web.Response(status=503, text=why + "\n")

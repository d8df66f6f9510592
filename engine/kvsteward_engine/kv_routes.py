"""/kv/v1: the sidecar's side door - permissions in, ownership and outcomes out. Never reachable for clients."""

import asyncio
from typing import Any

import msgspec
from aiohttp import web
from kvsteward_contract import wire
from kvsteward_contract.directive import EnginePolicy, encode

from kvsteward_engine.openai import ApiError
from kvsteward_engine.service import SERVICE, Service

MAX_LEDGER_PAGE = 1000
_policy = msgspec.json.Decoder(EnginePolicy)


async def get_policy(request: web.Request) -> web.Response:
    """GET /kv/v1/policy: EngineState, with the epoch in force."""
    return _json(encode(request.app[SERVICE].loaded().engine.state()))


async def post_policy(request: web.Request) -> web.Response:
    """POST /kv/v1/policy: answers 200 once nothing of an older epoch can match any more; 409 to an older epoch."""
    engine = request.app[SERVICE].loaded().engine
    try:
        policy = _policy.decode(await request.read())
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise ApiError(400, f"this is no EnginePolicy: {error}") from error
    # It may wait for the scheduling of a step.
    state = await asyncio.to_thread(engine.set_policy, policy)
    return _json(encode(state), 409 if state.epoch > policy.epoch else 200)


async def stats(request: web.Request) -> web.Response:
    """GET /kv/v1/stats: EngineState, with what runs, waits and is resident."""
    return _json(msgspec.json.encode(request.app[SERVICE].loaded().engine.stats()))


async def ledger(request: web.Request) -> web.Response:
    """GET /kv/v1/ledger?limit=&cursor=: records of resident pages, in an order that a cursor can go on in."""
    engine = request.app[SERVICE].loaded().engine
    limit = request.query.get("limit", "100")
    if not (limit.isascii() and limit.isdigit() and len(limit) <= 4 and 1 <= int(limit) <= MAX_LEDGER_PAGE):
        raise ApiError(400, f"limit: it must be a number from 1 to {MAX_LEDGER_PAGE}", param="limit")
    return _json(msgspec.json.encode(engine.ledger(int(limit), request.query.get("cursor", ""))))


async def outcome(request: web.Request) -> web.Response:
    """GET /kv/v1/outcomes/{request}: 200 with the Outcome, 202 while the request runs, 404 if unknown."""
    service = request.app[SERVICE]
    engine, request_id = service.loaded().engine, request.match_info["request"]
    if engine.in_flight(request_id):
        return _json(b'{"status":"running"}', 202)
    found = engine.outcome(request_id)
    if found is None:
        raise ApiError(404, "there is no outcome of such a request", "not_found_error")
    return _json(encode(service.tokenisations.fill_in(found)))


async def get_drain(request: web.Request) -> web.Response:
    """GET /kv/v1/drain: whether new requests are refused, and how many still run."""
    return _drain_state(request.app[SERVICE])


async def post_drain(request: web.Request) -> web.Response:
    """POST /kv/v1/drain: from now on new requests get 503; answers at once, what runs goes on."""
    service = request.app[SERVICE]
    service.drain()
    return _drain_state(service)


def _drain_state(service: Service) -> web.Response:
    return _json(msgspec.json.encode({"status": service.phase.value, "inFlight": service.in_flight}))


def _json(body: bytes, status: int = 200) -> web.Response:
    return web.Response(body=body, status=status, content_type="application/json")


ROUTES: list[Any] = [
    web.get(wire.ENGINE_POLICY_ROUTE, get_policy, allow_head=False),
    web.post(wire.ENGINE_POLICY_ROUTE, post_policy),
    web.get(wire.ENGINE_STATS_ROUTE, stats, allow_head=False),
    web.get(wire.ENGINE_LEDGER_ROUTE, ledger, allow_head=False),
    web.get(wire.ENGINE_OUTCOMES_ROUTE + "/{request}", outcome, allow_head=False),
    web.get(wire.ENGINE_DRAIN_ROUTE, get_drain, allow_head=False),
    web.post(wire.ENGINE_DRAIN_ROUTE, post_drain),
]

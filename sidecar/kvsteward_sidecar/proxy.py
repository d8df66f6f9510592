"""A request's way: allow-list, tenant, body, decision, engine, and back, with what happened told to `Control` once.

Nothing of a client's request reaches the engine but the values of allowed body keys and a well-formed trace context:
path, headers and body are all written anew.
"""

import asyncio
import logging
import re
import secrets
from urllib.parse import urlsplit

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from kvsteward_contract.decision import Facts, decide
from kvsteward_contract.directive import Outcome, decode_outcome
from kvsteward_contract.policy import Backend, IdentitySource, WhenMissing
from kvsteward_contract.wire import DIRECTIVE_HEADER, RECEIPT_HEADER, SESSION_HEADER, WORKLOAD_HEADER

from . import body as bodies
from .body import Body, BodyError, NoRoom, Room
from .clients import Server, promise, promised
from .control import Control
from .engine_link import EngineAddress
from .relay import ClientStalled, Relay, Sent
from .routes import Kind, Route, find
from .tenants import Credential
from .ticket import Arrival, Ending, Refusal, Ticket
from .upstream import EngineBroke, EngineUnavailable, Pool

log = logging.getLogger(__name__)

BODY_SECONDS = 60.0  # for a client to send its body
MAX_SESSION = 256  # characters
RETRY_AFTER = 1  # seconds, for an engine that has just gone
_NO_ROOM = Refusal(503, "overloaded", "Too many large requests arrive at once; send the request again.", RETRY_AFTER)

# Headers that only we may set, or that we read under one identity source alone: dropped, and counted under these names.
_WATCHED = {
    b"x-kv-directive": "x-kv-directive",
    b"x-kv-outcome": "x-kv-outcome",
    b"x-kv-receipt": "x-kv-receipt",
    b"x-request-id": "x-request-id",
}
_READ = frozenset({b"x-kv-session", b"x-kv-workload"})
_CREDENTIALS = {b"x-kv-tenant": "x-kv-tenant", b"x-kv-gateway-token": "x-kv-gateway-token"}
_OTHER_HEADER = "x-kv-other"

_TRACE_PARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_TRACE_STATE = re.compile(r"[ -~]{1,512}")


class Proxy:
    """The traffic port. `server()` is what listens; `close()` lets go of idle connections to the engine."""

    def __init__(
        self,
        control: Control,
        engine: EngineAddress,
        backend: Backend = Backend.BUILTIN,
        max_body: int = bodies.MAX_BYTES,
        max_receiving: int = bodies.MAX_RECEIVING,
    ) -> None:
        self._control, self._backend, self._max_body = control, backend, max_body
        self._room = Room(max_receiving)
        url = urlsplit(engine.url)
        if url.scheme != "http" or not url.hostname:
            raise ValueError(f"the engine's address must be http://host:port, not {engine.url!r}")
        self._pool = Pool(url.hostname, url.port or 80)
        self._common = f"Host: {url.netloc}\r\nAccept: application/json, text/event-stream\r\n"
        if engine.token:
            self._common += f"Authorization: Bearer {engine.token}\r\n"

    def server(self) -> Server:
        """A server for a runner. A handler is cancelled as soon as its client is gone, also before the first token."""
        return Server(
            self.handle,
            handler_cancellation=True,
            access_log=None,
            auto_decompress=False,
            read_bufsize=262_144,
        )

    def close(self) -> None:
        self._pool.close()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answers any request of any client."""
        started = asyncio.get_running_loop().time()
        route = find(self._backend, request.method, request.raw_path)
        if route is None:
            return self._error(404, "not_found", "There is nothing here.")
        refusal = self._control.refusal(promised=promised(request))
        if refusal is not None:
            return self._refuse(refusal)
        if route.kind is Kind.HEALTH:
            return self._json(200, b'{"status":"ok"}')
        tenants = self._control.tenants
        credential = tenants.identify(request.headers)
        if self._rejects(credential):
            return self._unauthorised()
        self._count_headers(request)
        if route.method == "GET":
            return await self._forward(request, route, Body(b""), started, None)
        try:
            body = bodies.reduce(await self._read(request), route)
        except NoRoom:
            response = self._refuse(_NO_ROOM)
            response.force_close()  # what is left of the body is of no use
            return response
        except BodyError as error:
            return self._error(error.status, "invalid_body", error.message, close=error.status == 413)
        for label in body.dropped:
            self._control.dropped(label)
        if route.kind is Kind.PLAIN:
            return await self._forward(request, route, body, started, None)
        if self._control.tenants is not tenants:  # a body can take long, and a key be revoked meanwhile
            credential = self._control.tenants.identify(request.headers)
            if self._rejects(credential):
                return self._unauthorised()
        ticket = self._admit(request, body, credential)
        return await self._forward(request, route, body, started, ticket)

    async def _read(self, request: web.BaseRequest) -> bytes:
        """The body. Raises BodyError."""
        if request.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise BodyError(415, "The request body must not be compressed.")
        if (request.content_length or 0) > self._max_body:
            raise bodies.too_large(self._max_body)
        content = request.content
        if content.is_eof():
            data = content.read_nowait()
            if len(data) > self._max_body:
                raise bodies.too_large(self._max_body)
            return data
        if request.headers.get("Expect", "").lower() == "100-continue" and request.transport is not None:
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        try:
            async with asyncio.timeout(BODY_SECONDS):
                return await bodies.read(content.iter_any(), self._max_body, self._room)
        except TimeoutError:
            raise BodyError(408, f"The request body did not arrive within {BODY_SECONDS:.0f} s.") from None
        except (web.RequestPayloadError, HttpProcessingError):
            raise BodyError(400, "The request body is not framed as its headers say.") from None

    def _rejects(self, credential: Credential) -> bool:
        """Two credentials are no way round `whenMissing: Reject` either."""
        return credential.tenant is None and self._control.permission.when_missing is WhenMissing.REJECT

    def _admit(self, request: web.BaseRequest, body: Body, credential: Credential) -> Ticket:
        """Decides, from one snapshot and without waiting for anything."""
        control = self._control
        permission = control.permission
        number = secrets.token_hex(16)
        sessions = request.headers.getall(SESSION_HEADER, ())
        workloads = request.headers.getall(WORKLOAD_HEADER, ())
        session = sessions[0] if sessions else body.user or number
        unclear = len(sessions) > 1 or len(workloads) > 1 or (bool(sessions) and len(session) > MAX_SESSION)
        workload = permission.workload(workloads[0] if workloads else "")
        bucket = control.bucket(session.encode("utf-8", "backslashreplace").decode())
        decision = decide(
            Facts(
                kill_switch=permission.stopped,
                policy_known=permission.known,
                ambiguous=credential.ambiguous or unclear,
                tenant_known=credential.tenant is not None,
                supported=body.supported,
                stage=permission.stage,
                protected=permission.protects(bucket),
                in_cohort=permission.in_cohort(bucket, workload),
            )
        )
        grant = None if credential.tenant is None else control.grant(credential.tenant)
        return control.admit(number, decision, Arrival(permission, grant, workload, bucket))

    async def _forward(
        self, request: web.BaseRequest, route: Route, body: Body, started: float, ticket: Ticket | None
    ) -> web.StreamResponse:
        """Asks the engine and relays its answer; ends the ticket, whatever happens."""
        ending, relay, answer = Ending.FAILED, None, None
        try:
            answer = await self._pool.request(self._head(request, route, body, ticket), body.take())
            try:
                relay = Relay(request, answer, ticket.request if ticket else "", self._control.closing())
                await relay.run()
            finally:
                answer.abort()  # nothing, once it is complete
            status = answer.status
            ending = Ending.COMPLETED if status < 400 else Ending.REFUSED if status < 500 else Ending.FAILED
            promise(request, relay.goes_on)
            return Sent(relay.goes_on)
        except asyncio.CancelledError:
            # A client may well leave between the last byte and the turn in which this task hears of it.
            ending = Ending.COMPLETED if answer is not None and answer.complete else Ending.CANCELLED
            raise
        except ClientStalled:
            ending = Ending.CANCELLED
            return _cut(request)
        except EngineUnavailable as error:
            log.warning("a request failed: %s", error)
            refusal = Refusal(503, "engine_unavailable", "The model server is not available right now.", RETRY_AFTER)
            return self._refuse(refusal, ticket)
        except EngineBroke as error:
            log.error("an answer was cut: %s", error)
            if relay is not None and relay.opened:
                return _cut(request)  # a clean end would look like a whole answer
            return self._error(502, "engine_failed", "The model server broke off its answer.", ticket)
        finally:
            if ticket is not None:
                outcome = _outcome(relay, ticket) if relay is not None else None
                ttft = relay.first - started if relay is not None and relay.first is not None else None
                self._control.finish(ticket, outcome, ttft, ending)

    def _head(self, request: web.BaseRequest, route: Route, body: Body, ticket: Ticket | None) -> bytes:
        lines = [f"{route.method} {route.path} HTTP/1.1\r\n{self._common}"]
        if route.method == "POST":
            lines.append(f"Content-Type: application/json\r\nContent-Length: {len(body.data)}\r\n")
        parents = request.headers.getall("traceparent", ())
        if len(parents) == 1 and _TRACE_PARENT.fullmatch(parents[0]):
            lines.append(f"traceparent: {parents[0]}\r\n")
            states = request.headers.getall("tracestate", ())
            if len(states) == 1 and _TRACE_STATE.fullmatch(states[0]):
                lines.append(f"tracestate: {states[0]}\r\n")
        head = "".join(lines).encode("ascii")
        if ticket is None:
            return head + b"\r\n"
        return b"%b%b: %b\r\n\r\n" % (head, DIRECTIVE_HEADER.encode(), ticket.directive)

    def _count_headers(self, request: web.BaseRequest) -> None:
        foreign = self._control.permission.identity is not IdentitySource.HEADER
        for written, _ in request.raw_headers:
            if written[:2] not in (b"X-", b"x-"):
                continue
            name = written.lower()
            if name in _WATCHED:
                self._control.dropped(_WATCHED[name])
            elif name in _CREDENTIALS:
                if foreign:
                    self._control.dropped(_CREDENTIALS[name])
            elif name.startswith(b"x-kv-") and name not in _READ:
                self._control.dropped(_OTHER_HEADER)

    # Answers of our own, in OpenAI's shape.

    def _unauthorised(self) -> web.Response:
        response = self._error(401, "invalid_api_key", "No valid credential was given.")
        response.headers["WWW-Authenticate"] = "Bearer"
        return response

    def _refuse(self, refusal: Refusal, ticket: Ticket | None = None) -> web.Response:
        response = self._error(refusal.status, refusal.code, refusal.message, ticket)
        response.headers["Retry-After"] = str(refusal.retry_after)
        return response

    def _error(
        self, status: int, code: str, message: str, ticket: Ticket | None = None, close: bool = False
    ) -> web.Response:
        kind = "invalid_request_error" if status < 500 else "server_error"
        error = {"message": message, "type": kind, "param": None, "code": code}
        response = self._json(status, msgspec.json.encode({"error": error}))
        if ticket is not None:
            response.headers[RECEIPT_HEADER] = ticket.request
        if close:
            response.force_close()
        return response

    def _json(self, status: int, data: bytes) -> web.Response:
        response = web.Response(status=status, body=data, content_type="application/json")
        if self._control.closing():
            response.force_close()
        return response


def _cut(request: web.BaseRequest) -> Sent:
    if request.transport is not None:
        request.transport.abort()
    return Sent(keep_alive=False)


def _outcome(relay: Relay, ticket: Ticket) -> Outcome | None:
    """What the engine said became of the request; None when it said nothing that can be believed."""
    data = relay.outcome
    if data is None:
        return None
    try:
        outcome = decode_outcome(data)
    except msgspec.MsgspecError as error:
        log.error("the engine's outcome can't be read: %s", error)
        return None
    if outcome.request != ticket.request:
        log.error("the engine's outcome is of another request")
        return None
    return outcome

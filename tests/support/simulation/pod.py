"""One pod: the real sidecar (control, policy source, the request path's decision) and an engine process beside it.

Containers are started with the very arguments that the operator rendered, parsed by the product's own parsers. What
`main.py` wires to ports is wired here to the simulated network.
"""

from __future__ import annotations

import asyncio
import base64
import random
import shutil
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web
from kvsteward_contract import wire
from kvsteward_contract.directive import Outcome, decode_directive
from kvsteward_contract.observation import encode_observation
from kvsteward_contract.policy import IdentitySource
from kvsteward_engine.errors import QueueFull
from kvsteward_engine.main import make_parser
from kvsteward_engine.sequence import Finish, SamplingParams
from kvsteward_sidecar import settings as sidecar_settings
from kvsteward_sidecar.admin import AdminToken
from kvsteward_sidecar.body import Body
from kvsteward_sidecar.control import Control
from kvsteward_sidecar.engine_link import EngineAddress
from kvsteward_sidecar.kube import ApiServer
from kvsteward_sidecar.latch import LatchFile
from kvsteward_sidecar.policy_source import KubernetesSource
from kvsteward_sidecar.proxy import Proxy
from kvsteward_sidecar.receipts import Receipts
from kvsteward_sidecar.routes import Route
from kvsteward_sidecar.tenants import TenantFiles
from kvsteward_sidecar.ticket import Ending, Ticket
from multidict import CIMultiDict

from . import api_server
from .clock import SimulatedLoop
from .engine_process import EngineGone, EngineProcess, Hears, Match, host_of
from .network import Network, Reply, Request, Server, Session
from .trace import Trace

MOUNTS = {"/run/kvsteward": "run", "/etc/kvsteward/secret": "secret"}


class Incoming:
    """As much of a web request as the proxy looks at before it decides."""

    method, raw_path = "POST", "/v1/completions"
    transport = protocol = None  # no connection

    def __init__(self, asked: Asked, model: str, tokens: list[int]) -> None:
        self.asked, self.tokens = asked, tokens
        self.headers = asked.headers
        self.raw_headers = tuple((name.encode(), value.encode()) for name, value in asked.headers.items())
        self._body = msgspec.json.encode(asked.body(model))
        self.content_length = len(self._body)
        self.content = self

    def is_eof(self) -> bool:
        return True

    def read_nowait(self) -> bytes:
        return self._body


@dataclass(frozen=True, slots=True)
class World:
    """What all processes of a simulation share."""

    loop: SimulatedLoop
    chance: random.Random
    trace: Trace
    network: Network
    folder: Path
    tenant_keys: Path
    matched: Callable[[Match], None]
    tell: Callable[[str, str], None]  # what happened in a pod, one of Observer's words for it; which pod


class Sidecar:
    """One sidecar process."""

    def __init__(self, world: World, pod: Pod, started: sidecar_settings.Settings) -> None:
        self.pod, self.started = pod, started
        self._world = world
        self.alive = True
        session: Any = Session(world.network, pod.name, {"127.0.0.1": host_of(pod.name)})
        address = EngineAddress(started.engine, sidecar_settings.engine_token(started))
        self.control = Control(
            session,
            address,
            sidecar_settings.read_salt(started.salt_file),
            TenantFiles(IdentitySource.API_KEY, started.tenant_keys, started.gateway_secret_file),
            LatchFile(started.state_dir / wire.LATCH_FILE),
            Receipts(write=lambda _: None),
            clock=world.loop.unix,
            monotonic=world.loop.time,
            closing_seconds=started.closing_seconds,
        )
        self.source = KubernetesSource(
            self.control.policy,
            session,
            ApiServer(f"https://{api_server.HOST}:{api_server.PORT}", None, False),
            namespace=started.namespace,
            policy=started.policy,
            config_map=started.document,
        )
        self.proxy = SidecarProxy(self.control, address, self.forward)
        self._token = AdminToken(started.admin_token_file)
        self.server = Server(self._handle)
        world.network.servers[(pod.ip, wire.ADMIN_PORT)] = self.server
        self.requests: set[asyncio.Task[Any]] = set()
        loop = world.loop
        self._tasks = [loop.create_task(self.control.run()), loop.create_task(self.source.run())]

    def kill(self) -> None:
        """SIGKILL: requests under way break, nothing is told or stored."""
        self.alive = False
        for task in [*self._tasks, *self.requests]:
            task.cancel()
        self.server.stop()

    @property
    def failures(self) -> list[BaseException]:
        """Tasks that ended by themselves."""
        ended = [task for task in self._tasks if task.done() and not task.cancelled()]
        return [task.exception() or RuntimeError("ended") for task in ended]

    @property
    def ready(self) -> bool:
        return self.alive and self.control.refusal() is None

    async def _handle(self, request: Request) -> Reply:
        """The admin port."""
        if self._token.refusal(request.headers.getall("Authorization", [])):
            return Reply(401)
        match request.method, request.path:
            case "GET", "/v1/observation":
                return Reply(200, encode_observation(self.control.observation()))
            case "POST", "/v1/cold":
                self.control.hold_cold()
                self._world.tell("held", self.pod.name)
            case "DELETE", "/v1/cold":
                self.control.release()
                self._world.tell("released", self.pod.name)
            case _:
                return Reply(404)
        return Reply(200, msgspec.json.encode({"latch": self.control.latch, "epoch": self.control.permission.epoch}))

    async def serve(self, asked: Asked, tokens: list[int]) -> None:
        """One request's way in and out; `tokens` grows as they come. Raises Refused and Broken."""
        request: Any = Incoming(asked, self.control.permission.model, tokens)
        response = await self.proxy.handle(request)
        if response.status != 200:
            raise Refused(response.status)

    async def forward(self, request: Incoming, ticket: Ticket) -> web.Response:
        """In place of `Proxy._forward`: asks the engine over no sockets; ends the ticket, whatever happens."""
        loop, network, asked = self._world.loop, self._world.network, request.asked
        ending, outcome, first, started = Ending.CANCELLED, None, None, loop.time()
        self.pod.admitted(ticket, asked)
        try:
            await asyncio.sleep(network.latency(self.pod.name, host_of(self.pod.name)))
            async with aclosing(self._engine(ticket, asked)) as deltas:
                async for tokens, finish, told in deltas:
                    first = first or loop.time()
                    outcome = told
                    request.tokens += tokens
                    if finish is not None:
                        ending = Ending.COMPLETED
            return web.Response()
        except EngineGone:
            ending = Ending.FAILED
            if not request.tokens:
                return web.Response(status=502)
            raise Broken from None
        except QueueFull:
            ending = Ending.REFUSED
            return web.Response(status=429)
        finally:
            if self.alive:
                self.control.finish(ticket, outcome, first - started if first else None, ending)

    async def _engine(
        self, ticket: Ticket, asked: Asked
    ) -> AsyncGenerator[tuple[list[int], Finish | None, Outcome | None], None]:
        engine = self.pod.engine
        if engine is None:
            raise EngineGone
        sampling = SamplingParams(max_tokens=asked.output, ignore_eos=True)
        directive = decode_directive(ticket.directive)
        async with aclosing(engine.generate(ticket.request, list(asked.prompt), sampling, directive)) as deltas:
            async for delta in deltas:
                yield delta


class SidecarProxy(Proxy):
    """The real proxy up to the decision; what follows goes to the simulated engine."""

    def __init__(self, control: Control, engine: EngineAddress, forward: Callable[..., Any]) -> None:
        super().__init__(control, engine)
        self._forward_to = forward

    async def _forward(
        self, request: Any, route: Route, body: Body, started: float, ticket: Ticket | None
    ) -> web.StreamResponse:
        response: web.StreamResponse = await self._forward_to(request, ticket)
        return response


class Refused(Exception):
    """An answer that says no; nothing was computed."""

    def __init__(self, status: int) -> None:
        super().__init__(str(status))
        self.status = status


class Broken(Exception):
    """The connection ended before the answer did."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a client sends."""

    tenant: str
    key: str
    session: str
    workload: str
    prompt: tuple[int, ...]
    output: int

    @property
    def headers(self) -> CIMultiDict[str]:
        return CIMultiDict(
            {
                "Authorization": f"Bearer {self.key}",
                wire.SESSION_HEADER: self.session,
                wire.WORKLOAD_HEADER: self.workload,
            }
        )

    def body(self, model: str) -> dict[str, Any]:
        return {"model": model, "prompt": list(self.prompt), "max_tokens": self.output, "temperature": 0}


class Pod:
    """A pod with its folder, which outlives restarts of its containers. `admitted` hears of each request let in."""

    def __init__(
        self,
        world: World,
        name: str,
        ip: str,
        template: dict[str, Any],
        admitted: Callable[[Pod, Ticket, Asked], None],
    ) -> None:
        self.name, self.ip = name, ip
        self._world, self._template = world, template
        self._admitted = admitted
        self.folder = world.folder / name
        self.sidecar: Sidecar | None = None
        self.engine: EngineProcess | None = None
        self.gone = False

    def mount(self, secret: dict[str, Any]) -> None:
        """The volumes, before the first container starts."""
        for folder in MOUNTS.values():
            (self.folder / folder).mkdir(parents=True)
        for key, value in secret["data"].items():
            (self.folder / "secret" / key).write_bytes(base64.b64decode(value))
        token = self.folder / "run" / wire.ENGINE_TOKEN_FILE
        token.write_text(f"{self._world.chance.getrandbits(128):032x}")

    def start_sidecar(self) -> None:
        arguments = self._template["spec"]["initContainers"][0]["args"]
        started = sidecar_settings.parse(["serve", *arguments])
        started = replace(
            started,
            engine_token_file=self._here(started.engine_token_file),
            salt_file=self._here(started.salt_file),
            admin_token_file=self._here(started.admin_token_file),
            state_dir=self._here(started.state_dir),
            tenant_keys=self._world.tenant_keys,
        )
        self.sidecar = Sidecar(self._world, self, started)
        self._world.trace.note(self.name, "sidecar started")

    def start_engine(self, loading: float) -> None:
        asked = make_parser().parse_args(["serve", *self._template["spec"]["containers"][0]["args"]])
        world = self._world
        confirmed, violated = (partial(world.tell, event, self.name) for event in ("confirmed", "violated"))
        hears = Hears(world.matched, confirmed, violated)
        self.engine = EngineProcess(
            world.loop, world.network, world.trace, world.chance, self.name, asked, hears, loading
        )

    def kill_sidecar(self) -> None:
        if self.sidecar is not None:
            self._world.trace.note(self.name, "sidecar killed")
            self.sidecar.kill()
            self.sidecar = None

    def kill_engine(self) -> None:
        if self.engine is not None:
            self._world.trace.note(self.name, "engine killed")
            self.engine.kill()
            self.engine = None

    def remove(self) -> None:
        """The pod is gone, its folder too."""
        self.gone = True
        self.kill_sidecar()
        self.kill_engine()
        shutil.rmtree(self.folder, ignore_errors=True)  # not there if the pod never started

    @property
    def ready(self) -> bool:
        return self.sidecar is not None and self.sidecar.ready

    def admitted(self, ticket: Ticket, asked: Asked) -> None:
        self._admitted(self, ticket, asked)

    def _here(self, path: Path | None) -> Path:
        assert path is not None
        for mount, folder in MOUNTS.items():
            if path.is_relative_to(mount):
                return self.folder / folder / path.relative_to(mount)
        raise AssertionError(f"the simulation has no volume at {path}")

"""`kvsteward-sidecar serve`: wires the parts together, opens the ports, and stops without cutting anybody off.

Nothing here waits for the engine: ports open at once, requests get 503 until the engine is ready, and run cold until a
policy is known.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from contextlib import AsyncExitStack

import aiohttp
import uvloop
from aiohttp import web
from kvsteward_contract import wire
from kvsteward_contract.policy import IdentitySource

from .admin import AdminToken, admin_app
from .clients import Discreet
from .control import Control
from .drain import drain_app
from .engine_link import EngineAddress
from .kube import ApiServer
from .latch import LatchFile
from .memory import settle
from .policy_source import FileSource, KubernetesSource
from .proxy import Proxy
from .receipts import Receipts
from .settings import Settings, StartError, engine_token, parse, read_salt
from .tenants import TenantFiles

log = logging.getLogger("kvsteward_sidecar")

LOOPBACK = "127.0.0.1"
BACKLOG = 1024  # connections that wait to be accepted: clients come in bursts
CUT_SECONDS = 1.0  # what is still open when the drain's time is over gets this long to be closed


def main(arguments: list[str] | None = None) -> None:
    """Exit status 0 after a stop that was asked for, 2 when it can't start, 1 when a part of it failed."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    try:
        settings = parse(arguments)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(settings))
    except StartError as error:
        print(f"kvsteward-sidecar: {error}", file=sys.stderr)
        sys.exit(2)


async def serve(settings: Settings) -> None:
    """Until SIGTERM or SIGINT, and through the drain they start. Raises StartError."""
    stop, again = asyncio.Event(), asyncio.Event()

    def asked() -> None:
        (again if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    for one in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(one, asked)
    async with AsyncExitStack() as stack:
        connector = aiohttp.TCPConnector(limit=0)
        session = await stack.enter_async_context(
            aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())
        )
        address = EngineAddress(settings.engine, engine_token(settings))
        control = Control(
            session,
            address,
            read_salt(settings.salt_file),
            TenantFiles(IdentitySource.API_KEY, settings.tenant_keys, settings.gateway_secret_file),
            LatchFile(settings.state_dir / wire.LATCH_FILE),
            Receipts(),
            clock=time.time,
            monotonic=time.monotonic,
            closing_seconds=settings.closing_seconds,
        )
        source = _source(settings, control, session)
        ports = await stack.enter_async_context(AsyncExitStack())
        serving = await _open(settings, control, address, ports)
        parts = [asyncio.create_task(control.run()), asyncio.create_task(source.run())]
        settle()
        waiting = asyncio.create_task(stop.wait())
        done, _ = await asyncio.wait([*parts, waiting], return_when=asyncio.FIRST_COMPLETED)
        if waiting in done:
            log.info("stopping: %d in flight may finish within %d s", control.in_flight, settings.drain_seconds)
            await _drained(control, settings.drain_seconds, again)
        serving.clear()
        await ports.aclose()  # what is left is cut now, so that the last receipts are settled after it
        await control.settle()
        for part in parts:
            part.cancel()
        for result in await asyncio.gather(*parts, return_exceptions=True):
            if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
                raise result


async def _drained(control: Control, seconds: float, again: asyncio.Event) -> None:
    """The drain, or a second signal, whichever is first."""
    ends = [asyncio.create_task(control.drain.run(seconds)), asyncio.create_task(again.wait())]
    _, pending = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()


def _source(settings: Settings, control: Control, session: aiohttp.ClientSession) -> FileSource | KubernetesSource:
    """Raises StartError: outside a pod, or when a file's first reading gives no policy."""
    if settings.policy_file is None:
        try:
            server = ApiServer.in_cluster(os.environ)
        except ValueError as error:
            raise StartError(str(error)) from None
        return KubernetesSource(
            control.policy,
            session,
            server,
            namespace=settings.namespace,
            policy=settings.policy,
            config_map=settings.document,
        )
    source = FileSource(control.policy, settings.policy_file)
    source.look()
    if control.policy.document is None:
        raise StartError("; ".join(control.policy.problems))
    return source


async def _open(
    settings: Settings, control: Control, address: EngineAddress, stack: AsyncExitStack
) -> asyncio.Event:
    """Opens the three ports, traffic last; the event is set while the traffic port is open. Raises StartError."""
    serving = asyncio.Event()
    admin = admin_app(control, AdminToken(settings.admin_token_file), serving.is_set)
    drain = drain_app(control.drain, lambda: control.in_flight, settings.drain_seconds)
    proxy = Proxy(control, address)
    stack.callback(proxy.close)
    await _listen(_app_runner(admin), settings.host, settings.admin_port, "admin", stack)
    await _listen(_app_runner(drain), LOOPBACK, settings.drain_port, "drain", stack)
    traffic = web.ServerRunner(proxy.server(), shutdown_timeout=CUT_SECONDS)
    await _listen(traffic, settings.host, settings.port, "traffic", stack)
    serving.set()
    return serving


def _app_runner(app: web.Application) -> web.AppRunner:
    """Of a port that only probes, scrapers, the operator and the pod itself have business with: small heads, soon."""
    return web.AppRunner(
        app,
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=CUT_SECONDS,
        logger=Discreet(),
        keepalive_timeout=75.0,
        max_headers=64,
        max_field_size=2048,
    )


async def _listen(runner: web.BaseRunner, host: str, port: int, name: str, stack: AsyncExitStack) -> None:
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    try:
        await web.TCPSite(runner, host, port, backlog=BACKLOG).start()
    except OSError as error:
        raise StartError(f"the {name} port {host}:{port} can't be opened: {error.strerror}") from None
    log.info("%s on %s:%d", name, *runner.addresses[0][:2])


if __name__ == "__main__":
    main()

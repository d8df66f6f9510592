"""The operator's two ports: liveness for the kubelet, metrics for Prometheus."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from .telemetry import LIVE_SECONDS, Telemetry


def liveness(telemetry: Telemetry) -> web.Application:
    """`/healthz`: 200 while workers get to their work."""

    async def healthz(_: web.Request) -> web.Response:
        age = telemetry.age()
        text = f"a worker last finished a turn {age:.0f} s ago; {LIVE_SECONDS:.0f} s is the limit\n"
        return web.Response(status=200 if telemetry.alive() else 503, text=text)

    app = web.Application()
    app.router.add_get("/healthz", healthz)
    return app


def metrics(telemetry: Telemetry) -> web.Application:
    async def show(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(telemetry.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.router.add_get("/metrics", show)
    return app


@asynccontextmanager
async def serving(app: web.Application, host: str | None, port: int) -> AsyncIterator[int]:
    """Serves while the context lasts; gives the port, which is another one if 0 was asked for. `host` None: all."""
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        await site.start()
        # With 0 each family has a port of its own; IPv4 addresses are the shorter ones.
        yield int(min(runner.addresses, key=len)[1])
    finally:
        await runner.cleanup()

"""`kvsteward-engine serve`: one process from its flags to its exit code.

The port answers from the first moment (`/health` says loading), while weights load in a thread. SIGTERM drains.
"""

import argparse
import asyncio
import concurrent.futures
import logging
import os
import signal
import threading
from collections.abc import Callable

import uvloop
from aiohttp import web

from kvsteward_engine.auth import read_token
from kvsteward_engine.checkpoint import describe
from kvsteward_engine.cpus import usable_cpus, wait_without_spinning
from kvsteward_engine.errors import EngineFailed, StartError
from kvsteward_engine.load import Wanted, load, sizes
from kvsteward_engine.metrics import Metrics
from kvsteward_engine.server import make_app
from kvsteward_engine.service import Loaded, Service

log = logging.getLogger(__name__)
TOKEN_PATIENCE_SECONDS = 30.0  # the sidecar writes the token as it starts, beside this process
IDLE_CONNECTION_SECONDS = 120.0  # longer than the sidecar keeps one, so that it is the side that closes
POLL_SECONDS = 0.05
FAILED = 1


def serve(asked: argparse.Namespace, say: Callable[[str], None]) -> int:
    """Runs until SIGTERM, SIGINT or a failure; ends the process. `say` is told when the port is open and when the
    engine serves. Raises `StartError`."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    wait_without_spinning()
    wanted = wanted_of(asked)
    # What is cheap to find out is found out before the port opens and torch loads.
    sizes(wanted, describe(wanted.model))
    token = read_token(asked.token_file, TOKEN_PATIENCE_SECONDS) if asked.token_file else None
    code = uvloop.run(_serve(asked, wanted, token, say))
    logging.shutdown()
    # The threads that load and compute may be deep inside torch; the interpreter's end would pull it from under them.
    os._exit(code)


def wanted_of(asked: argparse.Namespace) -> Wanted:
    """The flags that say what to load."""
    return Wanted(
        model=asked.model,
        name=asked.served_model_name or asked.model.resolve().stem,
        model_revision=asked.model_revision,
        tokenizer_revision=asked.tokenizer_revision,
        dtype=asked.dtype,
        device=asked.device,
        threads=asked.threads or usable_cpus(),
        deterministic=asked.deterministic,
        capacity=asked.capacity,
        block_tokens=asked.block_tokens,
        max_tokens=asked.max_tokens,
        max_concurrent=asked.max_concurrent,
        max_waiting=asked.max_waiting,
        prefill_chunk=asked.prefill_chunk,
    )


async def _serve(asked: argparse.Namespace, wanted: Wanted, token: bytes | None, say: Callable[[str], None]) -> int:
    service = Service(wanted.name, token, Metrics())
    loop = asyncio.get_running_loop()
    stop, failed = asyncio.Event(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)

    def on_failure(reason: str) -> None:
        log.error("the engine serves no more: %s", reason)
        loop.call_soon_threadsafe(failed.set)

    runner = web.AppRunner(
        make_app(service),
        handler_cancellation=True,
        access_log=None,
        keepalive_timeout=IDLE_CONNECTION_SECONDS,
        shutdown_timeout=1.0,
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, asked.host, asked.port, backlog=1024)
        try:
            await site.start()
        except OSError as error:
            raise StartError(f"can't listen on {asked.host} port {asked.port}: {error.strerror}") from error
        say(f"listening on {site.name}")
        loading = asyncio.ensure_future(_load(wanted, on_failure))
        await _first(loading, stop, failed)
        if loading.done():
            service.ready(loading.result())
            say(f"ready {site.name}")
            await _first(stop, failed)
        if failed.is_set():
            service.fail()
            return FAILED
        service.drain()
        await _drained(service, asked.drain_seconds, failed)
        return 0
    finally:
        service.close()
        await runner.cleanup()


async def _load(wanted: Wanted, on_failure: Callable[[str], None]) -> Loaded:
    """`load` in a thread that does not hold up the process's end. Raises `StartError`."""
    done: concurrent.futures.Future[Loaded] = concurrent.futures.Future()

    def work() -> None:
        try:
            done.set_result(load(wanted, on_failure))
        except BaseException as error:  # noqa: BLE001 - raised again below
            done.set_exception(error)

    threading.Thread(target=work, name="load", daemon=True).start()
    try:
        return await asyncio.wrap_future(done)
    except (EngineFailed, MemoryError, RuntimeError) as error:  # torch reports most of what it meets so
        message = str(error).partition("\n")[0] or type(error).__name__
        raise StartError(f"{wanted.model} could not be loaded: {message}") from error


async def _first(*waited: asyncio.Future[Loaded] | asyncio.Event) -> None:
    """Returns when the first of them is done or set."""
    tasks = [asyncio.ensure_future(one.wait()) if isinstance(one, asyncio.Event) else one for one in waited]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task, one in zip(tasks, waited, strict=True):
        if isinstance(one, asyncio.Event):
            task.cancel()


async def _drained(service: Service, seconds: float, failed: asyncio.Event) -> None:
    """Waits until nothing is in flight; after `seconds` what is left is cut, and its streams end as errors."""
    deadline = asyncio.get_running_loop().time() + seconds
    while service.in_flight and not failed.is_set():
        if asyncio.get_running_loop().time() >= deadline:
            log.warning("%d requests were cut after %d s of draining", service.in_flight, seconds)
            return
        await asyncio.sleep(POLL_SECONDS)

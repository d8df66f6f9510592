"""`kvsteward-operator run` and `kvsteward-operator make-key`."""

import argparse
import asyncio
import base64
import json
import logging
import secrets
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import errors
from .api import Api, KubernetesApi
from .index import Index, Key
from .kinds import SECRET
from .login import SERVICE_ACCOUNT, NoLogin, find_login
from .ports import liveness, metrics, serving
from .reconcile import Reconciler
from .resync import Resync
from .scrape import SidecarScraper
from .served_schema import UnknownSchema, check_schema
from .settings import Settings
from .telemetry import Telemetry
from .watches import Watches, WatchesEnded
from .workers import HEARTBEAT, WORKERS, work
from .workqueue import WorkQueue

log = logging.getLogger(__name__)

KEY_NAME = "key"  # of the operator key in its Secret, and so of the file it is mounted as
KEY_BYTES = 32
OPERATOR_LABELS = {"app.kubernetes.io/name": "kvsteward-operator"}


class BadStart(Exception):
    """The command line, or what it names, can't be used; the text is for whoever started the operator."""


@dataclass(frozen=True, slots=True)
class Ports:
    liveness: int
    metrics: int


def main(argv: Sequence[str] | None = None) -> None:
    arguments = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("kopf").setLevel(logging.WARNING)
    logging.getLogger("kopf._core.reactor.running").setLevel(logging.ERROR)  # it isn't the one to handle signals
    logging.getLogger("kopf._cogs.clients").setLevel(logging.CRITICAL)  # each try of each watch; our own calls say it
    try:
        asyncio.run(arguments.run(arguments))
    except (BadStart, NoLogin, UnknownSchema, WatchesEnded, errors.ApiError) as error:
        sys.exit(f"kvsteward-operator: {error}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvsteward-operator", description="Turns KVCachePolicy resources into pods.")
    commands = parser.add_subparsers(required=True)

    run = commands.add_parser("run", help="watch policies and see to them")
    scope = run.add_mutually_exclusive_group(required=True)
    scope.add_argument("--namespace", action="append", default=[], help="watch this namespace; may be repeated")
    scope.add_argument("--cluster", action="store_true", help="watch all namespaces")
    run.add_argument("--engine-image", required=True, help="engine image of policies that name none")
    run.add_argument("--sidecar-image", required=True)
    run.add_argument("--operator-key-file", required=True, type=Path, help="key that admin tokens are derived from")
    run.add_argument(
        "--admin-from", default="[]", help="JSON list of NetworkPolicyPeer that may reach the pods' admin port as well"
    )
    run.add_argument("--liveness-port", type=int, default=8080)
    run.add_argument("--metrics-port", type=int, default=9090)
    run.set_defaults(run=_run)

    make = commands.add_parser("make-key", help="create the Secret with the operator's key, unless it is there")
    make.add_argument("--secret", required=True, help="name of the Secret")
    make.add_argument("--namespace", default="", help="of the Secret; default: this pod's")
    make.set_defaults(run=_make_key)
    return parser


async def _run(arguments: argparse.Namespace) -> None:
    settings = Settings(
        engine_image=arguments.engine_image,
        sidecar_image=arguments.sidecar_image,
        operator_key=read_key(arguments.operator_key_file),
        namespaces=tuple(arguments.namespace),
        admin_peers=(*own_peer(SERVICE_ACCOUNT), *read_peers(arguments.admin_from)),
    )
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with KubernetesApi(find_login()) as api:
        await operate(api, settings, Ports(arguments.liveness_port, arguments.metrics_port), stop)


async def operate(api: Api, settings: Settings, ports: Ports, stop: asyncio.Event) -> None:
    """The whole operator, until `stop` is set. Raises UnknownSchema, ApiError, and what kopf can't go on from."""
    await check_schema(api)
    telemetry, index, queue = Telemetry(time.monotonic), Index(), WorkQueue(time.monotonic)

    def uid_of(key: Key) -> str:
        policy = index.policy(key)
        return str(policy["metadata"]["uid"]) if policy is not None else ""

    async with AsyncExitStack() as stack:
        live = await stack.enter_async_context(serving(liveness(telemetry), None, ports.liveness))
        measured = await stack.enter_async_context(serving(metrics(telemetry), None, ports.metrics))
        scraper = await stack.enter_async_context(SidecarScraper(settings.operator_key, uid_of, queue.add, telemetry))
        reconciler = Reconciler(api, index, scraper, settings, time.time, telemetry)
        watches = Watches(index, queue.add, settings.namespaces)
        resync = Resync(api, index, settings.namespaces, queue.add, watches.restart, telemetry)
        await resync.fill()
        queue.add(HEARTBEAT)
        tasks: list[asyncio.Task[Any]] = [
            asyncio.create_task(work(queue, reconciler, telemetry), name=f"worker {n}") for n in range(WORKERS)
        ]
        tasks += [
            asyncio.create_task(resync.run(), name="resync"),
            asyncio.create_task(watches.run(), name="watches"),
        ]
        scope = ", ".join(settings.namespaces) or "all namespaces"
        log.info("watching %s; liveness on port %d, metrics on port %d", scope, live, measured)
        try:
            told = asyncio.create_task(stop.wait(), name="told to stop")
            tasks.append(told)
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done - {told}:  # none of them ends but by a failure
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _make_key(arguments: argparse.Namespace) -> None:
    namespace = arguments.namespace or own_namespace(SERVICE_ACCOUNT)
    if not namespace:
        raise BadStart("make-key: this is no pod, so say --namespace")
    async with KubernetesApi(find_login()) as api:
        made = await make_key(api, namespace, arguments.secret)
    print(f"Secret {namespace}/{arguments.secret} {'created' if made else 'is there already'}")


async def make_key(api: Api, namespace: str, name: str) -> bool:
    """Creates the Secret with a new operator key. False if there is one, which stays as it is. Raises ApiError."""
    key = base64.b64encode(secrets.token_bytes(KEY_BYTES)).decode()
    body = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name, "namespace": namespace, "labels": OPERATOR_LABELS},
        "type": "Opaque",
        "data": {KEY_NAME: key},
    }
    try:
        await api.create(SECRET, body)
    except errors.AlreadyExists:
        return False
    return True


def read_key(file: Path) -> bytes:
    """Raises BadStart."""
    try:
        key = file.read_bytes()
    except OSError as error:
        raise BadStart(f"--operator-key-file {file} cannot be read: {error.strerror}") from None
    if len(key) < KEY_BYTES:
        raise BadStart(f"--operator-key-file {file} holds {len(key)} bytes; at least {KEY_BYTES} are needed")
    return key


def read_peers(text: str) -> tuple[Mapping[str, Any], ...]:
    """Raises BadStart."""
    try:
        peers = json.loads(text)
    except ValueError as error:
        raise BadStart(f"--admin-from is no JSON: {error}") from None
    if not isinstance(peers, list) or not all(isinstance(peer, dict) and peer for peer in peers):
        raise BadStart("--admin-from must be a JSON list of NetworkPolicyPeer objects")
    return tuple(peers)


def own_namespace(folder: Path) -> str:
    """The namespace of this pod, "" outside of one."""
    file = folder / "namespace"
    return file.read_text().strip() if file.exists() else ""


def own_peer(folder: Path) -> tuple[Mapping[str, Any], ...]:
    """The operator's pods, as the sender in a NetworkPolicy; none outside of a pod."""
    namespace = own_namespace(folder)
    if not namespace:
        return ()
    return (
        {
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
            "podSelector": {"matchLabels": OPERATOR_LABELS},
        },
    )


if __name__ == "__main__":
    main()

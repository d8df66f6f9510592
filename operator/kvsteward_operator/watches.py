"""kopf's part: it keeps watches over the policies and everything that carries our labels, and feeds the index.

Its handlers only enqueue: kopf never repeats a failed `on.event` handler, and everything else it offers (change
handlers, timers, daemons) would put finalizers or annotations on objects.
"""

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any

import kopf

from .api import Object
from .index import Index, Key, policy_of
from .kinds import CHILDREN, POLICY, Kind
from .login import NoLogin, find_login
from .objects.naming import SELECTOR

log = logging.getLogger(__name__)

SERVER_SECONDS = 240  # the API server ends a watch by then, kopf starts the next
INACTIVITY_SECONDS = 70.0  # bookmarks come each minute: silence for longer is a dead connection


class WatchesEnded(Exception):
    """Nothing is watched any more: end the process, so that another one starts."""


class Watches:
    """`enqueue(key)` is called whenever something of a policy has changed, in the loop that `run` runs in.

    kopf has a thread and a loop of its own: when it stops, it cancels every task of its loop that is younger than
    itself, ours among them.
    """

    def __init__(self, index: Index, enqueue: Callable[[Key], None], namespaces: tuple[str, ...]) -> None:
        self._index, self._enqueue, self._namespaces = index, enqueue, namespaces
        self._stop = threading.Event()

    def restart(self) -> None:
        """Drops every watch and starts anew, with fresh lists."""
        self._stop.set()

    async def run(self) -> None:
        """Until cancelled. Raises what kopf can't go on from, and WatchesEnded when it gives up without a word."""
        try:
            while True:
                self._stop.clear()
                await asyncio.to_thread(asyncio.run, self._kopf(asyncio.get_running_loop()))
                if not self._stop.is_set():
                    raise WatchesEnded("the watches have ended by themselves")
                log.warning("the watches are started anew")
        finally:
            self._stop.set()

    async def _kopf(self, loop: asyncio.AbstractEventLoop) -> None:
        await kopf.operator(
            registry=self._registry(loop),
            settings=settings(),
            standalone=True,
            clusterwide=not self._namespaces,
            namespaces=self._namespaces,
            stop_flag=self._stop,
        )

    def _registry(self, loop: asyncio.AbstractEventLoop) -> kopf.OperatorRegistry:
        registry = kopf.OperatorRegistry()
        kopf.on.login(registry=registry)(_login)
        for kind in (POLICY, *CHILDREN):
            group, _, version = kind.api_version.rpartition("/")
            kopf.on.event(group, version, kind.plural, registry=registry, id=kind.plural)(self._handler(kind, loop))
        return registry

    def _handler(self, kind: Kind, loop: asyncio.AbstractEventLoop) -> Any:
        async def seen(event: Any, **_: Any) -> None:
            loop.call_soon_threadsafe(self.see, kind, event["type"], event["object"])

        return seen

    def see(self, kind: Kind, change: str | None, body: Object) -> None:
        """One watch event; `change` None for what was listed at the start."""
        body = {**body, "apiVersion": kind.api_version, "kind": kind.name}
        changed = self._index.remove(body) if change == "DELETED" else self._index.put(body)
        if changed and (key := policy_of(body)) is not None:
            self._enqueue(key)


def settings() -> kopf.OperatorSettings:
    """What keeps kopf from writing anything, and from trusting a silent connection."""
    chosen = kopf.OperatorSettings()
    chosen.posting.enabled = False
    chosen.posting.loggers = False
    chosen.scanning.disabled = True  # namespaces and resources are those at the start
    chosen.process.ultimate_exiting_timeout = 20
    chosen.watching.server_timeout = SERVER_SECONDS
    chosen.watching.client_timeout = SERVER_SECONDS + 30
    chosen.watching.connect_timeout = 10
    chosen.watching.inactivity_timeout = INACTIVITY_SECONDS
    chosen.networking.request_timeout = 60
    chosen.networking.error_backoffs = (1, 1, 2, 2, 3, 3, 5, 5, 5, 5)  # soon back after the API server is
    for kind in CHILDREN:
        group, _, version = kind.api_version.rpartition("/")
        chosen.watching.label_selectors[group, version, kind.plural] = SELECTOR
    return chosen


def _login(**_: Any) -> kopf.ConnectionInfo:
    try:
        return find_login().connection
    except (NoLogin, OSError) as error:
        raise kopf.LoginError(str(error)) from None

"""kopf's part: it keeps watches over the policies and everything that carries our labels, and feeds the index.

Its handlers only enqueue: kopf never repeats a failed `on.event` handler, and everything else it offers (change
handlers, timers, daemons) would put finalizers or annotations on objects.
"""

import asyncio
import logging
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


class Watches:
    """`enqueue(key)` is called whenever something of a policy has changed."""

    def __init__(self, index: Index, enqueue: Callable[[Key], None], namespaces: tuple[str, ...]) -> None:
        self._index, self._enqueue, self._namespaces = index, enqueue, namespaces
        self._stop = asyncio.Event()
        self._again = False

    def restart(self) -> None:
        """Drops every watch and starts anew, with fresh lists."""
        self._again = True
        self._stop.set()

    async def run(self) -> None:
        """Until the process is told to end (SIGTERM, SIGINT). Raises what kopf can't go on from."""
        while True:
            self._stop, self._again = asyncio.Event(), False
            await kopf.operator(
                registry=self._registry(),
                settings=settings(),
                standalone=True,
                clusterwide=not self._namespaces,
                namespaces=self._namespaces,
                stop_flag=self._stop,
            )
            if not self._again:
                return
            log.warning("the watches are started anew")

    def _registry(self) -> kopf.OperatorRegistry:
        registry = kopf.OperatorRegistry()
        kopf.on.login(registry=registry)(_login)
        for kind in (POLICY, *CHILDREN):
            group, _, version = kind.api_version.rpartition("/")
            kopf.on.event(group, version, kind.plural, registry=registry, id=kind.plural)(self._handler(kind))
        return registry

    def _handler(self, kind: Kind) -> Callable[..., None]:
        async def seen(event: Any, **_: Any) -> None:
            self.see(kind, event["type"], event["object"])

        return seen  # type: ignore[return-value]

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
    for kind in CHILDREN:
        group, _, version = kind.api_version.rpartition("/")
        chosen.watching.label_selectors[group, version, kind.plural] = SELECTOR
    return chosen


def _login(**_: Any) -> kopf.ConnectionInfo:
    try:
        return find_login().connection
    except (NoLogin, OSError) as error:
        raise kopf.LoginError(str(error)) from None

"""Connections of clients: what a request that isn't complete may cost, and that nothing of it reaches a log.

aiohttp lets a client take an hour and two megabytes for one head, and quotes what it could not read, credentials and
prompts included, in its log. Anyone may connect, so both end here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import MutableMapping
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

HEAD_SECONDS = 20.0  # for a request's head, from its first byte
MAX_HEAD = 65_536  # bytes


class Discreet(logging.LoggerAdapter[logging.Logger]):
    """A logger for aiohttp's servers that leaves out what quotes a client's bytes; the client is told by its answer."""

    def __init__(self) -> None:
        super().__init__(logging.getLogger("aiohttp.server"))

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        if isinstance(kwargs.get("exc_info"), HttpProcessingError):
            return
        super().log(level, msg, *args, **kwargs)

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        return msg, kwargs


class Server(web.Server):
    """A server whose connections are `Connection`s. `options` are aiohttp's for a connection."""

    def __init__(self, handler: Any, *, handler_cancellation: bool, **options: Any) -> None:
        super().__init__(handler, handler_cancellation=handler_cancellation)
        self._options = {"logger": Discreet(), **options}

    def __call__(self) -> web.RequestHandler:
        return Connection(self, loop=self._loop, **self._options)


class Connection(web.RequestHandler):
    """Closes when a head takes longer than HEAD_SECONDS or more than MAX_HEAD bytes; idle ones are left alone."""

    __slots__ = ("_body", "_head", "_late", "promised")

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.promised = False  # its last answer said that it goes on: its client may be sending the next request
        self._body: Any = None  # of the newest request; what comes before it is at its end is no head
        self._head = 0  # bytes of a head that came so far, but for those that shared a read with what was before it
        self._late: asyncio.TimerHandle | None = None

    def data_received(self, data: bytes) -> None:
        requests, in_body = self._request_count, self._body is not None and not self._body.is_eof()
        super().data_received(data)
        if self._request_count != requests:
            self._body = self._messages[-1][1] if self._messages else None
            self._forget_head()
        elif data and not in_body and not self._upgraded:
            self._head += len(data)
            if self._head > MAX_HEAD:
                self.force_close()
            elif self._late is None:
                self._late = self._loop.call_later(HEAD_SECONDS, self._too_late)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._forget_head()
        super().connection_lost(exc)

    def _too_late(self) -> None:
        self._late = None
        if self._current_request is not None:  # its answer is on the way
            self._late = self._loop.call_later(HEAD_SECONDS, self._too_late)
        else:
            self.force_close()

    def _forget_head(self) -> None:
        self._head = 0
        if self._late is not None:
            self._late.cancel()
            self._late = None


def promise(request: web.BaseRequest, goes_on: bool) -> None:
    """Notes what an answer said of its connection."""
    if isinstance(request.protocol, Connection):
        request.protocol.promised = goes_on


def promised(request: web.BaseRequest) -> bool:
    """Whether the answer before this request said that the connection goes on."""
    return isinstance(request.protocol, Connection) and request.protocol.promised

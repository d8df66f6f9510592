"""Clients of an OpenAI-compatible endpoint: real HTTP over keep-alive connections, and a record of how each answer
ended, so that a cut stream can never count as a complete one."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp


@dataclass(slots=True)
class Answer:
    """One request as its client saw it. Times are of time.time(), so that they compare with the pods' own."""

    status: int = 0  # 0: no response head came
    started: float = 0.0
    first: float = 0.0  # arrival of the first piece of text, 0 = none
    ended: float = 0.0
    text: str = ""
    pieces: int = 0
    done: bool = False  # `data: [DONE]` came, or the whole body of an answer that isn't a stream
    finish: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    receipt: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    error: str = ""  # what went wrong on the way, "" when nothing did
    raw: bytes = b""

    @property
    def complete(self) -> bool:
        return self.status == 200 and self.done and not self.error

    @property
    def looks_complete(self) -> bool:
        """What a client without suspicion believes: 200 and a clean end of the stream."""
        return self.status == 200 and not self.error

    @property
    def ttft(self) -> float:
        return self.first - self.started


@contextlib.asynccontextmanager
async def session(connections: int = 256) -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.TCPConnector(limit=connections)
    timeout = aiohttp.ClientTimeout(total=300, sock_connect=10)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as client:
        yield client


async def ask(
    client: aiohttp.ClientSession,
    url: str,
    prompt: str | Sequence[int] | list[dict[str, str]],
    *,
    model: str,
    key: str | None = None,
    max_tokens: int = 16,
    stream: bool = True,
    headers: dict[str, str] | None = None,
    started: asyncio.Event | None = None,
    **fields: Any,
) -> Answer:
    """One request: a list of messages goes to chat/completions, anything else to completions. Never raises for what
    the server or the network does; `started` is set at the first piece."""
    chat = bool(prompt) and isinstance(prompt, list) and isinstance(prompt[0], dict)
    body: dict[str, Any] = {"model": model, "max_tokens": max_tokens, "temperature": 0, "stream": stream, **fields}
    body["messages" if chat else "prompt"] = prompt
    if stream:
        body.setdefault("stream_options", {"include_usage": True})
    sent = dict(headers or {})
    if key is not None:
        sent["Authorization"] = f"Bearer {key}"
    answer = Answer(started=time.time())
    try:
        path = "/v1/chat/completions" if chat else "/v1/completions"
        async with client.post(url + path, json=body, headers=sent) as response:
            answer.status, answer.headers = response.status, dict(response.headers)
            answer.receipt = response.headers.get("X-KV-Receipt", "")
            if response.status == 200 and stream:
                await _read_stream(response, answer, started)
            else:
                answer.raw = await response.read()
                if response.status == 200:
                    _read_whole(answer)
    except (aiohttp.ClientError, TimeoutError, ConnectionError, ValueError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    answer.ended = time.time()
    return answer


async def _read_stream(response: aiohttp.ClientResponse, answer: Answer, started: asyncio.Event | None) -> None:
    async for line in response.content:
        answer.raw += line
        if not line.startswith(b"data: "):
            continue
        data = line[6:].strip()
        if data == b"[DONE]":
            answer.done = True
            continue
        event = json.loads(data)
        if "error" in event:
            answer.error = str(event["error"])
            continue
        _usage(event.get("usage"), answer)
        for choice in event.get("choices", ()):
            piece = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
            answer.finish = choice.get("finish_reason") or answer.finish
            if piece and not answer.first:
                answer.first = time.time()
                if started is not None:
                    started.set()
            answer.text += piece
            answer.pieces += bool(piece)


def _read_whole(answer: Answer) -> None:
    body = json.loads(answer.raw)
    choice = body["choices"][0]
    answer.text = choice.get("text") or (choice.get("message") or {}).get("content") or ""
    answer.finish = choice.get("finish_reason") or ""
    answer.first = time.time()
    answer.done = True
    _usage(body.get("usage"), answer)


def _usage(usage: dict[str, Any] | None, answer: Answer) -> None:
    if usage:
        answer.prompt_tokens = usage.get("prompt_tokens", 0)
        answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)


class Load:
    """A steady load: `streams` clients, each asking again as soon as it was answered, until `stop()`.

    `prompts(client, turn)` gives each request's prompt; answers are kept in the order they ended.
    """

    def __init__(self, url: str, *, model: str, streams: int, prompts: Any, keys: Sequence[str], **ask_fields: Any):
        self.url, self.model, self.streams, self.prompts, self.keys = url, model, streams, prompts, keys
        self.fields = ask_fields
        self.answers: list[Answer] = []
        self._stopping = asyncio.Event()
        self._ended = asyncio.Condition()
        self._tasks: list[asyncio.Task[None]] = []

    async def _client(self, number: int, client: aiohttp.ClientSession) -> None:
        turn = 0
        while not self._stopping.is_set():
            key = self.keys[number % len(self.keys)]
            prompt = self.prompts(number, turn)
            answer = await ask(client, self.url, prompt, model=self.model, key=key, **self.fields)
            async with self._ended:
                self.answers.append(answer)
                self._ended.notify_all()
            turn += 1
            if not self.answers[-1].complete:
                await asyncio.sleep(0.05)  # a server that refuses is not hammered

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["Load"]:
        async with session() as client:
            self._tasks = [asyncio.create_task(self._client(number, client)) for number in range(self.streams)]
            try:
                yield self
            finally:
                await self.stop()

    async def stop(self) -> None:
        """Let every client finish what it asked, and no more."""
        self._stopping.set()
        await asyncio.gather(*self._tasks)

    async def wait_for(self, count: int, timeout: float = 120) -> None:
        """Until that many more answers have ended. Raises TimeoutError."""
        goal = len(self.answers) + count
        async with asyncio.timeout(timeout), self._ended:
            await self._ended.wait_for(lambda: len(self.answers) >= goal)

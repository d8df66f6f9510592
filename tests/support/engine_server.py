"""The engine's HTTP server on a free port, over a real engine with a scripted runner."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import web
from kvsteward_contract import wire
from kvsteward_contract.directive import Directive, EnginePolicy, Outcome, Retention, decode_outcome, encode
from kvsteward_contract.identity import Identity
from kvsteward_engine.chat_template import ChatTemplate
from kvsteward_engine.core import EngineThread
from kvsteward_engine.metrics import Metrics
from kvsteward_engine.server import make_app
from kvsteward_engine.service import Loaded, Service
from kvsteward_engine.settings import EngineSettings
from kvsteward_engine.tokenizer import Tokenizer
from support.scripted_runner import ScriptedRunner
from support.tiny_model import CHAT_TEMPLATE, EOS, make_tokenizer

MODEL = "tiny"
TOKENIZER = Tokenizer(make_tokenizer(), ChatTemplate(CHAT_TEMPLATE, {}))
END = TOKENIZER.encode(EOS)[0]
SALTS = {"a": "aa" * 32, "b": "bb" * 32}


@dataclass
class Streamed:
    """A stream, taken apart."""

    status: int
    chunks: list[dict[str, Any]]  # the JSON events, in order
    events: list[bytes]  # all events, comments and [DONE] included

    @property
    def text(self) -> str:
        choices = [choice for chunk in self.chunks for choice in chunk["choices"]]
        return "".join(one["text"] if "text" in one else one["delta"].get("content", "") for one in choices)

    @property
    def outcome(self) -> Outcome:
        return decode_outcome(self.events[-2].removeprefix(wire.OUTCOME_COMMENT))


@dataclass
class Served:
    """A server under test, and the parts behind it."""

    url: str
    session: aiohttp.ClientSession
    service: Service
    engine: EngineThread
    runner: ScriptedRunner

    def post(self, path: str, body: Any = None, **options: Any) -> Any:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.session.post(self.url + path, data=data, **options)

    def get(self, path: str, **options: Any) -> Any:
        return self.session.get(self.url + path, **options)

    async def complete(self, prompt: Any = "hi", directive: Directive | None = None, **fields: Any) -> dict[str, Any]:
        """POST /v1/completions that must succeed; the body, with the outcome under "outcome"."""
        body = {"model": MODEL, "prompt": prompt, "temperature": 0} | fields
        async with self.post("/v1/completions", body, headers=directive_header(directive)) as response:
            answer = await response.json()
            assert response.status == 200, answer
            return answer | {"outcome": decode_outcome(response.headers[wire.OUTCOME_HEADER])}

    async def stream(self, path: str, body: dict[str, Any], directive: Directive | None = None) -> Streamed:
        async with self.post(path, body | {"stream": True}, headers=directive_header(directive)) as response:
            events = (await response.read()).split(b"\n\n")
            assert events.pop() == b""
            chunks = [json.loads(event[6:]) for event in events if event.startswith(b"data: {")]
            return Streamed(response.status, chunks, events)

    async def metric(self, name: str) -> float:
        async with self.get("/metrics") as response:
            lines = (await response.text()).splitlines()
        return float(next(line.rpartition(" ")[2] for line in lines if line.startswith(name + " ")))


def directive_header(directive: Directive | None) -> dict[str, str]:
    return {} if directive is None else {wire.DIRECTIVE_HEADER: encode(directive).decode()}


def policy(epoch: int = 1) -> EnginePolicy:
    return EnginePolicy(epoch, "v1", {"private": Retention()}, "ff" * 32)


@asynccontextmanager
async def serving(
    answer: str = "hello there", *, token: bytes | None = None, ready: bool = True, **settings: Any
) -> AsyncIterator[Served]:
    """A server whose engine answers everything with `answer` and an end token."""
    runner = ScriptedRunner([*TOKENIZER.encode(answer), END], len(TOKENIZER.names_bytes))
    limits = {"pages": 256, "block_tokens": 4, "max_tokens": 512, "prefill_chunk": 64} | settings
    identity = Identity("m", "t", "", "l", b"")
    engine = EngineThread(runner, EngineSettings(identity=identity, eos_token_ids=frozenset({END}), **limits))
    engine.start()
    service = Service(MODEL, token, Metrics())
    app_runner = web.AppRunner(make_app(service), handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await app_runner.setup()
    site = web.TCPSite(app_runner, "127.0.0.1", 0)
    await site.start()
    if ready:
        service.ready(Loaded(engine, TOKENIZER, runner.vocab_size, limits["max_tokens"]))
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as session:
        try:
            yield Served(site.name, session, service, engine, runner)
        finally:
            service.close()
            runner.release()
            await app_runner.cleanup()
            engine.stop()


async def eventually(condition: Any, seconds: float = 5.0) -> None:
    """Waits until `condition()` holds."""
    deadline = asyncio.get_running_loop().time() + seconds
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "it never came to hold"
        await asyncio.sleep(0.005)

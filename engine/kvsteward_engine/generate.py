"""/v1/completions and /v1/chat/completions: one request from its body to the last byte of its answer."""

import secrets
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from aiohttp import web
from kvsteward_contract import wire
from kvsteward_contract.directive import Directive, Outcome, decode_directive, encode

from kvsteward_engine.answers import DONE, Answer, usage
from kvsteward_engine.detokenizer import TextStream
from kvsteward_engine.engine import Delta
from kvsteward_engine.errors import EngineFailed, InvalidRequest, QueueFull
from kvsteward_engine.openai import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    Generation,
    Text,
    characters,
    decode,
    generation,
)
from kvsteward_engine.sequence import Finish, Sampled
from kvsteward_engine.service import NOBODYS, SERVICE, Loaded, Service

MAX_DIRECTIVE = 2048  # bytes; a real one takes about 400
_SSE = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


async def completions(request: web.Request) -> web.StreamResponse:
    """POST /v1/completions"""
    return await _answer(request, CompletionRequest)


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """POST /v1/chat/completions"""
    return await _answer(request, ChatRequest)


def directive_of(request: web.Request) -> Directive | None:
    """The sidecar's word on this request; None if there is none or it can't be read. Raises ValueError if it can't
    be read: the request then runs Cold, since cache metadata never fails a request."""
    given = request.headers.getall(wire.DIRECTIVE_HEADER, ())
    if not given:
        return None
    if len(given) > 1 or len(given[0]) > MAX_DIRECTIVE:
        raise ValueError("repeated or oversized")
    return decode_directive(given[0].encode("ascii"))


async def prompt_tokens(service: Service, loaded: Loaded, prompt: Any, owner: str) -> list[int]:
    """Token ids of a Text, of messages, or given ones checked. Raises ApiError, InvalidRequest and QueueFull."""
    tokenizer = loaded.tokenizer
    if isinstance(prompt, Text):
        tokens = await service.off_loop(
            owner, len(prompt.text), lambda: tokenizer.encode(prompt.text, prompt.add_special_tokens)
        )
    elif isinstance(prompt[0], dict):
        tokens = await service.off_loop(
            owner, characters(prompt), lambda: tokenizer.encode(tokenizer.render(prompt), add_special_tokens=False)
        )
    else:
        tokens = prompt
        if max(tokens) >= loaded.vocab_size:
            message = f"prompt: token id {max(tokens)} is not below the vocabulary's size, {loaded.vocab_size}"
            raise ApiError(400, message, param="prompt")
    if not tokens:
        raise ApiError(400, "prompt: it has no tokens", param="prompt")
    return tokens


def output_limit(prompt_length: int, asked: int | None, max_tokens: int) -> int:
    """How many tokens the answer may have; `max_tokens` is the context served. Raises ApiError if it can't fit."""
    room = max_tokens - prompt_length
    if room < 1 or (asked is not None and asked > room):
        wanted = f"{prompt_length} of prompt" + (f" and {asked} of answer" if asked is not None else "")
        message = f"this model's context is {max_tokens} tokens, and the request asks for {wanted}"
        raise ApiError(400, message, param="max_tokens" if room >= 1 else None, code="context_length_exceeded")
    return room if asked is None else asked


def stop_check(loaded: Loaded, asked: Generation) -> Callable[[int], bool] | None:
    """Shown each token by the engine, says when a stop string is complete; None if the request has none. It is a
    stream of its own, as the answer's runs in another thread, and later."""
    if not asked.stops:
        return None
    text = loaded.tokenizer.stream(asked.stops, asked.chat)

    def check(token: int) -> bool:
        text.push((token,))
        return text.stopped

    return check


async def _answer(request: web.Request, kind: type[CompletionRequest] | type[ChatRequest]) -> web.StreamResponse:
    service = request.app[SERVICE]
    loaded = service.open()
    asked = generation(decode(kind, await request.read()))
    service.check_model(asked.model)
    try:
        directive = directive_of(request)
    except ValueError:  # msgspec's errors are ValueErrors too
        directive = None
        service.metrics.bad_directive()
    started = time.perf_counter()
    tokens = await prompt_tokens(service, loaded, asked.prompt, directive.queue if directive else NOBODYS)
    tokenising = time.perf_counter() - started
    sampling = asked.sampling(output_limit(len(tokens), asked.max_tokens, loaded.max_tokens))
    request_id = directive.request if directive else secrets.token_hex(16)
    service.open()  # a drain may have begun while the body came in
    service.tokenisations.note(request_id, tokenising)
    service.in_flight += 1
    try:
        deltas = loaded.engine.generate(request_id, tokens, sampling, directive, stop_check(loaded, asked))
        async with aclosing(deltas):
            run = _Run(service, loaded, asked, request_id, len(tokens))
            return await (run.stream(request, deltas) if asked.stream else run.whole(deltas))
    except (InvalidRequest, QueueFull):
        raise  # it never began
    except BaseException:
        service.metrics.cut()
        raise
    finally:
        service.in_flight -= 1


class _Run:
    """One generation under way."""

    def __init__(self, service: Service, loaded: Loaded, asked: Generation, request_id: str, prompt: int) -> None:
        self._service, self._engine, self._id, self._prompt = service, loaded.engine, request_id, prompt
        self._tokenizer = loaded.tokenizer
        self._wants_logprobs = asked.logprobs is not None
        self._include_usage = asked.include_usage
        self._text: TextStream = loaded.tokenizer.stream(asked.stops, asked.chat)
        self._answer = Answer(
            id=("chatcmpl-" if asked.chat else "cmpl-") + request_id,
            created=int(time.time()),
            model=service.model,
            chat=asked.chat,
            names=loaded.tokenizer.names_bytes,
            include_usage=asked.include_usage,
        )
        self._count = 0
        self._finish: str | None = None
        self._outcome: Outcome | None = None

    async def stream(self, request: web.Request, deltas: AsyncGenerator[Delta, None]) -> web.StreamResponse:
        """Server-sent events, one write a step. The status waits for the first token: until then a refusal can
        still be told as such."""
        response: web.StreamResponse | None = None
        try:
            async for delta in deltas:
                text, sampled = self._take(delta)
                if not text and not sampled and self._finish is None:
                    continue  # half a character, or what may become a stop string
                data = self._answer.chunk(text, sampled, self._finish)
                if self._finish is not None:
                    data += self._ending()
                if response is None:
                    response = web.StreamResponse(headers=_SSE)
                    await response.prepare(request)
                await response.write(data)
            if response is None:
                raise EngineFailed("the engine ended this request without a token")
            self._ended()
            await response.write_eof()
            return response
        except BaseException:
            # Whatever went wrong, a stream that has begun must not look complete.
            if response is not None and request.transport is not None:
                request.transport.abort()
            raise

    async def whole(self, deltas: AsyncGenerator[Delta, None]) -> web.Response:
        """The answer in one piece."""
        texts: list[str] = []
        all_sampled: list[Sampled] = []
        async for delta in deltas:
            text, sampled = self._take(delta)
            texts.append(text)
            all_sampled += sampled or ()
        outcome = self._ended()
        body = self._answer.whole(
            "".join(texts), all_sampled if self._wants_logprobs else None, outcome.finish, self._usage(outcome)
        )
        headers = {wire.OUTCOME_HEADER: encode(outcome).decode("ascii")}
        return web.Response(body=body, content_type="application/json", headers=headers)

    def _take(self, delta: Delta) -> tuple[str, list[Sampled] | None]:
        """Text and, if asked for, log probabilities that a delta adds; notes the end."""
        self._count += len(delta.token_ids)
        text = self._text.push(delta.token_ids)
        sampled = delta.sampled if self._wants_logprobs else None
        if sampled and delta.finish is Finish.STOP and not self._tokenizer.has_text(sampled[-1].token):
            sampled = sampled[:-1]  # the end-of-sequence token is no part of the answer
        if delta.finish is not None:
            if delta.finish not in (Finish.STOP, Finish.LENGTH) or delta.outcome is None:
                raise EngineFailed(delta.error or f"the engine ended this request early: {delta.finish.value}")
            self._finish = delta.finish.value
            self._outcome = self._service.tokenisations.fill_in(delta.outcome)
            self._service.metrics.finished(self._outcome)
            text += self._text.finish()
        return text, sampled

    def _ended(self) -> Outcome:
        if self._outcome is None:
            raise EngineFailed("the engine ended this request without saying how")
        return self._outcome

    def _usage(self, outcome: Outcome) -> dict[str, Any]:
        return usage(self._prompt, self._count, outcome.reused_tokens)

    def _ending(self) -> bytes:
        """What follows the last chunk of a stream."""
        outcome = self._ended()
        tail = self._answer.usage_chunk(self._usage(outcome)) if self._include_usage else b""
        return tail + wire.OUTCOME_COMMENT + encode(outcome) + b"\n\n" + DONE

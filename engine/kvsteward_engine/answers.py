"""The responses of the OpenAI API: whole answers, the chunks of a stream, log probabilities and usage. Pure."""

from collections.abc import Sequence
from typing import Any

import msgspec

from kvsteward_engine.sequence import Sampled

DONE = b"data: [DONE]\n\n"
Json = dict[str, Any]


class Answer:
    """Builds the response to one request; remembers where it is in the text, and whether a chunk was sent yet."""

    def __init__(
        self, id: str, created: int, model: str, chat: bool, names: Sequence[bytes], include_usage: bool = False
    ) -> None:
        self._id, self._created, self._model, self._chat = id, created, model, chat
        self._names = names  # token id -> bytes
        self._include_usage = include_usage
        self._opened = False
        self._offset = 0  # characters of all tokens reported so far, for text_offset

    def chunk(self, text: str, sampled: Sequence[Sampled] | None, finish: str | None) -> bytes:
        """One event of a stream. `sampled`: the chunk's tokens if log probabilities were asked for, else None."""
        choice: Json
        if self._chat:
            delta: Json = {} if self._opened else {"role": "assistant"}
            if text or not self._opened:
                delta["content"] = text
            self._opened = True
            choice = {"index": 0, "delta": delta, "logprobs": self.logprobs(sampled), "finish_reason": finish}
        else:
            choice = {"index": 0, "text": text, "logprobs": self.logprobs(sampled), "finish_reason": finish}
        body = self._envelope("chat.completion.chunk" if self._chat else "text_completion", [choice])
        if self._include_usage:
            body["usage"] = None  # it comes in a chunk of its own
        return event(body)

    def usage_chunk(self, usage: Json) -> bytes:
        """The event with the usage, sent after the last choice if the request asked for it."""
        body = self._envelope("chat.completion.chunk" if self._chat else "text_completion", [])
        return event(body | {"usage": usage})

    def whole(self, text: str, sampled: Sequence[Sampled] | None, finish: str, usage: Json) -> bytes:
        """The body of an answer that is not streamed."""
        choice: Json = {"index": 0, "logprobs": self.logprobs(sampled), "finish_reason": finish}
        if self._chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            choice["text"] = text
        body = self._envelope("chat.completion" if self._chat else "text_completion", [choice])
        return msgspec.json.encode(body | {"usage": usage})

    def logprobs(self, sampled: Sequence[Sampled] | None) -> Json | None:
        """Log probabilities in the shape of the request's kind; None if they weren't asked for."""
        if sampled is None:
            return None
        if self._chat:
            return {"content": [self._chat_entry(one) for one in sampled], "refusal": None}
        tokens = [self._name(one.token) for one in sampled]
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [one.logprob for one in sampled],
            "top_logprobs": [
                {self._name(token): logprob for token, logprob in one.top} if one.top else None for one in sampled
            ],
            "text_offset": offsets,
        }

    def _chat_entry(self, one: Sampled) -> Json:
        top = [self._named(token, logprob) for token, logprob in one.top or ()]
        return self._named(one.token, one.logprob) | {"top_logprobs": top}

    def _named(self, token: int, logprob: float | None) -> Json:
        return {"token": self._name(token), "logprob": logprob, "bytes": list(self._bytes(token))}

    def _bytes(self, token: int) -> bytes:
        return self._names[token] if token < len(self._names) else b""

    def _name(self, token: int) -> str:
        return self._bytes(token).decode("utf-8", "replace")

    def _envelope(self, kind: str, choices: list[Json]) -> Json:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model, "choices": choices}


def event(body: Json) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> Json:
    """Token counts; `cached_tokens` of the prompt came out of the cache."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def models(name: str, created: int, max_tokens: int) -> bytes:
    """The body of /v1/models; `max_tokens` is the context length served."""
    model = {"id": name, "object": "model", "created": created, "owned_by": "kvsteward", "max_model_len": max_tokens}
    return msgspec.json.encode({"object": "list", "data": [model]})

"""The requests of the OpenAI API: which fields there are, what they may hold, and what is refused in which words.

Pure. Nothing is silently ignored: a field this engine doesn't know, or a known one set to something it can't do, is
an `ApiError` with status 400 that names it.
"""

import gc
import re
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from kvsteward_engine.errors import InvalidRequest
from kvsteward_engine.sequence import MAX_LOGPROBS, MAX_SEED, SamplingParams

MAX_STOPS = 16
COLLECTED = 65_536  # bytes of a body up to which garbage is collected while it is read
MESSAGE_CHARACTERS = 32  # that a template writes around a message
MAX_MESSAGE = 1_000  # characters of an error's message
StopText = Annotated[str, Meta(min_length=1, max_length=1024)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Tokens = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]


def shortened(text: str) -> str:
    """What of a text goes into an answer: clients write names of megabytes, and get them back by the sentence."""
    return text if len(text) <= MAX_MESSAGE else f"{text[: MAX_MESSAGE // 2]} ... {text[-MAX_MESSAGE // 2 :]}"


class ApiError(Exception):
    """An answer other than success, in OpenAI's shape. `retry_after` is in seconds."""

    def __init__(
        self,
        status: int,
        message: str,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.type, self.code = status, shortened(message), type, code
        self.param = None if param is None else shortened(param)
        self.retry_after = retry_after

    def body(self) -> bytes:
        fields = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": fields})


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool = False


class Message(msgspec.Struct, forbid_unknown_fields=True):
    """One turn. Clients send an assistant's turn back with its empty fields; those are accepted while empty."""

    role: str
    content: str | list[dict[str, Any]] | None = None  # parts: {type: text, text}
    name: Annotated[str, Meta(max_length=256)] | None = None
    refusal: Any = None
    annotations: Any = None
    audio: Any = None
    function_call: Any = None
    tool_calls: Any = None
    reasoning_content: Any = None
    tool_call_id: Any = None


class _Common(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields of both kinds of completion. None stands for the default, as in OpenAI's API."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Tokens | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None  # -1 and 0: no limit
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    seed: Annotated[int, Meta(ge=0, le=MAX_SEED)] | None = None
    stop: StopText | Annotated[list[StopText], Meta(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=128)] | None = None
    ignore_eos: bool | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    user: str | None = None  # the end user's name; says nothing to the engine
    # Known, and refused unless they ask for nothing: see _NEUTRAL.
    n: Any = None
    best_of: Any = None
    logit_bias: Any = None
    repetition_penalty: Any = None
    prompt_logprobs: Any = None
    response_format: Any = None
    service_tier: Any = None
    metadata: Any = None
    store: Any = None


class CompletionRequest(_Common, kw_only=True):
    """POST /v1/completions"""

    prompt: str | list[TokenId | str | list[TokenId]]
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    add_special_tokens: bool = True
    echo: Any = None
    suffix: Any = None


class ChatRequest(_Common, kw_only=True):
    """POST /v1/chat/completions"""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=4096)]
    max_completion_tokens: Tokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: Any = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    web_search_options: Any = None


class TokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /tokenize, in vLLM's shape: a prompt, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1, max_length=4096)] | None = None
    add_special_tokens: bool | None = None  # default: True for a prompt; a chat template writes its own
    add_generation_prompt: bool = True


# Values that ask for nothing. Anything else in these fields is refused.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "logit_bias": ({},),
    "repetition_penalty": (1, 1.0),
    "prompt_logprobs": (),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "metadata": ({},),
    "store": (False,),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
}
_NEUTRAL_IN_MESSAGES = (
    *("refusal", "annotations", "audio", "function_call", "tool_calls", "reasoning_content", "tool_call_id"),
)
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt still to be tokenised."""

    text: str
    add_special_tokens: bool


@dataclass(frozen=True, slots=True)
class Generation:
    """What a request of either kind asks for, checked as far as possible without tokenizer and engine."""

    chat: bool
    model: str
    prompt: Text | list[int] | list[dict[str, str]]  # text, token ids, or messages
    max_tokens: int | None  # None: as many as fit
    stops: tuple[str, ...]
    logprobs: int | None  # None: none; n: the chosen token's and those of the n likeliest
    stream: bool
    include_usage: bool
    fields: _Common

    def sampling(self, max_tokens: int, stop_token_ids: frozenset[int] = frozenset()) -> SamplingParams:
        """Raises ApiError. Defaults are OpenAI's: temperature 1, top_p 1."""
        asked = self.fields
        try:
            return SamplingParams(
                max_tokens=max_tokens,
                temperature=1.0 if asked.temperature is None else asked.temperature,
                top_p=1.0 if asked.top_p is None else asked.top_p,
                top_k=max(asked.top_k or 0, 0),
                min_p=asked.min_p or 0.0,
                seed=asked.seed,
                stop_token_ids=stop_token_ids | frozenset(asked.stop_token_ids or ()),
                ignore_eos=bool(asked.ignore_eos),
                logprobs=self.logprobs,
                frequency_penalty=asked.frequency_penalty or 0.0,
                presence_penalty=asked.presence_penalty or 0.0,
            )
        except InvalidRequest as error:
            raise ApiError(400, str(error)) from error


Request = TypeVar("Request")
_DECODERS: dict[type, msgspec.json.Decoder[Any]] = {
    kind: msgspec.json.Decoder(kind) for kind in (CompletionRequest, ChatRequest, TokenizeRequest)
}
_PATH = re.compile(r"^(?P<what>.*?)(?: - at `(?:key in )?\$\.?(?P<path>[^`]*)`)?$", re.DOTALL)
_UNKNOWN = re.compile(r"unknown field `([^`]*)`")


def decode(kind: type[Request], body: bytes) -> Request:
    """A typed request, or an ApiError that names the field at fault."""
    collects = len(body) > COLLECTED and gc.isenabled()
    if collects:
        gc.disable()  # nothing of what is made here is garbage, and to look through it time and again takes a second
    try:
        return _DECODERS[kind].decode(body)
    except msgspec.ValidationError as error:
        raise _refusal(shortened(str(error))) from error
    except (msgspec.DecodeError, UnicodeError) as error:
        raise ApiError(400, f"the body is not JSON: {error}") from error
    except RecursionError as error:
        raise ApiError(400, "the body is nested too deeply") from error
    finally:
        if collects:
            gc.enable()


def _refusal(text: str) -> ApiError:
    parts = _PATH.match(text)
    what, path = (parts["what"], parts["path"] or "") if parts else (text, "")
    unknown = _UNKNOWN.search(what)
    if unknown:
        name = f"{path}.{unknown[1]}" if path else unknown[1]
        return ApiError(400, f"{name}: this engine doesn't know this field", param=name)
    missing = re.search(r"missing required field `([^`]*)`", what)
    if missing:
        name = f"{path}.{missing[1]}" if path else missing[1]
        return ApiError(400, f"{name}: this field is required", param=name)
    return ApiError(400, f"{path or 'the body'}: {what[:1].lower()}{what[1:].replace('`', '')}", param=path or None)


def generation(request: CompletionRequest | ChatRequest) -> Generation:
    """What `request` asks for. Raises ApiError for what this engine can't do."""
    for name in request.__struct_fields__:
        if name in _NEUTRAL:
            _refuse_unless_neutral(name, getattr(request, name))
    if request.stream_options is not None and not request.stream:
        raise ApiError(400, "stream_options: this is only for requests with stream set to true", param="stream_options")
    stop = request.stop
    stops = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    prompt: Text | list[int] | list[dict[str, str]]
    if isinstance(request, ChatRequest):
        prompt, max_tokens, logprobs = messages(request.messages), _chat_max_tokens(request), _chat_logprobs(request)
    else:
        prompt, max_tokens, logprobs = _prompt(request), request.max_tokens or 16, request.logprobs
    return Generation(
        chat=isinstance(request, ChatRequest),
        model=request.model,
        prompt=prompt,
        max_tokens=max_tokens,
        stops=stops,
        logprobs=logprobs,
        stream=bool(request.stream),
        include_usage=request.stream_options is not None and request.stream_options.include_usage,
        fields=request,
    )


def messages(asked: list[Message]) -> list[dict[str, str]]:
    """Messages as chat templates take them: role, content as one string, name if given. Raises ApiError."""
    plain = []
    for index, message in enumerate(asked):
        at = f"messages[{index}]"
        role = _ROLES.get(message.role)
        if role is None:
            raise ApiError(400, f"{at}.role: {message.role!r} is none of {', '.join(_ROLES)}", param=f"{at}.role")
        for name in _NEUTRAL_IN_MESSAGES:
            if getattr(message, name):
                raise ApiError(400, f"{at}.{name}: this engine doesn't do this", param=f"{at}.{name}")
        content = message.content
        if content is None:
            raise ApiError(400, f"{at}.content: this field is required", param=f"{at}.content")
        entry = {"role": role, "content": content if isinstance(content, str) else _joined(content, f"{at}.content")}
        if message.name is not None:
            entry["name"] = message.name
        plain.append(entry)
    return plain


def characters(chat: list[dict[str, str]]) -> int:
    """About how many characters a template makes of messages: empty ones take room, and time, too."""
    return sum(MESSAGE_CHARACTERS + sum(map(len, message.values())) for message in chat)


def _joined(parts: list[dict[str, Any]], at: str) -> str:
    for part in parts:
        if part.get("type") != "text":
            raise ApiError(400, f"{at}: this engine takes parts of type text, not {part.get('type')!r}", param=at)
        if part.keys() != {"type", "text"} or not isinstance(part["text"], str):
            raise ApiError(400, f"{at}: a text part holds the fields type and text alone", param=at)
    return "".join(part["text"] for part in parts)


def _refuse_unless_neutral(name: str, value: Any) -> None:
    # True == 1 in Python, but not in JSON.
    if value is None or any(value == neutral and type(value) is type(neutral) for neutral in _NEUTRAL[name]):
        return
    raise ApiError(400, f"{name}: this engine doesn't do this; leave the field out", param=name)


def _prompt(request: CompletionRequest) -> Text | list[int]:
    prompt: Any = request.prompt
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        if len(prompt) > 1:
            raise ApiError(400, "prompt: give one prompt a request; send several requests at once", param="prompt")
        prompt = prompt[0]
    if not prompt:
        raise ApiError(400, "prompt: it is empty", param="prompt")
    if isinstance(prompt, str):
        return Text(prompt, request.add_special_tokens)
    if not all(isinstance(token, int) for token in prompt):
        raise ApiError(400, "prompt: it mixes token ids with text", param="prompt")
    return list(prompt)


def _chat_max_tokens(request: ChatRequest) -> int | None:
    old, new = request.max_tokens, request.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise ApiError(400, "max_tokens: it contradicts max_completion_tokens", param="max_tokens")
    return old if new is None else new


def _chat_logprobs(request: ChatRequest) -> int | None:
    if request.top_logprobs and not request.logprobs:
        raise ApiError(400, "top_logprobs: this is only for requests with logprobs set to true", param="top_logprobs")
    return (request.top_logprobs or 0) if request.logprobs else None

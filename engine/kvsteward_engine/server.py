"""The HTTP application: routes, errors in OpenAI's shape, authentication. Knows nothing of processes and signals."""

import logging

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from kvsteward_engine import answers, generate, kv_routes
from kvsteward_engine.auth import authorised
from kvsteward_engine.errors import EngineFailed, InvalidRequest, QueueFull
from kvsteward_engine.metrics import CONTENT_TYPE
from kvsteward_engine.openai import ApiError, TokenizeRequest, characters, decode, messages
from kvsteward_engine.service import LOADING_RETRY_SECONDS, NOBODYS, SERVICE, Phase, Service

log = logging.getLogger(__name__)
MAX_BODY = 4 * 2**20  # bytes; about a million tokens
QUEUE_RETRY_SECONDS = 1
CLIENT_GONE = 499  # nginx's number


def make_app(service: Service) -> web.Application:
    """All routes over one service. Run it with `handler_cancellation=True`: a client that leaves while its prompt
    is being computed is then noticed at once, not at the first token."""
    app = web.Application(client_max_size=MAX_BODY, middlewares=[_errors, _authenticate])
    app[SERVICE] = service
    app.add_routes(
        [
            web.get("/health", health, allow_head=False),
            web.get("/metrics", metrics, allow_head=False),
            web.get("/v1/models", models, allow_head=False),
            web.post("/v1/completions", generate.completions),
            web.post("/v1/chat/completions", generate.chat_completions),
            web.post("/tokenize", tokenize),
        ]
    )
    app.add_routes(kv_routes.ROUTES)
    return app


async def health(request: web.Request) -> web.Response:
    """GET /health: 200 exactly when a request sent now would be taken."""
    phase = request.app[SERVICE].phase
    ready = phase is Phase.READY
    return web.Response(
        body=msgspec.json.encode({"status": phase.value}),
        status=200 if ready else 503,
        content_type="application/json",
        headers={} if ready else {"Retry-After": str(LOADING_RETRY_SECONDS)},
    )


async def metrics(request: web.Request) -> web.Response:
    """GET /metrics, in Prometheus' text format."""
    return web.Response(body=request.app[SERVICE].metrics.render(), headers={"Content-Type": CONTENT_TYPE})


async def models(request: web.Request) -> web.Response:
    """GET /v1/models"""
    service = request.app[SERVICE]
    body = answers.models(service.model, service.created, service.loaded().max_tokens)
    return web.Response(body=body, content_type="application/json")


async def tokenize(request: web.Request) -> web.Response:
    """POST /tokenize: the token ids a prompt, or a chat, would be run with."""
    service = request.app[SERVICE]
    loaded = service.open()
    asked = decode(TokenizeRequest, await request.read())
    service.check_model(asked.model)
    if (asked.prompt is None) == (asked.messages is None):
        raise ApiError(400, "give either prompt or messages", param="prompt")
    tokenizer = loaded.tokenizer
    if asked.prompt is not None:
        text, special = asked.prompt, asked.add_special_tokens is not False
        tokens = await service.off_loop(NOBODYS, len(text), lambda: tokenizer.encode(text, special))
    else:
        chat, special = messages(asked.messages or []), bool(asked.add_special_tokens)
        start = asked.add_generation_prompt
        tokens = await service.off_loop(
            NOBODYS, characters(chat), lambda: tokenizer.encode(tokenizer.render(chat, start), special)
        )
    body = {"count": len(tokens), "max_model_len": loaded.max_tokens, "tokens": tokens}
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")


@web.middleware
async def _authenticate(request: web.Request, handler: Handler) -> web.StreamResponse:
    token = request.app[SERVICE].token
    open_route = request.method == "GET" and request.path == "/health"
    if token is not None and not open_route and not authorised(request.headers, token):
        raise ApiError(401, "this needs the pod's token: Authorization: Bearer <token>", "authentication_error")
    return await handler(request)


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every failure as an answer in OpenAI's shape, unless bytes of another answer are out already."""
    service = request.app[SERVICE]
    try:
        response = await handler(request)
    except ConnectionError:
        response = web.Response(status=CLIENT_GONE)  # for the count; nobody reads it
    except Exception as error:  # noqa: BLE001 - the last place to make an answer of it
        response = _failure(service, request, error)
    resource = request.match_info.route.resource
    service.metrics.answered(resource.canonical if resource else "other", response.status)
    return response


def _failure(service: Service, request: web.Request, error: Exception) -> web.Response:
    answer = _api_error(error)
    if answer is None:
        log.error("request to %s failed", request.path, exc_info=error)
        answer = ApiError(500, "the engine met an unexpected error; its log says more", "internal_error")
    response = web.Response(body=answer.body(), status=answer.status, content_type="application/json")
    if answer.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, web.HTTPMethodNotAllowed):
        response.headers["Allow"] = ", ".join(sorted(error.allowed_methods))
    if answer.retry_after is not None:
        response.headers["Retry-After"] = str(answer.retry_after)
    if service.phase is Phase.DRAINING:
        response.force_close()  # clients then connect anew, to a pod that stays
    return response


def _api_error(error: Exception) -> ApiError | None:
    match error:
        case ApiError():
            return error
        case InvalidRequest():
            return ApiError(400, str(error))
        case QueueFull():
            return ApiError(429, str(error), "rate_limit_error", retry_after=QUEUE_RETRY_SECONDS)
        case EngineFailed():
            return ApiError(500, str(error), "internal_error")
        case web.HTTPRequestEntityTooLarge():
            return ApiError(413, f"the body is larger than {MAX_BODY} bytes")
        case web.HTTPMethodNotAllowed():
            return ApiError(405, f"this path doesn't take {error.method}")
        case web.HTTPNotFound():
            return ApiError(404, "there is no such path", "not_found_error")
        case web.HTTPException():
            return ApiError(error.status, error.reason)
    return None

"""The application: endpoints over one engine."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response
from starlette.exceptions import HTTPException

from guided_smc import __version__, viewer
from guided_smc.api import LM
from guided_smc.cli.reading import PromptLine
from guided_smc.cli.records import encode, result_record
from guided_smc.engine import Engine
from guided_smc.errors import GuidedSMCError
from guided_smc.grammars import Limits
from guided_smc.grammars.worker import start_worker
from guided_smc.models.budget import Budget
from guided_smc.models.particles import IN_PLACE
from guided_smc.records import finite, step_record
from guided_smc.results import Result
from guided_smc.rewards import Reward
from guided_smc.server.answers import FINGERPRINT, Writer, check
from guided_smc.server.bodies import JsonRoute
from guided_smc.server.compiling import Compiler
from guided_smc.server.errors import ApiError, from_exception, too_late
from guided_smc.server.logs import request_id
from guided_smc.server.loop import Deadline, EngineLoop
from guided_smc.server.metrics import Metrics
from guided_smc.server.middleware import Gate
from guided_smc.server.openapi import RESPONSES, describe
from guided_smc.server.protocol import ChatRequest, Common, CompletionRequest, RunRequest
from guided_smc.server.requests import Body, Prepared, Preparer, fields_of, find_spec
from guided_smc.server.settings import Settings, read_settings
from guided_smc.server.sse import ALIVE, DONE, ClientGoneError, EventStream, data, unless_gone
from guided_smc.server.tickets import Ticket
from guided_smc.server.validation import refused

log = logging.getLogger("guided_smc.server")

_LINUX = sys.platform == "linux"
_GONE = 499  # what nginx calls a client that went away


class Json(JSONResponse):
    """JSON in ASCII: half a surrogate pair in a client's words can be told back to it."""

    def render(self, content: Any) -> bytes:
        """The body. Infinities and NaN become null."""
        return json.dumps(finite(content), allow_nan=False).encode()


class Server:
    """What the endpoints share.

    Args:
        lm: The model.
        settings: Of the operator.
        rewards: By the names that clients use.
    """

    def __init__(
        self, lm: LM, settings: Settings, rewards: Mapping[str, Reward] | None = None
    ) -> None:
        self.lm = lm
        self.settings = settings
        self.name = settings.served_name or lm.model.name
        self.created = int(time.time())
        self.metrics = Metrics()
        budget = Budget.of(settings.max_total_tokens, lm.model.name, in_place_from=IN_PLACE)
        self.engine = EngineLoop(
            lambda: Engine(lm.model, lm.draft, max_rows=settings.max_rows, budget=budget),
            max_queue=settings.max_queue,
            metrics=self.metrics,
        )
        limits = Limits.untrusted(
            max_bytes=settings.max_schema_bytes,
            max_compile_seconds=settings.max_schema_seconds,
            **({"max_compile_memory": settings.max_schema_memory} if _LINUX else {}),
        )
        self.compiler = Compiler(
            limits, lm.model.vocabulary, kept=settings.cached_schemas, metrics=self.metrics
        )
        self._preparer = Preparer(lm, settings, rewards or {})
        self._one_thread = ThreadPoolExecutor(1, "prepare")

    async def begin(self) -> None:
        """Start the threads, and a worker for the first schema."""
        self.engine.start()
        await asyncio.to_thread(start_worker)

    async def end(self) -> None:
        """Stop them."""
        await asyncio.to_thread(self.engine.stop, 10.0)
        self.compiler.close()
        self._one_thread.shutdown(wait=False, cancel_futures=True)

    # -- one request -----------------------------------------------------------------------------

    async def answer(self, http: Request, body: Body, work: Callable[[], Awaitable[Any]]) -> Any:
        """The response of some work, or the error it ends with."""
        http.state.log = {"user": getattr(body, "user", None)} if isinstance(body, Common) else {}
        try:
            return await unless_gone(http.receive, _coroutine(work()))
        except ClientGoneError:
            self.metrics.cancelled.labels("gone").inc()
            return Response(status_code=_GONE)
        except Exception as error:
            raise self.told(error, body) from None

    def told(self, error: Exception, body: Body | None = None) -> ApiError:
        """What the client is told; the log is told the rest."""
        if isinstance(error, ApiError):
            return error
        fields = None if body is None else fields_of(body)
        api_error = from_exception(error, request_id.get(), fields)
        if api_error.status >= 500:
            log.error("an answer failed: %s", error, exc_info=error)
        return api_error

    async def prepare(self, body: Body) -> tuple[Prepared, Deadline]:
        """Requests of the engine, and until when they may take.

        Raises:
            ApiError, GuidedSMCError: What cannot work.
        """
        asked = body.smc_options.deadline or self.settings.deadline
        deadline = Deadline.after(min(asked, self.settings.deadline))
        if body.model is not None and body.model != self.name:
            raise ApiError(
                404,
                f"there is no model {body.model!r}; this server has {self.name!r}",
                param="model",
                code="model_not_found",
            )
        try:
            body.model_dump_json()
        except ValueError as error:
            # A schema that is nested too deeply cannot be written either: it is told by its name.
            if "surrogate" in str(error):
                raise ApiError(
                    400, "the request holds half of a surrogate pair, which is no text",
                    code="invalid_value",
                ) from None  # fmt: skip
        try:
            return await asyncio.wait_for(self._prepare(body), deadline.left), deadline
        except asyncio.TimeoutError:
            raise too_late(deadline.seconds) from None

    async def _prepare(self, body: Body) -> Prepared:
        spec = find_spec(body)
        compiled = None if spec is None else await self.compiler.compile(spec)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._one_thread, self._preparer.prepare, body, compiled)

    async def complete(self, http: Request, body: ChatRequest | CompletionRequest) -> Any:
        """A chat completion or a completion, whole or as a stream."""
        prepared, deadline = await self.prepare(body)
        chat = isinstance(body, ChatRequest)
        writer = Writer(
            "chat" if chat else "text",
            self.name,
            prepared.relaxed,
            prepared.prompt_tokens,
            calls=isinstance(body, ChatRequest) and bool(body.tools) and body.tool_choice != "none",
            vocabulary=self.lm.model.vocabulary if _wants_logprobs(body) else None,
        )
        ticket = Ticket(
            self.engine,
            prepared.requests,
            owner=http.state.owner,
            deadline=deadline,
            texts=bool(body.stream),
        )
        if not body.stream:
            async with ticket:
                return Json(writer.response(await ticket.results()))
        await ticket.__aenter__()  # here, so that a full queue is a status
        return self._stream(self._chunks(writer, ticket, body))

    def _stream(self, events: AsyncGenerator[bytes, None]) -> EventStream:
        return EventStream(
            events,
            send_timeout=self.settings.send_timeout,
            cut_off=lambda reason: self.metrics.cancelled.labels(reason).inc(),
        )

    async def _chunks(
        self, writer: Writer, ticket: Ticket, body: ChatRequest | CompletionRequest
    ) -> AsyncGenerator[bytes, None]:
        sent = ["" for _ in ticket.answers]
        results: list[Result[Any] | None] = [None for _ in ticket.answers]
        try:
            for i in range(len(sent)):
                if (first := writer.first(i)) is not None:
                    yield data(first)
            async for changed in ticket.changes():
                if not changed:
                    yield ALIVE
                for i, answer in enumerate(ticket.answers):
                    if results[i] is not None:
                        continue
                    # The outcome first: a text that is decided later is in it.
                    outcome, text = answer.outcome, writer.sendable(answer.text)
                    if isinstance(outcome, Result):
                        check(outcome)
                        for chunk in writer.last(i, outcome, sent[i]):
                            yield data(chunk)
                        results[i] = outcome
                    elif len(text) > len(sent[i]):
                        yield data(writer.more(i, text[len(sent[i]) :]))
                        sent[i] = text
            if body.stream_options is not None and body.stream_options.include_usage:
                yield data(writer.final_usage([r for r in results if r is not None]))
            yield DONE
        except Exception as error:
            yield data(self.told(error, body).body)
            yield DONE
        finally:
            await ticket.__aexit__()

    async def run(self, http: Request, body: RunRequest) -> Any:
        """One answer as a stream of steps."""
        prepared, deadline = await self.prepare(body)
        ticket = Ticket(
            self.engine, prepared.requests, owner=http.state.owner, deadline=deadline, steps=True
        )
        await ticket.__aenter__()
        return self._stream(self._steps(ticket, prepared, body))

    async def _steps(
        self, ticket: Ticket, prepared: Prepared, body: RunRequest
    ) -> AsyncGenerator[bytes, None]:
        (request,), (answer,) = prepared.requests, ticket.answers
        try:
            yield data(
                {
                    "n_particles": request.options.n_particles,
                    "block_size": request.options.block_size,
                    "prompt": request.prompt,
                    "seed": request.seed,
                    "relaxed": list(prepared.relaxed),
                },
                "start",
            )
            async for changed in ticket.changes():
                if not changed:
                    yield ALIVE
                while answer.steps:
                    event = answer.steps.popleft()
                    record = step_record(event.step, self.lm.model.vocabulary, event.texts)
                    yield _encoded(record, "step")
            assert isinstance(answer.outcome, Result)
            line = PromptLine(0, 1, "", request.prompt, request.options)
            record = result_record(line, answer.outcome, FINGERPRINT, full=True)
            yield _encoded(record, "result")
        except Exception as error:
            yield data(self.told(error, body).body, "error")
        finally:
            await ticket.__aexit__()


def _encoded(record: dict[str, Any], event: str) -> bytes:
    return b"event: " + event.encode() + b"\ndata: " + encode(record).rstrip(b"\n") + b"\n\n"


def _wants_logprobs(body: ChatRequest | CompletionRequest) -> bool:
    # Of a completion it is a number, and 0 asks for those of the answer's own tokens.
    return body.logprobs is not None and body.logprobs is not False


async def _coroutine(work: Awaitable[Any]) -> Any:
    return await work


def create_app(
    lm: LM, settings: Settings | None = None, rewards: Mapping[str, Reward] | None = None
) -> FastAPI:
    """The ASGI application.

    Args:
        lm: A loaded model.
        settings: Default: from the environment.
        rewards: By the names that clients use.

    Returns:
        An application that starts the engine in its lifespan. `app.state.server` is the `Server`.
    """
    server = Server(lm, settings or read_settings(), rewards)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await server.begin()
        try:
            yield
        finally:
            await server.end()

    app = FastAPI(
        title="guided-smc",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,  # these pages load scripts from elsewhere
        redoc_url=None,
    )
    app.state.server = server
    app.router.route_class = JsonRoute
    _add_errors(app, server)
    _add_endpoints(app, server)
    paths = {getattr(route, "path", "") for route in app.routes}
    app.add_middleware(Gate, settings=server.settings, metrics=server.metrics, endpoints=paths)
    describe(app)
    return app


def _add_endpoints(app: FastAPI, server: Server) -> None:
    @app.post("/v1/chat/completions", responses=RESPONSES, response_model=None)
    async def chat_completions(body: ChatRequest, http: Request) -> Any:
        return await server.answer(http, body, lambda: server.complete(http, body))

    @app.post("/v1/completions", responses=RESPONSES, response_model=None)
    async def completions(body: CompletionRequest, http: Request) -> Any:
        return await server.answer(http, body, lambda: server.complete(http, body))

    @app.post("/smc/run", responses=RESPONSES, response_model=None)
    async def smc_run(body: RunRequest, http: Request) -> Any:
        return await server.answer(http, body, lambda: server.run(http, body))

    @app.get("/v1/models", responses=RESPONSES)
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(server)]}

    @app.get("/v1/models/{name:path}", responses=RESPONSES)
    async def model(name: str) -> dict[str, Any]:
        if name != server.name:
            raise ApiError(
                404,
                f"there is no model {name!r}; this server has {server.name!r}",
                param="model",
                code="model_not_found",
            )
        return _model(server)

    @app.get("/healthz", responses=RESPONSES)
    async def healthz() -> JSONResponse:
        well = server.engine.alive
        return Json({"status": "ok" if well else "stopping"}, 200 if well else 503)

    @app.get("/metrics", responses=RESPONSES, response_class=Response)
    async def metrics() -> Response:
        return Response(
            server.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8"
        )

    page = viewer.page()

    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def root() -> HTMLResponse:
        return HTMLResponse(page)


def _model(server: Server) -> dict[str, Any]:
    return {
        "id": server.name,
        "object": "model",
        "created": server.created,
        "owned_by": "guided-smc",
        "context_length": server.lm.model.context_length,
        "draft": server.lm.draft.name if server.lm.draft else None,
    }


def _add_errors(app: FastAPI, server: Server) -> None:
    def response(error: ApiError) -> JSONResponse:
        return Json(error.body, error.status, headers=error.headers)

    @app.exception_handler(ApiError)
    async def api_error(http: Request, error: ApiError) -> JSONResponse:
        return response(error)

    @app.exception_handler(GuidedSMCError)
    async def our_error(http: Request, error: GuidedSMCError) -> JSONResponse:
        return response(server.told(error))

    @app.exception_handler(RequestValidationError)
    async def invalid(http: Request, error: RequestValidationError) -> JSONResponse:
        return response(refused(error))

    @app.exception_handler(HTTPException)
    async def http_error(http: Request, error: HTTPException) -> JSONResponse:
        codes = {404: "not_found", 405: "method_not_allowed"}
        code = codes.get(error.status_code, "http_error")
        headers = dict(error.headers or {})
        return response(ApiError(error.status_code, str(error.detail), code=code, headers=headers))

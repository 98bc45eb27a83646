"""The web application: routes and error handlers around one `Service`. No globals, no documentation routes."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from runtime.api import EngineError
from server.edge import Edge
from server.errors import ApiError, from_exception
from server.meter import CONTENT_TYPE
from server.router import DEFAULT_DIALECT, DIALECTS
from server.routes.generate import ChatRoute, CompletionRoute, Fields, Route, generate
from server.routes.models import list_models, retrieve_model
from server.service import Service

READ = ["GET", "HEAD"]


def json_response(body: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A small JSON answer."""
    return Response(msgspec.json.encode(body), status, headers=headers, media_type="application/json")


def probe(healthy: bool, *, reason: str) -> Response:
    """200 or 503, with a word for people."""
    if healthy:
        return json_response({"status": "ok"})
    return json_response({"status": reason}, 503, {"Retry-After": "1"})


async def on_error(_request: Request, error: Exception) -> Response:
    """Every exception that reaches the framework, as the envelope."""
    return from_exception(error).response()


def add_generation(app: FastAPI, service: Service, path: str, route: Route[Fields]) -> None:
    """A generation route."""

    async def endpoint(request: Request) -> Response:
        return await generate(route, service, request)

    app.add_api_route(path, endpoint, methods=["POST"], response_model=None)


def add_probes(app: FastAPI, service: Service) -> None:
    """/live: no restart needed. /ready: send traffic. /health: the engine answers. /metrics. Nothing here waits."""

    async def live() -> Response:
        return probe(service.live(), reason=service.health().value)

    async def ready() -> Response:
        return probe(service.ready(), reason=service.status())

    async def health() -> Response:
        return probe(service.loaded(), reason=service.health().value)

    async def metrics() -> Response:
        return Response(service.scrape(), headers={"content-type": CONTENT_TYPE})

    async def router(request: Request) -> Response:
        dialect = request.query_params.get("engine", DEFAULT_DIALECT)
        if dialect not in DIALECTS:
            raise ApiError(400, f"'engine' must be one of {', '.join(DIALECTS)}.", param="engine")
        return Response(service.router.text(dialect), headers={"content-type": CONTENT_TYPE})

    app.router.add_route("/metrics/router", router, methods=READ)  # past dependency solving, which costs more than it
    for path, endpoint in (("/live", live), ("/ready", ready), ("/health", health), ("/metrics", metrics)):
        app.add_api_route(path, endpoint, methods=READ, response_model=None)


def add_models(app: FastAPI, service: Service) -> None:
    """/v1/models, and the refusal of embeddings."""

    async def models() -> Response:
        return json_response(list_models(service))

    async def model(model_id: str) -> Response:
        return json_response(retrieve_model(service, model_id))

    async def embeddings() -> Response:
        raise ApiError(400, "The served model does not produce embeddings.", param="model")

    app.add_api_route("/v1/models", models, methods=READ, response_model=None)
    app.add_api_route("/v1/models/{model_id:path}", model, methods=READ, response_model=None)
    app.add_api_route("/v1/embeddings", embeddings, methods=["POST"], response_model=None)


def create_app(service: Service) -> FastAPI:
    """The application. The service is started and stopped by whoever made it."""
    app = FastAPI(title="Lockstep", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    add_generation(app, service, "/v1/chat/completions", ChatRoute())
    add_generation(app, service, "/v1/completions", CompletionRoute())
    add_models(app, service)
    add_probes(app, service)
    for kind in (ApiError, EngineError, ValidationError, HTTPException):
        app.add_exception_handler(kind, on_error)
    app.add_middleware(Edge, service=service)
    return app

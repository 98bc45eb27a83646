"""POST /v1/chat/completions and /v1/completions: one path from body to response."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from server.answer import Answer
from server.errors import ApiError
from server.job import Job, make_job
from server.link import Inbox
from server.render import ChatRenderer, CompletionRenderer, Renderer
from server.response import AnswerResponse
from server.routes.body import parse_json, read_body
from server.schema.chat import CHAT_NEUTRAL, ChatRequest
from server.schema.common import SamplingFields, validate
from server.schema.completions import COMPLETION_NEUTRAL, CompletionRequest
from server.service import Model, Service

INLINE_BODY_BYTES = 16 * 1024


def model_not_found(name: str) -> ApiError:
    """404 for a model that is not served here."""
    return ApiError(404, f"The model '{name[:128]}' does not exist.", param="model", code="model_not_found")


def check_model(fields: SamplingFields, model: Model) -> str:
    """The requested name, or the served one when the request has none."""
    if fields.model is not None and fields.model not in ("", model.name):
        raise model_not_found(fields.model)
    return fields.model or model.name


class Route(Protocol):
    """What differs between the two generation routes."""

    @abstractmethod
    def job(self, data: Any, model: Model, max_choices: int) -> Job:
        """A decoded body as a job; may take long, runs off the event loop for large bodies."""

    @abstractmethod
    def renderer(self, job: Job, model: Model) -> Renderer:
        """How its answer looks."""


class ChatRoute(Route):
    """/v1/chat/completions."""

    def job(self, data: Any, model: Model, max_choices: int) -> Job:
        """See `Route`."""
        fields = validate(data, ChatRequest, CHAT_NEUTRAL)
        name = check_model(fields, model)
        prompt = model.encoder.encode_chat(
            fields.template_messages(),
            model.info.max_model_len,
            variables=fields.chat_template_kwargs,
            generate=fields.add_generation_prompt,
        )
        return make_job(
            "chatcmpl",
            fields,
            (tuple(prompt),),
            model=name,
            info=model.info,
            defaults=model.defaults,
            max_choices=max_choices,
            prompt_param="messages",
        )

    def renderer(self, job: Job, model: Model) -> Renderer:
        """See `Route`."""
        return ChatRenderer(job, model.tokenizer)


class CompletionRoute(Route):
    """/v1/completions."""

    def job(self, data: Any, model: Model, max_choices: int) -> Job:
        """See `Route`."""
        fields = validate(data, CompletionRequest, COMPLETION_NEUTRAL)
        name = check_model(fields, model)
        limit = model.info.max_model_len
        prompts = tuple(
            tuple(model.encoder.encode_text(prompt, limit) if isinstance(prompt, str) else prompt)
            for prompt in fields.prompt
        )
        return make_job(
            "cmpl",
            fields,
            prompts,
            model=name,
            info=model.info,
            defaults=model.defaults,
            max_choices=max_choices,
            prompt_param="prompt",
        )

    def renderer(self, job: Job, model: Model) -> Renderer:
        """See `Route`."""
        return CompletionRenderer(job, model.tokenizer)


async def generate(route: Route, service: Service, request: Request) -> Response:
    """Validates, submits, and only then lets the response begin: every refusal is a plain JSON error."""
    inbox: Inbox | None = None
    try:
        model = service.model
        inbox = service.admission.enter()
        settings = service.settings
        body = await read_body(request, limit=settings.max_body_bytes, timeout=settings.body_timeout)

        def prepare() -> Job:
            return route.job(parse_json(body), model, settings.max_choices)

        job = prepare() if len(body) <= INLINE_BODY_BYTES else await asyncio.to_thread(prepare)
        answer: Answer = await service.answer(job, inbox)
        return AnswerResponse(answer, route.renderer(job, model), inbox, service.admission.leave)
    except Exception as error:
        service.rejected(error)
        if inbox is not None:
            service.admission.leave(inbox)
        raise
    except BaseException:
        if inbox is not None:
            service.admission.leave(inbox)
        raise

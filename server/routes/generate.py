"""POST /v1/chat/completions and /v1/completions: one path from body to response."""

from __future__ import annotations

import asyncio
import logging
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from server.admission import Ticket
from server.answer import Answer
from server.deadline import HEADER, Deadline
from server.errors import ApiError, from_exception
from server.job import Job, make_job
from server.logs import event
from server.render import ChatRenderer, CompletionRenderer, Renderer
from server.response import AnswerResponse
from server.routes.body import declared_bytes, parse_json, read_body
from server.schema.chat import CHAT_NEUTRAL, ChatRequest
from server.schema.common import SamplingFields, validate
from server.schema.completions import COMPLETION_NEUTRAL, CompletionRequest
from server.service import Model, Service

INLINE_BODY_BYTES = 16 * 1024
MAX_LOGGED_CHARS = 16 * 1024  # of one prompt
_log = logging.getLogger(__name__)

Fields = TypeVar("Fields", bound=SamplingFields)
Result = TypeVar("Result")


def model_not_found(name: str) -> ApiError:
    """404 for a model that is not served here."""
    return ApiError(404, f"The model '{name[:128]}' does not exist.", param="model", code="model_not_found")


def check_model(fields: SamplingFields, model: Model) -> str:
    """The requested name, or the served one when the request has none."""
    if fields.model is not None and fields.model not in ("", model.name):
        raise model_not_found(fields.model)
    return fields.model or model.name


class Route(Protocol[Fields]):
    """What differs between the generation routes. Both steps may take long, and run off the loop for large bodies.

    `operation` names the route in traces, as the GenAI conventions do.
    """

    operation: str

    @abstractmethod
    def fields(self, data: Any, model: Model) -> Fields:
        """A decoded body, checked; nothing is rendered or in tokens yet."""

    @abstractmethod
    def job(self, fields: Fields, model: Model, max_choices: int) -> Job:
        """The work: prompts in tokens."""

    @abstractmethod
    def renderer(self, job: Job, model: Model) -> Renderer:
        """How its answer looks."""


class ChatRoute(Route[ChatRequest]):
    """/v1/chat/completions."""

    operation = "chat"

    def fields(self, data: Any, model: Model) -> ChatRequest:
        """See `Route`."""
        fields = validate(data, ChatRequest, CHAT_NEUTRAL)
        check_model(fields, model)
        return fields

    def job(self, fields: ChatRequest, model: Model, max_choices: int) -> Job:
        """See `Route`."""
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
            model=check_model(fields, model),
            info=model.info,
            defaults=model.defaults,
            max_choices=max_choices,
            prompt_param="messages",
        )

    def renderer(self, job: Job, model: Model) -> Renderer:
        """See `Route`."""
        return ChatRenderer(job, model.tokenizer)


class CompletionRoute(Route[CompletionRequest]):
    """/v1/completions."""

    operation = "text_completion"

    def fields(self, data: Any, model: Model) -> CompletionRequest:
        """See `Route`."""
        fields = validate(data, CompletionRequest, COMPLETION_NEUTRAL)
        check_model(fields, model)
        return fields

    def job(self, fields: CompletionRequest, model: Model, max_choices: int) -> Job:
        """See `Route`."""
        limit = model.info.max_model_len
        prompts = tuple(
            tuple(model.encoder.encode_text(prompt, limit) if isinstance(prompt, str) else prompt)
            for prompt in fields.prompt
        )
        return make_job(
            "cmpl",
            fields,
            prompts,
            model=check_model(fields, model),
            info=model.info,
            defaults=model.defaults,
            max_choices=max_choices,
            prompt_param="prompt",
        )

    def renderer(self, job: Job, model: Model) -> Renderer:
        """See `Route`."""
        return CompletionRenderer(job, model.tokenizer)


async def generate(route: Route[Fields], service: Service, request: Request) -> Response:
    """Validates, submits, and only then lets the response begin: every refusal is a plain JSON error.

    Whether there is room is asked three times: before the body is read, before it is rendered and in tokens, and then.
    """
    ticket: Ticket | None = None
    admission = service.admission
    trace = service.tracing.begin(request, route.operation)
    try:
        deadline = Deadline(request.headers.get(HEADER), service.settings.request_timeout)
        model = service.model
        ticket = admission.enter(declared_bytes(request))
        try:
            async with asyncio.timeout_at(deadline.at) as clock:
                settings = service.settings
                body = await read_body(request, limit=settings.max_body_bytes, timeout=settings.body_timeout)
                fields = await off_loop(body, lambda: route.fields(parse_json(body), model))
                deadline.narrow(fields.timeout)
                clock.reschedule(deadline.at)
                admission.expect(
                    ticket,
                    generations=fields.num_prompts * fields.n,
                    num_bytes=len(body),
                    longest=model.info.max_model_len,
                )
                job = await off_loop(body, lambda: route.job(fields, model, settings.max_choices))
                admission.measure(
                    ticket,
                    num_bytes=len(body),
                    prompt_tokens=sum(map(len, job.prompts)),
                    tokens=sum(len(each.prompt) for each in job.requests),
                )
                trace.describe(job)
                if settings.log_prompts == "on":
                    log_prompts(job, model)
                answer = await service.answer(job, ticket, trace)
        except TimeoutError:
            raise deadline.error() from None
    except BaseException as error:
        if isinstance(error, Exception):
            service.rejected(error)
            seen = from_exception(error)
            trace.fail(seen.kind, seen.status)
        trace.end()
        if ticket is not None:
            admission.leave(ticket)
        raise
    return respond(answer, route.renderer(job, model), service, ticket=ticket, deadline=deadline)


def respond(answer: Answer, renderer: Renderer, service: Service, *, ticket: Ticket, deadline: Deadline) -> Response:
    """The response of an accepted request; when it is over, the request has left."""
    deadline.arm(ticket.inbox)

    def leave() -> None:
        deadline.disarm()
        service.admission.leave(ticket)

    return AnswerResponse(answer, renderer, ticket.inbox, leave)


def log_prompts(job: Job, model: Model) -> None:
    """The text of every prompt, as the model sees it."""
    texts = [model.tokenizer.decode(prompt, skip_special_tokens=False)[:MAX_LOGGED_CHARS] for prompt in job.prompts]
    event(_log, logging.INFO, "prompt", answer=job.id, prompts=texts)


async def off_loop(body: bytes, work: Callable[[], Result]) -> Result:
    """Work on a body; in a thread when it is large, so that other requests are served meanwhile."""
    return work() if len(body) <= INLINE_BODY_BYTES else await asyncio.to_thread(work)

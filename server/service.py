"""The composition root of the HTTP process: settings, engine link, text, admission and metrics, in one place."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace

from runtime.api import CapacityError, EngineError, ModelInfo, RejectReason, RequestError
from server.admission import Admission, Room, Ticket
from server.answer import Answer
from server.auth import Keys
from server.errors import ApiError, DeadlineError
from server.job import Job, SamplingDefaults
from server.link import EngineLink, Health, UnavailableError
from server.meter import Meter
from server.prompt import PromptEncoder
from server.router import Load, RouterPage, load_of
from server.settings import Settings
from server.tokenizer import TextTokenizer
from server.tracing import NoTracing, Trace, Tracing


@dataclass(frozen=True, slots=True)
class Model:
    """What is known once the engine is ready."""

    name: str
    created: int
    info: ModelInfo
    encoder: PromptEncoder
    defaults: SamplingDefaults

    @property
    def tokenizer(self) -> TextTokenizer:
        """The model's tokenizer."""
        return self.encoder.tokenizer


class Service:
    """Everything a route needs. `link` may be built before anything else, so that the engine loads meanwhile."""

    def __init__(self, settings: Settings, link: EngineLink, tracing: Tracing | None = None) -> None:
        self.settings = settings
        self.tracing = tracing or NoTracing()
        self.link = link
        self.keys = Keys(settings.api_key)
        self.admission = Admission(
            Room(
                seats=settings.max_num_seqs,
                requests=settings.max_queued_requests,
                tokens=settings.max_queued_tokens,
            ),
            link.stats,
        )
        self.meter = Meter(settings.model_name, settings.proposer, link.stats)
        self.router = RouterPage(settings.model_name, self._load)
        self._model: Model | None = None
        link.observe_last(self.meter.timing)
        link.observe_lives(self.meter.engine_restarted, self._engine_ready)

    async def start(self) -> Model:
        """Loads the text half while the engine starts; returns when requests can be served."""
        encoder, defaults = await asyncio.to_thread(self._load_text)
        info = await self.link.start()
        self._model = Model(self.settings.model_name, int(time.time()), info, encoder, defaults)
        self._engine_ready(info)
        return self._model

    def _engine_ready(self, info: ModelInfo) -> None:
        """An engine came up, the first or a later one, whose capacities may differ."""
        assert self._model is not None
        self._model = replace(self._model, info=info)
        self.meter.engine_ready(info, self.settings.num_drafts, self.settings.revision)
        self.router.describe(info.choices)

    def _load_text(self) -> tuple[PromptEncoder, SamplingDefaults]:
        path = self.settings.model_path
        tokenizer = TextTokenizer.load(path)
        encoder = PromptEncoder.load(tokenizer, path)
        tokenizer.warm()
        defaults = SamplingDefaults() if self.settings.generation_config == "none" else SamplingDefaults.of_model(path)
        return encoder, defaults

    @property
    def model(self) -> Model:
        """The model; raises UnavailableError while it cannot answer."""
        if self._model is None:
            raise UnavailableError("The model is still loading; try again later.")
        if self.link.health() is not Health.SERVING:
            raise UnavailableError(f"Not available: {self.link.health().value}; try again later.")
        return self._model

    def status(self) -> str:
        """`ok` when new requests are served, else why they are not."""
        return "draining" if self.admission.draining else self.health().value

    def health(self) -> Health:
        """How the engine is, with the text half that it needs."""
        return Health.STARTING if self._model is None else self.link.health()

    def live(self) -> bool:
        """False when restarting the server is the only cure, as far as it knows."""
        return self.link.health() not in (Health.STALLED, Health.ENDED)

    def ready(self) -> bool:
        """Whether new requests are served."""
        return self.loaded() and not self.admission.draining

    def loaded(self) -> bool:
        """Whether the engine answers, draining or not."""
        return self.health() is Health.SERVING

    def scrape(self) -> bytes:
        """The metrics page."""
        self.meter.engine_up(self.loaded())
        self.meter.registries(inside=len(self.admission), submitted=self.link.open_requests())
        return self.meter.text()

    def _load(self) -> Load:
        """For a gateway. Whoever was submitted and does not run, waits, also before the engine has said so."""
        stats = self.link.stats()
        return load_of(
            waiting=max(0, self.link.open_requests() - stats.running),
            running=stats.running,
            blocks=(stats.kv_blocks_used, stats.kv_blocks_total),
            slots=(stats.state_slots_used, stats.state_slots_total),
            ready=self.ready(),
        )

    def drain(self) -> None:
        """No new requests from now on."""
        self.admission.close()
        self.meter.draining()

    def interrupt(self) -> None:
        """Ends the requests that are still running."""
        error = UnavailableError("The server is shutting down.")
        self.admission.interrupt(error)
        self.link.interrupt(error)

    async def answer(self, job: Job, ticket: Ticket, trace: Trace) -> Answer:
        """Submits a job; raises before anything was sent to the client."""
        answer = Answer(job, self.link, ticket.inbox, self.model.tokenizer, self.meter, trace)
        try:
            await answer.open()
        except CapacityError as error:
            raise self.admission.refusal(error.reason or RejectReason.QUEUE_FULL) from error
        self.admission.arrived(ticket)
        return answer

    def rejected(self, error: Exception) -> None:
        """Counts a refused generation."""
        reason = "invalid"
        if isinstance(error, CapacityError):
            reason = (error.reason or RejectReason.QUEUE_FULL).value
        elif isinstance(error, DeadlineError):
            reason = "deadline"
        elif isinstance(error, UnavailableError):
            reason = "draining" if self.admission.draining else "unavailable"
        elif isinstance(error, RequestError) and error.code == "context_length_exceeded":
            reason = "too_long"
        elif isinstance(error, EngineError) and not isinstance(error, RequestError):
            return
        elif isinstance(error, ApiError) and error.status == 401:
            reason = "auth"
        self.meter.request_rejected(reason)

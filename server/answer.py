"""An answer on its way: deltas of token ids in, pieces of text out. One path for streams and whole responses.

Owns what was really delivered: usage, `keep` of a cancelled request and the token metrics are counted here, after stop
strings cut.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from runtime.api import CancelReason, Delta, EngineError, FinishReason, Request, RequestTiming, TokenLogprobs
from server.detokenize import detokenizer
from server.job import Job
from server.link import EngineLink, Inbox
from server.logs import event
from server.meter import Meter
from server.stop import StopMatcher
from server.tokenizer import TextTokenizer
from server.tracing import Trace

OUTCOMES = {CancelReason.SHUTDOWN: "error", CancelReason.DEADLINE: "deadline"}
_log = logging.getLogger(__name__)


class GenerationError(EngineError):
    """The engine gave up on one request. The reason is for the log; the client is told that it failed."""


@dataclass(slots=True)
class TokenText:
    """One generated token for the logprobs of a response; `offset` is where its text begins in the answer."""

    logprobs: TokenLogprobs
    offset: int


@dataclass(slots=True)
class Piece:
    """Something to deliver for one choice: text, the tokens behind it, and at the end why it ended."""

    index: int
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenText] = field(default_factory=list)
    finish: str | None = None


@dataclass(slots=True)
class Usage:
    """Exact counts of one response."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    drafted_tokens: int
    accepted_tokens: int


@dataclass(slots=True)
class Pace:
    """When a generation's tokens went out."""

    first: float | None = None
    last: float = 0.0
    num_tokens: int = 0
    later_tokens: int = 0  # after the first emission

    def note(self, now: float, count: int) -> None:
        """An emission."""
        if self.first is None:
            self.first = now
        else:
            self.later_tokens += count
        self.last = now
        self.num_tokens += count

    @property
    def seconds_per_token(self) -> float:
        """After the first emission."""
        return (self.last - (self.first or 0.0)) / self.later_tokens


class Choice:
    """One generation: its decoder, its stop strings, its counts."""

    def __init__(self, index: int, request: Request, job: Job, tokenizer: TextTokenizer) -> None:
        fields = job.fields
        self.index = index
        self.request = request
        self.num_tokens = 0
        self.pace = Pace()
        self.finish: str | None = None
        self.stopped_by_string = False
        self.drafted = self.accepted = self.cached_tokens = 0
        self.timing: RequestTiming | None = None
        self._min_tokens = request.sampling.min_tokens
        self._show_stop = fields.include_stop_str_in_output
        self._decoder = detokenizer(tokenizer, skip_special_tokens=fields.skip_special_tokens)
        self._stops = StopMatcher(fields.stop, include=self._show_stop)
        self._one_by_one = self._stops.active or request.sampling.logprobs is not None
        self._chars = 0
        self._pending = Piece(index)

    def take(self, delta: Delta) -> None:
        """Adds what a delta brings."""
        self.drafted, self.accepted = max(self.drafted, delta.drafted), max(self.accepted, delta.accepted)
        self.cached_tokens = max(self.cached_tokens, delta.cached_tokens)
        self.timing = delta.timing or self.timing
        if self.finish is not None:
            return
        tokens = delta.tokens
        hidden = 1 if delta.finish is FinishReason.STOP and tokens and not self._show_stop else 0
        if self._one_by_one:
            self._take_each(delta, len(tokens) - hidden)
        else:
            self._pending.text += self._decoder.feed(tokens[: len(tokens) - hidden])
            self._pending.tokens += tokens
            self.num_tokens += len(tokens)
        if self.finish is None and delta.finish is not None:
            self._end(delta)

    def _take_each(self, delta: Delta, visible: int) -> None:
        for position, token in enumerate(delta.tokens):
            self.num_tokens += 1
            self._pending.tokens.append(token)
            if delta.logprobs is not None:
                self._pending.logprobs.append(TokenText(delta.logprobs[position], self._chars))
            if position >= visible:
                continue
            self._add(self._decoder.feed((token,)))
            if self._stops.matched is not None:
                self.finish = "stop"
                self.stopped_by_string = delta.finish is None
                return

    def _add(self, text: str) -> None:
        """Text past the stop matcher, which sleeps until `min_tokens` are there."""
        self._chars += len(text)
        if self.num_tokens < self._min_tokens:
            self._pending.text += text
        else:
            self._pending.text += self._stops.feed(text)

    def _end(self, delta: Delta) -> None:
        if delta.finish not in (FinishReason.STOP, FinishReason.LENGTH):
            event(_log, logging.WARNING, "generation failed", generation=self.request.id, error=delta.error)
            raise GenerationError(delta.error or "aborted")
        self._pending.text += self._stops.feed(self._decoder.flush())
        if self._stops.matched is not None:
            self.finish = "stop"
            return
        self._pending.text += self._stops.flush()
        self.finish = delta.finish.value

    def piece(self) -> Piece | None:
        """What can be delivered now. Tokens whose text is still held back wait for it."""
        piece = self._pending
        if not piece.text and self.finish is None:
            return None
        piece.finish = self.finish
        self._pending = Piece(self.index)
        return piece


class Answer:
    """All choices of one HTTP request."""

    def __init__(
        self, job: Job, link: EngineLink, inbox: Inbox, tokenizer: TextTokenizer, meter: Meter, trace: Trace
    ) -> None:
        self.job = job
        self.trace = trace
        self._link = link
        self._inbox = inbox
        self._meter = meter
        self._choices = {
            request.id: Choice(index, request, job, tokenizer) for index, request in enumerate(job.requests)
        }
        self._open: set[str] = set()  # accepted by the engine, last delta not seen
        self._started = time.perf_counter()
        self._answering = False

    async def open(self) -> None:
        """Submits every choice at once; returns when the engine accepted all, else none is left behind."""
        requests = self.job.requests
        submitted = time.time_ns()
        try:
            answers = await asyncio.gather(
                *[self._link.submit(request, self._inbox) for request in requests], return_exceptions=True
            )
            for answer in answers:
                if isinstance(answer, BaseException):
                    raise answer
        except BaseException as error:  # waiting here is interrupted by the request's deadline alone
            reason = CancelReason.DEADLINE if isinstance(error, asyncio.CancelledError) else CancelReason.CLIENT_GONE
            for request in requests:
                self._link.cancel(request.id, reason, 0)
            raise
        self._open = {request.id for request in requests}
        self.trace.queue(submitted)
        self._meter.prompts_accepted(sum(map(len, self.job.prompts)))
        for request in requests:
            self._meter.request_accepted(len(request.prompt), request.sampling.max_tokens)

    async def pieces(self) -> AsyncIterator[list[Piece]]:
        """What to deliver, as it comes, until every choice has ended. Raises EngineError when one cannot."""
        while self._open:
            touched: dict[int, Choice] = {}
            try:
                for delta in await self._inbox.receive():
                    choice = self._choices[delta.request_id]
                    if choice.request.id in self._open:
                        touched[choice.index] = choice
                        self._take(choice, delta)
            except EngineError:
                for choice in touched.values():  # nobody gets their text any more, but they are counted
                    self._emit(choice)
                raise
            pieces = [piece for choice in touched.values() if (piece := self._emit(choice)) is not None]
            if pieces:
                yield pieces

    def _take(self, choice: Choice, delta: Delta) -> None:
        choice.take(delta)
        if choice.finish is None:
            return
        self._open.discard(choice.request.id)
        if choice.stopped_by_string:
            self._link.cancel(choice.request.id, CancelReason.STOP_STRING, choice.num_tokens)

    def _emit(self, choice: Choice) -> Piece | None:
        """What a choice has to say after a round of deltas; the round is one emission for the metrics."""
        now = time.perf_counter()
        count = choice.num_tokens - choice.pace.num_tokens
        if count and choice.pace.first is None:
            self._meter.first_tokens(now - self._started, count)
            if not self._answering:
                self._answering = True
                self.trace.first_token(choice.timing)
        elif count:
            self._meter.more_tokens(now - choice.pace.last, count)
        if count:
            choice.pace.note(now, count)
        if choice.finish is not None:
            self._meter.request_finished(choice.finish, choice.num_tokens, now - self._started)
            if choice.pace.later_tokens:
                self._meter.request_pace(choice.pace.seconds_per_token)
        return choice.piece()

    def close(self, reason: CancelReason) -> None:
        """Takes back what has not ended. Harmless when everything has."""
        for request_id in sorted(self._open):
            choice = self._choices[request_id]
            self._emit(choice)
            self._link.cancel(request_id, reason, choice.num_tokens)
            self._meter.request_finished(
                OUTCOMES.get(reason, "abort"), choice.num_tokens, time.perf_counter() - self._started
            )
        self._open.clear()

    @property
    def num_tokens(self) -> int:
        """Generated tokens delivered so far, over all choices."""
        return sum(choice.num_tokens for choice in self._choices.values())

    @property
    def finish_reasons(self) -> list[str]:
        """Why each choice ended; those that have not are left out."""
        return [choice.finish for choice in self._choices.values() if choice.finish is not None]

    def usage(self) -> Usage:
        """The counts: each prompt once, every choice's tokens."""
        choices = list(self._choices.values())
        return Usage(
            prompt_tokens=sum(map(len, self.job.prompts)),
            completion_tokens=sum(choice.num_tokens for choice in choices),
            cached_tokens=sum(choice.cached_tokens for choice in choices[:: self.job.n]),
            drafted_tokens=sum(choice.drafted for choice in choices),
            accepted_tokens=sum(choice.accepted for choice in choices),
        )

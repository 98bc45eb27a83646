"""Both links keep the same promises; the process link also when its process does not."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from runtime.api import (
    CancelReason,
    CapacityError,
    Delta,
    EngineConfig,
    EngineError,
    FinishReason,
    Progress,
    Rejected,
    RejectReason,
    Request,
    RequestError,
    SamplingParams,
)
from server.engine_process import worker_command
from server.inline_link import InlineLink
from server.link import EngineGoneError, EngineLink, Health, Inbox, StartError, UnavailableError, refusal
from server.process_link import ProcessLink
from server.restarts import Restarts
from tests.server.live import PATIENCE
from tests.support.fake_engine import EOS, FakeEngine

Scenario = Callable[[EngineLink], Coroutine[Any, Any, None]]


def request(name: str = "a", prompt: tuple[int, ...] = (5, 6, 7), **sampling: Any) -> Request:
    return Request(id=name, prompt=prompt, sampling=SamplingParams(**{"max_tokens": 50} | sampling))


def process_link(mode: str, *, restarts: int = 0, **options: Any) -> ProcessLink:
    def command(fd: int) -> list[str]:
        return [sys.executable, "-m", "tests.server.fake_worker", str(fd), mode]

    config = EngineConfig(model_dir="x", max_queued_requests=2)
    return ProcessLink(config, restarts=Restarts(restarts, 0.01, 600.0), command=command, **options)


def run(make: Callable[[], EngineLink], scenario: Scenario) -> None:
    async def body() -> None:
        link = make()
        try:
            await link.start()
            await scenario(link)
        finally:
            await link.close()

    asyncio.run(asyncio.wait_for(body(), PATIENCE))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.005)


async def collect(inbox: Inbox, count: int = 1) -> list[Delta]:
    deltas: list[Delta] = []
    while sum(delta.finish is not None for delta in deltas) < count:
        deltas += await inbox.receive()
    return deltas


LINKS: list[Callable[[], EngineLink]] = [
    lambda: InlineLink(FakeEngine(max_queued=2)),
    lambda: process_link("ok"),
]


@pytest.fixture(params=LINKS, ids=["inline", "process"])
def make(request: pytest.FixtureRequest) -> Callable[[], EngineLink]:
    made: Callable[[], EngineLink] = request.param
    return made


def test_generation(make: Callable[[], EngineLink]) -> None:
    async def scenario(link: EngineLink) -> None:
        inbox, last = Inbox(), list[Delta]()
        link.observe_last(last.append)
        await link.submit(request(), inbox)
        deltas = await collect(inbox)
        assert [token for delta in deltas for token in delta.tokens] == [5, 6, 7, EOS]
        assert deltas[-1].finish is FinishReason.STOP
        assert last == deltas[-1:]
        assert link.open_requests() == 0
        assert link.stats().tokens_emitted == 4
        assert link.health() is Health.SERVING
        assert link.silence() < PATIENCE

    run(make, scenario)


def test_an_idle_engine_is_heard(make: Callable[[], EngineLink]) -> None:
    async def scenario(link: EngineLink) -> None:
        await until(lambda: link.silence() > 0.1)
        await until(lambda: link.silence() < 0.1)

    run(make, scenario)


def test_several_requests_share_an_inbox(make: Callable[[], EngineLink]) -> None:
    async def scenario(link: EngineLink) -> None:
        inbox = Inbox()
        await link.submit(request("a"), inbox)
        await link.submit(request("b", (8, 9)), inbox)
        deltas = await collect(inbox, 2)
        by_id = {
            name: [token for delta in deltas if delta.request_id == name for token in delta.tokens] for name in "ab"
        }
        assert by_id == {"a": [5, 6, 7, EOS], "b": [8, 9, EOS]}

    run(make, scenario)


def test_cancel_delivers_nothing_more(make: Callable[[], EngineLink]) -> None:
    async def scenario(link: EngineLink) -> None:
        inbox, last = Inbox(), list[Delta]()
        link.observe_last(last.append)
        await link.submit(request(ignore_eos=True, max_tokens=100_000), inbox)
        await inbox.receive()
        link.cancel("a", CancelReason.CLIENT_GONE, 1)
        link.cancel("a", CancelReason.CLIENT_GONE, 1)
        link.cancel("unknown", CancelReason.CLIENT_GONE, 0)
        await until(lambda: link.open_requests() == 0)
        assert [delta.finish for delta in last] == [FinishReason.ABORT]
        assert all(delta.finish is None for delta in inbox._deltas)

    run(make, scenario)


def test_a_full_queue_is_a_capacity_error() -> None:
    async def scenario(link: EngineLink) -> None:
        with pytest.raises(CapacityError):
            await link.submit(request(), Inbox())
        assert link.open_requests() == 0

    run(lambda: InlineLink(FakeEngine(max_queued=0)), scenario)


def test_a_closed_link_refuses(make: Callable[[], EngineLink]) -> None:
    async def scenario(link: EngineLink) -> None:
        await link.close()
        with pytest.raises(UnavailableError):
            await link.submit(request(), Inbox())

    run(make, scenario)


def test_progress_is_reported() -> None:
    seen: list[Progress] = []

    async def scenario(_: EngineLink) -> None:
        assert seen == [Progress("load", 0.5)]

    run(lambda: process_link("ok", on_progress=seen.append), scenario)


@pytest.mark.parametrize(
    ("mode", "message", "config"),
    [("config", "cannot work", True), ("fatal", "Out of memory", False), ("exit", r"ended.*exit code 0", False)],
)
def test_an_engine_that_cannot_start(mode: str, message: str, config: bool) -> None:
    async def body() -> None:
        link = process_link(mode)
        try:
            with pytest.raises(StartError, match=message) as caught:
                await link.start()
            assert caught.value.config is config
        finally:
            await link.close()

    asyncio.run(body())


def test_a_dying_engine_fails_those_who_wait() -> None:
    async def scenario(link: EngineLink) -> None:
        with pytest.raises(EngineGoneError):
            await link.submit(request(), Inbox())
        assert link.open_requests() == 0
        await until(lambda: link.health() is Health.ENDED)

    run(lambda: process_link("die"), scenario)


def test_a_killed_engine_fails_those_who_read() -> None:
    async def scenario(link: EngineLink) -> None:
        assert isinstance(link, ProcessLink)
        inbox = Inbox()
        await link.submit(request(ignore_eos=True, max_tokens=100_000), inbox)
        await inbox.receive()
        os.kill(link.pid, signal.SIGKILL)
        with pytest.raises(EngineGoneError):
            await collect(inbox)
        with pytest.raises(EngineGoneError):
            await link.submit(request("b"), Inbox())

    run(lambda: process_link("hold"), scenario)


def test_interrupted_submissions_end_and_accepted_ones_go_on(make: Callable[[], EngineLink]) -> None:
    async def scenario(link: EngineLink) -> None:
        inbox = Inbox()
        await link.submit(request(), inbox)
        link.interrupt(UnavailableError("The server is shutting down."))
        with pytest.raises(UnavailableError, match="shutting down"):
            await link.submit(request("b"), Inbox())
        assert (await collect(inbox))[-1].finish is FinishReason.STOP
        assert link.health() is Health.SERVING

    run(make, scenario)


def test_interrupted_submissions_do_not_wait_for_a_silent_engine() -> None:
    async def scenario(link: EngineLink) -> None:
        assert isinstance(link, ProcessLink)
        os.kill(link.pid, signal.SIGSTOP)
        waiting = asyncio.create_task(link.submit(request(), Inbox()))
        await until(lambda: link.open_requests() == 1)
        link.interrupt(UnavailableError("The server is shutting down."))
        with pytest.raises(UnavailableError, match="shutting down"):
            await waiting

    run(lambda: process_link("ok"), scenario)


def test_a_crash_in_process_ends_everything() -> None:
    engine = FakeEngine()

    async def scenario(link: EngineLink) -> None:
        engine.crash = True
        inbox = Inbox()
        with pytest.raises(EngineError):
            await link.submit(request(), inbox)
            await collect(inbox)

    run(lambda: InlineLink(engine), scenario)


def test_an_inbox_gives_what_came_before_a_failure() -> None:
    async def body() -> None:
        inbox = Inbox()
        inbox.put(Delta(request_id="a", tokens=(1,)))
        inbox.fail(EngineGoneError("gone"))
        assert len(await inbox.receive()) == 1
        with pytest.raises(EngineGoneError):
            await inbox.receive()

    asyncio.run(body())


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        (RejectReason.QUEUE_FULL, CapacityError),
        (RejectReason.DRAINING, UnavailableError),
        (RejectReason.TOO_LONG, RequestError),
        (RejectReason.INVALID, RequestError),
    ],
)
def test_refusals_are_typed(reason: RejectReason, expected: type[EngineError]) -> None:
    error = refusal(Rejected("a", reason, "no", param="prompt"))
    assert isinstance(error, expected)
    if isinstance(error, RequestError):
        assert error.param == "prompt"
        assert (error.code == "context_length_exceeded") == (reason is RejectReason.TOO_LONG)


def test_the_worker_does_not_import_from_where_the_command_was_typed() -> None:
    command = worker_command(7)
    assert command[1] == "-P"
    assert command[-4:] == ["runtime", "worker", "--fd", "7"]

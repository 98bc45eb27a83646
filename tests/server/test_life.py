"""The engine's lives: killed, stopped, spinning, restarted, given up; by the link, and by the whole command.

The engine is scripted. tests/e2e/test_life.py does the same to the real one.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
import pytest

from runtime.api import Delta, EngineStats, FinishReason, ModelInfo, Report
from server.link import EngineGoneError, Health, Inbox, StartError, Switchboard, UnavailableError
from server.process_link import ProcessLink
from tests.server.command import MODEL, Command, children, metrics, probe, start, stream
from tests.server.live import COMPLETIONS, PATIENCE, wait_until
from tests.server.test_link import collect, process_link, request, until

STALL = 1.0  # the limit of these tests
BOUND = 10 * (STALL + 1.0)  # ten times what is promised


class Lives:
    """A link and what it told of its engines."""

    def __init__(self, mode: str, **options: Any) -> None:
        self.link: ProcessLink = process_link(mode, **options)
        self.restarts: list[str] = []
        self.ready: list[ModelInfo] = []
        self.link.observe_lives(self.restarts.append, self.ready.append)

    async def run_one(self, name: str) -> None:
        inbox = Inbox()
        await self.link.submit(request(name), inbox)
        assert (await collect(inbox))[-1].finish is FinishReason.STOP

    async def is_(self, health: Health) -> None:
        await until(lambda: self.link.health() is health)


def run(scenario: Callable[[Lives], Coroutine[Any, Any, None]], mode: str, **options: Any) -> None:
    async def body() -> None:
        lives = Lives(mode, **options)
        try:
            await lives.link.start()
            await scenario(lives)
        finally:
            await lives.link.close()
            lives.link.kill()

    asyncio.run(asyncio.wait_for(body(), PATIENCE))


def test_a_killed_engine_is_replaced_and_its_counts_stay() -> None:
    async def scenario(lives: Lives) -> None:
        link = lives.link
        first = link.pid
        await lives.run_one("a")
        inbox = Inbox()
        await link.submit(request("b", ignore_eos=True, max_tokens=100_000), inbox)
        await inbox.receive()
        os.kill(first, signal.SIGKILL)
        with pytest.raises(EngineGoneError):
            await collect(inbox)
        assert link.health() is Health.RESTARTING
        emitted = link.stats().tokens_emitted
        with pytest.raises(EngineGoneError):
            await link.submit(request("c"), Inbox())
        await until(lambda: len(lives.ready) == 1)
        assert link.health() is Health.SERVING
        assert link.pid != first
        assert link.open_requests() == 0
        assert link.stats().running == 0
        await lives.run_one("d")
        assert link.stats().tokens_emitted == emitted + 4
        assert lives.restarts == ["crash"]

    run(scenario, "ok", restarts=1)


def test_an_engine_that_does_not_start_again_is_given_up(tmp_path: Path) -> None:
    async def scenario(lives: Lives) -> None:
        os.kill(lives.link.pid, signal.SIGKILL)
        await lives.is_(Health.ENDED)
        assert lives.restarts == ["crash", "start", "start"]
        assert lives.ready == []
        with pytest.raises(UnavailableError):
            await lives.link.submit(request(), Inbox())

    run(scenario, f"once:{tmp_path / 'lived'}", restarts=3)


def test_no_restart_when_none_is_allowed() -> None:
    async def scenario(lives: Lives) -> None:
        os.kill(lives.link.pid, signal.SIGKILL)
        await lives.is_(Health.ENDED)
        assert lives.restarts == []

    run(scenario, "ok", restarts=0)


@pytest.mark.parametrize("how", ["stopped", "spinning"])
def test_a_stalled_engine_may_go_on(how: str) -> None:
    """Reported only: nothing in flight is lost when it was a pause after all. `spinning` talks but finishes no step."""

    async def scenario(lives: Lives) -> None:
        link = lives.link
        inbox = Inbox()
        await link.submit(request("a", (5,) * 20), inbox)
        if how == "stopped":
            os.kill(link.pid, signal.SIGSTOP)
        began = time.monotonic()
        await lives.is_(Health.STALLED)
        assert STALL / 2 < time.monotonic() - began < BOUND
        if how == "stopped":
            os.kill(link.pid, signal.SIGCONT)
        await link.submit(request("go on", (9,)), Inbox())
        assert (await collect(inbox))[-1].finish is FinishReason.STOP
        await lives.is_(Health.SERVING)
        assert lives.restarts == []

    run(scenario, "hold", restarts=1, stall_timeout=STALL)


@pytest.mark.parametrize("how", ["stopped", "spinning"])
def test_a_stalled_engine_is_replaced_when_asked_for(how: str) -> None:
    async def scenario(lives: Lives) -> None:
        inbox = Inbox()
        await lives.link.submit(request("a", (5,) * 20), inbox)
        if how == "stopped":
            os.kill(lives.link.pid, signal.SIGSTOP)
        with pytest.raises(EngineGoneError, match="no progress"):
            await collect(inbox)
        await until(lambda: len(lives.ready) == 1)
        assert lives.restarts == ["stall"]

    run(scenario, "hold", restarts=1, stall_timeout=STALL, stall_action="restart")


def test_an_idle_engine_does_not_stall() -> None:
    async def scenario(lives: Lives) -> None:
        await asyncio.sleep(4.0)
        assert lives.restarts == []
        assert lives.link.health() is Health.SERVING

    run(scenario, "ok", restarts=1, stall_timeout=2.5, stall_action="restart")


def test_time_in_which_nobody_listened_does_not_count() -> None:
    async def scenario(lives: Lives) -> None:
        await asyncio.sleep(1.0)  # it is being watched
        os.kill(lives.link.pid, signal.SIGSTOP)
        time.sleep(4.0)  # both processes stand still, as in a container that is paused
        os.kill(lives.link.pid, signal.SIGCONT)
        await asyncio.sleep(1.0)
        assert lives.restarts == []
        assert lives.link.health() is Health.SERVING

    run(scenario, "ok", restarts=1, stall_timeout=2.5, stall_action="restart")


def test_forgiven_silence_is_never_less_than_none() -> None:
    board = Switchboard()
    board.forgive(-100.0)
    assert board.silence > 99.0
    board.forgive(50.0)
    assert 49.0 < board.silence < 51.0
    board.forgive(1000.0)
    assert 0.0 <= board.silence < 1.0


@pytest.mark.parametrize(
    ("serial", "deltas", "busy", "progress"),
    [
        (0, (), {}, True),
        (0, (), {"running": 1}, False),
        (0, (), {"waiting_seqs": 1}, False),
        (0, (), {"waiting_kv": 1}, False),
        (0, (), {"waiting_state": 1}, False),
        (0, (), {"waiting_deferred": 1}, False),
        (1, (), {"running": 1}, True),
        (0, (Delta(request_id="a", finish=FinishReason.ERROR),), {"running": 1}, True),
    ],
)
def test_what_progress_is(serial: int, deltas: tuple[Delta, ...], busy: dict[str, int], progress: bool) -> None:
    board = Switchboard()
    board.forgive(-100.0)
    board.deliver(Report((), deltas, EngineStats(step_serial=serial, **busy)))
    assert (board.silence < 50.0) == progress


def test_an_engine_must_be_ready_in_time() -> None:
    async def body() -> None:
        link = process_link("loading", start_timeout=0.5)
        try:
            with pytest.raises(StartError, match=r"not ready within 0\.5 seconds") as caught:
                await link.start()
            assert not caught.value.config
        finally:
            await link.close()

    asyncio.run(asyncio.wait_for(body(), PATIENCE))


def engine_of(command: Command) -> int:
    (pid,) = children(command.process.pid)
    return pid


def test_the_command_outlives_its_engine(commands: list[Command], tmp_path: Path) -> None:
    """Killed once: replaced, and nothing on the metrics page falls. Killed again: given up, and it says so."""
    command = start(
        commands, "hold", "--engine-restarts", "1", "--engine-restart-backoff", "0.5", "--log-level", "warning"
    ).ready()
    received: list[str] = []
    reader = stream(command.url, received)
    wait_until(lambda: len(received) > 0)
    before = metrics(command)
    os.kill(engine_of(command), signal.SIGKILL)
    reader.join(PATIENCE)
    assert "".join(received).endswith("data: [DONE]\n\n")
    assert "server_is_overloaded" in "".join(received)
    refused = httpx.post(command.url + COMPLETIONS, json={"prompt": [5]}, timeout=PATIENCE)
    if probe(command, "/ready") == 503:  # else it was faster than we are
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
    assert probe(command, "/live") == 200
    wait_until(lambda: probe(command, "/ready") == 200)
    after = metrics(command)
    gone = [name for name in before if name.split("{")[0].endswith(("_total", "_count", "_bucket", "_sum"))]
    assert [name for name in gone if after[name] < before[name]] == []
    assert after[f"lockstep_engine_tokens_emitted_total{{{MODEL}}}"] > 0
    assert after[f'lockstep_engine_restarts_total{{{MODEL},reason="crash"}}'] == 1
    assert after[f"lockstep_engine_up{{{MODEL}}}"] == 1
    assert after[f"lockstep_requests_running{{{MODEL}}}"] == 0

    os.kill(engine_of(command), signal.SIGKILL)
    wait_until(lambda: probe(command, "/live") == 503)
    assert httpx.get(command.url + "/live", timeout=PATIENCE).json() == {"status": "the engine ended"}
    assert probe(command, "/ready") == probe(command, "/health") == 503
    assert httpx.post(command.url + COMPLETIONS, json={"prompt": [5]}, timeout=PATIENCE).status_code == 503
    assert metrics(command)[f"lockstep_engine_up{{{MODEL}}}"] == 0
    command.signal()
    code, errors = command.end()
    assert code == 0
    assert "engine is ready again" in errors
    assert "engine is not restarted again" in errors


def test_a_drain_does_not_wait_for_a_stalled_engine(commands: list[Command]) -> None:
    command = start(commands, "ok", "--stall-timeout", str(STALL), "--drain-timeout", "3600").ready()
    received: list[str] = []
    os.kill(engine_of(command), signal.SIGSTOP)
    began = time.monotonic()
    reader = stream(command.url, received)  # waits for the engine's acceptance
    wait_until(lambda: probe(command, "/live") == 503)
    assert time.monotonic() - began < BOUND
    assert probe(command, "/ready") == 503
    command.signal()
    reader.join(PATIENCE)
    assert command.end()[0] == 0
    assert "server_is_overloaded" in "".join(received)

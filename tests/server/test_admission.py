"""Overload is answered before anything is parsed; what is inside is counted once, and leaves nothing behind."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from runtime.api import CapacityError, EngineStats, RejectReason, RequestError
from server.admission import MAX_RETRY_AFTER, Admission, Guess, Pace, Room, Ticket
from server.deadline import Deadline
from server.prompt import PromptEncoder
from server.tokenizer import TextTokenizer
from tests.server.live import COMPLETIONS, PATIENCE, LiveServer, live, wait_until
from tests.support.fake_engine import FakeEngine


def admission(stats: EngineStats | None = None, *, seats: int = 1, requests: int = 2, tokens: int = 0) -> Admission:
    found = stats or EngineStats()
    return Admission(Room(seats=seats, requests=requests, tokens=tokens), lambda: found)


def reason_of(error: pytest.ExceptionInfo[CapacityError]) -> RejectReason | None:
    return error.value.reason


# --- counting


def test_free_seats_and_waiting_places_and_not_one_more() -> None:
    stats = EngineStats()
    door = admission(stats, seats=2, requests=3)
    tickets = [door.enter() for _ in range(5)]
    with pytest.raises(CapacityError) as error:
        door.enter()
    assert reason_of(error) is RejectReason.QUEUE_FULL
    for ticket in tickets:
        door.arrived(ticket)
    stats.running, stats.waiting_seqs = 2, 3
    with pytest.raises(CapacityError):
        door.enter()
    stats.waiting_seqs = 2
    assert isinstance(door.enter(), Ticket)


@pytest.mark.parametrize("lack", ["waiting_kv", "waiting_state"])
def test_seats_without_room_are_not_free(lack: str) -> None:
    stats = EngineStats(running=1)
    setattr(stats, lack, 3)
    with pytest.raises(CapacityError):
        admission(stats, seats=8, requests=3).enter()


def test_every_choice_counts() -> None:
    door = admission(seats=1, requests=3)
    ticket = door.enter()
    door.expect(ticket, generations=4, num_bytes=10, longest=100)
    with pytest.raises(CapacityError):
        door.enter()
    door.leave(ticket)
    ticket = door.enter()
    with pytest.raises(RequestError) as error:
        door.expect(ticket, generations=5, num_bytes=10, longest=100)
    assert error.value.param == "n"


def test_tokens_are_guessed_corrected_and_bounded() -> None:
    door = admission(seats=1, requests=10, tokens=100)
    first = door.enter(4000)  # some thousand tokens, but nothing else waits
    with pytest.raises(CapacityError) as error:
        door.enter(4)
    assert reason_of(error) is RejectReason.QUEUE_TOKENS
    door.expect(first, generations=1, num_bytes=4000, longest=90)
    assert isinstance(door.enter(4), Ticket)
    door.measure(first, num_bytes=4000, prompt_tokens=50, tokens=50)
    second = door.enter(3000)  # 80 bytes a token now
    assert second.tokens < 45
    with pytest.raises(CapacityError):
        door.measure(second, num_bytes=3000, prompt_tokens=60, tokens=60)
    assert second.tokens < 45, "what was refused is not counted"


@pytest.mark.parametrize("true", [0.5, 1.0, 3.0, 20.0])
def test_the_guess_follows_what_bodies_hold(true: float) -> None:
    guess = Guess()
    assert guess.tokens(0) == 0
    for _ in range(200):
        guess.learn(int(1000 * true), 1000)
    assert guess.tokens(int(5000 * true)) == pytest.approx(5000, rel=0.02)
    for _ in range(4000):
        guess.learn(4000, 1000)
    assert guess.tokens(4000) == pytest.approx(1000, rel=0.02), "old bodies are forgotten"


def test_retry_after_is_the_time_until_half_of_the_queue_is_gone() -> None:
    now = [0.0]
    pace = Pace(lambda: now[0])
    assert pace.retry_after(100) == 1
    for _ in range(200):
        now[0] += 0.25
        pace.ended()
    assert pace.retry_after(0) == 1
    assert 12 <= pace.retry_after(100) <= 13
    now[0] += 1000.0
    assert pace.retry_after(1000) == MAX_RETRY_AFTER


class AdmissionMachine(RuleBasedStateMachine):
    """Any order of entering, correcting, arriving and leaving against a plain model of the sums."""

    @initialize(seats=st.integers(1, 4), requests=st.integers(1, 5), tokens=st.sampled_from([0, 1, 50]))
    def start(self, seats: int, requests: int, tokens: int) -> None:
        self.stats = EngineStats()
        self.door = admission(self.stats, seats=seats, requests=requests, tokens=tokens)
        self.capacity = seats + requests
        self.coming: list[Ticket] = []
        self.taken: list[Ticket] = []

    @rule(num_bytes=st.integers(0, 300))
    def enter(self, num_bytes: int) -> None:
        try:
            self.coming.append(self.door.enter(num_bytes))
        except CapacityError:
            assert self.coming or self.stats.waiting_seqs or self.stats.running

    @rule(index=st.integers(0, 9), generations=st.integers(1, 12), num_bytes=st.integers(0, 300))
    def expect(self, index: int, generations: int, num_bytes: int) -> None:
        if self.coming:
            ticket = self.coming[index % len(self.coming)]
            try:
                self.door.expect(ticket, generations=generations, num_bytes=num_bytes, longest=40)
            except (CapacityError, RequestError):
                self.drop(index)

    @rule(index=st.integers(0, 9), tokens=st.integers(1, 80))
    def measure(self, index: int, tokens: int) -> None:
        if self.coming:
            ticket = self.coming[index % len(self.coming)]
            try:
                self.door.measure(ticket, num_bytes=4 * tokens, prompt_tokens=tokens, tokens=tokens)
            except CapacityError:
                self.drop(index)

    @rule(index=st.integers(0, 9), runs=st.booleans())
    def arrive(self, index: int, runs: bool) -> None:
        if self.coming:
            ticket = self.coming.pop(index % len(self.coming))
            generations = ticket.generations
            self.door.arrived(ticket)
            self.taken.append(ticket)
            self.stats.running += generations if runs else 0
            self.stats.waiting_seqs += 0 if runs else generations

    @rule(index=st.integers(0, 9))
    def drop(self, index: int) -> None:
        if self.coming:
            ticket = self.coming.pop(index % len(self.coming))
            self.door.leave(ticket)
            self.door.leave(ticket)

    @rule()
    def engine_empties(self) -> None:
        self.stats.running = self.stats.waiting_seqs = 0
        for ticket in self.taken:
            self.door.leave(ticket)
        self.taken.clear()

    @invariant()
    def sums_hold(self) -> None:
        coming = self.door._coming
        assert coming.generations == sum(ticket.generations for ticket in self.coming)
        assert coming.tokens == sum(ticket.tokens for ticket in self.coming)
        assert len(self.door) == len(self.coming) + len(self.taken)
        assert coming.generations <= self.capacity


TestAdmissionMachine = AdmissionMachine.TestCase
TestAdmissionMachine.settings = settings(
    max_examples=40,
    stateful_step_count=25,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


# --- on the wire


@pytest.fixture
def full() -> Iterator[LiveServer]:
    """One request runs for ever, one waits, and no more may."""
    with live(FakeEngine(max_running=1), max_num_seqs=1, max_queued_requests=1) as server:
        server.engine.hold()
        connections = [post(server, {"prompt": [5] * 20, "ignore_eos": True}) for _ in range(1)]
        wait_until(lambda: server.service.link.stats().running == 1)
        connections.append(post(server, {"prompt": [5] * 20, "ignore_eos": True}))
        wait_until(lambda: server.service.link.stats().waiting_seqs == 1)
        yield server
        for connection in connections:
            connection.close()
        wait_until(lambda: len(server.service.admission) == 0)


def post(server: LiveServer, body: dict[str, Any], headers: bytes = b"") -> socket.socket:
    data = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE)
    connection.sendall(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n%scontent-length: %d\r\n\r\n%s"
        % (headers, len(data), data)
    )
    return connection


def test_a_full_queue_answers_before_the_body_is_there(full: LiveServer) -> None:
    """Headers announce 4 MiB that never come; nothing is rendered or in tokens for a request that has no place."""
    with socket.create_connection(("127.0.0.1", full.port), timeout=PATIENCE) as connection:
        connection.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: 4194304\r\n\r\n"
        )
        received = connection.recv(65536)
    assert received.startswith(b"HTTP/1.1 429 ")
    assert b"retry-after: " in received.lower()
    assert b"rate_limit_error" in received
    name = 'lockstep_requests_rejected_total{model_name="lockstep-tiny",reason="queue_full"}'
    assert full.metrics()[name] == 1


def test_nothing_is_rendered_or_tokenised_for_a_refused_request(
    full: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_args: object, **_kwargs: object) -> None:
        raise AssertionError("work for a request that has no place")

    monkeypatch.setattr(PromptEncoder, "encode_chat", fail)
    monkeypatch.setattr(PromptEncoder, "encode_text", fail)
    monkeypatch.setattr(TextTokenizer, "encode", fail)
    for response in (full.chat(), full.complete("a"), full.complete(["a"] * 100), full.complete("a", n=100)):
        assert response.status_code == 429, response.text
        assert 1 <= int(response.headers["retry-after"]) <= MAX_RETRY_AFTER


def test_choices_that_have_no_place_are_refused_before_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine(max_running=0)
    with live(engine, max_num_seqs=1, max_queued_requests=5) as server:
        waiting = post(server, {"prompt": [5]})
        wait_until(lambda: server.service.link.stats().waiting_seqs == 1)

        def fail(*_args: object, **_kwargs: object) -> None:
            raise AssertionError("work for a request that has no place")

        with monkeypatch.context() as patch:
            patch.setattr(TextTokenizer, "encode", fail)
            assert server.complete("a", n=6).status_code == 429
            assert server.complete(["a"] * 3, n=2).status_code == 429
            assert server.complete("a", n=7).status_code == 400
        assert len(engine.requests) == 1
        waiting.close()


def test_prompt_tokens_are_bounded_by_the_size_of_the_body() -> None:
    engine = FakeEngine(max_running=0)
    with live(engine, max_num_seqs=4, max_queued_tokens=200) as server:
        waiting = post(server, {"prompt": [5] * 150})
        wait_until(lambda: server.service.link.stats().waiting_tokens == 150)
        response = server.complete("word " * 600)
        assert (response.status_code, response.json()["error"]["code"]) == (429, "slow_down")
        assert "tokens" in response.json()["error"]["message"]
        name = 'lockstep_requests_rejected_total{model_name="lockstep-tiny",reason="queue_tokens"}'
        assert server.metrics()[name] == 1
        assert server.metrics()['lockstep_requests_waiting_tokens{model_name="lockstep-tiny"}'] == 150
        assert len(engine.requests) == 1
        waiting.close()


def test_the_engine_has_the_last_word_and_leaves_nothing_behind() -> None:
    with live(FakeEngine(max_queued=0)) as server:
        response = server.chat()
        assert response.status_code == 429
        assert int(response.headers["retry-after"]) >= 1
        assert len(server.service.admission) == 0
        assert server.service.admission._coming.generations == 0


# --- priority and time


def test_priority_reaches_the_engine(server: LiveServer) -> None:
    server.complete("a")
    server.complete("a", priority=-3)
    server.chat(priority=100)
    assert [request.priority for request in server.engine.requests] == [0, -3, 100]


@pytest.mark.parametrize("value", [101, -101, 1.5, "1", True])
def test_a_priority_that_is_none(shared: LiveServer, value: Any) -> None:
    response = shared.complete("a", priority=value)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "priority"


DEADLINES: list[tuple[dict[str, str], dict[str, Any], float]] = [
    ({}, {"timeout": 0.2}, 0.0),
    ({"X-Request-Timeout": "0.2"}, {}, 0.0),
    ({"X-Request-Timeout": "0.2"}, {"timeout": 3600}, 0.0),
    ({"X-Request-Timeout": "3600"}, {"timeout": 0.2}, 3600.0),
    ({}, {}, 0.2),
]


@pytest.mark.parametrize(("headers", "fields", "default"), DEADLINES)
@pytest.mark.parametrize("where", ["queue", "running"])
def test_a_request_ends_with_its_time(
    headers: dict[str, str], fields: dict[str, Any], default: float, where: str
) -> None:
    engine = FakeEngine(max_running=0 if where == "queue" else 4, freeze_after=4)
    with live(engine, request_timeout=default) as server:
        body = {"prompt": [5] * 9, "ignore_eos": True, "max_tokens": 2000, **fields}
        response = server.http.post(COMPLETIONS, json=body, headers=headers)
        assert response.status_code == 504
        error = response.json()["error"]
        assert (error["type"], error["code"]) == ("timeout_error", "deadline_exceeded")
        assert "0.2 seconds" in error["message"]
        assert response.headers["x-should-retry"] == "false"
        wait_until(lambda: server.service.link.open_requests() == 0 and len(server.service.admission) == 0)
        assert [reason.value for _, reason, _ in engine.cancels] in ([], ["deadline"])
        metrics = server.metrics()
        after = metrics['lockstep_requests_total{finish_reason="deadline",model_name="lockstep-tiny"}']
        before = metrics['lockstep_requests_rejected_total{model_name="lockstep-tiny",reason="deadline"}']
        assert after + before == 1, "counted once, whether the engine had taken it or not"


def test_a_stream_that_runs_out_of_time_says_so(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test decides when time is over: once something was delivered."""
    over: list[Callable[[], None]] = []
    monkeypatch.setattr(
        Deadline, "arm", lambda self, inbox: over.append(lambda: inbox.fail(self.error(), at_once=True))
    )
    server.engine.freeze_after = 4
    connection = post(server, {"prompt": [500] * 9, "ignore_eos": True, "stream": True, "timeout": 3600})
    received = connection.recv(65536)
    while received.count(b"data: ") < 1:
        received += connection.recv(65536)
    server.call(over[0])
    while b"[DONE]" not in received:
        received += connection.recv(65536)
    connection.close()
    assert b'"deadline_exceeded"' in received
    assert b'"finish_reason":"' not in received
    assert server.engine.cancelled.wait(PATIENCE)
    ((_, reason, keep),) = server.engine.cancels
    assert (reason.value, keep >= 1) == ("deadline", True)
    wait_until(lambda: len(server.service.admission) == 0)


def test_time_in_hand_changes_nothing(server: LiveServer) -> None:
    response = server.http.post(
        COMPLETIONS, json={"prompt": "hello", "timeout": 600}, headers={"X-Request-Timeout": "9e3"}
    )
    assert response.json()["choices"][0]["text"] == "hello"
    assert not server.engine.cancels


def test_a_body_that_comes_too_late(server: LiveServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"x-request-timeout: 0.2\r\ncontent-length: 100\r\n\r\n{"
        )
        assert connection.recv(65536).startswith(b"HTTP/1.1 504 ")
    wait_until(lambda: len(server.service.admission) == 0)
    assert not server.engine.requests


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "soon", "1e9", ""])
def test_a_header_that_is_no_time(shared: LiveServer, value: str) -> None:
    response = shared.http.post(COMPLETIONS, json={"prompt": "a"}, headers={"X-Request-Timeout": value})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "X-Request-Timeout")


@pytest.mark.parametrize("value", [0, -1, 1e9, "1", True])
def test_a_timeout_that_is_no_time(shared: LiveServer, value: Any) -> None:
    response = shared.complete("a", timeout=value)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "timeout")

"""The engine process over a real socket: what it says, and that nothing the other end does can block or outlive it."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from runtime.api import (
    FRAME_HEADER,
    MAX_FRAME_BYTES,
    Accepted,
    Cancel,
    CancelReason,
    Delta,
    EngineConfig,
    Fatal,
    FinishReason,
    Progress,
    Ready,
    Rejected,
    RejectReason,
    Report,
    Request,
    Shutdown,
    Start,
    Submit,
    ToEngine,
    ToServer,
    frame,
)
from tests.runtime.engine.harness import ASSET, Driver, build, prompts, request

ROOT = Path(__file__).parents[2]
SETTINGS = {"max_model_len": 512, "max_num_seqs": 4, "block_size": 4, "num_blocks": 300, "threads": 1}
CONFIG = EngineConfig(model_dir=str(ASSET), speculative="mtp:3", settle_lag=1, **SETTINGS)
PATIENCE = 60.0


class Peer:
    """The server's end of a worker's socket."""

    def __init__(self, sock: socket.socket, process: subprocess.Popen[bytes]) -> None:
        self.sock = sock
        self.process = process
        self._in = b""
        self._decoder = msgspec.msgpack.Decoder(ToServer)

    def send(self, *messages: ToEngine) -> None:
        self.sock.sendall(b"".join(frame(message) for message in messages))

    def receive(self, timeout: float = PATIENCE) -> ToServer:
        """The next message; EOFError when there will be none."""
        self.sock.settimeout(timeout)
        while True:
            if len(self._in) >= FRAME_HEADER.size:
                (length,) = FRAME_HEADER.unpack_from(self._in)
                if len(self._in) >= FRAME_HEADER.size + length:
                    body = self._in[FRAME_HEADER.size : FRAME_HEADER.size + length]
                    self._in = self._in[FRAME_HEADER.size + length :]
                    return self._decoder.decode(body)
            data = self.sock.recv(1 << 16)
            if not data:
                raise EOFError
            self._in += data

    def until(self, wanted: Callable[[ToServer], bool]) -> list[ToServer]:
        """All messages up to the first that is wanted."""
        seen: list[ToServer] = []
        deadline = time.monotonic() + PATIENCE
        while not seen or not wanted(seen[-1]):
            assert time.monotonic() < deadline
            seen.append(self.receive())
        return seen

    def wait(self) -> int:
        return self.process.wait(PATIENCE)


@contextmanager
def worker() -> Iterator[Peer]:
    ours, theirs = socket.socketpair()
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    process = subprocess.Popen(
        [sys.executable, "-m", "runtime", "worker", "--fd", str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        cwd=ROOT,
        stderr=subprocess.DEVNULL,
    )
    theirs.close()
    try:
        yield Peer(ours, process)
    finally:
        ours.close()
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def peer() -> Iterator[Peer]:
    """A worker that is ready, for tests that leave it idle."""
    with worker() as peer:
        peer.send(Start(CONFIG))
        seen = peer.until(lambda message: not isinstance(message, Progress))
        check_start(seen)
        yield peer
        peer.send(Shutdown())
        assert peer.wait() == 0


def check_start(seen: list[ToServer]) -> None:
    *progress, ready = seen
    assert isinstance(ready, Ready)
    phases = [message.phase for message in progress if isinstance(message, Progress)]
    assert list(dict.fromkeys(phases)) == ["import", "load", "alloc", "selftest"]
    assert all(0.0 <= message.done <= 1.0 for message in progress if isinstance(message, Progress))
    assert ready.info.architecture == "Qwen3_5ForCausalLM"
    assert ready.info.max_drafts == 3
    assert set(ready.info.startup_seconds) == {"import", "load", "alloc", "selftest"}


def finished(name: str) -> Callable[[ToServer], bool]:
    def wanted(message: ToServer) -> bool:
        assert isinstance(message, Report), message
        return any(delta.request_id == name and delta.finish is not None for delta in message.deltas)

    return wanted


def deltas_of(seen: list[ToServer], name: str) -> list[Delta]:
    return [d for message in seen if isinstance(message, Report) for d in message.deltas if d.request_id == name]


def tokens_of(seen: list[ToServer], name: str) -> list[int]:
    return [token for delta in deltas_of(seen, name) for token in delta.tokens]


def requests() -> list[Request]:
    kinds = [{}, {"temperature": 1.0, "seed": 5}, {"logprobs": 2}, {"repetition_penalty": 1.3, "stop_ids": (9,)}]
    texts = prompts(4, [1, 5, 30, 3], seed=3)
    return [request(f"r{i}", text, max_tokens=10, **kinds[i]) for i, text in enumerate(texts)]


def test_it_says_what_the_engine_says_in_process(peer: Peer) -> None:
    driver = Driver(build(ASSET, speculative="mtp:3", settle_lag=1, **SETTINGS))
    expected = driver.run(requests())
    peer.send(*(Submit(r) for r in requests()))
    seen = collect(peer, 4)
    for made in requests():
        assert tokens_of(seen, made.id) == expected[made.id].tokens
        last = deltas_of(seen, made.id)[-1]
        assert last.finish is expected[made.id].finish
        assert (last.drafted, last.accepted) == (expected[made.id].drafted, expected[made.id].accepted)
        logprobs = [entry for delta in deltas_of(seen, made.id) for entry in delta.logprobs or ()]
        assert [entry.token for entry in logprobs] == [entry.token for entry in expected[made.id].logprobs]


def collect(peer: Peer, count: int) -> list[ToServer]:
    """All messages until `count` requests have ended."""
    seen: list[ToServer] = []
    while count:
        message = peer.receive()
        assert isinstance(message, Report)
        seen.append(message)
        count -= sum(delta.finish is not None for delta in message.deltas)
    return seen


def test_a_submission_is_answered_before_anything_else_about_it(peer: Peer) -> None:
    good, bad = request("good", (5, 6), max_tokens=3), request("bad", ())
    twin = request("good", (7,), max_tokens=3)
    long = request("long", [5] * 600)
    peer.send(Submit(good), Submit(bad), Submit(twin), Submit(long))
    seen = peer.until(finished("good"))
    answers = [answer for message in seen if isinstance(message, Report) for answer in message.answers]
    assert answers[0] == Accepted(id="good")
    refused = [answer for answer in answers if isinstance(answer, Rejected)]
    assert [(r.id, r.reason) for r in refused] == [
        ("bad", RejectReason.INVALID),
        ("good", RejectReason.INVALID),
        ("long", RejectReason.TOO_LONG),
    ]
    first = next(i for i, message in enumerate(seen) if isinstance(message, Report) and message.deltas)
    told = next(i for i, message in enumerate(seen) if isinstance(message, Report) and message.answers)
    assert told <= first
    assert not deltas_of(seen, "bad")


def test_one_report_per_step_and_a_heartbeat_when_idle(peer: Peer) -> None:
    peer.send(Submit(request("steps", (5, 6, 7), max_tokens=12, num_drafts=0)))
    seen = [message for message in peer.until(finished("steps")) if isinstance(message, Report)]
    assert len([message for message in seen if message.deltas]) == 12
    serials = [message.stats.step_serial for message in seen]
    assert all(after - before <= 1 for before, after in itertools.pairwise(serials))
    idle = [peer.receive(2.0) for _ in range(6)]
    start = time.monotonic()
    idle += [peer.receive(2.0) for _ in range(4)]
    assert 0.5 < time.monotonic() - start < 4.0
    assert all(isinstance(message, Report) and not message.deltas for message in idle[2:])
    assert len({message.stats.step_serial for message in idle[2:] if isinstance(message, Report)}) == 1


def test_cancel_ends_a_request_and_only_that(peer: Peer) -> None:
    peer.send(Submit(request("a", (5, 6), max_tokens=400)), Submit(request("b", (5, 7), max_tokens=20)))
    peer.until(lambda message: isinstance(message, Report) and any(d.request_id == "a" for d in message.deltas))
    peer.send(Cancel("b-", CancelReason.CLIENT_GONE), Cancel("nobody", CancelReason.DEADLINE))
    peer.send(Cancel("a", CancelReason.STOP_STRING, keep=1))
    seen = collect(peer, 2)
    assert deltas_of(seen, "a")[-1].finish is FinishReason.ABORT
    assert deltas_of(seen, "b")[-1].finish is FinishReason.LENGTH
    assert isinstance(seen[-1], Report) and seen[-1].stats.tokens_discarded > 0


def test_cancel_may_overtake_the_first_step(peer: Peer) -> None:
    peer.send(Submit(request("short", (5, 6), max_tokens=400)), Cancel("short", CancelReason.CLIENT_GONE))
    seen = peer.until(finished("short"))
    assert isinstance(seen[-1], Report)
    assert deltas_of(seen, "short")[-1].finish is FinishReason.ABORT
    assert any(
        answer == Accepted(id="short") for message in seen if isinstance(message, Report) for answer in message.answers
    )


def test_messages_may_come_in_pieces(peer: Peer) -> None:
    raw = b"".join(frame(Submit(request(f"piece{i}", (5, 6), max_tokens=2))) for i in range(3))
    for at in range(0, len(raw), 7):
        peer.sock.sendall(raw[at : at + 7])
    collect(peer, 3)


def test_it_imports_no_web_framework_and_no_transformers(peer: Peer) -> None:
    """By what is mapped into the running process, and by what importing the worker loads."""
    maps = Path(f"/proc/{peer.process.pid}/maps").read_text()
    assert "libtorch" in maps
    assert not any(name in maps for name in ("pydantic_core", "tokenizers", "httptools"))
    code = (
        "import sys, runtime.worker\n"
        "assert 'torch' not in sys.modules\n"
        "import runtime.build, runtime.speculation.mtp, runtime.speculation.ngram\n"
        "bad = {'fastapi', 'starlette', 'pydantic', 'transformers', 'tokenizers', 'prometheus_client', 'uvicorn'}\n"
        "found = bad & {name.partition('.')[0] for name in sys.modules}\n"
        "assert not found, found\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=PATIENCE)


def test_signals_are_left_to_the_server(peer: Peer) -> None:
    peer.process.send_signal(signal.SIGINT)
    peer.process.send_signal(signal.SIGTERM)
    peer.send(Submit(request("after", (5,), max_tokens=2)))
    peer.until(finished("after"))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"model_dir": "/nonexistent/model"}, "/nonexistent/model"),
        ({"num_blocks": 2}, "cannot hold one request"),
    ],
)
def test_a_setting_that_cannot_work_is_one_sentence_and_exit_code_2(change: dict[str, object], expected: str) -> None:
    with worker() as peer:
        peer.send(Start(msgspec.structs.replace(CONFIG, **change)))
        fatal = peer.until(lambda message: not isinstance(message, Progress))[-1]
        assert isinstance(fatal, Fatal)
        assert fatal.config
        assert expected in fatal.message and "\n" not in fatal.message
        assert peer.wait() == 2


@pytest.mark.parametrize("moment", ["before start", "loading", "busy"])
def test_it_ends_by_itself_when_the_server_is_gone(moment: str) -> None:
    with worker() as peer:
        if moment != "before start":
            peer.send(Start(CONFIG))
            peer.receive()
        if moment == "busy":
            peer.until(lambda message: isinstance(message, Ready))
            peer.send(*(Submit(request(f"{i}", (5, 6), max_tokens=400)) for i in range(8)))
            peer.until(lambda message: isinstance(message, Report) and bool(message.deltas))
        peer.sock.close()
        assert peer.wait() in (0, 1)


def test_a_slow_reader_never_blocks_the_engine() -> None:
    """Nobody reads for as long as thousands of reports take, and then every one is there, in order."""
    with worker() as peer:
        peer.send(Start(CONFIG))
        peer.until(lambda message: isinstance(message, Ready))
        many = [request(f"{i}", (5 + i, 6), max_tokens=40, logprobs=20) for i in range(12)]
        peer.send(*(Submit(r) for r in many))
        busy = cpu_seconds(peer.process.pid)
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            time.sleep(0.5)
            busy, before = cpu_seconds(peer.process.pid), busy
            if busy - before < 0.05 and busy > 1.0:
                break  # it worked on without being read, and is idle now
        else:
            raise AssertionError("the engine never came to rest")
        seen = collect(peer, len(many))
        assert isinstance(seen[-1], Report)
        assert all(len(tokens_of(seen, r.id)) == 40 for r in many)
        assert sum(len(frame(message)) for message in seen) > 100_000
        serials = [message.stats.step_serial for message in seen if isinstance(message, Report)]
        assert serials == sorted(serials)
        peer.send(Shutdown())
        assert peer.wait() == 0


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


NOISE = {
    "too long": struct.pack("!I", MAX_FRAME_BYTES + 1),
    "not messagepack": frame(Shutdown())[:4] + b"\xc1" * (len(frame(Shutdown())) - 4),
    "unknown message": struct.pack("!I", 11) + b"\x81\xa4type\xa4nope",
    "wrong fields": FRAME_HEADER.pack(3) + msgspec.msgpack.encode([1, 2])[:3],
    "a second start": frame(Start(CONFIG)),
}


@pytest.mark.parametrize("kind", [kind for kind in NOISE if kind != "a second start"])
def test_noise_before_the_start_ends_it_with_a_message(kind: str) -> None:
    with worker() as peer:
        check_noise(peer, NOISE[kind])


@pytest.mark.parametrize("kind", ["unknown message", "a second start"])
def test_noise_ends_it_with_a_message(kind: str) -> None:
    with worker() as peer:
        peer.send(Start(CONFIG))
        peer.until(lambda message: isinstance(message, Ready))
        check_noise(peer, NOISE[kind])


def check_noise(peer: Peer, noise: bytes) -> None:
    peer.sock.sendall(noise)
    fatal = peer.until(lambda message: isinstance(message, Fatal))[-1]
    assert isinstance(fatal, Fatal)
    assert not fatal.config
    assert len(fatal.message) > 20 and "0x" not in fatal.message and "Traceback" not in fatal.message
    assert peer.wait() == 1

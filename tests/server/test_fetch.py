"""`lockstep fetch` against a real HTTP server that redirects, breaks off, lies and counts what it is asked."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from server.fetch import ATTEMPTS, ArgumentError, Fetcher, FetchError, Sum, client, main, parse_sums

FILES = {"config.json": b"{}", "empty": b"", "one": b"x", "parts/weights.safetensors": bytes(range(256)) * 5000}


def sums_of(files: dict[str, bytes]) -> str:
    return "".join(f"{hashlib.sha256(content).hexdigest()}  {path}\n" for path, content in files.items())


class Hub:
    """What one test's server does: `plan` maps a path to what the next requests for it get."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str | None, str | None]] = []
        self.plan: dict[str, list[str]] = {}
        self.elsewhere = ""
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def do_GET(self) -> None:
                hub.answer(self)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True)
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        path = handler.path.removeprefix("/model/")
        self.requests.append((path, handler.headers.get("Range"), handler.headers.get("Authorization")))
        steps = self.plan.get(path, [])
        step = steps.pop(0) if steps else "serve"
        content = FILES.get(path)
        if step.isdigit() or content is None:
            handler.send_response(int(step) if step.isdigit() else 404)
            handler.send_header("Content-Length", "0")
            handler.end_headers()
            return
        if step == "redirect":
            handler.send_response(302)
            handler.send_header("Location", f"{self.elsewhere}/model/{path}")
            handler.send_header("Content-Length", "0")
            handler.end_headers()
            return
        start = int((handler.headers.get("Range") or "bytes=0-").removeprefix("bytes=").rstrip("-"))
        if start and start >= len(content):
            handler.send_response(416)
            handler.send_header("Content-Length", "0")
            handler.end_headers()
            return
        if step == "lie":
            content = b"?" * len(content)
        handler.send_response(206 if start else 200)
        handler.send_header("Content-Length", str(len(content) - start))
        handler.end_headers()
        if step == "break":
            handler.wfile.write(content[start : start + 1000])
            handler.wfile.flush()
            handler.close_connection = True
            handler.connection.close()
            return
        handler.wfile.write(content[start:])

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join(10)


@pytest.fixture
def hubs() -> Iterator[Callable[[], Hub]]:
    made: list[Hub] = []

    def make() -> Hub:
        made.append(Hub())
        return made[-1]

    yield make
    for hub in made:
        hub.close()


def fetch_all(hub: Hub, directory: Path, token: str = "") -> list[str]:
    with client(token) as http:
        fetcher = Fetcher(http, hub.url + "/model", directory, pause=lambda _seconds: None)
        return [fetcher.fetch(entry) for entry in parse_sums(sums_of(FILES))]


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_every_file_once_and_then_nothing_more(hubs: Callable[[], Hub], tmp_path: Path) -> None:
    hub = hubs()
    assert fetch_all(hub, tmp_path) == ["fetched"] * len(FILES)
    assert contents(tmp_path) == FILES
    asked = len(hub.requests)
    assert fetch_all(hub, tmp_path) == ["present"] * len(FILES)
    assert len(hub.requests) == asked


def test_a_file_that_is_another_one_is_fetched_again(hubs: Callable[[], Hub], tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(b"y")
    assert fetch_all(hubs(), tmp_path) == ["fetched"] * len(FILES)
    assert contents(tmp_path) == FILES


@pytest.mark.parametrize("breaks", [0, 1, 3])
def test_a_broken_download_goes_on_where_it_ended(hubs: Callable[[], Hub], tmp_path: Path, breaks: int) -> None:
    hub = hubs()
    name = "parts/weights.safetensors"
    hub.plan[name] = ["break"] * breaks
    fetch_all(hub, tmp_path)
    assert contents(tmp_path) == FILES
    ranges = [given for path, given, _ in hub.requests if path == name]
    assert ranges == [None, *(f"bytes={1000 * (at + 1)}-" for at in range(breaks))]


def test_a_wrong_file_never_gets_its_name_and_leaves_nothing(hubs: Callable[[], Hub], tmp_path: Path) -> None:
    hub = hubs()
    hub.plan["one"] = ["lie"]
    with pytest.raises(FetchError, match="one has SHA-256"):
        fetch_all(hub, tmp_path)
    assert "one" not in contents(tmp_path)
    assert not any(path.name.endswith(".part") for path in tmp_path.rglob("*"))
    fetch_all(hub, tmp_path)
    assert contents(tmp_path) == FILES


def test_a_partial_file_that_was_complete(hubs: Callable[[], Hub], tmp_path: Path) -> None:
    (tmp_path / "one.part").write_bytes(FILES["one"])
    fetch_all(hubs(), tmp_path)
    assert contents(tmp_path) == FILES


@pytest.mark.parametrize("status", ["500", "503", "429"])
def test_what_may_pass_is_tried_again(hubs: Callable[[], Hub], tmp_path: Path, status: str) -> None:
    hub = hubs()
    hub.plan["one"] = [status] * (ATTEMPTS - 1)
    fetch_all(hub, tmp_path)
    assert contents(tmp_path) == FILES
    hub.plan["one"] = [status] * ATTEMPTS
    (tmp_path / "one").unlink()
    with pytest.raises(FetchError, match=f"answered {status}"):
        fetch_all(hub, tmp_path)


@pytest.mark.parametrize("status", ["401", "403", "404"])
def test_what_will_not_pass_is_not(hubs: Callable[[], Hub], tmp_path: Path, status: str) -> None:
    hub = hubs()
    hub.plan["one"] = [status]
    with pytest.raises(FetchError, match=f"one: the server answered {status}"):
        fetch_all(hub, tmp_path)
    assert [path for path, _, _ in hub.requests].count("one") == 1


def test_the_token_stays_with_its_host(hubs: Callable[[], Hub], tmp_path: Path) -> None:
    first, second = hubs(), hubs()
    first.elsewhere = second.url
    first.plan = {path: ["redirect"] for path in FILES}
    fetch_all(first, tmp_path, token="secret")
    assert contents(tmp_path) == FILES
    assert {token for _, _, token in first.requests} == {"Bearer secret"}
    assert {token for _, _, token in second.requests} == {None}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# nothing\n\n",
        "abc  config.json\n",
        f"{'0' * 64} config.json\n",
        f"{'0' * 64}  /etc/passwd\n",
        f"{'0' * 64}  a/../../b\n",
        f"{'0' * 64}  a\\b\n",
        f"{'0' * 64}  a.part\n",
        f"{'0' * 64}  a\n{'1' * 64}  a\n",
        f"{'g' * 64}  a\n",
    ],
)
def test_checksums_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ArgumentError):
        parse_sums(text)


def test_checksums_as_sha256sum_writes_them() -> None:
    (text, binary) = parse_sums(f"# made by hand\n{'A' * 64}  config.json\n\n{'0' * 64} *dir/b c.bin\n")
    assert text == Sum("a" * 64, text.path)
    assert (str(text.path), str(binary.path)) == ("config.json", "dir/b c.bin")


def test_the_command_and_its_exit_codes(
    hubs: Callable[[], Hub], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub = hubs()
    sums = tmp_path / "SHA256SUMS"
    token = tmp_path / "token"
    sums.write_text(sums_of(FILES))
    token.write_text("secret\n")
    target = tmp_path / "model"
    command = [hub.url + "/model/", str(target), "--sums", str(sums)]
    assert main([*command, "--token-file", str(token)]) == 0
    assert contents(target) == FILES
    assert {given for _, _, given in hub.requests} == {"Bearer secret"}
    assert capsys.readouterr().out.count("fetched") == len(FILES)

    (target / "one").unlink()
    hub.plan["one"] = ["404"]
    assert main(command) == 1
    assert "one: the server answered 404" in capsys.readouterr().err

    assert main(["ftp://x", str(target), "--sums", str(sums)]) == 2
    assert main([*command[:2], "--sums", str(tmp_path / "none")]) == 2
    sums.write_text("nonsense")
    assert main(command) == 2
    assert capsys.readouterr().err.count("lockstep fetch:") == 3

"""`lockstep fetch`: a model's files over HTTP, each checked against its SHA-256; what an init container runs.

0 every file is there and right, 1 a file could not be had or is another one, 2 an argument cannot work.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import httpx

LINE = re.compile(r"([0-9a-fA-F]{64}) [ *](.+)")
ATTEMPTS = 6
PARTIAL = ".part"


class FetchError(Exception):
    """One sentence: which file, and why not."""


class ArgumentError(FetchError):
    """What was asked for cannot work, whatever the network does."""


@dataclass(frozen=True, slots=True)
class Sum:
    """One line of a SHA256SUMS file: 64 lower-case hexadecimal digits, and a path below the model's directory."""

    digest: str
    path: PurePosixPath


def parse_sums(text: str) -> tuple[Sum, ...]:
    """The lines of `sha256sum`'s output; raises ArgumentError for anything else, and for paths that lead outside."""
    sums: list[Sum] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        match = LINE.fullmatch(line)
        if match is None:
            raise ArgumentError(f"Line {number} of the checksums is not `SHA256  PATH`.")
        path = PurePosixPath(match[2])
        if path.is_absolute() or ".." in path.parts or path.name.endswith(PARTIAL) or "\\" in match[2]:
            raise ArgumentError(f"Line {number} of the checksums names {match[2]!r}, which is no path in the model.")
        sums.append(Sum(match[1].lower(), path))
    if not sums:
        raise ArgumentError("The checksums name no file.")
    if len({entry.path for entry in sums}) < len(sums):
        raise ArgumentError("The checksums name a file twice.")
    return tuple(sums)


def digest_of(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Fetcher:
    """Brings files from one base URL into one directory. A file has its name only once it was checked."""

    def __init__(
        self, client: httpx.Client, base: str, directory: Path, *, pause: Callable[[float], None] = time.sleep
    ) -> None:
        self._client = client
        self._base = base.rstrip("/") + "/"
        self._directory = directory
        self._pause = pause

    def fetch(self, entry: Sum) -> str:
        """Makes one file right and says what was done; raises FetchError."""
        target = self._directory / entry.path
        if target.is_file() and digest_of(target) == entry.digest:
            return "present"
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(target.name + PARTIAL)
        self._download(entry, partial)
        found = digest_of(partial)
        if found != entry.digest:
            partial.unlink()
            raise FetchError(f"{entry.path} has SHA-256 {found}, not {entry.digest}.")
        partial.replace(target)
        return "fetched"

    def _download(self, entry: Sum, partial: Path) -> None:
        """Tries again after what may pass, from where the last attempt ended."""
        for attempt in range(1, ATTEMPTS + 1):
            try:
                self._attempt(entry, partial)
            except httpx.TransportError as error:
                reason = f"{type(error).__name__}: {error}"
            except (httpx.TooManyRedirects, httpx.InvalidURL) as error:
                raise FetchError(f"{entry.path}: {error}.") from error
            except httpx.HTTPStatusError as error:
                status = error.response.status_code
                if status < 500 and status not in (408, 425, 429):
                    raise FetchError(f"{entry.path}: the server answered {status}.") from error
                reason = f"the server answered {status}"
            else:
                return
            if attempt < ATTEMPTS:
                self._pause(min(2.0**attempt, 30.0))
        raise FetchError(f"{entry.path}: {reason}, {ATTEMPTS} times.")

    def _attempt(self, entry: Sum, partial: Path) -> None:
        have = partial.stat().st_size if partial.is_file() else 0
        headers = {"Range": f"bytes={have}-"} if have else {}
        with self._client.stream("GET", self._base + str(entry.path), headers=headers) as response:
            if response.status_code == httpx.codes.REQUESTED_RANGE_NOT_SATISFIABLE:
                return  # nothing is missing; the checksum decides
            response.raise_for_status()
            mode = "ab" if response.status_code == httpx.codes.PARTIAL_CONTENT else "wb"
            with partial.open(mode) as file:
                for chunk in response.iter_raw():
                    file.write(chunk)


def client(token: str = "") -> httpx.Client:
    """Follows redirects, without the token when they lead to another host; proxies come from the environment."""
    headers = {"Accept-Encoding": "identity"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    return httpx.Client(headers=headers, follow_redirects=True, timeout=httpx.Timeout(30.0))


def parser() -> argparse.ArgumentParser:
    """The command line."""
    command = argparse.ArgumentParser(prog="lockstep fetch", description=(__doc__ or "").partition("\n")[0])
    command.add_argument("url", metavar="URL", help="Where the files are: URL/config.json and so on.")
    command.add_argument("directory", metavar="DIRECTORY", type=Path, help="Where they go.")
    command.add_argument(
        "--sums", metavar="FILE", type=Path, required=True, help="Which files: what sha256sum printed beside them."
    )
    command.add_argument("--token-file", metavar="FILE", type=Path, help="File with a bearer token for the URL's host.")
    return command


def main(arguments: Sequence[str]) -> int:
    """The command."""
    given = parser().parse_args(list(arguments))
    try:
        if not given.url.startswith(("http://", "https://")):
            raise ArgumentError(f"{given.url!r} is no http or https address.")
        try:
            sums = parse_sums(given.sums.read_text(encoding="utf-8"))
            token = given.token_file.read_text(encoding="utf-8").strip() if given.token_file else ""
        except (OSError, UnicodeDecodeError) as error:
            raise ArgumentError(f"A file cannot be read: {error}") from error
        with client(token) as http:
            fetcher = Fetcher(http, given.url, given.directory)
            for entry in sums:
                sys.stdout.write(f"lockstep fetch: {entry.path} {fetcher.fetch(entry)}\n")
                sys.stdout.flush()
    except FetchError as error:
        sys.stderr.write(f"lockstep fetch: {error}\n")
        return 2 if isinstance(error, ArgumentError) else 1
    except OSError as error:
        sys.stderr.write(f"lockstep fetch: {given.directory} cannot be written: {error.strerror}.\n")
        return 1
    return 0

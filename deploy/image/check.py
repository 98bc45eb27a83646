"""Builds the image without a container engine, runs it as a cluster would, and says whether it behaves.

    sudo python3 deploy/image/check.py WORK_DIR

Needs Linux, root, buildah, unshare and setpriv; mmdebstrap too unless BASE_IMAGE names a base. The container's root
file system is mounted read-only; the process is number 1 of its own, has user 10001, no capability, and cannot get any.
Variables: VARIANT (cpu), BASE_IMAGE, TORCH_CPU_INDEX, PORT (8000), BUILD (no: check what was built before), and pip's
own (PIP_INDEX_URL, PIP_FIND_LINKS, ...), which are used while building and stay out of the image.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
IMAGE = "localhost/lockstep:check"
BASE = "localhost/lockstep-base:bookworm"
PIP = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_CERT", "PIP_DEFAULT_TIMEOUT")
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
USER = "10001"
WRITABLE = ("tmp", "var/cache/lockstep")
RUNNING_SECONDS = 600.0


def say(text: str) -> None:
    """A line of progress."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def run(*command: str, **options: Any) -> str:
    """A command's output; its failure ends the check."""
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True, **options)
    if done.returncode != 0:
        sys.exit(f"{shlex.join(command)} ended with {done.returncode}\n{done.stdout}")
    return done.stdout


class Buildah:
    """Builds and mounts images below one directory, without a daemon."""

    def __init__(self, work: Path) -> None:
        self._options = ("--root", str(work / "store"), "--runroot", str(work / "run"), "--storage-driver", "vfs")

    def __call__(self, *arguments: str) -> str:
        """One subcommand."""
        return run("buildah", *self._options, *arguments)

    def build(self, tag: str, file: Path, context: Path, *options: str) -> None:
        """`bud`, in a chroot; --format docker keeps HEALTHCHECK. No layers: vfs would copy the whole for each."""
        command = ("buildah", *self._options, "bud", "--isolation", "chroot", "--format", "docker", "--layers=false")
        subprocess.run([*command, *options, "-t", tag, "-f", str(file), str(context)], check=True)


def build_base(buildah: Buildah, work: Path) -> str:
    """A Debian with Python, from its own packages; with this machine's certificates, which an index may need."""
    context = work / "base"
    context.mkdir(parents=True, exist_ok=True)
    archive = context / "rootfs.tar"
    if not archive.is_file():
        say("base: mmdebstrap")
        packages = "--include=python3,python3-venv,ca-certificates"
        run("mmdebstrap", "--variant=minbase", packages, "bookworm", str(archive))
    shutil.copyfile(CERTIFICATES, context / CERTIFICATES.name)
    file = context / "Dockerfile"
    file.write_text(f"FROM scratch\nADD rootfs.tar /\nCOPY {CERTIFICATES.name} {CERTIFICATES}\n")
    buildah.build(BASE, file, context)
    return BASE


def build(buildah: Buildah, work: Path) -> None:
    """The image of the repository's Dockerfile."""
    base = os.environ.get("BASE_IMAGE") or build_base(buildah, work)
    arguments = {"BASE_IMAGE": base, "VARIANT": os.environ.get("VARIANT", "cpu")}
    arguments |= {name: os.environ[name] for name in (*PIP, "TORCH_CPU_INDEX") if name in os.environ}
    options = [part for name, value in arguments.items() for part in ("--build-arg", f"{name}={value}")]
    for folder in os.environ.get("PIP_FIND_LINKS", "").split():
        if Path(folder).is_dir():
            options += ["--volume", f"{folder}:{folder}:ro"]
    say(f"build: {arguments['VARIANT']} on {base}")
    started = time.monotonic()
    buildah.build(IMAGE, ROOT / "Dockerfile", ROOT, *options)
    say(f"build: {time.monotonic() - started:.0f} s")


def check_configuration(buildah: Buildah) -> dict[str, Any]:
    """What the image says to whoever runs it."""
    config: dict[str, Any] = json.loads(buildah("inspect", "--type", "image", IMAGE))["Docker"]["config"]
    assert config["User"] == f"{USER}:{USER}", config["User"]
    assert config["Entrypoint"] == ["lockstep"], config["Entrypoint"]
    assert config["Cmd"] == ["serve"], config["Cmd"]
    assert config["StopSignal"] == "SIGTERM", config["StopSignal"]
    assert config["Healthcheck"]["Test"][0] == "CMD", config["Healthcheck"]
    assert list(config["ExposedPorts"]) == ["8000/tcp"], config["ExposedPorts"]
    assert set(config["Volumes"]) == {"/" + path for path in WRITABLE}, config["Volumes"]
    assert not any(name in entry for entry in config["Env"] for name in ("PIP_", "TORCH_CPU")), config["Env"]
    assert config["Labels"]["org.opencontainers.image.licenses"] == "Apache-2.0", config["Labels"]
    return config


def check_contents(mounted: Path) -> None:
    """No compiler, no pip, nothing of how it was built; and how large it is."""
    for name in ("cc", "gcc", "c++", "g++", "clang", "tcc", "pip", "pip3"):
        found = [str(path) for path in mounted.glob(f"**/bin/{name}")]
        assert not found, found
    site = next(mounted.glob("opt/venv/lib/python3*/site-packages"))
    parts = {"whole": mounted, "environment": mounted / "opt/venv", "torch": site / "torch"}
    sizes = {name: int(run("du", "-sxm", str(path)).split()[0]) for name, path in parts.items()}
    say("size: " + ", ".join(f"{name} {size} MB" for name, size in sizes.items()))


def inside(mounted: Path, config: dict[str, Any], port: int, command: list[str]) -> list[str]:
    """The command line that runs `command` in the image: read-only, alone, without rights."""
    mounts = [f"mount --bind {mounted} {mounted}", f"mount -o remount,bind,ro {mounted}"]
    mounts += [f"mount -t tmpfs -o mode=1777 tmpfs {mounted}/{path}" for path in WRITABLE]
    mounts += [f"mount -t proc proc {mounted}/proc", f"mount --bind /dev {mounted}/dev"]
    rights = f"--reuid {USER} --regid {USER} --clear-groups --no-new-privs --bounding-set=-all --inh-caps=-all"
    environment = [*config["Env"], f"LOCKSTEP_PORT={port}", "LOCKSTEP_HOST=127.0.0.1", "LOCKSTEP_THREADS=1"]
    process = f"/usr/sbin/chroot {mounted} /usr/bin/setpriv {rights} {shlex.join(command)}"
    script = " && ".join([*mounts, f"cd / && exec env -i {shlex.join(environment)} {process}"])
    return ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-ec", script]


def child_of(process: subprocess.Popen[bytes]) -> int:
    """The process that `unshare` started: number 1 inside."""
    return int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])


def fetch(port: int, path: str, body: dict[str, Any] | None = None) -> tuple[int, bytes]:
    """Status and body of one request."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, headers)
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()
    except OSError:
        return 0, b""


def wait_for(what: str, holds: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    """Asks again until it holds, the process ends or patience does."""
    started = time.monotonic()
    while not holds():
        if process.poll() is not None or time.monotonic() - started > RUNNING_SECONDS:
            sys.exit(f"no {what}: the server ended with {process.poll()}")
        time.sleep(0.2)
    say(f"{what}: after {time.monotonic() - started:.1f} s")


def check_rights(pid: int) -> None:
    """What the kernel says of the process."""
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    assert set(status["Uid"].split() + status["Gid"].split()) == {USER}, status["Uid"]
    assert {status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd")} == {"0" * 16}, status["CapEff"]
    assert status["NoNewPrivs"] == "1"
    assert status["NSpid"].split()[-1] == "1", status["NSpid"]
    root = next(line for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines() if line.split()[4] == "/")
    assert root.split()[5].split(",")[0] == "ro", root
    say(f"rights: user {USER}, no capability, no new privileges, process 1, read-only root")


def check_stream(port: int, pid: int) -> None:
    """SIGTERM in the middle of a stream: readiness falls at once, the stream comes to its own end."""
    body = {"prompt": "Tell me a story", "max_tokens": 1500, "min_tokens": 1500, "stream": True, "temperature": 0}
    data = json.dumps(body).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", data, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as response:
        first = response.readline()
        assert first.startswith(b"data: {"), first
        os.kill(pid, signal.SIGTERM)
        status = fetch(port, "/ready")[0]
        refused = fetch(port, "/v1/completions", {"prompt": "x", "max_tokens": 1})[0]
        rest = response.read()
    assert b"data: [DONE]" in rest, rest[-200:]
    assert b'"error"' not in rest, rest[-400:]
    assert (status, refused) == (503, 503), (status, refused)
    say(f"drain: /ready {status}, a new request {refused}, the stream ended by itself")


@contextlib.contextmanager
def mounted_image(buildah: Buildah) -> Iterator[Path]:
    """The image's file system."""
    container = buildah("from", IMAGE).strip()
    try:
        yield Path(buildah("mount", container).strip())
    finally:
        buildah("umount", container)
        buildah("rm", container)


def check_running(mounted: Path, config: dict[str, Any], port: int) -> None:
    """One life of the server in the image."""
    write = ["python", "-c", "import errno\ntry: open('/x', 'w')\nexcept OSError as e: print(errno.errorcode[e.errno])"]
    written = run(*inside(mounted, config, port, write)).strip()
    assert written == "EROFS", written
    process = subprocess.Popen(inside(mounted, config, port, [*config["Entrypoint"], *config["Cmd"]]))
    try:
        wait_for("ready", lambda: fetch(port, "/ready")[0] == 200, process)
        pid = child_of(process)
        check_rights(pid)
        run(*inside(mounted, config, port, config["Healthcheck"]["Test"][1:]))
        say("health check: ends with 0")
        status, answer = fetch(port, "/v1/completions", {"prompt": "Hello", "max_tokens": 8, "temperature": 0})
        assert status == 200, answer
        usage = json.loads(answer)["usage"]
        assert usage["completion_tokens"] > 0, usage
        say(f"completion: {json.loads(answer)['choices'][0]['text']!r}, {usage['completion_tokens']} tokens")
        check_stream(port, pid)
        code = process.wait(RUNNING_SECONDS)
        assert code == 0, code
        say("exit code: 0")
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def main() -> int:
    """Builds, looks, runs."""
    if len(sys.argv) != 2 or os.geteuid() != 0:
        sys.stderr.write(__doc__ or "")
        return 2
    work = Path(sys.argv[1]).resolve()
    work.mkdir(parents=True, exist_ok=True)
    buildah = Buildah(work)
    if os.environ.get("BUILD") != "no":
        build(buildah, work)
    config = check_configuration(buildah)
    with mounted_image(buildah) as mounted:
        if os.environ.get("VARIANT", "cpu") == "cpu":
            check_contents(mounted)
        check_running(mounted, config, int(os.environ.get("PORT", "8000")))
    say("the image is as it should be")
    return 0


if __name__ == "__main__":
    sys.exit(main())

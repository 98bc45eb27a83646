"""The Dockerfile: what it promises, and that its paths lead somewhere. `make image-check` builds and runs it."""

from __future__ import annotations

import fnmatch
import subprocess
import sys
import tomllib
from pathlib import PurePosixPath

import pytest

from server.__main__ import COMMANDS
from server.settings import ENV_PREFIX, Settings
from server.settings import load as load_settings
from tests.deploy.facts import image, instructions, routes
from tests.deploy.objects import ROOT, program

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_base_is_an_argument_and_both_stages_have_it() -> None:
    first, *rest = instructions()
    assert first[0] == "ARG"
    assert first[1].startswith("BASE_IMAGE=")
    assert not first[1].endswith(":latest")
    assert [text.split()[0] for name, text in rest if name == "FROM"] == ["${BASE_IMAGE}"] * 2


def test_it_serves_as_a_user_without_rights() -> None:
    assert image().user == "10001:10001"
    assert (*image().entrypoint, *image().command) == ("lockstep", "serve")
    assert image().command[0] in COMMANDS
    assert image().stop_signal == "SIGTERM"


def test_its_variables_are_settings_and_its_port_is_theirs() -> None:
    environment = image().environment
    given = {name for name in environment if name.startswith(ENV_PREFIX)}
    assert {name.removeprefix(ENV_PREFIX).lower() for name in given} <= set(Settings.model_fields)
    settings = load_settings(list(image().command[1:]), environment)
    assert settings.host == "0.0.0.0"
    assert image().ports == (settings.port,)


def test_all_that_is_written_lies_on_declared_volumes() -> None:
    folders = [PurePosixPath(value) for value in image().environment.values() if value.startswith("/var/")]
    assert len(folders) >= 4
    for folder in folders:
        assert any(folder.is_relative_to(volume) for volume in image().volumes), folder


def test_the_health_check_is_a_program_that_asks_a_route() -> None:
    interpreter, option, source = image().health
    assert (interpreter, option) == ("python", "-c")
    compile(source, "healthcheck", "exec")
    assert "'/ready'" in source
    assert "GET" in routes()["/ready"]
    assert "LOCKSTEP_PORT" in source


def test_the_health_check_fails_where_nobody_answers() -> None:
    command = [sys.executable, *image().health[1:]]
    done = subprocess.run(command, env={"LOCKSTEP_PORT": "9"}, capture_output=True, check=False, timeout=60)
    assert done.returncode != 0


def test_labels() -> None:
    labels = {name.rpartition(".")[2]: text for name, text in image().labels.items()}
    assert labels["licenses"] == PROJECT["license"]
    versions = [
        text.partition("=")[2] for name, text in instructions() if name == "ARG" and text.startswith("VERSION=")
    ]
    assert versions == [PROJECT["version"]]


@pytest.mark.parametrize("variant", ["cpu", "cuda"])
def test_the_dependencies_are_the_project_s(variant: str) -> None:
    command = [sys.executable, "deploy/image/requirements.py", variant]
    lines = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    ).stdout.splitlines()
    extra = PROJECT["optional-dependencies"]["cuda"] if variant == "cuda" else []
    assert lines == [*PROJECT["dependencies"], *extra]


def ignored(path: str) -> bool:
    """Whether .dockerignore keeps a file out of the build: the last line that matches decides."""
    verdict = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        pattern = line.removeprefix("!")
        whole = path if pattern.startswith("**/") else "/" + path
        form = "*/" + pattern.removeprefix("**/") if pattern.startswith("**/") else "/" + pattern
        parents = [whole, *("/" + str(parent) for parent in PurePosixPath(path).parents if str(parent) != ".")]
        if any(fnmatch.fnmatchcase(each, form) for each in parents):
            verdict = not line.startswith("!")
    return verdict


def test_what_is_copied_is_there_and_not_ignored() -> None:
    sources = [
        source
        for name, text in instructions()
        if name == "COPY" and not text.startswith("--from")
        for source in text.split()[:-1]
    ]
    assert sources
    for source in sources:
        assert (ROOT / source).exists(), source
        assert not ignored(source.removeprefix("./")), source


@pytest.mark.parametrize("path", [".git", ".venv", "tests", "docs", "deploy/helm", ".env", "server/x/__pycache__"])
def test_what_is_not_needed_stays_out(path: str) -> None:
    assert ignored(path)


def test_hadolint_has_nothing_to_say_but_the_listed() -> None:
    """DL3008: the one Debian package of the cuda variant is not pinned, so that its security fixes arrive."""
    command = [program("hadolint"), "--ignore", "DL3008", "Dockerfile"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr

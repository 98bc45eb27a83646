from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from server.prompt import PromptEncoder
from server.settings import embedded_model_dir
from server.tokenizer import TextTokenizer
from tests.server.command import Command
from tests.server.live import LiveServer, live

# A busy machine is not a failure; a test that hangs meets pytest's own timeout.
hypothesis.settings.register_profile("patient", deadline=None)
hypothesis.settings.load_profile("patient")


@pytest.fixture(scope="session")
def model_dir() -> Path:
    return embedded_model_dir()


@pytest.fixture(scope="session")
def tokenizer(model_dir: Path) -> TextTokenizer:
    return TextTokenizer.load(model_dir)


@pytest.fixture(scope="session")
def encoder(tokenizer: TextTokenizer, model_dir: Path) -> PromptEncoder:
    return PromptEncoder.load(tokenizer, model_dir)


@pytest.fixture(scope="module")
def shared() -> Iterator[LiveServer]:
    """A server for tests that leave no trace in it."""
    with live() as server:
        yield server


@pytest.fixture
def commands() -> Iterator[list[Command]]:
    made: list[Command] = []
    yield made
    for command in made:
        if command.process.poll() is None:
            command.process.kill()
        command.process.communicate()


@pytest.fixture
def server() -> Iterator[LiveServer]:
    """A server for one test alone."""
    with live() as server:
        yield server

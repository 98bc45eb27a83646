"""The official OpenAI SDK against a real server: what applications do."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from openai import OpenAI

from tests.server.live import PATIENCE, LiveServer, live, wait_until
from tests.support.fake_engine import FakeEngine


@pytest.fixture(scope="module")
def keyed() -> Iterator[LiveServer]:
    with live(api_key=("sk-test",)) as server:
        yield server


@pytest.fixture(scope="module")
def client(keyed: LiveServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=keyed.url + "/v1", api_key="sk-test", max_retries=0) as client:
        yield client


def test_list_and_retrieve_models(client: OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == "lockstep-tiny"
    assert client.models.retrieve(model.id) == model


def test_chat(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="lockstep-tiny", messages=[{"role": "user", "content": "Hello 👩‍👩‍👧"}], max_completion_tokens=100
    )
    assert answer.choices[0].message.content is not None
    assert "Hello 👩‍👩‍👧" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer._request_id


def test_streaming_chat_equals_chat(client: OpenAI) -> None:
    text, usage = "", None
    stream = client.chat.completions.create(
        model="lockstep-tiny",
        messages=[{"role": "user", "content": "Hello 漢字"}],
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        if chunk.choices:
            text += chunk.choices[0].delta.content or ""
        usage = chunk.usage or usage
    whole = client.chat.completions.create(model="lockstep-tiny", messages=[{"role": "user", "content": "Hello 漢字"}])
    assert text == whole.choices[0].message.content
    assert usage == whole.usage


def test_the_stream_helper_accumulates(client: OpenAI) -> None:
    with client.chat.completions.stream(
        model="lockstep-tiny", messages=[{"role": "user", "content": "Hello"}], logprobs=True, top_logprobs=1
    ) as stream:
        completion = stream.get_final_completion()
    assert completion.choices[0].message.content
    assert completion.choices[0].logprobs is not None
    assert completion.choices[0].logprobs.content


def test_completions(client: OpenAI) -> None:
    answer = client.completions.create(model="lockstep-tiny", prompt=["one two", "three"], logprobs=1)
    assert [choice.text for choice in answer.choices] == ["one two", "three"]
    stream = client.completions.create(model="lockstep-tiny", prompt="one two", stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "one two"


def test_extensions_go_in_extra_body(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="lockstep-tiny",
        messages=[{"role": "user", "content": "Hello"}],
        extra_body={
            "top_k": 5,
            "min_p": 0.1,
            "speculation": {"num_drafts": 2},
            "return_speculation_details": True,
            "return_token_ids": True,
        },
    )
    assert answer.usage is not None
    assert answer.usage.model_extra is not None
    assert answer.usage.model_extra["speculation"]["drafted_tokens"] > 0
    assert answer.choices[0].model_extra is not None
    assert len(answer.choices[0].model_extra["token_ids"]) == answer.usage.completion_tokens


def test_an_error_of_each_kind(client: OpenAI, keyed: LiveServer) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="lockstep-tiny", prompt="x", temperature=9)
    assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="lockstep-tiny", prompt=[5] * 5000, stream=True)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="other", prompt="x")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("a/b")
    with pytest.raises(openai.BadRequestError):
        client.embeddings.create(model="lockstep-tiny", input="x")
    with (
        OpenAI(base_url=keyed.url + "/v1", api_key="wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError) as denied,
    ):
        stranger.models.list()
    assert denied.value.code == "invalid_api_key"


def test_overload_and_failures() -> None:
    engine = FakeEngine(max_queued=0)
    with live(engine) as server, OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0) as client:
        with pytest.raises(openai.RateLimitError):
            client.completions.create(model="lockstep-tiny", prompt="x")
        engine.max_queued, engine.fail_after, engine.bursts = 64, 2, (1,)
        with pytest.raises(openai.InternalServerError):
            client.completions.create(model="lockstep-tiny", prompt="a b c d")
        with pytest.raises(openai.APIError, match="failed"):
            list(client.completions.create(model="lockstep-tiny", prompt="a b c d", stream=True))
        server.call(server.service.drain)
        with pytest.raises(openai.InternalServerError) as draining:
            client.completions.create(model="lockstep-tiny", prompt="x")
        assert draining.value.status_code == 503


def test_leaving_a_stream(server: LiveServer) -> None:
    server.engine.freeze_after = 8
    with OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0) as client:
        stream = client.completions.create(
            model="lockstep-tiny", prompt=[5] * 20, stream=True, extra_body={"ignore_eos": True, "max_tokens": 2000}
        )
        next(iter(stream))
        stream.close()
    assert server.engine.cancelled.wait(PATIENCE)
    wait_until(lambda: server.service.link.open_requests() == 0)

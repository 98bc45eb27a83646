"""Chat and completions against a scripted engine: shapes, counts, and that a stream says what a response says."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from runtime.api import CancelReason, Request
from server.tokenizer import TextTokenizer
from tests.server.live import CHAT, COMPLETIONS, PATIENCE, LiveServer, live, wait_until
from tests.support.fake_engine import FakeEngine

EMOJI = "family 👩‍👩‍👧 flag 🇨🇭 漢字 שלום e\u0301!"


def says(tokenizer: TextTokenizer, text: str) -> FakeEngine:
    """An engine that always answers the same."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    return FakeEngine(script=lambda _: ids)


def join(chunks: list[dict[str, Any]], index: int = 0) -> str:
    text = ""
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] == index:
                text += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
    return text


def chat_body(content: str = "Hello there", **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], **fields}


def test_chat_response(shared: LiveServer) -> None:
    body = shared.chat("Hello there").json()
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    assert body["model"] == "lockstep-tiny"
    choice = body["choices"][0]
    assert choice["index"] == 0
    assert choice["message"]["role"] == "assistant"
    assert "Hello there" in choice["message"]["content"]
    assert choice["logprobs"] is None
    usage = body["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
    assert "speculation" not in usage


def test_ids_are_unique(shared: LiveServer) -> None:
    assert len({shared.chat().json()["id"] for _ in range(5)}) == 5


def test_completion_response(shared: LiveServer) -> None:
    body = shared.complete("Hello there").json()
    assert body["id"].startswith("cmpl-")
    assert body["object"] == "text_completion"
    assert body["choices"] == [{"index": 0, "text": "Hello there", "logprobs": None, "finish_reason": "stop"}]


def test_completions_default_to_16_tokens(shared: LiveServer) -> None:
    body = shared.complete("word " * 50).json()
    assert body["usage"]["completion_tokens"] == 16
    assert body["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("max_tokens", range(1, 14))
def test_exactly_max_tokens(shared: LiveServer, max_tokens: int) -> None:
    body = shared.complete("word " * 50, max_tokens=max_tokens, return_token_ids=True).json()
    assert body["usage"]["completion_tokens"] == max_tokens
    assert len(body["choices"][0]["token_ids"]) == max_tokens


def test_the_newer_limit_wins(shared: LiveServer) -> None:
    body = shared.chat("word " * 50, max_tokens=9, max_completion_tokens=3).json()
    assert body["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("stop", [None, "flag", ["漢字", "🇨🇭"], "never"])
def test_a_stream_says_what_a_response_says(tokenizer: TextTokenizer, path: str, stop: Any) -> None:
    fields = {"stop": stop, "max_tokens": 500, "stream_options": {"include_usage": True}, "return_token_ids": True}
    prompt: dict[str, Any] = {"prompt": "x"} if path == COMPLETIONS else chat_body("x")
    with live(says(tokenizer, EMOJI)) as server:
        chunks = server.stream(path, prompt | fields)
        whole = server.http.post(path, json=prompt | fields | {"stream_options": None}).json()
    choice = whole["choices"][0]
    text = choice["text"] if path == COMPLETIONS else choice["message"]["content"]
    assert join(chunks) == text
    assert [c["finish_reason"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"]] == [
        choice["finish_reason"]
    ]
    assert chunks[-1]["usage"] == whole["usage"]
    assert [id_ for chunk in chunks for c in chunk["choices"] for id_ in c["token_ids"]] == choice["token_ids"]
    if stop in (None, "never"):
        assert text == EMOJI
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert len({chunk["created"] for chunk in chunks}) == 1


def test_chat_stream_shape(shared: LiveServer) -> None:
    chunks = shared.stream(CHAT, chat_body())
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    for chunk in chunks:
        assert chunk["object"] == "chat.completion.chunk"
        assert "usage" not in chunk
        assert len(chunk["choices"]) == 1
        assert "finish_reason" in chunk["choices"][0]
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons[-1] == "stop"
    assert set(reasons[:-1]) == {None}


def test_usage_only_when_asked(shared: LiveServer) -> None:
    chunks = shared.stream(CHAT, chat_body(stream_options={"include_usage": True}))
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] > 0
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert all("usage" not in chunk for chunk in shared.stream(COMPLETIONS, {"prompt": "x"}))


def test_stream_headers(shared: LiveServer) -> None:
    with shared.http.stream("POST", CHAT, json=chat_body(stream=True)) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["cache-control"] == "no-cache"
        assert response.headers["x-accel-buffering"] == "no"
        assert "content-length" not in response.headers
        assert response.headers["x-request-id"]
        response.read()


def test_a_connection_serves_the_next_request_after_a_stream(shared: LiveServer) -> None:
    for _ in range(3):
        shared.stream(CHAT, chat_body())
        assert shared.chat().status_code == 200


def test_speculation_counts_only_when_asked(shared: LiveServer) -> None:
    body = shared.chat(return_speculation_details=True).json()
    counts = body["usage"]["speculation"]
    assert 0 < counts["accepted_tokens"] <= counts["drafted_tokens"]
    assert "accepted_prediction_tokens" not in str(body)


def test_speculation_can_be_switched_off_per_request(server: LiveServer) -> None:
    body = server.complete(speculation={"num_drafts": 0}, return_speculation_details=True).json()
    assert body["usage"]["speculation"] == {"drafted_tokens": 0, "accepted_tokens": 0}
    assert server.engine.requests[-1].num_drafts == 0
    assert server.complete(speculation={"num_drafts": 2}).status_code == 200
    assert server.engine.requests[-1].num_drafts == 2
    server.complete()
    assert server.engine.requests[-1].num_drafts is None


def test_token_id_prompts_are_taken_as_they_are(server: LiveServer) -> None:
    body = server.complete([5, 6, 7], return_token_ids=True).json()
    assert body["usage"]["prompt_tokens"] == 3
    assert body["choices"][0]["prompt_token_ids"] == [5, 6, 7]
    assert server.engine.requests[-1].prompt == (5, 6, 7)


def test_batches_answer_in_prompt_order(shared: LiveServer) -> None:
    prompts = ["one two three", "four", "five six"]
    body = shared.complete(prompts, n=2).json()
    assert [choice["index"] for choice in body["choices"]] == list(range(6))
    assert [choice["text"] for choice in body["choices"]] == [text for text in prompts for _ in range(2)]
    single = [shared.complete(text).json()["usage"] for text in prompts]
    assert body["usage"]["prompt_tokens"] == sum(usage["prompt_tokens"] for usage in single)
    assert body["usage"]["completion_tokens"] == 2 * sum(usage["completion_tokens"] for usage in single)
    assert shared.complete([[5, 6], [7]]).json()["usage"]["prompt_tokens"] == 3


def test_batch_streams_keep_choices_apart(shared: LiveServer) -> None:
    prompts = ["one two three", "four five"]
    chunks = shared.stream(COMPLETIONS, {"prompt": prompts, "return_token_ids": True})
    assert [join(chunks, index) for index in range(2)] == prompts
    for index in range(2):
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert [c["finish_reason"] for c in mine].count("stop") == 1
        assert mine[-1]["finish_reason"] == "stop"
        assert ["prompt_token_ids" in c for c in mine] == [True] + [False] * (len(mine) - 1)


def test_choices_have_seeds_of_their_own(server: LiveServer) -> None:
    server.chat(n=3, seed=-7)
    first = [request.sampling.seed for request in server.engine.requests]
    assert len(set(first)) == 3
    server.chat(n=3, seed=-7)
    assert [request.sampling.seed for request in server.engine.requests[3:]] == first
    server.chat(seed=-7)
    assert server.engine.requests[-1].sampling.seed == first[0]
    server.chat()
    server.chat()
    assert server.engine.requests[-1].sampling.seed != server.engine.requests[-2].sampling.seed


def test_chat_logprobs(shared: LiveServer) -> None:
    fields = {"logprobs": True, "top_logprobs": 2, "max_tokens": 40}
    body = shared.chat("né 👩", **fields).json()
    entries = body["choices"][0]["logprobs"]["content"]
    assert len(entries) == body["usage"]["completion_tokens"]
    for entry in entries:
        assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}
        assert len(entry["top_logprobs"]) == 2
        assert bytes(entry["bytes"]).decode(errors="replace") == entry["token"]
    chunks = shared.stream(CHAT, chat_body("né 👩", **fields))
    streamed = [entry for chunk in chunks for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert streamed == entries
    assert shared.chat(logprobs=True).json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


def test_completion_logprobs(shared: LiveServer) -> None:
    body = shared.complete("Hello world 漢", logprobs=2, max_tokens=40).json()
    choice = body["choices"][0]
    logprobs = choice["logprobs"]
    count = body["usage"]["completion_tokens"]
    assert {name: len(values) for name, values in logprobs.items()} == dict.fromkeys(
        ("tokens", "token_logprobs", "top_logprobs", "text_offset"), count
    )
    assert logprobs["text_offset"][0] == 0
    for token, offset, top in zip(logprobs["tokens"], logprobs["text_offset"], logprobs["top_logprobs"], strict=True):
        assert token in top
        if not token.startswith(("bytes:", "<|")):
            assert choice["text"][offset : offset + len(token)] == token


def test_an_infinite_logprob_is_a_number(tokenizer: TextTokenizer) -> None:
    from server.render import finite

    assert finite(float("-inf")) == -9999.0
    assert finite(float("nan")) == -9999.0
    assert finite(-1.5) == -1.5


def test_a_stop_string_ends_the_engine_s_work_too(tokenizer: TextTokenizer) -> None:
    engine = says(tokenizer, "one two STOP" + " three" * 100)
    engine.freeze_after = 30
    with live(engine) as server:
        body = server.complete(max_tokens=1900, stop=["STOP"], return_token_ids=True).json()
        wait_until(server.engine.cancelled.is_set)
        ((_, reason, keep),) = server.engine.cancels
        wait_until(lambda: server.service.link.open_requests() == 0)
    choice = body["choices"][0]
    assert choice["text"] == "one two "
    assert choice["finish_reason"] == "stop"
    assert reason is CancelReason.STOP_STRING
    assert keep == body["usage"]["completion_tokens"] == len(choice["token_ids"])
    assert "STOP" in tokenizer.decode(choice["token_ids"], skip_special_tokens=True)


@pytest.mark.parametrize(("include", "expected"), [(False, "one two "), (True, "one two STOP")])
def test_include_stop_str_in_output(tokenizer: TextTokenizer, include: bool, expected: str) -> None:
    with live(says(tokenizer, "one two STOP three")) as server:
        body = server.complete(max_tokens=100, stop="STOP", include_stop_str_in_output=include).json()
    assert body["choices"][0]["text"] == expected


def test_stop_token_ids_and_eos_are_hidden(tokenizer: TextTokenizer) -> None:
    ids = tokenizer.encode("one two three", add_special_tokens=False)
    with live(says(tokenizer, "one two three")) as server:
        body = server.complete(stop_token_ids=[ids[1]], return_token_ids=True).json()["choices"][0]
        assert body["text"] == tokenizer.decode(ids[:1], skip_special_tokens=True)
        assert body["token_ids"] == ids[:2]
        shown = server.complete(stop_token_ids=[ids[1]], include_stop_str_in_output=True).json()["choices"][0]
        assert shown["text"] == tokenizer.decode(ids[:2], skip_special_tokens=True)
        plain = server.complete(skip_special_tokens=False).json()["choices"][0]
        assert plain["text"] == "one two three"


def test_special_tokens_can_be_shown(tokenizer: TextTokenizer) -> None:
    with live(says(tokenizer, "a<|im_start|>b")) as server:
        assert server.complete().json()["choices"][0]["text"] == "ab"
        assert server.complete(skip_special_tokens=False).json()["choices"][0]["text"] == "a<|im_start|>b"


def test_the_first_of_stop_and_length_wins_and_stop_wins_ties() -> None:
    # one-byte tokens: token number i completes the i-th letter
    letters = "abcdef"
    ids = tuple(ord(letter) - ord("!") for letter in letters)
    with live(FakeEngine(script=lambda _: ids, bursts=(6,))) as server:
        for stop_at in range(1, 7):
            for max_tokens in range(1, 7):
                body = server.complete(stop=letters[stop_at - 1], max_tokens=max_tokens).json()
                choice = body["choices"][0]
                assert choice["finish_reason"] == ("stop" if stop_at <= max_tokens else "length")
                assert body["usage"]["completion_tokens"] == min(stop_at, max_tokens)
                assert choice["text"] == letters[: min(stop_at - 1, max_tokens)]


def test_sampling_reaches_the_engine(server: LiveServer) -> None:
    server.complete(
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        seed=11,
        repetition_penalty=1.1,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={"5": -100},
        stop_token_ids=[3],
        min_tokens=2,
        ignore_eos=True,
        max_tokens=9,
    )
    sampling = server.engine.requests[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 7, 0.1)
    assert (sampling.seed, sampling.repetition_penalty) == (11, 1.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.5)
    assert (sampling.logit_bias, sampling.stop_ids) == ({5: -100.0}, (3,))
    assert (sampling.min_tokens, sampling.ignore_eos, sampling.max_tokens) == (2, True, 9)
    assert sampling.logprobs is None


def test_model_defaults_and_neutral_values(server: LiveServer) -> None:
    server.complete()
    assert server.engine.requests[-1].sampling.temperature == 0  # generation_config.json: do_sample false
    server.complete(temperature=1, top_k=-1, top_p=0)
    sampling = server.engine.requests[-1].sampling
    assert (sampling.temperature, sampling.top_k) == (1.0, 0)
    assert 0 < sampling.top_p < 1e-3
    with live(generation_config="none") as plain:
        plain.complete()
        assert plain.engine.requests[-1].sampling.temperature == 1.0


def test_null_means_absent(server: LiveServer) -> None:
    fields = dict.fromkeys(
        ("temperature", "top_p", "stop", "seed", "n", "logit_bias", "stream", "stream_options", "tools", "max_tokens")
    )
    assert server.chat(**fields).status_code == 200


def test_unknown_fields_are_accepted(shared: LiveServer) -> None:
    assert shared.chat(some_new_field={"a": 1}, user="u", metadata={"k": "v"}, store=True).status_code == 200


def test_the_limit_is_clamped_to_the_context(server: LiveServer) -> None:
    body = server.complete([5] * 2000, max_tokens=100_000, ignore_eos=True).json()
    assert body["usage"]["completion_tokens"] == 48
    assert body["choices"][0]["finish_reason"] == "length"


def test_large_bodies_are_prepared_off_the_loop(server: LiveServer) -> None:
    body = server.complete([[5] * 1000] * 20, max_tokens=1).json()
    assert body["usage"]["prompt_tokens"] == 20_000


def test_text_parts_are_joined_without_separator(server: LiveServer) -> None:
    parts = [{"type": "text", "text": "Hello "}, {"type": "text", "text": "there"}]
    joined = server.http.post(CHAT, json={"messages": [{"role": "user", "content": parts}]}).json()
    assert joined["choices"] == server.chat("Hello there").json()["choices"]


def test_chat_history_with_tools_renders(shared: LiveServer) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "42"},
    ]
    assert shared.http.post(CHAT, json={"messages": messages}).status_code == 200


def test_an_answer_with_nothing_in_it(tokenizer: TextTokenizer) -> None:
    def silent(_: Request) -> list[int]:
        return []

    with live(FakeEngine(script=silent)) as server:
        body = server.chat().json()
        assert body["choices"][0]["message"]["content"] == ""
        assert body["usage"]["completion_tokens"] == 1
        chunks = server.stream(CHAT, chat_body())
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, "stop"]


def test_a_batch_is_submitted_at_once_and_in_order(server: LiveServer) -> None:
    server.engine.hold()
    before = server.service.link.stats().step_serial
    answer: list[Any] = []
    reader = threading.Thread(target=lambda: answer.append(server.complete([[5 + i] for i in range(50)]).json()))
    reader.start()
    wait_until(lambda: len(server.engine.requests) == 50)
    assert server.service.link.stats().step_serial == before
    server.engine.release()
    reader.join(PATIENCE)
    assert [request.prompt for request in server.engine.requests] == [(5 + i,) for i in range(50)]
    assert len(answer[0]["choices"]) == 50

"""Whatever a field holds: a job, or an error that says whose fault it is. Never anything else, never slowly."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.api import ModelInfo, RequestError
from server.errors import ApiError
from server.job import Job, SamplingDefaults, sub_seed
from server.prompt import PromptEncoder
from server.routes.body import parse_json
from server.routes.generate import ChatRoute, CompletionRoute, Route
from server.schema.chat import CHAT_NEUTRAL, ChatRequest
from server.schema.completions import COMPLETION_NEUTRAL, CompletionRequest
from server.service import Model
from server.settings import embedded_model_dir
from server.tokenizer import TextTokenizer
from tests.support.fake_engine import EOS, VOCAB

INFO = ModelInfo(
    architecture="x",
    vocab_size=VOCAB,
    max_model_len=2048,
    eos_ids=(EOS,),
    max_drafts=7,
    choices={},
    startup_seconds={},
)
MODEL = Model(
    "m",
    0,
    INFO,
    PromptEncoder.load(TextTokenizer.load(embedded_model_dir()), embedded_model_dir()),
    SamplingDefaults(),
)
ROUTES: dict[str, tuple[Route, dict[str, Any], set[str]]] = {
    "chat": (
        ChatRoute(),
        {"messages": [{"role": "user", "content": "x"}]},
        ChatRequest.model_fields.keys() | CHAT_NEUTRAL.keys(),
    ),
    "completions": (
        CompletionRoute(),
        {"prompt": "x"},
        CompletionRequest.model_fields.keys() | COMPLETION_NEUTRAL.keys(),
    ),
}
EDGES: list[Any] = [
    *(-1, 0, 1, 2**31, 2**63, -(2**63) - 1, 10**40, 1e308, -1e308, 5e-324, 0.5, True, False, None, "", "5", "NaN"),
    *([], {}, [[]], [{}], {"": None}, [None], "\x00", "x" * 2000, ["a"] * 5000, [True], {"a": {"b": {}}}),
]
values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**70), 2**70),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(max_size=5),
        st.sampled_from(["text", "function", "user", "assistant", "role", "content", "type"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "function", "name", "7"]), inner, max_size=3
        ),
    ),
    max_leaves=6,
)


def outcome(route: Route, body: dict[str, Any]) -> Job | ApiError | RequestError:
    try:
        return route.job(route.fields(parse_json(json.dumps(body).encode()), MODEL), MODEL, 128)
    except (ApiError, RequestError) as error:
        return error


@pytest.mark.parametrize("name", ROUTES)
def test_edge_values_in_every_field(name: str) -> None:
    route, base, fields = ROUTES[name]
    for field in sorted(fields):
        for value in EDGES:
            started = time.perf_counter()
            result = outcome(route, base | {field: value})
            assert time.perf_counter() - started < 5.0
            if isinstance(result, ApiError):
                assert result.status in (400, 404)
            if not isinstance(result, Job):
                assert result.param is not None
                assert result.param.split("[")[0].split(".")[0] in (field, "stream_options", "n", "top_logprobs")


@pytest.mark.parametrize("name", ROUTES)
@given(data=st.data())
def test_any_value_in_any_field(name: str, data: st.DataObject) -> None:
    route, base, fields = ROUTES[name]
    body = base | data.draw(st.dictionaries(st.sampled_from(sorted(fields)), values, max_size=4))
    result = outcome(route, body)
    if isinstance(result, Job):
        for request in result.requests:
            sampling = request.sampling
            assert 1 <= sampling.max_tokens <= INFO.max_model_len - len(request.prompt)
            assert 0 <= sampling.min_tokens <= sampling.max_tokens
            assert 0 <= sampling.temperature <= 2
            assert 0 < sampling.top_p <= 1
            assert 0 <= sampling.seed < 2**63
            assert request.prompt
            assert max(request.prompt) < INFO.vocab_size


def test_every_declared_field_is_used_or_known_to_have_no_effect() -> None:
    """A field nobody reads would be a feature silently ignored."""
    without_effect = {"user", "metadata", "safety_identifier", "prompt_cache_key", "store", "service_tier"}
    without_effect |= {"verbosity", "parallel_tool_calls", "prompt_cache_retention", "prompt_cache_options"}
    declared = ChatRequest.model_fields.keys() | CompletionRequest.model_fields.keys()
    assert not declared & (CHAT_NEUTRAL.keys() & COMPLETION_NEUTRAL.keys())
    assert without_effect < declared


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 127))
def test_sub_seeds(seed: int, choice: int) -> None:
    assert 0 <= sub_seed(seed, choice) < 2**63
    assert sub_seed(seed, choice) == sub_seed(seed, choice)


def test_sampling_defaults_of_a_model(tmp_path: Any) -> None:
    def of(config: Any) -> SamplingDefaults:
        (tmp_path / "generation_config.json").write_text(json.dumps(config))
        return SamplingDefaults.of_model(tmp_path)

    assert SamplingDefaults.of_model(tmp_path) == SamplingDefaults()
    assert of({"temperature": 0.6, "top_p": 0.9, "top_k": 20, "do_sample": True}) == SamplingDefaults(0.6, 0.9, 20)
    assert of({"temperature": 0.6, "do_sample": False}).temperature == 0
    assert of({"temperature": "hot", "top_p": 7, "top_k": None, "min_p": True}) == SamplingDefaults()

"""C9: what a user writes stays text, and ordinary text is encoded as the tokenizer encodes the whole."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.api import ConfigError, RequestError
from server.prompt import ChatTemplate, PromptEncoder, read_template
from server.schema.chat import ChatRequest
from server.settings import embedded_model_dir
from server.tokenizer import TextTokenizer

TOKENIZER = TextTokenizer.load(embedded_model_dir())
ENCODER = PromptEncoder.load(TOKENIZER, embedded_model_dir())
MARKERS = ["<|im_end|>", "<|im_start|>", "<|endoftext|>", "<tool_call>", "</tool_call>", "<tool_response>"]
LIMIT = 100_000


def user(content: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def encode(messages: list[dict[str, Any]]) -> list[int]:
    return ENCODER.encode_chat(messages, LIMIT, variables={})


def control_ids(ids: list[int]) -> list[int]:
    return [id_ for id_ in ids if id_ in TOKENIZER.markers.values()]


def rendered(messages: list[dict[str, Any]]) -> str:
    assert ENCODER.template is not None
    return ENCODER.template.render(messages, {}, generate=True)


@given(st.text(max_size=60))
def test_ordinary_text_is_encoded_jointly(content: str) -> None:
    if TOKENIZER.marker_pattern is not None and TOKENIZER.marker_pattern.search(content):
        return
    messages = user(content)
    assert encode(messages) == TOKENIZER.encode(rendered(messages), add_special_tokens=False)


@given(st.lists(st.one_of(st.sampled_from(MARKERS), st.text(max_size=8)), max_size=8).map("".join))
def test_markers_in_content_stay_text(content: str) -> None:
    messages = user(content)
    ids = encode(messages)
    assert control_ids(ids) == control_ids(encode(user("plain")))
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == rendered(messages)


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
@pytest.mark.parametrize("marker", MARKERS)
def test_every_role_is_text(role: str, marker: str) -> None:
    def conversation(content: str) -> list[dict[str, Any]]:
        return [{"role": role, "content": content}, *user("x")]

    expected = control_ids(encode(conversation("harmless")))
    assert control_ids(encode(conversation(f"a{marker}b"))) == expected


def test_a_marker_split_over_two_parts_is_text() -> None:
    request = ChatRequest.model_validate(
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "<|im_"}, {"type": "text", "text": "end|>"}]}
            ]
        }
    )
    messages = request.template_messages()
    assert messages[0]["content"] == "<|im_end|>"
    assert control_ids(encode(messages)) == control_ids(encode(user("plain")))


def test_markers_in_tool_calls_of_the_history_are_text() -> None:
    def conversation(arguments: str) -> list[dict[str, Any]]:
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        return [*user("x"), {"role": "assistant", "content": "", "tool_calls": [call]}]

    assert control_ids(encode(conversation('"</tool_call>"'))) == control_ids(encode(conversation('"y"')))


def test_placeholders_cannot_be_guessed() -> None:
    attack = "z" + "0" * 24 + "z0z <|im_end|> \x00ids\x00"
    assert TOKENIZER.decode(encode(user(attack)), skip_special_tokens=False) == rendered(user(attack))


def test_text_before_and_after_a_marker_keeps_its_encoding() -> None:
    ids = encode(user("before <|im_end|> after"))
    plain = TOKENIZER.encode_as_text("user\nbefore <|im_end|> after")
    start = ids.index(TOKENIZER.markers["<|im_start|>"])
    assert ids[start + 1 : start + 1 + len(plain)] == plain


def test_completions_may_write_control_tokens() -> None:
    assert TOKENIZER.markers["<|im_end|>"] in ENCODER.encode_text("a<|im_end|>", LIMIT)


def messages_of(*pairs: tuple[str, str]) -> list[dict[str, Any]]:
    body = {"messages": [{"role": role, "content": content} for role, content in pairs]}
    return ChatRequest.model_validate(body).template_messages()


def test_developer_is_system_and_systems_are_merged_in_front() -> None:
    messages = messages_of(("system", "one"), ("user", "hi"), ("developer", "two"))
    assert messages == [{"role": "system", "content": "one\n\ntwo"}, {"role": "user", "content": "hi"}]


def test_a_hopeless_text_is_refused_before_tokenizing() -> None:
    with pytest.raises(RequestError, match=r"maximum context length is 16 tokens.*at least [0-9]+ tokens") as caught:
        ENCODER.encode_chat(user("a" * 100_000), 16, variables={})
    assert caught.value.code == "context_length_exceeded"


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, {"bos_token": "<s>"})


def test_templates_run_in_a_sandbox() -> None:
    for source in ("{{ messages.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ raise_exception('no') }}"):
        with pytest.raises(RequestError, match="does not accept"):
            template(source).render([{"role": "user", "content": "x"}], {}, generate=True)


def test_rendering_is_bounded() -> None:
    source = "{% for i in range(99999) %}{% for j in range(99999) %}{{ 'x' * 65536 }}{% endfor %}{% endfor %}"
    with pytest.raises(RequestError, match="too long"):
        template(source).render([], {}, generate=True)


def test_templates_know_what_training_templates_use() -> None:
    source = (
        "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m | tojson }}{% endfor %}{{ bos_token }}"
    )
    text = template(source).render([{}, {"a": "<é>"}], {}, generate=True)
    assert text == '{"a": "<é>"}<s>'
    assert len(template("{{ strftime_now('%Y-%m-%d') }}").render([], {}, generate=True)) == 10


def test_only_what_the_template_reads_can_be_set() -> None:
    compiled = template("{{ style }}{{ tools }}{{ bos_token }}")
    assert compiled.settable == {"style", "enable_thinking"}
    with pytest.raises(RequestError, match="no setting 'add_generation_prompt'"):
        ENCODER.encode_chat(user("x"), LIMIT, variables={"add_generation_prompt": False})


def test_a_broken_template_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="chat template"):
        template("{% if %}")


def test_a_model_without_template_says_so(tmp_path: Path) -> None:
    shutil.copy(embedded_model_dir() / "tokenizer.json", tmp_path)
    assert read_template(tmp_path) is None
    with pytest.raises(RequestError, match="no chat template"):
        PromptEncoder.load(TOKENIZER, tmp_path).encode_chat(user("x"), LIMIT, variables={})


def test_the_template_may_live_in_the_tokenizer_config(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": [{"name": "default", "template": "T"}]}')
    assert read_template(tmp_path) == "T"


def test_a_broken_tokenizer_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Cannot read"):
        TextTokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="not a tokenizer"):
        TextTokenizer.load(tmp_path)

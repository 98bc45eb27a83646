"""SPLITFUZZ: the text may not depend on how the tokens were cut into deltas."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.api import Delta, FinishReason, ModelInfo
from server.answer import Choice
from server.detokenize import ByteDetokenizer, Detokenizer, WindowDetokenizer, detokenizer
from server.job import SamplingDefaults, make_job
from server.schema.completions import CompletionRequest
from server.settings import embedded_model_dir
from server.tokenizer import TextTokenizer
from tests.support.fake_engine import EOS, VOCAB

TOKENIZER = TextTokenizer.load(embedded_model_dir())
INFO = ModelInfo(
    architecture="x",
    vocab_size=VOCAB,
    max_model_len=2048,
    eos_ids=(EOS,),
    max_drafts=7,
    choices={},
    startup_seconds={},
)
NASTY = [
    "👩‍👩‍👧‍👦 family",
    "🇨🇭🇯🇵 flags",
    "漢字と日本語、中文",
    "שלום עולם",
    "e\u0301 a\u0308\u0323 combining",
    "naïve café — “quotes”",
    "\u200b\ufeff zero",
    "line\nbreak\ttab\r\n  spaces   ",
    "\ufffd replacement \U0010ffff",
    "mixed 👍🏽 tone",
]
texts = st.one_of(st.sampled_from(NASTY), st.text(max_size=40), st.lists(st.sampled_from(NASTY)).map("".join))
ids_lists = st.one_of(
    texts.map(lambda text: TOKENIZER.encode(text, add_special_tokens=False)),
    st.lists(st.integers(0, 1279), max_size=40),  # any ids at all: broken characters, special tokens
)
cuts = st.lists(st.integers(0, 80), max_size=20)


def chunks(ids: list[int], at: list[int]) -> list[list[int]]:
    points = sorted({min(point, len(ids)) for point in at} | {0, len(ids)})
    return [ids[a:b] for a, b in itertools.pairwise(points)]


def run(decoder: Detokenizer, pieces: list[list[int]]) -> str:
    return "".join([decoder.feed(piece) for piece in pieces] + [decoder.flush()])


@given(ids_lists, cuts, st.booleans())
def test_any_split_equals_decoding_the_whole(ids: list[int], at: list[int], skip: bool) -> None:
    whole = TOKENIZER.decode(ids, skip_special_tokens=skip)
    assert run(detokenizer(TOKENIZER, skip_special_tokens=skip), chunks(ids, at)) == whole


@given(texts, cuts)
def test_valid_text_never_shows_a_broken_character(text: str, at: list[int]) -> None:
    decoder = detokenizer(TOKENIZER, skip_special_tokens=True)
    out = ""
    for piece in chunks(TOKENIZER.encode(text, add_special_tokens=False), at):
        out += decoder.feed(piece)
        assert out.count("\ufffd") <= text.count("\ufffd")
        assert text.startswith(out) or not TOKENIZER.special_ids.isdisjoint(piece)


@given(texts, cuts)
def test_the_window_decoder_agrees(text: str, at: list[int]) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    whole = TOKENIZER.decode(ids, skip_special_tokens=True)
    assert run(WindowDetokenizer(TOKENIZER, skip_special_tokens=True), chunks(ids, at)) == whole


@pytest.fixture(scope="module")
def byte_fallback() -> TextTokenizer:
    """A vocabulary in SentencePiece's manner: words with a mark for the space, bytes for the rest."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    for word in ["▁", "▁the", "▁h", "a", "b", "é"]:
        vocab[word] = len(vocab)
    return TextTokenizer(
        json.dumps(
            {
                "version": "1.0",
                "added_tokens": [],
                "normalizer": {
                    "type": "Sequence",
                    "normalizers": [
                        {"type": "Prepend", "prepend": "▁"},
                        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
                    ],
                },
                "pre_tokenizer": None,
                "post_processor": None,
                "decoder": {
                    "type": "Sequence",
                    "decoders": [
                        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                        {"type": "ByteFallback"},
                        {"type": "Fuse"},
                        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
                    ],
                },
                "model": {
                    "type": "BPE",
                    "vocab": vocab,
                    "merges": [],
                    "byte_fallback": True,
                    "fuse_unk": True,
                    "unk_token": None,
                    "dropout": None,
                    "continuing_subword_prefix": None,
                    "end_of_word_suffix": None,
                    "ignore_merges": False,
                },
            }
        )
    )


def test_other_decoders_get_the_window(byte_fallback: TextTokenizer) -> None:
    assert byte_fallback.token_bytes is None
    for text in NASTY:
        ids = byte_fallback.encode(text, add_special_tokens=False)
        whole = byte_fallback.decode(ids, skip_special_tokens=True)
        for size in (1, 2, 3, 5):
            decoder = detokenizer(byte_fallback, skip_special_tokens=True)
            assert isinstance(decoder, WindowDetokenizer)
            assert run(decoder, [ids[i : i + size] for i in range(0, len(ids), size)]) == whole


def test_a_character_never_completed_is_one_replacement() -> None:
    table = (b"a", b"\xf0\x9f", b"\x91")
    decoder = ByteDetokenizer(table, frozenset())
    assert decoder.feed([0, 1]) == "a"
    assert decoder.feed([2]) == ""
    assert decoder.flush() == "\ufffd"


def test_ids_past_the_vocabulary_have_no_text() -> None:
    assert ByteDetokenizer((b"a",), frozenset()).feed([0, 7]) == "a"


def generate(
    ids: list[int], pieces: list[list[int]], finish: FinishReason, fields: dict[str, object]
) -> tuple[str, list[int], int, str | None, list[str]]:
    """One choice fed with deltas: text, tokens, count, finish, and the pieces on the way."""
    request = CompletionRequest.model_validate({"prompt": "x", "max_tokens": max(len(ids), 1), **fields})
    job = make_job(
        "cmpl",
        request,
        ((5,),),
        model="m",
        info=INFO,
        defaults=SamplingDefaults(),
        max_choices=1,
        prompt_param="prompt",
    )
    choice = Choice(0, job.requests[0], job, TOKENIZER)
    texts, tokens = [], []
    for number, piece in enumerate(pieces):
        last = number == len(pieces) - 1
        choice.take(Delta(request_id="x", tokens=tuple(piece), finish=finish if last else None))
        out = choice.piece()
        if out is not None:
            texts.append(out.text)
            tokens += out.tokens
        if choice.finish is not None:
            break
    return "".join(texts), tokens, choice.num_tokens, choice.finish, texts


@given(
    texts,
    cuts,
    st.lists(st.sampled_from(["👩", "本", "é", "e\u0301", " ", "\n", "family", "ks", "\u200d👧", "z"]), max_size=3),
    st.integers(0, 6),
    st.sampled_from([FinishReason.LENGTH, FinishReason.STOP]),
    st.booleans(),
    st.booleans(),
)
def test_text_tokens_and_reason_do_not_depend_on_the_deltas(
    text: str, at: list[int], stops: list[str], min_tokens: int, finish: FinishReason, include: bool, skip: bool
) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    ids += [EOS] if finish is FinishReason.STOP or not ids else []
    fields: dict[str, object] = {
        "stop": stops,
        "min_tokens": min(min_tokens, len(ids)),
        "include_stop_str_in_output": include,
        "skip_special_tokens": skip,
    }
    one_by_one = generate(ids, [[id_] for id_ in ids], finish, fields)
    split = generate(ids, chunks(ids, at), finish, fields)
    assert split[:4] == one_by_one[:4]
    assert split[1] == ids[: split[2]]  # every counted token is delivered, once
    if not stops and finish is FinishReason.LENGTH:
        assert split[0] == TOKENIZER.decode(ids, skip_special_tokens=skip)
    if not include and fields["min_tokens"] == 0:
        assert not any(stop in split[0] for stop in stops)

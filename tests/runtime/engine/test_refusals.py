"""Requests that could hurt a batch are refused at the door, with the field's name."""

from __future__ import annotations

import math
from typing import Any

import pytest

from runtime.api import Rejected, RejectReason, Request, SamplingParams
from runtime.engine import Engine
from tests.runtime.engine.harness import QWEN, VOCAB, Driver, alone, request, shared

BAD: list[tuple[str, dict[str, Any]]] = [
    ("prompt", {"prompt": ()}),
    ("prompt", {"prompt": (5, VOCAB)}),
    ("prompt", {"prompt": (-1, 5)}),
    ("prompt", {"prompt": (5, 2**63)}),
    ("max_tokens", {"max_tokens": 0}),
    ("max_tokens", {"max_tokens": -5}),
    ("min_tokens", {"min_tokens": -1}),
    ("num_drafts", {"num_drafts": -1}),
    ("temperature", {"temperature": -0.5}),
    ("temperature", {"temperature": math.nan}),
    ("temperature", {"temperature": math.inf}),
    ("top_k", {"top_k": -1}),
    ("top_p", {"top_p": 0.0}),
    ("top_p", {"top_p": 1.5}),
    ("top_p", {"top_p": math.nan}),
    ("min_p", {"min_p": -0.1}),
    ("min_p", {"min_p": 1.1}),
    ("min_p", {"min_p": math.nan}),
    ("repetition_penalty", {"repetition_penalty": 0.0}),
    ("repetition_penalty", {"repetition_penalty": math.inf}),
    ("presence_penalty", {"presence_penalty": math.nan}),
    ("frequency_penalty", {"frequency_penalty": -math.inf}),
    ("logit_bias", {"logit_bias": {VOCAB: 1.0}}),
    ("logit_bias", {"logit_bias": {-1: 1.0}}),
    ("logit_bias", {"logit_bias": {5: math.nan}}),
    ("logit_bias", {"logit_bias": {5: -math.inf}}),
    ("min_tokens", {"min_tokens": 2**63}),
    ("top_k", {"top_k": 2**63}),
    ("logprobs", {"logprobs": -1}),
    ("logprobs", {"logprobs": 21}),
]
ODD: list[dict[str, Any]] = [
    {"prompt": (0,)},
    {"prompt": (VOCAB - 1,)},
    {"max_tokens": 2**62},
    {"min_tokens": 2**40},
    {"num_drafts": 2**40},
    {"temperature": 1e-30},
    {"temperature": 1e30},
    {"top_k": 2**62, "temperature": 1.0},
    {"top_k": VOCAB, "temperature": 1.0},
    {"top_p": 1e-300, "temperature": 1.0},
    {"min_p": 1.0, "temperature": 1.0},
    {"seed": 2**64 - 1, "temperature": 1.0},
    {"seed": -(2**63), "temperature": 1.0},
    {"repetition_penalty": 1e-30, "temperature": 1.0},
    {"repetition_penalty": 1e30, "temperature": 1.0},
    {"presence_penalty": 1e30, "frequency_penalty": -1e30, "temperature": 1.0},
    {"logit_bias": {5: 1e30, 6: -1e30}, "temperature": 1.0},
    {"logit_bias": dict.fromkeys(range(VOCAB), -1e30), "temperature": 1.0},
    {"stop_ids": (-7, VOCAB, 2**63, 5, 5, 6, 7, 8, 9)},
    {"logprobs": 20},
]


@pytest.mark.parametrize(("param", "fields"), BAD, ids=repr)
def test_a_request_that_cannot_be_right_is_refused(param: str, fields: dict[str, Any]) -> None:
    engine = build_once()
    answer = engine.submit(make("bad", fields))
    assert isinstance(answer, Rejected)
    assert (answer.reason, answer.param) == (RejectReason.INVALID, param)
    assert param in answer.message.replace(" ", "_").lower() or param == "prompt"
    assert not engine.has_work


@pytest.mark.parametrize("fields", ODD, ids=lambda fields: repr(fields)[:40])
def test_odd_but_legal_requests_hurt_nobody(fields: dict[str, Any]) -> None:
    mate = request("mate", (5, 6, 7), max_tokens=6, temperature=1.0, seed=3, repetition_penalty=1.2)
    driver = Driver(build_once())
    driver.submit(make("odd", fields), mate)
    driver.finish()
    assert driver.results["odd"].finish is not None
    assert driver.results["mate"].tokens == alone([mate])["mate"].tokens
    assert driver.since("aborted_steps") == 0


def make(name: str, fields: dict[str, Any]) -> Request:
    whole = {"prompt": (5, 6, 7), "num_drafts": None, "max_tokens": 6, "ignore_eos": True, **fields}
    prompt, num_drafts = whole.pop("prompt"), whole.pop("num_drafts")
    return Request(id=name, prompt=prompt, num_drafts=num_drafts, sampling=SamplingParams(**whole))


def build_once() -> Engine:
    return shared(QWEN, "mtp:3")

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.stop import StopMatcher


def run(stops: list[str], pieces: list[str], *, include: bool = False) -> tuple[str, str | None]:
    matcher = StopMatcher(stops, include=include)
    out = ""
    for piece in pieces:
        out += matcher.feed(piece)
        if matcher.matched is not None:
            return out, matcher.matched
    return out + matcher.flush(), None


def oracle(stops: list[str], text: str) -> tuple[str, str | None]:
    """Character by character: the first character that completes a stop string, the longest such string."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            stop = max(hits, key=len)
            return text[: end - len(stop)], stop
    return text, None


def cut(text: str, at: list[int]) -> list[str]:
    points = sorted({min(point, len(text)) for point in at} | {0, len(text)})
    return [text[a:b] for a, b in itertools.pairwise(points)]


@given(
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4),
    st.text("abc", max_size=30),
    st.lists(st.integers(0, 30)),
)
def test_the_first_completed_string_wins_however_the_text_is_cut(stops: list[str], text: str, at: list[int]) -> None:
    assert run(stops, cut(text, at)) == oracle(stops, text)


@given(st.text("ab", min_size=1, max_size=4), st.text("abc", max_size=20), st.lists(st.integers(0, 20)))
def test_nothing_of_a_stop_string_is_delivered_early(stop: str, text: str, at: list[int]) -> None:
    matcher = StopMatcher([stop])
    final, _ = oracle([stop], text)
    out = ""
    for piece in cut(text, at):
        out += matcher.feed(piece)
        assert final.startswith(out)
        if matcher.matched:
            break


@pytest.mark.parametrize("stops", [["world", "lo w"], ["lo w", "world"]])
def test_order_of_the_list_does_not_matter(stops: list[str]) -> None:
    assert run(stops, ["hello world"]) == ("hel", "lo w")


def test_a_held_back_tail_is_flushed() -> None:
    assert run(["END!"], ["the EN", "D"]) == ("the END", None)


def test_include_keeps_the_string_but_nothing_after_it() -> None:
    assert run(["END"], ["the E", "ND and more"], include=True) == ("the END", "END")


def test_empty_strings_stop_nothing() -> None:
    assert run([""], ["abc"]) == ("abc", None)
    assert not StopMatcher([""]).active


def test_split_character_sequences() -> None:
    assert run(["👩‍👧"], ["see 👩", "\u200d", "👧 there"]) == ("see ", "👩‍👧")

"""A commit takes each ticket once, whole steps only, and refuses everything else before it writes anything."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch

from runtime.api import StateError
from runtime.engine import Engine
from runtime.plan import Batch, Row
from runtime.state.pool import StateTxn
from tests.support.engines import MODES, PAIRS, engine_of, pair, tokens_of
from tests.support.steps import DECODE, PREFILL, VERIFY, Feed, Hand, Held, verdict

TOKENS = tokens_of(5, 40)


WAYS = [(*halves, mode) for halves, mode in zip(PAIRS, [*MODES, *MODES], strict=True)]


@functools.cache
def engine(way: tuple[str, str, str]) -> Engine:
    return engine_of("qwen", speculative="ngram:7", **pair(*way))


@pytest.fixture(params=WAYS, ids="-".join)
def hand(request: pytest.FixtureRequest) -> Iterator[Hand]:
    hand = Hand(engine(request.param))
    hand.pool.counts.missing = 0
    yield hand
    hand.close()


def prompted(hand: Hand, name: str, seed: int = 0) -> Held:
    held = hand.admit(name)
    hand.step(Feed(held, PREFILL, TOKENS[seed : seed + 5]))
    return held


def picture(hand: Hand, *helds: Held) -> list[torch.Tensor]:
    """Everything a commit may change."""
    pool = hand.pool
    pool.sweep()
    found = [pool.lengths.clone(), *(t.clone() for t in pool.recurrent.conv.values())]
    found += [t.clone() for t in pool.recurrent.state.values()]
    for held in helds:
        found += [tensor for both in pool.peek(held.lease.slot).values() for tensor in both]
    return found


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Also of NaN, which is not equal to itself."""
    return tensor.contiguous().view(torch.uint8)


def assert_same(before: Sequence[torch.Tensor], after: Sequence[torch.Tensor]) -> None:
    for a, b in zip(before, after, strict=True):
        assert torch.equal(bits(a), bits(b))


def test_begin_while_a_step_is_open(hand: Hand) -> None:
    first, second = prompted(hand, "a"), prompted(hand, "b", 3)
    txn = hand.begin(Feed(first, VERIFY, (7, 8)))
    with pytest.raises(StateError, match="still open"):
        hand.begin(Feed(second, VERIFY, (9,)))
    assert second.lease.in_flight == 0
    hand.forward(txn)
    hand.commit(txn, [1])
    hand.settle(txn, [1])
    assert (first.lease.computed, second.lease.computed) == (6, 5)


def test_begin_is_all_or_nothing(hand: Hand) -> None:
    """The second row is impossible: the first has not begun either."""
    first, second, gone = prompted(hand, "a"), hand.admit("b", 3), prompted(hand, "c")
    hand.pool.release(gone.lease)
    picture_before = picture(hand, first)
    for bad, message in (
        (Feed(second, PREFILL, TOKENS[:9]), "blocks"),
        (Feed(gone, PREFILL, TOKENS[:2]), "closed"),
        (Feed(second, VERIFY, TOKENS[:2]), "no state"),
        (Feed(second, DECODE, TOKENS[:1]), "no state"),
        (Feed(first, PREFILL, TOKENS[:1]), "same lease"),
    ):
        with pytest.raises(StateError, match=message):
            hand.begin(Feed(first, PREFILL, TOKENS[:1]), bad)
        assert first.lease.in_flight == second.lease.in_flight == 0
        assert_same(picture_before, picture(hand, first))
    third = prompted(hand, "d")
    with pytest.raises(StateError, match="neighbours"):
        hand.begin(Feed(first, VERIFY, (3,)), Feed(second, PREFILL, (4,)), Feed(third, VERIFY, (5,)))
    assert first.lease.in_flight == second.lease.in_flight == third.lease.in_flight == 0
    with pytest.raises(StateError, match="empty"):
        hand.pool.begin(Batch(0, ()))
    hand.step(Feed(first, VERIFY, (7, 8)), kept=[2])


def test_a_lease_of_another_pool(hand: Hand) -> None:
    mine = prompted(hand, "mine")
    other = engine_of("qwen")
    stranger = Hand(other)
    held = prompted(stranger, "theirs")
    while held.lease.slot != mine.lease.slot:
        held = prompted(stranger, "theirs")
    before = picture(hand, mine)
    with pytest.raises(StateError, match="not of this ledger"):
        hand.begin(Feed(held, PREFILL, (5,)))
    assert_same(before, picture(hand, mine))
    stranger.close()


def test_commit_once(hand: Hand) -> None:
    held = prompted(hand, "a")
    txn = hand.begin(Feed(held, VERIFY, (7, 8, 9)))
    hand.forward(txn)
    with pytest.raises(StateError, match="not committed"):
        hand.settle(txn, [2])
    assert hand.pool.counts.missing == 1
    hand.commit(txn, [2])
    before = picture(hand, held)
    with pytest.raises(StateError, match="not open"):
        hand.commit(txn, [2])
    with pytest.raises(StateError, match="not open"):
        hand.pool.abort(txn)
    with pytest.raises(StateError, match="twice"):
        use(hand, txn)
    assert_same(before, picture(hand, held))
    hand.settle(txn, [2])
    with pytest.raises(StateError, match=r"settled|not committed"):
        hand.settle(txn, [2])
    assert held.lease.computed == 7


def use(hand: Hand, txn: StateTxn, kept: int = 1) -> None:
    """The commit without the pool."""
    (ticket,) = txn.tickets
    decided = verdict([kept], [range(ticket.fed[0])])
    hand.pool.backend.update_mamba_state_after_mtp_verify(ticket, decided.kept, decided.path)


def test_stale_and_foreign_steps(hand: Hand) -> None:
    held = prompted(hand, "a")
    aborted = hand.begin(Feed(held, VERIFY, (7, 8)))
    hand.forward(aborted)
    hand.pool.abort(aborted)
    with pytest.raises(StateError, match="not open"):
        hand.pool.abort(aborted)
    other = engine_of("qwen", speculative="ngram:7")
    stranger = Hand(other)
    foreign = stranger.begin(Feed(stranger.admit(), PREFILL, (7, 8)))
    txn = hand.begin(Feed(held, VERIFY, (7, 8)))
    hand.forward(txn)
    before = picture(hand, held)
    for wrong in (aborted, foreign):
        with pytest.raises(StateError, match="not open"):
            hand.commit(wrong, [2])
        with pytest.raises(StateError):
            use(hand, wrong, 2)
        tickets = txn.tickets
        txn.tickets = wrong.tickets
        with pytest.raises(StateError, match=r"ticket of step|does not run"):
            hand.commit(txn, [2])
        txn.tickets = (replace(wrong.tickets[0], serial=txn.serial),)
        with pytest.raises(StateError, match=r"too late|does not run"):
            hand.commit(txn, [2])
        txn.tickets = tickets
        assert_same(before, picture(hand, held))
    hand.commit(txn, [2])
    hand.settle(txn, [2])
    stranger.pool.abort(foreign)
    stranger.close()


def test_the_wrong_half(hand: Hand) -> None:
    held = prompted(hand, "a")
    txn = hand.begin(Feed(held, VERIFY, (7, 8)))
    hand.forward(txn)
    (ticket,) = txn.tickets
    backend = hand.pool.backend
    assert ticket.backend is backend.select(VERIFY)
    (wrong,) = [half for half in backend.halves if half is not ticket.backend]
    before = picture(hand, held)
    decided = verdict([2], [(0, 1)])
    with pytest.raises(StateError, match="was handed to"):
        wrong.update_mamba_state_after_mtp_verify(ticket, decided.kept, decided.path)
    other_kind = PREFILL if wrong is backend.halves[0] else DECODE
    for forged in (replace(ticket, backend=wrong), replace(ticket, kind=other_kind)):
        with pytest.raises(StateError, match="belong to"):
            backend.update_mamba_state_after_mtp_verify(forged, decided.kept, decided.path)
        txn.tickets = (forged,)
        with pytest.raises(StateError, match="does not run"):
            hand.commit(txn, [2])
    with pytest.raises(StateError, match="not its own"):
        wrong.ticket(ticket.plan, txn.serial)
    with pytest.raises(StateError, match="not its own"):
        wrong.mix(0, None, None, None, ticket.plan)
    assert_same(before, picture(hand, held))
    txn.tickets = ()
    with pytest.raises(StateError, match="no ticket"):
        hand.commit(txn, [2])
    assert hand.pool.counts.missing == 1
    hand.pool.abort(txn)


def test_one_ticket_for_two_parts(hand: Hand) -> None:
    """The other part would stay behind."""
    new, spec = hand.admit("new"), prompted(hand, "spec")
    txn = hand.begin(Feed(new, PREFILL, TOKENS[:4]), Feed(spec, VERIFY, (7, 8)))
    hand.forward(txn)
    before = picture(hand, spec)
    for tickets in ((txn.tickets[0],) * 2, (txn.tickets[1],) * 2, txn.tickets[::-1]):
        right, txn.tickets = txn.tickets, tickets
        with pytest.raises(StateError, match="cannot settle rows"):
            hand.commit(txn, [4, 2])
        txn.tickets = right
        assert_same(before, picture(hand, spec))
    hand.commit(txn, [4, 2])
    hand.settle(txn, [4, 2])


BAD: list[tuple[str, Callable[[list[int], list[list[int]]], None]]] = [
    ("kept 0", lambda kept, paths: kept.__setitem__(2, 0)),
    ("kept -1", lambda kept, paths: kept.__setitem__(2, -1)),
    ("kept 4 of 3", lambda kept, paths: kept.__setitem__(2, 4)),
    ("decode keeps 0", lambda kept, paths: kept.__setitem__(1, 0)),
    ("decode keeps 2", lambda kept, paths: kept.__setitem__(1, 2)),
    ("prefill keeps less", lambda kept, paths: kept.__setitem__(0, 3)),
    ("prefill keeps more", lambda kept, paths: kept.__setitem__(0, 5)),
    ("path beyond", lambda kept, paths: paths[2].__setitem__(1, 3)),
    ("path negative", lambda kept, paths: paths[2].__setitem__(0, -1)),
]


@pytest.mark.parametrize(("name", "spoil"), BAD, ids=[name for name, _ in BAD])
def test_bad_verdicts_write_nothing(hand: Hand, name: str, spoil: Callable[[list[int], list[list[int]]], None]) -> None:
    """The bad row is in any part of a mixed step; the good rows are not committed either."""
    new, plain, spec = hand.admit("new"), prompted(hand, "plain"), prompted(hand, "spec", 7)
    hand.step(Feed(spec, VERIFY, (5, 6)), kept=[2])
    txn = hand.begin(Feed(new, PREFILL, TOKENS[:4]), Feed(plain, DECODE, (9,)), Feed(spec, VERIFY, (7, 8, 9)))
    hand.forward(txn)
    before = picture(hand, plain, spec)
    kept, paths = [4, 1, 2], [[0, 1, 2, 3], [0], [0, 1, 2]]
    spoil(kept, paths)
    with pytest.raises(StateError, match="row"):
        hand.commit(txn, kept, paths)
    assert_same(before, picture(hand, plain, spec))
    hand.commit(txn, [4, 1, 2])
    hand.settle(txn, [4, 1, 2])
    assert (new.lease.computed, plain.lease.computed, spec.lease.computed) == (4, 6, 9)


def test_settle_in_the_order_of_a_lease(hand: Hand) -> None:
    first, second = prompted(hand, "a"), prompted(hand, "b")
    steps = []
    for held in (first, first, second):
        txn = hand.begin(Feed(held, VERIFY, (7, 8)))
        hand.forward(txn)
        hand.commit(txn, [1])
        steps.append(txn)
    with pytest.raises(StateError, match="out of order"):
        hand.settle(steps[1], [1])
    hand.settle(steps[2], [1])  # another lease need not wait
    hand.settle(steps[0], [1])
    hand.settle(steps[1], [1])
    assert (first.lease.computed, second.lease.computed) == (7, 6)


def test_rows_carry_their_own_lease(hand: Hand) -> None:
    """A row whose lease was released while it was planned is refused; the books stay balanced."""
    held = prompted(hand, "a")
    row: Row = Feed(held, PREFILL, (5,)).row
    hand.pool.release(held.lease)
    with pytest.raises(StateError, match="closed"):
        hand.pool.begin(Batch(0, (row,)))
    hand.pool.ledger.check()
    assert hand.pool.is_sound()

"""The prefix cache's books: which texts' KV blocks are cached, and at which lengths there is a recurrent state.

A tree over full blocks of tokens. KV is valid at every node; a recurrent state exists only where a checkpoint was
taken, at any token: a checkpoint hangs below the node of its last full block and owns the block of its last 1 to
`block_size` tokens, the tail. A hit shares the full blocks and copies the tail, so what is cached is never written
again. A node without a checkpoint at or below it is of no use, and is dropped with its last one: neither currency is
kept without the other.

Plain integers and digests; the tensors are moved by the pool.
"""

from __future__ import annotations

import hashlib
import heapq
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from runtime.api import CACHE_LOSSES, CACHE_TIERS, CHECKPOINT_TRIGGERS, ConfigError, EngineStats, StateError
from runtime.state.blocks import Blocks
from runtime.state.host_tier import HostCheckpoint, HostTier
from runtime.state.moves import Move, Spilled, Vacated

# How much likelier a state is asked for again than one in the middle of a text: prompts are sent again and grow at
# their end, forks were seen, and what was preempted will be resumed.
LIKELY = {"interval": 1, "prompt": 2, "end": 4, "fork": 8, "preemption": 8}
MOST_HITS = 8


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """`num_checkpoints`: states on the device. `interval`: tokens between checkpoints inside a text. `identity`: of
    the model; texts of another model never match. `host_bytes`: host memory for what the device has no room for, of
    which a block takes `block_bytes` and a state `state_bytes`.
    """

    num_checkpoints: int
    interval: int
    identity: bytes = b""
    host_bytes: int = 0
    block_bytes: int = 1
    state_bytes: int = 1


class Chain:
    """SHA-256 digests of a growing text, block by block: each covers the model, the salt and all tokens before."""

    __slots__ = ("_block_size", "_keys")

    def __init__(self, identity: bytes, salt: str, block_size: int) -> None:
        self._block_size = block_size
        root = hashlib.sha256(b"lockstep prefix\0")
        for part in (identity, salt.encode("utf-8", "surrogatepass")):
            root.update(len(part).to_bytes(8, "big") + part)
        self._keys = [root.digest()]

    def key(self, tokens: Sequence[int], num_blocks: int) -> bytes:
        """The digest of the first `num_blocks` blocks of `tokens`, which must begin as in every earlier call."""
        size, keys = self._block_size, self._keys
        while len(keys) <= num_blocks:
            start = (len(keys) - 1) * size
            block = array("q", tokens[start : start + size])
            if len(block) != size:
                raise StateError(f"{len(tokens)} tokens do not fill {num_blocks} blocks")
            keys.append(hashlib.sha256(keys[-1] + block.tobytes()).digest())
        return keys[num_blocks]


@dataclass(slots=True, eq=False)
class Node:
    """One full block of one text. `lost`: a checkpoint right below it was evicted."""

    key: bytes
    parent: Node | None
    block: int
    depth: int
    children: dict[bytes, Node] = field(default_factory=dict)
    tails: list[Checkpoint] = field(default_factory=list)
    lost: bool = False


@dataclass(slots=True, eq=False)
class Checkpoint:
    """A recurrent state (and the drafter's) after `num_tokens` tokens, in checkpoint row `row`.

    `tail`: the tokens behind the full blocks of `parent`, whose KV lies in `block`. `pins`: restores under way, which
    keep it. `value`: what losing it would cost; the smallest goes first.
    """

    num_tokens: int
    parent: Node
    tail: tuple[int, ...]
    block: int
    row: int
    trigger: str
    pins: int = 0
    hits: int = 0
    value: float = 0.0
    alive: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class Match:
    """What the cache has for a text: the full blocks on the device, and states to go on from, the deepest first.

    `num_kv`: tokens whose KV is on the device. `loss`: why the deepest state is not there, of `CACHE_LOSSES`.
    """

    nodes: tuple[Node, ...]
    options: tuple[Checkpoint | HostCheckpoint, ...]
    num_kv: int
    loss: str

    @property
    def deepest(self) -> int:
        """Tokens of the deepest state; 0 without any."""
        return self.options[0].num_tokens if self.options else 0


class PrefixCache:
    """The tree, the checkpoint rows, and who is evicted.

    A row is free, claimed (a step may write it; nobody reads it) or held by a checkpoint. What must be done with
    tensors is appended to `moves`.
    """

    def __init__(self, blocks: Blocks, moves: list[Move], block_size: int, settings: CacheSettings) -> None:
        if settings.num_checkpoints < 1 or settings.interval < 1:
            raise ConfigError("a prefix cache needs at least one checkpoint and an interval of at least one token")
        self.settings = settings
        self.evictions = 0
        self.evicted_blocks = 0
        self.written = dict.fromkeys(CHECKPOINT_TRIGGERS, 0)
        self.query_tokens = 0
        self.hit_tokens = dict.fromkeys(CACHE_TIERS, 0)
        self.lost_tokens = dict.fromkeys(CACHE_LOSSES, 0)
        self.resumed_tokens = 0
        self.host = HostTier(settings.host_bytes, settings.block_bytes, settings.state_bytes, moves)
        self._blocks = blocks
        self._moves = moves
        self._size = block_size
        self._roots: dict[bytes, Node] = {}
        self._checkpoints: set[Checkpoint] = set()
        self._free_rows = list(range(settings.num_checkpoints - 1, -1, -1))
        self._claimed: set[int] = set()
        self._heap: list[tuple[float, int, Checkpoint]] = []
        self._clock = 0.0
        self._order = 0

    # --- reading

    def chain(self, salt: str) -> Chain:
        """The digests of a text that begins now."""
        return Chain(self.settings.identity, salt, self._size)

    def match(self, chain: Chain, tokens: Sequence[int]) -> Match:
        """What is there for `tokens`. At least the last token is always left to be fed."""
        limit, size = len(tokens) - 1, self._size
        node = self._roots.get(chain.key(tokens, 0))
        path = [] if node is None else [node]
        while node is not None and len(path) * size <= limit:
            node = node.children.get(chain.key(tokens, len(path)))
            if node is not None:
                path.append(node)
        found: Checkpoint | None = None
        loss = "no_checkpoint"
        for node in reversed(path):
            found = self._longest_tail(node, tokens, limit)
            if found is not None:
                break
            if node.lost:
                loss = "evicted"
        options: list[Checkpoint | HostCheckpoint] = [] if found is None else [found]
        known = 0 if found is None else found.num_tokens
        in_host = self.host.find(chain, tokens, limit=limit, above=known, block_size=size)
        if in_host is not None:
            options.insert(0, in_host)
        num_kv = max(0, len(path) - 1) * size
        return Match(tuple(path[1:]), tuple(options), max(num_kv, known), loss)

    def _longest_tail(self, node: Node, tokens: Sequence[int], limit: int) -> Checkpoint | None:
        found: Checkpoint | None = None
        for each in node.tails:
            n = each.num_tokens
            deeper = n <= limit and (found is None or n > found.num_tokens)
            if deeper and tuple(tokens[node.depth * self._size : n]) == each.tail:
                found = each
        return found

    # --- rows

    @property
    def num_checkpoints(self) -> int:
        """Checkpoints on the device."""
        return len(self._checkpoints)

    @property
    def num_claimed(self) -> int:
        """Rows that steps not yet settled may write."""
        return len(self._claimed)

    def claim(self, *, modest: bool = False) -> int | None:
        """A row for a step to write, evicting for it if need be; None when every row is claimed or being read.

        A modest claim is made only while less than half of the rows are claimed: many steps that may pass an interval,
        or may not, shall not drive out what is known to be of use.
        """
        if modest and 2 * len(self._claimed) >= self.settings.num_checkpoints:
            return None
        if not self._free_rows and not self._evict(for_blocks=False):
            return None
        row = self._free_rows.pop()
        self._claimed.add(row)
        return row

    def unclaim(self, row: int) -> None:
        """The row is not needed."""
        self._claimed.remove(row)
        self._free_rows.append(row)
        self._moves.append(Vacated((), (row,)))

    def publish(
        self, chain: Chain, tokens: Sequence[int], num_tokens: int, blocks: Sequence[int], row: int, trigger: str
    ) -> Checkpoint | None:
        """Makes a claimed row the state of tokens[:num_tokens], whose KV lies in `blocks`.

        None, and the row is free again, when there is one of the same text already.
        """
        if row not in self._claimed or not 1 <= num_tokens <= min(len(tokens), len(blocks) * self._size):
            raise StateError(f"row {row} cannot be published as a state of {num_tokens} of {len(tokens)} tokens")
        depth = (num_tokens - 1) // self._size
        tail = tuple(tokens[depth * self._size : num_tokens])
        node = self._roots.get(chain.key(tokens, 0))
        if node is None:
            node = Node(chain.key(tokens, 0), None, 0, 0)
            self._roots[node.key] = node
        for i in range(depth):
            key = chain.key(tokens, i + 1)
            child = node.children.get(key)
            if child is None:
                child = Node(key, node, blocks[i], i + 1)
                node.children[key] = child
                self._blocks.keep(blocks[i])
            node = child
        for each in node.tails:
            if each.tail == tail:
                self._touch(each)
                self.unclaim(row)
                return None
        self._claimed.remove(row)
        found = Checkpoint(num_tokens, node, tail, blocks[depth], row, trigger)
        self._blocks.keep(found.block)
        node.tails.append(found)
        self._checkpoints.add(found)
        self.written[trigger] += 1
        self._touch(found)
        self._order += 1
        heapq.heappush(self._heap, (found.value, self._order, found))
        return found

    def hit(self, checkpoint: Checkpoint | HostCheckpoint) -> None:
        """It served a request."""
        if isinstance(checkpoint, HostCheckpoint):
            self.host.touch(checkpoint)
            return
        checkpoint.hits = min(checkpoint.hits + 1, MOST_HITS)
        self._touch(checkpoint)

    def discard(self, checkpoint: Checkpoint) -> None:
        """Takes a checkpoint back whose text nobody was shown, unless somebody else went on from it by now."""
        if checkpoint.alive and not checkpoint.pins and not checkpoint.hits:
            self._drop(checkpoint)

    def distrust(self, checkpoint: Checkpoint | HostCheckpoint) -> None:
        """A request that made it, or went on from it, went wrong: nobody else shall."""
        if checkpoint.pins:
            return
        if isinstance(checkpoint, HostCheckpoint):
            self.host.forget(checkpoint)
        elif checkpoint.alive:
            self._drop(checkpoint)

    # --- room

    def make_room(self, num_blocks: int) -> bool:
        """Evicts until `num_blocks` blocks are free; False, and nothing is lost, when that cannot be."""
        if num_blocks > self._blocks.num_available:
            return False
        before = self._blocks.num_free
        while self._blocks.num_free < num_blocks:
            # Blocks may be held by several states of which each, dropped alone, frees nothing: then one by one.
            if not self._evict(for_blocks=True) and not self._evict(for_blocks=False):
                raise StateError("cached blocks cannot be evicted")
        self.evicted_blocks += self._blocks.num_free - before
        return True

    def _evict(self, *, for_blocks: bool) -> bool:
        """Drops the checkpoint of least value that nobody is reading; one that holds a block no lease holds, if so."""
        aside = []
        victim: Checkpoint | None = None
        while self._heap:
            entry = heapq.heappop(self._heap)
            each = entry[2]
            if not each.alive:
                continue
            if entry[0] < each.value:
                heapq.heappush(self._heap, (each.value, entry[1], each))
            elif each.pins or (for_blocks and not self._holds_alone(each)):
                aside.append(entry)
            else:
                victim = each
                break
        for entry in aside:
            heapq.heappush(self._heap, entry)
        if victim is None:
            return False
        self._clock = max(self._clock, victim.value)
        self.evictions += 1
        victim.parent.lost = True
        self._spill(victim)
        self._drop(victim)
        return True

    def _holds_alone(self, checkpoint: Checkpoint) -> bool:
        return any(not self._blocks.is_leased(block) for block in self._held(checkpoint))

    def _held(self, checkpoint: Checkpoint) -> Iterator[int]:
        """The blocks that dropping it lets go of."""
        yield checkpoint.block
        node = checkpoint.parent
        goes = not node.children and len(node.tails) == 1
        while goes and node.parent is not None:
            yield node.block
            node = node.parent
            goes = len(node.children) == 1 and not node.tails

    def _spill(self, checkpoint: Checkpoint) -> None:
        """The host tier takes the state and those blocks of its text that it does not have."""
        if not self.host.max_bytes:
            return
        nodes = _path(checkpoint.parent)
        taken = self.host.take(
            [node.key for node in nodes],
            [node.block for node in nodes],
            parent=checkpoint.parent.key,
            tail=checkpoint.tail,
            tail_block=checkpoint.block,
            num_tokens=checkpoint.num_tokens,
        )
        if taken is not None:
            self._moves.append(Spilled(checkpoint.row, taken[0].row, taken[1]))

    def _drop(self, checkpoint: Checkpoint) -> None:
        """Out of the tree, with every node that has lost its use."""
        checkpoint.alive = False
        self._checkpoints.remove(checkpoint)
        self._free_rows.append(checkpoint.row)
        self._blocks.drop(checkpoint.block)
        node = checkpoint.parent
        node.tails.remove(checkpoint)
        while not node.children and not node.tails:
            if node.parent is None:
                del self._roots[node.key]
                break
            self._blocks.drop(node.block)
            del node.parent.children[node.key]
            node = node.parent
        self._moves.append(Vacated(self._blocks.drain_vacated(), (checkpoint.row,)))

    def _touch(self, checkpoint: Checkpoint) -> None:
        """Its value: what it saves, by how likely that is asked for, and how recently it was (GreedyDual-Size)."""
        saved = checkpoint.num_tokens - self._nearest(checkpoint)
        likely = LIKELY[checkpoint.trigger] * (1 + checkpoint.hits)
        checkpoint.value = self._clock + saved * likely

    def _nearest(self, checkpoint: Checkpoint) -> int:
        """About how many tokens the next shorter state of the same text has: losing this one costs the difference."""
        n, node = checkpoint.num_tokens, checkpoint.parent
        shorter = [each.num_tokens for each in node.tails if each.num_tokens < n]
        while not shorter and node.parent is not None:
            node = node.parent
            shorter = [each.num_tokens for each in node.tails]
        return max(shorter, default=0)

    # --- books

    def fill(self, stats: EngineStats) -> None:
        """Writes the gauges and counters of the cache."""
        stats.kv_blocks_cached = self._blocks.num_cached
        stats.checkpoints = {"device": len(self._checkpoints), "host": self.host.num_checkpoints}
        stats.checkpoints_total = {"device": self.settings.num_checkpoints, "host": self.host.capacity}
        stats.checkpoints_written = dict(self.written)
        stats.checkpoint_evictions = self.evictions
        stats.kv_evicted_blocks = self.evicted_blocks
        stats.cache_query_tokens = self.query_tokens
        stats.cache_hit_tokens, stats.cache_lost_tokens = dict(self.hit_tokens), dict(self.lost_tokens)
        stats.resumed_tokens = self.resumed_tokens

    def holdings(self) -> Counter[int]:
        """How often the tree holds each block."""
        held = Counter(each.block for each in self._checkpoints)
        for node in self._nodes():
            held[node.block] += 1
        return held

    def check(self) -> None:
        """Raises unless every row is free, claimed or held by one checkpoint, and every node leads to a checkpoint."""
        rows = [*self._free_rows, *self._claimed, *(each.row for each in self._checkpoints)]
        if sorted(rows) != list(range(self.settings.num_checkpoints)):
            raise StateError(f"checkpoint rows leaked or are used twice: {len(rows)} accounted for")
        seen = 0
        for root in self._roots.values():
            for node in (root, *_below(root)):
                seen += len(node.tails)
                if not node.children and not node.tails:
                    raise StateError("KV is cached without any state that needs it")
                for each in node.tails:
                    sizes = each.num_tokens == node.depth * self._size + len(each.tail)
                    if not (sizes and each.alive and each.parent is node and 1 <= len(each.tail) <= self._size):
                        raise StateError(f"a checkpoint of {each.num_tokens} tokens hangs at depth {node.depth}")
        if seen != len(self._checkpoints):
            raise StateError(f"{len(self._checkpoints)} checkpoints, but {seen} in the tree")
        self.host.check()

    def _nodes(self) -> Iterator[Node]:
        for root in self._roots.values():
            yield from _below(root)


def _path(node: Node) -> list[Node]:
    """The nodes from the first block to this one."""
    found = []
    at: Node | None = node
    while at is not None and at.parent is not None:
        found.append(at)
        at = at.parent
    return found[::-1]


def _below(root: Node) -> Iterator[Node]:
    waiting = list(root.children.values())
    while waiting:
        node = waiting.pop()
        yield node
        waiting += node.children.values()

"""What a gateway's endpoint picker reads of every replica, many times a second: a few gauges, as bytes made in advance.

The names are those of two engines whose pages pickers know; where hybrids differ, the meaning is ours: docs/metrics.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from server.row import ratio


@dataclass(frozen=True, slots=True)
class Load:
    """How busy a replica is. `waiting` and `running`: generations. `usage`: 0 to 1 of what runs out first."""

    waiting: int
    running: int
    usage: float


@dataclass(frozen=True, slots=True)
class Dialect:
    """The names of the gauges, and of the labels that describe the cache."""

    waiting: str
    running: str
    usage: str
    cache: str
    block_size: str
    num_blocks: str


DIALECTS: dict[str, Dialect] = {
    "vllm": Dialect(
        waiting="vllm:num_requests_waiting",
        running="vllm:num_requests_running",
        usage="vllm:kv_cache_usage_perc",
        cache="vllm:cache_config_info",
        block_size="block_size",
        num_blocks="num_gpu_blocks",
    ),
    "sglang": Dialect(
        waiting="sglang:num_queue_reqs",
        running="sglang:num_running_reqs",
        usage="sglang:token_usage",
        cache="sglang:cache_config_info",
        block_size="page_size",
        num_blocks="num_pages",
    ),
}
DEFAULT_DIALECT = "vllm"


def cache_shape(choices: Mapping[str, str]) -> tuple[int, int]:
    """Tokens in a block and number of blocks, as a picker may count on them for the prefixes it remembers.

    `choices` are the engine's (`ModelInfo.choices`). A block of KV saves nothing without a state checkpoint at its end,
    so where there is a prefix cache a block reaches from one checkpoint to the next, and there are as many as both
    pools can hold.
    """
    block_size, num_blocks = int(choices.get("block_size", 0)), int(choices.get("kv_blocks", 0))
    if choices.get("prefix_cache") != "on":
        return block_size, num_blocks
    interval, checkpoints = int(choices["checkpoint_interval"]), int(choices["state_checkpoints"])
    return interval, min(block_size * num_blocks // interval, checkpoints)


def load_of(*, waiting: int, running: int, blocks: tuple[int, int], slots: tuple[int, int], ready: bool) -> Load:
    """`blocks` and `slots`: used, all. A replica that takes no requests looks full, never idle."""
    return Load(waiting, running, max(ratio(*blocks), ratio(*slots)) if ready else 1.0)


def escaped(value: str) -> str:
    """A label's value in the text format."""
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


class RouterPage:
    """Makes a page again only when `read` says something new."""

    def __init__(self, model_name: str, read: Callable[[], Load]) -> None:
        self._model = f'model_name="{escaped(model_name)}"'
        self._read = read
        self._cache = (0, 0)
        self._load: Load | None = None
        self._pages: dict[str, bytes] = {}

    def describe(self, choices: Mapping[str, str]) -> None:
        """An engine came up, and says how it is built."""
        self._cache = cache_shape(choices)
        self._pages.clear()

    def text(self, dialect: str) -> bytes:
        """The page in the classic text format; `dialect` is a key of DIALECTS."""
        load = self._read()
        if load != self._load:
            self._load = load
            self._pages.clear()
        page = self._pages.get(dialect)
        if page is None:
            page = self._pages[dialect] = self._render(DIALECTS[dialect], load)
        return page

    def _render(self, names: Dialect, load: Load) -> bytes:
        size, count = self._cache
        cache = f'{self._model},{names.block_size}="{size}",{names.num_blocks}="{count}"'
        gauges = (
            (names.waiting, self._model, f"{load.waiting}"),
            (names.running, self._model, f"{load.running}"),
            (names.usage, self._model, f"{load.usage:.4f}"),
            (names.cache, cache, "1"),
        )
        lines = (f"# TYPE {name} gauge\n{name}{{{labels}}} {value}\n" for name, labels, value in gauges)
        return "".join(lines).encode()

"""Stop strings: finds the first one completed, and holds back text that may become one."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Watches one text. What `feed` returns is safe to deliver; a matched stop string never is, not even partly.

    The string that is completed first wins, whatever the order of the list; of two completed by the same character the
    longer wins. This does not depend on how the text is cut into pieces.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._include = include
        self._held = ""
        self.matched: str | None = None

    @property
    def active(self) -> bool:
        """Whether there is anything to watch for."""
        return bool(self._stops)

    def feed(self, text: str) -> str:
        """The text that may be delivered now. Sets `matched` when a stop string is complete."""
        if not self._stops:
            return text
        buffer = self._held + text
        found = min(
            ((at + len(stop), at, stop) for stop in self._stops if (at := buffer.find(stop)) >= 0), default=None
        )
        if found is not None:
            end, start, self.matched = found
            self._held = ""
            return buffer[: end if self._include else start]
        keep = max(self._overlap(buffer, stop) for stop in self._stops)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep]

    def flush(self) -> str:
        """The text held back, once nothing can follow it."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Length of the longest end of `text` that begins `stop`."""
        for start in range(max(0, len(text) - len(stop) + 1), len(text)):
            if stop.startswith(text[start:]):
                return len(text) - start
        return 0

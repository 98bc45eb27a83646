"""Who may use the service: bearer keys, default-deny. Everything not named open here needs a key, existing or not."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

OPEN_PATHS = frozenset({"/live", "/ready", "/health", "/metrics", "/metrics/router"})


class Keys:
    """Digests of the accepted keys; the keys themselves are not kept."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = tuple(hashlib.sha256(key.encode()).digest() for key in keys)

    def allow(self, path: str, authorization: bytes | None) -> bool:
        """Whether a request may pass. Every key is compared, each in constant time."""
        if not self._digests or path in OPEN_PATHS:
            return True
        scheme, _, key = (authorization or b"").partition(b" ")
        given = hashlib.sha256(key.strip()).digest()
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        return any(matches) and scheme.lower() == b"bearer"

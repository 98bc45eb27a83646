"""Load of every kind at once: streams and not, long and short, shared prefixes, with and without speculation, mistakes,
leavers, and bursts beyond the queue."""

from __future__ import annotations

import asyncio
import collections
import itertools
import random
import time
from typing import Any

import httpx

SHARED = "You are the keeper of the harbour log. " * 12
TOPICS = ("a fox named Rimo", "the pink bell", "a red box", "the river", "Rita the mouse", "an old rock", "seven boats")
BURST = 20
CHAT = "/v1/chat/completions"
# What a load in little room leads to sooner or later, by its series.
SIGNS = {
    "preempted": "lockstep_request_preemptions_total{",
    "audited": 'lockstep_state_audit_total{model_name="lockstep-tiny",result="ok"}',
    "stopped": 'lockstep_requests_total{finish_reason="stop"',
}
KINDS = ("short", "stream", "leave", "plain", "whole", "long")
WANTED = {"200", "400", "429", "left", *SIGNS}


class Load:
    """Drives a server for `least` seconds, and on until every kind of answer was seen, or `most` seconds are over.

    `seen` counts status codes, streams cut off (`left`), and looks at /metrics that showed one of `SIGNS`.
    """

    def __init__(self, url: str, least: float, most: float) -> None:
        self._url = url
        self._started = time.monotonic()
        self._least, self._most = least, most
        self._random = random.Random(5)
        self.seen: collections.Counter[str] = collections.Counter()

    def run(self) -> float:
        """Returns when the last answer has come; the Unix time at which the last was asked for."""
        return asyncio.run(self._run())

    @property
    def _over(self) -> bool:
        passed = time.monotonic() - self._started
        return passed >= self._most or (passed >= self._least and set(self.seen) >= WANTED)

    async def _run(self) -> float:
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(base_url=self._url, timeout=300, limits=limits) as client:
            readers = [self._read(client, number) for number in range(len(KINDS))]
            work = asyncio.gather(*readers, self._burst(client), self._err(client), self._probe(client))
            while not self._over:
                await asyncio.sleep(0.2)
            end = time.time()
            await work
        return end

    async def _read(self, client: httpx.AsyncClient, number: int) -> None:
        """A reader who asks again and again, in each way in turn."""
        for kind in itertools.cycle((*KINDS[number:], *KINDS[:number])):
            if self._over:
                return
            if kind == "stream":
                await self._stream(client, self._chat(stream=True))
            elif kind == "leave":
                await self._stream(client, self._chat(stream=True, ignore_eos=True), leave_after=3)
            elif kind == "whole":
                await self._post(client, CHAT, self._chat(n=2))
            elif kind == "short":
                word = self._random.choice(("Zyxqw", "Flarn", "90210"))
                body = {"messages": [{"role": "user", "content": f"Repeat after me: {word}"}], "temperature": 0}
                await self._post(client, CHAT, body)
            elif kind == "plain":
                prompt = [self._random.randrange(300, 1200) for _ in range(self._random.choice((1, 20, 90)))]
                body = {"prompt": prompt, "max_tokens": 30, "ignore_eos": True, "speculation": {"num_drafts": 0}}
                await self._post(client, "/v1/completions", body)
            else:
                await self._post(client, CHAT, self._chat(max_tokens=150, ignore_eos=True))

    def _chat(self, **fields: Any) -> dict[str, Any]:
        topic = self._random.choice(TOPICS)
        messages = [{"role": "user", "content": f"Tell me a story about {topic}."}]
        if self._random.random() < 0.6:
            messages.insert(0, {"role": "system", "content": SHARED})
        temperature = self._random.choice((0, 0, 0.8))
        return {"messages": messages, "max_tokens": 60, "temperature": temperature, "seed": 3} | fields

    async def _stream(self, client: httpx.AsyncClient, body: dict[str, Any], leave_after: int = 0) -> None:
        async with client.stream("POST", CHAT, json=body) as response:
            self.seen[str(response.status_code)] += 1
            chunks = 0
            async for _ in response.aiter_lines():
                chunks += 1
                if leave_after and chunks > leave_after:
                    self.seen["left"] += 1
                    return

    async def _post(self, client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> None:
        response = await client.post(path, json=body)
        self.seen[str(response.status_code)] += 1

    async def _burst(self, client: httpx.AsyncClient) -> None:
        """More at once than may wait, and then a pause."""
        while not self._over:
            await asyncio.sleep(6)
            bodies = [self._chat(max_tokens=20) for _ in range(BURST)]
            await asyncio.gather(*(self._post(client, CHAT, body) for body in bodies))

    async def _err(self, client: httpx.AsyncClient) -> None:
        """What clients do wrong."""
        while not self._over:
            await self._post(client, "/v1/completions", {"prompt": [5] * 5000, "max_tokens": 5})
            await self._post(client, CHAT, self._chat(temperature=9))
            await client.get("/nope")
            await client.get("/v1/models/nobody")
            await asyncio.sleep(0.7)

    async def _probe(self, client: httpx.AsyncClient) -> None:
        """What clusters ask."""
        while not self._over:
            for path in ("/live", "/ready", "/health", "/metrics/router", "/v1/models"):
                await client.get(path)
            page = (await client.get("/metrics")).text
            for sign, series in SIGNS.items():
                if any(line.startswith(series) and not line.endswith(" 0.0") for line in page.splitlines()):
                    self.seen[sign] += 1
            await asyncio.sleep(1)
